"""The public calls: :func:`compile`, :func:`plan` and :func:`verify`."""

from __future__ import annotations

from autopar.api.compiling import compile, plan
from autopar.api.hugging_face import TrainerMixin, as_one_worker
from autopar.api.loading import shard_loader
from autopar.api.verifying import VerifyReport, verify

__all__ = [
    "TrainerMixin",
    "VerifyReport",
    "as_one_worker",
    "compile",
    "plan",
    "shard_loader",
    "verify",
]
