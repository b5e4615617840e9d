"""Which operators make up norms: what ``sequence_parallel`` speaks of.

A norm is recognised by its reduction over features (one operator, or the sum of a decomposed RMS
norm); the rest of it by the module whose call made it. A module that also multiplies matrices is
no norm, so a norm written inline in a block is its reduction alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, InputKind, Node, TensorMeta

NORM_OPS = frozenset({"aten.native_layer_norm.default", "aten._fused_rms_norm.default"})
ROW_SUMS = frozenset({"aten.sum.dim_IntList"})
HEAVY_OPS = frozenset(
    {"aten.mm.default", "aten.bmm.default", "autopar.attention", "autopar.attention_backward"}
)


def is_norm(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether an operator normalises rows of a (batch, sequence, features) tensor."""
    refs = node.refs()
    rank = len(metas[refs[0]].shape) if refs and refs[0] in metas else 0
    if node.op in NORM_OPS:
        return rank == 3
    if node.op not in ROW_SUMS or rank != 3 or len(node.args) < 3 or node.args[2] is not True:
        return False
    dims = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return dims in ((-1,), (2,)) and metas[refs[0]].is_float


def norm_region(
    graph: Graph, metas: Mapping[str, TensorMeta], backward: frozenset[str]
) -> frozenset[str]:
    """Operators of all norms, both passes, and those that make what norms read.

    Args:
        graph: The joint graph.
        metas: Shape and dtype by value.
        backward: Operators of the backward pass.
    """
    reductions = [n for n in graph.nodes if n.name not in backward and is_norm(n, metas)]
    heavy = {n.scope for n in graph.nodes if n.op in HEAVY_OPS}
    scopes = {n.scope for n in reductions if n.scope} - heavy
    region = {n.name for n in graph.nodes if n.scope in scopes} | {n.name for n in reductions}
    params = {i.name for i in graph.of_kind(InputKind.PARAM)}
    makers = {
        ref
        for node in graph.nodes
        if node.name in region and node.name not in backward
        for ref in node.refs()
        if ref not in params
    }
    return frozenset(region | makers)
