"""Which dims of which values are split together, over a whole graph.

Dims that one factor ties together are of one class: the batch dim of a label and that of a hidden
state are, and a scale vector whose length happens to be the batch size is not.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, InputKind, Node, OutputKind, TensorMeta
from autopar.sharding.signature import Dims, OpSignature

Signatures = Mapping[str, OpSignature | None]
Place = tuple[str, int]


class PlaceClasses:
    """Union-find over (value, dim): which dims are split together."""

    def __init__(self) -> None:
        self._parent: dict[Place, Place] = {}

    def find(self, key: Place) -> Place:
        """The dim that stands for the class of ``key``."""
        root = key
        while self._parent.setdefault(root, root) != root:
            root = self._parent[root]
        while self._parent[key] != root:
            self._parent[key], key = root, self._parent[key]
        return root

    def unite(self, left: Place, right: Place) -> None:
        """Make two classes one."""
        a, b = self.find(left), self.find(right)
        if a != b:
            self._parent[max(a, b)] = min(a, b)


def result_name(node: Node, index: int) -> str:
    """Key of one result: the operator's name, or ``name#index`` if it has several."""
    return f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name


def source_of(node: Node) -> str:
    """What a ``getitem`` picks, as a result key."""
    base, index = node.refs()[0], node.args[1]
    return f"{base}#{index}"


def dim_classes(graph: Graph, signatures: Signatures) -> PlaceClasses:
    """Dims that one factor ties together, over the whole graph."""
    classes = PlaceClasses()
    for node in graph.nodes:
        if node.op == "getitem":
            meta = node.meta
            if isinstance(meta, TensorMeta):
                for dim in range(len(meta.shape)):
                    classes.unite((node.name, dim), (source_of(node), dim))
            continue
        signature = signatures.get(node.name)
        if signature is None:
            continue
        for places in factor_places(node, signature).values():
            for place in places[1:]:
                classes.unite(places[0], place)
    return classes


def factor_places(node: Node, signature: OpSignature) -> dict[str, list[tuple[str, int]]]:
    """Factor -> (value, dim) pairs of which it is the outermost factor."""
    places: dict[str, list[tuple[str, int]]] = {}

    def add(name: str, dims: Dims | None) -> None:
        for dim, factors in enumerate(dims or ()):
            if factors:
                places.setdefault(factors[0], []).append((name, dim))

    for name, dims in zip(node.refs(), signature.inputs, strict=True):
        add(name, dims)
    for index, dims in enumerate(signature.outputs):
        add(result_name(node, index), dims)
    return places


def argument_only_values(graph: Graph) -> set[str]:
    """Values that depend on call arguments, constants and unmutated buffers alone."""
    mutated = {o.target for o in graph.outputs_of(OutputKind.MUTATION)}
    known = {
        i.name
        for i in graph.inputs
        if i.kind in (InputKind.USER, InputKind.CONSTANT)
        or (i.kind is InputKind.BUFFER and i.target not in mutated)
    }
    for node in graph.nodes:
        if all(ref in known for ref in node.refs()):
            known.add(node.name)
    return known
