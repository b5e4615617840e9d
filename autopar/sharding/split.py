"""Divides one stage's operators into the forward and the backward program.

The *saved set* is what forward keeps for backward. It starts from what backward operators read. A
view is made again from its base; an operator in the recompute set, or one that only backward needs,
is made again from its own operands; everything else is saved. Operators made again in backward are
placed right before their first reader, so that they live as briefly as possible. Collectives and
random operators are made again like any other: every rank of a group runs the same program, and
random bits are a hash of the element's position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Input, InputKind, Meta, Node, Output, Phase
from autopar.sharding.stages import VIEW_OPS


@dataclass(frozen=True, slots=True)
class Halves:
    """Forward and backward operators of a stage and what passes between them.

    Attributes:
        forward: Operators of the forward program, in order.
        backward: Operators of the backward program, in order, recomputed ones included.
        saved: Values that forward hands to backward, in order.
        recomputed: Operators that backward makes again, views left out.
    """

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    saved: tuple[str, ...]
    recomputed: tuple[str, ...]


def split_forward_backward(
    nodes: tuple[Node, ...],
    forward_roots: Iterable[str],
    backward_roots: Iterable[str],
    forward_only: frozenset[str],
    recompute: frozenset[str],
) -> Halves:
    """Divide a stage's local operators.

    Args:
        nodes: The stage's operators in execution order.
        forward_roots: Values that the forward program must yield.
        backward_roots: Values that the backward program must yield.
        forward_only: Inputs that only the forward program can read (values received in forward);
            where backward needs one it is saved.
        recompute: Global names of operators whose values are not kept.
    """
    table = {n.name: n for n in nodes}
    in_backward = {n.name for n in nodes if n.phase is Phase.BACKWARD}
    forward_needed = _closure(table, forward_roots, in_backward)
    reads: dict[str, None] = {}
    for reader in nodes:
        if reader.name in in_backward:
            reads.update(dict.fromkeys(r for r in reader.refs() if r not in in_backward))
    reads.update(dict.fromkeys(r for r in backward_roots if r not in in_backward))
    saved: set[str] = set()
    again: set[str] = set()
    stack = list(reads)
    while stack:
        name = stack.pop()
        if name in saved or name in again:
            continue
        node = table.get(name)
        if node is None:
            if name in forward_only:
                saved.add(name)
            continue
        if _is_made_again(node, table, forward_needed, recompute):
            again.add(name)
            stack.extend(node.refs())
        else:
            saved.add(name)
    order = {n.name: i for i, n in enumerate(nodes)}
    forward_keep = _closure(table, [*forward_roots, *saved], in_backward)
    forward = tuple(n for n in nodes if n.name in forward_keep)
    backward = _lazy_order(nodes, table, in_backward, again, backward_roots)
    return Halves(
        forward,
        backward,
        tuple(sorted(saved, key=lambda n: order.get(n, -1))),
        tuple(n for n in order if n in again and table[n].op not in VIEW_OPS),
    )


def _closure(table: Mapping[str, Node], roots: Iterable[str], excluded: set[str]) -> set[str]:
    """Operators that ``roots`` depend on, not looking into ``excluded``."""
    found: set[str] = set()
    stack = [r for r in roots if r in table]
    while stack:
        name = stack.pop()
        if name in found or name in excluded:
            continue
        found.add(name)
        stack.extend(r for r in table[name].refs() if r in table)
    return found


def _is_made_again(
    node: Node, table: Mapping[str, Node], forward_needed: set[str], recompute: frozenset[str]
) -> bool:
    if node.op == "getitem":
        base = table[node.refs()[0]]
        return _is_made_again(base, table, forward_needed, recompute)
    if node.name not in forward_needed or node.op in VIEW_OPS:
        return True
    return node.origin in recompute


def _lazy_order(
    nodes: tuple[Node, ...],
    table: Mapping[str, Node],
    in_backward: set[str],
    again: set[str],
    roots: Iterable[str],
) -> tuple[Node, ...]:
    """Backward operators in order, each remade forward operator right before its first reader."""
    keep = _closure({n: table[n] for n in (*in_backward, *again)}, roots, set())
    placed: dict[str, Node] = {}

    def place(name: str) -> None:
        stack = [name]
        while stack:
            top = stack[-1]
            if top in placed or top not in keep:
                stack.pop()
                continue
            missing = [r for r in table[top].refs() if r in keep and r not in placed]
            if missing:
                stack.extend(reversed(missing))
                continue
            placed[top] = table[top]
            stack.pop()

    for node in nodes:
        if node.name in in_backward:
            place(node.name)
    for root in roots:
        place(root)
    return tuple(replace(n, phase=Phase.BACKWARD) for n in placed.values())


def assemble(
    nodes: tuple[Node, ...],
    outputs: tuple[Output, ...],
    describe: Mapping[str, tuple[InputKind, str, Meta]],
) -> Graph:
    """A program from its operators and outputs; inputs are what is read and not made.

    Args:
        nodes: Operators in order.
        outputs: What it yields.
        describe: Input name -> kind, target, meta; coordinates are recognised by name.
    """
    made = {n.name for n in nodes}
    read: dict[str, None] = {}
    for node in nodes:
        read.update(dict.fromkeys(r for r in node.refs() if r not in made))
    for output in outputs:
        if output.value is not None and output.value.name not in made:
            read[output.value.name] = None
    inputs = []
    for name in read:
        if name.startswith("coord_"):
            inputs.append(Input(name, InputKind.COORD, name.removeprefix("coord_"), None))
            continue
        kind, target, meta = describe[name]
        inputs.append(Input(name, kind, target, meta if not isinstance(meta, tuple) else None))
    return Graph(tuple(inputs), nodes, outputs)
