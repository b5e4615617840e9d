"""Divides a stage's backward program into two: gradients of its inputs, gradients of its weights.

``I`` makes what other stages wait for, ``W`` the rest, which nothing waits for: a schedule runs it
where a rank would idle. Both together compute what the backward does, operator by operator. What
``W`` reads and ``I`` was given or made is *held*: ``I`` yields it as saved values for ``W`` to
take. A view is made again from its base. A forward value that the backward makes again is made in
``I`` if both read it, and held.

Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Graph, InputKind, Meta, Node, Output, OutputKind, Ref
from autopar.sharding.split import assemble
from autopar.sharding.stages import VIEW_OPS, ancestors

# What a rank drops when the program that it was given to has run; all else it can give again.
_GIVEN_ONCE = frozenset({InputKind.SAVED, InputKind.RECV})


@dataclass(frozen=True, slots=True)
class BackwardHalves:
    """The two programs of a divided backward.

    Attributes:
        inputs: Yields what is sent, and as SAVED what the other half needs.
        weights: Yields the gradients of parameters.
    """

    inputs: Graph
    weights: Graph

    @property
    def held(self) -> tuple[str, ...]:
        """Values that pass from the first to the second, in order."""
        return tuple(o.target for o in self.inputs.outputs_of(OutputKind.SAVED))


def split_backward(backward: Graph) -> BackwardHalves:
    """The two halves of a backward program.

    A stage that sends no gradients, such as the first one, has an empty first half; one that trains
    nothing has an empty second half.

    Args:
        backward: A stage's backward program, with outputs SEND and GRAD.
    """
    sends = tuple(backward.outputs_of(OutputKind.SEND))
    others = tuple(o for o in backward.outputs if o.kind is not OutputKind.SEND)
    early = ancestors(backward, {o.value.name for o in sends if o.value is not None})
    # a result that is picked from an operator with several is picked where that runs
    early |= {n.name for n in backward.nodes if n.op == "getitem" and n.refs()[0] in early}
    late, held = _second_half(backward, early, others)
    describe: dict[str, tuple[InputKind, str, Meta]] = {
        i.name: (i.kind, i.target, i.meta) for i in backward.inputs
    }
    first = assemble(
        tuple(n for n in backward.nodes if n.name in early),
        (*sends, *(Output(OutputKind.SAVED, name, Ref(name)) for name in held)),
        describe,
    )
    metas = backward.metas()
    after = dict(describe)
    after.update({name: (InputKind.SAVED, name, metas[name]) for name in held})
    second = assemble(tuple(n for n in backward.nodes if n.name in late), others, after)
    return BackwardHalves(first, second)


def _second_half(
    backward: Graph, early: frozenset[str], outputs: tuple[Output, ...]
) -> tuple[set[str], tuple[str, ...]]:
    """Operators of the second half, and the values that it is handed, in order."""
    nodes: dict[str, Node] = backward.node_map()
    inputs = backward.input_map()
    late: set[str] = set()
    held: set[str] = set()
    stack = [n.name for n in backward.nodes if n.name not in early]
    stack += [o.value.name for o in outputs if o.value is not None]
    while stack:
        name = stack.pop()
        if name in late or name in held:
            continue
        if name in inputs:
            if inputs[name].kind in _GIVEN_ONCE:
                held.add(name)
            continue
        node = nodes[name]
        if name in early and (node.op not in VIEW_OPS or node.op == "getitem"):
            held.add(name)
            continue
        late.add(name)
        stack.extend(node.refs())
    order = [*inputs, *nodes]
    return late, tuple(name for name in order if name in held)
