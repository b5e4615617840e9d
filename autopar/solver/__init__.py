"""Decides: splits, cuts, recompute, schedule. See the README beside this file."""
