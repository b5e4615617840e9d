"""Answers ``torch.distributed.checkpoint.state_dict`` for compiled models.

torch's own functions know one rank's parameters: of a model in stages they would call a stage's
part the full state, and they can't handle a parameter group that is empty on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from autopar.errors import ConfigError
from autopar.runtime.gathering import IncompatibleKeys, check_names, full_state, load_state
from autopar.runtime.optimizer_state import StateDict
from autopar.runtime.parameters import whole_tensor
from autopar.torch_compat import StateDictApi, route_state_dict_api

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from autopar.runtime.session import Session

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


class Options(Protocol):
    """What autopar reads of torch's ``StateDictOptions``."""

    full_state_dict: bool
    cpu_offload: bool
    ignore_frozen_params: bool
    strict: bool
    broadcast_from_rank0: bool
    flatten_optimizer_state_dict: bool


class CheckpointApi:
    """The routes of torch's API.

    Args:
        session_of: The running session of a model; None if the model is not a compiled one that
            runs.
    """

    def __init__(self, session_of: Callable[[torch.nn.Module], Session | None]) -> None:
        self._session_of = session_of
        self._torch: StateDictApi | None = None

    def route(self) -> None:
        """Start to answer."""
        if self._torch is None:
            self._torch = route_state_dict_api(
                lambda model: self._session_of(model) is not None,
                {
                    "get_model": self.get_model,
                    "set_model": self.set_model,
                    "get_optimizer": self.get_optimizer,
                    "set_optimizer": self.set_optimizer,
                },
            )

    def _session(self, model: torch.nn.Module) -> Session:
        session = self._session_of(model)
        assert session is not None
        return session

    def _api(self) -> StateDictApi:
        assert self._torch is not None
        return self._torch

    # ------------------------------------------------------------ the model
    def get_model(
        self, original: Callable[..., StateDict], model: torch.nn.Module, info: Options
    ) -> StateDict:
        """``get_model_state_dict``: shards, or whole tensors (on rank 0 if on the CPU)."""
        if not info.full_state_dict:
            return original(model, info)
        session = self._session(model)
        residents = session.residents
        found = full_state(
            residents, session.planned_programs, session.plan.mesh, session.place,
            everywhere=not info.cpu_offload,
        )  # fmt: skip
        frozen: set[str] = set()
        if info.ignore_frozen_params:
            specs = residents.store.every.values()
            frozen = {n for s in specs if not s.requires_grad for n in residents.names[s.name]}
        device = torch.device("cpu") if info.cpu_offload else session.place.device
        return {name: value.to(device) for name, value in found.items() if name not in frozen}

    def set_model(
        self,
        original: Callable[..., object],
        model: torch.nn.Module,
        state_dict: dict[str, torch.Tensor],
        info: Options,
    ) -> object:
        """``set_model_state_dict``."""
        del original
        session = self._session(model)
        if not info.broadcast_from_rank0:
            return model.load_state_dict(state_dict, strict=info.strict)
        names: list[str] = []
        for path, value in _broadcast(state_dict, session.place.device):
            names.append(path[0])
            load_state(session.residents, {path[0]: value}, strict=False)
        return IncompatibleKeys(*check_names(session.residents, names, strict=info.strict))

    # ------------------------------------------------------------ optimizers
    def get_optimizer(
        self,
        original: Callable[..., StateDict],
        model: torch.nn.Module,
        optimizers: Iterable[Optimizer],
        info: Options,
    ) -> StateDict:
        """``get_optimizer_state_dict``: state by parameter name; every rank must call it."""
        del original
        session = self._session(model)
        state: dict[str, object] = {}
        groups: list[StateDict] = []
        for optimizer in optimizers:
            self._start(session, optimizer)
            saved = optimizer.state_dict()
            state.update(saved[_STATE])
            groups.extend(saved[_GROUPS])
        if info.full_state_dict:
            state = _gather(session, state, everywhere=not info.cpu_offload)
            if info.cpu_offload and session.place.rank:
                return {}
        result: StateDict = {_STATE: state, _GROUPS: groups}
        if info.flatten_optimizer_state_dict:
            result = self._api().flatten_optimizer(result)
        if info.cpu_offload and not info.full_state_dict:
            result = self._api().offload(result, info)
        return result

    def set_optimizer(
        self,
        original: Callable[..., None],
        model: torch.nn.Module,
        optimizers: Iterable[Optimizer],
        state_dict: StateDict,
        info: Options,
    ) -> None:
        """``set_optimizer_state_dict``; every rank must call it."""
        del original
        session = self._session(model)
        if info.broadcast_from_rank0:
            state_dict = _from_first(state_dict, session.place.device)
        known = {alias for names in session.residents.names.values() for alias in names}
        for optimizer in optimizers:
            self._start(session, optimizer)
            nested = state_dict if _STATE in state_dict else _unflattened(state_dict, known)
            mine = _groups_of(nested, session.optimizer_groups(optimizer), session)
            if info.strict:
                _check_complete(mine, optimizer, session)
            optimizer.load_state_dict(mine)

    def _start(self, session: Session, optimizer: Optimizer) -> None:
        if not session.holds(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} holds no parameters of this compiled model; build it "
                "from model.parameters()"
            )
        self._api().start_optimizer(optimizer)


def _check_complete(state_dict: StateDict, optimizer: Optimizer, session: Session) -> None:
    state = state_dict[_STATE]
    assert isinstance(state, dict)
    for parameter in (p for group in optimizer.param_groups for p in group[_PARAMS]):
        names = session.names_of(parameter)
        if optimizer.state.get(parameter) and names and not any(name in state for name in names):
            raise ConfigError(
                f"optimizer state dict has no state for parameter {names[0]!r}, which is trained; "
                "load the state of this model's optimizer, or pass "
                "StateDictOptions(strict=False) to start it from zero"
            )


def _groups_of(nested: StateDict, wanted: Iterable[tuple[str, ...]], session: Session) -> StateDict:
    """The groups of one optimizer, out of those of all that were saved together."""
    groups, state = nested[_GROUPS], nested[_STATE]
    assert isinstance(groups, list)
    chosen: list[StateDict] = []
    for index, names in enumerate(wanted):
        aliases = {alias for name in names for alias in session.residents.names.get(name, (name,))}
        found = [g for g in groups if aliases & set(g[_PARAMS]) or not (names or g[_PARAMS])]
        if not found:
            raise ConfigError(
                f"optimizer state dict has no parameter group with {', '.join(names[:3])}; load "
                f"the state of this model's optimizer (group {index} of "
                f"{len(groups)} saved ones was looked for)"
            )
        chosen.append(found[0])
    return {_STATE: state, _GROUPS: chosen}


def _unflattened(flat: Mapping[str, object], known: set[str]) -> StateDict:
    """Keys such as ``state.layer.weight.exp_avg`` back to nested dicts.

    Parameters with the same values of a group's options come into the same group: which of these
    the optimizer wants, it says by names.
    """
    state: dict[str, dict[str, object]] = {}
    options: dict[str, StateDict] = {}
    for key, value in flat.items():
        table, _, rest = key.partition(".")
        parts = rest.split(".")
        for cut_at in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:cut_at])
            if name in known:
                entry = ".".join(parts[cut_at:])
                where = state if table == _STATE else options
                where.setdefault(name, {})[entry] = value
                break
    groups: list[StateDict] = []
    for name, values in options.items():
        for group in groups:
            if {k: v for k, v in group.items() if k != _PARAMS} == values:
                listed = group[_PARAMS]
                assert isinstance(listed, list)
                listed.append(name)
                break
        else:
            groups.append({**values, _PARAMS: [name]})
    return {_STATE: state, _GROUPS: groups}


# ---------------------------------------------------------------- whole states
def _gather(
    session: Session, state: Mapping[str, object], *, everywhere: bool
) -> dict[str, object]:
    """The state of all parameters, whole, on rank 0 or on all ranks."""
    store, mesh, place = session.residents.store, session.plan.mesh, session.place
    mine = {name: _shapes(values) for name, values in state.items() if store.get(name) is not None}
    tables: list[dict[str, dict[str, object]]] = [mine]
    if place.is_distributed:
        tables = [{}] * place.world_size
        dist.all_gather_object(tables, mine)
    result: dict[str, object] = {}
    for name, spec in store.every.items():
        source = mesh.rank_of(mesh.pipeline_rank(spec.owner), 0, 0)
        whole: dict[str, object] = {}
        held = state.get(name)
        for key, shape in tables[source].get(name, {}).items():
            value = held[key] if isinstance(held, Mapping) and store.get(name) else shape
            if isinstance(shape, _Tensor):
                value = _whole_everywhere(value, shape, source, session)
            whole[key] = value
        if whole and (everywhere or place.rank == 0):
            result[name] = whole
    return result


class _Tensor:
    """Shape and dtype of a tensor that travels."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(value.shape), value.dtype


def _shapes(values: object) -> dict[str, object]:
    assert isinstance(values, Mapping)
    return {k: _Tensor(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def _whole_everywhere(value: object, like: _Tensor, source: int, session: Session) -> torch.Tensor:
    device = session.place.device
    if isinstance(value, torch.Tensor):
        here = whole_tensor(value).detach().to(device).contiguous().clone()
    else:
        here = torch.empty(like.shape, dtype=like.dtype, device=device)
    if session.place.is_distributed:
        dist.broadcast(here, source)
    return here.cpu()


def _broadcast(
    tree: Mapping[str, object], device: torch.device
) -> Iterable[tuple[tuple[str, ...], torch.Tensor]]:
    """Path and value of every tensor of rank 0's nested dict, one at a time, on every rank."""
    flat = list(_tensors(tree, ()))
    box: list[object] = [[(path, _Tensor(value)) for path, value in flat]]
    dist.broadcast_object_list(box, 0)
    table = dict(flat)
    listed = box[0]
    assert isinstance(listed, list)
    for path, like in listed:
        if dist.get_rank() == 0:
            value = whole_tensor(table[path]).detach().to(device).contiguous()
        else:
            value = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.broadcast(value, 0)
        yield path, value


def _tensors(tree: object, path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, (*path, key))


def _from_first(state_dict: StateDict, device: torch.device) -> StateDict:
    """Rank 0's state dict of an optimizer, on every rank."""
    box: list[object] = [_without_tensors(state_dict)]
    dist.broadcast_object_list(box, 0)
    result = box[0]
    assert isinstance(result, dict)
    for path, value in _broadcast(state_dict, device):
        table = result
        for key in path[:-1]:
            table = table.setdefault(key, {})
        table[path[-1]] = value.clone()
    return result


def _without_tensors(tree: Mapping[str, object]) -> dict[str, object]:
    return {
        key: _without_tensors(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if not isinstance(value, torch.Tensor)
    }
