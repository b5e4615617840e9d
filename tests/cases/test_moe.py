"""Mixtures of experts on simulated ranks: the numbers of one device, and the work divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.capture.reference import run_graph
from autopar.capture.tracing import capture
from autopar.errors import ConstraintError, RowBudgetError, ShardingError
from autopar.ir.graph import Node, TensorMeta
from autopar.ir.promote import promote
from autopar.plan.decisions import decisions_of
from autopar.plan.io import plan_from_json, plan_to_json
from autopar.plan.types import MeshShape, Plan
from autopar.runtime.equivalence import verify_programs
from autopar.runtime.variants import transfer
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.placement import Routed, RoutedForm, Shard
from autopar.sharding.programs import LocalPrograms
from autopar.sharding.propagate import split_data_axes
from autopar.solver.force import forced_plan
from cost_models.undivided import undivided
from tests.equivalence.harness import (
    Problem,
    actions_for,
    fuzz_decisions,
    problem_of,
    simulate,
    worst_difference,
)
from tests.moe_models import (
    PLAIN,
    SORTED,
    TRANSFORMERS,
    build,
    build_plain,
    build_transformer,
    route_all_to,
)

OVER_TP = {"*.experts.gate_up_proj": "S(0)"}
OVER_DP = {"*.experts.gate_up_proj": "S(0)@dp"}
PLANS: Mapping[str, dict[str, object]] = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "mb2": {"num_microbatches": 2},
    "tp2": {"tp": 2},
    "experts over tp2": {"tp": 2, "placements": OVER_TP},
    "dp2 x experts over tp2": {"dp": 2, "tp": 2, "placements": OVER_TP},
    "pp2": {"pp": 2, "num_microbatches": 2},
    "experts over dp2": {"dp": 2, "placements": OVER_DP, "expert_capacity": 1.9},
    "experts over dp4": {"dp": 4, "placements": OVER_DP},
    "experts over dp2 x tp2": {"dp": 2, "tp": 2, "placements": OVER_DP},
    "experts over dp2 x pp2": {
        "dp": 2, "pp": 2, "num_microbatches": 2, "placements": OVER_DP, "recompute": "full",
    },
    "zero3 beside experts over dp2": {"dp": 2, "zero": 3, "placements": OVER_DP},
}  # fmt: skip


@cache
def _problem(name: str) -> Problem:
    return problem_of(*build(name))


def _plan(problem: Problem, **degrees: object) -> Plan:
    plan = forced_plan(problem.graph, "hash", **degrees)  # type: ignore[arg-type]
    return plan_from_json(plan_to_json(plan))  # what runs is what a plan file holds


def _run(problem: Problem, plan: Plan) -> LocalPrograms:
    programs = localize(problem.graph, decisions_of(plan, problem.graph), problem.signatures)
    zero = [stage.zero_level for stage in plan.stages]
    actions = actions_for(programs, plan.mesh, plan.num_microbatches, plan.schedule, zero)
    verify_programs(problem.graph, programs, plan.mesh, actions, problem.values)
    return programs


def _rows(programs: LocalPrograms) -> set[int]:
    """Rows of every grouped product of the forward programs."""
    return {
        node.meta.shape[0]
        for stage in programs.stages
        for node in stage.forward.nodes
        if node.op == "autopar.grouped_mm" and isinstance(node.meta, TensorMeta)
    }


@pytest.mark.parametrize("degrees", PLANS)
def test_mixtral_equals_one_device(degrees: str) -> None:
    problem = _problem("mixtral")
    _run(problem, _plan(problem, **PLANS[degrees]))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", PLANS)
@pytest.mark.parametrize("name", sorted(set(TRANSFORMERS) - {"mixtral"}))
def test_architectures_with_experts_equal_one_device(name: str, degrees: str) -> None:
    problem = _problem(name)
    _run(problem, _plan(problem, **PLANS[degrees]))


@pytest.mark.parametrize("name", [*PLAIN, *TRANSFORMERS])
def test_data_ranks_and_microbatches_divide_all_matmuls(name: str) -> None:
    problem = _problem(name)
    for axis, count, dp in (("dp", 1, 2), ("dp", 1, 4), ("mb", 2, 1)):
        splits = split_data_axes(
            problem.graph, problem.signatures, num_microbatches=count, dp=dp
        ).choices
        found = undivided(problem.graph, splits[axis])
        assert found.total_flops > 0
        assert found.whole_share == 0, str(found)


def test_without_a_split_of_rows_the_same_check_finds_undivided_experts() -> None:
    problem = _problem("mixtral")
    plain = {
        name: replace(s, extra=tuple(e for e in s.extra if not _is_routed(e.outputs)))
        if s is not None
        else None
        for name, s in problem.signatures.items()
    }
    splits = split_data_axes(problem.graph, plain, num_microbatches=1, dp=2).choices["dp"]
    found = undivided(problem.graph, splits)
    assert found.whole_share > 0.2
    assert "grouped_mm" in " ".join(found.whole)


def _is_routed(placements: tuple[object, ...]) -> bool:
    return any(isinstance(p, Routed) for p in placements)


def test_grouped_products_work_on_each_ranks_share_of_the_rows() -> None:
    problem = _problem("mixtral")
    slots = 8 * 6 * 2  # samples x tokens x experts per token
    assert _rows(_run(problem, _plan(problem, dp=2))) == {slots // 2}
    assert _rows(_run(problem, _plan(problem, dp=4))) == {slots // 4}
    over_dp = {"placements": OVER_DP, "expert_capacity": 1.5}
    assert _rows(_programs(problem, _plan(problem, dp=4, **over_dp))) == {slots * 3 // 8}


def _programs(problem: Problem, plan: Plan) -> LocalPrograms:
    return localize(problem.graph, decisions_of(plan, problem.graph), problem.signatures)


@pytest.mark.parametrize("name", sorted(set(PLAIN) - set(SORTED)))
def test_experts_that_compute_all_tokens_equal_one_device(name: str) -> None:
    problem = _problem(name)
    for degrees in ({"dp": 2}, {"dp": 2, "tp": 2}, {"num_microbatches": 2}):
        _run(problem, _plan(problem, **degrees))


# -- uneven routing ------------------------------------------------------------------------------


@cache
def _uneven(how: str) -> Problem:
    experts, k = {"top-1": (4, 1), "all of four": (4, 4), "one expert": (1, 1)}.get(how, (4, 2))
    model, batch = build_plain("SortedByIndexAdd", experts=experts, k=k)
    if how in ("all to one", "top-1"):
        route_all_to(model, 2)
    if how == "one without tokens":
        with torch.no_grad():
            model.gate.weight[1] = -1e3 * model.gate.weight.abs().sum(0)
            model.inner.bias.fill_(5.0)
    return problem_of(model, batch)


UNEVEN = ("all to one", "one without tokens", "top-1", "all of four", "one expert")


@pytest.mark.parametrize("how", UNEVEN)
def test_uneven_routing_equals_one_device_under_every_form(how: str) -> None:
    problem = _uneven(how)
    plans: list[dict[str, object]] = [{"dp": 2}, {"num_microbatches": 2}]
    if how != "one expert":
        plans += [
            {"tp": 2, "placements": {"up": "S(0)"}},
            {"dp": 2, "placements": {"up": "S(0)@dp"}},
            {"dp": 4, "placements": {"up": "S(0)@dp"}, "num_microbatches": 2},
        ]
    for degrees in plans:
        _run(problem, _plan(problem, **degrees))


def test_some_experts_get_no_rows_in_the_uneven_cases() -> None:
    for how, wanted in (("top-1", [0, 0, 48, 0]), ("all of four", [48, 48, 48, 48])):
        assert _counts(_uneven(how)) == wanted
    assert _counts(_uneven("all to one"))[2] == 48
    assert 0 in _counts(_uneven("one without tokens"))


def _counts(problem: Problem) -> list[int]:
    seen: list[list[int]] = []

    def observe(node: object, value: object) -> None:
        if getattr(node, "op", "") == "autopar.moe_route":
            assert isinstance(value, tuple)
            seen.append(value[1].tolist())

    run_graph(problem.graph, problem.values, observe=observe)
    return seen[0]


# -- tokens and experts over any axis ------------------------------------------------------------


@pytest.mark.parametrize("name", SORTED)
@pytest.mark.parametrize("seed", range(6))
def test_random_splits_of_sorted_rows_equal_one_device(name: str, seed: int) -> None:
    problem = _problem(name)
    signatures = signatures_of(problem.graph, expert_capacity_percent=(0, 200)[seed % 2])
    given = replace(problem, signatures=signatures)
    sizes = ((1, 1, 2), (2, 2, 2), (1, 2, 4), (1, 4, 1), (2, 1, 4), (1, 1, 4))[seed]
    stages = 1 + seed % 3  # cut anywhere, also between sorting and combining
    decisions = fuzz_decisions(
        given, microbatches=sizes[0], dp=sizes[1], tp=sizes[2], stages=stages, seed=seed,
        recompute_share=0.3,
    )  # fmt: skip
    _, step = simulate(given, decisions, MeshShape(pp=stages, dp=sizes[1], tp=sizes[2]))
    ratio, tensor = worst_difference(step, problem.reference())
    assert ratio <= 1, f"{tensor}: {ratio:.3g} times the allowance"


def test_random_splits_reach_every_form_of_rows() -> None:
    problem = _problem("SortedAndBack")
    found = set()
    for seed in range(12):
        decisions = fuzz_decisions(problem, microbatches=1, dp=1, tp=2, stages=1, seed=seed)
        for choice in decisions.choices["tp"].values():
            for placement in getattr(choice, "outputs", ()):
                if isinstance(placement, Routed):
                    found.add(placement.form)
    assert found == set(RoutedForm)


def test_two_experts_on_data_2_x_expert_2_have_the_gradient_of_one_process() -> None:
    model, batch = build_plain("SortedByArgsort", experts=2, k=1)
    problem = problem_of(model, batch)
    plan = _plan(problem, dp=2, tp=2, placements={"up": "S(0)", "down": "S(0)"})
    programs = _programs(problem, plan)
    for name in ("up", "down"):
        assert programs.params[name].compute[2] == Shard(0)
        assert programs.params[name].compute[1] == programs.params[name].storage[1]
    decisions = decisions_of(plan, problem.graph)
    _, step = simulate(problem, decisions, plan.mesh)
    assert worst_difference(step, problem.reference())[0] <= 1
    # ranks 0 and 2 hold expert 0 for the two halves of the batch, ranks 1 and 3 expert 1
    assert step.replica_gap == 0
    local = {n.meta.shape for n in _weights_of_experts(programs)}
    assert {shape[0] for shape in local} == {1}


def _weights_of_experts(programs: LocalPrograms) -> list[Node]:
    """Gradients of the experts' weights, as the backward makes them."""
    backward = programs.stages[0].backward
    return [n for n in backward.nodes if n.op == "autopar.grouped_mm_weight"]


# -- auxiliary losses, budgets, constraints ------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_balance_losses_are_exact_over_data_ranks_and_refused_over_microbatches(name: str) -> None:
    model, batch = build_transformer(
        name, num_hidden_layers=1, output_router_logits=True, router_aux_loss_coef=0.5
    )
    problem = problem_of(model, batch)
    _run(problem, _plan(problem, dp=2))
    with pytest.raises(
        ShardingError, match=r"load_balancing_loss_func\) mixes samples of different micro-batches"
    ):
        split_data_axes(problem.graph, problem.signatures, num_microbatches=2, dp=1)


@pytest.mark.parametrize("placement", ["S(0)", "S(0)@dp"])
def test_more_rows_than_the_budget_are_an_error(placement: str) -> None:
    model, batch = build_plain("SortedAndBack")
    problem = problem_of(route_all_to(model, 3), batch)
    axis = {"S(0)": {"tp": 2}, "S(0)@dp": {"dp": 2}}[placement]
    plan = _plan(problem, **axis, placements={"up": placement}, expert_capacity=1.0)
    with pytest.raises(
        RowBudgetError,
        match=r"moe_route .*moe_models.py:\d+ in mix\): \d+ rows were routed to the experts of one "
        r"rank, which has room for 48; raise expert_capacity",
    ):
        _run(problem, plan)


def test_the_report_tells_the_budget() -> None:
    problem = _problem("mixtral")
    plan = _plan(problem, dp=2, placements=OVER_DP, expert_capacity=1.5)
    # 96 slots over 2 ranks, and half as many again; 16 numbers of 8 bytes each
    assert (
        "experts split over dp: a rank has room for 72 rows of 128 B, 9.00 KiB in each of 2 layers "
        "(150 % of an even share; more rows are an error on all ranks)"
    ) in plan.assumptions
    plan = _plan(problem, dp=2, placements=OVER_DP)
    assert any("which is always enough" in text for text in plan.assumptions)
    assert not any("experts" in text for text in _plan(problem, dp=2).assumptions)


def test_constraints_in_force_name_the_experts_and_the_budget() -> None:
    plan = _plan(_problem("mixtral"), dp=2, placements=OVER_DP, expert_capacity=1.5)
    told = {(c.name, c.value): c.effect for c in plan.constraints}
    assert told["placements", "*.experts.gate_up_proj: S(0)@dp"].startswith(
        "2 parameters: model.layers.0.mlp.experts.gate_up_proj, "
    )
    assert told["expert_capacity", "1.5"].startswith("rows that a rank has room for")


def test_a_smaller_budget_needs_less_memory() -> None:
    problem = _problem("mixtral")
    least, most = (
        _plan(problem, dp=4, placements=OVER_DP, expert_capacity=c).peak_bytes for c in (1.0, 4.0)
    )
    assert least < most


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placements": {"*.o_proj.weight": "S(0)@dp"}, "dp": 2},
         r"\.o_proj\.weight' can't be split over dp: it has no experts"),
        ({"placements": {"*.down_proj": "S(1)@dp"}, "dp": 2}, r"its experts are in dim 0"),
        ({"placements": OVER_DP, "dp": 1}, r"splits experts over dp, and dp=1"),
        ({"placements": {"*.gate_up_proj": "R@dp"}, "dp": 2}, r"given 'R@dp'"),
        ({"placements": {**OVER_DP, "*.layers.0.*.gate_up_proj": "S(1)"}, "dp": 2},
         r"is placed over dp and over tp"),
        ({"placements": OVER_DP, "dp": 8}, r"it has 4 experts, which 8 does not divide"),
        ({"expert_capacity": 0.5}, r"expert_capacity=0\.5: the least is 1"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        _plan(_problem("mixtral"), **options)


def test_all_weights_of_the_same_experts_are_split_together() -> None:
    problem = _problem("gpt-oss")
    plan = _plan(problem, dp=2, placements=OVER_DP)
    params = _programs(problem, plan).params
    experts = {name for name in params if ".experts." in name}
    assert {name.rpartition(".")[2] for name in experts} == {
        "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias",
    }  # fmt: skip
    assert all(params[name].storage[1] == Shard(0) for name in experts)


def test_decisions_of_one_batch_size_carry_over_to_another() -> None:
    problem = _problem("mixtral")
    model, batch = build("mixtral")
    plan = _plan(problem, dp=2, tp=2, placements={**OVER_TP}, expert_capacity=1.5)
    half = {key: value[:4] for key, value in batch.items()}
    smaller = problem_of(model, half)
    decisions, _ = transfer(decisions_of(plan, problem.graph), problem.graph, smaller.graph)
    _, step = simulate(smaller, decisions, plan.mesh)
    assert worst_difference(step, smaller.reference())[0] <= 1
    evaluated = promote(capture(model.eval(), (), batch, train=False).graph)
    decisions, _ = transfer(decisions_of(plan, problem.graph), problem.graph, evaluated)
    programs = localize(evaluated, decisions, signatures_of(evaluated))
    assert _rows(programs) == {48 * 3 // 4}  # half of the slots, and of these three in four
