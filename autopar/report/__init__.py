"""Reports of plans and runs, for people."""
