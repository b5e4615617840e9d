"""Cut positions, blocks and classes."""

from __future__ import annotations

from autopar.ir.graph import OutputKind
from autopar.solver.blocks import find_blocks, module_start
from tests.graphs import GraphBuilder
from tests.joint_graphs import residual_network


def test_a_residual_network_is_cut_where_only_the_residual_is_alive():
    chain = find_blocks(residual_network(3))
    assert [b.forward for b in chain.blocks] == [
        ("h0",),
        ("a0", "r0", "b0", "h1"),
        ("a1", "r1", "b1", "h2"),
        ("a2", "r2", "b2", "h3"),
        ("z", "square", "loss"),
    ]
    assert chain.forward_cuts == (("h0",), ("h1",), ("h2",), ("h3",))


def test_backward_operators_follow_their_twins_and_sums_follow_dataflow():
    chain = find_blocks(residual_network(2))
    assert {"d_up1", "d_down1", "d_through1", "d_sum1"} <= set(chain.blocks[2].backward)
    assert chain.backward_cuts == (("d_sum0",), ("d_sum1",), ("d_h",))


def test_repeated_layers_are_one_class_and_decided_together():
    chain = find_blocks(residual_network(4))
    assert [len(members) for members in chain.classes.values()] == [1, 4, 1]
    assert chain.node_class["a0"] == chain.node_class["a3"]
    assert chain.node_class["layers__0__up"] == chain.node_class["layers__3__up"]
    assert chain.node_class["a0"] != chain.node_class["b0"]


def test_layers_of_other_sizes_are_another_class():
    narrow = find_blocks(residual_network(1, hidden=16))
    wide = find_blocks(residual_network(1, hidden=24))
    assert narrow.blocks[1].key != wide.blocks[1].key


def test_a_tied_weight_belongs_to_no_repeated_structure():
    chain = find_blocks(residual_network(2, is_tied=True))
    assert chain.node_class["embed__weight"] == ("input embed__weight", 0)


def test_every_operator_is_in_exactly_one_block():
    graph = residual_network(3)
    chain = find_blocks(graph)
    names = [n for b in chain.blocks for n in (*b.forward, *b.backward)]
    assert sorted(names) == sorted(n.name for n in graph.nodes)


def test_a_forced_cut_is_kept_whatever_is_alive_there():
    chain = find_blocks(residual_network(2), forced=("b0",))
    assert "b0" in [b.forward[0] for b in chain.blocks]
    assert {"h0", "r0"} in [set(cut) for cut in chain.forward_cuts]


def test_module_start_is_the_first_operator_inside_the_module():
    graph = residual_network(2)
    assert module_start(graph, "layers.1") == "a1"
    assert module_start(graph, "layers.1.down") == "b1"
    assert module_start(graph, "layers.9") is None


def test_weights_that_are_made_of_parameters_leave_the_cuts_where_they_were() -> None:
    def network(*, made: bool) -> list[str]:
        b = GraphBuilder()
        x = b.input("x", (8, 4))
        for layer in range(3):
            w = b.param(f"w{layer}", (4, 4))
            if made:  # a norm of 4 numbers is much less than any activation
                norm = b.op(f"n{layer}", "aten.sum.dim_IntList", (w, (1,), True), (4, 1))
                w = b.op(f"v{layer}", "aten.div.Tensor", (w, norm), (4, 4))
            y = b.op(f"y{layer}", "aten.mm.default", (x, w), (8, 4), scope=f"layers.{layer}")
            r = b.op(f"r{layer}", "aten.relu.default", (y,), (8, 4), scope=f"layers.{layer}")
            x = b.op(f"x{layer}", "aten.add.Tensor", (x, r), (8, 4))
        b.output(
            OutputKind.LOSS, "loss", b.op("loss", "aten.sum.dim_IntList", (x, (0, 1), False), ())
        )
        return [block.forward[-1] for block in find_blocks(b.build()).blocks[:-1]]

    assert network(made=True) == network(made=False)
    assert len(network(made=True)) >= 2


def decoder_beside(memory_rows: int, layers: int = 24) -> list[tuple[str, ...]]:
    """What crosses from block to block in a chain whose layers all read one value.

    Args:
        memory_rows: Rows of the value; the chain has 8.
        layers: Of two matrix products each.
    """
    b = GraphBuilder()
    x = b.op("h", "aten.mm.default", (b.input("x", (8, 4)), b.param("embed", (4, 4))), (8, 4))
    first = b.op("pool", "aten.mm.default", (b.param("mix", (memory_rows, 8)), x), (memory_rows, 4))
    memory = b.op("memory", "aten.tanh.default", (first,), (memory_rows, 4))
    y = b.op("y", "aten.mm.default", (b.param("start", (8, memory_rows)), memory), (8, 4))
    for i in range(layers):
        scope = f"layers.{i}"
        names = [b.param(f"w{i}", (8, memory_rows)), b.param(f"v{i}", (4, 4))]
        seen = b.op(f"seen{i}", "aten.mm.default", (names[0], memory), (8, 4), scope=scope)
        made = b.op(f"made{i}", "aten.mm.default", (seen, names[1]), (8, 4), scope=scope)
        y = b.op(f"y{i}", "aten.add.Tensor", (y, made), (8, 4), scope=scope)
    last = b.op("last", "aten.mm.default", (y, b.param("head", (4, 4))), (8, 4), scope="head")
    loss = b.op("loss", "aten.sum.dim_IntList", (last, (0, 1), False), (), scope="head")
    b.output(OutputKind.LOSS, "loss", loss)
    chain = find_blocks(b.build())
    return [tuple(sorted(cut)) for cut in chain.forward_cuts]


def test_layers_that_all_read_a_large_value_are_cut_where_little_else_is_alive() -> None:
    cuts = decoder_beside(memory_rows=64)  # what is alive is nine times what a layer hands on
    assert ("memory", "y0") in cuts
    assert ("memory", "y22") in cuts
    assert len(cuts) >= 24
    # a shorter run stays in one piece: its layers are no more than a block may have
    assert len(decoder_beside(memory_rows=64, layers=8)) < 8
