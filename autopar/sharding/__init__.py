"""Placements, operator rules, and the local programs that follow from a plan's splits."""
