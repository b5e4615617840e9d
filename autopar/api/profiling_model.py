"""What of a model is measured: its operators at the shapes of a rank, and a call around them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median

import torch

from autopar.api.options import as_call
from autopar.capture.tracing import Captured, capture
from autopar.cluster import parse_devices
from autopar.errors import ConstraintError, InfeasibleError
from autopar.runtime.op_times import op_points
from autopar.solver.force import forced_plan
from cost_models.local import local_cluster
from cost_models.measure_meter import Meter
from cost_models.profile import Point, PointKind, Profile
from cost_models.profiled import ProfiledCostModel

logger = logging.getLogger(__name__)

Degrees = Mapping[str, int]
OPS_S = 2.0  # seconds for the repeats of one plan
CALL_LAYERS = (2, 18)  # of the models whose calls are measured: two numbers of parameters
CALL_WIDTH = 16
CALL_RUNS = 15


def degrees_for(size: int) -> tuple[Degrees, ...]:
    """Plans whose local shapes are measured, for ``size`` ranks; usual ones for a single process.

    >>> degrees_for(2)
    ({'tp': 2}, {'dp': 2}, {'pp': 2, 'num_microbatches': 4})
    """
    if size == 1:
        return ({}, {"num_microbatches": 2}, {"num_microbatches": 4})
    found: list[Degrees] = [{"tp": size}, {"dp": size}, {"pp": size, "num_microbatches": 2 * size}]
    half = size // 2
    if size % 2 == 0 and half > 1:
        found += [
            {"dp": half, "tp": 2},
            {"pp": 2, "tp": half, "num_microbatches": 4},
            {"pp": 2, "dp": half, "num_microbatches": 4},
        ]
    return tuple(found)


def model_points(
    build: Callable[[], tuple[torch.nn.Module, object]], meter: Meter
) -> Iterator[tuple[str, Callable[[], list[Point]]]]:
    """For each usual plan its name and what measures its operators; every rank must go through.

    Degrees that the model or its batch do not divide into are left out, and logged.
    """
    model, inputs = build()
    args, kwargs = as_call(inputs, None)
    captured = capture(model, args, kwargs)
    busy = max(1, min(meter.per_node, meter.num_cores))
    for degrees in degrees_for(meter.size):
        name = "operators under " + (
            ", ".join(f"{k}={v}" for k, v in degrees.items()) or "one device"
        )
        yield name, partial(_points, captured, model, (args, kwargs), degrees, meter, busy)


def _points(
    captured: Captured,
    model: torch.nn.Module,
    call: tuple[tuple[object, ...], Mapping[str, object]],
    degrees: Degrees,
    meter: Meter,
    busy: int,
) -> list[Point]:
    try:
        plan = forced_plan(captured.graph, captured.hash, **degrees)  # type: ignore[arg-type]
    except (ConstraintError, InfeasibleError) as error:
        logger.warning("profile: operators under %s are not measured: %s", degrees, error)
        return []
    return op_points(captured, plan, model, call, meter, busy=busy, budget_s=OPS_S)


class _Layers(torch.nn.Module):
    """Many small layers: a call of it is next to nothing but the call itself."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(CALL_WIDTH, CALL_WIDTH) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def call_points(profile: Profile, meter: Meter) -> list[Point]:
    """What a call with its backward costs beyond its programs: each, and for each parameter.

    Two small models are compiled for all ranks, one data rank each, and their steps are timed; what
    their programs cost by ``profile`` is taken off. Every rank must call it.
    """
    found: list[tuple[int, float]] = []
    points: list[Point] = []
    for count in CALL_LAYERS:
        more, num_parameters, total_s, programs_s = _call(count, profile, meter)
        points += more
        found.append((num_parameters, max(0.0, total_s - programs_s)))
    (few, few_s), (many, many_s) = found
    each_s = max(1e-9, (many_s - few_s) / (many - few))
    call_s = max(1e-9, few_s - few * each_s)
    busy = meter.per_node
    for name, time_s in (("call", call_s), ("parameter", each_s)):
        points.append(Point(PointKind.STEP, "float32", (1,), time_s, name=name, busy=busy))
    return points


def _call(count: int, profile: Profile, meter: Meter) -> tuple[list[Point], int, float, float]:
    """Points of a model's operators, its parameters, seconds of its call, of its programs."""
    from autopar.api.compiling import compile as compiled

    model, batch = _Layers(count), {"x": torch.rand(meter.size * 4, CALL_WIDTH)}
    captured = capture(model, (), batch)
    cluster = parse_devices(meter.size, local=local_cluster(profile))
    plan = forced_plan(captured.graph, captured.hash, dp=meter.size, cluster=cluster)
    busy = max(1, min(meter.per_node, meter.num_cores))
    points = op_points(captured, plan, model, ((), batch), meter, busy=busy, budget_s=OPS_S / 4)
    prices = ProfiledCostModel(cluster, profile.with_points(points))
    priced = forced_plan(
        captured.graph, captured.hash, dp=meter.size, cluster=cluster, cost_model=prices
    )
    model = compiled(model, meter.size, batch, plan=plan)

    def step() -> None:
        model(**batch).backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    step()
    times = []
    for _ in range(CALL_RUNS):
        meter.meet()
        times.append(meter.seconds(step))
    programs_s = priced.time_s - max(s.time.optimizer_s for s in priced.stages)
    return points, 2 * count, meter.mean([median(times)], has_part=True)[0], programs_s
