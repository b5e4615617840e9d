"""The doors: ``compile``, ``verify``, checkpoints, and what the command line calls."""

from __future__ import annotations

from autopar.api.checkpointing import load_checkpoint, save_checkpoint
from autopar.api.compiling import compile
from autopar.api.verifying import verify

__all__ = ["compile", "load_checkpoint", "save_checkpoint", "verify"]
