"""Explanations: every number told is one that was worked out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.errors import ConfigError, InfeasibleError
from autopar.ir.graph import Graph
from autopar.plan.answers import ParamExplanation, PlanExplanation
from autopar.plan.explain import rank_words
from autopar.plan.time_terms import plan_terms
from autopar.plan.types import Plan, ScheduleKind
from autopar.solver.constraints import Constraints
from autopar.solver.explain import explain_with_model
from autopar.solver.explain_parameters import explain_parameters_with_model
from autopar.solver.force import ProportionalCostModel
from autopar.solver.given import constraints_of
from autopar.solver.question import Asker, Question
from autopar.solver.resimulate import Resimulator
from autopar.solver.search import solve
from autopar.solver.why_not import why_not
from cost_models.analytic import AnalyticCostModel
from cost_models.base import CostModel
from cost_models.what_if import Part, better_cluster
from tests import questions
from tests.joint_graphs import residual_network

pytestmark = pytest.mark.slow  # each asks for several searches

NET = residual_network(3, rows=16, width=128, hidden=512)
GPUS = "4:h100-sxm"


def question(
    graph: Graph = NET, devices: str = GPUS, limit: int | None = None, **given: object
) -> Question:
    return questions.question(graph, devices, limit, **given)


def solved(asked: Question, cluster: Cluster | None = None, **changed: object) -> Plan:
    """The answer of the search itself, nothing shared."""
    cluster = cluster or asked.cluster
    model: CostModel = AnalyticCostModel(cluster)
    limit = changed.pop("limit", asked.limit_bytes)
    assert isinstance(limit, int)
    return solve(
        asked.graph, "hash", cluster,
        constraints=replace(asked.constraints, **changed),  # type: ignore[arg-type]
        optimizer="adamw", memory_limit_bytes=limit, cost_model=model,
    )[0]  # fmt: skip


@pytest.fixture(scope="module")
def asker() -> Asker:
    return Asker(question(dp=2, tp=2, pp=1, zero=1))


@pytest.fixture(scope="module")
def plan(asker: Asker) -> Plan:
    return asker.first()[0]


def test_an_asker_answers_what_the_search_answers(asker: Asker, plan: Plan):
    assert plan == solved(asker.question)
    other = asker.ask("zero", constraints=replace(asker.question.constraints, zero=3))
    assert other == solved(asker.question, zero=3), "a shared analysis changes no answer"


def test_what_is_asked_twice_is_solved_once(asker: Asker, plan: Plan):
    before = asker.num_solves
    first = asker.ask("a", limit_bytes=1 << 30)
    assert asker.ask("b", limit_bytes=1 << 30) is first
    assert asker.num_solves == before + 1


def test_searches_are_limited_by_number():
    spent = Asker(question(dp=1, tp=1, pp=1), max_solves=0)
    assert spent.ask("anything") is None


def test_a_plan_simulated_again_is_itself(asker: Asker, plan: Plan):
    model = asker.prices(asker.question.cluster)
    figures = Resimulator.of(plan, asker.analysis()).figures(asker.question.cluster, model)
    assert figures.step_s == pytest.approx(plan.time_s, rel=1e-12)
    assert figures.peak_bytes == plan.peak_bytes


def test_shadow_prices_are_two_numbers_that_were_worked_out(asker: Asker, plan: Plan):
    told = explain_with_model(asker, plan)
    assert isinstance(told, PlanExplanation)
    by_method = {p.method: p for p in told.prices}
    assert set(by_method) == {"re-solved", "re-simulated"}
    faster = better_cluster(asker.question.cluster, Part.INSIDE, 1.1)
    (link,) = (p for p in told.prices if "links inside a machine" in p.what)
    again = Resimulator.of(plan, asker.analysis())
    assert link.before_s == pytest.approx(plan.time_s)
    assert link.after_s == again.figures(faster, AnalyticCostModel(faster)).step_s
    assert link.after_s < link.before_s
    assert not any("between" in p.what for p in told.prices), "there is one machine"
    assert told.missing == ()


def test_more_memory_is_solved_for():
    free = solved(question(residual_network(4, rows=2048, width=64, hidden=256), "1:cpu"))
    tight = question(
        residual_network(4, rows=2048, width=64, hidden=256), "1:cpu",
        limit=int(free.peak_bytes * 0.8), num_microbatches=1,
    )  # fmt: skip
    asker = Asker(tight)
    plan = asker.first()[0]
    assert any(stage.recompute for stage in plan.stages), "memory binds"
    told = explain_with_model(asker, plan)
    (memory,) = (p for p in told.prices if "memory on each device" in p.what)
    assert memory.method == "re-solved"
    assert memory.after_s == solved(tight, limit=tight.limit_bytes + (1 << 30)).time_s
    assert memory.after_s < memory.before_s == plan.time_s
    assert "recomputed" in memory.change


def test_terms_of_simulated_runners_up_add_up(asker: Asker):
    plan = Asker(question(num_microbatches=2)).first()[0]  # two plans come near each other
    simulated = [c for c in plan.runners_up if c.reason.startswith("simulated")]
    estimated = [c for c in plan.runners_up if c.reason.startswith("estimated")]
    assert simulated
    assert estimated
    for candidate in (*simulated, *estimated):
        assert candidate.terms is not None
        assert candidate.terms.total_s == pytest.approx(candidate.time_s)
    own = plan_terms(plan)
    assert own is not None
    assert own.total_s == pytest.approx(plan.time_s)


def test_why_not_slower_says_which_terms_grew(asker: Asker, plan: Plan):
    answer = why_not(asker, plan, Constraints(num_microbatches=4))
    forced = solved(asker.question, num_microbatches=4)
    assert answer.verdict == "slower"
    assert answer.after_s == forced.time_s > plan.time_s
    assert sum(answer.changes.values()) == pytest.approx(forced.time_s - plan.time_s, rel=0.05)
    assert "micro-batches: 1 -> 4" in answer.differences


def test_why_not_as_fast_sets_the_plans_own_constraint_aside(asker: Asker, plan: Plan):
    answer = why_not(asker, plan, Constraints(zero=3))
    assert answer.verdict == "as fast"
    assert answer.reasons[0] == "this sets aside the constraint zero=1"
    assert "ZeRO level: 1 -> 3" in answer.differences


def test_why_not_what_it_is_already(asker: Asker, plan: Plan):
    answer = why_not(asker, plan, Constraints(tp=plan.mesh.tp))
    assert answer.verdict == "it is the plan"
    assert answer.headline.startswith("tp=2: the plan is so already (dp2 x tp2")
    assert answer.differences == ()


def test_why_not_infeasible_has_the_limit_and_both_numbers():
    asked = question(residual_network(4, rows=64, width=256, hidden=1024), "2:cpu")
    plan = solved(asked, tp=1, dp=1, pp=2)
    tight = Asker(replace(asked, limit_bytes=plan.peak_bytes + (1 << 20)))
    answer = why_not(tight, plan, Constraints(dp=2, tp=1, pp=1, zero=0))
    assert answer.verdict == "infeasible"
    assert any("needs" in reason and "has" in reason for reason in answer.reasons)
    assert answer.after_s == 0.0


def test_why_not_refused_says_why_and_what_was_kept(asker: Asker, plan: Plan):
    answer = why_not(asker, plan, Constraints(tp=8))
    assert answer.verdict == "refused"
    assert "the plan's own constraints were kept: dp=2, pp=1, zero=1" in answer.reasons
    assert any("need 16 devices, the cluster has 4" in reason for reason in answer.reasons)


@pytest.mark.parametrize(
    "wished",
    [
        {"virtual": 2, "pp": 2, "dp": 1, "tp": 1, "zero": 0},
        {"schedule": ScheduleKind.GPIPE},
        {"num_microbatches": 2},
        {"recompute": "full"},
        {"sequence_parallel": False},
        {"placements": {"layers.*.up": "R"}},
        {"boundaries": ("layers.2",), "pp": 2, "dp": 2, "tp": 1},
    ],
    ids=lambda wished: next(iter(wished)),
)
def test_every_word_can_be_asked_for(asker: Asker, plan: Plan, wished: dict[str, object]):
    answer = why_not(asker, plan, Constraints(**wished))  # type: ignore[arg-type]
    forced = solved(asker.question, **wished)
    assert answer.after_s == forced.time_s
    assert next(iter(wished)) in answer.asked.replace("stages", "boundaries")


def test_why_not_of_nothing_is_refused(asker: Asker, plan: Plan):
    with pytest.raises(ConfigError, match="asks for nothing"):
        why_not(asker, plan, Constraints())


def test_constraints_are_read_back_from_a_plan():
    given = Constraints(
        dp=2, tp=2, pp=1, zero=1, recompute={"layers.0": "full", "*": "none"},
        placements={"layers.*.up": "S(1)"}, sequence_parallel=False, num_microbatches=2,
        schedule=ScheduleKind.GPIPE,
    )  # fmt: skip
    plan = Asker(replace(question(), constraints=given)).first()[0]
    assert constraints_of(plan.constraints) == given


def test_parameters_are_explained_by_what_the_programs_do(asker: Asker, plan: Plan):
    told = explain_parameters_with_model(asker, plan, "layers.*.down")
    assert isinstance(told, ParamExplanation)
    assert told.parameters == ("layers.0.down", "layers.1.down", "layers.2.down")
    assert told.decided_by == "the solver"
    assert any("S(" in text and "gathered once per step" in text for text in told.gathered)
    gathers = [c for c in told.collectives if (c.kind, c.axis) == ("all_gather", "dp")]
    reduces = [c for c in told.collectives if (c.kind, c.axis) == ("reduce_scatter", "dp")]
    assert [c.count for c in (*gathers, *reduces)] == [1, 1]  # all of them in one bucket
    assert told.collectives_on == ""
    everything = explain_parameters_with_model(asker, plan, "*")
    for total in everything.collectives:
        planned = [
            c for c in plan.stages[0].collectives
            if (c.kind, c.axis, c.where) == (total.kind, total.axis, total.where)
        ]  # fmt: skip
        assert sum(c.count for c in planned) >= total.count
        assert sum(c.payload_bytes for c in planned) >= total.payload_bytes


@pytest.mark.parametrize("virtual", [1, 2])
def test_collectives_of_parameters_are_those_of_one_device_of_a_pipeline(virtual):
    net = residual_network(4, rows=16, width=128, hidden=512)
    pinned = Asker(question(net, dp=2, tp=1, pp=2, virtual=virtual, zero=1, num_microbatches=4))
    plan = pinned.first()[0]
    told = explain_parameters_with_model(pinned, plan, "*")
    kinds = {("all_gather", "dp"), ("reduce_scatter", "dp")}
    expected = []
    for rank in range(2):
        rows = [
            c for s in plan.mesh.stages_of(rank) for c in plan.stages[s].collectives
            if (c.kind, c.axis) in kinds and c.where == "once per step"
        ]  # fmt: skip
        expected.append((sum(c.time_s for c in rows), sum(c.payload_bytes for c in rows)))
    found = [c for c in told.collectives if (c.kind, c.axis) in kinds]
    assert sum(c.time_s for c in found) == pytest.approx(max(expected)[0])
    assert sum(c.payload_bytes for c in found) == max(expected)[1]
    rank = expected.index(max(expected))
    assert told.collectives_on == rank_words(plan, rank)
    title = f"Collectives that they cause in one step on a device of {told.collectives_on}"
    assert any(text.startswith(title) for text, _ in told.sections())


def test_alternatives_are_solved_for():
    free = replace(question(dp=1, tp=4, pp=1), prices=lambda _: ProportionalCostModel())
    asker = Asker(free)
    plan = asker.first()[0]
    now = plan.splits["tp"]["layers__0__down"]
    told = explain_parameters_with_model(asker, plan, "layers.*.down")
    assert any(c.axis == "tp" and c.where == "forward" for c in told.collectives)
    others = {a.placement: a for a in told.alternatives}
    assert set(others) == {"R", "S(0)", "S(1)"} - {now}
    for placement, alternative in others.items():
        assert alternative.delta_s is not None
        assert alternative.delta_s >= -1e-12, "the plan's splits are the best of the mesh"
        assert placement in alternative.text or "replicated" in alternative.text


def test_one_rank_along_tp_has_no_other_splits():
    alone = Asker(question(dp=2, tp=1, pp=1))
    plan = alone.first()[0]
    told = explain_parameters_with_model(alone, plan, "head.weight")
    assert told.alternatives == ()
    assert "why_not(tp=2)" in told.missing[0]
    with pytest.raises(ConfigError, match=r"'heads' matches no parameter; they are such as"):
        explain_parameters_with_model(alone, plan, "heads")


def test_a_decision_of_the_user_is_told_as_such():
    pinned = Asker(question(dp=1, tp=2, pp=1, placements={"layers.*.up": "S(0)"}))
    plan = pinned.first()[0]
    told = explain_parameters_with_model(pinned, plan, "layers.0.up")
    assert told.decided_by == "the user's placements: layers.*.up: S(0)"


def test_a_refusal_is_told_to_those_who_watch():
    lines: list[str] = []
    watched = Asker(question(dp=1, tp=1, pp=1), progress=lines.append)
    answer = watched.ask("tiny", limit_bytes=1 << 10)
    assert isinstance(answer, InfeasibleError)
    assert lines == ["tiny: no plan fits 4:h100-sxm with 1.00 KiB per device"]


@pytest.mark.parametrize(
    ("schedule", "count"),
    [(ScheduleKind.ONE_F_ONE_B, 4), (ScheduleKind.ZERO_BUBBLE, 4), (ScheduleKind.ZBV, 4)],
)
def test_every_schedule_is_simulated_again_as_it_was(schedule: ScheduleKind, count: int):
    piped = Asker(question(pp=2, schedule=schedule, num_microbatches=count))
    plan = piped.first()[0]
    cluster = piped.question.cluster
    figures = Resimulator.of(plan, piped.analysis()).figures(cluster, piped.prices(cluster))
    assert figures.step_s == pytest.approx(plan.time_s, rel=1e-12)
    own = plan_terms(plan)
    assert own is not None
    assert own.total_s == pytest.approx(plan.time_s)
