"""Operator splits: against every possibility and against the emitted programs."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest

from autopar.capture.tracing import capture
from autopar.cluster import parse_devices
from autopar.errors import InfeasibleError
from autopar.ir.graph import Arg, Graph, Meta
from autopar.plan.types import MeshShape
from autopar.sharding import buckets
from autopar.sharding.build import localize
from autopar.sharding.decisions import Decisions
from autopar.sharding.placement import R, Shard
from autopar.sharding.programs import LocalPrograms
from autopar.solver.analysis import Analysis
from autopar.solver.constraints import Constraints
from autopar.solver.splits import solve_splits, tp_choices
from autopar.solver.splits_problem import (
    Flow,
    Move,
    Pass,
    Reader,
    SplitOption,
    SplitsProblem,
    SplitVariable,
    choice_memory_bytes,
    choice_terms_s,
)
from cost_models.base import CostModel, slowest_group
from cost_models.evaluate import evaluate_program
from cost_models.flops import VIEW_OPS
from tests import zoo

LAYOUTS = ((R,), (Shard(0),), (Shard(1),))


class ArbitraryCostModel:
    """Prices drawn from a hash of the question: no structure that a fault could hide behind."""

    source = "arbitrary"

    def op_time_s(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> float:
        del args
        # a view costs nothing: programs make views again wherever they are read
        return 0.0 if op in VIEW_OPS else self._draw(f"{op} {operands} {results}")

    def collective_time_s(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        return self._draw(f"{kind} {payload_bytes} {len(ranks)}") / 2

    @staticmethod
    def _draw(text: str) -> float:
        return 1e-6 * (1 + zlib.crc32(text.encode()) % 1000)


# -- every possibility -----------------------------------------------------------------------------
def random_problem(seed: int, *, limit: int | None = None) -> SplitsProblem:
    """Six variables in a chain with skips; some moves can't be made."""
    rng = random.Random(seed)
    count = 6
    variables = []
    for v in range(count):
        options = tuple(
            SplitOption(
                None,
                (rng.choice(LAYOUTS), rng.choice(LAYOUTS)),
                (rng.choice(LAYOUTS),),
                rng.uniform(0.1, 2.0),
                rng.randrange(100),
            )
            for _ in range(rng.choice([1, 3, 4]))
        )
        members = tuple(f"v{v}_{k}" for k in range(rng.choice([1, 3])))
        variables.append(SplitVariable(f"v{v}", members, options))
    flows = []
    for v in range(count - 1):
        readers = tuple(
            Reader(rng.randrange(v + 1, count), rng.randrange(2), rng.choice(list(Pass)))
            for _ in range(rng.choice([1, 2, 4]))
        )
        moves = {}
        for have, want in product(LAYOUTS, LAYOUTS):
            if have == want:
                moves[have, want] = Move(0.0, is_shared=True)
            elif rng.random() < 0.9:
                moves[have, want] = Move(rng.uniform(0.1, 1.0), is_shared=rng.random() < 0.5)
        flows.append(Flow(v, 0, rng.choice([1, 2]), readers, moves))
    return SplitsProblem(
        variables=tuple(variables),
        flows=tuple(flows),
        num_microbatches=3,
        num_reduces=2,
        limit_bytes=limit,
    )


def brute_force(problem: SplitsProblem) -> float | None:
    best: float | None = None
    for options in product(*(range(len(v.options)) for v in problem.variables)):
        memory = choice_memory_bytes(problem, options)
        if problem.limit_bytes is not None and memory > problem.limit_bytes:
            continue
        terms = choice_terms_s(problem, options)
        if terms is not None:
            cost = sum(terms.values())
            best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("seed", range(15))
def test_splits_equal_the_best_of_all(seed: int, limit: int | None):
    problem = random_problem(seed, limit=limit)
    best = brute_force(problem)
    if best is None:
        with pytest.raises(InfeasibleError, match="no splits"):
            solve_splits(problem)
        return
    found = solve_splits(problem)
    assert found.objective_s == pytest.approx(best, rel=1e-9)
    assert found.bound_s == pytest.approx(best, rel=1e-6)


def test_three_readers_of_one_pass_pay_one_gather():
    # a value in blocks, read whole by three readers in forward and one in backward: the gather
    # grows it, so it is made once in each pass: 2 * 5 s
    whole, blocks = LAYOUTS[0], LAYOUTS[1]
    source = SplitVariable("x", ("x",), (SplitOption(None, (), (blocks,), 0.0),))
    reads = SplitOption(None, (whole,), (), 0.0)
    others = tuple(SplitVariable(f"r{i}", (f"r{i}",), (reads,)) for i in range(4))
    readers = (*(Reader(i, 0, Pass.FORWARD) for i in (1, 2, 3)), Reader(4, 0, Pass.BACKWARD))
    flow = Flow(0, 0, 1, readers, {(blocks, whole): Move(5.0, is_shared=False)})
    problem = SplitsProblem(variables=(source, *others), flows=(flow,), num_microbatches=1)
    assert solve_splits(problem).objective_s == pytest.approx(10.0)


# -- the emitted programs --------------------------------------------------------------------------
@cache
def graph_of(name: str, dropout: float = 0.0) -> Graph:
    model, batch = zoo.build(name, dropout=dropout)
    return capture(model, (), batch).graph


def programs_cost(
    programs: LocalPrograms, model: CostModel, groups: dict[str, tuple[int, ...]], level: int
) -> float:
    """Seconds per step of the only stage, from the programs' text."""
    count = programs.axis_sizes[0]
    runs = {"forward": count, "backward": count, "reduce": count if level >= 2 else 1}
    return sum(
        runs.get(part, 1)
        * evaluate_program(getattr(programs.stages[0], part), model, groups).total_s
        for part in ("unshard", "prologue", "forward", "backward", "reduce", "finish")
    )


CASES = [
    ("gpt2", (1, 1, 2), 0), ("gpt2", (2, 2, 2), 1), ("gpt2", (1, 2, 3), 3),
    ("llama", (2, 1, 4), 0), ("llama", (2, 2, 2), 2), ("bert", (2, 2, 2), 0),
    ("vit", (2, 2, 4), 1), ("resnet", (1, 2, 2), 3), ("resnet", (1, 1, 3), 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "level"), CASES)
def test_objective_is_the_price_of_the_emitted_programs(
    name: str, sizes: tuple[int, int, int], level: int, monkeypatch: pytest.MonkeyPatch
):
    # what shares a bucket is priced by bytes, which arbitrary prices do not go by
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 0)
    graph, model = graph_of(name, 0.1 if name == "gpt2" else 0.0), ArbitraryCostModel()
    cluster = parse_devices("12:cpu")
    analysis = Analysis(graph, cluster, model, Constraints(), "sgd")
    analysis.optimizer_s_per_byte = 0.0  # the optimizer is in no program
    problem = analysis.problem(sizes, level)
    found = solve_splits(problem)
    mesh = MeshShape(dp=sizes[1], tp=sizes[2])
    groups = {axis: slowest_group(cluster, mesh, axis) for axis in ("dp", "tp")}
    choices = {**analysis.data(*sizes[:2]).choices, "tp": tp_choices(problem, found.options)}
    decisions = Decisions(axis_sizes=sizes, choices=choices, zero_levels=(level,))
    programs = localize(graph, decisions, analysis.signatures)
    cost = programs_cost(programs, model, groups, level)
    assert found.objective_s == pytest.approx(cost, rel=1e-9)
    assert found.objective_s == pytest.approx(sum(found.terms_s.values()), rel=1e-12)
    assert found.bound_s <= found.objective_s
