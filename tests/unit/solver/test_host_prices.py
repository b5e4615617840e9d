"""What a plan costs beside its programs, where the prices know it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from autopar.ir.graph import Graph
from autopar.plan.types import Plan
from autopar.solver.force import ProportionalCostModel, forced_plan
from tests.joint_graphs import residual_network

ROWS, WIDTH, HIDDEN, ITEM = 8, 8, 16, 4
EACH_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class WithHost(ProportionalCostModel):
    """Prices around programs: nothing, but for what a test sets; it notes what it is asked."""

    sum_s: float = 0.0
    wait_s: float = 0.0
    share: float = 0.0
    sums: set[tuple[int, float]] = field(default_factory=set)
    waits: list[tuple[int, int]] = field(default_factory=list)

    def in_bursts(self):
        return self

    def optimizer_time_s(self, name, num_tensors, num_bytes):
        return None

    def accumulate_time_s(self, num_tensors, num_bytes):
        self.sums.add((num_tensors, num_bytes))
        return self.sum_s

    def waiting_s(self, num_ranks, num_waits, compute_s):
        self.waits.append((num_ranks, num_waits))
        return num_waits * self.wait_s + self.share * compute_s

    def call_time_s(self, num_parameters):
        return 0.0

    def shared_step_s(self, makespan_s, busy_s, comm_s):
        return makespan_s


def forced(graph: Graph, model: ProportionalCostModel | None = None, **degrees: object) -> Plan:
    return forced_plan(graph, "hash", cost_model=model or WithHost(), **degrees)  # type: ignore[arg-type]


def network() -> Graph:
    return residual_network(2, rows=ROWS, width=WIDTH, hidden=HIDDEN)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_of_all_micro_batches_but_the_first_are_added(count):
    plain = forced(network(), num_microbatches=count)
    model = WithHost(sum_s=EACH_S)
    plan = forced(network(), model, num_microbatches=count)
    assert plan.time_s - plain.time_s == pytest.approx((count - 1) * EACH_S)
    elements = 2 * WIDTH * WIDTH + 4 * WIDTH * HIDDEN
    assert model.sums == {(6, elements * ITEM)}


@pytest.mark.parametrize("zero", [1, 2])
def test_what_is_added_is_what_a_rank_keeps(zero):
    model = WithHost()
    forced(network(), model, dp=2, num_microbatches=2, zero=zero)
    elements = 2 * WIDTH * WIDTH + 4 * WIDTH * HIDDEN
    # from the second level on gradients are reduced before they are added
    assert model.sums == {(6, elements * ITEM / (2 if zero >= 2 else 1))}


def test_a_rank_meets_its_group_once_for_all_gradients_and_computes_meanwhile():
    model = WithHost(wait_s=EACH_S)
    plain = forced(network(), dp=4)
    plan = forced(network(), model, dp=4)
    assert set(model.waits) == {(4, 1)}
    assert plan.time_s - plain.time_s == pytest.approx(EACH_S)
    slower = forced(network(), WithHost(share=0.5), dp=4)
    stage = plan.stages[0].time
    assert slower.time_s - plain.time_s == pytest.approx(
        0.5 * (stage.forward_s + stage.backward_s - stage.forward_comm_s - stage.backward_comm_s)
    )


def test_a_rank_meets_its_group_at_each_collective_and_its_neighbour_at_each_message():
    model = WithHost(wait_s=EACH_S)
    plan = forced(network(), model, tp=2, num_microbatches=2)
    inside = [c for c in plan.stages[0].collectives if c.where != "once per step"]
    once = [c for c in plan.stages[0].collectives if c.where == "once per step"]
    assert inside
    assert set(model.waits) == {(2, sum(c.count for c in inside) + bool(once))}
    model = WithHost(wait_s=EACH_S)
    plain = forced(network(), pp=2, num_microbatches=4)
    plan = forced(network(), model, pp=2, num_microbatches=4)
    assert set(model.waits) == {(2, 8)}
    assert plan.time_s - plain.time_s == pytest.approx(8 * EACH_S)


def test_one_device_waits_for_nobody():
    model = WithHost(wait_s=EACH_S)
    forced(network(), model, num_microbatches=2)
    assert model.waits == []
