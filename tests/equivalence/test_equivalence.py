"""Six unmodified architectures under fourteen forced plans, on simulated ranks, equal one device.

The criterion is that of :func:`autopar.runtime.equivalence.compare`: every loss, buffer, gradient
and weight after a step, in float64, to 1e-10. A batch norm mixes the samples of different
micro-batches; ResNet under micro-batches takes its statistics per micro-batch, and its reference is
the same graph run micro-batch by micro-batch, which in turn equals eager torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from autopar.errors import EquivalenceError
from autopar.ir.graph import Graph, InputKind, Node, Ref
from autopar.plan.decisions import decisions_of
from autopar.plan.io import plan_from_json, plan_to_json
from autopar.plan.types import MeshShape, Plan, ScheduleKind
from autopar.runtime.equivalence import verify_programs
from autopar.sharding.build import localize
from autopar.sharding.decisions import Decisions
from autopar.sharding.programs import LocalPrograms
from autopar.sharding.propagate import split_data_axes
from autopar.solver.force import forced_plan
from tests.equivalence.harness import Problem, actions_for, problem_of, run, worst_difference
from tests.zoo import build

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "resnet")
PLANS: Mapping[str, dict[str, object]] = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2, "num_microbatches": 4},
    "pp4": {"pp": 4, "num_microbatches": 4},
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "tp2 x pp2": {"tp": 2, "pp": 2, "num_microbatches": 2},
    "dp2 x pp2": {"dp": 2, "pp": 2, "num_microbatches": 2},
    "dp2 x tp2 x pp2": {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 2},
    "interleaved pp2 v2": {"pp": 2, "virtual": 2, "num_microbatches": 4},
    "full recompute": {"num_microbatches": 2, "recompute": "full"},
    "parameters sharded over dp": {"dp": 2, "zero": 3},
    "a ZeRO level for each stage": {"dp": 2, "pp": 2, "num_microbatches": 2, "zero": (2, 0)},
}


@pytest.fixture(scope="module")
def problem() -> Callable[[str], Problem]:
    """Captured problems by model, made once."""
    made: dict[str, Problem] = {}

    def get(name: str) -> Problem:
        if name not in made:
            made[name] = problem_of(*build(name))
        return made[name]

    return get


def _forced(problem: Problem, degrees: Mapping[str, object], **options: object) -> Plan:
    plan = forced_plan(problem.graph, "hash", **degrees, **options)  # type: ignore[arg-type]
    # what runs is what a plan file holds
    return plan_from_json(plan_to_json(plan))


def _verify(problem: Problem, plan: Plan, programs: LocalPrograms) -> None:
    zero = [stage.zero_level for stage in plan.stages]
    actions = actions_for(programs, plan.mesh, plan.num_microbatches, plan.schedule, zero)
    verify_programs(problem.graph, programs, plan.mesh, actions, problem.values)


def _programs(problem: Problem, plan: Plan) -> LocalPrograms:
    return localize(problem.graph, decisions_of(plan, problem.graph), problem.signatures)


@pytest.mark.parametrize("degrees", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_equivalence_on_simulated_ranks(
    name: str, degrees: str, problem: Callable[[str], Problem]
) -> None:
    given = problem(name)
    if name == "resnet" and "num_microbatches" in PLANS[degrees]:
        _check_against_microbatches(given, PLANS[degrees])
        return
    plan = _forced(given, PLANS[degrees])
    _verify(given, plan, _programs(given, plan))


def _microbatch_reference(problem: Problem, count: int) -> dict[str, torch.Tensor]:
    """The graph run micro-batch by micro-batch on one device."""
    splits = split_data_axes(
        problem.graph,
        problem.signatures,
        num_microbatches=count,
        dp=1,
        microbatch_statistics=True,
    )
    decisions = Decisions(axis_sizes=(count, 1, 1), choices=splits.choices)
    programs = localize(problem.graph, decisions, problem.signatures)
    step = run(problem, programs, MeshShape(), count, ScheduleKind.GPIPE)
    found = {f"loss:{k}": v for k, v in step.losses.items()}
    found |= {f"grad:{k}": v for k, v in step.grads.items()}
    return found | {f"mutation:{k}": v for k, v in step.buffers.items()}


def _check_against_microbatches(problem: Problem, degrees: Mapping[str, object]) -> None:
    plan = _forced(problem, degrees, microbatch_statistics=True)
    assert plan.microbatch_statistics
    programs = _programs(problem, plan)
    zero = [stage.zero_level for stage in plan.stages]
    step = run(problem, programs, plan.mesh, plan.num_microbatches, plan.schedule, zero)
    reference = _microbatch_reference(problem, plan.num_microbatches)
    ratio, tensor = worst_difference(step, reference)
    assert ratio <= 1, f"{tensor}: {ratio:.3g} times the allowance"


def test_equivalence_of_microbatch_statistics_with_eager_calls(
    problem: Callable[[str], Problem],
) -> None:
    model, batch = build("resnet")
    count = 4
    reference = _microbatch_reference(problem("resnet"), count)
    eager = copy.deepcopy(model).double().train()
    rows = batch["labels"].shape[0] // count
    for index in range(count):
        part = {k: v[index * rows : (index + 1) * rows] for k, v in batch.items()}
        part["pixel_values"] = part["pixel_values"].double()
        (eager(**part).loss / count).backward()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(
            reference[f"grad:{name}"], parameter.grad, rtol=1e-10, atol=1e-12
        )
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(reference[f"mutation:{name}"].to(buffer.dtype), buffer)


def test_equivalence_of_an_uneven_vocabulary_over_four_ranks() -> None:
    # 50,257 rows over 4: three blocks of 12,565 and one of 12,562, padded to 12,565 in programs
    given = problem_of(*build("gpt2", layers=1, batch=2, vocab=50257))
    plan = _forced(given, {"tp": 4, "placements": {"transformer.wte.weight": "S(0)"}})
    programs = _programs(given, plan)
    shapes = [i.meta.shape for i in programs.stages[0].forward.of_kind(InputKind.PARAM) if i.meta]
    assert (12565, 32) in shapes
    _verify(given, plan, programs)


# -- negative controls: the same check must fail -------------------------------------------------


def _edit(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    return replace(graph, nodes=tuple(change(n) for n in graph.nodes))


def _edited(programs: LocalPrograms, which: str, change: Callable[[Node], Node]) -> LocalPrograms:
    stages = tuple(
        replace(stage, **{which: _edit(getattr(stage, which), change)}) for stage in programs.stages
    )
    assert stages != programs.stages, "the control changed nothing"
    return replace(programs, stages=stages)


def _identity(node: Node) -> Node:
    meta = node.meta
    assert not isinstance(meta, tuple)
    assert meta is not None
    return replace(node, op="aten.view.default", args=(Ref(node.refs()[0]), meta.shape))


def test_equivalence_control_a_dropped_collective_is_found(
    problem: Callable[[str], Problem],
) -> None:
    given = problem("gpt2")
    plan = _forced(given, {"dp": 2})
    dropped = [False]

    def drop_first(node: Node) -> Node:
        if node.op == "comm.all_reduce" and not dropped[0]:
            dropped[0] = True
            return _identity(node)
        return node

    with pytest.raises(EquivalenceError, match="gradient of"):
        _verify(given, plan, _edited(_programs(given, plan), "reduce", drop_first))


def test_equivalence_control_a_wrong_coordinate_is_found(
    problem: Callable[[str], Problem],
) -> None:
    given = problem("gpt2")
    plan = _forced(given, {"tp": 2, "placements": {"transformer.wte.weight": "S(0)"}})

    def first_block(node: Node) -> Node:
        if node.op == "local.start":  # where the rank's block of the vocabulary begins
            return replace(node, args=((0,), *node.args[1:]))
        return node

    with pytest.raises(EquivalenceError):
        _verify(given, plan, _edited(_programs(given, plan), "forward", first_block))


def test_equivalence_control_a_mean_of_means_is_found(problem: Callable[[str], Problem]) -> None:
    given = problem("llama")  # ranks hold unequal counts of valid labels
    plan = _forced(given, {"dp": 4})

    def local_count(node: Node) -> Node:
        if node.op == "comm.all_reduce" and node.origin.startswith("nll_count"):
            return replace(node, op="aten.mul.Tensor", args=(Ref(node.refs()[0]), 4.0))
        return node

    with pytest.raises(EquivalenceError, match=r"43 of 43 tensors differ"):
        _verify(given, plan, _edited(_programs(given, plan), "forward", local_count))
