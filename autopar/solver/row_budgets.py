"""What a plan says about the rows that ranks make room for where experts are split."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, Phase, TensorMeta
from autopar.sharding.decisions import Choice, Decisions
from autopar.sharding.placement import Placement, R, Routed, RoutedForm, local_shape
from autopar.sharding.programs import AXES
from autopar.sharding.routing import DISPATCH
from autopar.sharding.signature import AxisStrategy
from autopar.units import format_bytes


def row_budgets(graph: Graph, decisions: Decisions) -> tuple[str, ...]:
    """One sentence per budget of rows, of the tokens that are sent to experts.

    Args:
        graph: The joint graph.
        decisions: The plan's.
    """
    found: dict[tuple[str, int, int, int, int], list[str]] = {}
    for node in graph.nodes:
        meta = node.meta
        if node.op != DISPATCH or node.phase is not Phase.FORWARD:
            continue
        if not isinstance(meta, TensorMeta) or len(meta.shape) < 2:
            continue  # a weight or an id per row: the tokens themselves are what takes memory
        layout = tuple(_result(decisions.choices, a, node.name) for a in AXES)
        for axis, placement in zip(AXES, layout, strict=True):
            if isinstance(placement, Routed) and placement.form is not RoutedForm.TOKENS:
                local = TensorMeta(
                    local_shape(meta.shape, layout, decisions.axis_sizes), meta.dtype
                )
                rows = local.shape[0]
                key = (
                    axis, placement.capacity_percent, rows, local.bytes // max(1, rows),
                    decisions.size(axis),
                )  # fmt: skip
                found.setdefault(key, []).append(node.scope)
    return tuple(_sentence(key, scopes) for key, scopes in found.items())


def _result(choices: Mapping[str, Mapping[str, Choice]], axis: str, name: str) -> Placement:
    choice = choices.get(axis, {}).get(name)
    return choice.outputs[0] if isinstance(choice, AxisStrategy) else R


def _sentence(key: tuple[str, int, int, int, int], scopes: list[str]) -> str:
    axis, percent, rows, row_bytes, parts = key
    places = len(scopes)
    where = f"in {scopes[0]}" if places == 1 and scopes[0] else f"in each of {places} layers"
    room = f"room for {rows:,} rows of {format_bytes(row_bytes)}, {format_bytes(rows * row_bytes)}"
    if percent and percent < 100 * parts:
        rule = f"{percent} % of an even share; more rows are an error on all ranks"
    else:
        rule = "all rows that there are, which is always enough"
    return f"experts split over {axis}: a rank has {room} {where} ({rule})"
