"""What each block costs under chosen splits: the menus from which stages are built.

Seconds are sums of the same prices as in the splits problem, laid out by block and pass. Bytes are
estimates (a plan that is kept is measured exactly): what backward reads, with views resolved, in
the layout in which it is kept. Three ways to run a block:

* ``none``: everything that backward reads is kept;
* ``selective``: matmuls, convolutions and attention are kept, what lies between is made again;
* ``full``: only what enters the block is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Node, TensorMeta
from autopar.sharding.placement import Layout
from autopar.sharding.stages import VIEW_OPS, ancestors
from autopar.solver.analysis import Analysis
from autopar.solver.prices import PriceList
from autopar.solver.splits_problem import Pass, SplitOption, SplitsProblem
from autopar.solver.splits_structure import GroupKind, SplitsStructure
from autopar.solver.stages_problem import BlockMenu, Option
from cost_models.flops import OpClass, work_of

RECOMPUTE = ("none", "selective", "full")
KEPT_CLASSES = frozenset({OpClass.MATMUL, OpClass.ATTENTION, OpClass.CONV})
# Tensors of the largest size in a block that are alive at once, beyond what is saved.
TRANSIENT_TENSORS = 3


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Menus of all blocks under one choice of splits.

    Attributes:
        menus: By block; the options are named as in :data:`RECOMPUTE`.
        boundary_bytes: Per boundary, bytes of a message forward and of one backward.
        recompute: Per block, option name -> forward operators whose values are not kept.
    """

    menus: tuple[BlockMenu, ...]
    boundary_bytes: tuple[tuple[int, int], ...]
    recompute: tuple[Mapping[str, tuple[str, ...]], ...]


class BlockTables:
    """Makes tables; what several of them share is found once.

    Args:
        analysis: Model and cluster.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._sets = tuple(_recompute_sets(analysis, b.forward) for b in analysis.chain.blocks)
        sent = {n.partition("#")[0] for cut in analysis.chain.backward_cuts for n in cut}
        # operators that the gradients between blocks come from: the first half of a split backward
        self._sent_from = ancestors(analysis.graph, sent)
        self._bases: dict[object, _Base] = {}
        self._homes: dict[int, Mapping[str, int]] = {}

    def table(
        self,
        sizes: tuple[int, int, int],
        problem: SplitsProblem,
        options: tuple[int, ...],
        parameters: SplitsProblem | None = None,
    ) -> BlockTable:
        """Menus under a choice.

        Args:
            sizes: Sizes of mb, dp, tp of the mesh of ``problem``.
            problem: The splits problem of that mesh, or of one with the same micro-batches.
            options: The choice.
            parameters: The same problem with the parameters of the wanted mesh and ZeRO level;
                ``problem`` if left out.
        """
        structure = self._analysis.request(sizes, 0).structure
        key = (sizes, options)
        if key not in self._bases:  # the level changes parameters only
            prices = self._analysis.prices(sizes)
            made = _Table(
                self._analysis, structure, prices, problem, options, self._sets,
                sent_from=self._sent_from,
            )  # fmt: skip
            self._bases[key] = made.build()
        base = self._bases[key]
        home = self.home(structure)
        costs = parameter_costs(self._analysis, structure, parameters or problem, options, home)
        known: dict[object, int] = {}
        menus = []
        for (kind, options_), cost in zip(base.menus, costs, strict=True):
            whole = (kind, f"{cost.step_s:.6e}", cost.state_bytes)
            menus.append(
                BlockMenu(
                    key=str(known.setdefault(whole, len(known))),
                    options=options_,
                    state_bytes=cost.state_bytes,
                    step_s=cost.step_s,
                    gather_s=cost.gather_s,
                    reduce_s=cost.reduce_s,
                )
            )
        return BlockTable(
            menus=tuple(menus), boundary_bytes=base.boundary_bytes, recompute=self._sets
        )

    def home(self, structure: SplitsStructure) -> Mapping[str, int]:
        """Input -> first block that reads it."""
        key = id(structure)
        if key not in self._homes:
            running = {n for g in structure.groups if g.kind is GroupKind.NODE for n in g.members}
            block_of, home = self._analysis.chain.block_of, dict[str, int]()
            for node in self._analysis.graph.nodes:
                if node.name in running:
                    block = block_of[node.name]
                    for ref in self._analysis.refs[node.name]:
                        home[ref] = min(home.get(ref, block), block)
            self._homes[key] = home
        return self._homes[key]


def _recompute_sets(analysis: Analysis, forward: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Option name -> operators of a block whose values are not kept.

    What crosses from block to block is always kept: else making the last block again would mean
    making all blocks again, with everything alive at once.
    """
    crossing = {name for cut in analysis.chain.forward_cuts for name in cut}
    crossing |= {analysis.nodes[n].refs()[0] for n in crossing if analysis.nodes[n].op == "getitem"}
    forward = [name for name in forward if name not in crossing]
    light = []
    for name in forward:
        node = analysis.nodes[name]
        if node.op == "getitem":
            node = analysis.nodes[node.refs()[0]]
        metas = [analysis.metas.get(r) for r in node.refs()]
        if work_of(node.op, node.args, metas, node.meta).op_class not in KEPT_CLASSES:
            light.append(name)
    return {"none": (), "selective": tuple(light), "full": tuple(forward)}


@dataclass(frozen=True, slots=True)
class _Base:
    """What a table has whatever the ZeRO level.

    Attributes:
        menus: Per block its kind and options.
        boundary_bytes: As in the table.
    """

    menus: tuple[tuple[object, tuple[Option, ...]], ...]
    boundary_bytes: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Seconds:
    """Seconds of one block per micro-batch."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0


@dataclass(slots=True)
class ParameterCost:
    """What the parameters of one block cost per step and hold.

    Attributes:
        gather_s: Seconds of bringing them into the layout of their use.
        reduce_s: Seconds of reducing their gradients.
        update_s: Seconds of the optimizer.
        other_s: Seconds of joining the gradients of tied ones.
        state_bytes: Parameters, gradients and optimizer state.
    """

    gather_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0
    state_bytes: int = 0

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.gather_s + self.reduce_s + self.update_s + self.other_s


def parameter_costs(
    analysis: Analysis,
    structure: SplitsStructure,
    problem: SplitsProblem,
    options: Sequence[int] | None,
    home: Mapping[str, int],
) -> list[ParameterCost]:
    """State, gathering, gradient reduction: with the first block that reads the parameter.

    Args:
        analysis: Model and cluster.
        structure: Groups of the problem.
        problem: The problem.
        options: The choice; the least that each part can be under any choice if None.
        home: Input -> first block that reads it.
    """
    reduce_s = _reduce_seconds(problem, options)
    wholes = {w: min(home.get(n, 0) for n in parts) for w, parts in structure.wholes.items()}
    costs = [ParameterCost() for _ in analysis.chain.blocks]
    for at, (variable, group) in enumerate(zip(problem.variables, structure.groups, strict=True)):
        is_join = group.kind is GroupKind.JOIN
        if not variable.is_once and not is_join:
            continue
        menu = variable.options if options is None else [variable.options[options[at]]]
        update_s = min(o.update_s for o in menu)
        rest_s = min(o.time_s - o.update_s for o in menu)
        memory = min(o.memory_bytes for o in menu)
        for name in variable.members:
            place = wholes[name] if name in wholes else home.get(name.removeprefix("join "), 0)
            cost = costs[place]
            cost.state_bytes += memory
            cost.update_s += update_s
            cost.reduce_s += reduce_s.get(at, 0.0)
            if is_join:
                cost.other_s += rest_s
            else:
                cost.gather_s += rest_s
    return costs


def _reduce_seconds(problem: SplitsProblem, options: Sequence[int] | None) -> dict[int, float]:
    """Variable -> seconds per step of reducing the gradients of one member."""
    found: dict[int, float] = {}
    for flow in problem.flows:
        for reader in flow.readers:
            if reader.when is not Pass.STEP:
                continue
            if options is None:
                time_s = min((move.time_s for move in flow.moves.values()), default=0.0)
            else:
                source = problem.variables[flow.variable].options[options[flow.variable]]
                target = problem.variables[reader.variable].options[options[reader.variable]]
                have, want = source.results[flow.result], target.operands[reader.operand]
                pair = (problem.seen(have, Pass.STEP), problem.seen(want, Pass.STEP))
                time_s = flow.moves[pair].time_s
            time_s *= problem.weight(Pass.STEP)
            found[reader.variable] = found.get(reader.variable, 0.0) + time_s
    return found


@dataclass(slots=True)
class _Table:
    analysis: Analysis
    structure: SplitsStructure
    prices: PriceList
    problem: SplitsProblem
    options: Sequence[int]
    sets: Sequence[Mapping[str, tuple[str, ...]]]
    chosen: dict[str, SplitOption] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    node_s: dict[str, float] = field(default_factory=dict)
    first_need: dict[str, int] = field(default_factory=dict)
    forward: set[str] = field(default_factory=set)
    sent_from: frozenset[str] = frozenset()

    def build(self) -> _Base:
        for variable, at in zip(self.problem.variables, self.options, strict=True):
            self.chosen.update(dict.fromkeys(variable.members, variable.options[at]))
        chain = self.analysis.chain
        self.keys = self.analysis.value_keys
        self.forward = {n for block in chain.blocks for n in block.forward}
        seconds = [_Seconds() for _ in chain.blocks]
        self._operators(seconds)
        self._first_needs()
        menus: list[tuple[object, tuple[Option, ...]]] = []
        known: dict[object, tuple[Option, ...]] = {}
        for block in chain.blocks:
            cost = seconds[block.index]
            fixed = self.analysis.constraints.recompute_of(block.scope)
            words = tuple(w for w in RECOMPUTE if fixed in (None, w))
            seconds_ = (cost.forward_s, cost.backward_s, cost.weight_s)
            key = (block.key, *(f"{s:.9e}" for s in seconds_), words)
            if key not in known:
                known[key] = self._menu(block.index, cost, words)
            menus.append((key, known[key]))
        return _Base(
            menus=tuple(menus),
            boundary_bytes=tuple(
                (self._sum_bytes(ahead), self._sum_bytes(back))
                for ahead, back in zip(chain.forward_cuts, chain.backward_cuts, strict=True)
            ),
        )

    # -- seconds -------------------------------------------------------------------------------
    def _layout(self, name: str) -> Layout:
        """Layout of a value in the choice."""
        base, _, index = self.keys.get(name, name).partition("#")
        return self.chosen[base].results[int(index or 0)]

    def _operators(self, seconds: list[_Seconds]) -> None:
        count, block_of = self.problem.num_microbatches, self.analysis.chain.block_of
        made: set[tuple[str, Layout, int]] = set()
        for group in self.structure.groups:
            if group.kind is not GroupKind.NODE:
                continue
            for name in group.members:
                self.node_s[name] = self.chosen[name].time_s / count
        for node in self.analysis.graph.nodes:
            if node.name not in self.node_s:
                continue
            when = Pass.BACKWARD if node.name in self.structure.backward else Pass.FORWARD
            for operand, ref in enumerate(self.analysis.refs[node.name]):
                self.node_s[node.name] += self._move_s(node, operand, ref, when, made)
            cost = seconds[block_of[node.name]]
            if when is Pass.BACKWARD:
                cost.backward_s += self.node_s[node.name]
                if node.name not in self.sent_from:
                    cost.weight_s += self.node_s[node.name]
            else:
                cost.forward_s += self.node_s[node.name]

    def _move_s(
        self, node: Node, operand: int, ref: str, when: Pass, made: set[tuple[str, Layout, int]]
    ) -> float:
        """Seconds of bringing an operand to its reader, 0.0 if another reader paid."""
        have, want = self._layout(ref), self.chosen[node.name].operands[operand]
        meta = self.structure.metas.get(ref)
        if have == want or meta is None:
            return 0.0
        time_s = self.prices.move_s(meta, have, want)
        if time_s is None:  # it comes from the prologue, whose price the operator has
            return 0.0
        shrinks = self.prices.local(meta, want).bytes <= self.prices.local(meta, have).bytes
        group = int(Pass.FORWARD) if shrinks else int(when)
        key = (self.keys.get(ref, ref), want, group)
        if key in made:
            return 0.0
        made.add(key)
        return time_s

    # -- bytes ---------------------------------------------------------------------------------
    def _local_bytes(self, name: str) -> int:
        meta = self.structure.metas.get(name)
        if meta is None or self.keys.get(name, name).partition("#")[0] not in self.chosen:
            return 0
        return self.prices.local(meta, self._layout(name)).bytes

    def _sum_bytes(self, names: Iterable[str]) -> int:
        return sum(self._local_bytes(name) for name in names)

    def _is_forward(self, name: str) -> bool:
        return name in self.structure.nodes and name not in self.structure.backward

    def _reads_of_backward(self, block: int) -> dict[str, int]:
        """Forward values that a block's backward reads -> bytes in the layout that is kept."""
        found: dict[str, int] = {}
        for name in self.analysis.chain.blocks[block].backward:
            node = self.structure.nodes[name]
            if name not in self.node_s and node.op != "getitem":
                continue
            for operand, ref in enumerate(self.analysis.refs[name]):
                if not self._is_forward(ref):
                    continue
                amount = self._local_bytes(ref)
                meta = self.structure.metas.get(ref)
                if meta is not None and name in self.chosen:
                    want = self.chosen[name].operands[operand]
                    amount = min(amount, self.prices.local(meta, want).bytes)
                found[ref] = max(found.get(ref, 0), amount)
        return found

    def _first_needs(self) -> None:
        for block in self.analysis.chain.blocks:
            for name in self._kept(block.index, frozenset())[0]:
                self.first_need.setdefault(name, block.index)

    def _kept(self, block: int, recompute: frozenset[str]) -> tuple[dict[str, int], set[str]]:
        """What a block keeps for its backward (root -> bytes), and what backward makes again."""
        kept: dict[str, int] = {}
        again: set[str] = set()
        stack = list(self._reads_of_backward(block).items())
        block_of = self.analysis.chain.block_of
        while stack:
            name, amount = stack.pop()
            node = self.structure.nodes[name]
            is_here = block_of[name] == block and self._base(name) in recompute
            is_view = node.op in VIEW_OPS and node.op != "getitem"
            if is_view or is_here or self._base(name) not in self.forward:
                if name in again:
                    continue
                again.add(name)
                for ref in self.analysis.refs[name]:
                    if self._is_forward(ref):
                        inner = self._local_bytes(ref)
                        stack.append((ref, amount if node.op in VIEW_OPS else inner))
                continue
            key = self.keys.get(name, name)
            kept[key] = max(kept.get(key, 0), amount)
        return kept, again

    def _held(self, block: int) -> int:
        """Bytes that the gradients of a block's weights are made from, whatever is made again."""
        found: dict[str, int] = {}
        for name in self.analysis.chain.blocks[block].backward:
            if name in self.sent_from or name not in self.node_s:
                continue
            for ref in self.analysis.refs[name]:
                at = ref
                while (node := self.structure.nodes.get(at)) and node.op in VIEW_OPS - {"getitem"}:
                    at = self.analysis.refs[at][0]
                if self._is_forward(at) or at in self.sent_from:
                    key = self.keys.get(at, at)
                    found[key] = max(found.get(key, 0), self._local_bytes(at))
        return sum(found.values())

    def _base(self, name: str) -> str:
        return self.keys.get(name, name).partition("#")[0]

    def _menu(
        self,
        block: int,
        cost: _Seconds,
        words: Sequence[str],
    ) -> tuple[Option, ...]:
        menu: list[Option] = []
        largest = self._largest(block)
        whole = self._saved(block, self._kept(block, frozenset())[0])
        held = self._held(block)
        for word in words:
            kept, again = self._kept(block, frozenset(self.sets[block][word]))
            extra_s = sum(
                self.node_s.get(n, 0.0)
                for n in {self._base(a) for a in again}
                # what only backward needs is in the block's backward seconds already
                if n in self.forward and self.structure.nodes[n].op not in VIEW_OPS
            )
            saved = self._saved(block, kept)
            transient = TRANSIENT_TENSORS * largest + max(0, whole - saved)
            option = Option(
                name=word,
                forward_s=cost.forward_s,
                backward_s=cost.backward_s + extra_s,
                saved_bytes=saved,
                transient_bytes=transient,
                weight_s=cost.weight_s,
                held_bytes=held,
            )
            is_worse = any(o.saved_bytes <= saved and o.total_s <= option.total_s for o in menu)
            if not is_worse or len(words) == 1:
                menu.append(option)
        return tuple(menu)

    def _saved(self, block: int, kept: Mapping[str, int]) -> int:
        """Bytes, each value with the first block that needs it."""
        return sum(n for name, n in kept.items() if self.first_need.get(name, block) == block)

    def _largest(self, block: int) -> int:
        members = self.analysis.chain.blocks[block]
        sizes = [
            self.prices.local(meta, layout).bytes
            for name in (*members.forward, *members.backward)
            if name in self.node_s
            for meta, layout in zip(
                self.structure.nodes[name].metas(), self.chosen[name].results, strict=True
            )
            if isinstance(meta, TensorMeta)
        ]
        return max(sizes, default=0)
