"""``autopar.save_checkpoint`` and ``autopar.load_checkpoint``: to go on as if unbroken."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch

from autopar.errors import ConfigError
from autopar.runtime import checkpoint
from autopar.runtime.module import running_session
from autopar.runtime.session import Session

Folder = str | PathLike[str]


def save_checkpoint(
    path: Folder,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: object,
) -> None:
    """Write weights, buffers, optimizer state and the dropout counter, each rank its shards.

    Every rank must call it. It is a directory of ``torch.distributed.checkpoint``, which opens
    under any plan and in plain torch. A job that is killed while it saves leaves the old one.

    Args:
        path: Directory that all ranks see; replaced if it is there.
        model: A compiled model that runs.
        optimizer: Its optimizer.
        extra: What else to keep, by name: a scheduler, a loader (by their ``state_dict()``), or
            plain values. Rank 0's are kept.

    Raises:
        ConfigError: The model does not run, or the optimizer is another model's.
    """
    checkpoint.save(Path(path), _running(model, "save_checkpoint"), optimizer, extra)


def load_checkpoint(
    path: Folder,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: object,
) -> dict[str, object]:
    """Go on from a checkpoint, under any plan and on any number of devices.

    Every rank must call it.

    Args:
        path: Directory that :func:`save_checkpoint` wrote.
        model: The same model, compiled and running, under any plan.
        optimizer: Of the same parameter groups; takes up state, step counts and learning rates.
        extra: Objects with ``load_state_dict()``, by the names that they were saved under.

    Returns:
        Saved values that ``extra`` does not name.

    Raises:
        ConfigError: There is no complete checkpoint, or it is another model's; on every rank, and
            before anything is changed.
    """
    return checkpoint.load(Path(path), _running(model, "load_checkpoint"), optimizer, extra)


def _running(model: torch.nn.Module, what: str) -> Session:
    session = running_session(model)
    if session is None:
        raise ConfigError(
            f"{what}: this {type(model).__name__} is not a compiled model that runs; pass inputs= "
            "to autopar.compile(), or call the model once before"
        )
    return session
