"""A step drawn from a plan ends when the printed step does, with a name for every second."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from autopar.plan.types import Plan, ScheduleKind
from autopar.solver.force import ProportionalCostModel, forced_plan
from cost_models.plan_simulation import plan_memory, simulate_plan
from cost_models.trace import trace_events
from cost_models.whole_step import HOST, SYNC, whole_step
from tests.joint_graphs import residual_network

WAIT_S, CALL_S = 2e-3, 5e-3


@dataclass(frozen=True, kw_only=True)
class OnSharedCores(ProportionalCostModel):
    """Half as many cores as ranks, and a cost of waits and calls."""

    def in_bursts(self):
        return self

    def optimizer_time_s(self, name, num_tensors, num_bytes):
        return None

    def accumulate_time_s(self, num_tensors, num_bytes):
        return 0.0

    def waiting_s(self, num_ranks, num_waits, compute_s):
        return num_waits * WAIT_S

    def call_time_s(self, num_parameters):
        return CALL_S

    def shared_step_s(self, makespan_s, busy_s, comm_s):
        return 2 * makespan_s


def forced(model: ProportionalCostModel | None = None, **degrees: object) -> Plan:
    graph = residual_network(4, rows=64, width=64, hidden=256)
    return forced_plan(graph, "hash", cost_model=model or ProportionalCostModel(), **degrees)  # type: ignore[arg-type]


def ends_s(plan: Plan) -> tuple[float, float]:
    """When the trace of a plan ends; seconds of its rank 0 that have an event."""
    step = whole_step(plan)
    events = trace_events(step.simulation, (), remainders=step.remainders)
    found = [(e["pid"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if "dur" in e]
    return max(end for _, _, end in found), sum(b - a for pid, a, b in found if pid == 0)


@pytest.mark.parametrize("model", [ProportionalCostModel(), OnSharedCores()], ids=["far", "here"])
@pytest.mark.parametrize(
    "degrees",
    [
        {},
        {"dp": 2, "zero": 1, "num_microbatches": 2},
        {"dp": 2, "tp": 2},
        {"pp": 2, "num_microbatches": 4, "schedule": ScheduleKind.GPIPE},
        {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": ScheduleKind.ONE_F_ONE_B, "zero": 3},
        {"pp": 2, "num_microbatches": 4, "schedule": ScheduleKind.ZERO_BUBBLE},
        {"pp": 2, "virtual": 2, "num_microbatches": 4, "schedule": ScheduleKind.INTERLEAVED},
        {"pp": 2, "virtual": 2, "num_microbatches": 4, "schedule": ScheduleKind.ZBV},
    ],
    ids=str,
)
def test_the_trace_ends_with_the_printed_step(degrees, model):
    plan = forced(model, **degrees)
    end_s, _ = ends_s(plan)
    assert end_s == pytest.approx(plan.time_s, rel=1e-9)
    step = whole_step(plan)
    assert step.simulation.makespan_s == plan.time_s
    raw_s = simulate_plan(plan).makespan_s
    assert raw_s <= plan.time_s * (1 + 1e-9)
    # what is last comes after the remainders, and those after every pass
    begins = {r.rank: r.start_s for r in step.remainders}
    stops = {r.rank: r.end_s for r in step.remainders}
    for span in step.simulation.spans:
        if span.rank in begins:
            is_last = span.action.kind == "OPTIMIZER"
            slack_s = 1e-9 * plan.time_s
            assert (
                span.start_s >= stops[span.rank] - slack_s
                if is_last
                else (span.end_s <= begins[span.rank] + slack_s)
            )


def test_seconds_outside_of_the_programs_have_a_name():
    far, here = forced(dp=4), forced(OnSharedCores(), dp=4)
    known = {r.words: r.end_s - r.start_s for r in whole_step(here).remainders}
    assert set(known) <= {HOST, SYNC}
    # the passes once more, one meeting for all gradients, a call
    passes_s = max(s.end_s for s in simulate_plan(far).spans if s.action.kind != "OPTIMIZER")
    assert known[HOST] == pytest.approx(passes_s + WAIT_S + CALL_S)
    assert HOST not in {r.words for r in whole_step(far).remainders}
    # on one rank nothing is without an event
    alone = forced(OnSharedCores())
    assert ends_s(alone) == pytest.approx((alone.time_s, alone.time_s))


def test_passes_that_are_longer_than_the_step_are_drawn_shorter():
    plan = forced(pp=2, num_microbatches=4)
    raw = simulate_plan(plan)
    tight = replace(plan, time_s=0.9 * raw.makespan_s)
    end_s, _ = ends_s(tight)
    assert end_s == pytest.approx(tight.time_s)
    assert plan_memory(tight, whole_step(tight).simulation)
    assert min(s.duration_s for s in whole_step(tight).simulation.spans) >= 0


def test_a_plan_without_a_time_is_left_as_it_is_simulated():
    plan = replace(forced(pp=2, num_microbatches=4), time_s=0.0)
    assert whole_step(plan).simulation == simulate_plan(plan)
    assert whole_step(plan).remainders == ()
