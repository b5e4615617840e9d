"""From a joint graph to a :class:`~autopar.solver.splits_problem.SplitsProblem` over ``tp``.

The splits over ``mb`` and ``dp`` are given. Every operator class gets one option per legal split of
its factors over ``tp``, priced by emitting its local form; every parameter class one per dim that
leaves no rank empty, and whole. ``tp`` does not split the batch: ``dp`` does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import ConstraintError
from autopar.ir.graph import Graph, Input, InputKind, Node, OutputKind, TensorMeta
from autopar.sharding.decisions import Choice
from autopar.sharding.placement import Layout, P, Partial, Placement, R, Replicate, Shard
from autopar.sharding.programs import AXES
from autopar.sharding.rules import MICROBATCH_STATISTICS
from autopar.sharding.signature import AxisStrategy, OpSignature, axis_strategies, replicated_strategy
from autopar.sharding.stages import VIEW_OPS, assign_stages, stage_demands
from autopar.sharding.storage import storage_layout
from autopar.solver.blocks import BlockChain, value_keys
from autopar.solver.constraints import may_shard
from autopar.solver.prices import PriceList, Strategies, operand_layout, result_layout
from autopar.solver.splits_problem import (
    Flow,
    Move,
    Pass,
    Reader,
    SplitOption,
    SplitsProblem,
    SplitVariable,
    is_once,
)
from cost_models.memory import parameter_state_bytes

NORM_OPS = frozenset({"aten.native_layer_norm.default", "aten._fused_rms_norm.default"})
ROW_SUMS = frozenset({"aten.sum.dim_IntList"})


@dataclass(frozen=True, kw_only=True)
class SplitsRequest:
    """What to decide, and under what.

    Attributes:
        graph: The joint graph.
        chain: Its blocks.
        signatures: Named dims by operator.
        data: Axis -> choices over ``mb`` and ``dp``.
        axis_sizes: Sizes of :data:`~autopar.sharding.programs.AXES`.
        zero_level: ZeRO level of the parameters.
        optimizer: For the bytes of its state.
        batch_factors: Operator -> factors that are the batch.
        fixed: Parameter input -> placement over ``tp``.
        sequence_parallel: Force (True) or forbid (False) norms on shards of the sequence.
        in_flight: Micro-batches whose saved values count; 0 to leave activations out.
        limit_bytes: Bound of parameters' state and saved values together.
        optimizer_s_per_byte: Seconds of an optimizer step per byte of stored parameter.
        gather_outputs: Outputs that are returned whole.
    """

    graph: Graph
    chain: BlockChain
    signatures: Mapping[str, OpSignature | None]
    data: Mapping[str, Mapping[str, Choice]]
    axis_sizes: tuple[int, int, int]
    zero_level: int = 0
    optimizer: str = "adamw"
    batch_factors: Mapping[str, frozenset[str]] = field(default_factory=dict)
    fixed: Mapping[str, Placement] = field(default_factory=dict)
    sequence_parallel: bool | None = None
    in_flight: int = 0
    limit_bytes: int | None = None
    optimizer_s_per_byte: float = 0.0
    gather_outputs: frozenset[str] = frozenset()

    @property
    def num_microbatches(self) -> int:
        """Runs of forward and backward per step."""
        return self.axis_sizes[0]

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


@dataclass(slots=True)
class _Draft:
    """A variable in the making."""

    members: list[str]
    options: list[SplitOption]


class _Builder:
    def __init__(self, request: SplitsRequest, prices: PriceList) -> None:
        self.request, self.prices = request, prices
        self.graph, self.axes = request.graph, prices.axes
        self.has_mb = "mb" in self.axes
        self.metas = {n: m for n, m in self.graph.metas().items() if isinstance(m, TensorMeta)}
        self.nodes, self.inputs = self.graph.node_map(), self.graph.input_map()
        self.keys = value_keys(self.graph)
        stage_map = assign_stages(self.graph, ())
        self.backward = stage_map.backward
        self.wanted = stage_demands(self.graph, stage_map, request.gather_outputs)[0].wanted
        self.drafts: list[_Draft] = []
        self.variable_of: dict[str, int] = {}
        self.readers: dict[str, list[Reader]] = {}
        self.saved = self._saved_roots()
        self.in_body, self.in_prologue = self._runs()

    # -- what runs when ------------------------------------------------------------------------
    def _mb(self, name: str) -> Placement:
        """Placement of a value over ``mb``."""
        base, _, index = self.keys.get(name, name).partition("#")
        choice = self.request.data.get("mb", {}).get(base, R)
        return choice.outputs[int(index or 0)] if isinstance(choice, AxisStrategy) else choice

    def _comes_from_prologue(self, node: Node, operand: int, ref: str) -> bool:
        if not self.has_mb:
            return False
        have, choice = self._mb(ref), self.request.data.get("mb", {}).get(node.name)
        want = choice.inputs[operand] if isinstance(choice, AxisStrategy) else R
        return have != want and not isinstance(have, Replicate)

    def _runs(self) -> tuple[set[str], set[str]]:
        """Operators of the forward and backward programs, and of the prologue."""
        if not self.has_mb:
            return self.wanted, set()
        body = {o.value.name for o in self.graph.outputs if o.value and o.value.name in self.wanted}
        prologue: set[str] = set()
        for node in reversed(self.graph.nodes):
            if node.name not in self.wanted:
                continue
            for operand, ref in enumerate(node.refs()):
                if node.name in body:
                    cut = node.op != "getitem" and self._comes_from_prologue(node, operand, ref)
                    (prologue if cut else body).add(ref)
                if node.name in prologue:
                    prologue.add(ref)
        return body, prologue

    def _saved_roots(self) -> set[str]:
        """Values that forward keeps for backward, views resolved."""
        roots: set[str] = set()
        for node in self.graph.nodes:
            if node.name not in self.backward or node.name not in self.wanted:
                continue
            for ref in node.refs():
                name = ref
                while name in self.nodes and self.nodes[name].op in VIEW_OPS:
                    if name in self.keys:
                        break
                    name = self.nodes[name].refs()[0]
                if name in self.nodes and name not in self.backward:
                    roots.add(self.keys.get(name, name))
        return roots

    # -- variables -----------------------------------------------------------------------------
    def build(self) -> SplitsProblem:
        used = self._used_results()
        groups: dict[object, int] = {}
        for entry in self.graph.inputs:
            key = (self.request.chain.node_class[entry.name], self._data_key(entry.name), entry.kind)
            fixed = self.request.fixed.get(entry.name)
            self._join_group(groups, (key, fixed), entry.name, lambda e=entry: self._input_options(e))
        for node in self.graph.nodes:
            if node.op == "getitem" or node.name not in self.wanted:
                continue
            mask = frozenset(used.get(node.name, ()))
            key = (
                self.request.chain.node_class[node.name],
                self._data_key(node.name),
                node.name in self.in_body,
                node.name in self.in_prologue,
                tuple(self._comes_from_prologue(node, i, r) for i, r in enumerate(node.refs())),
                mask,
            )
            self._join_group(groups, key, node.name, lambda n=node, m=mask: self._node_options(n, m))
        for node in self.graph.nodes:
            if node.op != "getitem" and node.name in self.wanted:
                self._read(node)
        self._outputs(groups)
        return SplitsProblem(
            variables=tuple(
                SplitVariable(d.members[0], tuple(d.members), tuple(d.options)) for d in self.drafts
            ),
            flows=self._flows(),
            num_microbatches=self.request.num_microbatches,
            has_mb=self.has_mb,
            limit_bytes=self.request.limit_bytes,
        )

    def _join_group(self, groups: dict[object, int], key: object, name: str, make: object) -> int:
        if key in groups:
            self.drafts[groups[key]].members.append(name)
        else:
            groups[key] = len(self.drafts)
            options = make() if callable(make) else make
            assert isinstance(options, list)
            self.drafts.append(_Draft([name], _without_repeats(options)))
        self.variable_of[name] = groups[key]
        return groups[key]

    def _data_key(self, name: str) -> tuple[Choice | None, ...]:
        return tuple(self.request.data.get(a, {}).get(name) for a in ("mb", "dp"))

    def _used_results(self) -> dict[str, set[int]]:
        used: dict[str, set[int]] = {}
        for node in self.graph.nodes:
            if node.op == "getitem" and node.name in self.wanted:
                base, _, index = self.keys[node.name].partition("#")
                used.setdefault(base, set()).add(int(index))
            elif not isinstance(node.meta, tuple):
                used[node.name] = {0}
        return used

    def _input_options(self, entry: Input) -> list[SplitOption]:
        base = [self.request.data.get(a, {}).get(entry.name, R) for a in ("mb", "dp")]
        mb, dp = (p if not isinstance(p, AxisStrategy) else R for p in base)
        if entry.kind is not InputKind.PARAM or entry.meta is None:
            return [SplitOption(None, (), (self._over((mb, dp, R)),), 0.0)]
        placements: list[Placement] = [R]
        if "tp" in self.axes and entry.name in self._read_params():
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

    def _read_params(self) -> set[str]:
        return {r for n in self.graph.nodes if n.name in self.wanted for r in n.refs()}

    def _param_option(self, entry: Input, meta: TensorMeta, compute: Layout) -> SplitOption:
        request, prices = self.request, self.prices
        storage = self._over(storage_layout(meta, compute, request.dp, request.zero_level))
        layout = self._over(compute)
        gather_s = prices.move_s(meta, storage, layout) or 0.0
        stored = prices.local(meta, storage)
        update_s = stored.bytes * request.optimizer_s_per_byte if entry.requires_grad else 0.0
        state = parameter_state_bytes(
            prices.local(meta, layout),
            optimizer=request.optimizer,
            zero_level=request.zero_level,
            dp=request.dp,
            requires_grad=entry.requires_grad,
        )
        choice = compute[2]
        return SplitOption(choice, (storage,), (layout,), gather_s + update_s, state.total_bytes)

    def _over(self, full: Layout) -> Layout:
        """A layout over all of AXES, on the axes that split."""
        return tuple(full[AXES.index(a)] for a in self.axes)

    def _node_options(self, node: Node, used: frozenset[int]) -> list[SplitOption]:
        signature = self.request.signatures.get(node.name)
        given = {a: self._strategy(a, node.name) for a in ("mb", "dp")}
        options = []
        for choice in self._tp_choices(node, signature, given):
            strategies = tuple(choice if a == "tp" else given[a] for a in self.axes)
            option = self._priced(node, signature, strategies, choice, used)
            if option is not None:
                options.append(option)
        if not options:
            raise ConstraintError(
                f"operator {node.name!r} ({node.op}): no split over tp={self.request.tp} is left by "
                "the constraints; drop sequence_parallel or a placement"
            )
        return options

    def _strategy(self, axis: str, name: str) -> AxisStrategy | None:
        choice = self.request.data.get(axis, {}).get(name)
        return choice if isinstance(choice, AxisStrategy) else None

    def _tp_choices(
        self, node: Node, signature: OpSignature | None, given: Mapping[str, AxisStrategy | None]
    ) -> list[AxisStrategy | None]:
        if signature is None or "tp" not in self.axes:
            return [None]
        divide: dict[str, int] = {}
        for axis, strategy in given.items():
            if strategy is not None and strategy.factor:
                size = self.request.axis_sizes[AXES.index(axis)]
                divide[strategy.factor] = divide.get(strategy.factor, 1) * size
        batch = {*divide, *self.request.batch_factors.get(node.name, ()), MICROBATCH_STATISTICS}
        found = [
            s
            for s in axis_strategies(signature, self.request.tp, divide=divide)
            if s.factor not in batch
        ]
        wish = self.request.sequence_parallel
        if wish is not None and node.name not in self.backward and _is_norm(node, self.metas):
            split = [s for s in found if _splits_rows(s)]
            found = (split or found) if wish else [s for s in found if s not in split]
        return [None if s == replicated_strategy(signature) else s for s in found]

    def _priced(
        self,
        node: Node,
        signature: OpSignature | None,
        strategies: Strategies,
        choice: AxisStrategy | None,
        used: frozenset[int],
    ) -> SplitOption | None:
        refs, count = node.refs(), self.request.num_microbatches
        metas = [self.metas.get(r, TensorMeta((), "int64")) for r in refs]
        operands = tuple(operand_layout(strategies, i) for i in range(len(refs)))
        results = tuple(result_layout(strategies, i) for i in range(len(node.metas())))
        total_s, memory = 0.0, 0
        if node.name in self.in_body:
            time_s = self.prices.operator_s(node, signature, strategies, metas, used)
            if time_s is None:
                return None
            total_s += count * time_s
        if node.name in self.in_prologue:
            outer = (None, *strategies[1:])
            time_s = self.prices.operator_s(node, signature, outer, metas, used)
            if time_s is None:
                return None
            total_s += time_s
        for i, ref in enumerate(refs):
            if node.name in self.in_body and self._comes_from_prologue(node, i, ref):
                whole = (R, *operands[i][1:])
                time_s = self.prices.move_s(metas[i], whole, operands[i])
                if time_s is None:
                    return None
                total_s += count * time_s
        for i, meta in enumerate(node.metas()):
            key = f"{node.name}#{i}" if isinstance(node.meta, tuple) else node.name
            if meta is not None and key in self.saved:
                memory += self.request.in_flight * self.prices.local(meta, results[i]).bytes
        return SplitOption(choice, operands, results, total_s, memory)

    # -- readers -------------------------------------------------------------------------------
    def _read(self, node: Node) -> None:
        variable = self.variable_of[node.name]
        when = Pass.BACKWARD if node.name in self.backward else Pass.FORWARD
        for operand, ref in enumerate(node.refs()):
            key = self.keys.get(ref, ref)
            row = self.readers.setdefault(key, [])
            if node.name in self.in_body:
                cut = self._comes_from_prologue(node, operand, ref)
                row.append(Reader(variable, operand, Pass.PROLOGUE if cut else when))
            if node.name in self.in_prologue:
                row.append(Reader(variable, operand, Pass.PROLOGUE))

    def _outputs(self, groups: dict[object, int]) -> None:
        """Readers for what leaves the graph, and what leaving costs the producer."""
        owner = {i.target: i.name for i in self.graph.inputs}
        grads: dict[str, list[str]] = {}
        tolls: dict[tuple[int, int], str] = {}
        for output in self.graph.outputs:
            if output.value is None:
                continue
            name = output.value.name
            key = self.keys.get(name, name)
            if output.kind is OutputKind.GRAD:
                grads.setdefault(output.target, []).append(name)
            elif output.kind is OutputKind.LOSS:
                tolls[self._place(key)] = "loss"
            elif output.kind is OutputKind.MUTATION or output.target in self.request.gather_outputs:
                want = self._over((self._mb(name), R, R))
                option = SplitOption(None, (want,), (), 0.0)
                sink = self._join_group(groups, ("sink", want), f"output {name}", [option])
                self.readers.setdefault(key, []).append(Reader(sink, 0, Pass.FORWARD))
        for target, names in grads.items():
            param = self.variable_of[owner[target]]
            keys = [self.keys.get(n, n) for n in names]
            if len(keys) == 1:
                self.readers.setdefault(keys[0], []).append(Reader(param, 0, Pass.STEP))
                tolls[self._place(keys[0])] = "grad"
                continue
            joined = f"join {target}"
            self._join_group(groups, joined, joined, lambda k=keys: self._join_options(k))
            for operand, key in enumerate(keys):
                reader = Reader(self.variable_of[joined], operand, Pass.BACKWARD)
                self.readers.setdefault(key, []).append(reader)
            self.readers.setdefault(joined, []).append(Reader(param, 0, Pass.STEP))
            self.metas[joined] = self.metas[owner[target]]
        for (variable, result), kind in tolls.items():
            self._charge(variable, result, kind)

    def _place(self, key: str) -> tuple[int, int]:
        base, _, index = key.partition("#")
        return self.variable_of[base], int(index or 0)

    def _charge(self, variable: int, result: int, kind: str) -> None:
        """Add to each option what its result costs as a loss or gradient."""
        draft, count = self.drafts[variable], self.request.num_microbatches
        name = draft.members[0]
        meta = self.nodes[name].metas()[result] if name in self.nodes else self.metas[name]
        kept = []
        for option in draft.options:
            have = option.results[result]
            pending = (P, *have[1:]) if self.has_mb else have
            first = self.prices.move_s(meta, have, pending) if meta is not None else 0.0
            last: float | None = 0.0
            if kind == "loss" and meta is not None:
                done = (R, *have[1:]) if self.has_mb else have
                last = self.prices.move_s(meta, done, tuple(R for _ in have))
            if first is not None and last is not None:
                kept.append(replace(option, time_s=option.time_s + count * first + last))
        draft.options = kept

    def _join_options(self, keys: Sequence[str]) -> list[SplitOption]:
        """The sum of a tied parameter's gradients: what each is, what they become."""
        places = [self._place(k) for k in keys]
        menus = [
            sorted({o.results[r] for o in self.drafts[v].options}, key=str) for v, r in places
        ]
        meta = self._meta_of(keys[0])
        tuples: list[tuple[Layout, ...]] = [(a,) for a in menus[0]]
        if len(keys) == 2:
            tuples = [(a, b) for a in menus[0] for b in menus[1]]
        else:  # rare: all of them alike
            tuples = [(a,) * len(keys) for a in menus[0] if all(a in m for m in menus[1:])]
        options = []
        for layouts in tuples:
            priced = self._join_price(meta, [self._pending(a) for a in layouts])
            if priced is not None:
                time_s, common = priced
                time_s *= self.request.num_microbatches
                options.append(SplitOption(None, layouts, (common,), time_s))
        return options

    def _meta_of(self, key: str) -> TensorMeta:
        base, _, index = key.partition("#")
        meta = self.nodes[base].metas()[int(index or 0)]
        assert meta is not None
        return meta

    def _pending(self, layout: Layout) -> Layout:
        return (P, *layout[1:]) if self.has_mb else layout

    def _join_price(self, meta: TensorMeta, layouts: list[Layout]) -> tuple[float, Layout] | None:
        common, total_s = layouts[0], 0.0
        for layout in layouts[1:]:
            merged = merged_layout(common, layout)
            for have in (common, layout):
                move_s = self.prices.move_s(meta, have, merged)
                if move_s is None:
                    return None
                total_s += move_s
            local = self.prices.local(meta, merged)
            total_s += self.prices.model.op_time_s("aten.add.Tensor", (), [local, local], local)
            common = merged
        return total_s, common

    # -- flows ---------------------------------------------------------------------------------
    def _flows(self) -> tuple[Flow, ...]:
        counts: dict[tuple[int, int, tuple[Reader, ...]], int] = {}
        meta_of: dict[tuple[int, int], TensorMeta] = {}
        for key, readers in self.readers.items():
            variable, result = self._place(key)
            if key in self.metas:
                meta_of[variable, result] = self.metas[key]
            elif key.partition("#")[0] in self.nodes:
                meta_of[variable, result] = self._meta_of(key)
            row = tuple(sorted(readers, key=lambda r: (r.variable, r.operand, r.when)))
            counts[variable, result, row] = counts.get((variable, result, row), 0) + 1
        flows = []
        for (variable, result, readers), count in counts.items():
            meta = meta_of.get((variable, result))
            if meta is not None:
                moves = self._moves(meta, variable, result, readers)
                flows.append(Flow(variable, result, count, readers, moves))
        return tuple(flows)

    def _moves(
        self, meta: TensorMeta, variable: int, result: int, readers: Iterable[Reader]
    ) -> dict[tuple[Layout, Layout], Move]:
        moves: dict[tuple[Layout, Layout], Move] = {}
        sources = {o.results[result] for o in self.drafts[variable].options}
        for reader in readers:
            targets = {o.operands[reader.operand] for o in self.drafts[reader.variable].options}
            for source in sources:
                for target in targets:
                    have, want = self._seen(source, reader.when), self._seen(target, reader.when)
                    if (have, want) in moves:
                        continue
                    time_s = self.prices.move_s(meta, have, want)
                    if time_s is not None:
                        before, after = (self.prices.local(meta, a).bytes for a in (have, want))
                        moves[have, want] = Move(time_s, after <= before)
        return moves

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


def _is_norm(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether an operator normalises rows of a (batch, sequence, features) tensor."""
    refs = node.refs()
    rank = len(metas[refs[0]].shape) if refs and refs[0] in metas else 0
    if node.op in NORM_OPS:
        return rank >= 3
    if node.op not in ROW_SUMS or rank != 3 or len(node.args) < 3 or node.args[2] is not True:
        return False
    dims = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return dims in ((-1,), (2,)) and metas[refs[0]].is_float


def _splits_rows(strategy: AxisStrategy) -> bool:
    return any(isinstance(p, Shard) and p.dim == 1 for p in strategy.inputs[:1])
