"""Hand-made plans: data axes as propagated, stages cut evenly, tensor splits random but legal."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.capture.tracing import Captured
from autopar.ir.graph import Graph, InputKind, Phase
from autopar.plan.decisions import splits_text
from autopar.plan.types import MeshShape, Plan, ScheduleKind, StagePlan
from autopar.sharding.build import signatures_of
from autopar.sharding.placement import R, Shard
from autopar.sharding.propagate import split_data_axes
from autopar.sharding.signature import AxisStrategy, axis_strategies


def hand_made_plan(
    captured: Captured,
    mesh: MeshShape,
    *,
    num_microbatches: int = 1,
    num_devices: int | None = None,
    zero: int | Sequence[int] = 0,
    schedule: ScheduleKind | None = None,
    seed: int = 0,
) -> Plan:
    """A plan that needs no search; ``zero`` is the level of all stages, or of each."""
    levels = (zero,) * mesh.num_stages if isinstance(zero, int) else tuple(zero)
    graph = captured.graph
    signatures = signatures_of(graph)
    data = split_data_axes(graph, signatures, num_microbatches=num_microbatches, dp=mesh.dp).choices
    choices = dict(data)
    if mesh.tp > 1:
        choices["tp"] = _tensor_splits(graph, data, (num_microbatches, mesh.dp, mesh.tp), seed)
    forward = [n.name for n in graph.nodes if n.phase is Phase.FORWARD and n.op != "getitem"]
    firsts = [forward[len(forward) * s // mesh.num_stages] for s in range(mesh.num_stages)]
    per_rank = mesh.dp * mesh.tp
    default = ScheduleKind.INTERLEAVED if mesh.virtual > 1 else ScheduleKind.ONE_F_ONE_B
    return Plan(
        model_hash=captured.hash,
        cluster="cpu",
        num_devices=num_devices or mesh.num_ranks,
        mesh=mesh,
        num_microbatches=num_microbatches,
        schedule=schedule or default,
        stages=tuple(
            StagePlan(
                index=s,
                devices=tuple(
                    mesh.rank_of(mesh.pipeline_rank(s), 0, 0) + i for i in range(per_rank)
                ),
                first=firsts[s],
                zero_level=levels[s],
            )
            for s in range(mesh.num_stages)
        ),
        splits=splits_text(choices),
        precision=captured.precision,
    )


def _tensor_splits(graph: Graph, data, sizes, seed):
    rng = random.Random(seed)
    tp = sizes[2]
    signatures = signatures_of(graph)
    choices = {}
    for entry in graph.of_kind(InputKind.PARAM):
        dims = [d for d, n in enumerate(entry.meta.shape) if n >= tp]
        placement = rng.choice([R, *map(Shard, dims)])
        if placement != R:
            choices[entry.name] = placement
    for node in graph.nodes:
        signature = signatures.get(node.name)
        if signature is None:
            continue
        divide, lowered = {}, set()
        for axis, size in zip(("mb", "dp"), sizes[:2], strict=True):
            other = data.get(axis, {}).get(node.name)
            if isinstance(other, AxisStrategy):
                lowered.add(other.lowering)
                if other.factor:
                    divide[other.factor] = divide.get(other.factor, 1) * size
        options = [
            s
            for s in axis_strategies(signature, tp, divide=divide)
            if (not s.lowering or not (lowered - {"", s.lowering}))
            and s.factor != "microbatch_statistics"
        ]
        choice = rng.choice(options)
        if not choice.is_replicated:
            choices[node.name] = choice
    return choices
