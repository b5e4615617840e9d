"""What a plan says about a model's own arguments, parameters and modules.

With the graph that the plan was made for, parameters have their dotted names and get words such as
"column-parallel", and what is recomputed is told by module and bytes. Without it (a plan read from
a file) the same is told as far as the plan's own texts go.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Graph, InputKind
from autopar.plan.types import DP_AXIS, MB_AXIS, TP_AXIS, Plan
from autopar.report.fold import fold_words
from autopar.report.param_words import describe_param_splits
from autopar.report.precision import describe_precision
from autopar.report.recompute import describe_recompute
from autopar.sharding.parameters import storage_layout
from autopar.sharding.placement import R, Replicate, Shard, parse_placement
from autopar.sharding.stages import VIEW_OPS, assign_stages, stage_demands

ZERO_WORDS: Mapping[int, str] = {
    1: "optimizer state is sharded over dp; gradients are whole until the end of the step",
    2: "optimizer state and gradients are sharded over dp",
    3: "optimizer state, gradients and parameters are sharded over dp",
}
_PARAM_PREFIX = "p_"
_CUT = re.compile(r"\b[STEX]\(")  # a shard, or rows of a rank's own
_KIND_PREFIX = re.compile(r"^[pbu]_")  # capture names inputs by kind: parameter, buffer, argument
_PART_SUFFIX = re.compile(r"_part\d+$")
_NUMBER = re.compile(r"_\d+(?=_|$)")
_VIEW_NAMES = frozenset(op.removeprefix("aten.").partition(".")[0] for op in VIEW_OPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the report tells beyond the figures.

    Attributes:
        arguments: Argument -> axis -> dim that it is cut along.
        whole_arguments: Arguments that every rank reads whole; known with a graph alone.
        readers: Argument -> stages that read it; empty without a graph or with one stage.
        parameters: (Pattern of names, tensors, words); empty where nothing splits parameters.
        num_operators: Operators of the whole graph; None without one.
        recompute: Per stage that recomputes, sentences.
    """

    arguments: Mapping[str, Mapping[str, int]]
    whole_arguments: tuple[str, ...] = ()
    readers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: tuple[tuple[str, int, str], ...] = ()
    num_operators: int | None = None
    recompute: Mapping[int, tuple[str, ...]]


def facts_of(plan: Plan, graph: Graph | None = None) -> Facts:
    """The facts of a plan.

    Args:
        plan: The plan.
        graph: The graph that it was made for, if at hand.
    """
    if graph is None:
        return Facts(
            arguments={
                plan.names.get(name, _plain(name)): dims for name, dims in _cut_inputs(plan).items()
            },
            parameters=fold_words(plan.param_words) or _params_from_names(plan),
            recompute={
                stage.index: (_recompute_counts(stage.recompute),)
                for stage in plan.stages
                if stage.recompute
            },
        )
    users = {entry.name: entry.target for entry in graph.of_kind(InputKind.USER)}
    cut = _cut_inputs(plan)
    return Facts(
        arguments={users[name]: dims for name, dims in cut.items() if name in users},
        whole_arguments=tuple(target for name, target in users.items() if name not in cut),
        readers=_readers(plan, graph),
        parameters=_params(plan, graph),
        num_operators=sum(node.op != "getitem" for node in graph.nodes),
        recompute=describe_recompute(plan, graph),
    )


def _readers(plan: Plan, graph: Graph) -> dict[str, tuple[int, ...]]:
    """Stages that read each argument, in a pipeline."""
    if len(plan.stages) == 1:
        return {}
    users = {entry.name: entry.target for entry in graph.of_kind(InputKind.USER)}
    found: dict[str, set[int]] = {target: set() for target in users.values()}
    stage_map = assign_stages(graph, tuple(stage.first for stage in plan.stages[1:]))
    nodes = graph.node_map()
    for stage, demand in enumerate(stage_demands(graph, stage_map, frozenset())):
        for name in demand.wanted:
            node = nodes.get(name)
            if node is None or stage_map.stage.get(name, stage) != stage:
                continue
            for ref in node.refs():
                if ref in users:
                    found[users[ref]].add(stage)
    return {target: tuple(sorted(stages)) for target, stages in found.items()}


def split_counts(plan: Plan, axis: str) -> tuple[int, int]:
    """Operators that are split over an axis, and those that only pass pending sums on."""
    split = pending = 0
    for text in plan.splits.get(axis, {}).values():
        if "->" in text:
            is_cut = _CUT.search(text) is not None
            split += is_cut
            pending += not is_cut and "P(" in text
    return split, pending


def _cut_inputs(plan: Plan) -> dict[str, dict[str, int]]:
    """Arguments that data axes cut: name -> axis -> dim."""
    found: dict[str, dict[str, int]] = {}
    for axis in (MB_AXIS, DP_AXIS):
        for name, text in plan.splits.get(axis, {}).items():
            placement = None if "->" in text else parse_placement(text)
            if isinstance(placement, Shard) and not name.startswith(_PARAM_PREFIX):
                found.setdefault(name, {})[axis] = placement.dim
    return found


def _params(plan: Plan, graph: Graph) -> tuple[tuple[str, int, str], ...]:
    return fold_words(_param_words(plan, graph))


def _param_words(plan: Plan, graph: Graph) -> dict[str, str]:
    splits, over_dp = plan.splits.get(TP_AXIS, {}), plan.splits.get(DP_AXIS, {})
    experts = {
        entry.param
        for entry in graph.of_kind(InputKind.PARAM)
        if "S(" in over_dp.get(entry.name, "")
    }
    sharded = set(_sharded_at_rest(plan, graph, splits)) - experts
    if not splits and not sharded and not experts:
        return {}
    return describe_param_splits(graph, splits, zero3_params=sharded, expert_params=experts)


def with_words(plan: Plan, graph: Graph) -> Plan:
    """``plan`` with the user's names and words in it, so that its file can be reported alone."""
    kinds = (InputKind.USER, InputKind.PARAM, InputKind.BUFFER)
    names = {i.name: i.target for i in graph.inputs if i.kind in kinds}
    return replace(
        plan,
        names=names,
        param_words=_param_words(plan, graph),
        precision_words={} if plan.precision is None else describe_precision(graph),
    )


def _sharded_at_rest(plan: Plan, graph: Graph, splits: Mapping[str, str]) -> Collection[str]:
    """Parameters that ZeRO-3 shards: those of stages with that level."""
    levels = [stage.zero_level for stage in plan.stages]
    if plan.mesh.dp == 1 or max(levels, default=0) < 3:
        return ()
    owner: dict[str, int] = {}
    if min(levels) < 3:
        stage_of = assign_stages(graph, tuple(s.first for s in plan.stages[1:])).stage
        for node in graph.nodes:
            for ref in node.refs() if node.name in stage_of else ():
                owner[ref] = min(owner.get(ref, len(levels)), stage_of[node.name])
    found = set()
    for entry in graph.of_kind(InputKind.PARAM):
        if entry.meta is not None and levels[owner.get(entry.name, 0)] == 3:
            compute = (R, R, parse_placement(splits.get(entry.name, "R")))
            layout = storage_layout(entry.meta, compute, plan.mesh.dp, 3)
            if not isinstance(layout[1], Replicate):
                found.add(entry.param)
    return found


def _params_from_names(plan: Plan) -> tuple[tuple[str, int, str], ...]:
    """Parameters that tp splits, under the graph's names: dots are lost in them."""
    counts: dict[tuple[str, str], int] = {}
    for name, text in plan.splits.get(TP_AXIS, {}).items():
        placement = None if "->" in text else parse_placement(text)
        if isinstance(placement, Shard):
            pattern = _NUMBER.sub("_*", _PART_SUFFIX.sub("", _plain(name)))
            key = (pattern, f"dim {placement.dim} over {TP_AXIS}")
            counts[key] = counts.get(key, 0) + 1
    return tuple((pattern, count, words) for (pattern, words), count in counts.items())


def _plain(name: str) -> str:
    return _KIND_PREFIX.sub("", name)


def _recompute_counts(names: Iterable[str]) -> str:
    """Kinds of operators by their numbered names, views left out."""
    counts = Counter(_kinds(names))
    shown = ", ".join(f"{count} x {kind}" for kind, count in counts.most_common(8))
    rest = len(counts) - 8
    return f"{sum(counts.values())} operators: {shown}" + (
        f" and {rest} more kind{'s' if rest > 1 else ''}" if rest > 0 else ""
    )


def _kinds(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        kind = re.sub(r"_\d+$", "", name)
        if kind not in _VIEW_NAMES:
            yield kind
