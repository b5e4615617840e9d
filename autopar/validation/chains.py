"""Which operators are one kernel: fused regions of a module, or whatever a compiler can chain.

Two neighbouring memory-bound operators of the same region are fused if nothing heavy (matmul,
convolution, attention, collective) lies between them on any path. A fused chain reads what comes
from outside and writes what is read outside, once. In backward it makes its own inner values again
from what it reads, so that they are not saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Meta, Node, Phase, TensorMeta
from cost_models.flops import FREE, OpClass, Work, tensors, work_of

EVERYTHING = "compiled"
_LEAVES = {
    "core": "softmax", "activation": "activation", "rotary": "rotary", "loss": "loss",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that are one kernel, in order."""

    nodes: tuple[Node, ...]


def region_of(scope: str) -> str:
    """Region that a module path belongs to, or "".

    >>> region_of("block.residual_1.drop"), region_of("block.attention.core.drop")
    ('residual', '')
    """
    parts = scope.split(".")
    if parts[-1].startswith("norm"):
        return "norm"
    if any(p.startswith("residual") for p in parts):
        return "residual"
    return _LEAVES.get(parts[-1], "")


class Chains:
    """The chains of one program."""

    def __init__(self, graph: Graph, fused: frozenset[str]) -> None:
        """``fused``: regions, or :data:`EVERYTHING`."""
        self.graph, self.fused = graph, fused
        self.metas = graph.metas()
        self.nodes = graph.node_map()
        self.work = {n.name: self._work(n) for n in graph.nodes}
        self._base: dict[str, str] = {}
        self._parts: dict[str, tuple[str, ...]] = {}  # operator with several results -> their names
        self._depth: dict[str, int] = {}
        self._region: dict[str, str] = {}
        self._leader: dict[str, str] = {}
        for node in graph.nodes:
            self._visit(node)

    def chains(self) -> tuple[Chain, ...]:
        """Every operator that runs a kernel, fused ones together, by first operator."""
        groups: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            if self.work[node.name] is not FREE:
                groups.setdefault(self._find(node.name), []).append(node)
        return tuple(Chain(tuple(nodes)) for nodes in groups.values())

    def work_of_chain(self, chain: Chain) -> Work:
        """What the kernel does."""
        if len(chain.nodes) == 1:
            return self.work[chain.nodes[0].name]
        inside = {n.name for n in chain.nodes}
        reads: dict[str, float] = {}
        for node in chain.nodes:
            for ref in node.refs():
                base = self.base(ref)
                if self._maker(base) not in inside:
                    size = min(_bytes(self.metas[ref]), _bytes(self.metas[base]))
                    reads[base] = max(reads.get(base, 0.0), size)
        kept = [v for n in chain.nodes for v in self._values(n) if self._is_read(v, n, inside)]
        writes = sum(_bytes(self.metas[v]) for v in kept)
        dtype = next((t.dtype for v in kept for t in tensors(self.metas[v])), "float32")
        return Work(op_class=OpClass.MEMORY, moved_bytes=sum(reads.values()) + writes, dtype=dtype)

    def without_inner(self) -> Graph:
        """The program with inner values of chains as empty: a kernel keeps them in registers."""
        empty: set[str] = set()
        for chain in self.chains():
            inside = {n.name for n in chain.nodes}
            if len(chain.nodes) > 1:
                empty |= {
                    n.name
                    for n in chain.nodes
                    if isinstance(n.meta, TensorMeta) and not self._is_read(n.name, n, inside)
                }
        nodes = [
            replace(n, meta=TensorMeta((0,), n.meta.dtype))
            if isinstance(n.meta, TensorMeta) and (n.name in empty or self.base(n.name) in empty)
            else n
            for n in self.graph.nodes
        ]
        return Graph(self.graph.inputs, tuple(nodes), self.graph.outputs)

    def inner_values(self) -> Iterable[str]:
        """Operators of chains of several whose value no other kernel reads in forward."""
        for chain in self.chains():
            if len(chain.nodes) > 1 and chain.nodes[0].phase is Phase.FORWARD:
                inside = {n.name for n in chain.nodes}
                for node in chain.nodes:
                    # a random mask is kept, not drawn again
                    is_read = any(
                        self._is_read(v, node, inside, own=chain) for v in self._values(node)
                    )
                    if not is_read and node.op != "autopar.dropout":
                        yield node.name

    def base(self, name: str) -> str:
        """The value that owns the memory of ``name``."""
        return self._base.get(name, name)

    # -- helpers -----------------------------------------------------------------------------------
    def _work(self, node: Node) -> Work:
        operands = [self.metas[name] for name in node.refs()]
        if node.op == "autopar.dropout":
            # one kernel of a GPU draws, masks and scales: no random bits in memory
            moved = sum(map(_bytes, operands)) + _bytes(node.meta)
            return Work(op_class=OpClass.MEMORY, moved_bytes=moved, dtype="bfloat16")
        return work_of(node.op, node.args, operands, node.meta)

    def _values(self, node: Node) -> tuple[str, ...]:
        return self._parts.get(node.name, (node.name,))

    def _maker(self, value: str) -> str:
        node = self.nodes.get(value)
        return node.refs()[0] if node is not None and node.op == "getitem" else value

    def _visit(self, node: Node) -> None:
        refs = node.refs()
        heavy = node.op.startswith("comm.") or self.work[node.name].op_class not in (
            OpClass.MEMORY, OpClass.FREE,
        )  # fmt: skip
        self._depth[node.name] = max((self._depth.get(r, 0) for r in refs), default=0) + heavy
        if node.op == "getitem":
            self._parts[refs[0]] = (*self._parts.get(refs[0], ()), node.name)
            return
        if self.work[node.name] is FREE and not node.op.startswith("comm.") and refs:
            self._base[node.name] = self.base(refs[0])
            return
        self._leader[node.name] = node.name
        if heavy:
            return
        region = self._region_of_node(node)
        self._region[node.name] = region
        if not region:
            return
        for ref in refs:
            other = self._maker(self.base(ref))
            if self._region.get(other) == region and self._depth[other] == self._depth[node.name]:
                first, second = sorted((self._find(other), self._find(node.name)))
                self._leader[max(first, second)] = min(first, second)

    def _region_of_node(self, node: Node) -> str:
        if EVERYTHING in self.fused:
            return EVERYTHING
        region = region_of(node.scope)
        if not node.scope:
            # autograd adds gradients outside of any module: it belongs to what it adds
            around = {self._region.get(self._maker(self.base(r)), "") for r in node.refs()}
            region = around.pop() if len(around) == 1 else ""
        return region if region in self.fused else ""

    def _find(self, name: str) -> str:
        while self._leader[name] != name:
            name = self._leader[name]
        return name

    def _is_read(
        self, value: str, node: Node, inside: set[str], *, own: Chain | None = None
    ) -> bool:
        """Whether another kernel or the caller reads a value; ``own``: not its own backward."""
        region = self._region.get(node.name, "")
        for reader in self._readers().get(value, ()):
            if reader.name in inside:
                continue
            is_own_backward = (
                own is not None
                and reader.phase is Phase.BACKWARD
                and self._region.get(reader.name, "") == region
            )
            if not is_own_backward:
                return True
        return value in self._results()

    def _readers(self) -> Mapping[str, list[Node]]:
        if not hasattr(self, "_reader_table"):
            table: dict[str, list[Node]] = {}
            for node in self.graph.nodes:
                if node.name in self._base or node.op == "getitem":
                    continue
                for ref in node.refs():
                    table.setdefault(self.base(ref), []).append(node)
            self._reader_table = table
        return self._reader_table

    def _results(self) -> set[str]:
        if not hasattr(self, "_result_set"):
            self._result_set = {self.base(o.value.name) for o in self.graph.outputs if o.value}
        return self._result_set


def _bytes(meta: Meta) -> float:
    if isinstance(meta, TensorMeta):
        return float(meta.bytes)
    return float(sum(t.bytes for t in tensors(meta)))
