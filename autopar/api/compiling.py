"""``autopar.compile``: capture, plan, and, where the job runs, emit and move in."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import monotonic
from typing import TypeVar, Unpack

import torch
import torch.distributed as dist

from autopar.api.arguments import (
    check_arguments,
    check_inputs,
    check_kinds,
    check_names,
    check_word,
    chosen_mode,
    file_of,
    precision_of,
)
from autopar.api.environment import (
    find_place,
    is_launched,
    job_watch,
    launch_of,
    local_machine,
    world_size,
)
from autopar.api.options import ConstraintOptions, UserConstraints, as_call, user_constraints
from autopar.api.planning import agree_on_plan
from autopar.capture.calls import ModelCall, bind_call
from autopar.capture.tracing import Captured, capture
from autopar.cluster import Cluster, parse_devices
from autopar.errors import ConfigError, PlanError, ShardingError
from autopar.plan.decisions import refuse_pipelines
from autopar.plan.io import load_plan
from autopar.plan.types import Plan
from autopar.report.text import render_plan
from autopar.runtime.failure import FailFast
from autopar.runtime.module import CompiledState, Questions, bind, extend, uncompiled
from autopar.runtime.optimizers import OptimizerGuard
from autopar.runtime.place import Place
from autopar.runtime.pretrained import opened
from autopar.runtime.session import LOSS_BATCH, RunOptions, Session, gathered
from autopar.runtime.start import check_launch, check_model, start_session
from autopar.sharding.build import signatures_of
from autopar.solver.objective import Goal, goal

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=torch.nn.Module)
Devices = int | str | Path | Cluster
LossFunction = Callable[[object, object], torch.Tensor]
_BATCH = "batch"
_GENERATORS = ("counter", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """One call of :func:`compile`, understood."""

    cluster: Cluster
    constraints: UserConstraints
    plan: Plan | None
    loss: LossFunction | None
    mode: str
    optimizer: str
    on_unknown: str
    time_limit_s: float | None
    timeout_s: float | None
    run: RunOptions
    given: Mapping[str, torch.Tensor] | None
    precision: str | None = None
    goal: Goal = field(default_factory=lambda: goal())
    is_limited: bool = False  # the user said how much memory a device may use
    profile: Path | None = None

    def wishes(self) -> dict[str, str]:
        """Arguments that every rank must give alike; what a rank finds out itself may differ."""
        decided = {
            f.name: repr(getattr(self.constraints, f.name)) for f in fields(self.constraints)
        }
        return {
            **decided,
            "optimizer": repr(self.optimizer),
            "on_unknown": repr(self.on_unknown),
            "outputs": repr(self.run.outputs),
            "seed": repr(self.run.seed),
            "objective": repr(self.goal.objective.value),
            "cost_limit": repr(self.goal.cost_limit),
        }


def compile(  # noqa: PLR0913
    model: M,
    devices: Devices | None = None,
    inputs: object = None,
    *,
    args: Sequence[object] | None = None,
    plan: Plan | str | Path | None = None,
    loss: LossFunction | None = None,
    memory_limit: int | str | None = None,
    optimizer: str = "adamw",
    outputs: Sequence[str] = (),
    seed: int = 0,
    rng: str = "counter",
    mode: str | None = None,
    state_dict: Mapping[str, torch.Tensor] | str | Path | None = None,
    on_unknown: str = "replicate",
    time_limit_s: float | None = None,
    timeout_s: float | None = None,
    precision: str | None = None,
    objective: str = "time",
    cost_limit: float | None = None,
    cost_per_hour: float | Mapping[str, float] | None = None,
    profile: str | Path | None = None,
    **constraints: Unpack[ConstraintOptions],
) -> M:
    """Plan one training step of ``model`` on ``devices``, and run it that way.

    In a plain process with more than one device it plans and stops: calling the result says how to
    launch. Under ``torchrun`` every rank calls it; rank 0 plans, all ranks run.

    Args:
        model: Any module; the same object comes back, its class extended, its parameters replaced
            by this rank's shards. Weights on the meta device are drawn by its own initialisers.
        devices: A count (of what this machine has), ``"4x8:h100-sxm"``, a cluster or the path of a
            cluster file. Left out: the ranks of the launch, or one.
        inputs: One global batch, exactly as the model is called: a dict for keyword arguments, a
            tuple for positional ones, a tensor alone. Left out, the first call is captured.
        args: Positional arguments beside a dict in ``inputs``.
        plan: A plan made earlier, or the path of one; nothing is searched then.
        loss: ``loss(output, batch)``, a scalar, which the call then gives. Its second argument is
            the entry ``batch`` of ``inputs``, else the arguments of the call.
        memory_limit: Bytes, or text such as ``"16GiB"``, that a device may use.
        optimizer: Kind whose state is priced: adamw, adam, sgd, sgd-momentum, adafactor or none.
        outputs: Paths of outputs that training returns whole, not with ``loss=``; with
            ``mode="inference"`` those that calls return, all if none is named.
        seed: Of weights on the meta device, and of dropout: a function of it, step and element.
        rng: ``"counter"``; on one device ``"torch"``: torch's generator, bit for bit as eager.
        mode: ``"train"``, or ``"inference"``, forwards only; that of ``plan`` if left out.
        state_dict: Whole tensors for all of the model's own, by name; or a safetensors directory.
        on_unknown: ``"replicate"`` operators without a rule, or ``"error"``.
        time_limit_s: Wall-clock guard of the search.
        timeout_s: How long a step, with loading and saving, may last; AUTOPAR_TIMEOUT_S, else 600.
        precision: ``"bf16"`` or ``"fp16"`` to compute in it with float32 parameters and gradients
            (:mod:`autopar.ir.precision_rules`), ``"fp32"``; left out, the model's own dtypes.
        objective: ``"time"``, ``"cost"`` or ``"time within cost"``, see :class:`Objective`.
        cost_limit: The most that a step may cost, for ``"time within cost"``.
        cost_per_hour: Price of a device in any currency; by its name where there are several.
        profile: File of ``autopar profile``, this machine's if None; a count is of its devices.
        constraints: Decisions that are taken already, see :class:`ConstraintOptions`.

    Raises:
        ConfigError: An argument is wrong, the launch does not fit, the plan is another model's.
        CaptureError: The model can't be captured.
        InfeasibleError: No plan fits the memory.
    """
    check_arguments(model, on_unknown)
    given = opened(state_dict)
    check_kinds(loss, plan, outputs, seed, given, (time_limit_s, timeout_s), optimizer)
    check_word("rng", rng, _GENERATORS)
    given_plan = plan if plan is None or isinstance(plan, Plan) else load_plan(plan)
    chosen = chosen_mode(mode, given_plan)
    order = _Order(
        cluster=cluster_for(devices, given_plan, memory_limit, cost_per_hour, profile),
        constraints=user_constraints(constraints), precision=precision_of(precision, given_plan),
        profile=file_of("profile", profile), is_limited=memory_limit is not None, given=given,
        goal=goal(objective, cost_limit), time_limit_s=time_limit_s, timeout_s=timeout_s, loss=loss,
        plan=given_plan, mode=chosen, optimizer=optimizer, on_unknown=on_unknown,
        run=RunOptions(loss=loss, outputs=tuple(outputs), seed=seed, rng=rng, mode=chosen),
    )  # fmt: skip
    return _compiled(model, _as_it_is(order) if rng == "torch" else order, inputs, args)


def _compiled(model: M, order: _Order, inputs: object, args: Sequence[object] | None) -> M:
    """The model, extended; planned and started if its first call is known."""
    order.constraints.for_solver()  # a wrong word is refused before anything is captured
    takes_batch = inputs is None or (isinstance(inputs, Mapping) and _BATCH in inputs)
    state = _new_state(order, takes_batch=takes_batch)
    check_names(model, order.given)
    if inputs is not None or args is not None:
        _start(model, as_call(inputs, args), order, state)
    extend(model, state)
    return model


def _new_state(order: _Order, *, takes_batch: bool) -> CompiledState:
    """What a module that is about to be compiled knows."""
    state = CompiledState(
        launch=lambda owner, call: _launch_lazily(owner, call, order, state),
        guard=OptimizerGuard(order.optimizer) if _runs_here(order.cluster) else None,
        has_loss=order.loss is not None,
        takes_batch=takes_batch and order.loss is not None,
        report=render_plan,
    )
    return state


def _start(
    model: torch.nn.Module,
    first: tuple[tuple[object, ...], dict[str, object]],
    order: _Order,
    state: CompiledState,
) -> None:
    """Plan a model whose first call is known, and start it where it runs."""
    post = _join(order, model, state)
    with nullcontext() if post.watch is None else post.watch.phase("the compilation"):
        call, _ = bind(model, state, *first)
        captured = _capture(model, call, order, state)
        # a wrong path is refused before the search
        gathered(captured, order.run, captured.training)
        if post.place is None:
            _remember(state, captured, _make_plan(captured, order, state.planning_s), order)
        else:
            state.session = _launch(model, call, captured, order, state, post)
            _remember(state, captured, state.session.plan, order)


def _remember(state: CompiledState, captured: Captured, made: Plan, order: _Order) -> None:
    def ask() -> Questions:
        from autopar.api.questions import Questions  # few ask, and it takes ortools

        limit = order.cluster.memory_bytes if order.is_limited else None
        return Questions(captured, order.cluster, made, order.time_limit_s, limit, order.profile)

    state.plan = made
    state.report = functools.partial(render_plan, graph=captured.graph)
    state.ask = functools.cache(ask)


def _as_it_is(order: _Order) -> _Order:
    """The order with what torch's own generator needs: one device, and the batch in one piece.

    Raises:
        ConfigError: Something else was asked for.
    """
    found = order.cluster.num_devices
    if found > 1:
        raise ConfigError(
            f"rng='torch' on {found} devices: the numbers of torch's generator depend on who draws "
            "them; use devices=1, or leave rng out and set seed="
        )
    wish, plan = order.constraints, order.plan
    pieces = wish.num_microbatches if plan is None else plan.num_microbatches
    recomputes = wish.recompute not in (None, "none")
    if plan is not None:
        recomputes = any(stage.recompute for stage in plan.stages)
    if pieces not in (None, 1) or recomputes:
        what = "recompute" if recomputes else f"{pieces} micro-batches"
        raise ConfigError(
            f"rng='torch' with {what}: the model's own forward runs, on the whole batch and with "
            "everything kept; leave that out, or leave rng out"
        )
    return replace(order, constraints=replace(wish, num_microbatches=1, recompute="none"))


def plan(  # noqa: PLR0913
    model: torch.nn.Module,
    devices: Devices,
    inputs: object,
    *,
    args: Sequence[object] | None = None,
    loss: LossFunction | None = None,
    memory_limit: int | str | None = None,
    optimizer: str = "adamw",
    mode: str = "train",
    on_unknown: str = "replicate",
    time_limit_s: float | None = None,
    precision: str | None = None,
    objective: str = "time",
    cost_limit: float | None = None,
    cost_per_hour: float | Mapping[str, float] | None = None,
    profile: str | Path | None = None,
    **constraints: Unpack[ConstraintOptions],
) -> Plan:
    """The plan that :func:`compile` would make; the model is left as it is.

    Args:
        model: Any module, also on the meta device.
        devices: As in :func:`compile`.
        inputs: One global batch.
        args: Positional arguments beside a dict in ``inputs``.
        loss: As in :func:`compile`.
        memory_limit: Bytes, or text such as ``"16GiB"``, that a device may use.
        optimizer: Kind of optimizer whose state is priced.
        mode: ``"train"`` or ``"inference"``.
        constraints: As in :func:`compile`.
        on_unknown: ``"replicate"`` operators without a rule, or ``"error"``.
        time_limit_s: Wall-clock guard of the search.
        precision: As in :func:`compile`.
        objective: As in :func:`compile`.
        cost_limit: As in :func:`compile`.
        cost_per_hour: As in :func:`compile`.
        profile: As in :func:`compile`.
    """
    return make_plan(
        capture_call(
            model,
            inputs,
            args,
            loss,
            mode=chosen_mode(mode, None),
            precision=precision_of(precision, None),
        )[1],
        devices,
        memory_limit=memory_limit,
        constraints=user_constraints(constraints),
        loss=loss,
        optimizer=optimizer,
        on_unknown=on_unknown,
        time_limit_s=time_limit_s,
        objective=objective,
        cost_limit=cost_limit,
        cost_per_hour=cost_per_hour,
        profile=profile,
    )


def make_plan(  # noqa: PLR0913
    captured: Captured,
    devices: Devices,
    *,
    memory_limit: int | str | None = None,
    constraints: UserConstraints | None = None,
    loss: LossFunction | None = None,
    optimizer: str = "adamw",
    on_unknown: str = "replicate",
    time_limit_s: float | None = None,
    objective: str = "time",
    cost_limit: float | None = None,
    cost_per_hour: float | Mapping[str, float] | None = None,
    profile: str | Path | None = None,
) -> Plan:
    """The solver's plan for a captured program; arguments as in :func:`plan`."""
    order = _Order(
        cluster=cluster_for(devices, None, memory_limit, cost_per_hour, profile),
        profile=file_of("profile", profile),
        goal=goal(objective, cost_limit),
        constraints=constraints or UserConstraints(),
        plan=None,
        loss=loss,
        mode="train" if captured.training else "inference",
        optimizer=optimizer,
        on_unknown=on_unknown,
        time_limit_s=time_limit_s,
        timeout_s=None,
        run=RunOptions(loss=loss),
        given=None,
        precision=captured.precision,
    )
    return _make_plan(captured, order)


def capture_call(
    model: torch.nn.Module,
    inputs: object,
    args: Sequence[object] | None,
    loss: LossFunction | None,
    *,
    mode: str = "train",
    precision: str | None = None,
) -> tuple[ModelCall, Captured]:
    """The call that ``inputs`` stands for, and its program."""
    positional, named = as_call(inputs, args)
    batch = None
    if loss is not None and _BATCH in named:
        batch = named[_BATCH]
        if _BATCH not in inspect.signature(model.forward).parameters:
            del named[_BATCH]
    call = bind_call(model, positional, named, batch=batch)
    check_inputs(call.tensors())
    train = _trains(model, mode)
    captured = capture(
        model, positional, named, loss=loss, batch=batch, train=train, precision=precision
    )
    return call, captured


def _trains(model: torch.nn.Module, mode: str) -> bool:
    return mode == "train" and any(p.requires_grad for p in model.parameters())


def _capture(
    model: torch.nn.Module, call: ModelCall, order: _Order, state: CompiledState
) -> Captured:
    started_s = monotonic()
    check_inputs(call.tensors())
    captured = capture(
        model,
        call.args(),
        call.kwargs(),
        loss=order.loss,
        batch=call.values.get(LOSS_BATCH),
        train=_trains(model, order.mode),
        precision=order.precision,
    )
    state.planning_s["capture"] = monotonic() - started_s
    return captured


def _runs_here(cluster: Cluster) -> bool:
    """Whether this process computes, and does not only plan."""
    return is_launched() or cluster.num_devices == 1


def cluster_for(
    devices: Devices | None,
    plan: Plan | None,
    memory_limit: int | str | None,
    cost_per_hour: float | Mapping[str, float] | None = None,
    profile: str | Path | None = None,
) -> Cluster:
    """The cluster that a call names; of a given plan, or of the launch, if it names none."""
    wanted = devices  # without it the launch counts, which is checked where it is joined
    if devices is None:
        devices = world_size() if plan is None or is_launched() else plan.num_devices
    prices_file = file_of("profile", profile)
    local = local_machine(prices_file) if isinstance(devices, int | str) else None
    cluster = parse_devices(devices, memory_limit=memory_limit, local=local)
    if wanted is not None and plan is not None and plan.num_devices != cluster.num_devices:
        raise PlanError(
            f"the plan is for {plan.num_devices} devices ({plan.cluster}), devices= names "
            f"{cluster.num_devices} ({cluster}); leave devices out, or plan again for these"
        )
    return cluster if cost_per_hour is None else cluster.with_costs(cost_per_hour)


def _make_plan(captured: Captured, order: _Order, seconds: dict[str, float] | None = None) -> Plan:
    """The given plan if it is this program's, else the solver's answer."""
    if order.plan is not None:
        check_model(order.plan, captured)
        return order.plan
    if order.on_unknown == "error":
        _refuse_unknown(captured)
    from autopar.api import questions  # a rank that is given its plan needs no ortools

    found, stats = questions.solve(
        captured,
        order.cluster,
        order.constraints.for_solver(),
        optimizer=order.optimizer,
        goal=order.goal,
        time_limit_s=order.time_limit_s,
        profile=order.profile,
    )
    if seconds is not None:
        seconds.update(stats.seconds)
    return found


def _refuse_unknown(captured: Captured) -> None:
    signatures = signatures_of(captured.graph)
    unknown = [n for n in captured.graph.nodes if n.op != "getitem" and signatures[n.name] is None]
    if unknown:
        first = unknown[0]
        raise ShardingError(
            f"{len(unknown)} operators have no sharding rule, the first is {first.op} at "
            f"{first.source or first.scope or first.name}; describe it with "
            f"autopar.register_op({first.op!r}, ...), or pass on_unknown='replicate'"
        )


@dataclass(frozen=True, slots=True)
class _Post:
    """Where this process stands in the job; no place in one that only plans."""

    place: Place | None = None
    watch: FailFast | None = None


def _join(order: _Order, model: torch.nn.Module, state: CompiledState) -> _Post:
    """Join the job, if this process computes; from here on one rank's failure ends all."""
    if state.guard is None:
        return _Post()
    place = find_place(order.cluster, model)
    count = order.cluster.num_devices if order.plan is None else order.plan.num_devices
    check_launch(count, place)
    if not place.is_distributed:
        return _Post(place)
    watch = job_watch(dist.group.WORLD)
    if order.timeout_s is not None:
        watch.limit_s = order.timeout_s
    return _Post(place, watch)


def _launch(
    model: torch.nn.Module,
    call: ModelCall,
    captured: Captured,
    order: _Order,
    state: CompiledState,
    post: _Post,
) -> Session:
    """Agree on a plan and start running it."""
    guard, place = state.guard, post.place
    assert guard is not None
    assert place is not None
    plan = agree_on_plan(
        lambda: _make_plan(captured, order, state.planning_s), captured, place,
        given=order.plan, wishes=order.wishes(),
    )  # fmt: skip
    refuse_pipelines(plan)
    return start_session(
        model, call, captured, plan,
        options=order.run, place=place, guard=guard, given=order.given, watch=post.watch,
    )  # fmt: skip


def _launch_lazily(
    model: torch.nn.Module, call: ModelCall, order: _Order, state: CompiledState
) -> Session:
    """The first call of a model compiled without inputs, or any call where it can't run."""
    post = _join(order, model, state)
    watching = nullcontext() if post.watch is None else post.watch.phase("the compilation")
    with uncompiled(model), watching:
        if state.guard is not None:
            captured = _capture(model, call, order, state)
            session = _launch(model, call, captured, order, state, post)
            _remember(state, captured, session.plan, order)
            return session
        if state.plan is None:
            captured = _capture(model, call, order, state)
            _remember(state, captured, _make_plan(captured, order, state.planning_s), order)
        assert state.plan is not None
    refuse_pipelines(state.plan)
    raise ConfigError(
        f"{type(model).__name__} is planned for {state.plan.num_devices} devices and does not run "
        f"in a single process; start the script by\n  {launch_of(order.cluster)}\n"
        "or compile it with devices=1 to run it here"
    )
