"""The public calls: planning and running, checking, checkpoints."""

from __future__ import annotations

from autopar.api.checkpointing import load_checkpoint, save_checkpoint
from autopar.api.compiling import compile, plan
from autopar.api.verifying import VerifyReport, verify

__all__ = ["VerifyReport", "compile", "load_checkpoint", "plan", "save_checkpoint", "verify"]
