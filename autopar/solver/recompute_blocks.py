"""The recompute problem of a block: its local operators under chosen splits.

A block is localized as a stage of its own: what its programs would run is what is kept or made
again. Not up for choice are views, which are always made again, what several blocks make in common,
and most values that cross from block to block: else making the last block again would mean making
all blocks again, with everything alive at once. Of two neighbouring boundaries one may be given up:
the *spare* one, whose value takes less arithmetic per byte to make again. So two halves of a layer
can be made again from what enters the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from cost_models.flops import work_of
from cost_models.liveness import LASTING_INPUTS, workspace_bytes
from cost_models.storage import Storages, storages

OpSeconds = Callable[[Node, Mapping[str, Meta]], float]


@dataclass(frozen=True, slots=True)
class Spare:
    """A value from the block before that may be made again.

    Attributes:
        name: The value.
        operators: What leads to it from values that the block before has in its backward anyway.
    """

    name: str
    operators: tuple[str, ...]


@dataclass(slots=True)
class BlockLocalizer:
    """Makes recompute problems; what is the same under all splits is found once.

    Attributes:
        analysis: Model and cluster.
        common: Values that several blocks make in common and that backward reads.
        spares: By block; None where everything that enters it is kept.
    """

    analysis: Analysis
    common: tuple[str, ...] = field(init=False)
    spares: tuple[Spare | None, ...] = field(init=False)
    _map: StageMap = field(init=False)
    _entries: Mapping[str, Input] = field(init=False)
    _demands: tuple[StageDemand, ...] = field(init=False)
    _crossing: set[str] = field(init=False)
    _needed: list[set[str]] = field(default_factory=list)
    _counted_at: dict[str, int] = field(init=False)
    _keys: dict[int, str] = field(default_factory=dict)
    _places: dict[int, dict[NodeClass, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph, chain = self.analysis.graph, self.analysis.chain
        self._entries = graph.input_map()
        firsts = tuple(block.forward[0] for block in chain.blocks[1:])
        self._map = assign_stages(graph, firsts)
        self._demands = stage_demands(graph, self._map, self.analysis.gathered)
        crossing = {name for cut in chain.forward_cuts for name in cut}
        nodes = self.analysis.nodes
        self._crossing = crossing | {
            nodes[n].refs()[0] for n in crossing if nodes[n].op == "getitem"
        }
        needs = self._needs()
        in_backward = set().union(*self._needed)
        common = tuple(n for n in needs if self._is_common(n))
        self.common = tuple(n for n in common if n in in_backward)
        self._counted_at = {n: min(blocks) for n, blocks in needs.items()}
        self._counted_at.update(dict.fromkeys(common, -1))
        self.spares = self._spares()

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
            found: set[str] = set()
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
                    found.add(name)
                    needs.setdefault(name, set()).add(at)
            self._needed.append(found)
        return {name: needs.get(name, blocks) for name, blocks in reads.items()}

    # -- what enters a block -------------------------------------------------------------------
    def _spares(self) -> tuple[Spare | None, ...]:
        blocks = self.analysis.chain.blocks
        found = [None, *(self._spare(block.index) for block in blocks[1:])]
        price = [self._flops_per_byte(spare) for spare in found]
        for at in range(1, len(found)):
            if any(
                0 < near < len(found) and (price[near], near) < (price[at], at)
                for near in (at - 1, at + 1)
            ):
                found[at] = None
        return tuple(found)

    def _spare(self, block: int) -> Spare | None:
        """The one value that enters a block from the one before, if it can be made again there."""
        chain, nodes = self.analysis.chain, self.analysis.nodes
        stage = self._map.stage
        if chain.blocks[block].key == chain.blocks[block - 1].key:
            return None  # giving up every second boundary would tell equal blocks apart
        beyond = set(chain.forward_cuts[block]) if block < len(chain.forward_cuts) else set()
        names = [n for n in chain.forward_cuts[block - 1] if n not in beyond]
        if len(names) != 1 or nodes[names[0]].op == "getitem" or stage.get(names[0]) != block - 1:
            return None
        ready = self._needed[block - 1]
        operators: dict[str, None] = {}
        stack = [names[0]]
        while stack:
            name = stack.pop()
            if name in operators or name in ready or name not in nodes:
                continue
            is_entering = stage.get(name) != block - 1
            if is_entering or (name in self._crossing and name != names[0]):
                if not self._is_at_hand(name, block - 1):
                    return None
                continue
            operators[name] = None
            stack.extend(self.analysis.refs[name])
        if names[0] not in operators or nodes[names[0]].op in VIEW_OPS:
            return None
        if self._counted_at.get(names[0]) != block:
            return None
        # views too: some ranks' views are followed by a change of layout, which is made again
        order = [n for n in chain.blocks[block - 1].forward if n in operators]
        return Spare(names[0], tuple(order))

    def _is_at_hand(self, name: str, block: int) -> bool:
        """Whether a block has a value that it did not make, at the latest when it keeps little.

        What enters it is kept by the leaner of its choices, though not by those that keep what is
        made of it: such a pair of choices keeps more than is estimated.
        """
        return self._counted_at.get(name) == block or self._is_common(name)

    def _flops_per_byte(self, spare: Spare | None) -> float:
        if spare is None:
            return float("inf")
        metas = self.analysis.metas
        flops = 0.0
        for name in spare.operators:
            node = self.analysis.nodes[name]
            work = work_of(node.op, node.args, [metas.get(r) for r in node.refs()], node.meta)
            flops += work.flops
        return flops / max(1, metas[spare.name].bytes)

    # -- blocks of one class -------------------------------------------------------------------
    def key(self, block: int) -> str:
        """What tells a block from others of its class: which foreign values count with it."""
        if block not in self._keys:
            metas, stage = self.analysis.metas, self._map.stage
            foreign = [
                str(metas.get(name))
                for name in self._demands[block].wanted
                if stage.get(name) != block and self._counted_at.get(name) == block
            ]
            spare = self.spares[block]
            before = "" if spare is None else self.analysis.chain.blocks[block - 1].key
            self._keys[block] = " ".join([before, *sorted(foreign)])
        return self._keys[block]

    def candidates(self, block: int) -> tuple[str, ...]:
        """Operators of a block that may be made again."""
        return tuple(
            name
            for name in self.analysis.chain.blocks[block].forward
            if name not in self._crossing and not self._is_common(name)
        )

    def same_in(self, source: int, block: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """What stands at a block and the one before where ``names`` do at one of the same key."""
        if source == block:
            return names
        classes, blocks = self.analysis.chain.node_class, self.analysis.chain.blocks
        if block not in self._places:
            before = blocks[block - 1].forward if self.spares[block] is not None else ()
            self._places[block] = {classes[n]: n for n in (*before, *blocks[block].forward)}
        return tuple(self._places[block][classes[name]] for name in names)

    # -- local operators -----------------------------------------------------------------------
    def problem(
        self,
        block: int,
        sizes: tuple[int, int, int],
        choices: Mapping[str, Mapping[str, Choice]],
        op_s: OpSeconds,
        *,
        spare_s: float = 0.0,
        spare_bytes: int = 0,
        offloads: bool = False,
    ) -> RecomputeProblem:
        """The problem of a block.

        Args:
            block: Its index.
            sizes: Sizes of mb, dp, tp.
            choices: Splits by axis, as in :class:`~autopar.sharding.decisions.Decisions`.
            op_s: Seconds of a local operator, given the metas of all local values.
            spare_s: Seconds of making the block's spare value again.
            spare_bytes: Bytes that are kept for that.
            offloads: Whether what the block makes may be kept in host memory.
        """
        graph = self._part(block)
        decisions = Decisions(axis_sizes=sizes, choices=choices)
        layouts = Layouts.of(graph, decisions)
        localizer = StageLocalizer(block, layouts, self.analysis.signatures, self._map)
        body = localizer.run(self._demands[block])
        ahead, behind, sent = self._roots(block, body)
        return recompute_problem(
            tuple(body.emitter.nodes),
            self._inputs(body, (*ahead, *behind)),
            forward_roots=ahead,
            backward_roots=behind,
            sent_roots=sent,
            received=[n for n, source in body.received.items() if source < block],
            may=self.candidates(block),
            may_offload=self.analysis.chain.blocks[block].forward if offloads else (),
            elsewhere=lambda name: self._counted_at.get(name, block) != block,
            op_s=op_s,
            spare=self.spares[block],
            spare_s=spare_s,
            spare_bytes=spare_bytes,
        )

    def _part(self, block: int) -> Graph:
        """The operators that a block makes or receives, with the graph's inputs."""
        demand, nodes = self._demands[block], self.analysis.nodes
        kept: dict[str, Node] = {}
        for node in demand.nodes:
            if node.op == "getitem":  # what it picks from may be another block's
                base = nodes[node.refs()[0]]
                kept.setdefault(base.name, base)
            kept[node.name] = node
        read = {ref for node in kept.values() for ref in self.analysis.refs[node.name]}
        read |= {output.value.name for output in demand.results if output.value is not None}
        inputs = tuple(self._entries[name] for name in self._entries if name in read)
        return Graph(inputs, tuple(kept.values()), demand.results)

    def _roots(self, block: int, body: StageBody) -> tuple[list[str], list[str], list[str]]:
        """Local names of what forward and backward must yield, and of what backward sends."""
        ahead = [ref.name for _, _, ref, _ in body.results]
        behind = [ref.name for ref, _ in body.grads.values()]
        sent: list[str] = []
        readers = self._demands[block].readers
        for name, ref in body.sends.items():
            for reader in readers[name]:
                goes_ahead = reader > block and name not in self._map.backward
                (ahead if goes_ahead else sent).append(ref.name)
        behind = list(dict.fromkeys([*behind, *sent]))
        return list(dict.fromkeys(ahead)), behind, list(dict.fromkeys(sent))

    def _inputs(self, body: StageBody, roots: Iterable[str]) -> tuple[Input, ...]:
        """What is read and not made, as inputs of a program."""
        metas, entries = body.emitter.metas, self._entries
        made = {n.name for n in body.emitter.nodes}
        found: dict[str, Input] = {}
        for name in (*(r for n in body.emitter.nodes for r in n.refs()), *roots):
            if name in made or name in found:
                continue
            if name.startswith("coord_"):
                kind = InputKind.COORD
            elif name in body.received:
                kind = InputKind.RECV
            elif name in body.prologue_values:
                kind = InputKind.PROLOGUE
            else:
                kind = entries[name].kind
            found[name] = Input(name, kind, name, metas.get(name))
        return tuple(found.values())


def recompute_problem(  # noqa: PLR0913  what surrounds the operators
    nodes: Sequence[Node],
    inputs: Sequence[Input],
    *,
    forward_roots: Sequence[str],
    backward_roots: Sequence[str],
    sent_roots: Sequence[str] = (),
    received: Collection[str],
    may: Collection[str],
    elsewhere: Callable[[str], bool],
    op_s: OpSeconds,
    spare: Spare | None = None,
    spare_s: float = 0.0,
    spare_bytes: int = 0,
    may_offload: Collection[str] = (),
) -> RecomputeProblem:
    """Local operators as numbers.

    Args:
        nodes: Forward and backward operators in order, as localized.
        inputs: What they read and do not make.
        forward_roots: Values that forward must yield.
        backward_roots: Values that backward must yield.
        sent_roots: Those of them that earlier blocks wait for.
        received: Inputs that are there in forward alone.
        may: Operators of the graph that may be made again.
        elsewhere: Whether the bytes of a value count with another block.
        op_s: Seconds of an operator, given the metas of all values.
        spare: An input that may be made again, if there is one.
        spare_s: Seconds of that.
        spare_bytes: Bytes that are kept for that.
        may_offload: Operators of the graph whose values may be kept in host memory.
    """
    program = Graph(tuple(inputs), tuple(nodes), ())
    memory = storages(program)
    spared = spare.name if spare is not None and spare.name in received else ""
    given = [i for i in inputs if i.name != spared]
    names = [*([spared] if spared else []), *(n.name for n in nodes), *(i.name for i in given)]
    needed = _forward_needed(program, forward_roots)
    builder = _Builder(
        program=program, memory=memory, metas=program.metas(), needed=needed, may=frozenset(may),
        numbers={name: i for i, name in enumerate(names)},
        storage={name: i for i, name in enumerate(memory.bytes)}, op_s=op_s, spared=spared,
    )  # fmt: skip
    ops = []
    if spared and spare is not None:
        builder.groups[spared] = 0
        held = builder.held(spared)
        reads = (len(names),)  # the input that stands for all that is kept for it
        ops.append(BlockOp(reads=reads, group=0, seconds=spare_s, makes=held, holds=held))
    ops += [builder.op(node) for node in nodes]
    groups: list[tuple[str, ...]] = [(name,) for name in builder.groups]
    storage_bytes, kept_bytes = tuple(memory.bytes.values()), builder.kept_bytes(elsewhere)
    read = [
        BlockInput(
            holds=builder.held(i.name),
            is_received=i.name in received,
            is_gradient=i.kind is InputKind.RECV and i.name not in received,
        )
        for i in given
    ]
    if spared and spare is not None:
        groups[0] = spare.operators
        read.append(BlockInput(holds=(len(storage_bytes),), is_received=True))
        storage_bytes, kept_bytes = (*storage_bytes, spare_bytes), (*kept_bytes, spare_bytes)
    units, unit_of = builder.units(names[: len(ops)], frozenset(may_offload), kept_bytes)
    return RecomputeProblem(
        units=units,
        unit_of=unit_of,
        ops=tuple(ops),
        inputs=tuple(read),
        storage_bytes=storage_bytes,
        kept_bytes=kept_bytes,
        forward_roots=tuple(builder.numbers[n] for n in forward_roots),
        backward_roots=tuple(builder.numbers[n] for n in backward_roots),
        sent_roots=tuple(builder.numbers[n] for n in sent_roots),
        groups=tuple(groups),
    )


def _forward_needed(program: Graph, roots: Iterable[str]) -> frozenset[str]:
    """Operators of forward that its own results depend on."""
    table = program.node_map()
    found: set[str] = set()
    stack = list(roots)
    while stack:
        node = table.get(stack.pop())
        if node is None or node.name in found or node.phase is Phase.BACKWARD:
            continue
        found.add(node.name)
        stack.extend(node.refs())
    return frozenset(found)


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Names of local values, groups and storages as numbers."""

    program: Graph
    memory: Storages
    metas: Mapping[str, Meta]
    needed: frozenset[str]
    may: frozenset[str]
    numbers: Mapping[str, int]
    storage: Mapping[str, int]
    op_s: OpSeconds
    spared: str
    groups: dict[str, int] = field(default_factory=dict)
    table: dict[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        self.table = self.program.node_map()

    def held(self, name: str) -> tuple[int, ...]:
        """Storages behind a value."""
        return tuple(self.storage[s] for s in self.memory.of[name])

    def op(self, node: Node) -> BlockOp:
        """A local operator."""
        is_backward, is_item = node.phase is Phase.BACKWARD, node.op == "getitem"
        makes = [s for s in self.memory.of[node.name] if _maker(s) == node.name]
        return BlockOp(
            reads=tuple(self.numbers[r] for r in node.refs()),
            group=ALWAYS_KEPT if is_backward else self._group(node),
            seconds=0.0 if is_item else self.op_s(node, self.metas),
            is_backward=is_backward,
            makes=tuple(self.storage[s] for s in makes),
            holds=self.held(node.name),
            workspace_bytes=0 if is_item else workspace_bytes(node, self.metas),
        )

    def _group(self, node: Node) -> int:
        if node.op == "getitem":
            return self._group(self.table[node.refs()[0]])
        if node.name not in self.needed or node.op in VIEW_OPS:
            return ALWAYS_REMADE
        if node.origin not in self.may and node.origin != self.spared:
            return ALWAYS_KEPT
        return self.groups.setdefault(node.origin, len(self.groups))

    def units(
        self, names: Sequence[str], may: frozenset[str], kept_bytes: Sequence[int]
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Operators of the graph that make what may be in host memory, and each operator's."""
        numbers: dict[str, int] = {}
        found = []
        for name in names if may else ():
            node, held = self.table.get(name), self.memory.of[name]
            origin = self._origin(name)
            is_own = (
                node is not None
                and node.phase is not Phase.BACKWARD
                and node.op not in VIEW_OPS - {"getitem"}
                and origin in may
                and len(held) == 1
                and self._origin(_maker(held[0])) == origin
                and kept_bytes[self.storage[held[0]]] > 0
            )
            found.append(numbers.setdefault(origin, len(numbers)) if is_own else -1)
        return tuple(numbers), tuple(found)

    def _origin(self, name: str) -> str:
        node = self.table.get(name)
        if node is not None and node.op == "getitem":
            node = self.table.get(node.refs()[0])
        return node.origin if node is not None else ""

    def kept_bytes(self, elsewhere: Callable[[str], bool]) -> tuple[int, ...]:
        """What keeping each storage costs the block."""
        kinds = {i.name: i.kind for i in self.program.inputs}
        result = []
        for storage, size in self.memory.bytes.items():
            name = _maker(storage)
            node = self.table.get(name)
            origin = node.origin if node is not None else name
            is_free = kinds.get(name) in LASTING_INPUTS or elsewhere(origin)
            result.append(0 if is_free else size)
        return tuple(result)


def _maker(storage: str) -> str:
    return storage.rpartition("#")[0] if "#" in storage else storage
