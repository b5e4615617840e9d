"""Checkpoints that open under any plan, on any number of devices.

A checkpoint is a directory of ``torch.distributed.checkpoint`` with the entries ``model``,
``optim``, ``autopar`` (seed and step of dropout) and ``extra``. Every rank writes its own shards.
It is written beside its path and then renamed, so that a job that is killed while it saves leaves
the old one. What is wrong with a checkpoint is found out before anything is loaded, and every rank
raises the same.
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.optim.optimizer import Optimizer

from autopar.errors import ConfigError
from autopar.runtime.optimizer_state import StateDict, empty_state, own_groups
from autopar.runtime.session import Session
from autopar.runtime.surgery import Residents
from autopar.runtime.writes import take_up_writes

_MODEL, _OPTIMIZER, _COUNTERS, _EXTRA = "model", "optim", "autopar", "extra"
_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_PARTIAL, _PREVIOUS = ".partial", ".previous"
_METADATA = ".metadata"
_SHOWN = 5
_OF_SCHEDULES = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", _PARAMS}
    | {"param_names"}
)


def save(
    path: Path, session: Session, optimizer: Optimizer | None, extra: Mapping[str, object]
) -> None:
    """Write a checkpoint, or replace one; every rank must call it.

    Args:
        path: Directory, seen by all ranks.
        session: The model's.
        optimizer: Its optimizer.
        extra: Further objects by name, rank 0's: those with a ``state_dict`` by that, others as
            they are.

    Raises:
        ConfigError: The optimizer is another model's, a file is in the way, or something in
            ``extra`` can't be written; on every rank, and before anything is.
    """
    partial, previous = _beside(path, _PARTIAL), _beside(path, _PREVIOUS)
    state: dict[str, object] = {
        _MODEL: tensors_of(session.residents, None),
        _COUNTERS: dict(session.counters),
    }
    if optimizer is not None:
        _check_ours(session, optimizer)
        state[_OPTIMIZER] = optimizer.state_dict()
    wrong = ""
    if session.place.rank == 0:
        state[_EXTRA], wrong = _all_packed(extra)
        if path.exists() and not path.is_dir():
            wrong = f"save_checkpoint: {path} is a file; name a directory, or remove it"
    _raise_on_all(session, wrong)
    if session.place.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    _barrier(session)
    with _quiet():
        save_state(state, checkpoint_id=partial, no_dist=not session.place.is_distributed)
    _barrier(session)
    if session.place.rank == 0:
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            path.rename(previous)
        partial.rename(path)
        shutil.rmtree(previous, ignore_errors=True)
    _barrier(session)


def load(
    path: Path, session: Session, optimizer: Optimizer | None, extra: Mapping[str, object]
) -> dict[str, object]:
    """Read a checkpoint of :func:`save` into a model, its optimizer and other objects.

    Args:
        path: Its directory.
        session: The model's; its weights, buffers and counters are replaced.
        optimizer: Takes up the saved state and options.
        extra: Objects with ``load_state_dict`` by the name that they were saved under.

    Returns:
        What was saved under names that ``extra`` does not have.

    Raises:
        ConfigError: There is none, it is not complete, or it is another model's.
    """
    found = path
    if not path.exists() and _beside(path, _PREVIOUS).exists():
        found = _beside(path, _PREVIOUS)  # the job was killed between two renames
    metadata, wrong = _metadata(found)
    if metadata is not None:
        wrong = _differences(found, metadata, session, optimizer, extra)
    _raise_on_all(session, wrong)
    assert metadata is not None
    entries = _entries(metadata)
    weights = tensors_of(session.residents, entries.get(_MODEL, {}))
    counters = dict.fromkeys(session.counters, 0)
    packed: dict[str, object] = dict.fromkeys(_names_under(entries, _EXTRA), b"")
    state: dict[str, object] = {_MODEL: weights, _COUNTERS: counters, _EXTRA: packed}
    wanted: StateDict = {}
    if optimizer is not None:
        wanted = _optimizer_target(optimizer, session, metadata)
        state[_OPTIMIZER] = wanted
    with _quiet():
        load_state(state, checkpoint_id=found, no_dist=not session.place.is_distributed)
    if optimizer is not None:
        optimizer.load_state_dict(wanted)
    session.set_counters(counters)
    rest: dict[str, object] = {}
    for name, data in packed.items():
        assert isinstance(data, bytes)
        value = torch.load(io.BytesIO(data), weights_only=False)
        if name in extra:
            extra[name].load_state_dict(value)  # type: ignore[attr-defined]  # checked before
        else:
            rest[name] = value
    return rest


def tensors_of(residents: Residents, names: Mapping[str, object] | None) -> dict[str, torch.Tensor]:
    """This rank's parameters and saved buffers, the memory that the model itself reads.

    Args:
        residents: What lives in the module.
        names: Take one name of each tensor, one of these; None for all names of each.
    """
    take_up_writes(residents)
    held = {item.spec.name: item.parameter.detach() for item in residents.store}
    held |= {n: residents.buffers[n] for n in residents.saved_order if n in residents.buffers}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in held.items():
        aliases = residents.names[name]
        if names is not None:
            aliases = tuple(alias for alias in aliases if alias in names)[:1]
        result.update(dict.fromkeys(aliases, tensor))
    return result


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a single process saves alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield


def _barrier(session: Session) -> None:
    if session.place.is_distributed:
        dist.barrier()


def _check_ours(session: Session, optimizer: Optimizer) -> None:
    if not session.holds(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} holds no parameters of this compiled model; build it "
            "from model.parameters() after autopar.compile()"
        )


def _packed(value: object) -> bytes:
    held = value.state_dict() if hasattr(value, "state_dict") else value
    buffer = io.BytesIO()
    torch.save(held, buffer)
    return buffer.getvalue()


def _all_packed(extra: Mapping[str, object]) -> tuple[dict[str, bytes], str]:
    """The bytes of every entry, and what is wrong with one that has none."""
    packed: dict[str, bytes] = {}
    for name, value in extra.items():
        try:
            packed[name] = _packed(value)
        except Exception as error:  # pickling runs code of the value's own
            return {}, (
                f"save_checkpoint: {name}= is a {type(value).__name__} that can't be written "
                f"({type(error).__name__}: {error}); pass plain values, or an object with "
                "state_dict()"
            )
    return packed, ""


# ---------------------------------------------------------------- is it the right one
def _metadata(path: Path) -> tuple[Metadata | None, str]:
    """The table of contents of a checkpoint, or what is wrong with it."""
    if not path.is_dir():
        return None, f"there is no checkpoint at {path}; give the directory that was saved to"
    if not (path / _METADATA).is_file():
        return None, (
            f"{path} is not a complete checkpoint: its table of contents, {_METADATA}, is missing, "
            "as after a save that was cut off; load an older one"
        )
    try:
        return FileSystemReader(path).read_metadata(), ""
    except Exception as error:  # any error of unpickling a damaged file
        return None, f"{path / _METADATA} can't be read ({error!r}); load an older checkpoint"


def _entries(metadata: Metadata) -> dict[str, dict[str, tuple[str, tuple[str, ...]]]]:
    """First key -> second key -> what follows in one of its paths, and the flat name."""
    result: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {}
    for flat, path in (metadata.planner_data or {}).items():
        if len(path) > 1:
            keys = tuple(map(str, path))
            result.setdefault(keys[0], {})[keys[1]] = (flat, keys[2:])
    return result


def _names_under(entries: Mapping[str, Mapping[str, object]], key: str) -> list[str]:
    return list(entries.get(key, {}))


def _differences(
    path: Path,
    metadata: Metadata,
    session: Session,
    optimizer: Optimizer | None,
    extra: Mapping[str, object],
) -> str:
    """What forbids to load it; "" if nothing does."""
    return (
        _missing_bytes(path, metadata)
        or _other_model(path, metadata, session.residents)
        or _other_extra(path, metadata, optimizer, extra)
    )


def _missing_bytes(path: Path, metadata: Metadata) -> str:
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        file = path / name
        size = os.path.getsize(file) if file.is_file() else 0
        if size < end:
            return (
                f"{path} is not a complete checkpoint: {name} has {size} bytes of {end}; load an "
                "older one"
            )
    return ""


def _other_model(path: Path, metadata: Metadata, residents: Residents) -> str:
    saved = _entries(metadata).get(_MODEL)
    if not saved:
        return (
            f"{path} has no entry {_MODEL!r}; give a checkpoint of autopar.save_checkpoint(), or "
            'of torch.distributed.checkpoint.save({"model": ..., "optim": ...})'
        )
    shapes = {name: spec.meta.shape for name, spec in residents.store.every.items()}
    shapes |= {name: residents.buffer_metas[name].shape for name in residents.saved_order}
    aliases = {alias for name in shapes for alias in residents.names[name]}
    missing = [n for n in shapes if not any(alias in saved for alias in residents.names[n])]
    unexpected = [name for name in saved if name not in aliases]
    if missing or unexpected:
        return (
            f"{path} is the checkpoint of another model: {len(missing)} names are missing "
            f"({_some(missing)}), {len(unexpected)} unexpected ({_some(unexpected)}); build the "
            "model that was saved"
        )
    for name, shape in shapes.items():
        alias = next(a for a in residents.names[name] if a in saved)
        entry = metadata.state_dict_metadata[saved[alias][0]]
        if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) != tuple(shape):
            return (
                f"{path} is the checkpoint of another model: {alias!r} has shape "
                f"{tuple(entry.size)} there and {tuple(shape)} here; build the model that was saved"
            )
    return ""


def _other_extra(
    path: Path, metadata: Metadata, optimizer: Optimizer | None, extra: Mapping[str, object]
) -> str:
    entries = _entries(metadata)
    if optimizer is not None and _OPTIMIZER not in entries:
        return f"{path} was saved without an optimizer; load it without one"
    if optimizer is not None and (wrong := _other_optimizer(path, metadata, optimizer)):
        return wrong
    saved = _names_under(entries, _EXTRA)
    for name, value in extra.items():
        if name not in saved:
            return f"{path} has no entry {name!r}, it has {_some(saved)}; leave {name}= out"
        if not hasattr(value, "load_state_dict"):
            return (
                f"{name}= is a {type(value).__name__} without load_state_dict(); leave it out: its "
                "value is in the result"
            )
    return ""


def _other_optimizer(path: Path, metadata: Metadata, optimizer: Optimizer) -> str:
    """Whether the saved options are another kind's; those that schedules add do not count.

    Versions of torch add options to a kind, so that only a difference both ways is another one.
    """
    saved = {
        str(keys[3])
        for keys in (metadata.planner_data or {}).values()
        if len(keys) > 3 and keys[:2] == (_OPTIMIZER, _GROUPS)
    }
    own = {key for group in optimizer.param_groups for key in group}
    there, here = sorted(saved - own - _OF_SCHEDULES), sorted(own - saved - _OF_SCHEDULES)
    if not (there and here):
        return ""
    return (
        f"{path} has the state of another optimizer than {type(optimizer).__name__}: its options "
        f"{_some(there)} are unknown here, and {_some(here)} are not there; build the optimizer "
        "that was saved, or load without one"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN])) or "none"
    return shown + (", ..." if len(names) > _SHOWN else "")


def _raise_on_all(session: Session, wrong: str) -> None:
    """Raise the first rank's complaint on every rank."""
    every = [wrong]
    if session.place.is_distributed:
        every = [""] * session.place.world_size
        dist.all_gather_object(every, wrong)
    first = next((text for text in every if text), "")
    if first:
        raise ConfigError(first)


# ---------------------------------------------------------------- optimizer
def _optimizer_target(optimizer: Optimizer, session: Session, metadata: Metadata) -> StateDict:
    """An empty state dict of this rank's parameters, with all that was saved of each."""
    _check_ours(session, optimizer)
    names = {name for group in own_groups(optimizer, session.own_names) for name in group}
    state: dict[str, dict[str, object]] = {}
    groups: dict[int, StateDict] = {}
    first_name = {a: n for n in names for a in session.residents.names.get(n, (n,))}
    for flat, path in metadata.planner_data.items():
        if path[0] != _OPTIMIZER:
            continue
        entry = metadata.state_dict_metadata[flat]
        if path[1] == _GROUPS:
            _place(groups.setdefault(int(path[2]), {}), path[3:], None)
        elif path[1] == _STATE and path[2] in first_name:
            item = session.residents.store.get(first_name[path[2]])
            value: object = None
            if isinstance(entry, TensorStorageMetadata):
                value = empty_state(entry.size, entry.properties.dtype, item)
            _place(state.setdefault(path[2], {}), path[3:], value)
    return {_STATE: state, _GROUPS: [groups[index] for index in sorted(groups)]}


def _place(table: dict[str, object], path: tuple[str | int, ...], value: object) -> None:
    for key in path[:-1]:
        inner = table.setdefault(str(key), {})
        assert isinstance(inner, dict)
        table = inner
    table[str(path[-1])] = value
