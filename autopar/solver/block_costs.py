"""What each block costs under chosen splits: the menus from which stages are built.

Seconds are sums of the same prices as in the splits problem, laid out by block and pass. A block's
options differ by what it keeps for its backward and what it makes again
(:mod:`autopar.solver.recompute`): from ``none`` (all that backward reads is kept) over ``keep 61%``
(of those bytes) to ``full`` (as little as possible is kept). Bytes are those of the block's own
local operators; a plan that is kept is measured exactly. Where the user asks for a word, the menu
has that option alone:

* ``none``: everything that backward reads is kept;
* ``selective``: matmuls, convolutions and attention are kept, what lies between is made again;
* ``full``: only what enters the block is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Node
from autopar.sharding.decisions import Choice
from autopar.sharding.placement import Layout
from autopar.sharding.stages import VIEW_OPS, ancestors
from autopar.solver.analysis import Analysis
from autopar.solver.chain_sums import Chain
from autopar.solver.lanes import Lanes
from autopar.solver.menus import Menus
from autopar.solver.option_names import option_names
from autopar.solver.parameter_costs import Owners, ParameterCost, owners_of, parameter_costs
from autopar.solver.prices import PriceList
from autopar.solver.recompute import MENU_SIZE, MenuPoint, menu_of, recompute_menu
from autopar.solver.recompute_blocks import BlockLocalizer
from autopar.solver.recompute_problem import RecomputeProblem, figures, held_bytes, left_bytes
from autopar.solver.splits import tp_choices
from autopar.solver.splits_problem import Pass, SplitOption, SplitsProblem
from autopar.solver.splits_structure import GroupKind, SplitsStructure
from autopar.solver.stages_problem import BlockMenu, Option
from cost_models.flops import OpClass, work_of

Sizes = tuple[int, int, int]

FINE_MENU_SIZE = 24  # for a plan that is kept: between two points of a menu lies much memory
Choices = dict[object, tuple[tuple[frozenset[int], frozenset[int]], ...]]
"""Structure of a block -> what is made again, and what is in host memory, in its menu's choices."""
_Names = Mapping[str, tuple[str, ...]]
KEPT_CLASSES = frozenset({OpClass.MATMUL, OpClass.ATTENTION, OpClass.CONV})


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Menus of all blocks under one choice of splits.

    Attributes:
        menus: By block.
        boundary_bytes: Per boundary, bytes of a message forward and of one backward.
        recompute: Per block, option name -> forward operators whose values are not kept.
        offload: Per block, option name -> forward operators whose values are kept in host memory.
        sizes: Sizes of mb, dp, tp of the mesh whose problem has the work.
        problem: That problem.
        is_exact: Whether no choice of what is kept is better than the menus' own.
        options: The choice of splits.
        parameters: As of :meth:`BlockTables.table`.
    """

    menus: tuple[BlockMenu, ...]
    boundary_bytes: tuple[tuple[int, int], ...]
    recompute: tuple[Mapping[str, tuple[str, ...]], ...]
    offload: tuple[Mapping[str, tuple[str, ...]], ...]
    sizes: Sizes
    problem: SplitsProblem
    is_exact: bool
    options: tuple[int, ...]
    parameters: SplitsProblem | None


class BlockTables:
    """Makes tables; what several of them share is found once.

    Args:
        analysis: Model and cluster.
        localizer: Of the same model, made before.
        lanes: Threads that menus are found on.
    """

    def __init__(
        self,
        analysis: Analysis,
        localizer: BlockLocalizer | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self._analysis = analysis
        self._menus = Menus(lanes or Lanes())
        self._localizer = localizer or BlockLocalizer(analysis)
        sent = {n.partition("#")[0] for cut in analysis.chain.backward_cuts for n in cut}
        # operators that the gradients between blocks come from: the first half of a split backward
        self._sent_from = ancestors(analysis.graph, sent)
        self._bases: dict[tuple[Sizes, tuple[int, ...], int], _Base] = {}
        self._owners: dict[int, Owners] = {}
        self._choices: Choices = {}
        self._expected: dict[tuple[Sizes, tuple[int, ...], int], _Table] = {}

    def on(self, analysis: Analysis) -> BlockTables:
        """Those of another cluster: tables whose mesh is priced as here are kept."""
        before, other = self._analysis, copy(self)
        other._analysis = analysis
        other._bases = {
            key: base for key, base in self._bases.items() if analysis.has_prices_of(before, key[0])
        }
        other._expected = {}
        return other

    def table(
        self,
        sizes: Sizes,
        problem: SplitsProblem,
        options: tuple[int, ...],
        parameters: SplitsProblem | None = None,
        *,
        menu_size: int = MENU_SIZE,
        exact: bool = True,
    ) -> BlockTable:
        """Menus under a choice.

        Args:
            sizes: Sizes of mb, dp, tp of the mesh of ``problem``.
            problem: The splits problem of that mesh, or of one with the same micro-batches.
            options: The choice.
            parameters: The same problem with the parameters of the wanted mesh and ZeRO level;
                ``problem`` if left out.
            menu_size: Most options of a block.
            exact: Whether what is kept is to be of least seconds for its bytes. Else choices that
                were so for a block of the same structure, of other sizes, do.
        """
        structure = self._analysis.request(sizes, 0).structure
        key = (sizes, options, menu_size)
        if self._is_missing(key, exact=exact):
            begun = self._expected.pop(key, None) if exact else None
            made = begun or self._begun(sizes, problem, options, menu_size, exact=exact)
            self._bases[key] = made.build()
        base = self._bases[key]
        costs = parameter_costs(parameters or problem, options, self.owners(structure))
        return BlockTable(
            menus=_with_costs(base.menus, costs, (parameters or problem).num_reduces),
            boundary_bytes=base.boundary_bytes,
            recompute=base.recompute,
            offload=base.offload,
            sizes=sizes,
            problem=problem,
            is_exact=base.is_exact,
            options=options,
            parameters=parameters,
        )

    def _is_missing(self, key: tuple[Sizes, tuple[int, ...], int], *, exact: bool) -> bool:
        return key not in self._bases or (exact and not self._bases[key].is_exact)

    def _begun(
        self,
        sizes: Sizes,
        problem: SplitsProblem,
        options: tuple[int, ...],
        menu_size: int,
        *,
        exact: bool,
    ) -> _Table:
        structure = self._analysis.request(sizes, 0).structure
        prices = self._analysis.prices(sizes)  # the level changes parameters only
        made = _Table(
            self._analysis, structure, prices, problem, options, self._localizer, sizes,
            self._choices, exact, self._menus, sent_from=self._sent_from, menu_size=menu_size,
        )  # fmt: skip
        made.prepare()
        return made

    def expect(
        self,
        sizes: Sizes,
        problem: SplitsProblem,
        options: tuple[int, ...],
        *,
        menu_size: int = MENU_SIZE,
    ) -> None:
        """Start the exact menus of a table that is going to be asked for.

        Args:
            sizes: As of :meth:`table`.
            problem: Likewise.
            options: Likewise.
            menu_size: Likewise.
        """
        key = (sizes, options, menu_size)
        is_new = key not in self._expected and self._is_missing(key, exact=True)
        if is_new and self._menus.lanes.is_open:
            made = self._expected[key] = self._begun(sizes, problem, options, menu_size, exact=True)
            self._menus.expect(made.unknown().values(), menu_size)

    def expect_finer(self, table: BlockTable) -> None:
        """Start the menus of a table that :meth:`finer` is going to be asked for."""
        self.expect(table.sizes, table.problem, table.options, menu_size=FINE_MENU_SIZE)

    def drop_finer(self, table: BlockTable) -> None:
        """Leave out what was started for :meth:`finer` and not begun."""
        made = self._expected.get((table.sizes, table.options, FINE_MENU_SIZE))
        if made is not None:
            self._menus.drop(made.unknown().values(), FINE_MENU_SIZE)

    def finer(self, table: BlockTable) -> BlockTable:
        """The same with more options for each block."""
        return self.table(
            table.sizes, table.problem, table.options, table.parameters, menu_size=FINE_MENU_SIZE
        )

    def owners(self, structure: SplitsStructure) -> Owners:
        """Which parameters count with which block."""
        key = id(structure)
        if key not in self._owners:
            running = {n for g in structure.groups if g.kind is GroupKind.NODE for n in g.members}
            block_of, home = self._analysis.chain.block_of, dict[str, int]()
            for node in self._analysis.graph.nodes:
                if node.name in running:
                    block = block_of[node.name]
                    for ref in self._analysis.refs[node.name]:
                        home[ref] = min(home.get(ref, block), block)
            self._owners[key] = owners_of(structure, home, len(self._analysis.chain.blocks))
        return self._owners[key]


def _with_costs(
    rows: Sequence[tuple[object, tuple[Option, ...]]],
    costs: Sequence[ParameterCost],
    num_reduces: int,
) -> Chain:
    """Menus of blocks; those that share their row and their cost share one."""
    keys: dict[object, int] = {}
    known: dict[tuple[int, int], BlockMenu] = {}
    menus: list[BlockMenu] = []
    for row, cost in zip(rows, costs, strict=True):
        pair = (id(row), id(cost))
        menu = known.get(pair)
        if menu is None:
            whole = (row[0], f"{cost.step_s:.6e}", cost.state_bytes)
            menu = known[pair] = BlockMenu(
                key=str(keys.setdefault(whole, len(keys))),
                options=row[1],
                state_bytes=cost.state_bytes,
                step_s=cost.step_s,
                gather_s=cost.gather_s,
                reduce_s=cost.reduce_s,
                num_reduces=num_reduces,
            )
        menus.append(menu)
    return Chain(menus)


def light_operators(analysis: Analysis, names: Sequence[str]) -> tuple[str, ...]:
    """Those that are no matmul, convolution or attention: what ``selective`` makes again."""
    light = []
    for name in names:
        node = analysis.nodes[name]
        if node.op == "getitem":
            node = analysis.nodes[node.refs()[0]]
        metas = [analysis.metas.get(r) for r in node.refs()]
        if work_of(node.op, node.args, metas, node.meta).op_class not in KEPT_CLASSES:
            light.append(name)
    return tuple(light)


@dataclass(frozen=True, slots=True)
class _Base:
    """What a table has whatever the ZeRO level.

    Attributes:
        menus: Per block its kind and options.
        boundary_bytes: As in the table.
        recompute: As in the table.
        offload: As in the table.
        is_exact: As in the table.
    """

    menus: tuple[tuple[object, tuple[Option, ...]], ...]
    boundary_bytes: tuple[tuple[int, int], ...]
    recompute: tuple[Mapping[str, tuple[str, ...]], ...]
    offload: tuple[Mapping[str, tuple[str, ...]], ...]
    is_exact: bool


@dataclass(slots=True)
class _Seconds:
    """Seconds of one block per micro-batch."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0


@dataclass(slots=True)
class _Table:
    analysis: Analysis
    structure: SplitsStructure
    prices: PriceList
    problem: SplitsProblem
    options: Sequence[int]
    localizer: BlockLocalizer
    sizes: Sizes
    choices: Choices
    exact: bool
    menus: Menus
    chosen: dict[str, SplitOption] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    node_s: dict[str, float] = field(default_factory=dict)
    given_s: dict[str, float] = field(default_factory=dict)  # of moving the graph's inputs
    sent_from: frozenset[str] = frozenset()
    remade_bytes: dict[int, int] = field(default_factory=dict)
    menu_size: int = MENU_SIZE
    took_over: bool = False
    seconds: list[_Seconds] = field(default_factory=list)
    kinds: list[object] = field(default_factory=list)  # by block
    problems: dict[int, RecomputeProblem] = field(default_factory=dict)  # of each kind's first
    found: dict[int, tuple[MenuPoint, ...]] = field(default_factory=dict)  # exact menus, likewise

    def prepare(self) -> None:
        """Seconds and problems of all kinds of blocks."""
        for variable, at in zip(self.problem.variables, self.options, strict=True):
            self.chosen.update(dict.fromkeys(variable.members, variable.options[at]))
        chain = self.analysis.chain
        self.keys = self.analysis.value_keys
        self.seconds = [_Seconds() for _ in chain.blocks]
        self._operators(self.seconds)
        known: set[object] = set()
        for block in chain.blocks:
            cost, word = self.seconds[block.index], self._word(block.index)
            seconds = (cost.forward_s, cost.backward_s, cost.weight_s)
            own = self.localizer.key(block.index)
            key = (block.key, own, *(f"{s:.9e}" for s in seconds), word)
            self.kinds.append(key)
            if key not in known:
                known.add(key)
                self.problems[block.index] = self._problem(block.index, cost)

    def unknown(self) -> dict[int, RecomputeProblem]:
        """By block the problems whose menus are not taken over from other blocks."""
        found: dict[int, RecomputeProblem] = {}
        known = set(self.choices)
        for block, problem in self.problems.items():
            key = _structure(problem)
            if self._word(block) is None and (self.exact or key not in known):
                found[block] = problem
                if self.menu_size == MENU_SIZE:
                    known.add(key)
        return found

    def _word(self, block: int) -> str | None:
        return self.analysis.constraints.recompute_of(self.analysis.chain.blocks[block].scope)

    def build(self) -> _Base:
        """The table of what was prepared."""
        chain, unknown = self.analysis.chain, self.unknown()
        menus_ = self.menus.of(unknown.values(), self.menu_size)
        self.found = dict(zip(unknown, menus_, strict=True))
        menus: list[tuple[object, tuple[Option, ...]]] = []
        chosen: list[tuple[Mapping[str, tuple[str, ...]], ...]] = []
        known: dict[object, tuple[int, tuple[Option, ...], tuple[_Names, _Names]]] = {}
        for block, key in zip(chain.blocks, self.kinds, strict=True):
            if key not in known:
                known[key] = (block.index, *self._menu(block.index))
            first, options, tables = known[key]
            self.remade_bytes[block.index] = self.remade_bytes[first]
            menus.append((key, options))
            chosen.append(
                tuple(
                    {n: self.localizer.same_in(first, block.index, ops) for n, ops in table.items()}
                    for table in tables
                )
            )
        return _Base(
            menus=tuple(menus),
            boundary_bytes=tuple(
                (self._sum_bytes(ahead), self._sum_bytes(back))
                for ahead, back in zip(chain.forward_cuts, chain.backward_cuts, strict=True)
            ),
            recompute=tuple(remade for remade, _ in chosen),
            offload=tuple(away for _, away in chosen),
            is_exact=not self.took_over,
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
                move_s = self._move_s(node, operand, ref, when, made)
                self.node_s[node.name] += move_s
                if ref not in self.analysis.nodes:
                    self.given_s[node.name] = self.given_s.get(node.name, 0.0) + move_s
            cost = seconds[block_of[node.name]]
            if when is Pass.BACKWARD:
                cost.backward_s += self.node_s[node.name]
                if node.name not in self.sent_from:
                    cost.weight_s += self.node_s[node.name]
            else:
                cost.forward_s += self.node_s[node.name]
        self._returned(seconds, made)

    def _returned(self, seconds: list[_Seconds], made: set[tuple[str, Layout, int]]) -> None:
        """What leaves the program whole is gathered at the end of the block that makes it."""
        for output in self.analysis.graph.outputs:
            sink = self.chosen.get(f"output {output.target}")
            if output.value is None or sink is None:
                continue
            have, want = self._layout(output.value.name), sink.operands[0]
            base = self.keys.get(output.value.name, output.value.name).partition("#")[0]
            key = (self.keys.get(output.value.name, output.value.name), want, int(Pass.FORWARD))
            if have == want or key in made or base not in self.node_s:
                continue
            made.add(key)
            meta = self.structure.metas.get(output.value.name)
            if meta is None:
                continue
            cost = seconds[self.analysis.chain.block_of[base]]
            cost.forward_s += self.prices.move_s(meta, have, want) or 0.0

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

    # -- options -------------------------------------------------------------------------------
    def _problem(self, block: int, cost: _Seconds) -> RecomputeProblem:
        """What a block may keep and make again."""
        choices: dict[str, Mapping[str, Choice]] = dict(
            self.analysis.data(self.sizes[0], self.sizes[1]).choices
        )
        choices["tp"] = tp_choices(self.problem, self.options)
        spare = self.localizer.spares[block]
        copy = self.analysis.host_copies
        problem = self.localizer.problem(
            block,
            self.sizes,
            choices,
            lambda node, metas: self.prices.nodes_s((node,), metas),
            spare_s=sum(map(self._again_s, spare.operators)) if spare else 0.0,
            spare_bytes=self._read_bytes(spare.operators, block - 1) if spare else 0,
            offloads=copy is not None,
        )
        return replace(
            problem, copy=copy or problem.copy, beside_s=(cost.forward_s, cost.backward_s)
        )

    def _menu(self, block: int) -> tuple[tuple[Option, ...], tuple[_Names, _Names]]:
        """A block's options, and what each of them makes again and keeps in host memory."""
        cost, word, problem = self.seconds[block], self._word(block), self.problems[block]
        spare = self.localizer.spares[block]
        points = self._points(problem, block, word)
        common = self._sum_bytes(self.localizer.common) if block == 0 else 0
        left, options, remade, away = left_bytes(problem), [], {}, {}
        for name, point in zip(option_names(points, word), points, strict=True):
            found = point.figures
            remade[name], away[name] = point.groups, point.offload
            transient = found.transient_bytes
            if spare and spare.name in point.groups:
                transient += self.remade_bytes[block - 1]
            options.append(
                Option(
                    name=name,
                    forward_s=cost.forward_s + found.late_s[0],
                    backward_s=cost.backward_s + found.extra_s + found.late_s[1],
                    saved_bytes=found.saved_bytes + common,
                    transient_bytes=transient,
                    weight_s=cost.weight_s,
                    held_bytes=held_bytes(problem, found.remade),
                    host_bytes=found.host_bytes,
                    left_bytes=left,
                )
            )
        sizes = [o.saved_bytes + o.host_bytes for o in options]
        self.remade_bytes[block] = max(sizes) - min(sizes)
        return tuple(options), (remade, away)

    def _again_s(self, name: str) -> float:
        """Seconds of making a value again, from inputs that are kept as it reads them.

        A view costs what bringing its operand to it does.
        """
        time_s = self.node_s.get(name, 0.0) - self.given_s.get(name, 0.0)
        if time_s and self.structure.nodes[name].op in VIEW_OPS:
            time_s -= self.chosen[name].time_s / self.problem.num_microbatches
        return time_s

    def _read_bytes(self, operators: Sequence[str], block: int) -> int:
        """Bytes of the graph's inputs in the layouts that operators read and backward does not."""
        there = set(self._inputs_read(self.analysis.chain.blocks[block].backward))
        found = 0
        for ref, want in set(self._inputs_read(operators)) - there:
            meta, have = self.structure.metas[ref], self._layout(ref)
            if have != want and self.prices.move_s(meta, have, want) is not None:
                found += self.prices.local(meta, want).bytes
        return found

    def _inputs_read(self, operators: Sequence[str]) -> Iterable[tuple[str, Layout]]:
        """Inputs of the graph that operators read, with the layouts in which they do."""
        for name in operators:
            if name not in self.node_s:
                continue
            for operand, ref in enumerate(self.analysis.refs[name]):
                want = self.chosen[name].operands[operand]
                if ref not in self.analysis.nodes and ref in self.structure.metas:
                    yield ref, want

    def _points(
        self, problem: RecomputeProblem, block: int, word: str | None
    ) -> tuple[MenuPoint, ...]:
        if word is None:
            key = _structure(problem)
            if not self.exact and key in self.choices:
                self.took_over = True
                remade, away = zip(*self.choices[key], strict=True)
                return menu_of(problem, remade, offloads=away)
            points = self.found[block]
            if self.menu_size == MENU_SIZE:
                self.choices[key] = tuple((p.figures.remade, p.figures.offloaded) for p in points)
            return points
        names: Sequence[str] = ()
        if word != "none":
            names = self.localizer.candidates(block)
        if word == "selective":
            names = light_operators(self.analysis, names)
        numbers = {group[0]: i for i, group in enumerate(problem.groups) if len(group) == 1}
        groups = [numbers[n] for n in names if n in numbers]
        if problem.units:
            points = recompute_menu(problem, size=self.menu_size, remade=groups)
            return tuple(replace(p, groups=tuple(names)) for p in points)
        return (MenuPoint(groups=tuple(names), figures=figures(problem, groups)),)


def _structure(problem: RecomputeProblem) -> object:
    """What blocks of other sizes have in common: who reads what, and what may be made again."""
    ops = tuple((op.reads, op.group, op.is_backward) for op in problem.ops)
    return ops, problem.groups, problem.backward_roots, len(problem.inputs), problem.unit_of
