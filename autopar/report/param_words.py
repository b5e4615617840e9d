"""How each parameter is split, in the words that people use for it.

"Column-parallel" and "row-parallel" say what a split does to the product, not which dim of the
stored tensor is cut: a linear layer keeps its weight as (out, in) and transposes it, GPT-2 keeps
(in, out). So the parameter is followed through the operators that only move data to the operator
that consumes it, and the words come from the operand's dim that the plan splits there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from autopar.ir.graph import Graph, Input, InputKind, Node, Phase
from autopar.sharding.placement import Partial, Placement, R, Replicate, Shard, parse_placement
from autopar.sharding.signature import AxisStrategy

COLUMN = "column-parallel"
ROW = "row-parallel"
EXPERTS = "split by experts"
STORED_WHOLE = ", stored whole"
_MOVES = frozenset(
    {
        "aten.permute.default", "aten.view.default", "aten.expand.default", "aten._to_copy.default",
        "aten.slice.Tensor", "aten.select.int", "getitem",
    }
)  # fmt: skip
# Operator -> operand position -> dim that is split -> words.  Dims as in the operator's own
# schema: mm is (m, k) x (k, n), n a column of the result, k the reduced one.
_WORDS: Mapping[str, Mapping[int, Mapping[int, str]]] = {
    "aten.mm.default": {0: {0: COLUMN, 1: ROW}, 1: {0: ROW, 1: COLUMN}},
    "aten.bmm.default": {
        0: {0: "split over its batch", 1: COLUMN, 2: ROW},
        1: {0: "split over its batch", 1: ROW, 2: COLUMN},
    },
    "aten.embedding.default": {0: {0: "vocabulary-parallel", 1: COLUMN}},
    "aten.convolution.default": {1: {0: COLUMN, 1: ROW}},
    "autopar.grouped_mm": {1: {0: EXPERTS, 1: ROW, 2: COLUMN}},
    "autopar.moe_spread": {0: {0: EXPERTS}},
}


def describe_param_splits(
    graph: Graph,
    splits: Mapping[str, str],
    *,
    axis: str = "tp",
    zero3_params: Collection[str] = (),
    expert_params: Collection[str] = (),
) -> dict[str, str]:
    """Words for the split of every parameter over one mesh axis.

    Args:
        graph: The captured graph.
        splits: Operator name -> text of its strategy, input name -> text of its placement;
            what is not listed is replicated. This is ``plan.splits[axis]``.
        axis: Name of the axis, for the words.
        zero3_params: Names of parameters that are also sharded over dp at rest.
        expert_params: Names of parameters whose experts are split over dp.

    Returns:
        Parameter name -> words such as ``"column-parallel over tp"``.
    """
    nodes = graph.node_map()
    users = graph.users()
    found: dict[str, list[str]] = {}
    for param in graph.of_kind(InputKind.PARAM):
        words = _describe(param, nodes, users, splits, axis)
        if param.param in expert_params:
            over_dp = f"{EXPERTS} over dp"
            words = over_dp if words == "replicated" else f"{over_dp}, {words}"
        if param.param in zero3_params:
            words = "sharded over dp (ZeRO-3)" if words == "replicated" else f"{words}, dp (ZeRO-3)"
        found.setdefault(param.param, []).append(words)
    return {name: _joined(texts) for name, texts in found.items()}


def _joined(texts: list[str]) -> str:
    """Words for the parts of a fused projection, which may be split differently."""
    different = list(dict.fromkeys(texts))
    bare = dict.fromkeys(text.replace(STORED_WHOLE, "") for text in different)
    if len(bare) == 1 and len(different) > 1:
        return f"{next(iter(bare))}, partly stored whole"
    return "; ".join(different)


def _describe(
    param: Input,
    nodes: Mapping[str, Node],
    users: Mapping[str, list[str]],
    splits: Mapping[str, str],
    axis: str,
) -> str:
    stored = parse_placement(splits.get(param.name, "R"))
    consumers = list(_consumers(param.name, nodes, users))
    forward = [pair for pair in consumers if pair[0].phase is Phase.FORWARD] or consumers
    words = dict.fromkeys(_words_at(node, value, splits) for node, value in forward)
    found = [w for w in words if w != "replicated"]
    if not found:
        if isinstance(stored, Shard):
            return f"sharded over {axis} (dim {stored.dim}), gathered before use"
        return "replicated"
    text = f"{' and '.join(found)} over {axis}"
    return text + STORED_WHOLE if isinstance(stored, Replicate) else text


def _consumers(
    name: str, nodes: Mapping[str, Node], users: Mapping[str, list[str]]
) -> Iterator[tuple[Node, str]]:
    """Operators that compute with the value, and the name under which they read it."""
    waiting = [name]
    while waiting:
        value = waiting.pop()
        for user in users.get(value, ()):
            node = nodes[user]
            if node.op in _MOVES:
                waiting.append(user)
            else:
                yield node, value


def _words_at(node: Node, value: str, splits: Mapping[str, str]) -> str:
    """Words for the operand ``value`` of ``node``."""
    text = splits.get(node.name)
    if text is None or "->" not in text:
        return "replicated"
    position = node.refs().index(value)
    placements = AxisStrategy.parse(text).inputs
    placement: Placement = placements[position] if position < len(placements) else R
    if isinstance(placement, Partial):
        return "added by one rank"
    if not isinstance(placement, Shard):
        return "replicated"
    dims = _WORDS.get(node.op, {}).get(position, {})
    if node.op == "aten.convolution.default" and len(node.args) > 6 and node.args[6] is True:
        dims = {0: ROW, 1: COLUMN}  # a transposed convolution keeps its weight as (in, out)
    return dims.get(placement.dim, f"split with its activations (dim {placement.dim})")
