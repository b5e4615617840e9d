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
from autopar.sharding.stages import VIEW_OPS
from autopar.solver.analysis import Analysis
from autopar.solver.blocks import value_keys
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


def block_table(
    analysis: Analysis,
    sizes: tuple[int, int, int],
    zero_level: int,
    problem: SplitsProblem,
    options: Sequence[int],
) -> BlockTable:
    """Menus under a choice.

    Args:
        analysis: Model and cluster.
        sizes: Sizes of mb, dp, tp.
        zero_level: Of all parameters.
        problem: The splits problem of that mesh.
        options: The choice.
    """
    structure = analysis.request(sizes, zero_level).structure
    return _Table(analysis, structure, analysis.prices(sizes), problem, options).build()


@dataclass(slots=True)
class _Seconds:
    """Seconds of one block per micro-batch and per step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0
    state_bytes: int = 0


@dataclass(slots=True)
class _Table:
    analysis: Analysis
    structure: SplitsStructure
    prices: PriceList
    problem: SplitsProblem
    options: Sequence[int]
    chosen: dict[str, SplitOption] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    node_s: dict[str, float] = field(default_factory=dict)
    first_need: dict[str, int] = field(default_factory=dict)
    forward: set[str] = field(default_factory=set)

    def build(self) -> BlockTable:
        pairs = zip(self.problem.variables, self.options, strict=True)
        for variable, at in pairs:
            self.chosen.update(dict.fromkeys(variable.members, variable.options[at]))
        graph, chain = self.analysis.graph, self.analysis.chain
        self.keys = value_keys(graph)
        self.forward = {n for block in chain.blocks for n in block.forward}
        seconds = [_Seconds() for _ in chain.blocks]
        self._operators(seconds)
        self._parameters(seconds)
        self._first_needs()
        menus: list[BlockMenu] = []
        sets: list[Mapping[str, tuple[str, ...]]] = []
        known: dict[object, tuple[Option, ...]] = {}
        for block in chain.blocks:
            cost = seconds[block.index]
            fixed = self.analysis.constraints.recompute_of(block.scope)
            words = [w for w in RECOMPUTE if fixed in (None, w)]
            made = {w: self._recompute_set(block.forward, w) for w in RECOMPUTE}
            rounded = (f"{cost.forward_s:.9e}", f"{cost.backward_s:.9e}", f"{cost.step_s:.6e}")
            key = (block.key, rounded, tuple(words), cost.state_bytes)
            if key not in known:
                known[key] = self._menu(block.index, cost, words, made)
            menus.append(
                BlockMenu(
                    key=str(list(known).index(key)),
                    options=known[key],
                    state_bytes=cost.state_bytes,
                    step_s=cost.step_s,
                )
            )
            sets.append(made)
        return BlockTable(
            menus=tuple(menus),
            boundary_bytes=tuple(
                (self._sum_bytes(ahead), self._sum_bytes(back))
                for ahead, back in zip(chain.forward_cuts, chain.backward_cuts, strict=True)
            ),
            recompute=tuple(sets),
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
            for operand, ref in enumerate(node.refs()):
                self.node_s[node.name] += self._move_s(node, operand, ref, when, made)
            cost = seconds[block_of[node.name]]
            if when is Pass.BACKWARD:
                cost.backward_s += self.node_s[node.name]
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

    def _parameters(self, seconds: list[_Seconds]) -> None:
        """State, gathering, gradient reduction: with the first block that reads the parameter."""
        home: dict[str, int] = {}
        block_of = self.analysis.chain.block_of
        for node in self.analysis.graph.nodes:
            if node.name in self.node_s:
                for ref in node.refs():
                    home[ref] = min(home.get(ref, block_of[node.name]), block_of[node.name])
        reduce_s: dict[int, float] = {}
        for flow in self.problem.flows:
            for reader in flow.readers:
                if reader.when is not Pass.STEP:
                    continue
                source = self._option(flow.variable).results[flow.result]
                target = self._option(reader.variable).operands[reader.operand]
                pair = (self.problem.seen(source, Pass.STEP), self.problem.seen(target, Pass.STEP))
                time_s = flow.moves[pair].time_s * self.problem.weight(Pass.STEP)
                reduce_s[reader.variable] = reduce_s.get(reader.variable, 0.0) + time_s
        wholes = self.structure.wholes
        home.update((whole, min(home.get(n, 0) for n in parts)) for whole, parts in wholes.items())
        pairs = zip(self.problem.variables, self.structure.groups, strict=True)
        for at, (variable, group) in enumerate(pairs):
            if not variable.is_once and group.kind is not GroupKind.JOIN:
                continue
            option = self._option(at)
            for name in variable.members:
                cost = seconds[home.get(name.removeprefix("join "), 0)]
                cost.state_bytes += option.memory_bytes
                cost.step_s += option.time_s + reduce_s.get(at, 0.0)

    def _option(self, variable: int) -> SplitOption:
        return self.problem.variables[variable].options[self.options[variable]]

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
            for operand, ref in enumerate(node.refs()):
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
                for ref in node.refs():
                    if self._is_forward(ref):
                        inner = self._local_bytes(ref)
                        stack.append((ref, amount if node.op in VIEW_OPS else inner))
                continue
            key = self.keys.get(name, name)
            kept[key] = max(kept.get(key, 0), amount)
        return kept, again

    def _base(self, name: str) -> str:
        return self.keys.get(name, name).partition("#")[0]

    def _recompute_set(self, forward: Sequence[str], word: str) -> tuple[str, ...]:
        """Operators whose values are not kept."""
        if word == "none":
            return ()
        if word == "full":
            return tuple(forward)
        return tuple(n for n in forward if not self._is_heavy(self._base(n)))

    def _is_heavy(self, name: str) -> bool:
        node = self.structure.nodes[name]
        metas = [self.structure.metas.get(r) for r in node.refs()]
        return work_of(node.op, node.args, metas, node.meta).op_class in KEPT_CLASSES

    def _menu(
        self,
        block: int,
        cost: _Seconds,
        words: Sequence[str],
        made: Mapping[str, tuple[str, ...]],
    ) -> tuple[Option, ...]:
        menu: list[Option] = []
        largest = self._largest(block)
        whole = self._saved(block, self._kept(block, frozenset())[0])
        for word in words:
            kept, again = self._kept(block, frozenset(made[word]))
            extra_s = sum(
                self.node_s.get(n, 0.0)
                for n in {self._base(a) for a in again}
                if self.structure.nodes[n].op not in VIEW_OPS
            )
            saved = self._saved(block, kept)
            transient = TRANSIENT_TENSORS * largest + max(0, whole - saved)
            option = Option(
                name=word,
                forward_s=cost.forward_s,
                backward_s=cost.backward_s + extra_s,
                saved_bytes=saved,
                transient_bytes=transient,
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
