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


Holdings: TypeAlias = Mapping[str, tuple[TensorMeta, tuple[Holding, ...]]]
"""Where every parameter lies: its meta at rest, and a holding for each pipeline."""


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


def holdings(plan: Plan, graph: Graph) -> Holdings:
    """Where every parameter lies.

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
    reading = [(n, read) for n in graph.nodes if (read := [r for r in n.refs() if r in names])]
    # what every stage can make for itself is made, and its weights read, where it is wanted
    free = {node.name for node, _ in reading if node.name not in stage_map.stage}
    first: dict[str, int] = {}
    demands = stage_demands(graph, stage_map, frozenset()) if free else ()
    for stage, demand in enumerate(demands):
        for name in free & demand.wanted:
            first.setdefault(name, stage)
    for node, read in reading:
        at = stage_map.stage.get(node.name, first.get(node.name, 0))
        for ref in read:
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
    known: dict[tuple[int, ...], Box | None] = {}  # by what a layout asks of a rank's place
    shards = [(axis, p.dim) for axis in sizes if isinstance(p := layout[axis], Shard)]
    for index, rank in enumerate(stage.ranks):
        place = {1: index // stage.tp, 2: index % stage.tp}
        key = tuple([place[axis] for axis, _ in shards])
        if key not in known:
            box = [(0, n) for n in meta.shape]
            for (axis, dim), at in zip(shards, key, strict=True):
                low, high = box[dim]
                chunk = shard_size(high - low, sizes[axis])
                begin = min(high, low + at * chunk)
                box[dim] = (begin, min(high, begin + chunk))
            known[key] = tuple(box) if volume(tuple(box)) else None
        found = known[key]
        if found is not None:
            yield rank, found
