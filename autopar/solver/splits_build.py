"""From a structure and a mesh to the problem of splits over ``tp``.

The splits over ``mb`` and ``dp`` are given. Every operator group gets one option per legal split of
its factors over ``tp``, priced by emitting its local form; every parameter group one per dim that
leaves no rank empty, and whole. ``tp`` does not split the batch: ``dp`` does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from autopar.errors import ConstraintError
from autopar.ir.graph import Graph, Input, InputKind, Node, OutputKind, Ref, TensorMeta
from autopar.ir.precision_rules import sum_dtype
from autopar.sharding.parameters import parameter_inputs, storage_layout
from autopar.sharding.placement import Layout, P, Partial, Placement, R, Replicate, Shard
from autopar.sharding.programs import AXES
from autopar.sharding.rules import MICROBATCH_STATISTICS
from autopar.sharding.signature import (
    AxisStrategy,
    OpSignature,
    axis_strategies,
    parts_by_factor,
    replicated_strategy,
)
from autopar.solver.constraints import may_shard
from autopar.solver.norms import is_norm, norm_region
from autopar.solver.prices import PriceList, Strategies, operand_layout, result_layout
from autopar.solver.splits_problem import (
    Flow,
    Move,
    Pass,
    SplitOption,
    SplitsProblem,
    SplitVariable,
    is_once,
)
from autopar.solver.splits_structure import (
    DataChoices,
    FlowShape,
    Group,
    GroupKind,
    SplitsStructure,
    summed_meta,
)
from cost_models.memory import optimizer_state_bytes, parameter_state_bytes

CAST = "aten._to_copy.default"
MAX_PART_COMBINATIONS = 64  # beyond, all parts of a parameter are placed alike


@dataclass(frozen=True, kw_only=True)
class SplitsRequest:
    """What to decide, and under what.

    Attributes:
        graph: The joint graph.
        structure: Its groups.
        signatures: Named dims by operator.
        data: Axis -> choices over ``mb`` and ``dp``.
        axis_sizes: Sizes of :data:`~autopar.sharding.programs.AXES`.
        zero_level: ZeRO level of the parameters.
        optimizer: For the bytes of its state.
        batch_factors: Operator -> factors that are the batch.
        fixed: Parameter input -> placement over ``tp``.
        sequence_parallel: True puts norms on shards of the sequence, False keeps them whole on
            every rank, None leaves them free.
        in_flight: Micro-batches whose saved values count; 0 to leave activations out.
        limit_bytes: Bound of parameters' state and saved values together.
        optimizer_s_per_byte: Seconds of an optimizer step per byte of stored parameter.
        joint_dp: Parameter in parts -> placement over dp in which its gradients are joined; filled
            when it is first asked for, so that requests with the same data splits share it.
    """

    graph: Graph
    structure: SplitsStructure
    signatures: Mapping[str, OpSignature | None]
    data: DataChoices
    axis_sizes: tuple[int, int, int]
    zero_level: int = 0
    optimizer: str = "adamw"
    batch_factors: Mapping[str, frozenset[str]] = field(default_factory=dict)
    fixed: Mapping[str, Placement] = field(default_factory=dict)
    sequence_parallel: bool | None = None
    in_flight: float = 0.0
    limit_bytes: int | None = None
    optimizer_s_per_byte: float = 0.0
    joint_dp: dict[str, Placement] = field(default_factory=dict)

    @property
    def num_microbatches(self) -> int:
        """Runs of forward and backward per step."""
        return self.axis_sizes[0]

    @property
    def num_reduces(self) -> int:
        """Gradient reductions per step."""
        return self.num_microbatches if self.zero_level >= 2 else 1

    @property
    def dp(self) -> int:
        """Ranks along dp."""
        return self.axis_sizes[1]

    @property
    def tp(self) -> int:
        """Ranks along tp."""
        return self.axis_sizes[2]


def build_splits(request: SplitsRequest, prices: PriceList) -> SplitsProblem:
    """The problem of one mesh.

    Raises:
        ConstraintError: A constraint leaves an operator or parameter without an option.
    """
    return _Builder(request, prices).build()


def with_parameters(
    problem: SplitsProblem, request: SplitsRequest, prices: PriceList
) -> SplitsProblem:
    """The problem of one mesh with the parameters of another, as for once-per-step costs.

    Operators and reshards inside a micro-batch stay those of ``problem``, their seconds included;
    how parameters are stored and gathered and how gradients are reduced is of the request.

    Args:
        problem: Of a mesh with the same ``tp`` and the same structure.
        request: Of the wanted mesh.
        prices: Of the wanted mesh.
    """
    return _Builder(request, prices).rebuild(problem)


class _Builder:
    def __init__(self, request: SplitsRequest, prices: PriceList) -> None:
        self.request, self.prices = request, prices
        self.structure, self.axes = request.structure, prices.axes
        self.has_mb = request.structure.has_mb
        self.inputs = request.graph.input_map()
        self.menus: list[list[SplitOption]] = []
        self._alike: dict[object, list[SplitOption]] = {}
        self._layouts: dict[tuple[Layout, ...], int] = {}
        self._made: dict[object, dict[tuple[Layout, Layout], Move]] = {}
        structure = request.structure
        self.whole_norms = (
            norm_region(request.graph, structure.metas, frozenset(structure.backward))
            if request.sequence_parallel is False
            else frozenset[str]()
        )

    def build(self) -> SplitsProblem:
        groups = self.structure.groups
        for group in groups:
            match group.kind:
                case GroupKind.INPUT:
                    menu = self._input_options(group, self.inputs[group.members[0]])
                case GroupKind.NODE:
                    node = self.structure.nodes[group.members[0]]
                    menu = self._node_options(group, node)
                case GroupKind.SINK:
                    menu = [SplitOption(None, (self._over((group.mb, R, R)),), (), 0.0)]
                case GroupKind.JOIN:
                    menu = self._join_options(group)
                case GroupKind.WHOLE:
                    menu = self._whole_options(group)
            self.menus.append(_without_repeats(menu))
        for at, result, kind in self.structure.charges:
            self._charge(at, result, kind)
        return SplitsProblem(
            variables=tuple(
                SplitVariable(g.members[0], tuple(g.members), tuple(menu), self._is_once(g))
                for g, menu in zip(groups, self.menus, strict=True)
            ),
            flows=tuple(
                Flow(f.group, f.result, f.count, f.readers, self._moves(i))
                for i, f in enumerate(self.structure.flows)
            ),
            num_microbatches=self.request.num_microbatches,
            has_mb=self.has_mb,
            num_reduces=self.request.num_reduces,
            limit_bytes=self.request.limit_bytes,
        )

    def rebuild(self, problem: SplitsProblem) -> SplitsProblem:
        groups = self.structure.groups
        self.menus = [list(v.options) for v in problem.variables]
        for at, group in enumerate(groups):
            if group.kind is GroupKind.INPUT and self._is_once(group):
                menu = self._input_options(group, self.inputs[group.members[0]])
                self.menus[at] = _without_repeats(menu)
        for at, group in enumerate(groups):
            if group.kind is GroupKind.WHOLE:
                self.menus[at] = _without_repeats(self._whole_options(group))
        return replace(
            problem,
            variables=tuple(
                replace(v, options=tuple(menu))
                for v, menu in zip(problem.variables, self.menus, strict=True)
            ),
            flows=tuple(
                replace(flow, moves=self._moves(at))
                if any(r.when is Pass.STEP for r in flow.readers)
                else flow
                for at, flow in enumerate(problem.flows)
            ),
            num_microbatches=self.request.num_microbatches,
            num_reduces=self.request.num_reduces,
        )

    def _is_once(self, group: Group) -> bool:
        entry = self.inputs.get(group.members[0])
        is_param = entry is not None and entry.kind is InputKind.PARAM
        return is_param or group.kind is GroupKind.WHOLE

    def _over(self, full: Layout) -> Layout:
        """A layout over all of AXES, on the axes that split."""
        return tuple(full[AXES.index(a)] for a in self.axes)

    # -- inputs --------------------------------------------------------------------------------
    def _input_options(self, group: Group, entry: Input) -> list[SplitOption]:
        given = [self.request.data.get(a, {}).get(entry.name, R) for a in ("mb", "dp")]
        mb, dp = (R if isinstance(p, AxisStrategy) else p for p in given)
        if entry.kind is not InputKind.PARAM or entry.meta is None:
            return [SplitOption(None, (), (self._over((mb, dp, R)),), 0.0)]
        placements: list[Placement] = [R]
        if "tp" in self.axes and group.is_read:
            sizes = entry.meta.shape
            placements += [Shard(d) for d, n in enumerate(sizes) if may_shard(n, self.request.tp)]
        fixed = self.request.fixed.get(entry.name)
        if fixed is not None:
            placements = [p for p in placements if p == fixed]
        if not placements:
            raise ConstraintError(
                f"constraint placements: parameter {entry.target!r} of shape {entry.meta.shape} "
                f"can't be {fixed} over tp={self.request.tp}, a rank would be empty; use 'R'"
            )
        return [self._param_option(entry, entry.meta, (mb, dp, p)) for p in placements]

    def _param_option(self, entry: Input, meta: TensorMeta, compute: Layout) -> SplitOption:
        request, prices = self.request, self.prices
        if entry.part is not None:  # stored with the other parts: its whole has the price
            joint = self._over((R, self._gradient_dp(entry), R))
            return SplitOption(compute[2], (joint,), (self._over(compute),), 0.0)
        storage = self._over(storage_layout(meta, compute, request.dp, request.zero_level))
        layout = self._over(compute)
        master = TensorMeta(meta.shape, entry.master or meta.dtype)
        gather_s = self._cast_s(master, meta.dtype, storage)
        gather_s += prices.move_s(meta, storage, layout, in_bucket=True) or 0.0
        stored = prices.local(master, storage)
        update_s = stored.bytes * request.optimizer_s_per_byte if entry.requires_grad else 0.0
        state = parameter_state_bytes(
            prices.local(meta, layout),
            optimizer=request.optimizer,
            # a parameter that dp splits at work is not split further at rest
            zero_level=request.zero_level if isinstance(compute[1], Replicate) else 0,
            dp=request.dp,
            master_dtype=master.dtype,
            requires_grad=entry.requires_grad,
        )
        total_s = gather_s + update_s
        return SplitOption(
            compute[2], (storage,), (layout,), total_s, state.total_bytes, total_s, update_s
        )

    def _cast_s(self, meta: TensorMeta, dtype: str, layout: Layout) -> float:
        """Seconds of a parameter's cast to the dtype that programs read."""
        if meta.dtype == dtype:
            return 0.0
        local = self.prices.local(meta, layout)
        cast = TensorMeta(local.shape, dtype)
        return self.prices.model.op_time_s(CAST, (Ref("0"),), [local], cast)

    def _gradient_dp(self, entry: Input) -> Placement:
        """Placement over dp in which the gradients of a parameter's parts are joined."""
        known = self.request.joint_dp
        if entry.param not in known:
            found: dict[str, set[Placement]] = {}
            for output in self.request.graph.outputs_of(OutputKind.GRAD):
                if output.value is not None:
                    found.setdefault(output.target, set()).add(self._dp(output.value.name))
            for name, parts in parameter_inputs(self.request.graph).items():
                every = set[Placement]().union(*(found.get(e.target, ()) for e in parts))
                common = next(iter(every)) if len(every) == 1 else P
                known[name] = common if isinstance(common, Partial | Replicate) else R
        return known[entry.param]

    def _dp(self, name: str) -> Placement:
        """Placement of a value over ``dp``."""
        node = self.structure.nodes.get(name)
        index = 0
        if node is not None and node.op == "getitem":
            name, picked = node.refs()[0], node.args[1]
            index = picked if isinstance(picked, int) else 0
        choice = self.request.data.get("dp", {}).get(name, R)
        return choice.outputs[index] if isinstance(choice, AxisStrategy) else choice

    def _whole_options(self, group: Group) -> list[SplitOption]:
        """How a parameter in parts is stored, gathered and its gradient joined."""
        names = self.structure.wholes[group.members[0]]
        entries = [self.inputs[n] for n in names]
        menus = [sorted({o.results[0] for o in self.menus[at]}, key=str) for at, _ in group.parts]
        rows = list(product(*menus))
        if len(rows) > MAX_PART_COMBINATIONS:
            rows = [(a,) * len(menus) for a in menus[0] if all(a in m for m in menus[1:])]
        return [self._whole_option(entries, row) for row in rows]

    def _whole_option(self, entries: Sequence[Input], row: Sequence[Layout]) -> SplitOption:
        request, prices = self.request, self.prices
        metas = [e.meta for e in entries if e.meta is not None]
        part = entries[0].part
        assert part is not None
        size = sum(m.shape[part.dim] for m in metas)
        shape = (*metas[0].shape[: part.dim], size, *metas[0].shape[part.dim + 1 :])
        master = TensorMeta(shape, entries[0].master or metas[0].dtype)
        is_alike = len({m.dtype for m in metas}) == 1
        whole = TensorMeta(shape, metas[0].dtype if is_alike else master.dtype)
        common: Placement = row[0][self.axes.index("tp")] if "tp" in self.axes else R
        is_common = all(r == row[0] for r in row)
        if not is_common or (isinstance(common, Shard) and shape[common.dim] % request.tp):
            common = R
        storage = self._over(storage_layout(whole, (R, R, common), request.dp, request.zero_level))
        apart = self._over((R, R, R))
        seconds: list[float | None] = [self._cast_s(master, whole.dtype, storage)]
        seconds += [prices.move_s(whole, storage, apart, in_bucket=True)]
        seconds += [self._cast_s(TensorMeta(m.shape, whole.dtype), m.dtype, apart) for m in metas]
        moves = zip(metas, row, strict=True)
        seconds += [prices.move_s(m, apart, r, in_bucket=True) for m, r in moves]
        stored = prices.local(master, storage).bytes
        memory = stored + sum(prices.local(m, r).bytes for m, r in zip(metas, row, strict=True))
        update_s = 0.0
        if entries[0].requires_grad:
            joint = self._over((R, self._gradient_dp(entries[0]), R))
            refs = tuple(Ref(str(i)) for i in range(len(metas)))
            summed = [TensorMeta(m.shape, sum_dtype(master.dtype)) for m in metas]
            total = TensorMeta(shape, sum_dtype(master.dtype))
            cat_s = prices.model.op_time_s("aten.cat.default", (refs, part.dim), summed, total)
            reduce_s = cat_s + (prices.move_s(total, joint, storage, in_bucket=True) or 0.0)
            seconds.append(request.num_reduces * reduce_s)
            update_s = stored * request.optimizer_s_per_byte
            seconds.append(update_s)
            if request.zero_level < 2:  # summed part by part, as programs make them
                memory += sum(prices.local(m, r).bytes for m, r in zip(summed, row, strict=True))
            else:
                memory += prices.local(total, storage).bytes
            memory += optimizer_state_bytes(request.optimizer, prices.local(master, storage))
        total_s = sum(s for s in seconds if s is not None)
        return SplitOption(None, tuple(row), (), total_s, memory, total_s, update_s)

    # -- operators -----------------------------------------------------------------------------
    def _node_options(self, group: Group, node: Node) -> list[SplitOption]:
        signature = self.request.signatures.get(node.name)
        given = {a: self._strategy(a, node.name) for a in ("mb", "dp")}
        metas = [self.structure.metas.get(r, TensorMeta((), "int64")) for r in node.refs()]
        word = self.prices.word(node, metas, group.used)
        key = (
            word, id(signature), *given.values(), group.saved, group.from_prologue,
            group.in_body, group.in_prologue, self.request.batch_factors.get(node.name),
            node.name in self.whole_norms, node.name in self.structure.backward,
        )  # fmt: skip
        if key in self._alike:
            return self._alike[key]
        options = []
        for choice in self._tp_choices(node, signature, given):
            strategies = tuple(choice if a == "tp" else given[a] for a in self.axes)
            option = self._priced(group, node, signature, strategies, choice, metas, word)
            if option is not None:
                options.append(option)
        if not options:
            raise ConstraintError(
                f"operator {node.name!r} ({node.op}): no split over tp={self.request.tp} is left "
                "by the constraints; drop sequence_parallel or a placement"
            )
        self._alike[key] = options
        return options

    def _strategy(self, axis: str, name: str) -> AxisStrategy | None:
        choice = self.request.data.get(axis, {}).get(name)
        return choice if isinstance(choice, AxisStrategy) else None

    def _tp_choices(
        self, node: Node, signature: OpSignature | None, given: Mapping[str, AxisStrategy | None]
    ) -> list[AxisStrategy | None]:
        if signature is None or "tp" not in self.axes:
            return [None]
        outer = [
            (strategy, self.request.axis_sizes[AXES.index(axis)])
            for axis, strategy in given.items()
            if strategy is not None
        ]
        divide = parts_by_factor(signature, outer)
        batch = {*divide, *self.request.batch_factors.get(node.name, ()), MICROBATCH_STATISTICS}
        found = [
            s
            for s in axis_strategies(signature, self.request.tp, divide=divide)
            if s.factor not in batch
        ]
        wish = self.request.sequence_parallel
        if wish is False and node.name in self.whole_norms:
            return [None]
        is_backward = node.name in self.structure.backward
        if wish and not is_backward and is_norm(node, self.structure.metas):
            found = [s for s in found if _splits_rows(s)] or found
        return [None if s == replicated_strategy(signature) else s for s in found]

    def _priced(
        self,
        group: Group,
        node: Node,
        signature: OpSignature | None,
        strategies: Strategies,
        choice: AxisStrategy | None,
        metas: Sequence[TensorMeta],
        word: int,
    ) -> SplitOption | None:
        """An option with its seconds per step; None if there is no such local form."""
        count, prices = self.request.num_microbatches, self.prices
        operands = tuple(operand_layout(strategies, i) for i in range(len(metas)))
        results = tuple(result_layout(strategies, i) for i in range(len(node.metas())))
        parts: list[tuple[int, float | None]] = []
        if group.in_body:
            time_s = prices.operator_s(node, signature, strategies, metas, group.used, word)
            parts.append((count, time_s))
            for meta, layout, cut in zip(metas, operands, group.from_prologue, strict=True):
                if cut:
                    parts.append((count, prices.move_s(meta, (R, *layout[1:]), layout)))
        if group.in_prologue:
            outer = (None, *strategies[1:])
            parts.append((1, prices.operator_s(node, signature, outer, metas, group.used, word)))
        total_s = once_s = 0.0
        for runs, part_s in parts:
            if part_s is None:
                return None
            total_s += runs * part_s
        if group.in_prologue:
            once_s = parts[-1][1] or 0.0
        kept = [node.metas()[i] for i in sorted(group.saved)]
        local = [
            prices.local(m, results[i]).bytes
            for m, i in zip(kept, sorted(group.saved), strict=True)
            if m is not None
        ]
        memory = int(self.request.in_flight * sum(local))
        return SplitOption(choice, operands, results, total_s, memory, once_s)

    # -- what leaves ---------------------------------------------------------------------------
    def _charge(self, at: int, result: int, kind: str) -> None:
        """Add to each option what its result costs as a loss or gradient."""
        name, count = self.structure.groups[at].members[0], self.request.num_microbatches
        node = self.structure.nodes.get(name)
        meta = node.metas()[result] if node is not None else self.structure.metas.get(name)
        if meta is None:
            return
        kept = []
        for option in self.menus[at]:
            have = option.results[result]
            first = self.prices.move_s(meta, have, self._pending(have))
            last: float | None = 0.0
            if kind == "loss":
                last = self.prices.move_s(meta, self._seen(have, Pass.STEP), tuple(R for _ in have))
            if first is not None and last is not None:
                time_s = option.time_s + count * first + last
                kept.append(replace(option, time_s=time_s, once_s=option.once_s + last))
        self.menus[at] = kept

    def _pending(self, layout: Layout) -> Layout:
        return (P, *layout[1:]) if self.has_mb else layout

    def _join_options(self, group: Group) -> list[SplitOption]:
        """The sum of a tied parameter's gradients: what each is, what they become."""
        menus = [
            sorted({o.results[result] for o in self.menus[at]}, key=str)
            for at, result in group.parts
        ]
        meta = summed_meta(self.structure.metas[group.members[0].removeprefix("join ")])
        if len(menus) == 2:
            rows: list[tuple[Layout, ...]] = [(a, b) for a in menus[0] for b in menus[1]]
        else:  # rare: all of them alike
            rows = [(a,) * len(menus) for a in menus[0] if all(a in m for m in menus[1:])]
        options = []
        for layouts in rows:
            priced = self._join_price(meta, layouts)
            if priced is not None:
                time_s, common = priced
                time_s *= self.request.num_microbatches
                options.append(SplitOption(None, layouts, (common,), time_s))
        return options

    def _join_price(
        self, meta: TensorMeta, layouts: Sequence[Layout]
    ) -> tuple[float, Layout] | None:
        common, *others = map(self._pending, layouts)
        steps = list(zip(layouts, map(self._pending, layouts), strict=True))
        total_s = 0.0
        for layout in others:
            merged = merged_layout(common, layout)
            steps += [(common, merged), (layout, merged)]
            local = self.prices.local(meta, merged)
            total_s += self.prices.model.op_time_s("aten.add.Tensor", (), [local, local], local)
            common = merged
        for have, want in steps:
            move_s = self.prices.move_s(meta, have, want)
            if move_s is None:
                return None
            total_s += move_s
        return total_s, common

    # -- flows ---------------------------------------------------------------------------------
    def _moves(self, index: int) -> dict[tuple[Layout, Layout], Move]:
        """Reshards of a flow; flows of equal values, layouts and readers share one table."""
        shape = self.structure.flows[index]
        sources = self._known(o.results[shape.result] for o in self.menus[shape.group])
        readers = tuple(
            (self._known(o.operands[r.operand] for o in self.menus[r.variable]), r.when)
            for r in shape.readers
        )
        key = (shape.meta, shape.is_fixed, shape.is_bound, self._layouts[sources],
               *((self._layouts[targets], when) for targets, when in readers))  # fmt: skip
        if key not in self._made:
            self._made[key] = self._moves_of(shape, sources, readers)
        return self._made[key]

    def _known(self, layouts: Iterable[Layout]) -> tuple[Layout, ...]:
        """Distinct layouts, which have a number from now on."""
        found = tuple(dict.fromkeys(layouts))
        self._layouts.setdefault(found, len(self._layouts))
        return found

    def _moves_of(
        self,
        shape: FlowShape,
        sources: Sequence[Layout],
        readers: Sequence[tuple[Sequence[Layout], Pass]],
    ) -> dict[tuple[Layout, Layout], Move]:
        moves: dict[tuple[Layout, Layout], Move] = {}
        tried: set[tuple[Layout, Layout]] = set()
        size = {layout: self._bytes(shape.meta, layout) for layout in sources}
        for targets, when in readers:
            as_it_is = shape.is_fixed or (shape.is_bound and not set(sources).isdisjoint(targets))
            wanted = [self._seen(target, when) for target in targets]
            for source in sources:
                have = self._seen(source, when)
                for want in wanted:
                    pair = (have, want)
                    if pair in tried:
                        continue
                    if as_it_is and have != want:
                        continue
                    tried.add(pair)
                    time_s = self.prices.move_s(shape.meta, have, want, in_bucket=when is Pass.STEP)
                    if time_s is not None:
                        for layout in pair:
                            if layout not in size:
                                size[layout] = self._bytes(shape.meta, layout)
                        moves[pair] = Move(time_s, size[want] <= size[have])
        return moves

    def _bytes(self, meta: TensorMeta, layout: Layout) -> int:
        return self.prices.local(meta, layout).bytes

    def _seen(self, layout: Layout, when: Pass) -> Layout:
        return (R, *layout[1:]) if self.has_mb and is_once(when) else layout


def merged_layout(left: Layout, right: Layout) -> Layout:
    """A layout for the sum of two gradients: as programs merge them."""
    merged: list[Placement] = []
    for a, b in zip(left, right, strict=True):
        if a == b:
            merged.append(a)
        elif isinstance(a, Partial | Replicate) and isinstance(b, Partial | Replicate):
            merged.append(P)
        else:
            merged.append(a if isinstance(a, Shard) else b)
    return tuple(merged)


def _without_repeats(options: Iterable[SplitOption]) -> list[SplitOption]:
    """The cheapest of options with equal layouts, in order."""
    best: dict[object, SplitOption] = {}
    for option in options:
        key = (option.operands, option.results, option.memory_bytes)
        if key not in best or option.time_s < best[key].time_s:
            best[key] = option
    return list(best.values())


def _splits_rows(strategy: AxisStrategy) -> bool:
    return any(isinstance(p, Shard) and p.dim == 1 for p in strategy.inputs[:1])
