"""The user's module with a compiled forward.

The module stays the object that it was: its class is extended by :class:`CompiledModule` under the
same name, so that ``isinstance``, ``config``, ``train()`` and ``eval()`` keep working.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch

from autopar.capture.calls import ModelCall, bind_call
from autopar.cluster import Cluster
from autopar.errors import ConfigError
from autopar.plan.answers import ParamExplanation, PlanExplanation, WhyNot
from autopar.plan.types import Plan
from autopar.runtime.checkpoint_api import CheckpointApi
from autopar.runtime.gathering import IncompatibleKeys, full_state, load_state
from autopar.runtime.optimizers import OptimizerGuard
from autopar.runtime.pretrained import check_export_options, check_whole
from autopar.runtime.pretrained import load as load_directory
from autopar.runtime.pretrained import save as save_directory
from autopar.runtime.session import Session
from autopar.torch_compat import FIRST_ATTRIBUTE_OF_DDP, take_call_hooks
from autopar.units import parse_bytes

if TYPE_CHECKING:
    from autopar.solver.replan import Replan

_STATE = "_autopar_state"
_BATCH = "batch"
_EXTRA_STATE = "_extra_state"  # torch's name for what a module keeps besides tensors
_NO_COPY = (
    "{what} of a compiled {name}: its programs and connections belong to this one object; build "
    "the model again, compile it with the same plan, and load_state_dict(model.state_dict()) "
    "(for a file: autopar.save_checkpoint(), or model.full_state_dict())"
)

Launch = Callable[[torch.nn.Module, ModelCall], Session]
"""Capture and plan a first call, and make it ready to run; raises where it can't run."""


class Questions(Protocol):
    """Who answers what is asked about a plan and takes the model."""

    def explain(self, pattern: str | None) -> PlanExplanation | ParamExplanation:
        """What binds and who lost, or how parameters are split."""
        ...

    def why_not(self, constraints: Mapping[str, object]) -> WhyNot:
        """What constraints would do."""
        ...

    def replan(
        self,
        devices: int | str | os.PathLike[str] | Cluster | None,
        lost: tuple[int, ...],
        slower: Mapping[int, float],
        *,
        thorough: bool,
        checkpoint_bytes_per_s: float | None = None,
    ) -> Replan:
        """The plan for a changed cluster, and what going there takes."""
        ...


@dataclass(slots=True, kw_only=True)
class CompiledState:
    """What a compiled module knows.

    Attributes:
        launch: Makes the session at the first call; raises in a process that only plans.
        guard: Keeps optimizers with the parameters; None in a process that only plans.
        has_loss: Whether a loss function is part of the call.
        takes_batch: Whether that function is given an argument ``batch`` beside the model's.
        plan: Once there is one.
        session: Once the model runs.
        own_forward: A ``forward`` that stood on the object and not on its class.
        hooks: Tables of the hooks of calls that stood on the module: they are part of what is
            captured. Hooks that come later run around the compiled call.
        report: Text of the plan's report.
        planning_s: Seconds that planning took in this process, by phase.
        ask: Gives who answers questions about the plan; None while there is no plan.
    """

    launch: Launch
    guard: OptimizerGuard | None
    has_loss: bool
    takes_batch: bool
    report: Callable[[Plan], str]
    plan: Plan | None = None
    session: Session | None = None
    own_forward: Callable[..., object] | None = field(default=None)
    hooks: dict[str, object] = field(default_factory=dict)
    planning_s: dict[str, float] = field(default_factory=dict)
    ask: Callable[[], Questions] | None = field(default=None)


def state_of(model: torch.nn.Module) -> CompiledState:
    """What a compiled module knows."""
    state = model.__dict__[_STATE]
    assert isinstance(state, CompiledState)
    return state


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the module went through :func:`extend`."""
    return _STATE in model.__dict__


class CompiledModule(torch.nn.Module):
    """What compiling adds to the user's class."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first call of a model compiled without inputs."""
        return state_of(self).plan

    @property
    def planning_s(self) -> dict[str, float]:
        """Seconds that planning took in this process, by phase; empty on ranks given the plan."""
        return dict(state_of(self).planning_s)

    @property
    def device(self) -> torch.device:
        """Where this rank computes, also on a rank without parameters."""
        session = state_of(self).session
        if session is not None:
            return session.place.device
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def report(self) -> str:
        """The plan in words: who does what, how long, how many bytes, and why."""
        state = state_of(self)
        return state.report(_planned(state))

    def explain(self, pattern: str | None = None) -> PlanExplanation | ParamExplanation:
        """What binds, what more would be worth, who lost and why; ``print()`` it.

        The plan is solved again with more memory and simulated with faster links: every number was
        tried, which takes about as long as planning did.

        Args:
            pattern: Of parameter names, such as ``"model.layers.*.mlp.down_proj.weight"``: then
                how these are split, what that causes, and what other splits would cost.
        """
        return _questions(self).explain(pattern)

    def why_not(self, **constraints: object) -> WhyNot:
        """What a decision would do, such as ``why_not(tp=8)``: solved again under it.

        Args:
            constraints: As in :func:`autopar.compile`; one that the plan was made under is set
                aside if it is given another value. Also ``precision``, of a model in float32: the
                numbers change.
        """
        return _questions(self).why_not(constraints)

    def replan(
        self,
        devices: int | str | os.PathLike[str] | Cluster | None = None,
        *,
        lost: Sequence[int] = (),
        slower: Mapping[int, float] | None = None,
        thorough: bool = False,
        checkpoint_bytes_per_s: float | None = None,
    ) -> Replan:
        """The plan for a changed cluster, what differs, what must travel, and whether that pays.

        The model keeps running under its own plan; ``save_plan(answer.plan, ...)`` keeps the new
        one. Bytes are exact; seconds are those of the cluster's links.

        Args:
            devices: The new cluster, as in :func:`autopar.compile`; the memory limit and the prices
                of the present one hold there too.
            lost: Instead: machines of the present cluster that are gone, by index.
            slower: Instead: machine -> factor of its speed, such as ``{3: 0.5}``.
            thorough: Search all shapes, not only those of the present ``tp``.
            checkpoint_bytes_per_s: How fast the job reads a checkpoint: state that no running
                device has is read from one, and counts in the seconds only where this is told.

        Raises:
            ConfigError: Nothing changed, or a machine is not there.
            InfeasibleError: Nothing fits what is left.
        """
        return _questions(self).replan(
            devices,
            tuple(lost),
            slower or {},
            thorough=thorough,
            checkpoint_bytes_per_s=checkpoint_bytes_per_s,
        )

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradient norm of the whole model, over all stages and shards.

        Every rank must call it. Gives the norm before clipping, the same on every rank.

        Args:
            max_norm: Largest norm to leave.
            norm_type: Order of the norm, above 0; ``float("inf")`` for the largest element.
            error_if_nonfinite: Raise if the norm is nan or infinite.
        """
        return _session(self).norm.clip(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole, on the CPU of rank 0; empty on other ranks.

        Every rank must call it. One parameter at a time is whole.
        """
        session = _session(self)
        return full_state(
            session.residents, session.planned_programs, session.plan.mesh, session.place
        )

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", **others: object
    ) -> None:
        """Write safetensors files and the configuration, as Hugging Face's models do.

        Every rank must call it: one tensor at a time is whole on rank 0, which writes.

        Args:
            folder: Directory; ``from_pretrained`` of the model's library opens it.
            max_shard_size: Most bytes of a file, such as ``"5GB"``; one tensor may be larger.
            others: Options of the library's own method: handed to it with a ``state_dict`` of
                whole tensors, which it then writes, or in a process that only plans.
        """
        session = state_of(self).session
        if session is None or others.get("state_dict") is not None:
            own = getattr(super(), "save_pretrained", None)
            if own is None:
                _session(self)
            check_whole(others.get("state_dict"))
            own(folder, max_shard_size=max_shard_size, **others)  # type: ignore[misc]
            return
        check_export_options(others)
        most_bytes = parse_bytes(max_shard_size)
        save_directory(session, self, Path(folder), max_shard_bytes=most_bytes)

    def load_pretrained(
        self, folder: str | os.PathLike[str], *, strict: bool = True
    ) -> IncompatibleKeys:
        """Load this rank's part of a directory of safetensors files; every rank must call it.

        Args:
            folder: That :meth:`save_pretrained`, of this or of Hugging Face, wrote.
            strict: Refuse missing and unknown names.
        """
        return IncompatibleKeys(*load_directory(_session(self), Path(folder), strict=strict))

    def get_rng_state(self) -> dict[str, int]:
        """What dropout is drawn from: the seed, and the number of calls so far."""
        return _session(self).counters

    def set_rng_state(self, state: Mapping[str, int]) -> None:
        """Draw dropout from here on as after ``state`` was taken; the same on every rank."""
        _session(self).set_counters(state)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ConfigError(_NO_COPY.format(what="copy.deepcopy", name=type(self).__name__))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(_NO_COPY.format(what="pickling", name=type(self).__name__))

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Load this rank's part of a state dict with whole tensors, or with ``DTensor`` shards.

        Args:
            state_dict: Of the uncompiled model, or of the model compiled under any plan.
            strict: Refuse missing and unknown names.
            assign: Not supported: storage stays where the programs read it.

        Raises:
            ConfigError: Names or shapes are not the model's, or a value is no tensor.
        """
        state = state_of(self)
        given: Mapping[str, object] = state_dict
        for name, value in given.items():
            if not isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE):
                raise ConfigError(
                    f"load_state_dict: {name!r} is a {type(value).__name__}; give a dict of tensors"
                )
        if state.session is None:
            missing = super().load_state_dict(state_dict, strict=strict, assign=assign)
            return IncompatibleKeys(missing.missing_keys, missing.unexpected_keys)
        if assign:
            raise ConfigError("load_state_dict(assign=True): a compiled model keeps its storage")
        return IncompatibleKeys(*load_state(state.session.residents, state_dict, strict=strict))


def extend(model: torch.nn.Module, state: CompiledState) -> None:
    """Turn ``model`` into a compiled module, in place."""
    base = type(model)
    forward = base.forward
    state.own_forward = model.__dict__.pop("forward", None)
    shown = state.own_forward or forward

    @functools.wraps(shown)
    def compiled_forward(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        return _call(self, args, kwargs)

    if state.own_forward is not None:  # it was bound already: its signature has no self
        compiled_forward.__signature__ = _with_self(state.own_forward)  # type: ignore[attr-defined]
    CheckpointApi(running_session).route()
    names: dict[str, object] = {
        "forward": compiled_forward,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        FIRST_ATTRIBUTE_OF_DDP: property(_refuse_wrapping),
    }
    state.hooks = take_call_hooks(model)
    model.__dict__[_STATE] = state
    model.__class__ = type(base.__name__, (CompiledModule, base), names)


def _refuse_wrapping(model: torch.nn.Module) -> None:
    session = state_of(model).session
    if session is None or not session.place.is_distributed:
        raise AttributeError(FIRST_ATTRIBUTE_OF_DDP)
    raise ConfigError(
        f"DistributedDataParallel would average the gradients of {type(model).__name__} once more: "
        "the plan reduces them; train the compiled model itself, and with accelerate call "
        "autopar.as_one_worker(accelerator) before prepare()"
    )


def _with_self(bound: Callable[..., object]) -> inspect.Signature:
    signature = inspect.signature(bound)
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[owner, *signature.parameters.values()])


@contextlib.contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Give the module its own class, forward and hooks back while the body runs."""
    compiled = type(model)
    state = state_of(model)
    bases = compiled.__mro__
    model.__class__ = bases[bases.index(CompiledModule) + 1]
    outer = {name: model.__dict__.pop(name) for name in ("forward",) if name in model.__dict__}
    if state.own_forward is not None:
        model.__dict__["forward"] = state.own_forward
    later = take_call_hooks(model)
    model.__dict__.update(state.hooks)
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
        state.hooks = take_call_hooks(model)
        model.__dict__.update(later | outer)
        model.__class__ = compiled


def bind(
    model: torch.nn.Module,
    state: CompiledState,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> tuple[ModelCall, bool]:
    """The call with named arguments, and whether the loss function is part of it."""
    named = dict(kwargs)
    batch = None
    if state.has_loss and state.takes_batch:
        batch = named.get(_BATCH)
        if _BATCH not in inspect.signature(model.forward).parameters:
            named.pop(_BATCH, None)
    with_loss = state.has_loss and (batch is not None or not state.takes_batch)
    return bind_call(model, args, named, batch=batch), with_loss


def _call(model: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    state = state_of(model)
    call, with_loss = bind(model, state, args, kwargs)
    if state.session is None:
        state.session = state.launch(model, call)
    return state.session.call(model, call, with_loss=with_loss)


def close(model: torch.nn.Module) -> None:
    """Free what a compiled model holds beside its tensors: programs, threads, process groups.

    For processes that compile several models one after another; a model that is dropped gives back
    its tensors, but torch keeps process groups until they are destroyed. Models on equal meshes
    share groups, which stay while one of them is open. Every rank calls it, between steps; at the
    end of a process there is no need to. The module keeps its parameters; it can't be called again.

    Raises:
        ConfigError: The model is not compiled.
    """
    if not is_compiled(model):
        raise ConfigError(
            f"close: {type(model).__name__} is not a compiled model; pass what autopar.compile gave"
        )
    state = state_of(model)
    session, state.session = state.session, None
    state.launch = _refuse_closed
    if session is not None:
        session.close()


def _refuse_closed(model: torch.nn.Module, _: ModelCall) -> NoReturn:
    raise ConfigError(
        f"{type(model).__name__} was closed by autopar.close(); build the model again and compile "
        "it with the same plan"
    )


def running_session(model: torch.nn.Module) -> Session | None:
    """The session of a compiled model that runs here; None for any other module."""
    return state_of(model).session if is_compiled(model) else None


def _planned(state: CompiledState) -> Plan:
    """The plan in force."""
    if state.plan is None:
        raise ConfigError(
            "there is no plan yet: the model was compiled without inputs; call it once, or "
            "pass inputs= to autopar.compile()"
        )
    return state.plan


def _questions(model: torch.nn.Module) -> Questions:
    """Who answers questions about the plan in force."""
    state = state_of(model)
    _planned(state)
    assert state.ask is not None, "it is set with the plan"
    return state.ask()


def _session(model: torch.nn.Module) -> Session:
    session = state_of(model).session
    if session is None:
        raise ConfigError(
            "the compiled model does not run here: it was only planned, or was compiled without "
            "inputs and not called yet; call it once under torchrun"
        )
    return session
