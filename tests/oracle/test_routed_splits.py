"""Splits of rows sorted by expert, operator by operator on shards, against the whole operators.

Which rows a rank holds, and in which order, is its own affair; what can be compared is what has a
place again: counts, combined tokens, gradients of weights, and all ranks' rows as a set. Whatever
lies behind a rank's rows is NaN here, so that an operator which reads it is found.
"""

from __future__ import annotations

import pytest
import torch

from autopar.capture.torch_ops import meta_of
from autopar.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    TensorMeta,
)
from autopar.sharding.build import signatures_of
from autopar.sharding.emitter import Emitter
from autopar.sharding.lowerings import LOWERINGS
from autopar.sharding.placement import Routed, RoutedForm, local_shape
from autopar.sharding.routing import routes_rows
from autopar.sharding.signature import AxisStrategy, axis_strategies
from tests.oracle.shard_oracle import Blocks, combine, evaluate, run_nodes, split

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 8, 2, 4, 6, 5
SLOTS = TOKENS * TOP_K
T, E, X = RoutedForm
CHAIN = (
    ("route", "autopar.moe_route", (Ref("ids"), EXPERTS, TOP_K)),
    ("order", "getitem", (Ref("route"), 0)),
    ("counts", "getitem", (Ref("route"), 1)),
    ("splits", "getitem", (Ref("route"), 2)),
    ("rows", "autopar.moe_dispatch", (Ref("x"), Ref("order"), Ref("splits"), TOP_K)),
    ("share", "autopar.moe_dispatch", (Ref("w"), Ref("order"), Ref("splits"), 1)),
    ("product", "autopar.grouped_mm", (Ref("rows"), Ref("up"), Ref("counts"), 1.0)),
    ("bias", "autopar.moe_spread", (Ref("table"), Ref("counts"), Ref("order"))),
    ("sum", "aten.add.Tensor", (Ref("product"), Ref("bias"))),
    ("act", "aten.silu.default", (Ref("sum"),)),
    ("column", "aten.view.default", (Ref("share"), (SLOTS, 1))),
    ("weighted", "aten.mul.Tensor", (Ref("act"), Ref("column"))),
    ("out", "autopar.moe_combine",
     (Ref("weighted"), Ref("order"), Ref("splits"), TOP_K, (TOKENS, INNER))),
    ("slots", "autopar.moe_combine",
     (Ref("weighted"), Ref("order"), Ref("splits"), 1, (SLOTS, INNER))),
    ("grad", "autopar.grouped_mm_weight", (Ref("rows"), Ref("weighted"), Ref("counts"), 1.0)),
    ("sums", "autopar.moe_run_sums", (Ref("weighted"), Ref("counts"))),
)  # fmt: skip
PLACED = ("counts", "out", "slots", "grad", "sums")
ROUTING = {
    "even": [0, 1, 2, 3] * (SLOTS // 4),
    "all to one": [2] * SLOTS,
    "one without tokens": [0, 3, 3, 1] * (SLOTS // 4),
    "as it comes": [3, 1, 0, 2, 2, 2, 1, 3, 0, 0, 2, 1, 2, 2, 3, 2],
}


def _inputs(routing: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    f64 = torch.float64
    return {
        "ids": torch.tensor(ROUTING[routing]),
        "x": torch.randn(TOKENS, HIDDEN, dtype=f64),
        "w": torch.randn(SLOTS, dtype=f64),
        "up": torch.randn(EXPERTS, HIDDEN, INNER, dtype=f64),
        "table": torch.randn(EXPERTS, INNER, dtype=f64),
    }


def _whole(inputs: dict[str, torch.Tensor]) -> tuple[Graph, dict[str, object]]:
    """The chain as a graph, and every value on one device."""
    values: dict[str, object] = dict(inputs)
    nodes = []
    for name, op, args in CHAIN:
        values[name] = evaluate(op, args, (), values)
        found = values[name]
        meta = tuple(map(meta_of, found)) if isinstance(found, tuple) else meta_of(found)  # type: ignore[arg-type]
        nodes.append(Node(name, op, args, meta, phase=Phase.FORWARD))
    entries = tuple(Input(n, InputKind.USER, n, meta_of(t)) for n, t in inputs.items())
    outputs = tuple(Output(OutputKind.OUTPUT, n, Ref(n)) for n in PLACED)
    return Graph(entries, tuple(nodes), outputs), values


def _strategy(signature: object, form: RoutedForm, parts: int) -> AxisStrategy:
    offered = [
        s
        for s in axis_strategies(signature, parts)  # type: ignore[arg-type]
        if any(isinstance(p, Routed) and p.form is form for p in (*s.inputs, *s.outputs))
    ]
    assert len(offered) == 1, [str(s) for s in offered]
    return offered[0]


class _Ranks:
    """All ranks' values, operator by operator."""

    def __init__(
        self, routing: str, forms: tuple[RoutedForm, ...], sizes: tuple[int, ...], capacity: int
    ) -> None:
        self.inputs = _inputs(routing)
        self.graph, self.values = _whole(self.inputs)
        self.signatures = signatures_of(self.graph, expert_capacity_percent=capacity)
        self.forms, self.sizes = forms, sizes
        self.axes = ("dp", "tp")[-len(sizes) :]
        self.blocks: dict[str, Blocks] = {}
        self.layouts: dict[str, tuple[object, ...]] = {}
        self.ops: set[str] = set()
        for node in self.graph.nodes:
            self._run(node)

    def _run(self, node: Node) -> None:
        if node.op == "getitem":
            key = f"{node.refs()[0]}#{node.args[1]}"
            self.blocks[node.name], self.layouts[node.name] = self.blocks[key], self.layouts[key]
            return
        signature = self.signatures[node.name]
        assert signature is not None
        pairs = zip(self.forms, self.sizes, strict=True)
        strategies = [_strategy(signature, form, parts) for form, parts in pairs]
        emitter = Emitter(axes=self.axes, sizes=self.sizes)
        operands, blocks, metas = [], {}, []
        for index, ref in enumerate(node.refs()):
            layout = tuple(s.inputs[index] for s in strategies)
            if ref in self.inputs:
                whole = self.inputs[ref]
                blocks[ref] = split(whole, layout, self.sizes, index)
            else:
                whole = self.values[ref]  # type: ignore[assignment]
                assert self.layouts[ref] == layout, (node.name, ref)
                blocks[ref] = self.blocks[ref]
            metas.append(meta_of(whole))
            local = local_shape(tuple(whole.shape), layout, self.sizes)
            operands.append(emitter.bind(ref, TensorMeta(local, metas[-1].dtype)))
        results = emitter.operator(node, signature, strategies, operands, metas)
        found = run_nodes(emitter.nodes, blocks, self.axes, self.sizes)
        for index, ref in enumerate(results):
            assert ref is not None
            key = f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name
            self.layouts[key] = tuple(s.outputs[index] for s in strategies)
            self.blocks[key] = {c: found[c][ref.name] for c in found}  # type: ignore[misc]
            self._poison(key)
        self.ops.update(n.op for n in emitter.nodes)

    def _poison(self, key: str) -> None:
        if not any(isinstance(p, Routed) and p.form is not T for p in self.layouts[key]):
            return
        for coords, value in self.blocks[key].items():
            if value.is_floating_point():
                value = value.clone()
                value[self.num_rows(coords) :] = float("nan")
                self.blocks[key][coords] = value

    def num_rows(self, coords: tuple[int, ...]) -> int:
        """Rows that a rank has work for."""
        return int(self.blocks["route#2"][coords][1].sum())


CASES = [
    pytest.param((form,), (parts,), capacity, id=f"{form.name.lower()}-{parts}-{capacity}")
    for form in RoutedForm
    for parts in (2, 4)
    for capacity in ((0,) if form is T else (0, 100 * parts))
] + [pytest.param((T, form), (2, 2), 0, id=f"tokens-x-{form.name.lower()}") for form in RoutedForm]


@pytest.mark.parametrize("routing", ROUTING)
@pytest.mark.parametrize(("forms", "sizes", "capacity"), CASES)
def test_rows_of_all_ranks_are_the_rows_of_the_whole_operators(
    forms: tuple[RoutedForm, ...], sizes: tuple[int, ...], capacity: int, routing: str
) -> None:
    ranks = _Ranks(routing, forms, sizes, capacity)
    for name in PLACED:
        expected = ranks.values[name]
        assert isinstance(expected, torch.Tensor)
        layout = ranks.layouts[name]
        found = combine(ranks.blocks[name], layout, sizes, tuple(expected.shape))  # type: ignore[arg-type]
        assert isinstance(found, torch.Tensor), f"{name}: {found}"
        torch.testing.assert_close(
            found, expected, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name in ("rows", "weighted"):
        own = [block[: ranks.num_rows(c)] for c, block in ranks.blocks[name].items()]
        expected = ranks.values[name]
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(_sorted(torch.cat(own)), _sorted(expected), rtol=0, atol=1e-12)


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    return rows[rows[:, 0].argsort(stable=True)]


def test_rows_are_exchanged_once_each_way() -> None:
    ranks = _Ranks("as it comes", (X,), (2,), 0)
    assert "comm.all_to_all_rows" in ranks.ops
    assert "comm.all_to_all_rows" not in _Ranks("as it comes", (E,), (2,), 0).ops


def test_a_rank_has_room_for_its_budget_only() -> None:
    for form in (E, X):
        ranks = _Ranks("even", (form,), (4,), 150)
        # 16 slots over 4 ranks are 4 rows each; half as many again is room for 6
        assert {block.shape[0] for block in ranks.blocks["rows"].values()} == {6}


def test_lowerings_of_rows_are_reached() -> None:
    reached = {
        _strategy(signature, form, 2).lowering
        for form in RoutedForm
        for signature in _Ranks("even", (form,), (2,), 0).signatures.values()
        if signature is not None
    }
    assert reached - {""} == ROUTED_LOWERINGS
    assert set(LOWERINGS) >= ROUTED_LOWERINGS


ROUTED_LOWERINGS = {"grouped_product", "moe_combine", "moe_dispatch", "moe_route"}
"""Lowerings that no single operator's rule offers."""


def test_routed_strategies_survive_as_text() -> None:
    for form, capacity in ((T, 0), (E, 0), (E, 130), (X, 130)):
        signatures = _Ranks("even", (form,), (2,), capacity).signatures
        for signature in signatures.values():
            assert signature is not None
            strategy = _strategy(signature, form, 2)
            assert routes_rows(strategy)
            assert AxisStrategy.parse(str(strategy)) == strategy
