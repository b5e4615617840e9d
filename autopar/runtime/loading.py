"""Batches of which every rank loads its own rows alone.

A :class:`ShardLoader` walks a ``DataLoader``'s batches as index lists, the same on every rank, and
fetches of each only the rows that this rank's stages read under the plan in force. Its position is
a number of global batches: a run may go on under another plan, and no sample is seen twice.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from autopar.capture.structure import flatten, map_tensors
from autopar.errors import ConfigError, InputError
from autopar.runtime.shares import LocalShare, ShareOrigin

T = TypeVar("T")
Collate = Callable[[list[object]], object]
_DIGEST_BYTES = 8
_SEED_STEP = 1_000_003  # a prime: seeds of neighbouring epochs do not meet those of other seeds


class _IndexLists(Protocol):
    """A batch sampler: lists of indices, and how many."""

    def __iter__(self) -> Iterator[list[int]]: ...

    def __len__(self) -> int: ...


class Rows(Protocol):
    """Which rows of a global batch a rank reads."""

    def __call__(self, size: int) -> tuple[int, ...]:
        """Positions of the rows in a batch of ``size``, ascending."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The rank that a loader reads for.

    Attributes:
        plan: Hash of the plan in force.
        rank: Global rank.
        rows: The rows that it needs.
    """

    plan: str
    rank: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class _Form:
    """What a batch looks like: learnt from one sample.

    Attributes:
        one: The batch of that sample alone.
        dims: Path of each tensor -> its batch dim, None if it does not grow with the batch.
    """

    one: object
    dims: Mapping[str, int | None]


class ShardLoader:
    """Gives a rank its rows of every batch of a ``DataLoader``.

    Iterating gives batches of the form that the loader's ``collate_fn`` makes; tensors that grow
    with the batch are :class:`~autopar.runtime.shares.LocalShare`, for the compiled model alone.

    Args:
        loader: Over a map-style dataset. Its order must be the same on every rank: a shuffling
            sampler is seeded with ``seed`` and the epoch here, any other sampler must see to it.
        reader: For whom.
        seed: Seed of the order.
    """

    def __init__(self, loader: DataLoader[object], reader: Reader, *, seed: int = 0) -> None:
        _check(loader)
        self._loader = loader
        self._reader = reader
        self._seed = seed
        self._epoch = 0
        self._given = 0
        self._resumed = False
        self._form: _Form | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._batches(self._epoch))

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``; a position inside it that was loaded stays."""
        if epoch != self._epoch:
            self._epoch, self._given, self._resumed = epoch, 0, False

    def state_dict(self) -> dict[str, int]:
        """The position: valid on any number of ranks, under any plan."""
        return {
            "epoch": self._epoch,
            "batches": self._given,
            "seed": self._seed,
            "samples": _length(self._loader),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            ConfigError: It is the position in other data, or in another order.
        """
        own = self.state_dict()
        for name, what in (("samples", "samples"), ("seed", "seed")):
            if state[name] != own[name]:
                raise ConfigError(
                    f"the loader's position was saved with {what} {state[name]}, this one has "
                    f"{own[name]}; resume with the same dataset and the same seed"
                )
        self._epoch, self._given, self._resumed = state["epoch"], state["batches"], True

    def __iter__(self) -> Iterator[object]:
        """The batches that are left of the epoch; afterwards the next epoch begins."""
        if not self._resumed:
            self._given = 0
        self._resumed = False
        epoch = self._epoch
        batches = [list(batch) for batch in self._batches(epoch)][self._given :]
        mine = [self._reader.rows(len(batch)) for batch in batches]
        form = self._learn(batches, mine)
        indices = [[b[row] for row in rows] for b, rows in zip(batches, mine, strict=True)]
        fetched = self._fetch(indices, epoch)
        for batch, rows, loaded in zip(batches, mine, fetched, strict=True):
            key = f"{epoch}:{self._given}:{batch}".encode()
            digest = hashlib.blake2b(key, digest_size=_DIGEST_BYTES).hexdigest()
            self._given += 1  # before it is out: who saves between two batches has used this one
            yield self._share(form, loaded, rows, len(batch), digest)
        self._epoch, self._given = epoch + 1, 0

    # ------------------------------------------------------------ order
    def _batches(self, epoch: int) -> _IndexLists:
        """The global batches of an epoch as lists of indices."""
        sampler = self._loader.batch_sampler
        assert sampler is not None
        if type(sampler) is BatchSampler:
            inner = self._seeded(sampler.sampler, epoch)
            return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
        assert isinstance(sampler, Sized)
        return self._seeded(sampler, epoch)

    def _seeded(self, sampler: T, epoch: int) -> T:
        """A copy of a sampler that draws by seed and epoch, where it draws."""
        own = copy.copy(sampler)
        if hasattr(own, "generator"):
            own.generator = self._generator(epoch)
        if hasattr(own, "set_epoch"):
            own.set_epoch(epoch)
        return own

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed * _SEED_STEP + epoch)

    # ------------------------------------------------------------ reading
    def _fetch(self, indices: list[list[int]], epoch: int) -> Iterator[object]:
        """This rank's part of each batch, collated; None where it has no rows."""
        if not any(indices):
            return iter([None] * len(indices))
        source = self._loader
        inner: DataLoader[object] = DataLoader(
            source.dataset,
            batch_sampler=indices,
            num_workers=source.num_workers,
            collate_fn=functools.partial(_collate_some, source.collate_fn),
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            generator=self._generator(epoch),  # the same seeds of workers on every rank
            prefetch_factor=source.prefetch_factor,
        )
        return iter(inner)

    def _learn(self, batches: list[list[int]], mine: Sequence[Sequence[int]]) -> _Form:
        """The form of a batch, from one sample; of this rank's own, if it has any."""
        if self._form is not None:
            return self._form
        if not batches:
            return _Form(None, {})
        own = next((b[r[0]] for b, r in zip(batches, mine, strict=True) if r), batches[0][0])
        sample = self._loader.dataset[own]
        one = self._loader.collate_fn([sample])
        two = flatten(self._loader.collate_fn([sample, sample]), root="batch")[1]
        dims = {
            path: _batch_dim(path, tensor, two.get(path))
            for path, tensor in flatten(one, root="batch")[1].items()
        }
        self._form = _Form(one, dims)
        return self._form

    def _share(
        self, form: _Form, loaded: object, rows: tuple[int, ...], size: int, batch: str
    ) -> object:
        origin = ShareOrigin(plan=self._reader.plan, rank=self._reader.rank, batch=batch)

        def wrap(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if path not in form.dims:
                raise InputError(
                    f"the batch has an entry {path!r} that its first sample had not; let the "
                    "dataset give every sample the same entries"
                )
            dim = form.dims[path]
            if dim is None:
                return tensor
            local = tensor if rows else tensor.narrow(dim, 0, 0)
            return LocalShare(local, rows, dim, size, origin)

        return map_tensors(
            loaded if rows else form.one, wrap, "batch" if _is_leaf(form.one) else ""
        )


def _collate_some(collate: Collate, samples: list[object]) -> object:
    return collate(samples) if samples else None


def _is_leaf(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _batch_dim(path: str, one: torch.Tensor, two: torch.Tensor | None) -> int | None:
    """The dim that grows with the number of samples."""
    shapes = f"{list(one.shape)} for one sample and "
    shapes += "nothing" if two is None else f"{list(two.shape)}"
    if two is None or one.dim() != two.dim():
        raise InputError(
            f"input {path!r} has {shapes} for two; give batches of one form, with one row a sample"
        )
    grown = [d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    if not grown:
        return None
    if len(grown) > 1 or (one.shape[grown[0]], two.shape[grown[0]]) != (1, 2):
        raise InputError(
            f"input {path!r} has {shapes} for two: which rows belong to which sample can't be "
            "seen; give one row a sample, or take the plain loader, which gives the global batch"
        )
    return grown[0]


def _length(loader: DataLoader[object]) -> int:
    return len(loader.dataset)  # type: ignore[arg-type]  # map-style: checked


def _check(loader: object) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"the loader is a {type(loader).__name__}; give a torch.utils.data.DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise ConfigError(
            f"{type(loader.dataset).__name__} has no rows to choose from; give a DataLoader with a "
            "map-style dataset and a batch size, or pass global batches"
        )
    for sampler in (loader.sampler, loader.batch_sampler):
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                "the DataLoader has a DistributedSampler, which cuts the data once more; give it "
                "shuffle=True: every rank gets its rows of the same global batch"
            )
