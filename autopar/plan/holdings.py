"""Which part of which parameter lies on which rank under a plan: boxes of elements.

A box is an interval per dim. Ranks that hold replicas hold equal boxes. Shards are torch's chunks:
``ceil(size / parts)`` elements each, the last ones shorter or empty. Optimizer state lies where its
parameter does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.ir.graph import Graph, Input, InputKind, TensorMeta
from autopar.plan.types import Plan
from autopar.sharding.decisions import Choice, Decisions
from autopar.sharding.parameters import parameter_inputs, storage_of
from autopar.sharding.placement import Layout, Shard, parse_placement, shard_size
from autopar.sharding.stages import assign_stages, stage_demands

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Per dim the first element and the one after the last."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One parameter (or several alike) on some ranks.

    Attributes:
        boxes: Rank -> what it holds; ranks that hold nothing are left out.
    """

    boxes: Mapping[int, Box]


@dataclass(frozen=True, slots=True)
class _Stage:
    """What decides where the parameters of a stage lie."""

    ranks: tuple[int, ...]
    dp: int
    tp: int
    zero_level: int
    placements: Mapping[str, Mapping[str, str]]


def volume(box: Box) -> int:
    """Elements of a box; a scalar has one."""
    total = 1
    for low, high in box:
        total *= max(0, high - low)
    return total


def holdings(plan: Plan, graph: Graph) -> dict[str, tuple[TensorMeta, tuple[Holding, ...]]]:
    """Where every parameter lies: its meta at rest, and a holding for each pipeline.

    Args:
        plan: The plan.
        graph: The joint graph that it was made for.
    """
    entries = parameter_inputs(graph)
    found: dict[str, tuple[TensorMeta, list[Holding]]] = {}
    known: dict[object, Holding] = {}
    for firsts, stages in _pipelines(plan):
        owners = _owners(graph, firsts)
        for name, parts in entries.items():
            stage = stages[min(owners.get(e.name, 0) for e in parts)]
            meta, layout = _storage(name, parts, stage)
            key = (stage.ranks, stage.dp, stage.tp, meta.shape, layout)
            if key not in known:
                known[key] = Holding(dict(_boxes(meta, layout, stage)))
            found.setdefault(name, (meta, []))[1].append(known[key])
    return {name: (meta, tuple(rows)) for name, (meta, rows) in found.items()}


def _pipelines(plan: Plan) -> Iterator[tuple[tuple[str, ...], list[_Stage]]]:
    if not plan.pipelines:
        mesh = plan.mesh
        yield (
            tuple(s.first for s in plan.stages[1:]),
            [_Stage(s.devices, mesh.dp, mesh.tp, s.zero_level, plan.splits) for s in plan.stages],
        )
    for pipeline in plan.pipelines:
        yield (
            tuple(s.first for s in pipeline.stages[1:]),
            [
                _Stage(s.devices, s.dp, s.tp, s.zero_level, {"tp": s.splits})
                for s in pipeline.stages
            ],
        )


def _owners(graph: Graph, firsts: tuple[str, ...]) -> dict[str, int]:
    """Parameter input -> the first stage that reads it."""
    names = {i.name for i in graph.of_kind(InputKind.PARAM)}
    if not firsts:
        return dict.fromkeys(names, 0)
    owners: dict[str, int] = {}
    stage_map = assign_stages(graph, firsts)
    demands = stage_demands(graph, stage_map, frozenset())
    for node in graph.nodes:
        read = [ref for ref in node.refs() if ref in names]
        if not read:
            continue
        home = stage_map.stage.get(node.name)
        # what every stage can make for itself is made, and its weights read, where it is wanted
        stages = [s for s, d in enumerate(demands) if node.name in d.wanted]
        for ref in read:
            at = min(stages, default=0) if home is None else home
            owners[ref] = min(owners.get(ref, at), at)
    return owners


def _storage(name: str, parts: Sequence[Input], stage: _Stage) -> tuple[TensorMeta, Layout]:
    choices: dict[str, dict[str, Choice]] = {}
    for axis in ("dp", "tp"):
        table = stage.placements.get(axis, {})
        texts = {e.name: table[e.name] for e in parts if e.name in table}
        choices[axis] = {n: parse_placement(t) for n, t in texts.items() if "->" not in t}
    decisions = Decisions(axis_sizes=(1, stage.dp, stage.tp), choices=choices)
    return storage_of(name, parts, stage.zero_level, decisions)


def _boxes(meta: TensorMeta, layout: Layout, stage: _Stage) -> Iterator[tuple[int, Box]]:
    sizes = {1: stage.dp, 2: stage.tp}
    for index, rank in enumerate(stage.ranks):
        at = {1: index // stage.tp, 2: index % stage.tp}
        box = [(0, n) for n in meta.shape]
        for axis, size in sizes.items():
            placement = layout[axis]
            if isinstance(placement, Shard):
                low, high = box[placement.dim]
                chunk = shard_size(high - low, size)
                begin = min(high, low + at[axis] * chunk)
                box[placement.dim] = (begin, min(high, begin + chunk))
        if volume(tuple(box)):
            yield rank, tuple(box)
