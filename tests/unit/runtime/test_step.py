"""Whole steps of the hand-made two-stage network on simulated ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.errors import DeadlockError, EquivalenceError, InputError, PassError
from autopar.ir.graph import Input, InputKind, Node, Output, OutputKind, Ref, TensorMeta
from autopar.plan.actions import ActionKind
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.runtime.equivalence import check_equal, compare, largest_gradient
from autopar.runtime.finish import finish, share_outputs
from autopar.runtime.inputs import StepInputs
from autopar.runtime.load import load
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.simulate import simulate_step, stored_params
from autopar.runtime.step import RankStep
from autopar.sharding.placement import P, R, Shard, V
from autopar.sharding.programs import ResultSpec, TensorSpec
from tests.handmade import (
    two_stage,
    two_stage_actions,
    two_stage_data,
    two_stage_reference,
)

PP2 = MeshShape(pp=2)


def run(mesh, num_microbatches=2, *, programs=None, actions=None, **options):
    params, inputs = two_stage_data()
    return simulate_step(
        programs or two_stage(mesh, num_microbatches),
        mesh,
        actions or two_stage_actions(mesh, num_microbatches),
        params=params,
        inputs=inputs,
        **options,
    )


def gaps(step):
    loss, grads, _ = two_stage_reference(*two_stage_data())
    found = {**step.grads, "loss": step.loss}
    return compare(found, {**grads, "loss": loss}, largest_gradient=largest_gradient(grads))


@pytest.mark.parametrize("kind", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "num_microbatches"),
    [
        (PP2, 4),
        (MeshShape(pp=2, dp=2), 2),
        (MeshShape(pp=2, tp=3), 2),
        (MeshShape(pp=2, dp=4, tp=2), 1),
        (MeshShape(pp=2, dp=2, tp=2), 2),
    ],
)
def test_every_mesh_gives_the_numbers_of_one_device(mesh, num_microbatches, level, kind):
    actions = two_stage_actions(mesh, num_microbatches, kind, (level, level))
    step = run(mesh, num_microbatches, actions=actions)
    check_equal(gaps(step))
    assert torch.allclose(step.outputs["z"], two_stage_reference(*two_stage_data())[2], rtol=1e-12)
    assert step.replica_gap == 0.0


def test_two_stages_on_one_rank_need_no_message():
    mesh = MeshShape(virtual=2, dp=2)
    actions = two_stage_actions(mesh, 2, ScheduleKind.INTERLEAVED)
    step = run(mesh, actions=actions)
    check_equal(gaps(step))
    assert step.traffic.messages == 0


def test_traffic_by_hand():
    step = run(MeshShape(pp=2, dp=2, tp=2))
    # per stage mesh: y is reduced over tp by 2 dp ranks for 2 micro-batches; W1 and W2 over dp by
    # 2 tp ranks; W3 gathered and scattered by 2; z gathered by 2 for 2 micro-batches; the loss
    # reduced by 2, loss and output sent along pp by 4
    assert step.traffic.collectives == {
        ("all_reduce", "tp"): 4,
        ("all_reduce", "dp"): 4 + 2,
        ("all_gather", "dp"): 2 + 4,
        ("reduce_scatter", "dp"): 2,
        ("broadcast", "pp"): 8,
    }
    assert step.traffic.messages == 2 * 2 * 4  # y and dy, 2 micro-batches, 4 pairs of ranks


def test_saved_bytes_by_hand():
    # stage 0 saves h (rows x 6), stage 1 z (rows x 3) and the received y (rows x 4), 8 bytes each;
    # 4 micro-batches of 2 rows: two are in flight on stage 0 under 1f1b, one on stage 1
    assert run(PP2, 4).peak_saved_bytes == (2 * 2 * 6 * 8, 2 * (3 + 4) * 8)
    gpipe = two_stage_actions(PP2, 4, ScheduleKind.GPIPE)
    assert run(PP2, 4, actions=gpipe).peak_saved_bytes == (4 * 2 * 6 * 8, 4 * 2 * (3 + 4) * 8)


def test_the_tangent_of_the_loss_scales_the_gradients():
    scaled, plain = run(PP2, loss_tangent=2.0**16), run(PP2)
    for name, grad in plain.grads.items():
        assert torch.equal(scaled.grads[name], grad * 2.0**16)


def test_a_forward_alone_saves_nothing_and_drops_what_only_backward_needs():
    actions = [[a for a in row if "B" not in a.kind.value and a.kind is not ActionKind.REDUCE_GRAD]
               for row in two_stage_actions(PP2)]  # fmt: skip
    step = run(PP2, actions=actions, forward_only=True)
    assert torch.allclose(step.loss, two_stage_reference(*two_stage_data())[0], rtol=1e-12)
    assert step.grads == {}
    assert step.peak_saved_bytes == (0, 0)


def test_a_dropped_all_reduce_is_found_by_the_criterion():
    mesh = MeshShape(pp=2, tp=2)
    with pytest.raises(EquivalenceError, match="differs between ranks that hold the same values"):
        run(mesh, programs=two_stage(mesh, drop_all_reduce=True))
    step = run(mesh, programs=two_stage(mesh, drop_all_reduce=True), replica_tolerance=float("inf"))
    with pytest.raises(EquivalenceError, match=r"differs from one device by .*, allowed is"):
        check_equal(gaps(step))


def without(row, kind):
    """A list without its first action of a kind."""
    index = next(i for i, a in enumerate(row) if a.kind is kind)
    return [*row[:index], *row[index + 1 :]]


def test_a_missing_send_names_every_rank_s_position():
    first, second = two_stage_actions(PP2)
    with pytest.raises(DeadlockError) as caught:
        run(PP2, actions=[without(first, ActionKind.SEND_F), second])
    # the second message arrives where the first one was expected
    assert "sent is 'y of micro-batch 1, stage 0 to 1'" in str(caught.value)
    assert "rank 0 at 0SEND_F1>1" in str(caught.value)


def test_a_last_missing_send_is_a_deadlock():
    first, second = two_stage_actions(PP2, 1)
    with pytest.raises(DeadlockError) as caught:
        run(PP2, 1, actions=[without(first, ActionKind.SEND_F), second])
    text = str(caught.value)
    assert "rank 0 at 0B0: waits for 'dy of micro-batch 0, stage 1 to 0' from rank 1" in text
    assert "rank 1 at 1F0: waits for 'y of micro-batch 0, stage 0 to 1' from rank 0" in text


def test_swapped_receives_are_found():
    first, second = map(list, two_stage_actions(PP2, 2, ScheduleKind.GPIPE))
    where = [i for i, a in enumerate(second) if a.kind is ActionKind.RECV_F]
    a, b = where
    received_late = second.pop(b)
    second.insert(a, received_late)
    with pytest.raises(DeadlockError, match=r"message 0 from rank 0 to rank 1 differs at its ends"):
        run(PP2, actions=[first, second])


def test_a_missing_receive_is_named():
    first, second = two_stage_actions(PP2)
    with pytest.raises(PassError, match="1F0 reads values of stage 0, but the action list has no"):
        run(PP2, actions=[first, without(second, ActionKind.RECV_F)])


def test_a_batch_of_another_shape_is_refused_by_name():
    params, _ = two_stage_data()
    with pytest.raises(
        InputError, match=r"'x' is float64\[4, 4\], the plan was made for float64\[8, 4\]"
    ):
        simulate_step(
            two_stage(PP2), PP2, two_stage_actions(PP2), params=params,
            inputs={"x": torch.ones(4, 4, dtype=torch.float64)},
        )  # fmt: skip


def with_buffer(layout):
    """The two-stage programs with a buffer in stage 1 that grows by the rows it sees."""
    programs = two_stage(PP2)
    stage = programs.stages[1]
    meta = TensorMeta((), "float64")
    counted = Node("counted", "aten.add.Tensor", (Ref("seen"), 4.0), meta)
    forward = replace(
        stage.forward,
        inputs=(*stage.forward.inputs, Input("seen", InputKind.BUFFER, "seen", meta)),
        nodes=(*stage.forward.nodes, counted),
        outputs=(*stage.forward.outputs, Output(OutputKind.MUTATION, "seen", Ref("counted"))),
    )
    result = ResultSpec(
        kind=OutputKind.MUTATION, target="seen", stage=1, spec=TensorSpec(meta, (layout, R, R))
    )
    return replace(
        programs,
        stages=(programs.stages[0], replace(stage, forward=forward)),
        buffers={"seen": meta},
        buffer_stages={"seen": (0, 1)},
        results=(*programs.results, result),
    )


@pytest.mark.parametrize(
    ("layout", "after"),
    [
        (V, 10.0 + 4.0 + 4.0),  # each micro-batch sees what the one before left
        (R, 10.0 + 4.0),  # the same value in every micro-batch, applied once
        (P, (10.0 + 4.0) + (10.0 + 4.0)),  # pending sum over micro-batches
    ],
)
def test_a_buffer_follows_its_micro_batch_placement_and_reaches_all_its_stages(layout, after):
    buffer = torch.tensor(10.0, dtype=torch.float64)
    step = run(PP2, programs=with_buffer(layout), buffers={"seen": buffer})
    assert float(step.buffers["seen"]) == after
    assert float(buffer) == 10.0  # the caller's tensor is not written to
    assert step.replica_gap == 0.0  # stage 0's copy is equal


def test_an_output_split_over_micro_batches_and_ranks_can_not_be_joined():
    mesh = MeshShape(pp=2, dp=2)
    programs = two_stage(mesh)
    split = replace(
        programs.results[1],
        spec=TensorSpec(programs.results[1].spec.meta, (Shard(0), Shard(0), R)),
    )
    with pytest.raises(PassError, match="dim 0 of a value is split over micro-batches and ranks"):
        run(mesh, programs=replace(programs, results=(programs.results[0], split)))


def split_lists(lists):
    """Each list cut before its first backward, and after it what belongs to backward."""
    cut = []
    for row in lists:
        is_backward = [a.kind in (ActionKind.BACKWARD, ActionKind.RECV_B) for a in row]
        first = is_backward.index(True)
        cut.append((row[:first], row[first:]))
    return cut


def without_a_loss(mesh):
    """The two-stage programs with z as the only result, and its gradient given from outside."""
    programs = two_stage(mesh)
    stage = programs.stages[1]
    rows = programs.edge_metas["y"].shape[0]
    given = Input("dz", InputKind.TANGENT, "z", TensorMeta((rows, 3), "float64"))
    kept = [n for n in stage.backward.nodes if n.name not in ("g", "gt")]
    backward = replace(
        stage.backward,
        inputs=(*(i for i in stage.backward.inputs if i.target in ("W3", "y")), given),
        nodes=tuple(
            replace(n, args=tuple(Ref("dz") if a == Ref("gt") else a for a in n.args)) for n in kept
        ),
    )
    forward = replace(
        stage.forward,
        outputs=tuple(o for o in stage.forward.outputs if o.kind is OutputKind.OUTPUT),
    )
    return replace(
        programs,
        stages=(programs.stages[0], replace(stage, forward=forward, backward=backward)),
        results=programs.results[1:],
        tangents={"z": TensorSpec(TensorMeta((8, 3), "float64"), (Shard(0), Shard(0), R))},
    )


def test_all_forwards_then_all_backwards_with_a_gradient_from_outside():
    mesh = MeshShape(pp=2, dp=2)
    params, inputs = two_stage_data()
    programs = without_a_loss(mesh)
    loaded = load(programs, mesh)
    lists = split_lists(two_stage_actions(mesh, kind=ScheduleKind.GPIPE))
    steps = []
    for rank in range(mesh.num_ranks):
        own = stored_params(programs, mesh, rank, params)
        steps.append(RankStep(loaded, rank, StepInputs(params=own, users=inputs)))
    outputs = {}

    def forwards(step):
        yield from step.run(lists[step.pp][0])
        yield from finish(step)
        outputs[step.rank] = (yield from share_outputs(step))["z"]

    run_lockstep([forwards(s) for s in steps], mesh)
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    z = torch.relu(inputs["x"] @ leaves["W1"]) @ leaves["W2"] @ leaves["W3"]
    assert all(torch.allclose(o, z, rtol=1e-12) for o in outputs.values())
    tangent = torch.randn(8, 3, dtype=torch.float64)
    z.backward(tangent)
    for step in steps:
        step.inputs.tangents = {"z": tangent}
    run_lockstep([s.run(lists[s.pp][1]) for s in steps], mesh)
    for step in steps:
        want = stored_params(programs, mesh, step.rank, {n: p.grad for n, p in leaves.items()})
        found = step.gradients[step.pp]
        assert set(found.names()) == set(want)
        assert all(torch.allclose(found[n], want[n], rtol=1e-11) for n in want)
