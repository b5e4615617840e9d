"""The recompute problem of a block: its local operators under chosen splits.

A block is localized as a stage of its own: what its programs would run is what is kept or made
again. Not up for choice are values that cross from block to block (else making the last block
again would mean making all blocks again, with everything alive at once), what several blocks make
in common, and views, which are always made again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Input, InputKind, Meta, Node, Phase
from autopar.sharding.decisions import Choice, Decisions
from autopar.sharding.localize import Layouts, StageBody, StageLocalizer
from autopar.sharding.stages import (
    VIEW_OPS,
    StageDemand,
    StageMap,
    assign_stages,
    stage_demands,
)
from autopar.solver.analysis import Analysis
from autopar.solver.blocks import NodeClass
from autopar.solver.recompute_problem import (
    ALWAYS_KEPT,
    ALWAYS_REMADE,
    BlockInput,
    BlockOp,
    RecomputeProblem,
)
from cost_models.liveness import LASTING_INPUTS, workspace_bytes
from cost_models.storage import Storages, storages

OpSeconds = Callable[[Node, Mapping[str, Meta]], float]


@dataclass(slots=True)
class BlockLocalizer:
    """Makes recompute problems; what is the same under all splits is found once.

    Attributes:
        analysis: Model and cluster.
        common: Values that several blocks make in common and that backward reads.
    """

    analysis: Analysis
    common: tuple[str, ...] = field(init=False)
    _map: StageMap = field(init=False)
    _demands: tuple[StageDemand, ...] = field(init=False)
    _crossing: set[str] = field(init=False)
    _counted_at: dict[str, int] = field(init=False)
    _keys: dict[int, str] = field(default_factory=dict)
    _places: dict[int, dict[NodeClass, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph, chain = self.analysis.graph, self.analysis.chain
        firsts = tuple(block.forward[0] for block in chain.blocks[1:])
        self._map = assign_stages(graph, firsts)
        self._demands = stage_demands(graph, self._map, self.analysis.gathered)
        crossing = {name for cut in chain.forward_cuts for name in cut}
        nodes = self.analysis.nodes
        self._crossing = crossing | {
            nodes[n].refs()[0] for n in crossing if nodes[n].op == "getitem"
        }
        needs = self._needs()
        self.common = tuple(n for n in needs if self._is_common(n))
        self._counted_at = {n: min(blocks) for n, blocks in needs.items()}
        self._counted_at.update(dict.fromkeys(self.common, -1))

    def _is_common(self, name: str) -> bool:
        return name not in self._map.stage and self.analysis.chain.node_class[name][0].startswith(
            "common "
        )

    def _needs(self) -> dict[str, set[int]]:
        """Forward values that are read outside of their block -> blocks whose backward needs them.

        Those that no backward needs are with the blocks that read them: remaking may need them.
        """
        stage, backward = self._map.stage, self._map.backward
        nodes, refs = self.analysis.nodes, self.analysis.refs
        needs: dict[str, set[int]] = {}
        reads: dict[str, set[int]] = {}
        for block in self.analysis.chain.blocks:
            at = block.index
            for name in (*block.forward, *block.backward):
                for ref in refs[name]:
                    if ref in nodes and ref not in backward and stage.get(ref) != at:
                        reads.setdefault(ref, set()).add(at)
            seen: set[str] = set()
            stack = [r for name in block.backward for r in refs[name]]
            while stack:
                name = stack.pop()
                if name in seen or name not in nodes or name in backward:
                    continue
                seen.add(name)
                is_view = nodes[name].op in VIEW_OPS and nodes[name].op != "getitem"
                if is_view or name not in self._map.forward_needed:
                    stack.extend(refs[name])
                else:
                    needs.setdefault(name, set()).add(at)
        return {name: needs.get(name, blocks) for name, blocks in reads.items()}

    def key(self, block: int) -> str:
        """What tells a block from others of its class: which foreign values count with it."""
        if block not in self._keys:
            metas, stage = self.analysis.metas, self._map.stage
            foreign = [
                str(metas.get(name))
                for name in self._demands[block].wanted
                if stage.get(name) != block and self._counted_at.get(name) == block
            ]
            self._keys[block] = " ".join(sorted(foreign))
        return self._keys[block]

    def candidates(self, block: int) -> tuple[str, ...]:
        """Operators of a block that may be made again."""
        return tuple(
            name
            for name in self.analysis.chain.blocks[block].forward
            if name not in self._crossing and not self._is_common(name)
        )

    def same_in(self, source: int, block: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """The operators of a block that stand where ``names`` do in a block of the same class."""
        if source == block:
            return names
        classes = self.analysis.chain.node_class
        if block not in self._places:
            forward = self.analysis.chain.blocks[block].forward
            self._places[block] = {classes[name]: name for name in forward}
        return tuple(self._places[block][classes[name]] for name in names)

    def problem(
        self,
        block: int,
        sizes: tuple[int, int, int],
        choices: Mapping[str, Mapping[str, Choice]],
        op_s: OpSeconds,
    ) -> RecomputeProblem:
        """The problem of a block.

        Args:
            block: Its index.
            sizes: Sizes of mb, dp, tp.
            choices: Splits by axis, as in :class:`~autopar.sharding.decisions.Decisions`.
            op_s: Seconds of a local operator, given the metas of all local values.
        """
        graph = self._part(block)
        decisions = Decisions(axis_sizes=sizes, choices=choices)
        layouts = Layouts.of(graph, decisions)
        localizer = StageLocalizer(block, layouts, self.analysis.signatures, self._map)
        body = localizer.run(self._demands[block])
        return _Builder(self, block, body, op_s).build()

    def _part(self, block: int) -> Graph:
        """The operators that a block makes or receives, with the graph's inputs."""
        whole, wanted = self.analysis.graph, set(self._demands[block].wanted)
        nodes = self.analysis.nodes
        wanted |= {nodes[n].refs()[0] for n in wanted if nodes[n].op == "getitem"}
        kept = tuple(n for n in whole.nodes if n.name in wanted)
        return Graph(whole.inputs, kept, self._demands[block].results)

    def counts_with(self, name: str, block: int) -> bool:
        """Whether the bytes of a value count with a block that keeps it."""
        return self._counted_at.get(name, block) == block

    def sends_forward(self, block: int, name: str, reader: int) -> bool:
        """Whether a value that another block reads goes with the forward."""
        return reader > block and name not in self._map.backward

    def roots(self, block: int, body: StageBody) -> tuple[list[str], list[str]]:
        """Local names of what forward and backward must yield."""
        ahead = [ref.name for _, _, ref, _ in body.results]
        behind = [ref.name for ref, _ in body.grads.values()]
        readers = self._demands[block].readers
        for name, ref in body.sends.items():
            for reader in readers[name]:
                (ahead if self.sends_forward(block, name, reader) else behind).append(ref.name)
        return ahead, behind


@dataclass(slots=True)
class _Builder:
    """One block's local operators as numbers."""

    owner: BlockLocalizer
    block: int
    body: StageBody
    op_s: OpSeconds
    nodes: tuple[Node, ...] = ()
    table: dict[str, Node] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def build(self) -> RecomputeProblem:
        emitter = self.body.emitter
        self.nodes = tuple(emitter.nodes)
        self.table = {n.name: n for n in self.nodes}
        inputs = self._inputs()
        program = Graph(inputs, self.nodes, ())
        metas, memory = program.metas(), storages(program)
        ids = {name: i for i, name in enumerate(memory.bytes)}
        names = [*(n.name for n in self.nodes), *(i.name for i in inputs)]
        self.numbers = {name: i for i, name in enumerate(names)}
        ahead, behind = self.owner.roots(self.block, self.body)
        is_needed = self._needed(ahead)
        may = set(self.owner.candidates(self.block))
        ops = [self._op(node, memory, ids, metas, is_needed, may) for node in self.nodes]
        return RecomputeProblem(
            ops=tuple(ops),
            inputs=tuple(
                BlockInput(
                    holds=tuple(ids[s] for s in memory.of[i.name]),
                    is_received=i.kind is InputKind.RECV and self._is_from_before(i.name),
                )
                for i in inputs
            ),
            storage_bytes=tuple(memory.bytes.values()),
            kept_bytes=self._kept_bytes(memory, inputs),
            forward_roots=tuple(self.numbers[n] for n in dict.fromkeys(ahead)),
            backward_roots=tuple(self.numbers[n] for n in dict.fromkeys(behind)),
            groups=tuple(self.groups),
        )

    def _is_from_before(self, name: str) -> bool:
        return self.body.received[name] < self.block

    def _inputs(self) -> tuple[Input, ...]:
        """What is read and not made, as inputs of a program."""
        metas, entries = self.body.emitter.metas, self.owner.analysis.graph.input_map()
        found: dict[str, Input] = {}
        roots = [n for group in self.owner.roots(self.block, self.body) for n in group]
        for name in (*(r for n in self.nodes for r in n.refs()), *roots):
            if name in self.table or name in found:
                continue
            if name.startswith("coord_"):
                kind = InputKind.COORD
            elif name in self.body.received:
                kind = InputKind.RECV
            elif name in self.body.prologue_values:
                kind = InputKind.PROLOGUE
            else:
                kind = entries[name].kind
            found[name] = Input(name, kind, name, metas.get(name))
        return tuple(found.values())

    def _needed(self, roots: Collection[str]) -> set[str]:
        """Operators of forward that its own results depend on."""
        found: set[str] = set()
        stack = list(roots)
        while stack:
            node = self.table.get(stack.pop())
            if node is None or node.name in found or node.phase is Phase.BACKWARD:
                continue
            found.add(node.name)
            stack.extend(node.refs())
        return found

    def _op(
        self,
        node: Node,
        memory: Storages,
        ids: Mapping[str, int],
        metas: Mapping[str, Meta],
        is_needed: Collection[str],
        may: Collection[str],
    ) -> BlockOp:
        is_backward = node.phase is Phase.BACKWARD
        return BlockOp(
            reads=tuple(self.numbers[r] for r in node.refs()),
            group=ALWAYS_KEPT if is_backward else self._group(node, is_needed, may),
            seconds=0.0 if node.op == "getitem" else self.op_s(node, metas),
            is_backward=is_backward,
            makes=tuple(ids[s] for s in memory.of[node.name] if _maker(s) == node.name),
            holds=tuple(ids[s] for s in memory.of[node.name]),
            workspace_bytes=0 if node.op == "getitem" else workspace_bytes(node, metas),
        )

    def _group(self, node: Node, is_needed: Collection[str], may: Collection[str]) -> int:
        if node.op == "getitem":
            return self._group(self.table[node.refs()[0]], is_needed, may)
        if node.name not in is_needed or node.op in VIEW_OPS:
            return ALWAYS_REMADE
        if node.origin not in may:
            return ALWAYS_KEPT
        return self.groups.setdefault(node.origin, len(self.groups))

    def _kept_bytes(self, memory: Storages, inputs: tuple[Input, ...]) -> tuple[int, ...]:
        """What keeping each storage costs this block."""
        kinds = {i.name: i.kind for i in inputs}
        result = []
        for storage, size in memory.bytes.items():
            name = _maker(storage)
            node = self.table.get(name)
            origin = node.origin if node is not None else name
            lasts = kinds.get(name) in LASTING_INPUTS
            elsewhere = not self.owner.counts_with(origin, self.block)
            result.append(0 if lasts or elsewhere else size)
        return tuple(result)


def _maker(storage: str) -> str:
    return storage.rpartition("#")[0] if "#" in storage else storage
