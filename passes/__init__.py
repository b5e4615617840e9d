"""Rewrites of the programs that the plan decided; one file per pass, one list in :mod:`passes.pipeline`."""

DISTRIBUTION = "autopar"
