from __future__ import annotations

import random

import pytest

from autopar.errors import ConfigError
from autopar.plan.actions import Action, ActionKind
from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.plan.zero_bubble import eager_1f1b_order, zero_bubble_h1_order, zero_bubble_v_order
from cost_models.lanes import Interference, Lane, Segment, SharedLink, links_of_nodes
from cost_models.simulate import StageSeconds, simulate
from tests.unit.cost_models.brute_force import brute_force

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
COMPUTE, INTRA, INTER, COPY = Lane.COMPUTE, Lane.INTRA, Lane.INTER, Lane.COPY


def part(lane, seconds, label="", *, overlaps=False, joins=()):
    return Segment(lane=lane, seconds=seconds, label=label, overlaps=overlaps, joins=joins)


def one_rank(*kinds, segments, **options):
    row = [Action(0, kind, None if kind not in (F, B) else 0) for kind in kinds]
    return simulate([row], [StageSeconds(segments=segments)], **options)


def times(result, lane):
    return [(s.start_s, s.end_s) for s in result.spans if s.lane == lane]


def test_a_collective_inside_a_forward_holds_it_back_unless_it_overlaps():
    inside = [part(COMPUTE, 2), part(INTRA, 1), part(COMPUTE, 3)]
    result = one_rank(F, segments={F: inside})
    assert times(result, COMPUTE) == [(0, 2), (3, 6)]
    assert times(result, INTRA) == [(2, 3)]
    assert (result.busy_s(0), result.exposed_s(0), result.communication_s(0)) == (6, 1, 1)
    assert result.bubble_fraction == 0

    beside = [part(COMPUTE, 2), part(INTRA, 4, "sum", overlaps=True), part(COMPUTE, 3)]
    result = one_rank(F, segments={F: beside})
    assert times(result, COMPUTE) == [(0, 2), (2, 5)]
    assert times(result, INTRA) == [(2, 6)]  # the step ends with it
    assert result.makespan_s == 6
    assert (result.busy_s(0), result.exposed_s(0)) == (5, 1)


def test_gathering_ahead_is_hidden_but_for_the_first_one():
    gathers = [part(INTER, 2, f"gather {n}", overlaps=True) for n in range(3)]
    layers = [part(COMPUTE, 3, f"layer {n}", joins=(f"gather {n}",)) for n in range(3)]
    # each is asked for when the layer before the last one has ended
    ahead = [gathers[0], gathers[1], layers[0], gathers[2], layers[1], layers[2]]
    result = one_rank(F, segments={F: ahead})
    assert times(result, INTER) == [(0, 2), (2, 4), (5, 7)]
    assert times(result, COMPUTE) == [(2, 5), (5, 8), (8, 11)]
    assert result.exposed_s(0) == 2


def test_gradients_are_reduced_beside_the_backward_that_follows():
    buckets = [
        part(COMPUTE, 2, "layer 1"), part(INTER, 3, "bucket 1", overlaps=True),
        part(COMPUTE, 2, "layer 0"), part(INTER, 3, "bucket 0", overlaps=True),
    ]  # fmt: skip
    update = {ActionKind.OPTIMIZER: [part(COMPUTE, 1, joins=("bucket 0",))]}
    row = [Action(0, B, 0), Action(0, ActionKind.OPTIMIZER, 0)]
    result = simulate([row], [StageSeconds(segments={B: buckets, **update})])
    assert times(result, INTER) == [(2, 5), (5, 8)]
    assert times(result, COMPUTE) == [(0, 2), (2, 4), (8, 9)]
    assert result.exposed_s(0) == 4


def test_what_is_issued_once_per_step_can_be_joined_by_every_micro_batch():
    row = [Action(0, ActionKind.UNSHARD), Action(0, F, 0), Action(0, F, 1)]
    segments = {
        ActionKind.UNSHARD: [part(INTER, 2, "weights", overlaps=True)],
        F: [part(COMPUTE, 1, "embed"), part(COMPUTE, 1, joins=("weights",))],
    }
    result = simulate([row], [StageSeconds(segments=segments)])
    assert times(result, COMPUTE) == [(0, 1), (2, 3), (3, 4), (4, 5)]


def test_saved_values_go_to_the_host_and_come_back_beside_compute():
    row = [
        Action(0, F, 0), Action(0, ActionKind.OFFLOAD, 0), Action(0, F, 1),
        Action(0, ActionKind.RELOAD, 0), Action(0, B, 1), Action(0, B, 0),
    ]  # fmt: skip
    segments = {
        F: [part(COMPUTE, 1)],
        B: [part(COMPUTE, 2)],
        ActionKind.OFFLOAD: [part(COPY, 3, "out", overlaps=True)],
        ActionKind.RELOAD: [part(COPY, 3, "in", overlaps=True)],
    }
    result = simulate([row], [StageSeconds(segments=segments)])
    assert times(result, COPY) == [(1, 4), (4, 7)]  # one lane: the way back waits
    assert result.makespan_s == 7
    joined = {**segments, B: [part(COMPUTE, 2, joins=("in",))]}
    with pytest.raises(ConfigError, match=r"0B1 on rank 0 waits for 'in', which stage 0 has not"):
        simulate([row], [StageSeconds(segments=joined)])


def test_interference_slows_only_while_both_are_busy():
    beside = [part(INTER, 4, overlaps=True), part(COMPUTE, 4)]
    # both at half and at two thirds of their speed: the collective has done 4 after 6 seconds,
    # compute 3 then; the last second is its own
    slow = Interference.between(compute=2.0, communication=1.5)
    result = one_rank(F, segments={F: beside}, interference=slow)
    assert times(result, INTER) == [(0, 6)]
    assert times(result, COMPUTE) == [(0, 7)]
    alone = [part(INTER, 4), part(COMPUTE, 4)]
    assert one_rank(F, segments={F: alone}, interference=slow).makespan_s == 8


def test_factors_of_several_busy_lanes_multiply():
    three = [part(INTER, 6, overlaps=True), part(COPY, 6, overlaps=True), part(COMPUTE, 2)]
    factors = {(COMPUTE, INTER): 1.5, (COMPUTE, COPY): 2.0}
    result = one_rank(F, segments={F: three}, interference=Interference(factors))
    assert times(result, COMPUTE) == [(0, 6)]


def test_a_message_slows_sender_and_receiver():
    lists = [
        [Action(0, F, 0), Action(0, ActionKind.SEND_F, 0, 1), Action(0, F, 1)],
        [Action(1, ActionKind.RECV_F, 0, 0), Action(1, F, 1), Action(1, F, 0)],
    ]
    seconds = [StageSeconds(forward_s=1), StageSeconds(forward_s=2)]
    slow = Interference({(COMPUTE, INTER): 2.0})
    result = simulate(lists, seconds, p2p_s=1, interference=slow)
    # the message goes from 1 to 2
    assert times(result, COMPUTE)[:2] == [(0, 1), (0, 2.5)]
    assert [(s.start_s, s.end_s) for s in result.compute_spans(0)] == [(0, 1), (1, 2.5)]
    inside = simulate(lists, seconds, p2p_s=1, p2p_lane={(0, 1): INTRA}, interference=slow)
    assert [s.end_s for s in inside.compute_spans(0)] == [1, 2]


def test_senders_of_one_node_share_its_link():
    send = ActionKind.SEND_F
    lists = [
        [Action(0, F, 0), Action(0, send, 0, 2)],
        [Action(1, F, 0), Action(1, send, 0, 3)],
        [Action(2, ActionKind.RECV_F, 0, 0), Action(2, F, 0)],
        [Action(3, ActionKind.RECV_F, 0, 1), Action(3, F, 0)],
    ]
    stages = [StageSeconds(forward_s=s) for s in (1, 2, 1, 1)]
    nodes = [0, 0, 1, 1]
    result = simulate(lists, stages, p2p_s=2, links=links_of_nodes(nodes))
    # alone from 1 to 2, both at half speed from 2 to 4, then the other alone
    assert times(result, "send 0>2") == [(1, 4)]
    assert times(result, "send 1>3") == [(2, 5)]
    two = simulate(lists, stages, p2p_s=2, links=links_of_nodes(nodes, full_speed=2))
    assert times(two, "send 1>3") == [(2, 4)]
    inside = simulate(lists, stages, p2p_s=2, p2p_lane=INTRA, links=links_of_nodes(nodes))
    assert times(inside, "send 0>2") == [(1, 3)]


def test_factors_of_one_and_wide_links_change_nothing():
    order = compute_order(ScheduleKind.ONE_F_ONE_B, 4, 1, 6)
    edges = [(s, s + 1) for s in range(3)]
    back = [(t, s) for s, t in edges]
    lists = action_lists(order, MeshShape(pp=4), forward_edges=edges, backward_edges=back)
    stages = [StageSeconds(forward_s=0.1 * n, backward_s=0.3) for n in range(1, 5)]
    plain = simulate(lists, stages, p2p_s=0.07)
    same = simulate(
        lists, stages, p2p_s=0.07, interference=Interference.between(1, 1),
        links=[SharedLink(ranks=(0, 1, 2, 3), full_speed=99)],
    )  # fmt: skip
    assert plain.makespan_s == pytest.approx(same.makespan_s)
    assert {(str(s.action), s.lane): pytest.approx((s.start_s, s.end_s)) for s in plain.spans} == {
        (str(s.action), s.lane): (s.start_s, s.end_s) for s in same.spans
    }


def random_segments(rng):
    """A forward, a backward and a reduction with pieces on all lanes."""

    def seconds():
        return rng.randint(0, 16) / 8

    ahead = part(rng.choice([INTRA, INTER]), seconds(), "ahead", overlaps=True)
    forward = [ahead, part(COMPUTE, seconds(), "a"), part(INTRA, seconds(), "sum")]
    forward += [part(COMPUTE, seconds(), "b", joins=("ahead",))]
    if rng.random() < 0.5:
        forward.append(part(COPY, seconds(), "out", overlaps=True))
    backward = [part(COMPUTE, seconds(), "c"), part(INTER, seconds(), "late", overlaps=True)]
    backward += [part(COMPUTE, seconds(), "d", joins=("weights",)), part(INTER, seconds(), "e")]
    unshard = [part(INTER, seconds(), "weights", overlaps=True)]
    reduce = [part(INTER, seconds(), "reduce", overlaps=rng.random() < 0.5)]
    return {
        F: forward,
        B: backward,
        ActionKind.BACKWARD_INPUT: backward,
        ActionKind.BACKWARD_WEIGHT: [part(COMPUTE, seconds(), "w")],
        ActionKind.UNSHARD: unshard,
        ActionKind.REDUCE_GRAD: reduce,
    }


def random_case(rng):
    pp, count = rng.randint(1, 4), rng.randint(1, 5)
    order, num_stages = rng.choice(
        [
            (compute_order(ScheduleKind.GPIPE, pp, 1, count), pp),
            (compute_order(ScheduleKind.ONE_F_ONE_B, pp, 1, count), pp),
            (compute_order(ScheduleKind.INTERLEAVED, pp, 2, count), 2 * pp),
            (eager_1f1b_order([2 * (pp - s) - 1 for s in range(pp)], count), pp),
            (zero_bubble_h1_order(pp, count), pp),
            (zero_bubble_v_order(pp, count), 2 * pp),
        ]
    )
    edges = [(s, s + 1) for s in range(num_stages - 1)]
    if num_stages > 2 and rng.random() < 0.5:
        edges.append((0, num_stages - 1))
    lists = action_lists(
        order, MeshShape(pp=num_stages), forward_edges=edges,
        backward_edges=[(t, s) for s, t in edges], prefetch=rng.randint(0, 2),
        zero_levels=[rng.choice([0, 1, 2, 3]) for _ in range(num_stages)],
    )  # fmt: skip
    stages = [StageSeconds(segments=random_segments(rng)) for _ in range(num_stages)]
    return lists, stages


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_are_simulated_as_by_brute_force(seed, coupled):
    rng = random.Random(seed)
    lists, stages = random_case(rng)
    p2p_s, lane = rng.randint(0, 12) / 8, rng.choice([INTRA, INTER])
    factors, links = {}, ()
    if coupled:
        lanes = [COMPUTE, INTRA, INTER, COPY]
        factors = {(a, b): rng.choice([1, 1.25, 1.5, 2]) for a in lanes for b in lanes}
        nodes = [rank // 2 for rank in range(len(lists))]
        links = links_of_nodes(nodes, full_speed=rng.choice([0.5, 1, 1.5]))
    result = simulate(
        lists, stages, p2p_s=p2p_s, p2p_lane=lane, links=links,
        interference=Interference(factors) if coupled else None,
    )  # fmt: skip
    wanted = brute_force(lists, stages, p2p_s=p2p_s, p2p_lane=lane, factors=factors, links=links)
    found = {}
    for s in result.spans:
        name = (s.rank, s.lane, str(s.action), s.label)
        found.setdefault(name, []).append((s.start_s, s.end_s))
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        for one, other in zip(found[name], expected, strict=True):
            assert one == pytest.approx(tuple(map(float, other)), abs=1e-9), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: part(INTER, -1, "x"), r"segment 'x' on inter: takes -1 seconds"),
        (lambda: part(INTER, float("nan"), "x"), r"takes nan seconds, must be a number"),
        (lambda: part(COMPUTE, 1, "x", overlaps=True), r"only segments on intra, inter, copy over"),
        (lambda: Interference.between(0.5, 1), r"compute beside intra has the factor 0.5, must be"),
        (lambda: SharedLink(ranks=(0,), full_speed=0), r"full_speed 0; the lane must be"),
        (lambda: SharedLink(ranks=(0,), lane=COMPUTE), r"is on lane compute"),
        (lambda: StageSeconds(backward_s=1, weight_s=2), r"weight_s is 2, must be between 0 and"),
        (lambda: simulate([[]], [], p2p_s={(0, 1): -1.0}), r"a message of \(0, 1\) takes -1.0 s"),
        (lambda: simulate([[]], [], p2p_s={(0, 9): 1.0}), r"from stage 0 to 9, but .* 0 stages"),
        (lambda: simulate([[]], [], p2p_lane={(7, 0): INTER}), r"from stage 7 to 0"),
        (lambda: simulate([[]], [], p2p_lane=COMPUTE), r"p2p_lane is compute"),
        (lambda: simulate([[]], [], links=[SharedLink(ranks=(7,))]), r"\(7,\), but .* 1 ranks"),
        (lambda: SharedLink(ranks=(0, 0)), r"a rank stands twice"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_action_given_no_segments_takes_no_time():
    assert one_rank(F, B, segments={F: (), B: [part(COMPUTE, 2)]}).makespan_s == 2
    stage = StageSeconds(
        segments={F: [part(COMPUTE, 3)], B: [part(COMPUTE, 2)]}, segments_at={(B, 0): ()}
    )
    assert simulate([[Action(0, F, 0), Action(0, B, 0)]], [stage]).makespan_s == 3
