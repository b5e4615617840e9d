"""A captured call under a plan, ready to run on one rank.

The plan is made for one call. A call of another mode (evaluation, no gradients) or of other shapes
has a program of its own, which takes over every decision that still fits: an operator keeps its
split if the other program has it under the same name; the data axes are propagated anew, into as
many micro-batches as its batch divides into; the layouts in which parameters are stored must be the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from autopar.capture.tracing import Captured
from autopar.errors import InputError, PlanError
from autopar.ir.graph import Graph, InputKind, Phase
from autopar.plan.actions import Action
from autopar.plan.orders import forwards_of, order_of, plan_order, receives_ahead
from autopar.plan.schedule import ActionLists, action_lists
from autopar.plan.types import DP_AXIS, TP_AXIS, Plan, ScheduleKind
from autopar.runtime.fitting import FittedData, fit_data_axes, planned_batch
from autopar.runtime.index_checks import IndexCheck, index_checks
from autopar.runtime.load import LoadedPrograms, load, runs_halves
from autopar.runtime.pieces import parts_of, with_common_owners
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.decisions import Choice, Decisions
from autopar.sharding.placement import Shard, format_layout
from autopar.sharding.programs import LocalPrograms
from autopar.sharding.routing import are_rows_consistent, capacity_percent_of, routes_rows
from autopar.sharding.signature import AxisStrategy, OpSignature, axis_strategies, parts_by_factor

_HALF = "float16"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One captured call on one rank.

    Attributes:
        captured: What the call is.
        local: The programs of all stages.
        loaded: This rank's programs; None on an idle rank.
        actions: This rank's list; empty on an idle rank.
        backward: Whether gradients are computed.
        checks: What the batch's values must meet.
        is_half: Whether a value of the program is float16.
    """

    captured: Captured
    local: LocalPrograms
    loaded: LoadedPrograms | None
    actions: tuple[Action, ...]
    backward: bool
    checks: tuple[IndexCheck, ...] = ()
    is_half: bool = False


def make_variant(
    captured: Captured,
    decisions: Decisions,
    plan: Plan,
    *,
    rank: int,
    device: torch.device,
    backward: bool,
    planned: LocalPrograms | None = None,
) -> Variant:
    """Localize, emit and schedule a captured call.

    Args:
        captured: The call.
        decisions: How it is split; ``gather_outputs`` says which outputs are returned.
        plan: Gives mesh and schedule.
        rank: This rank; one beyond the mesh is idle.
        device: Where it computes.
        backward: Whether gradients are wanted.
        planned: Programs of the planned call, if this is another one: they say where parameters
            rest.
    """
    mesh = plan.mesh
    plan = replace(plan, num_microbatches=decisions.axis_sizes[0])
    local = localize(captured.graph, decisions, signatures_of(captured.graph))
    local = with_common_owners(local, parts_of(captured.graph))
    if planned is not None:
        local = with_storage_of(planned, local)
    nodes = captured.graph.nodes
    is_half = any(m is not None and m.dtype == _HALF for n in nodes for m in n.metas())
    if rank >= mesh.num_ranks:
        return Variant(
            captured=captured, local=local, loaded=None, actions=(), backward=backward,
            checks=index_checks(captured.graph), is_half=is_half,
        )  # fmt: skip
    lists = schedule_actions(local, plan, backward=backward, has_loss=captured.has_loss)
    pp = mesh.coordinate(rank)[0]
    own = mesh.stages_of(pp)
    # the casts are operators of the program by now: they must not be made twice
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        loaded = load(
            local, mesh, stages=own, device=device, forward_only=not backward,
            in_halves=runs_halves(lists[pp]),
        )  # fmt: skip
    return Variant(
        captured=captured, local=local, loaded=loaded, actions=lists[pp], backward=backward,
        checks=index_checks(captured.graph), is_half=is_half,
    )  # fmt: skip


def schedule_actions(
    local: LocalPrograms, plan: Plan, *, backward: bool, has_loss: bool
) -> ActionLists:
    """Action list of every pipeline rank.

    Args:
        local: The programs.
        plan: Gives mesh and schedule.
        backward: Whether gradients are wanted.
        has_loss: Whether the program has its loss; else all forwards come before all backwards.
    """
    mesh, count = plan.mesh, plan.num_microbatches
    if not backward:
        order = forwards_of(mesh, count)
    elif has_loss:
        order = plan_order(plan)
    else:
        order = order_of(ScheduleKind.GPIPE, mesh, count)
    tied = {
        (spec.owner, stage)
        for spec in local.params.values()
        for stage in spec.stages
        if stage != spec.owner
    }
    return action_lists(
        order,
        mesh,
        forward_edges=local.forward_edges,
        backward_edges=local.backward_edges if backward else (),
        tied=sorted(tied),
        zero_levels=[stage.zero_level for stage in plan.stages],
        prefetch=receives_ahead(plan.warmup),
    )


def transfer(
    decisions: Decisions, old: Graph, new: Graph, *, microbatch_statistics: bool = False
) -> tuple[Decisions, FittedData]:
    """The decisions for another program of the same model.

    Args:
        decisions: Made for ``old``.
        old: The program that was planned.
        new: The program of a call of another mode or shape.
        microbatch_statistics: As in the plan.

    Returns:
        The decisions, with as many micro-batches as the call's batch allows, and how it is cut.

    Raises:
        PlanError: No operator of the new program can start one of the stages.
        ShardingError: The batch can't be cut as the plan's statistics need it.
    """
    renamed = match_operators(old, new)
    same_inputs = {entry.name for entry in old.inputs} & {entry.name for entry in new.inputs}
    renamed.update((name, name) for name in same_inputs)
    signatures = signatures_of(new, expert_capacity_percent=capacity_percent_of(decisions.choices))
    fitted = fit_data_axes(
        new,
        signatures,
        decisions,
        planned_batch(decisions, old, signatures_of(old)),
        microbatch_statistics=microbatch_statistics,
        experts=_experts_over_dp(decisions, old, same_inputs),
    )
    splits = fitted.splits
    decisions = replace(decisions, axis_sizes=(fitted.num_microbatches, *decisions.axis_sizes[1:]))
    choices: dict[str, Mapping[str, Choice]] = dict(splits.choices)
    tp: dict[str, Choice] = {}
    for name, choice in decisions.choices.get(TP_AXIS, {}).items():
        target = renamed.get(name)
        if target is not None and (
            not isinstance(choice, AxisStrategy)
            or _is_legal(target, choice, signatures.get(target), splits.choices, decisions)
        ):
            tp[target] = choice
    if not are_rows_consistent(new, tp):  # an operator more or less among sorted rows
        tp = {n: c for n, c in tp.items() if not isinstance(c, AxisStrategy) or not routes_rows(c)}
    choices[TP_AXIS] = tp
    moved = replace(
        decisions,
        choices=choices,
        firsts=_transfer_firsts(decisions.firsts, old, renamed, new),
        recompute=frozenset(renamed[n] for n in decisions.recompute if n in renamed),
        offload=frozenset(renamed[n] for n in decisions.offload if n in renamed),
    )
    return moved, fitted


def _experts_over_dp(decisions: Decisions, old: Graph, shared: set[str]) -> dict[str, int]:
    """Expert weights that the old program splits over ``dp``, by dim."""
    table = decisions.choices.get(DP_AXIS, {})
    return {
        entry.name: placement.dim
        for entry in old.of_kind(InputKind.PARAM)
        if entry.name in shared and isinstance(placement := table.get(entry.name), Shard)
    }


def _is_legal(
    name: str,
    strategy: AxisStrategy,
    signature: OpSignature | None,
    data: Mapping[str, Mapping[str, Choice]],
    decisions: Decisions,
) -> bool:
    """Whether an operator of other sizes, split over the data axes, can be split so over ``tp``."""
    if signature is None:
        return False
    others = [
        (other, decisions.size(axis))
        for axis, table in data.items()
        if isinstance(other := table.get(name), AxisStrategy)
    ]
    lowerings = {other.lowering for other, _ in others}
    divide = parts_by_factor(signature, others)
    if strategy.lowering and lowerings - {"", strategy.lowering}:
        return False
    return strategy in axis_strategies(signature, decisions.size(TP_AXIS), divide=divide)


def match_operators(old: Graph, new: Graph) -> dict[str, str]:
    """Operators of ``old`` -> their namesakes in ``new``.

    Names number the operators of the whole program: one operator less shifts all that follow.
    The n-th operator of a kind in a module, in the same pass, is taken for the same.
    """
    places = {place: name for name, place in _places(new)}
    return {name: places[place] for name, place in _places(old) if place in places}


def _places(graph: Graph) -> Iterator[tuple[str, tuple[Phase, str, str, int]]]:
    counts: Counter[tuple[Phase, str, str]] = Counter()
    for node in graph.nodes:
        key = (node.phase, node.scope, node.op)
        yield node.name, (*key, counts[key])
        counts[key] += 1


def _transfer_firsts(
    firsts: tuple[str, ...], old: Graph, renamed: Mapping[str, str], new: Graph
) -> tuple[str, ...]:
    """For each stage its first operator that the new program has too."""
    order = [
        node.name for node in old.nodes if node.phase is Phase.FORWARD and node.op != "getitem"
    ]
    moved: list[str] = []
    for first in firsts:
        later = order[order.index(first) :]
        name = next((renamed[n] for n in later if n in renamed), None)
        if name is None:
            raise PlanError(
                f"the stage that starts at {first!r} has no operator in common with this call's "
                f"program of {len(new.nodes)} operators; compile the model for this call"
            )
        moved.append(name)
    return tuple(moved)


def with_storage_of(planned: LocalPrograms, other: LocalPrograms) -> LocalPrograms:
    """``other`` with parameters resting where ``planned`` has put them.

    A stage that uses a parameter of an earlier one borrows it, as a tied weight.

    Raises:
        InputError: Some parameter would have to be stored in another layout.
    """
    params = {}
    for name, spec in other.params.items():
        home = planned.params.get(name)
        if home is None or home.storage != spec.storage or home.owner > spec.owner:
            raise InputError(
                f"this call needs parameter {name!r} on stage {spec.owner} as "
                f"{format_layout(spec.storage)}, the planned one has it "
                + (f"on stage {home.owner} as {format_layout(home.storage)}" if home else "nowhere")
                + "; compile the model for this call"
            )
        stages = tuple(sorted({home.owner, *spec.stages}))
        params[name] = replace(spec, owner=home.owner, stages=stages)
    return replace(other, params=params)
