"""The doors: ``compile``, ``verify``, checkpoints, and what the command line calls."""

from __future__ import annotations

from autopar.api.checkpointing import load_checkpoint, save_checkpoint
from autopar.api.compiling import compile, plan
from autopar.api.hugging_face import TrainerMixin, as_one_worker
from autopar.api.loading import shard_loader
from autopar.api.operators import register_op
from autopar.api.verifying import VerifyReport, verify
from autopar.runtime.module import close

__all__ = [
    "TrainerMixin",
    "VerifyReport",
    "as_one_worker",
    "close",
    "compile",
    "load_checkpoint",
    "plan",
    "register_op",
    "save_checkpoint",
    "shard_loader",
    "verify",
]
