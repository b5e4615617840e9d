"""``autopar.shard_loader``: every rank loads only the rows that it needs."""

from __future__ import annotations

import functools

import torch
from torch.utils.data import DataLoader

from autopar.errors import ConfigError
from autopar.runtime.loading import Reader, ShardLoader
from autopar.runtime.module import is_compiled, state_of
from autopar.runtime.shares import needed_rows


def shard_loader(
    loader: DataLoader[object], model: torch.nn.Module, *, seed: int = 0
) -> ShardLoader:
    """A loader of the same global batches, of which this rank fetches only the rows it needs.

    The batches are given to ``model`` as global ones would be, and compute the same. Which rows a
    rank needs follows from the plan: those of its data coordinate, of all its micro-batches; none
    on a rank whose stages read no argument. One sample is fetched beforehand for its form.

    Args:
        loader: Batches of the global size over a map-style dataset. A shuffling sampler is seeded
            here, so that all ranks agree; other samplers must give every rank the same order.
        model: The compiled model, which must have its plan: compile it with ``inputs=``.
        seed: Seed of the order, mixed with the epoch.

    Raises:
        ConfigError: The model does not run here, or the loader cuts the data itself.
    """
    session = state_of(model).session if is_compiled(model) else None
    if session is None:
        raise ConfigError(
            f"{type(model).__name__} has no plan that runs here, so nobody knows which rows this "
            "rank needs; call autopar.compile(model, inputs=batch) under torchrun first"
        )
    rows = functools.partial(
        needed_rows, session.planned_programs, session.plan.mesh, session.place.rank
    )
    reader = Reader(plan=session.plan_hash, rank=session.place.rank, rows=rows)
    return ShardLoader(loader, reader, seed=seed)
