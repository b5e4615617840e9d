"""The registry of sharding rules and the string form of a rule."""

from __future__ import annotations

import pytest

from autopar.errors import ShardingError
from autopar.ir.graph import Arg, Dtype, Meta, Node, Ref, TensorMeta
from autopar.sharding import rules
from autopar.sharding.rules import MICROBATCH_STATISTICS, OpCall, Registry, template
from autopar.sharding.rules.call import Naming
from autopar.sharding.rules.views import factorise
from autopar.sharding.signature import OpSignature, axis_strategies


def _meta(*shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(shape, dtype)


def _node(op: str, *args: Arg, meta: Meta) -> Node:
    return Node("node", op, args, meta)


def _splits(signature: OpSignature | None, axis_size: int = 2) -> list[str]:
    assert signature is not None
    return [str(s) for s in axis_strategies(signature, axis_size)]


X, Y, Z = Ref("x"), Ref("y"), Ref("z")
MM = _node("aten.mm.default", X, Y, meta=_meta(4, 6))


def test_splits_of_a_matrix_product() -> None:
    assert _splits(rules.signature(MM, [_meta(4, 8), _meta(8, 6)])) == [
        "R R -> R",
        "S(0) R -> S(0) | m",
        "S(1) S(0) -> P(sum) | k",
        "R S(1) -> S(1) | n",
        "P(sum) R -> P(sum)",
        "R P(sum) -> P(sum)",
    ]


def test_uneven_parts_only_where_no_rank_is_left_empty() -> None:
    signature = rules.signature(MM, [_meta(4, 10), _meta(10, 6)])
    # 10 over 4: blocks of 3, 3, 3, 1; 6 over 4: 2, 2, 2, 0
    assert [s.split("| ")[1] for s in _splits(signature, 4) if "|" in s] == ["m", "k"]


def test_sum_of_two_tensors_passes_pending_sums_only_together() -> None:
    node = _node("aten.add.Tensor", X, Y, meta=_meta(4, 6))
    splits = _splits(rules.signature(node, [_meta(4, 6), _meta(6)]))
    assert [s for s in splits if "P" in s] == ["P(sum) P(sum) -> P(sum)"]
    shifted = _node("aten.add.Tensor", X, 1.0, meta=_meta(4, 6))
    assert not [s for s in _splits(rules.signature(shifted, [_meta(4, 6)])) if "P" in s]


def test_pending_sums_stop_at_integers_and_bools() -> None:
    for dtype in ("int64", "bool"):
        node = Node("n", "aten._to_copy.default", (X,), _meta(4, dtype=dtype),
                    (("dtype", Dtype(dtype)),))  # fmt: skip
        assert not [s for s in _splits(rules.signature(node, [_meta(4)])) if "P" in s]


def test_merged_dim_splits_on_its_outer_factor() -> None:
    naming = Naming()
    assert factorise((4, 16, 3, 8), (64, 24), naming) == (
        (("f0",), ("f1",), ("f2",), ("f3",)),
        (("f0", "f1"), ("f2", "f3")),
    )
    assert naming.sizes == {"f0": 4, "f1": 16, "f2": 3, "f3": 8}


def test_view_without_common_dims_shares_the_common_divisor() -> None:
    naming = Naming()
    # 4x6 to 6x4: halves of the first dim are halves in both; the rest has no common blocks
    before, after = factorise((4, 6), (6, 4), naming)
    assert (before[0][0], after[0][0]) == ("f0", "f0")
    assert naming.sizes["f0"] == 2
    assert naming.whole == set(naming.sizes) - {"f0"}


@pytest.mark.parametrize(("before", "after"), [((6,), (4, 6)), ((4, 6), (4, 5)), ((0,), (2,))])
def test_a_view_that_changes_the_number_of_elements_is_refused(before, after):
    with pytest.raises(ShardingError, match="it must keep their number"):
        factorise(before, after, Naming())


def test_heads_of_fused_projections() -> None:
    for shape, heads_split in (((2, 4, 4, 3, 8), True), ((2, 4, 3, 4, 8), False)):
        node = _node("aten.view.default", X, shape, meta=_meta(*shape))
        splits = _splits(rules.signature(node, [_meta(2, 4, 96)]))
        assert any(s.startswith("S(2) -> S(2)") for s in splits) is heads_split


def test_vocabulary_splits_by_a_lowering() -> None:
    node = _node("aten.embedding.default", X, Y, -1, False, False, meta=_meta(2, 4, 8))
    splits = _splits(rules.signature(node, [_meta(10, 8), _meta(2, 4, dtype="int64")]), 4)
    assert "S(0) R -> P(sum) | v [vocabulary_embedding]" in splits


def test_statistics_per_microbatch_are_tagged() -> None:
    channels = _meta(6)
    node = _node("autopar.batch_norm", X, None, None, Y, Z, 0.1, 1e-5,
                 meta=(_meta(8, 6, 4, 4), channels, channels, channels, channels))  # fmt: skip
    splits = _splits(rules.signature(node, [_meta(8, 6, 4, 4), channels, channels]))
    assert "S(0) R R -> S(0) R R R R | n [batch_norm]" in splits
    assert f"S(0) R R -> S(0) V V V V | {MICROBATCH_STATISTICS}" in splits


def test_operator_without_a_rule_has_no_signature() -> None:
    node = _node("mylib.unknown.default", X, meta=_meta(4))
    assert rules.signature(node, [_meta(4)]) is None
    assert "mylib.unknown.default" not in rules.default_registry()


def test_custom_rule_in_string_form() -> None:
    registry = rules.default_registry().copy()
    text = "(b, h, s!, d!), (b, h, t!, d!), (b, h, t!, d!) -> (b, h, s!, d!)"
    registry.register("mylib.attn", text)
    node = _node("mylib.attn.default", X, Y, Z, meta=_meta(2, 4, 8, 16))
    assert _splits(registry.signature(node, [_meta(2, 4, 8, 16)] * 3)) == [
        "R R R -> R",
        "S(0) S(0) S(0) -> S(0) | b",
        "S(1) S(1) S(1) -> S(1) | h",
    ]
    assert "mylib.attn" in registry
    assert "mylib.attn" not in rules.default_registry()


def test_custom_rule_with_merged_dims_and_sums() -> None:
    registry = Registry()
    registry.register("mylib.project", "(b*s, k+), (k+, n) -> (b, s, n)", linear=[(0,), (1,)])
    node = _node("mylib.project", X, Y, meta=_meta(2, 4, 6))
    assert _splits(registry.signature(node, [_meta(8, 10), _meta(10, 6)])) == [
        "R R -> R",
        "S(1) S(0) -> P(sum) | k",
        "R S(1) -> S(2) | n",
        "S(0) R -> S(0) | b",
        "P(sum) R -> P(sum)",
        "R P(sum) -> P(sum)",
    ]


def test_rule_function_as_a_decorator() -> None:
    registry = Registry()

    @registry.rule("mylib.twice")
    def _(call: OpCall) -> OpSignature:
        naming = Naming()
        dims = naming.dims(call.shape(0))
        return naming.build([dims], [dims], linear=call.linear_positions((0,)))

    node = _node("mylib.twice", X, meta=_meta(4))
    assert _splits(registry.signature(node, [_meta(4)])) == [
        "R -> R",
        "S(0) -> S(0) | d0",
        "P(sum) -> P(sum)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(a)", "has no '->'"),
        ("(a) ->", "no result follows"),
        ("(a) -> (a) x", "'x' stands outside of parentheses"),
        ("(a b) -> (a)", "'a b' is no factor"),
        ("(a) -> (a, b+)", "'b' is summed but no operand has it"),
        ("(a, b+) -> (a, b)", "'b' is marked '\\+' but every result has it"),
        ("(a, b) -> (a)", "'b' is missing in a result; mark it '\\+' \\(summed\\) or '!'"),
        ("(a, b+) -> (a!, b!)", "marked both"),
    ],
)
def test_malformed_rule(text: str, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        template(text)


def test_rule_that_does_not_fit_the_call() -> None:
    registry = Registry()
    registry.register("mylib.f", "(a, b), (b, a) -> (a, b)")
    node = _node("mylib.f", X, Y, meta=_meta(2, 4))
    with pytest.raises(ShardingError, match=r"'b' has 4 elements here and 5|elsewhere"):
        registry.signature(node, [_meta(2, 4), _meta(5, 2)])
    with pytest.raises(ShardingError, match="names 2 operands, the call has 1"):
        registry.signature(_node("mylib.f", X, meta=_meta(2, 4)), [_meta(2, 4)])
    with pytest.raises(ShardingError, match="gives 2 dims to a tensor of shape"):
        registry.signature(node, [_meta(2, 4), _meta(4, 2, 1)])


def test_memo_holds_one_signature_per_distinct_call() -> None:
    memo: dict[OpCall, OpSignature | None] = {}
    metas = [_meta(4, 8), _meta(8, 6)]
    first = rules.signature(MM, metas, memo=memo)
    renamed = Node("other", MM.op, (Ref("a"), Ref("b")), MM.meta)
    assert rules.signature(renamed, metas, memo=memo) is first
    assert len(memo) == 1
