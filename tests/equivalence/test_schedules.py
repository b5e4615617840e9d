"""Every schedule equals one device: uneven stages, odd numbers of micro-batches, all features.

Stages are cut at random operators, so that they differ in length and values skip some of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.reference import whole_parameters
from autopar.errors import DeadlockError, EquivalenceError
from autopar.ir.graph import InputKind, OutputKind
from autopar.plan.actions import ActionKind
from autopar.plan.orders import forwards_of, order_of, receives_ahead
from autopar.plan.schedule import action_lists
from autopar.plan.schedule_check import check_actions
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
from autopar.runtime.equivalence import verify_programs
from autopar.runtime.simulate import simulate_step
from autopar.sharding.build import localize
from autopar.sharding.split_backward import split_backward
from autopar.sharding.stages import VIEW_OPS
from tests.equivalence.harness import actions_for, fuzz_decisions, problem_of
from tests.zoo import build

F = nn.functional
H1, ZBV, PLAIN = ScheduleKind.ZERO_BUBBLE, ScheduleKind.ZBV, ScheduleKind.ONE_F_ONE_B
INTERLEAVED, GPIPE = ScheduleKind.INTERLEAVED, ScheduleKind.GPIPE
BATCH = 14  # 7 micro-batches over 2 data ranks
CASES = [
    (H1, 1, None),
    (H1, 4, None),
    (ZBV, 1, None),
    (ZBV, 3, None),
    (PLAIN, 3, (5, 3, 1)),
    (PLAIN, 3, (2, 1, 1)),
    (PLAIN, 2, (7, 7)),
    (INTERLEAVED, 3, None),
    (GPIPE, 4, None),
]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def gpt2():
    """Tied embedding, dropout in three places."""
    return problem_of(*build("gpt2", dropout=0.1, batch=BATCH, seq=8))


def mesh_of(kind, pp, **others):
    virtual = 2 if kind in (ZBV, INTERLEAVED) else 1
    placement = StagePlacement.V if kind is ZBV else StagePlacement.LOOP
    return MeshShape(pp=pp, virtual=virtual, placement=placement, **others)


def ties_of(programs):
    return [(p.owner, s) for p in programs.params.values() for s in p.stages if s != p.owner]


def check(problem, kind, mesh, count, *, warmup=None, **options):
    decisions = fuzz_decisions(
        problem, microbatches=count, dp=mesh.dp, tp=mesh.tp, stages=mesh.num_stages, **options
    )
    programs = localize(problem.graph, decisions, problem.signatures)
    actions = actions_for(programs, mesh, count, kind, decisions.zero_levels, warmup)
    check_actions(
        actions,
        mesh,
        forward_edges=programs.forward_edges,
        backward_edges=programs.backward_edges,
        tied=ties_of(programs),
    )
    return verify_programs(problem.graph, programs, mesh, actions, problem.values)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=slow), pytest.param(7, marks=slow)])
@pytest.mark.parametrize(("kind", "pp", "warmup"), CASES)
def test_uneven_stages_and_odd_numbers_of_micro_batches(gpt2, kind, pp, warmup, count):
    check(gpt2, kind, mesh_of(kind, pp), count, warmup=warmup, seed=7 * pp + count)


@pytest.mark.parametrize(("kind", "pp", "warmup"), [CASES[1], CASES[3], CASES[4]])
def test_seven_micro_batches(gpt2, kind, pp, warmup):
    check(gpt2, kind, mesh_of(kind, pp), 7, warmup=warmup, seed=pp, recompute_share=0.3)


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        (H1, 2),
        (ZBV, 3),
        *(pytest.param(k, n, marks=slow) for k, n in ((H1, 0), (H1, 1), (H1, 3))),
        *(pytest.param(ZBV, n, marks=slow) for n in range(3)),
    ],
)
def test_split_backwards_with_zero_and_recompute(gpt2, kind, level):
    mesh = mesh_of(kind, 2, dp=2)
    check(gpt2, kind, mesh, 7, seed=level, zero=level, recompute_share=0.4)


@pytest.mark.parametrize(
    ("kind", "levels"),
    [
        (ScheduleKind.ONE_F_ONE_B, (2, 0, 3)),
        (ScheduleKind.INTERLEAVED, (3, 0, 2, 1)),
        (ZBV, (2, 3, 0, 1)),
    ],
)
def test_a_zero_level_for_each_stage(gpt2, kind, levels):
    """The model's tied weights are used by the first stage and by the last."""
    stages = len(levels) if kind is ScheduleKind.ONE_F_ONE_B else len(levels) // 2
    check(gpt2, kind, mesh_of(kind, stages, dp=2), 7, seed=3, zero=levels, recompute_share=0.3)


def test_control_gradients_of_weights_that_are_left_out_are_found(gpt2):
    mesh = mesh_of(H1, 2)
    decisions = fuzz_decisions(gpt2, microbatches=2, dp=1, tp=1, stages=2, seed=0)
    programs = localize(gpt2.graph, decisions, gpt2.signatures)
    actions = actions_for(programs, mesh, 2, H1, decisions.zero_levels)
    cut = [
        [a for a in row if (a.kind, a.microbatch) != (ActionKind.BACKWARD_WEIGHT, 1)]
        for row in actions
    ]
    with pytest.raises(EquivalenceError, match="gradient of"):
        verify_programs(gpt2.graph, programs, mesh, cut, gpt2.values)


def test_control_gradients_of_weights_before_those_of_inputs_are_refused():
    mesh = mesh_of(H1, 2)
    lists = [list(row) for row in _lists(H1, mesh, 2, None, [(0, 1)], [(1, 0)], [], 0)]
    swapped = {ActionKind.BACKWARD_INPUT: ActionKind.BACKWARD_WEIGHT}
    swapped |= {w: i for i, w in swapped.items()}
    lists[1] = [
        type(a)(a.stage, swapped.get(a.kind, a.kind), a.microbatch, a.peer) for a in lists[1]
    ]
    with pytest.raises(DeadlockError, match="1W0 before its other half"):
        check_actions(lists, mesh, forward_edges=[(0, 1)], backward_edges=[(1, 0)])


@pytest.mark.parametrize("kind", [H1, pytest.param(ZBV, marks=slow)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=slow) for n in (1, 2))])
def test_split_backwards_with_random_splits_of_operators(gpt2, kind, seed):
    check(gpt2, kind, mesh_of(kind, 2, tp=2), 2, seed=seed, recompute_share=0.2)


def test_forwards_first_in_a_v(gpt2):
    """What a plan in a V runs for a call without a loss of its own."""
    check(gpt2, GPIPE, mesh_of(ZBV, 2), 2, seed=5)


class PartlyFrozen(nn.Module):
    """A frozen first layer, so that its stage has no backward; a frozen one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        for index in (0, 3):
            self.layers[index].requires_grad_(False)

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(x, target)


@pytest.mark.parametrize("kind", [H1, ZBV, PLAIN])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=slow) for n in (1, 2))])
def test_frozen_parameters(kind, seed):
    torch.manual_seed(0)
    problem = problem_of(PartlyFrozen(), {"x": torch.randn(21, 8), "target": torch.randn(21, 8)})
    found = check(problem, kind, mesh_of(kind, 2), 7, seed=seed)
    assert found.step is not None
    assert not any("layers.0" in name or "layers.3" in name for name in found.step.grads)


@pytest.mark.parametrize("recompute", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_the_halves_are_the_backward_operator_by_operator(gpt2, seed, recompute):
    decisions = fuzz_decisions(
        gpt2, microbatches=2, dp=1, tp=2, stages=4, seed=seed, recompute_share=recompute
    )
    programs = localize(gpt2.graph, decisions, gpt2.signatures)
    for stage in programs.stages:
        halves = split_backward(stage.backward)
        first = {n.name for n in halves.inputs.nodes}
        second = {n.name for n in halves.weights.nodes}
        whole = {n.name for n in stage.backward.nodes}
        assert first | second == whole
        assert first & second <= {n.name for n in stage.backward.nodes if n.op in VIEW_OPS}
        kinds = {o.kind for o in halves.inputs.outputs}
        assert kinds <= {OutputKind.SEND, OutputKind.SAVED}
        assert {o.kind for o in halves.weights.outputs} <= {OutputKind.GRAD}
        if stage.index == 0:  # nobody waits for the first stage's gradients
            assert not first
        else:  # each layer's weights leave products for later
            assert any(n.op == "aten.mm.default" for n in halves.weights.nodes) or not any(
                n.op == "aten.mm.default" for n in stage.backward.nodes
            )


@pytest.mark.parametrize("kind", [H1, ZBV, PLAIN])
def test_no_schedule_deadlocks_under_strict_messages(kind):
    for pp in range(1, 6):
        mesh = mesh_of(kind, pp)
        stages = range(mesh.num_stages)
        ahead = [(s, t) for s in stages for t in (s + 1, s + 3) if t < mesh.num_stages]
        back = [(t, s) for s, t in ahead]
        ties = [(0, mesh.num_stages - 1)] if mesh.num_stages > 1 else []
        for count in range(1, 2 * pp + 3):
            for depth in (None, 1, 2) if kind is PLAIN else (None,):
                warmup = None
                if depth is not None:
                    warmup = tuple(max(1, depth * (pp - rank)) for rank in range(pp))
                for level in (0, 3):
                    lists = _lists(kind, mesh, count, warmup, ahead, back, ties, level)
                    done = check_actions(
                        lists, mesh, forward_edges=ahead, backward_edges=back, tied=ties
                    )
                    assert len(done) == sum(map(len, lists))


def _lists(kind, mesh, count, warmup, ahead, back, ties, level):
    return action_lists(
        order_of(kind, mesh, count, warmup),
        mesh,
        forward_edges=ahead,
        backward_edges=back,
        tied=ties,
        zero_levels=[level] * mesh.num_stages,
        prefetch=receives_ahead(warmup),
    )


def test_evaluation_under_a_plan_in_a_v(gpt2):
    mesh, count = mesh_of(ZBV, 2), 2
    decisions = fuzz_decisions(gpt2, microbatches=count, dp=1, tp=1, stages=4, seed=1)
    programs = localize(gpt2.graph, decisions, gpt2.signatures)
    lists = action_lists(
        forwards_of(mesh, count),
        mesh,
        forward_edges=programs.forward_edges,
        tied=ties_of(programs),
    )
    step = simulate_step(
        programs,
        mesh,
        lists,
        params=whole_parameters(gpt2.graph, gpt2.values),
        inputs=gpt2.of_kind(InputKind.USER),
        buffers=gpt2.of_kind(InputKind.BUFFER),
        constants=gpt2.of_kind(InputKind.CONSTANT),
        rng_key=torch.tensor(gpt2.rng_key),
        forward_only=True,
    )
    wanted = next(v for k, v in gpt2.reference().items() if k.startswith("loss:"))
    torch.testing.assert_close(step.loss, wanted, rtol=1e-10, atol=0.0)
