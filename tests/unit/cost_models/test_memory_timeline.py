from __future__ import annotations

import random

import pytest

from autopar.errors import ConfigError
from autopar.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorMeta
from autopar.plan.actions import Action, ActionKind
from autopar.plan.orders import order_of
from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
from autopar.plan.zero_bubble import zero_bubble_h1_order
from cost_models.lanes import Lane, Segment
from cost_models.liveness import peak_transient_bytes
from cost_models.memory_timeline import (
    ProgramMemory,
    StageMemory,
    memory_timelines,
    order_peak,
    order_timeline,
    program_memory,
)
from cost_models.simulate import StageSeconds, simulate

K = ActionKind
F, B = K.FORWARD, K.BACKWARD


def stepped(rows, stage, segments=None, **options):
    """The timeline of one rank with one stage."""
    seconds = StageSeconds(forward_s=1, backward_s=2, weight_s=1, segments=segments or {})
    simulation = simulate([rows], [seconds])
    return memory_timelines(simulation, [stage], **options)[0]


def totals(timeline):
    return [(p.second, p.total_bytes) for p in timeline.points]


def test_saved_values_live_from_forward_to_backward():
    rows = [Action(0, F, 0), Action(0, F, 1), Action(0, B, 0), Action(0, B, 1)]
    timeline = stepped(rows, StageMemory(params_bytes=100, saved_bytes=10))
    assert [timeline.at(t).total_bytes for t in (0, 0.5, 1, 1.5, 3.9, 4, 5.9, 6)] == [
        110, 110, 120, 120, 120, 110, 110, 100,
    ]  # fmt: skip
    assert timeline.peak_bytes == 120
    assert timeline.peak.where == "stage 0, forward of micro-batch 1"


def test_transients_are_spread_over_the_span_by_the_seconds_of_operators():
    program = ProgramMemory((5, 30, -10), seconds=(1.0, 1.0, 2.0))
    stage = StageMemory(saved_bytes=10, programs={B: program})
    timeline = stepped([Action(0, F, 0), Action(0, B, 0)], stage, every_operator=True)
    assert totals(timeline) == [
        (0, 0), (0, 10), (1, 10), (1, 10), (1, 15), (1.5, 40), (2, 0), (3, 0),
    ]  # fmt: skip
    assert timeline.peak.second == 1.5
    assert timeline.peak.where == "stage 0, backward of micro-batch 0"


def test_the_peak_is_named_by_operator_and_module():
    x = TensorMeta((4, 4), "float32")
    graph = Graph(
        inputs=(Input("x", InputKind.USER, "x", x),),
        nodes=(
            Node("a", "aten.mm.default", (Ref("x"), Ref("x")), x, scope="layers.0"),
            Node("b", "aten.mm.default", (Ref("a"), Ref("a")), x, scope="layers.1"),
        ),
        outputs=(Output(OutputKind.SAVED, "b", Ref("b")),),
    )
    program = program_memory(graph, op_time_s=lambda node: 1.0 if node.name == "a" else 3.0)
    assert program.peak_bytes == peak_transient_bytes(graph) == 64
    assert program.shares() == [0, 0.25]
    stage = StageMemory(saved_bytes=64, programs={F: program})
    timeline = stepped([Action(0, F, 0)], stage)
    assert timeline.peak_bytes == 128
    assert timeline.peak.where == "stage 0, forward of micro-batch 0, at aten.mm of layers.1"
    assert [p.total_bytes for p in timeline.points] == [0, 64, 64, 128, 64]
    assert stage.at_most(3).total_bytes == 3 * 64 + 64


@pytest.mark.parametrize(("unreduced", "most"), [(0, 3 * 64), (20, 2 * 64 + 150 + 20)])
def test_gradients_are_reduced_beside_what_is_alive_then(unreduced: int, most: int):
    """Once, when no micro-batch is left; from ZeRO 2 on after each of the backwards."""
    reduce = {K.REDUCE_GRAD: ProgramMemory((150,))}
    stage = StageMemory(saved_bytes=64, unreduced_bytes=unreduced, programs=reduce)
    rows = [Action(0, F, m) for m in range(3)]
    for m in range(3):
        rows.append(Action(0, B, m))
        rows += [Action(0, K.REDUCE_GRAD, m)] if unreduced else []
    rows += [] if unreduced else [Action(0, K.REDUCE_GRAD)]
    assert order_peak(0, rows, {0: stage}).total_bytes == most
    assert stage.at_most(3).total_bytes == most


def test_gathered_parameters_live_from_unshard_to_reshard():
    rows = [
        Action(0, K.UNSHARD), Action(0, F, 0), Action(0, K.RESHARD),
        Action(0, K.UNSHARD), Action(0, B, 0), Action(0, K.RESHARD),
    ]  # fmt: skip
    gather = [Segment(lane=Lane.INTER, seconds=0.5)]
    timeline = stepped(rows, StageMemory(gathered_bytes=7), {K.UNSHARD: gather})
    assert [timeline.at(t).total_bytes for t in (0, 1, 1.5, 1.6, 3.9, 4)] == [7, 7, 7, 7, 7, 0]
    assert timeline.points[-1].total_bytes == 0
    ahead = [Segment(lane=Lane.INTER, seconds=0.5, overlaps=True)]
    assert stepped(rows, StageMemory(gathered_bytes=7), {K.UNSHARD: ahead}).peak_bytes == 7


def test_gradients_wait_for_their_reduction():
    rows = [Action(0, F, 0), Action(0, B, 0), Action(0, K.REDUCE_GRAD, 0)]
    reduce = {K.REDUCE_GRAD: [Segment(lane=Lane.INTER, seconds=1)]}
    stage = StageMemory(grads_bytes=3, has_lasting_grads=False, unreduced_bytes=20)
    timeline = stepped(rows, stage, reduce)
    assert [timeline.at(t).total_bytes for t in (0, 2.9, 3, 3.9, 4)] == [0, 0, 23, 23, 3]
    assert timeline.at(3.5).where == "stage 0, reduction of gradients of micro-batch 0"
    # beside the next backward two micro-batches' gradients wait
    beside = {K.REDUCE_GRAD: [Segment(lane=Lane.INTER, seconds=3, overlaps=True)]}
    rows = [Action(0, F, 0), Action(0, F, 1), Action(0, B, 0), Action(0, K.REDUCE_GRAD, 0)]
    rows += [Action(0, B, 1), Action(0, K.REDUCE_GRAD, 1)]
    timeline = stepped(rows, StageMemory(unreduced_bytes=20), beside)
    assert [timeline.at(t).total_bytes for t in (3.9, 4, 6, 6.9, 7, 10)] == [0, 20, 40, 40, 20, 0]


def test_a_split_backward_keeps_what_the_weights_need():
    order = zero_bubble_h1_order(1, 1)
    rows = action_lists(order, MeshShape())[0]
    timeline = stepped(rows, StageMemory(saved_bytes=10, weight_saved_bytes=4))
    assert [timeline.at(t).total_bytes for t in (0.5, 1.5, 2.5, 3)] == [10, 10, 4, 0]


def test_offloaded_values_leave_the_device():
    rows = [
        Action(0, F, 0), Action(0, K.OFFLOAD, 0), Action(0, F, 1), Action(0, K.RELOAD, 0),
        Action(0, B, 1), Action(0, B, 0),
    ]  # fmt: skip
    copies = {
        K.OFFLOAD: [Segment(lane=Lane.COPY, seconds=0.5, overlaps=True)],
        K.RELOAD: [Segment(lane=Lane.COPY, seconds=0.5, overlaps=True)],
    }
    timeline = stepped(rows, StageMemory(saved_bytes=10, offloaded_bytes=8), copies)
    seconds = (0.5, 1.2, 1.6, 2.1, 4, 6)
    assert [timeline.at(t).total_bytes for t in seconds] == [10, 20, 12, 20, 10, 0]


def test_stages_of_a_rank_share_its_memory():
    order = compute_order(ScheduleKind.INTERLEAVED, 1, 2, 2)
    edges = [(0, 1)]
    lists = action_lists(order, MeshShape(virtual=2), forward_edges=edges, backward_edges=[(1, 0)])
    simulation = simulate(lists, [StageSeconds(forward_s=1, backward_s=2)] * 2)
    stages = [
        StageMemory(params_bytes=5, saved_bytes=1),
        StageMemory(params_bytes=7, saved_bytes=9),
    ]
    (timeline,) = memory_timelines(simulation, stages)
    assert timeline.peak_bytes == 12 + simulation.peak_saved_bytes(0, [1, 9])
    assert timeline.points[-1].total_bytes == 12


def test_what_the_allocator_reserves_is_more_than_what_is_alive():
    timeline = stepped([Action(0, F, 0)], StageMemory(saved_bytes=100), reserve_factor=1.08)
    assert (timeline.peak_bytes, timeline.reserved_bytes) == (100, 108)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProgramMemory((1, 2), seconds=(1.0,)), r"2 moments but 1 seconds"),
        (
            lambda: stepped([Action(0, F, 0)], StageMemory(), reserve_factor=0.9),
            r"reserve_factor is 0.9, must be at least 1",
        ),
        (
            lambda: memory_timelines(
                simulate([[Action(1, F, 0)]], [StageSeconds()] * 2), [StageMemory()]
            ),
            r"rank 0 runs 1F0, but bytes are given for 1 stages",
        ),
        (lambda: StageMemory(saved_bytes=-1), r"saved_bytes is -1, must be at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("kind", [ScheduleKind.INTERLEAVED, ScheduleKind.ZBV])
def test_the_peak_of_an_order_is_that_of_its_timeline(kind: ScheduleKind):
    placement = StagePlacement.V if kind is ScheduleKind.ZBV else StagePlacement.LOOP
    mesh = MeshShape(pp=3, virtual=2, placement=placement)
    draw = random.Random(7)

    def program() -> ProgramMemory:
        return ProgramMemory(tuple(draw.randrange(-50, 90) for _ in range(5)))

    for _ in range(20):
        held = {
            s: StageMemory(
                params_bytes=draw.randrange(99), gathered_bytes=draw.randrange(99),
                gathers_again=draw.random() < 0.5, grads_bytes=draw.randrange(99),
                has_lasting_grads=draw.random() < 0.5, unreduced_bytes=draw.randrange(2) * 30,
                saved_bytes=draw.randrange(60, 99), weight_saved_bytes=draw.randrange(60),
                programs={k: program() for k in ActionKind if draw.random() < 0.4},
            )
            for s in range(mesh.num_stages)
        }  # fmt: skip
        for rank, row in enumerate(order_of(kind, mesh, 6)):
            actions = [Action(c.stage, c.kind, c.microbatch) for c in row]
            unshards = [Action(s, ActionKind.UNSHARD) for s in mesh.stages_of(rank)]
            reduces = [Action(s, ActionKind.REDUCE_GRAD) for s in mesh.stages_of(rank)]
            lists = [*unshards, *actions, *reduces]
            assert order_peak(rank, lists, held) == order_timeline(rank, lists, held).peak
