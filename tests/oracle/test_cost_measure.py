"""The measuring half of the cost models, which imports torch."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from autopar.capture.tracing import capture
from autopar.cluster import parse_devices
from autopar.errors import ConfigError
from autopar.ir.graph import OutputKind
from autopar.plan.decisions import decisions_of
from autopar.runtime.op_alone import operator_points, unseen_operators
from autopar.runtime.op_times import op_points
from autopar.sharding.build import localize, signatures_of
from autopar.solver.force import forced_plan
from cost_models.local import local_cluster
from cost_models.measure import local_gpu_cluster, local_meter, measure_local_device
from cost_models.measure_compute import first_tasks
from cost_models.measure_meter import MAX_REPEATS, Meter, Task
from cost_models.profile import PointKind, Profile, dump_profile, parse_profile
from cost_models.profiled import ProfiledCostModel, Source, fit_profile
from cost_models.storage import view_strides
from tests.zoo import build


def test_a_short_measurement_gives_a_usable_profile():
    seen: list[float] = []
    threads = torch.get_num_threads()
    profile = measure_local_device(0.3, lambda _, share: seen.append(share))
    assert torch.get_num_threads() == threads
    assert profile.of_kind(PointKind.LAUNCH)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert parse_profile(dump_profile(profile)) == profile
    device = local_cluster(profile).devices[0]
    # any CPU of the last ten years, busy or not
    assert 1e8 < device.peak_flops_for("float32") < 1e13
    assert 1e-8 < device.launch_overhead_s < 1e-3


def ticking(step_s: float):
    """A clock that goes on by ``step_s`` whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def test_after_the_budget_only_what_everything_is_fitted_to_is_measured():
    # a second for each reading of the clock: the time is up at once
    profile = measure_local_device(1.0, clock=ticking(1.0))
    assert not profile.is_complete
    least = list(first_tasks(torch.device("cpu")))
    assert [p.key for p in profile.points] == [t.key for t in least]
    fit_profile(profile)  # enough for the fit


def test_a_larger_budget_measures_more_and_stops_in_time():
    few, more = (measure_local_device(b, clock=ticking(0.1)) for b in (20.0, 30.0))
    least = len(list(first_tasks(torch.device("cpu"))))
    assert least < len(few.points) < len(more.points)
    assert not few.is_complete
    assert not more.is_complete


def test_a_run_that_was_cut_short_is_gone_on_with():
    kept: list[Profile] = []

    class Cut(Exception):  # noqa: N818
        pass

    def cut(profile: Profile) -> None:
        kept.append(profile)
        if len(kept) == 5:
            raise Cut

    with pytest.raises(Cut):
        measure_local_device(1.0, keep=cut, clock=ticking(1.0))
    assert len(kept[-1].points) == 5
    assert not kept[-1].is_complete
    resumed = measure_local_device(1.0, known=kept[-1], clock=ticking(1.0))
    assert resumed.points[:5] == kept[-1].points  # not measured again
    assert len(resumed.points) == len(list(first_tasks(torch.device("cpu"))))


def test_points_are_medians_with_their_spread():
    seconds = itertools.cycle([1.0, 1.0, 1.0, 9.0])
    now = [0.0]

    def clock() -> float:
        return now[0]

    def run() -> None:
        now[0] += next(seconds)

    meter = Meter(device=torch.device("cpu"), clock=clock, point_s=40.0)
    point = meter.measure(Task(kind=PointKind.LAUNCH, prepare=lambda: run))
    assert point.time_s == 1.0
    assert point.spread_s > 0
    assert point.repeats == MAX_REPEATS


def test_ranks_that_take_turns_are_measured_by_the_mean_of_the_middle_half():
    # 2 to warm up and to see how long it takes, then 8 of which the extremes are left out
    seconds = iter([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 90.0, 90.0])
    now = [0.0]

    def run() -> None:
        now[0] += next(seconds)

    meter = Meter(
        device=torch.device("cpu"), per_node=1, num_cores=0, clock=lambda: now[0], point_s=1.0
    )
    point = meter.measure(Task(kind=PointKind.LAUNCH, prepare=lambda: run, least=8))
    assert point.repeats == 8
    assert point.time_s == 3.0


def test_sums_of_gradients_are_measured_where_there_are_several_micro_batches():
    model, batch = build("gpt2", layers=1)
    captured = capture(model, (), batch)
    meter = replace(local_meter(), clock=ticking(1e-6))
    trained = sum(p.numel() for p in model.parameters())
    gradients = {o.target for o in captured.graph.outputs_of(OutputKind.GRAD)}  # some of slices
    found = {}
    for count in (1, 4):
        plan = forced_plan(captured.graph, captured.hash, num_microbatches=count)
        points = op_points(captured, plan, model, ((), batch), meter, busy=1, budget_s=1e-6)
        found[count] = [p.sizes for p in points if p.kind is PointKind.ACCUMULATE]
        (step,) = (p for p in points if p.name == "executor")
        assert step.sizes[0] > 50 * count
    assert found == {1: [], 4: [(len(gradients), 4 * trained)]}


def test_operators_of_a_model_are_priced_as_they_were_measured_under_every_plan_of_the_profile():
    model, batch = build("gpt2", layers=1)
    captured = capture(model, (), batch)
    meter = replace(local_meter(), clock=ticking(1e-6))
    profile = measure_local_device(1.0, clock=ticking(1.0))
    for degrees in ({}, {"tp": 2}, {"pp": 2, "num_microbatches": 4}):
        plan = forced_plan(captured.graph, captured.hash, **degrees)
        points = op_points(captured, plan, model, ((), batch), meter, busy=1, budget_s=1e-6)
        names = {p.name for p in points if p.kind is PointKind.OP}
        assert names
        found = profile.with_points(points)
        size = plan.mesh.num_ranks
        prices = ProfiledCostModel(parse_devices(size, local=local_cluster(found)), found)
        local = localize(
            captured.graph, decisions_of(plan, captured.graph), signatures_of(captured.graph)
        )
        num_measured = 0
        for stage in local.stages:
            for graph in (stage.unshard, stage.forward, stage.backward, stage.reduce):
                metas = graph.metas()
                for node in graph.nodes:
                    if node.op == "getitem" or node.op.startswith("comm."):
                        continue
                    operands = [metas[n] for n in node.refs()]
                    price = prices.op_price(node.op, node.args, operands, node.meta)
                    assert price.source is Source.MEASURED, (degrees, node.op, operands)
                    num_measured += 1
        assert num_measured > 50


def test_operators_that_a_profile_lacks_are_measured_by_themselves():
    model, batch = build("llama", layers=1)
    graph = capture(model, (), batch).graph
    every = unseen_operators(graph, ())
    assert len(every) > 10
    known = {n.op for n in every[:3]}
    rest = unseen_operators(graph, known)
    assert {n.op for n in rest} == {n.op for n in every} - known
    meter = local_meter(clock=ticking(1e-5))
    points = operator_points(graph, rest[:6], meter, budget_s=1e9)
    assert [p.name.partition("(")[0] for p in points] == [n.op for n in rest[:6]]
    assert operator_points(graph, rest, local_meter(clock=ticking(1.0)), budget_s=0.5) == []


def test_a_measurement_needs_time():
    with pytest.raises(ConfigError, match="budget_s is 0 and num_threads 1; the first must be"):
        measure_local_device(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_gpus_has_no_gpu_cluster():
    assert local_gpu_cluster() is None


def _random_view(rng: random.Random) -> tuple[torch.Tensor, list[int]]:
    shape = [rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, 4))]
    x = torch.empty(shape)
    for _ in range(rng.randint(0, 3)):
        match rng.choice(["permute", "slice", "expand", "select"]):
            case "permute":
                x = x.permute(rng.sample(range(x.dim()), x.dim()))
            case "slice":
                dim = rng.randrange(x.dim()) if x.dim() else 0
                if x.dim() and x.shape[dim] > 1:
                    x = x.narrow(dim, 0, x.shape[dim] - 1)
            case "expand":
                x = x.expand([3 if s == 1 else s for s in x.shape])
            case "select" if x.dim() > 1:
                x = x.select(rng.randrange(x.dim()), 0)
    sizes, rest = [], x.numel()
    while rest > 1:
        factors = [f for f in range(1, rest + 1) if rest % f == 0]
        sizes.append(rng.choice(factors))
        rest //= sizes[-1]
    return x, sizes or [1]


def test_strides_of_views_are_those_of_torch():
    rng = random.Random(0)
    num_views = num_copies = 0
    for _ in range(3000):
        x, sizes = _random_view(rng)
        expected: tuple[int, ...] | None
        try:
            expected = x.view(sizes).stride()
        except RuntimeError:
            expected = None
        found = view_strides(tuple(x.shape), x.stride(), sizes)
        assert found == expected, (tuple(x.shape), x.stride(), sizes)
        num_views += expected is not None
        num_copies += expected is None
    assert min(num_views, num_copies) > 100
