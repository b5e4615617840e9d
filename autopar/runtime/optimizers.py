"""Optimizers that hold a compiled model's parameters.

An optimizer built before the model was compiled holds parameters that nothing reads any more. It
is re-pointed while it has no state, and refused afterwards: it never steps orphans silently. The
state dict of an optimizer is keyed by parameter name: torch's positions mean other parameters on
another stage.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import ConfigError
from autopar.runtime.parameters import ParameterStore, StoredParameter, as_dtensor
from autopar.torch_compat import watch_optimizers

logger = logging.getLogger(__name__)

StateDict: TypeAlias = dict[str, object]
_CHECKPOINT_API = "torch.distributed.checkpoint.state_dict"
_FRAMES = 8  # callers between a state-dict hook and torch's checkpoint API, wrappers included
_STATES_OF = {"adamw": ("Adam", "AdamW"), "adam": ("Adam", "AdamW"), "sgd": ("SGD",)}


class OptimizerGuard:
    """Keeps optimizers and a compiled model's parameters together.

    Args:
        priced: Optimizer that the plan's memory was priced for, such as ``"adamw"``.

    Attributes:
        filler: On a rank without parameters: what an optimizer gets in their place, since torch
            refuses an empty one. Nothing reads it, and it is in no state dict.
    """

    def __init__(self, priced: str) -> None:
        self._priced = priced
        self.filler: torch.nn.Parameter | None = None
        self._store: ParameterStore | None = None
        self._names: dict[int, str] = {}
        self._stale = WeakIdKeyDictionary()
        self._named: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        reference = weakref.ref(self)

        def before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            guard = reference()
            if guard is not None:
                guard.before_step(optimizer)

        def on_group(optimizer: Optimizer) -> None:
            guard = reference()
            if guard is not None:
                guard.on_group(optimizer)

        def filler() -> torch.nn.Parameter | None:
            guard = reference()
            return None if guard is None else guard.filler

        handle = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, handle.remove)
        weakref.finalize(self, watch_optimizers(on_group, filler))

    def replace(self, old: Mapping[str, torch.nn.Parameter], store: ParameterStore) -> None:
        """Note that the parameters ``old`` (by first name) have given way to those of ``store``."""
        self._store = store
        self._names = store.by_identity()
        if not len(store):
            self.filler = torch.nn.Parameter(torch.zeros(1))
            self.filler.grad = torch.zeros(1)  # a gradient scaler wants to have seen one
            self._names[id(self.filler)] = ""
        for name, parameter in old.items():
            if id(parameter) not in self._names:
                self._stale[parameter] = name
        for optimizer in list(self._waiting):
            if self._holds_stale(optimizer) and not optimizer.state:
                self._repoint(optimizer)
            self.on_group(optimizer)

    def on_group(self, optimizer: Optimizer) -> None:
        """An optimizer was built, or was given another group."""
        if self._store is None:
            self._waiting.add(optimizer)
        elif optimizer not in self._named and self.holds_ours(optimizer):
            self._named.add(optimizer)
            name_state(optimizer, weakref.ref(self))
            self._check_kind(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Re-point or refuse an optimizer with stale parameters.

        Raises:
            ConfigError: It has stale parameters and state.
        """
        if self._store is None:
            return
        if self._holds_stale(optimizer):
            if optimizer.state:
                raise ConfigError(
                    f"{type(optimizer).__name__} holds parameters from before "
                    "autopar.compile() and has state for them, which can't be moved to the "
                    "shards; build the optimizer after compile(), or before its first step, and "
                    "load its state dict"
                )
            self._repoint(optimizer)
        self.on_group(optimizer)

    @property
    def store(self) -> ParameterStore:
        """The compiled model's parameters on this rank."""
        assert self._store is not None
        return self._store

    @property
    def names(self) -> Mapping[int, str]:
        """``id`` of each parameter -> first name; "" for :attr:`filler`."""
        return self._names

    def holds_ours(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds parameters of the compiled model, or the filler."""
        return any(
            id(p) in self._names for group in optimizer.param_groups for p in group["params"]
        )

    def _holds_stale(self, optimizer: Optimizer) -> bool:
        return any(p in self._stale for group in optimizer.param_groups for p in group["params"])

    def _repoint(self, optimizer: Optimizer) -> None:
        """Give every group this rank's own parameters in place of the stale ones, in order."""
        assert self._store is not None
        for group in optimizer.param_groups:
            labels = group.get("param_names")
            kept: list[torch.nn.Parameter] = []
            kept_labels: list[str] = []
            for position, parameter in enumerate(group["params"]):
                name = self._stale.get(parameter)  # type: ignore[no-untyped-call]
                if name is not None:
                    item = self._store.get(name)
                    if item is None:  # another stage's
                        continue
                    parameter = item.parameter
                kept.append(parameter)
                if labels is not None:
                    kept_labels.append(labels[position])
            group["params"][:] = kept
            if labels is not None:
                labels[:] = kept_labels
        logger.info("optimizer %s now holds the compiled model's parameters", type(optimizer))

    def _check_kind(self, optimizer: Optimizer) -> None:
        kinds = _STATES_OF.get(self._priced.lower(), (self._priced,))
        kind = type(optimizer).__name__
        if kind.lower() not in {name.lower() for name in kinds}:
            logger.warning(
                "optimizer %s is used, memory was priced for %r; pass optimizer=%r to "
                "autopar.compile()",
                kind,
                self._priced,
                kind.lower(),
            )


def name_state(optimizer: Optimizer, guard: weakref.ref[OptimizerGuard]) -> None:
    """Key the optimizer's state dict by parameter name, in both directions."""

    def after_save(owner: Optimizer, state_dict: StateDict) -> StateDict | None:
        current = guard()
        if current is None or _called_by_checkpoint_api():
            return None
        return _to_names(owner, state_dict, current.names)

    def before_load(owner: Optimizer, state_dict: StateDict) -> StateDict | None:
        current = guard()
        return None if current is None else _to_positions(owner, state_dict, current)

    optimizer.register_state_dict_post_hook(after_save)
    optimizer.register_load_state_dict_pre_hook(before_load)


def _called_by_checkpoint_api() -> bool:
    """Whether torch's checkpoint API asks: it maps positions to names itself, and needs them."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_globals.get("__name__") == _CHECKPOINT_API:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _to_names(optimizer: Optimizer, state_dict: StateDict, names: Mapping[int, str]) -> StateDict:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    keys: dict[object, object] = {
        position: names.get(id(parameter), position) for position, parameter in enumerate(held)
    }
    groups = state_dict["param_groups"]
    state = state_dict["state"]
    assert isinstance(groups, list)
    assert isinstance(state, dict)
    for group in groups:
        group["params"] = [keys[key] for key in group["params"] if keys[key] != ""]
    named = {keys.get(key, key): value for key, value in state.items()}
    return {**state_dict, "state": {key: value for key, value in named.items() if key != ""}}


def _to_positions(optimizer: Optimizer, state_dict: StateDict, guard: OptimizerGuard) -> StateDict:
    """A state dict with names as torch's ``load_state_dict`` wants it: keyed by position."""
    groups = state_dict["param_groups"]
    state = state_dict["state"]
    assert isinstance(groups, list)
    assert isinstance(state, dict)
    known = {key for group in groups for key in group["params"]}
    if known and not any(isinstance(key, str) for key in known):
        _check_positions(len(known), optimizer, guard.store)
        return state_dict
    # a checkpoint of several stages keeps one stage's list of names, and the state of all
    known |= {key for key in state if isinstance(key, str)}
    if len(groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"optimizer state dict has {len(groups)} parameter groups, the optimizer has "
            f"{len(optimizer.param_groups)}; build the optimizer with the same groups"
        )
    position = 0
    new_groups: list[StateDict] = []
    new_state: dict[object, object] = {}
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        first = position
        for parameter in group["params"]:
            name = guard.names.get(id(parameter), position)
            item = guard.store.get(str(name))
            if item is not None and name not in known:  # saved under another name of a tied weight
                aliases = guard.store.names[item.spec.name]
                name = next((alias for alias in aliases if alias in known), name)
            if name not in known and name != "":
                raise ConfigError(
                    f"optimizer state dict has no parameter {name!r}; it lists {len(known)} others"
                )
            if name in state:
                new_state[position] = _localised(state[name], item)
            position += 1
        new_groups.append({**saved, "params": list(range(first, position))})
    return {**state_dict, "state": new_state, "param_groups": new_groups}


def _check_positions(count: int, optimizer: Optimizer, store: ParameterStore) -> None:
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    if count != held or len(store) != len(store.every):
        raise ConfigError(
            f"optimizer state dict is keyed by position ({count} parameters; this rank holds "
            f"{held} of {len(store.every)}), and positions mean other parameters on another "
            "stage; save optimizer.state_dict() of a compiled model, which is keyed by name"
        )


def _localised(values: Mapping[str, object], item: StoredParameter | None) -> dict[str, object]:
    """One parameter's state with whole tensors cut to this rank's block."""
    return {key: _cut(value, item) for key, value in values.items()}


def _cut(value: object, item: StoredParameter | None) -> object:
    if item is None or not isinstance(value, torch.Tensor):
        return value
    parameter = item.parameter
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape or value.dim() == 0:
        return value
    if isinstance(value, DTensor):
        same_mesh = value.device_mesh == parameter.device_mesh
        if same_mesh and value.placements == parameter.placements:
            return value
        value = value.full_tensor()
    local = item.block.of(value).to(item.padded.device).clone()
    return as_dtensor(local, item.spec, parameter.device_mesh)
