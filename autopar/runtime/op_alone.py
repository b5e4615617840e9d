"""How long single operators take, by themselves on made-up operands.

For operators that a profile knows nothing of: a first price, until the model they are from is
profiled where they stand (:mod:`autopar.runtime.op_times`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from autopar.capture.torch_ops import to_torch, torch_callable, torch_dtype
from autopar.ir.graph import Graph, Meta, Node, TensorMeta
from cost_models.flops import OpClass, tensors, work_of
from cost_models.measure_meter import Meter, Run, Task
from cost_models.profile import Point, PointKind, op_key

logger = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
"""Operators that hold more are left to the curves."""


def unseen_operators(graph: Graph, known: Collection[str]) -> tuple[Node, ...]:
    """The first operator of each name that is not in ``known`` and costs something."""
    metas = graph.metas()
    found: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op in known or node.op in found:
            continue
        operands = [metas[name] for name in node.refs()]
        if work_of(node.op, node.args, operands, node.meta).op_class is OpClass.FREE:
            continue
        if sum(t.bytes for t in tensors([*operands, node.meta])) <= MAX_BYTES:
            found[node.op] = node
    return tuple(found.values())


def operator_points(
    graph: Graph, nodes: Collection[Node], meter: Meter, *, budget_s: float
) -> list[Point]:
    """Points of some operators, until the time is up.

    An operator that made-up operands do not suit is left out, and logged.

    Args:
        graph: The program that they are from.
        nodes: Which ones.
        meter: How to measure; this rank alone does.
        budget_s: Seconds after which no further one is started.
    """
    metas = graph.metas()
    alone = replace(meter, rank=0, size=1, per_node=1)
    started_s = meter.clock()
    points = []
    for node in nodes:
        if meter.clock() - started_s > budget_s:
            logger.debug("no time left to measure %s", node.op)
            break
        operands = [metas[name] for name in node.refs()]
        work = work_of(node.op, node.args, operands, node.meta)
        task = Task(
            kind=PointKind.OP,
            prepare=lambda n=node: _runner(n, metas, meter.device),  # type: ignore[misc]
            dtype=work.dtype,
            sizes=(round(work.flops), round(work.moved_bytes)),
            name=op_key(node.op, node.args, operands),
        )
        try:
            with torch.no_grad():
                points.append(alone.measure(task))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            logger.debug("%s can't be measured on made-up operands: %s", node.op, error)
    return points


def _runner(node: Node, metas: Mapping[str, Meta], device: torch.device) -> Run:
    function = torch_callable(node.op, device=device)
    names = dict.fromkeys(node.refs())
    shapes = [m.shape for name in names for m in tensors(metas[name]) if m.is_float]
    least = min((size for shape in shapes for size in shape), default=1)
    values = {name: _value(metas[name], max(1, least), device) for name in names}
    args = [to_torch(a, values.__getitem__) for a in node.args]
    kwargs = {k: to_torch(a, values.__getitem__) for k, a in node.kwargs}
    return lambda: function(*args, **kwargs)


def _value(meta: Meta, least: int, device: torch.device) -> object:
    """An operand; integers are indices that are in range of every dim of the others."""
    if meta is None:
        return 0
    if not isinstance(meta, TensorMeta):
        return tuple(_value(m, least, device) for m in meta)
    dtype = torch_dtype(meta.dtype)
    if meta.is_float:
        return torch.rand(meta.shape, device=device).to(dtype)
    if dtype is torch.bool:
        return torch.ones(meta.shape, dtype=dtype, device=device)
    return torch.randint(0, least, meta.shape, device=device).to(dtype)
