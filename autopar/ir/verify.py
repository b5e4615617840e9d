"""Invariants of a program, checked after capture and after every rewrite."""

from __future__ import annotations

from autopar.errors import PassError
from autopar.ir.graph import Graph, Input, Node, TensorMeta


def verify_names(graph: Graph, *, what: str = "graph") -> None:
    """Check that every name stands for one value and every reference for an earlier one.

    Args:
        graph: The program, in any form.
        what: How to call it in the error.

    Raises:
        PassError: A name is defined twice, or read before it is defined.
    """
    _verify(graph, what, metas=False)


def verify_graph(graph: Graph, *, what: str = "graph") -> None:
    """Check that ``graph`` is well formed.

    Names are unique; every reference is to an input or an earlier operator; every operator but
    ``getitem`` of an absent result has a meta; ``getitem`` picks an existing result with the same
    meta; twins are forward operators of this graph or of the one it came from.

    Args:
        graph: The program.
        what: How to call it in the error.

    Raises:
        PassError: An invariant is broken; the text names the operator.
    """
    _verify(graph, what, metas=True)


def _verify(graph: Graph, what: str, *, metas: bool) -> None:
    seen: dict[str, Input | Node] = {}
    for entry in graph.inputs:
        _define(seen, entry, what)
    for node in graph.nodes:
        _check_reads(node, seen, what)
        if metas:
            _check_meta(node, seen, what)
        _define(seen, node, what)
    _check_outputs(graph, seen, what)


def _check_reads(node: Node, seen: dict[str, Input | Node], what: str) -> None:
    for name in node.refs():
        if name not in seen:
            raise PassError(
                f"{what}: operator {node.name!r} ({node.op}) reads {name!r}, "
                "which no input or earlier operator defines"
            )


def _check_outputs(graph: Graph, seen: dict[str, Input | Node], what: str) -> None:
    for output in graph.outputs:
        if output.value is not None and output.value.name not in seen:
            raise PassError(
                f"{what}: output {output.kind}:{output.target!r} is {output.value.name!r}, "
                "which nothing defines"
            )


def _define(seen: dict[str, Input | Node], item: Input | Node, what: str) -> None:
    if item.name in seen:
        raise PassError(f"{what}: the name {item.name!r} is defined twice")
    seen[item.name] = item


def _check_meta(node: Node, seen: dict[str, Input | Node], what: str) -> None:
    if node.op == "getitem":
        source_name, index = node.refs()[0], node.args[1]
        results = seen[source_name].meta
        if not isinstance(results, tuple) or not isinstance(index, int) or index >= len(results):
            raise PassError(f"{what}: {node.name!r} takes result {index} of {source_name!r}, "
                            "which has no such result")  # fmt: skip
        if results[index] != node.meta:
            raise PassError(f"{what}: {node.name!r} is {node.meta}, but result {index} of "
                            f"{source_name!r} is {results[index]}")  # fmt: skip
        return
    metas = node.metas()
    if not any(isinstance(meta, TensorMeta) for meta in metas):
        raise PassError(f"{what}: operator {node.name!r} ({node.op}) has no result meta")
    for meta in metas:
        if meta is not None and any(size < 0 for size in meta.shape):
            raise PassError(f"{what}: operator {node.name!r} has a negative size: {meta}")
