"""Rewrites of the programs that the plan decided: a file per pass, one list in `pipeline.py`."""

DISTRIBUTION = "autopar"
