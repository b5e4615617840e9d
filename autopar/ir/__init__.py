"""The captured program as the solver sees it: operators over named values, immutable."""
