from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from autopar.errors import ConfigError
from autopar.plan.actions import ActionKind
from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.types import MemoryParts, MeshShape, ScheduleKind, StagePlan, TimeParts
from cost_models.lanes import Lane, Segment
from cost_models.memory_timeline import ProgramMemory, StageMemory, memory_timelines
from cost_models.plan_simulation import plan_memory, simulate_plan
from cost_models.simulate import StageSeconds, simulate
from cost_models.trace import trace_events, write_trace

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


@pytest.fixture(scope="module")
def simulation():
    order = compute_order(ScheduleKind.ONE_F_ONE_B, 2, 1, 3)
    lists = action_lists(
        order, MeshShape(pp=2), forward_edges=[(0, 1)], backward_edges=[(1, 0)], zero_levels=[2, 2]
    )
    segments = {
        F: [
            Segment(lane=Lane.COMPUTE, seconds=1),
            Segment(lane=Lane.INTRA, seconds=0.5, label="all_reduce"),
        ],
        ActionKind.REDUCE_GRAD: [Segment(lane=Lane.INTER, seconds=1, overlaps=True)],
    }
    return simulate(lists, [StageSeconds(backward_s=2, segments=segments)] * 2, p2p_s=0.25)


def test_every_span_that_takes_time_is_an_event(simulation):
    events = trace_events(simulation)
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == sum(s.duration_s > 0 for s in simulation.spans)
    first = next(e for e in complete if e["name"] == "0F0")
    assert first == {
        "ph": "X", "name": "0F0", "cat": "compute", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1e6,
        "args": {"stage": 0, "action": "forward", "micro-batch": 0},
    }  # fmt: skip
    sent = next(e for e in complete if e["cat"] == "message")
    assert (sent["name"], sent["dur"]) == ("0SEND_F0>1", 0.25e6)
    assert sent["args"] == {"stage": 0, "action": "send_f", "micro-batch": 0, "peer stage": 1}
    reduced = next(e for e in complete if e["cat"] == "inter")
    assert reduced["args"]["overlaps"] is True
    assert any(e["name"] == "1F2 all_reduce" for e in complete)


def test_threads_are_lanes_and_have_names(simulation):
    events = trace_events(simulation, rank_words="machine {}".format)
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"
    }
    assert names["process_name", 1, 0] == "machine 1"
    assert names["thread_name", 0, 0] == "compute"
    assert names["thread_name", 0, 1] == "collectives inside a node"
    assert names["thread_name", 0, 4] == "send 0>1"
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert threads == {(pid, tid) for kind, pid, tid in names if kind == "thread_name"}
    # what is on one thread never overlaps, or it would be drawn nested
    for thread in threads:
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["ph"] == "X" and (e["pid"], e["tid"]) == thread
        )
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))


def test_counters_of_bytes_are_never_negative_and_add_up(simulation):
    transient = ProgramMemory((0, 8, -30))
    stage = StageMemory(params_bytes=100, saved_bytes=40, programs={B: transient})
    memory = memory_timelines(simulation, [stage] * 2)
    counters = [e for e in trace_events(simulation, memory) if e["ph"] == "C"]
    points = [p for timeline in memory for p in timeline.points]
    assert len(counters) == len(points)
    for event, point in zip(counters, points, strict=True):
        assert event["ts"] == point.second * 1e6
        assert sum(event["args"].values()) == point.total_bytes
        assert min(event["args"].values()) >= 0
    assert {e["pid"] for e in counters} == {0, 1}


def test_the_file_is_json_of_the_format(simulation, tmp_path):
    path = tmp_path / "step.json"
    events = trace_events(simulation)
    write_trace(path, events)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["displayTimeUnit"] == "ms"
    assert found["traceEvents"] == events
    with pytest.raises(ConfigError, match=r"trace: .*none/step.json can't be written \(No such"):
        write_trace(tmp_path / "none" / "step.json", events)


def planned(make_plan):
    time = TimeParts(
        forward_s=1.0, backward_s=2.0, forward_comm_s=0.25, backward_comm_s=0.5, p2p_s=0.0,
        reduce_s=0.75, unshard_s=0.0, optimizer_s=0.5,
    )  # fmt: skip
    memory = MemoryParts(
        params_bytes=100, grads_bytes=50, optimizer_bytes=200, activations_bytes=60,
        transient_bytes=9, buffers_bytes=1,
    )  # fmt: skip
    stages = tuple(
        StagePlan(index=s, devices=(s,), first="", num_in_flight=2 - s, time=time, memory=memory)
        for s in range(2)
    )
    return replace(
        make_plan,
        mesh=MeshShape(pp=2),
        num_microbatches=3,
        schedule=ScheduleKind.ONE_F_ONE_B,
        stages=stages,
    )


def test_a_plan_is_simulated_from_its_figures(example_plan):
    plan = planned(example_plan)
    result = simulate_plan(plan)
    # (3 + 1) slots of 1 + 2, then the reduction and the optimizer
    assert result.makespan_s == pytest.approx(12 + 0.75 + 0.5)
    assert result.exposed_s(0) == pytest.approx(3 * 0.75 + 0.75)
    memory = plan_memory(plan, result)
    assert [t.peak_bytes for t in memory] == [s.memory.total_bytes for s in plan.stages]
