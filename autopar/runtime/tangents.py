"""Which outputs take a gradient, and which parameters those that were given one reach.

Eager autograd leaves ``.grad`` alone where no path leads from what is differentiated to a
parameter, and an optimizer then skips it: no weight decay, no momentum. A program computes with
zeros for an output that nobody used; what depends on such zeros alone is no gradient.
"""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.graph import Graph, InputKind, OutputKind


def differentiable_outputs(graph: Graph) -> tuple[str, ...]:
    """Paths of the outputs, or of the loss, that a gradient can flow into."""
    return tuple(i.target for i in graph.of_kind(InputKind.TANGENT))


def reached_parameters(graph: Graph, given: Collection[str]) -> frozenset[str]:
    """Parameters whose gradient depends on an output of ``given``, or on none at all.

    A gradient that is a constant, such as that of ``sign``, depends on none; the parameter has it.

    Args:
        graph: A joint program; every rank has the same.
        given: Paths of the outputs that were given a gradient.

    Returns:
        Names of parameters; of one in parts all parts, as soon as one of them is reached.
    """
    reaching: dict[str, frozenset[str]] = {
        i.name: frozenset({i.target}) if i.kind is InputKind.TANGENT else frozenset()
        for i in graph.inputs
    }
    for node in graph.nodes:
        reaching[node.name] = frozenset().union(*(reaching[name] for name in node.refs()))
    wanted = frozenset(given)
    names = {
        o.target
        for o in graph.outputs_of(OutputKind.GRAD)
        if o.value is not None
        and (not reaching[o.value.name] or not wanted.isdisjoint(reaching[o.value.name]))
    }
    wholes = {i.param for i in graph.of_kind(InputKind.PARAM) if i.target in names}
    parts = {i.target for i in graph.of_kind(InputKind.PARAM) if i.param in wholes}
    return frozenset(names | parts)
