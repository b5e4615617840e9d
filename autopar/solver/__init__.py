"""Decides: splits, stages, recompute, schedule."""
