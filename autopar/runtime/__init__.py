"""Runs the local programs of a plan: simulated ranks or torch.distributed."""
