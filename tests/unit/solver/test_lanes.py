"""Work beside a search: the same answers wherever it is done, and nothing stays behind."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from autopar.cluster import parse_devices
from autopar.plan.io import plan_hash
from autopar.plan.types import Plan
from autopar.solver.analysis import Analysis
from autopar.solver.block_costs import BlockTables
from autopar.solver.bodies import Bodies
from autopar.solver.constraints import Constraints
from autopar.solver.lanes import NOW, SURE, Lanes, usable_cores
from autopar.solver.recompute_blocks import BlockLocalizer
from autopar.solver.search import solve
from autopar.solver.search_stats import SearchStats
from autopar.solver.work import Work
from cost_models.analytic import AnalyticCostModel
from tests.joint_graphs import residual_network

NETWORK = residual_network(4, rows=64, width=256, hidden=1024)
CLUSTER = parse_devices("2x2:h100-sxm")
MODEL = AnalyticCostModel(CLUSTER)


class Gate:
    """Work that waits until it is let go, and says on which threads it ran."""

    def __init__(self) -> None:
        self.is_at_it, self.may_go, self.threads = threading.Event(), threading.Event(), set()

    def work(self) -> str:
        self.threads.add(threading.current_thread())
        self.is_at_it.set()
        assert self.may_go.wait(10)
        return "done"


def where() -> threading.Thread:
    return threading.current_thread()


def failing() -> None:
    raise KeyError("why")


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_results_come_in_the_order_that_they_were_asked_for(num_threads: int) -> None:
    lanes = Lanes(num_threads)
    works = [partial(pow, n, 2) for n in range(40)]
    with lanes.open():
        later = [lanes.ahead(work) for work in works]
        assert lanes.together(works) == [n * n for n in range(40)]
        assert [one.result() for one in reversed(later)] == [n * n for n in reversed(range(40))]
    assert lanes.together(works) == [n * n for n in range(40)]


def test_on_one_core_and_outside_of_a_search_all_is_done_in_place_when_asked_for() -> None:
    closed = Lanes(1).ahead(where)
    assert not closed.is_begun
    alone = Lanes(0)
    with alone.open():
        assert alone.ahead(where).result() is threading.current_thread()
    assert closed.result() is threading.current_thread()
    assert closed.is_done


def test_what_no_thread_has_begun_is_done_by_the_one_that_asks() -> None:
    lanes, gate = Lanes(1), Gate()
    with lanes.open():
        held = lanes.ahead(gate.work)
        assert gate.is_at_it.wait(10)
        assert held.is_begun
        assert not held.is_done
        assert lanes.ahead(where).result() is threading.current_thread()
        assert lanes.together([where, where]) == [threading.current_thread()] * 2
        gate.may_go.set()
        assert held.result() == "done"
    assert gate.threads != {threading.current_thread()}


def test_what_was_not_begun_when_a_search_ends_is_done_if_it_is_asked_for_later() -> None:
    lanes, gate = Lanes(1), Gate()
    before = threading.active_count()
    with lanes.open():
        lanes.ahead(gate.work)
        assert gate.is_at_it.wait(10)
        left, dropped = lanes.ahead(where), lanes.ahead(where)
        dropped.drop()
        gate.may_go.set()
        left.drop()
    assert threading.active_count() == before
    assert left.result() is dropped.result() is threading.current_thread()


def test_what_is_asked_for_now_is_begun_before_what_may_be() -> None:
    lanes, gate, begun = Lanes(1), Gate(), list[str]()
    with lanes.open():
        lanes.ahead(gate.work)
        assert gate.is_at_it.wait(10)
        names = {"maybe": 2.0, "likely": 1.0, "sure": SURE, "sure too": SURE, "now": NOW}
        later = [lanes.ahead(partial(begun.append, name), at) for name, at in names.items()]
        left = lanes.ahead(partial(begun.append, "left"), 1.5)
        left.drop()
        gate.may_go.set()
        while not all(one.is_done for one in later):
            time.sleep(0.001)
    assert begun == ["now", "sure", "sure too", "likely", "maybe"]


@pytest.mark.parametrize("num_threads", [0, 1])
def test_an_error_reaches_the_one_that_asks(num_threads: int) -> None:
    lanes = Lanes(num_threads)
    with lanes.open():
        wrong = lanes.ahead(failing)
        assert lanes.ahead(where).result()
        for _ in range(2):
            with pytest.raises(KeyError, match="why"):
                wrong.result()


def test_threads_end_with_the_outermost_search_and_when_it_is_broken_off() -> None:
    lanes, before = Lanes(2), threading.active_count()

    def interrupted() -> None:
        with lanes.open():
            with lanes.open():
                lanes.together([where] * 4)
            assert lanes.is_open
            assert threading.active_count() > before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not lanes.is_open
    assert threading.active_count() == before


def test_there_is_a_thread_for_every_core_but_one() -> None:
    assert Lanes().num_threads == min(3, usable_cores() - 1)


def planned(num_threads: int, limit: int | None = None) -> tuple[Plan, SearchStats]:
    wish = Constraints()
    analysis = Analysis(NETWORK, CLUSTER, MODEL, wish, "adamw")
    lanes, localizer = Lanes(num_threads), BlockLocalizer(analysis)
    bodies = Bodies(analysis, localizer.spares, lanes)
    work = Work(bodies, BlockTables(analysis, localizer, lanes), lanes, localizer)
    analysis.shared["bodies and menus"] = work
    assert Work.of(analysis) is work
    return solve(
        NETWORK, "hash", CLUSTER, constraints=wish, optimizer="adamw", memory_limit_bytes=limit,
        cost_model=MODEL, analysis=analysis,
    )  # fmt: skip


@pytest.mark.parametrize("limit", [None, 24 << 20])
def test_a_plan_does_not_depend_on_the_number_of_cores(limit: int | None) -> None:
    before = threading.active_count()
    (alone, stats), (plan, others) = planned(0, limit), planned(2, limit)
    assert plan_hash(plan) == plan_hash(alone)
    figures = [(p.bound_s, p.gap, p.model_gap) for p in (alone, plan)]
    assert figures[0] == figures[1]
    stats.seconds = others.seconds
    assert others == stats
    assert threading.active_count() == before


def test_long_work_is_told_that_nobody_waits_for_it_any_more() -> None:
    lanes, begun, told = Lanes(num_threads=1), threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        for _ in range(30_000):
            if lanes.is_closing:
                told.set()
                return
            time.sleep(0.001)

    def broken_off() -> None:
        with lanes.open():
            lanes.ahead(long, NOW)
            assert begun.wait(10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert told.is_set()
    assert not lanes.is_closing, "the next search goes on"
