"""Optimizers that hold a compiled model's parameters.

An optimizer built before the model was compiled holds parameters that nothing reads any more. It
is re-pointed while it has no state, and refused afterwards: it never steps orphans silently. The
state dict of an optimizer is keyed by parameter name: torch's positions mean other parameters on
another stage.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import ConfigError
from autopar.plan.types import Plan
from autopar.runtime.adafactor import route_adafactor
from autopar.runtime.host_state import HostState, keep_on_host
from autopar.runtime.optimizer_memory import check_memory
from autopar.runtime.optimizer_state import (
    GroupNames,
    StateDict,
    merge_groups,
    own_groups,
    to_names,
    to_positions,
)
from autopar.runtime.parameters import ParameterStore
from autopar.torch_compat import watch_optimizers

logger = logging.getLogger(__name__)


class OptimizerGuard:
    """Keeps optimizers and a compiled model's parameters together.

    Args:
        priced: Optimizer that the plan's memory was priced for, such as ``"adamw"``.

    Attributes:
        filler: Where other ranks may have parameters that an optimizer is built for and this rank
            has none of them: what it gets in their place, since torch refuses an empty one.
            Nothing reads it, and it is in no state dict.
    """

    def __init__(self, priced: str) -> None:
        self._priced = priced
        self.filler: torch.nn.Parameter | None = None
        self._store: ParameterStore | None = None
        self._names: dict[int, str] = {}
        self._stale = WeakIdKeyDictionary()
        self._named: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._born: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._shared: weakref.WeakKeyDictionary[Optimizer, tuple[GroupNames, GroupNames]]
        self._shared = weakref.WeakKeyDictionary()
        self._on_host: weakref.WeakKeyDictionary[Optimizer, HostState]
        self._on_host = weakref.WeakKeyDictionary()
        self._count = 0
        self._is_distributed = False
        self._plan: Plan | None = None
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
        route_adafactor()

    def replace(
        self,
        old: Mapping[str, torch.nn.Parameter],
        store: ParameterStore,
        plan: Plan | None = None,
        *,
        distributed: bool = False,
    ) -> None:
        """Note that the parameters ``old`` (by first name) have given way to those of ``store``.

        Args:
            old: The user's own parameters.
            store: This rank's.
            plan: What an optimizer's memory is compared with.
            distributed: Whether other ranks hold parameters too.
        """
        self._store = store
        self._is_distributed = distributed
        self._plan = plan
        self._names = store.by_identity()
        if distributed and (not len(store) or (plan is not None and plan.mesh.pp > 1)):
            self.filler = torch.nn.Parameter(torch.zeros(1))
            self.filler.grad = torch.zeros(1)  # a gradient scaler wants to have seen one
            self._names[id(self.filler)] = ""
        for name, parameter in old.items():
            if id(parameter) not in self._names:
                self._stale[parameter] = name
        for optimizer in sorted(self._born, key=lambda known: self._born[known]):
            if self._holds_stale(optimizer) and not optimizer.state:
                self._repoint(optimizer)
            self.on_group(optimizer)

    def on_group(self, optimizer: Optimizer) -> None:
        """An optimizer was built, or was given another group."""
        if self._store is None:
            self._born.setdefault(optimizer, len(self._born))
        elif optimizer not in self._named and self.holds_ours(optimizer):
            self._named[optimizer] = self._count
            self._count += 1
            name_state(optimizer, weakref.ref(self))
            if self._plan is not None and self._plan.offload:
                self._on_host[optimizer] = keep_on_host(optimizer)
            if self._plan is not None:
                check_memory(optimizer, self._priced, self._plan, self.store.every.values())

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

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps parameters of this model."""
        return optimizer in self._named

    def has_news(self) -> bool:
        """Whether an optimizer has groups that the other ranks have not been told of."""
        return any(
            optimizer not in self._shared
            or self._shared[optimizer][0] != own_groups(optimizer, self._names)
            for optimizer in list(self._named)
        )

    def groups(self, optimizer: Optimizer) -> GroupNames:
        """Names in each group of an optimizer over all ranks.

        Collective where it has changed since the last step: then every rank must call it.
        """
        own = own_groups(optimizer, self._names)
        if not self._is_distributed:
            return own
        if optimizer not in self._shared or self._shared[optimizer][0] != own:
            self.share_groups()
        return self._shared[optimizer][1]

    def share_groups(self) -> None:
        """Tell the other ranks which parameters this rank's optimizers have; collective."""
        mine = {number: own_groups(o, self._names) for o, number in list(self._named.items())}
        every: list[dict[int, GroupNames]] = [{}] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        order = {name: position for position, name in enumerate(self.store.every)}
        for optimizer, number in list(self._named.items()):
            parts = [table[number] for table in every if number in table]
            self._shared[optimizer] = (mine[number], merge_groups(parts, order))

    @property
    def in_stages(self) -> bool:
        """Whether ranks hold different parameters."""
        if self._plan is None:
            return False
        return self._plan.mesh.pp > 1 or self._plan.mesh.num_ranks < self._plan.num_devices

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


def name_state(optimizer: Optimizer, guard: weakref.ref[OptimizerGuard]) -> None:
    """Key the optimizer's state dict by parameter name, in both directions."""

    def after_save(owner: Optimizer, state_dict: StateDict) -> StateDict | None:
        current = guard()
        if current is None:
            return None
        return to_names(owner, state_dict, current.names, current.groups(owner))

    def before_load(owner: Optimizer, state_dict: StateDict) -> StateDict | None:
        current = guard()
        if current is None:
            return None
        return to_positions(
            owner, state_dict, current.names, current.store, current.groups(owner),
            in_stages=current.in_stages,
        )  # fmt: skip

    optimizer.register_state_dict_post_hook(after_save)
    optimizer.register_load_state_dict_pre_hook(before_load)
