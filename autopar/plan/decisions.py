"""Between a plan's texts and the decisions that localize reads."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.plan.types import Plan
from autopar.sharding.decisions import Choice, Decisions
from autopar.sharding.placement import parse_placement
from autopar.sharding.programs import AXES
from autopar.sharding.signature import AxisStrategy


def choice_text(choice: Choice) -> str:
    """Text of a strategy or placement, as plans hold it."""
    return str(choice)


def parse_choice(text: str) -> Choice:
    """The inverse of :func:`choice_text`."""
    return AxisStrategy.parse(text) if "->" in text else parse_placement(text)


def splits_text(choices: Mapping[str, Mapping[str, Choice]]) -> dict[str, dict[str, str]]:
    """Choices by axis as texts, empty axes left out."""
    found: dict[str, dict[str, str]] = {}
    for axis, table in choices.items():
        if table:
            texts = {id(c): choice_text(c) for c in {id(c): c for c in table.values()}.values()}
            found[axis] = {name: texts[id(c)] for name, c in table.items()}
    return found


def refuse_pipelines(plan: Plan) -> None:
    """Raise if a plan can be shown and kept, but not run.

    Raises:
        PlanError: Its pipelines are unequal; programs are written for one mesh.
    """
    if not plan.pipelines:
        return
    sizes: dict[str, set[int]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            sizes.setdefault(stage.device, set()).update(stage.devices)
    most = max(sizes, key=lambda name: (len(sizes[name]), name))
    raise PlanError(
        f"the plan for {plan.cluster} has {len(plan.pipelines)} pipeline"
        f"{'s' * (len(plan.pipelines) > 1)} of unequal stages on {', '.join(sizes)}, which can be "
        "planned, saved and shown, but not run: programs are written for one mesh of equal stages; "
        "plan for devices of one kind "
        f"(devices='{len(sizes[most])}:{most}'), or fix dp=, tp= or pp= for one mesh over all"
    )


def decisions_of(
    plan: Plan, graph: Graph, *, gather_outputs: frozenset[str] = frozenset()
) -> Decisions:
    """The plan's decisions.

    Args:
        plan: The plan.
        graph: The graph that it was made for.
        gather_outputs: Output paths to return whole.

    Raises:
        PlanError: The plan names an operator or input that the graph does not have, or it has
            unequal pipelines, which have no decisions in common.
    """
    refuse_pipelines(plan)
    known = {n.name for n in graph.nodes} | {i.name for i in graph.inputs}
    parsed: dict[str, Choice] = {}
    choices: dict[str, dict[str, Choice]] = {}
    for axis, table in plan.splits.items():
        if axis not in AXES:
            raise PlanError(f"plan: axis {axis!r} is none of {', '.join(AXES)}; re-plan the model")
        choices[axis] = {}
        for name, text in table.items():
            if name not in known:
                raise PlanError(
                    f"plan: operator {name!r} is not in the model's graph; "
                    "the plan was made for another model, re-plan this one"
                )
            if text not in parsed:
                parsed[text] = parse_choice(text)
            choices[axis][name] = parsed[text]
    mesh = plan.mesh
    return Decisions(
        axis_sizes=(plan.num_microbatches, mesh.dp, mesh.tp),
        choices=choices,
        firsts=tuple(s.first for s in plan.stages[1:]),
        recompute=frozenset(op for s in plan.stages for op in s.recompute),
        offload=frozenset(op for s in plan.stages for op in s.offload),
        offload_window_bytes=plan.offload_window_bytes,
        zero_levels=tuple(s.zero_level for s in plan.stages),
        gather_outputs=gather_outputs,
    )
