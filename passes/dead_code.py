"""Remove operators whose results nobody reads."""

from __future__ import annotations

from torch import fx

from passes.base import PassContext, PassResult


def remove_dead_code(graph_module: fx.GraphModule, ctx: PassContext) -> PassResult:
    """Drop every operator, collectives included, that no output depends on.

    Before: ``g = all_gather(x); y = mm(x, w); return y``.
    After: ``y = mm(x, w); return y``.

    Every operator of a program is free of side effects (mutations are outputs), so collectives are
    dropped too; fx's own elimination keeps what it takes for impure. All ranks of a mesh run the
    same program and drop the same collectives. Placeholders stay. Keeps numerics bit for bit.
    """
    modified = False
    for node in reversed(list(graph_module.graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph_module.graph.erase_node(node)
            modified = True
    if modified:
        graph_module.recompile()
    return PassResult(graph_module, modified)
