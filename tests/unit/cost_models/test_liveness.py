from __future__ import annotations

import pytest

from autopar.ir.graph import (
    Arg,
    Graph,
    Input,
    InputKind,
    Meta,
    Node,
    Output,
    OutputKind,
    Ref,
    TensorMeta,
)
from cost_models.memory import liveness, peak_transient_bytes, saved_bytes, saved_storages
from cost_models.storage import contiguous_strides, storages, view_strides

F32 = "float32"
X = TensorMeta((10, 10), F32)  # 400 bytes


def inp(name: str, kind: InputKind = InputKind.USER, meta: TensorMeta = X) -> Input:
    return Input(name, kind, name, meta)


def node(name: str, op: str, *args: Arg, meta: Meta = X) -> Node:
    return Node(name, op, tuple(Ref(a) if isinstance(a, str) else a for a in args), meta)


def out(name: str, kind: OutputKind = OutputKind.OUTPUT) -> Output:
    return Output(kind, name, Ref(name))


def chain(*outputs: Output, kind: InputKind = InputKind.USER) -> Graph:
    """a = relu(x); b = relu(a); c = a + b; d = relu(c)."""
    return Graph(
        (inp("x", kind),),
        (
            node("a", "aten.relu.default", "x"),
            node("b", "aten.relu.default", "a"),
            node("c", "aten.add.Tensor", "a", "b"),
            node("d", "aten.relu.default", "c"),
        ),
        outputs,
    )


def test_a_chain_by_hand():
    # a: 400; a b: 800; a b c: 1200, then a and b die; c d: 800
    memory = liveness(chain(out("d")))
    assert memory.timeline == (400, 800, 1200, 800)
    assert (memory.peak_bytes, memory.peak_at, memory.end_bytes) == (1200, "c", 400)


def test_saved_values_are_counted_elsewhere():
    # a is saved: 0; b: 400; b c: 800; c d: 800
    graph = chain(out("d"), out("a", OutputKind.SAVED))
    assert liveness(graph).timeline == (0, 400, 800, 800)
    assert saved_bytes(graph) == 400


def test_outputs_of_chosen_kinds_are_counted_elsewhere():
    graph = chain(out("d", OutputKind.SEND))
    assert liveness(graph, held_outputs=[OutputKind.SEND]).timeline == (400, 800, 1200, 400)


def test_an_unused_result_dies_at_once():
    graph = Graph(
        (inp("x"),),
        (node("a", "aten.relu.default", "x"), node("b", "aten.relu.default", "x")),
        (out("b"),),
    )
    assert liveness(graph).timeline == (400, 400)


def test_given_inputs_die_at_their_last_use():
    # x (400) dies after a: a: 400 - 0; then a b: 800 - 400; a b c - x: 800; c d - x: 400
    graph = chain(out("d"), kind=InputKind.SAVED)
    memory = liveness(graph, freed_inputs=[InputKind.SAVED])
    assert memory.timeline == (400, 400, 800, 400)
    assert peak_transient_bytes(graph) == 1200


def test_given_inputs_that_share_memory_die_together():
    graph = Graph(
        (inp("x", InputKind.SAVED), inp("y", InputKind.SAVED)),
        (
            node("a", "aten.relu.default", "x"),
            node("b", "aten.relu.default", "a"),
            node("c", "aten.add.Tensor", "b", "y"),
        ),
        (out("c"),),
    )
    apart = liveness(graph, freed_inputs=[InputKind.SAVED])
    shared = liveness(graph, freed_inputs=[InputKind.SAVED], input_groups={"x": "m", "y": "m"})
    # a; a b - x; b c - x  against  a; a b; b c
    assert apart.timeline == (400, 400, 400)
    assert shared.timeline == (400, 800, 800)
    # at the end c is there, and x and y (or their one memory) are not
    assert (apart.end_bytes, shared.end_bytes) == (400 - 800, 400 - 400)


def test_a_given_input_that_nothing_reads_is_dropped_first():
    graph = Graph(
        (inp("x"), inp("unused", InputKind.SAVED)),
        (node("a", "aten.relu.default", "x"),),
        (out("a"),),
    )
    assert liveness(graph, freed_inputs=[InputKind.SAVED]).timeline == (0,)


def test_views_keep_their_base_and_cost_nothing():
    graph = Graph(
        (inp("x"),),
        (
            node("a", "aten.relu.default", "x"),
            node("v", "aten.view.default", "a", (100,), meta=TensorMeta((100,), F32)),
            node("b", "aten.relu.default", "x"),
            node("s", "aten.sum.default", "v", meta=TensorMeta((), F32)),
        ),
        (out("s"), out("b")),
    )
    assert liveness(graph).timeline == (400, 400, 800, 804)


def test_a_reshape_of_a_permuted_value_copies_and_lets_its_base_go():
    flat = TensorMeta((100,), F32)
    graph = Graph(
        (inp("x"),),
        (
            node("a", "aten.relu.default", "x"),
            node("p", "aten.permute.default", "a", (1, 0)),
            node("v", "aten.view.default", "p", (100,), meta=flat),
            node("b", "aten.relu.default", "v", meta=flat),
        ),
        (out("b"),),
    )
    assert liveness(graph).timeline == (400, 400, 800, 800)
    assert storages(graph).copies == {"v"}


def test_results_of_one_operator_die_apart():
    two = (X, X)
    graph = Graph(
        (inp("x"),),
        (
            node("n", "aten.native_layer_norm.default", "x", meta=two),
            node("y", "getitem", "n", 0),
            node("m", "getitem", "n", 1),
            node("a", "aten.relu.default", "y"),
            node("b", "aten.add.Tensor", "a", "m"),
        ),
        (out("b"),),
    )
    # both; both; both; both a, then y dies; m a b
    assert liveness(graph).timeline == (800, 800, 800, 1200, 1200)


def test_a_saved_parameter_or_view_of_one_is_free_and_shared_storage_counts_once():
    graph = Graph(
        (inp("w", InputKind.PARAM), inp("x", InputKind.RECV)),
        (
            node("t", "aten.permute.default", "w", (1, 0)),
            node("a", "aten.mm.default", "x", "t"),
            node("v", "aten.view.default", "a", (100,), meta=TensorMeta((100,), F32)),
            node("h", "aten.slice.Tensor", "a", 0, 0, 5, meta=TensorMeta((5, 10), F32)),
        ),
        tuple(out(name, OutputKind.SAVED) for name in ("t", "a", "v", "h", "x")),
    )
    # a (with v and the half h of it) and the received x
    assert saved_bytes(graph) == 800
    assert saved_storages(graph) == {
        "t": (), "a": ("a",), "v": ("a",), "h": ("a",), "x": ("x",)
    }  # fmt: skip


def test_allocations_are_rounded_up():
    graph = chain(out("d"), out("a", OutputKind.SAVED))
    assert peak_transient_bytes(graph, granularity_bytes=512) == 1024
    assert saved_bytes(graph, granularity_bytes=512) == 512


def test_collectives_along_an_inner_dim_need_a_copy():
    wide, narrow = TensorMeta((10, 20), F32), TensorMeta((10, 5), F32)
    graph = Graph(
        (inp("x"),),
        (
            Node("g", "comm.all_gather", (Ref("x"), 1, "tp", 20), wide),
            Node("r", "comm.reduce_scatter", (Ref("x"), "sum", 1, "tp"), narrow),
        ),
        (),
    )
    # 800 gathered and 800 to move it; g is unused; 200 and a copy of the operand, 400
    assert liveness(graph).timeline == (1600, 600)


@pytest.mark.parametrize(
    ("shape", "strides", "sizes", "expected"),
    [
        ((2, 3, 4), (12, 4, 1), (6, 4), (4, 1)),
        ((2, 3, 4), (12, 4, 1), (2, 12), (12, 1)),
        ((2, 4, 3), (12, 1, 4), (2, 12), None),  # the last two dims are swapped
        ((2, 4, 3), (12, 1, 4), (2, 2, 2, 3), (12, 2, 1, 4)),
        ((2, 3), (0, 1), (6,), None),  # expanded
        ((1, 4), (0, 1), (4,), (1,)),  # a dim of size 1 does not matter
        ((4,), (1,), (1, 4, 1), (4, 1, 1)),
        ((), (), (1, 1), (1, 1)),
        ((0, 3), (3, 1), (3, 0), (1, 1)),
    ],
)
def test_strides_of_views_by_hand(shape, strides, sizes, expected):
    assert view_strides(shape, strides, sizes) == expected


def test_strides_of_dense_tensors():
    assert contiguous_strides(()) == ()
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)


@pytest.mark.parametrize(
    ("dim", "parts", "rows", "timeline"),
    [
        # an even block of the first dim is a view of a, which stays for it
        (0, 2, 5, (400, 400, 400)),
        # an uneven one is a view on some ranks and a padded copy on others: both are counted
        (0, 3, 4, (400, 560, 560)),
        # a block of another dim is a copy, a goes
        (1, 2, 10, (400, 600, 200)),
    ],
)
def test_a_block_of_the_first_dim_may_be_a_view(dim, parts, rows, timeline):
    block = TensorMeta((rows, 10 if dim == 0 else 5), F32)
    one = TensorMeta((), F32)
    graph = Graph(
        (inp("x"), Input("coord_tp", InputKind.COORD, "tp", None)),
        (
            node("a", "aten.relu.default", "x"),
            Node("s", "local.shard", (Ref("a"), dim, Ref("coord_tp"), parts), block),
            node("l", "aten.sum.default", "s", meta=one),
        ),
        (out("l", OutputKind.SAVED),),
    )
    assert liveness(graph).timeline == timeline
