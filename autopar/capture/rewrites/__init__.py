"""Rewrites that bring a traced program into normal form; see autopar.capture.normalise."""
