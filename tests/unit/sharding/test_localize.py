from __future__ import annotations

from collections import Counter

import pytest

from autopar.errors import ShardingError
from autopar.ir.graph import Graph, InputKind, OutputKind, TensorMeta
from autopar.sharding.build import KeptBodies, localize, signatures_of
from autopar.sharding.decisions import Choice, Decisions
from autopar.sharding.parameters import storage_layout
from autopar.sharding.placement import P, R, Shard
from autopar.sharding.programs import LocalPrograms
from autopar.sharding.propagate import split_data_axes
from autopar.sharding.signature import axis_strategies
from autopar.sharding.stages import assign_stages, stage_demands
from tests.graphs import mlp


def _programs(graph: Graph, **decisions: object) -> LocalPrograms:
    return localize(graph, Decisions(**decisions), signatures_of(graph))  # type: ignore[arg-type]


def _split(graph: Graph, factors: dict[str, str], size: int) -> dict[str, Choice]:
    """The strategy of each operator that splits the named factor."""
    signatures = signatures_of(graph)
    found: dict[str, Choice] = {}
    for name, factor in factors.items():
        signature = signatures[name]
        assert signature is not None
        found[name] = next(s for s in axis_strategies(signature, size) if s.factor == factor)
    return found


def _column_row(graph: Graph) -> dict[str, Choice]:
    choices = _split(
        graph,
        {"up0": "n", "down0": "k", "gw0b": "m", "gact0": "n", "gw0a": "n"},
        2,
    )
    for name in ("act0", "gup0", "act0_t", "w0b_t"):
        signature = signatures_of(graph)[name]
        assert signature is not None
        wanted = {"act0": 1, "gup0": 1, "act0_t": 1, "w0b_t": 0}[name]
        choices[name] = next(
            s for s in axis_strategies(signature, 2) if s.inputs and s.inputs[0] == Shard(wanted)
        )
    choices["w0a"], choices["w0b"] = Shard(1), Shard(0)
    return choices


def _comms(graph: Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes if n.op.startswith("comm."))


def test_column_then_row_needs_one_all_reduce_forward() -> None:
    graph = mlp()
    programs = _programs(graph, axis_sizes=(1, 1, 2), choices={"tp": _column_row(graph)})
    assert _comms(programs.stages[0].forward) == {"comm.all_reduce": 1}
    assert _comms(programs.stages[0].backward) == {}
    assert programs.params["w0a"].compute == (R, R, Shard(1))


def test_a_stage_reads_only_its_own_parameters_and_sends_one_value() -> None:
    graph = mlp(layers=2)
    data = split_data_axes(graph, signatures_of(graph), num_microbatches=2, dp=1)
    programs = _programs(graph, axis_sizes=(2, 1, 1), choices=data.choices, firsts=("up1",))
    assert programs.forward_edges == {(0, 1): ("down0",)}
    assert programs.backward_edges == {(1, 0): ("gx1",)}
    assert programs.edge_metas["down0"] == TensorMeta((4, 4), "float64")
    owners = {name: spec.owner for name, spec in programs.params.items()}
    assert owners == {"w0a": 0, "w0b": 0, "w1a": 1, "w1b": 1}
    assert [i.target for i in programs.stages[1].forward.of_kind(InputKind.RECV)] == ["down0"]


def test_gradients_are_reduced_once_per_step_and_not_in_backward() -> None:
    graph = mlp()
    data = split_data_axes(graph, signatures_of(graph), num_microbatches=2, dp=2)
    programs = _programs(graph, axis_sizes=(2, 2, 1), choices=data.choices)
    stage = programs.stages[0]
    assert _comms(stage.backward) == {}
    assert _comms(stage.reduce) == {"comm.all_reduce": 1}  # in a bucket
    assert programs.grads[0, "w0a"].layout == (P, P, R)


def test_zero_scatters_gradients_and_gathers_parameters() -> None:
    graph = mlp()
    data = split_data_axes(graph, signatures_of(graph), num_microbatches=1, dp=2)
    programs = _programs(graph, axis_sizes=(1, 2, 1), choices=data.choices, zero_levels=(3,))
    assert _comms(programs.stages[0].reduce) == {"comm.reduce_scatter": 1}
    assert _comms(programs.stages[0].unshard) == {"comm.all_gather": 1}


def test_recomputed_values_are_not_saved_and_made_right_before_use() -> None:
    graph = mlp()
    kept = _programs(graph)
    again = _programs(graph, recompute=frozenset({"act0"}))
    assert kept.saved[0] == ("act0",)
    assert again.saved[0] == ("up0",)
    names = [n.op for n in again.stages[0].backward.nodes]
    assert names.index("aten.relu.default") == names.index("aten.permute.default") - 1


def test_outputs_nobody_asked_for_are_not_computed() -> None:
    graph = mlp()
    extra = Graph(
        graph.inputs,
        graph.nodes,
        (
            *graph.outputs,
            type(graph.outputs[0])(OutputKind.OUTPUT, "logits", graph.outputs[0].value),
        ),
    )
    assert not list(_programs(extra).stages[0].forward.outputs_of(OutputKind.OUTPUT))
    asked = _programs(extra, gather_outputs=frozenset({"logits"}))
    assert [r.target for r in asked.results] == ["loss", "logits"]


def test_backward_runs_where_its_forward_twin_does() -> None:
    graph = mlp(layers=3)
    stages = assign_stages(graph, ("up1", "up2"))
    assert [stages.stage[f"gw{i}a"] for i in range(3)] == [0, 1, 2]
    demands = stage_demands(graph, stages, frozenset())
    assert demands[2].exports == {"gx2"}


def test_stage_boundaries_out_of_order_are_refused() -> None:
    with pytest.raises(ShardingError, match="not in execution order"):
        assign_stages(mlp(layers=3), ("up2", "up1"))


def test_zero_takes_the_largest_dim_that_divides_and_tp_does_not_shard() -> None:
    meta = TensorMeta((6, 8), "float32")
    assert storage_layout(meta, (R, R, R), 4, 3) == (R, Shard(1), R)
    assert storage_layout(meta, (R, R, Shard(1)), 2, 1) == (R, Shard(0), Shard(1))
    assert storage_layout(meta, (R, R, R), 4, 0) == (R, R, R)


def test_a_parameter_smaller_than_dp_stays_whole() -> None:
    assert storage_layout(TensorMeta((2,), "float32"), (R, R, R), 4, 3) == (R, R, R)
    # five rows over four ranks would leave one rank empty
    assert storage_layout(TensorMeta((5,), "float32"), (R, R, R), 4, 3) == (R, R, R)


def test_kept_local_operators_give_the_programs_that_new_ones_give():
    graph = mlp()
    signatures = signatures_of(graph)
    names = [n.name for n in graph.nodes if n.name.startswith(("up", "act"))]
    tp = {"tp": _column_row(graph)}
    rows = [
        Decisions(axis_sizes=(1, 1, 1), recompute=frozenset(names[:1])),
        Decisions(axis_sizes=(1, 1, 1), recompute=frozenset(names)),
        Decisions(axis_sizes=(1, 1, 2), choices=tp, recompute=frozenset(names)),
        Decisions(axis_sizes=(1, 1, 2), choices=tp),
    ]
    kept = KeptBodies()
    made = [localize(graph, row, signatures, kept) for row in rows]
    assert made == [localize(graph, row, signatures) for row in rows]
    assert len({repr(programs.stages) for programs in made}) > 2
