from __future__ import annotations

import pytest

from autopar.errors import ConfigError
from autopar.plan.actions import Action, ActionKind
from cost_models.lanes import Interference, Lane
from cost_models.layer_segments import LayerSeconds, backward_segments, forward_segments
from cost_models.simulate import StageSeconds, simulate

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def alone(kind, segments, **options):
    return simulate([[Action(0, kind, 0)]], [StageSeconds(segments={kind: segments})], **options)


@pytest.mark.parametrize(("compute_s", "gather_s"), [(3, 1), (3, 3), (1, 3)])
def test_gathering_one_layer_ahead_costs_the_first_and_what_compute_is_short_of(
    compute_s, gather_s
):
    layers = [LayerSeconds(forward_s=compute_s, backward_s=0, gather_s=gather_s)] * 5
    ahead = alone(F, forward_segments(layers))
    assert ahead.makespan_s == gather_s + 4 * max(compute_s, gather_s) + compute_s
    assert ahead.exposed_s(0) == ahead.makespan_s - 5 * compute_s
    none = alone(F, forward_segments(layers, gathers_ahead=0))
    assert none.makespan_s == 5 * (compute_s + gather_s)


@pytest.mark.parametrize(("compute_s", "reduce_s"), [(3, 1), (1, 3)])
def test_reductions_hide_behind_the_layers_that_follow(compute_s, reduce_s):
    layers = [LayerSeconds(forward_s=0, backward_s=compute_s, reduce_s=reduce_s)] * 4
    result = alone(B, backward_segments(layers))
    wanted_s = 4 * compute_s + reduce_s if reduce_s <= compute_s else compute_s + 4 * reduce_s
    assert result.makespan_s == wanted_s
    assert result.exposed_s(0) == wanted_s - 4 * compute_s
    assert alone(B, backward_segments(layers, reduces=False)).makespan_s == 4 * compute_s


def test_collectives_inside_a_layer_are_waited_for():
    layers = [LayerSeconds(forward_s=2, backward_s=4, forward_comm_s=1, backward_comm_s=1.5)] * 3
    assert alone(F, forward_segments(layers)).makespan_s == 9
    result = alone(B, backward_segments(layers))
    assert result.makespan_s == 16.5
    assert result.lane_s(0, Lane.INTRA) == result.exposed_s(0) == 4.5


def test_the_backward_goes_from_the_last_layer_and_gathers_again():
    layers = [
        LayerSeconds(forward_s=1, backward_s=2, gather_s=0.5, reduce_s=0.5, name=f"layers.{n}")
        for n in range(2)
    ]
    words = [s.label for s in backward_segments(layers)]
    assert words == [
        "gather 1 layers.1", "gather 0 layers.0", "1 layers.1", "reduce 1 layers.1",
        "0 layers.0", "reduce 0 layers.0",
    ]  # fmt: skip
    kept = [s.label for s in backward_segments(layers, regathers=False)]
    assert kept == ["1 layers.1", "reduce 1 layers.1", "0 layers.0", "reduce 0 layers.0"]


def test_gradients_of_a_step_are_reduced_beside_its_last_backward():
    layers = [LayerSeconds(forward_s=1, backward_s=2, reduce_s=1)] * 3
    stage = StageSeconds(
        segments={
            F: forward_segments(layers),
            B: backward_segments(layers, reduces=False),
        },
        segments_at={(B, 3): backward_segments(layers)},
    )
    rows = [Action(0, kind, mb) for mb in range(4) for kind in (F, B)]
    result = simulate([rows], [stage])
    assert result.makespan_s == 4 * 9 + 1
    assert {s.action.microbatch for s in result.spans if s.lane == Lane.INTER} == {3}
    slow = Interference.between(compute=1.5, communication=1.0)
    # two of the three reductions are beside compute, and cost it a third of their second each
    assert simulate([rows], [stage], interference=slow).makespan_s == pytest.approx(37 + 2 / 3)


def test_gathering_a_negative_number_ahead_is_refused():
    with pytest.raises(ConfigError, match="gathers_ahead is -1, must be at least 0"):
        forward_segments([], gathers_ahead=-1)
