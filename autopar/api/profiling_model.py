"""What of a model is measured: its operators at the shapes of a rank, and a call around them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import TypeVar

import torch

from autopar.api.options import as_call
from autopar.capture.tracing import Captured, capture
from autopar.errors import ConstraintError, InfeasibleError
from autopar.runtime.driving import Driver
from autopar.runtime.module import close, state_of
from autopar.runtime.op_times import op_points
from autopar.runtime.requests import Request
from autopar.solver.force import forced_plan
from cost_models.measure_meter import Meter
from cost_models.profile import Point, PointKind

logger = logging.getLogger(__name__)

T = TypeVar("T")
Degrees = Mapping[str, int]
OPS_S = 2.0  # seconds for the repeats of one plan
CALL_LAYERS = (2, 18)  # of the models whose calls are measured: two numbers of parameters
CALL_WIDTH = 16
CALL_RUNS = 15


def degrees_for(size: int) -> tuple[Degrees, ...]:
    """Plans whose local shapes are measured, for ``size`` ranks; usual ones for a single process.

    >>> degrees_for(2)
    ({'tp': 2}, {'dp': 2}, {'dp': 2, 'zero': 3}, {'pp': 2, 'num_microbatches': 4})
    """
    if size == 1:
        return ({}, {"num_microbatches": 2}, {"num_microbatches": 4})
    found: list[Degrees] = [
        {"tp": size}, {"dp": size}, {"dp": size, "zero": 3},
        {"pp": size, "num_microbatches": 2 * size},
    ]  # fmt: skip
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


@dataclass(slots=True)
class _Clocked:
    """A driver that notes how long the programs of a step run, waiting for other ranks included."""

    driver: Driver
    clock: Callable[[], float]
    seconds: float = 0.0

    def close(self) -> None:
        """Close the driver."""
        self.driver.close()

    def run(self, running: Generator[Request, object, T]) -> T:
        """Run to the end; gives what the generator returns."""
        started_s = self.clock()
        try:
            return self.driver.run(running)
        finally:
            self.seconds += self.clock() - started_s


def call_points(meter: Meter) -> Iterator[Point]:
    """What a call with its backward costs beyond its programs: each, and for each parameter.

    Two small models are compiled for all ranks, and what of their steps falls outside of their
    programs is timed: fetching the batch, agreeing on the call, handing over gradients in the form
    of the parameters. Every rank must call it.
    """
    (few, few_s), (many, many_s) = [_call(count, meter) for count in CALL_LAYERS]
    each_s = max(1e-9, (many_s - few_s) / (many - few))
    call_s = max(1e-9, few_s - few * each_s)
    for name, time_s in (("call", call_s), ("parameter", each_s)):
        yield Point(
            PointKind.STEP, "float32", (1,), time_s, name=name, busy=meter.per_node,
            repeats=CALL_RUNS,
        )  # fmt: skip


def _call(count: int, meter: Meter) -> tuple[int, float]:
    """Parameters of a model of so many layers, and seconds of its call beyond its programs."""
    from autopar.api.compiling import compile as compiled

    model, batch = _Layers(count), {"x": torch.rand(meter.size * 4, CALL_WIDTH)}
    captured = capture(model, (), batch)
    plan = forced_plan(captured.graph, captured.hash, dp=meter.size)
    model = compiled(model, meter.size, batch, plan=plan)

    def step() -> None:
        model(**batch).backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    step()
    session = state_of(model).session
    assert session is not None, "a model that was called has one"
    clocked = session.driver = _Clocked(session.driver, meter.clock)
    times = []
    for _ in range(CALL_RUNS):
        meter.meet()
        clocked.seconds = 0.0
        started_s = meter.clock()
        step()
        times.append(max(0.0, meter.clock() - started_s - clocked.seconds))
    close(model)
    middle = mean(times) if meter.takes_turns(meter.per_node) else median(times)
    return 2 * count, meter.mean([middle], has_part=True)[0]
