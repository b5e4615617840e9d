"""Price of a program from its text alone: the independent check of what a solver claims.

It knows nothing of strategies, menus or stages. It walks the operators of a (local) program and
adds up what each costs; a plan's cost is recomputed this way from the emitted programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import ConfigError
from autopar.ir.graph import Graph, Meta, Node, Phase, Ref, TensorMeta
from autopar.plan.types import CollectiveTotal
from cost_models.base import CostModel
from cost_models.copy_lane import CopyLane
from cost_models.flops import flops as op_flops
from cost_models.flops import tensors
from cost_models.lanes import Segment
from cost_models.offload import FREE_COPIES, CopyPrice

LAYOUT_COPY = "autopar.layout_copy"
"""Name under which a copy into another order of dims is priced."""

# Positional index of the mesh axis in the arguments of a collective.
AXIS_ARGUMENT: Mapping[str, int] = {
    "comm.all_reduce": 2,
    "comm.all_gather": 2,
    "comm.reduce_scatter": 3,
    "comm.all_to_all": 3,
    "comm.all_to_all_rows": 2,
    "comm.broadcast": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """What one run of a program costs on one device.

    Attributes:
        compute_s: Sum over operators that are no collectives.
        comm_s: Sum over collectives, nothing overlapped.
        axis_comm_s: The same by mesh axis.
        phase_s: Operators and collectives by phase of the step.
        flops: Of matmuls, convolutions and attention.
        moved_ops: Operators that are neither views nor collectives.
        collectives: Totals by kind and axis, sorted.
        copy_s: Copies to host memory and back, beside all else.
        stalled_s: What of them is waited for.
        copied_bytes: Bytes of the copies.
        segments: What it does on which lane, if it copies something; else empty.
    """

    compute_s: float = 0.0
    comm_s: float = 0.0
    axis_comm_s: Mapping[str, float] = field(default_factory=dict)
    phase_s: Mapping[Phase, float] = field(default_factory=dict)
    flops: float = 0.0
    moved_ops: int = 0
    collectives: tuple[CollectiveTotal, ...] = ()
    copy_s: float = 0.0
    stalled_s: float = 0.0
    copied_bytes: int = 0
    segments: tuple[Segment, ...] = ()

    @property
    def total_s(self) -> float:
        """Compute and communication one after another, and waiting for copies."""
        return self.compute_s + self.comm_s + self.stalled_s


def evaluate_program(
    graph: Graph,
    model: CostModel,
    groups: Mapping[str, Sequence[int]],
    *,
    where: str = "forward",
    runs: int = 1,
    copies: CopyPrice = FREE_COPIES,
) -> ProgramCost:
    """Cost of one run of ``graph``.

    Args:
        graph: A local program, with collectives.
        model: The prices.
        groups: Global ranks along each mesh axis, as seen by the rank that is priced. An axis
            that is left out is a group of one: its collectives are free but counted.
        where: Copied into the totals.
        runs: Runs per step: counts and bytes of the totals, and their times, are multiplied by it;
            the seconds of the program are those of one run.
        copies: Price of a copy to host memory or back.

    Raises:
        ConfigError: A ``comm.*`` operator is unknown.
    """
    metas = graph.metas()
    compute_s = comm_s = flops = 0.0
    moved_ops = 0
    phase_s: dict[Phase, float] = {}
    axis_comm_s: dict[str, float] = {}
    totals: dict[tuple[str, str], list[float]] = {}
    lane = CopyLane(copies)
    for node in graph.nodes:
        if lane.visit(node):
            continue
        operands = [metas[name] for name in node.refs()]
        if node.op.startswith("comm."):
            axis = collective_axis(node)
            payload = payload_bytes(operands[:1], node.meta)
            kind = node.op.removeprefix("comm.")
            time_s = collective_s(node, operands[0], model, groups.get(axis, (0,)))
            comm_s += time_s
            axis_comm_s[axis] = axis_comm_s.get(axis, 0.0) + time_s
            row = totals.setdefault((kind, axis), [0, 0, 0.0])
            for index, amount in enumerate((1, payload, time_s)):
                row[index] += amount
        else:
            time_s = model.op_time_s(node.op, node.args, operands, node.meta)
            compute_s += time_s
            flops += op_flops(node.op, node.args, operands, node.meta)
            moved_ops += time_s > 0
        phase_s[node.phase] = phase_s.get(node.phase, 0.0) + time_s
        lane.operator(time_s)
    return ProgramCost(
        compute_s=compute_s,
        comm_s=comm_s,
        axis_comm_s=axis_comm_s,
        phase_s=phase_s,
        flops=flops,
        moved_ops=moved_ops,
        copy_s=lane.copy_s,
        stalled_s=lane.stalled_s,
        copied_bytes=lane.copied_bytes,
        segments=lane.segments(),
        collectives=tuple(
            CollectiveTotal(
                kind=kind,
                axis=axis,
                where=where,
                count=int(count) * runs,
                payload_bytes=int(payload) * runs,
                time_s=time_s * runs,
            )
            for (kind, axis), (count, payload, time_s) in sorted(totals.items())
        ),
    )


def collective_s(node: Node, operand: Meta, model: CostModel, ranks: Sequence[int]) -> float:
    """Seconds of a ``comm.*`` operator with the copies that it makes.

    Args:
        node: The operator.
        operand: What a rank puts in.
        model: The prices.
        ranks: Global ranks of the group.
    """
    payload = payload_bytes([operand], node.meta)
    kind = node.op.removeprefix("comm.")
    time_s = model.collective_time_s(kind, payload, ranks)
    if len(ranks) > 1:
        copies = layout_copies(node, operand)
        time_s += sum(model.op_time_s(LAYOUT_COPY, (Ref("x"),), [m], m) for m in copies)
    return time_s


def layout_copies(node: Node, operand: Meta) -> tuple[TensorMeta, ...]:
    """What is copied around a ``comm.*`` operator.

    Backends move contiguous blocks: a dim that is not the first is brought to the front before,
    and back after. The results of an all-to-all are put side by side in any case.
    """
    result = node.meta
    if not isinstance(operand, TensorMeta) or not isinstance(result, TensorMeta):
        return ()
    at = {"comm.all_gather": 1, "comm.reduce_scatter": 2, "comm.all_to_all": 2}.get(node.op)
    dim = node.args[at] if at is not None else 0
    assert isinstance(dim, int)
    is_in_front = all(size == 1 for size in operand.shape[: dim % max(1, len(operand.shape))])
    if node.op == "comm.all_to_all":
        return (result,) if is_in_front else (operand, result)
    return () if is_in_front else (operand, result)


def collective_axis(node: Node) -> str:
    """Mesh axis of a ``comm.*`` operator.

    Raises:
        ConfigError: The operator is unknown or its axis is not text.
    """
    index = AXIS_ARGUMENT.get(node.op)
    if index is None:
        raise ConfigError(
            f"operator {node.name!r}: {node.op!r} is no collective; known are "
            f"{', '.join(AXIS_ARGUMENT)}"
        )
    axis = node.args[index] if index < len(node.args) else node.kwarg("axis")
    if not isinstance(axis, str):
        raise ConfigError(f"operator {node.name!r}: the axis of {node.op} is {axis!r}, not text")
    return axis


def payload_bytes(operands: Sequence[Meta], results: Meta) -> int:
    """The larger of what a rank puts in and gets out."""
    return max(sum(t.bytes for t in tensors(operands)), sum(t.bytes for t in tensors(results)))
