"""Words for parameter splits follow the operand that the product reads, not the stored layout."""

from __future__ import annotations

from autopar.ir.graph import Graph, Input, InputKind, Node, Phase, Ref, TensorMeta
from autopar.report.param_words import _joined, describe_param_splits

BLANK = TensorMeta((8, 8), "float32")


def graph(params, *nodes):
    inputs = [Input("x", InputKind.USER, "x", BLANK)]
    inputs += [Input(name, InputKind.PARAM, f"model.{name}", BLANK, True) for name in params]
    return Graph(tuple(inputs), nodes, ())


def node(name, op, *args, phase=Phase.FORWARD):
    return Node(name, op, args, BLANK, phase=phase)


def words(splits, *nodes, params=("w",), **options):
    return describe_param_splits(graph(params, *nodes), splits, **options)


LINEAR = (  # (out, in), transposed before the product
    node("t", "aten.permute.default", Ref("w"), (1, 0)),
    node("mm", "aten.mm.default", Ref("x"), Ref("t")),
)
CONV1D = (node("mm", "aten.mm.default", Ref("x"), Ref("w")),)  # (in, out), as GPT-2 has it


def test_a_split_of_the_columns_is_column_parallel_whichever_way_the_weight_is_stored():
    splits = {"mm": "R S(1) -> S(1) | n"}
    assert words({**splits, "w": "S(0)"}, *LINEAR) == {"model.w": "column-parallel over tp"}
    assert words({**splits, "w": "S(1)"}, *CONV1D) == {"model.w": "column-parallel over tp"}


def test_a_split_of_the_reduced_dim_is_row_parallel():
    splits = {"mm": "S(1) S(0) -> P(sum) | k"}
    assert words({**splits, "w": "S(1)"}, *LINEAR) == {"model.w": "row-parallel over tp"}
    assert words({**splits, "w": "S(0)"}, *CONV1D) == {"model.w": "row-parallel over tp"}


def test_a_weight_on_the_left_of_the_product_is_column_parallel_in_its_rows():
    product = node("mm", "aten.mm.default", Ref("w"), Ref("x"))
    assert words({"mm": "S(0) R -> S(0) | m", "w": "S(0)"}, product) == {
        "model.w": "column-parallel over tp"
    }


def test_an_embedding_split_by_rows_is_vocabulary_parallel():
    lookup = node("e", "aten.embedding.default", Ref("w"), Ref("x"))
    splits = {"e": "S(0) R -> P(sum) | v [embedding]", "w": "S(0)"}
    assert words(splits, lookup) == {"model.w": "vocabulary-parallel over tp"}


def test_a_tied_weight_has_both_words():
    nodes = (node("e", "aten.embedding.default", Ref("w"), Ref("x")), *LINEAR)
    splits = {"e": "S(0) R -> P(sum) | v [embedding]", "mm": "R S(1) -> S(1) | n", "w": "S(0)"}
    assert words(splits, *nodes) == {"model.w": "vocabulary-parallel and column-parallel over tp"}


def test_the_backward_product_does_not_count_where_there_is_a_forward_one():
    back = node("mm_1", "aten.mm.default", Ref("x"), Ref("w"), phase=Phase.BACKWARD)
    splits = {"mm": "R S(1) -> S(1) | n", "mm_1": "S(1) S(0) -> P(sum) | k", "w": "S(1)"}
    assert words(splits, *CONV1D, back) == {"model.w": "column-parallel over tp"}


def test_a_weight_that_no_operator_splits_is_replicated():
    assert words({}, *LINEAR) == {"model.w": "replicated"}
    assert words({"mm": "S(0) R -> S(0) | m"}, *LINEAR) == {"model.w": "replicated"}


def test_zero_3_is_named_alone_or_beside_the_split():
    splits = {"mm": "R S(1) -> S(1) | n", "w": "S(0)"}
    options = {"zero3_params": {"model.w"}}
    assert words({}, *LINEAR, **options) == {"model.w": "sharded over dp (ZeRO-3)"}
    assert words(splits, *LINEAR, **options) == {"model.w": "column-parallel over tp, dp (ZeRO-3)"}


def test_storage_that_differs_from_use_is_said():
    assert words({"mm": "R S(1) -> S(1) | n"}, *LINEAR) == {
        "model.w": "column-parallel over tp, stored whole"
    }
    assert words({"w": "S(0)"}, *LINEAR) == {
        "model.w": "sharded over tp (dim 0), gathered before use"
    }


def test_convolutions_and_their_transposes():
    plain = node("c", "aten.convolution.default", Ref("x"), Ref("w"), None, (1,), (0,), (1,), False)
    turned = node("c", "aten.convolution.default", Ref("x"), Ref("w"), None, (1,), (0,), (1,), True)
    splits = {"c": "R S(0) -> S(1) | o", "w": "S(0)"}
    assert words(splits, plain) == {"model.w": "column-parallel over tp"}
    assert words(splits, turned) == {"model.w": "row-parallel over tp"}


def test_a_bias_goes_with_its_activations_or_is_added_once():
    add = node("add", "aten.add.Tensor", Ref("x"), Ref("w"))
    assert words({"add": "S(1) S(0) -> S(1)", "w": "S(0)"}, add) == {
        "model.w": "split with its activations (dim 0) over tp"
    }
    assert words({"add": "P(sum) P(sum) -> P(sum)", "w": "R"}, add) == {
        "model.w": "added by one rank over tp, stored whole"
    }


def test_parts_of_a_fused_projection_are_told_together():
    assert _joined(["a over tp", "a over tp"]) == "a over tp"
    assert _joined(["a over tp", "a over tp, stored whole"]) == "a over tp, partly stored whole"
    assert _joined(["a over tp", "replicated"]) == "a over tp; replicated"


EXPERTS = (
    node("t", "aten.permute.default", Ref("w"), (0, 2, 1)),
    node("gm", "autopar.grouped_mm", Ref("x"), Ref("t"), Ref("x"), 1.0),
)


def test_matrices_of_experts_are_split_by_experts_over_tp_or_dp():
    over_tp = {"gm": "E(0) S(0) S(0) -> E(0) [grouped_product]", "w": "S(0)"}
    assert words(over_tp, *EXPERTS) == {"model.w": "split by experts over tp"}
    inner = {"gm": "R S(2) R -> S(1) | n", "w": "S(1)"}
    assert words(inner, *EXPERTS) == {"model.w": "column-parallel over tp"}
    assert words({}, *EXPERTS, expert_params={"model.w"}) == {"model.w": "split by experts over dp"}
    assert words(inner, *EXPERTS, expert_params={"model.w"}) == {
        "model.w": "split by experts over dp, column-parallel over tp"
    }
