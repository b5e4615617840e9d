"""What one row of the zoo's table proves, and how it is found out.

* *program*: the captured program equals the model run by torch in the model's own dtype, with
  dropouts off (torch draws other bits): loss, outputs, gradients, buffers;
* *coverage*: operators without a rule, and arithmetic that every data rank repeats although its
  operators have rules;
* *plans*: data, tensor and pipeline parallelism, all of them together, and what the solver chooses
  for four and eight devices, on simulated ranks with the dropouts that the model has by default, in
  float64 throughout, equal one device to 1e-10.

A refusal by name is a result where :data:`REFUSALS` lists it. If it is one of micro-batches, the
pipeline must pass with one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import autopar
from autopar.cluster import parse_devices
from autopar.errors import CaptureError, ConstraintError
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.report.coverage import Coverage, coverage
from autopar.runtime.equivalence import verify_programs
from autopar.sharding.build import localize
from autopar.solver.constraints import Constraints
from autopar.solver.force import ProportionalCostModel, forced_plan
from autopar.solver.search import solve
from tests.equivalence.harness import Problem, actions_for, problem_of
from tests.zoo_models import build

FORCED: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "dp 4": {"dp": 4},
        "tp 4": {"tp": 4},
        "pp 2, 4 micro-batches": {"pp": 2, "num_microbatches": 4},
        "dp 2, tp 2, pp 2, ZeRO 3": {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 2, "zero": 3},
    }
)
"""Plans of given degrees, by heading."""
SOLVED: Mapping[str, int] = MappingProxyType({"solver, 4": 4, "solver, 8": 8})
"""Devices that the solver plans for on its own, by heading."""
PROGRAM = "program"
REFUSALS: Mapping[str, str] = MappingProxyType(
    {
        "CLIP": r"aten\.mm\.\S+ \(modeling_clip\.py.* mixes samples",
        "ResNet": r"batch_norm \(modeling_resnet\.py.* mixes samples",
        "wav2vec2 (time mask on)": r"modeling_wav2vec2\.py:\d+ in _compute_mask_indices",
    }
)
"""Model -> what the refusal that it may meet says."""
MAX_UNRULED_OPS, MAX_WHOLE_FLOPS = 0.02, 0.02


@dataclass(frozen=True, slots=True)
class Cell:
    """One result.

    Attributes:
        text: ``"ok"``, the plan's mesh, ``"refused"`` or ``"FAILED"``.
        detail: What a refusal or failure says.
        passed: False for a failure.
    """

    text: str
    detail: str = ""
    passed: bool = True


@dataclass(slots=True)
class Row:
    """All results of one model.

    Attributes:
        name: Of the model.
        cells: By heading.
        coverage: Of its program; None if it was not captured.
        seconds: Wall-clock seconds.
    """

    name: str
    cells: dict[str, Cell] = field(default_factory=dict)
    coverage: Coverage | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(cell.passed for cell in self.cells.values()) and not self.replicated

    @property
    def replicated(self) -> str:
        """What is replicated beyond the limits, or ``""``."""
        found = self.coverage
        if found is None:
            return ""
        if found.unruled_flops_share > MAX_UNRULED_OPS or found.unruled_share > MAX_UNRULED_OPS:
            return f"without a rule: {', '.join(found.unruled[:3])}"
        if found.whole_flops_share > MAX_WHOLE_FLOPS:
            return f"repeated on data ranks: {', '.join(op for op, _ in found.whole[:3])}"
        return ""


def make_row(name: str) -> Row:
    """Everything that the zoo knows about one model."""
    begin = time.monotonic()
    row = Row(name)
    row.cells[PROGRAM] = _program(name)
    if row.cells[PROGRAM].text == "ok":
        try:
            problem = problem_of(*build(name))
            row.coverage = coverage(problem.graph, problem.signatures)
        except Exception as error:  # any fault is this row's, and the next row is made
            row.cells[PROGRAM] = _failed(error)
        else:
            for heading, degrees in FORCED.items():
                row.cells[heading] = _forced(name, problem, degrees)
            for heading, devices in SOLVED.items():
                row.cells[heading] = _solved(problem, devices)
    row.seconds = time.monotonic() - begin
    return row


def _failed(error: Exception) -> Cell:
    return Cell("FAILED", f"{type(error).__name__}: {error}", passed=False)


def _refused(name: str, error: Exception) -> Cell:
    expected = REFUSALS.get(name)
    if expected is None or not re.search(expected, str(error), re.DOTALL):
        return _failed(error)
    return Cell("refused", str(error))


def _program(name: str) -> Cell:
    """The captured program against torch."""
    try:
        report = autopar.verify(*_model_and_batch(name), dp=1, tp=1, pp=1)
    except CaptureError as error:
        return _refused(name, error)
    except Exception as error:
        return _failed(error)
    if not report.eager_worst:
        return Cell("FAILED", report.note, passed=False)
    return Cell("ok")


def _model_and_batch(name: str) -> tuple[object, int, object]:
    model, batch = build(name, dropout=False)
    return model, 1, batch


def _forced(name: str, problem: Problem, degrees: Mapping[str, int]) -> Cell:
    try:
        _run(problem, forced_plan(problem.graph, "zoo", **degrees))
    except ConstraintError as error:
        refusal = _refused(name, error)
        if "num_microbatches" not in degrees or not refusal.passed:
            return refusal
        fewer = _forced(name, problem, {**degrees, "num_microbatches": 1})
        return Cell("ok with 1", refusal.detail) if fewer.text == "ok" else fewer
    except Exception as error:
        return _failed(error)
    return Cell("ok")


def _solved(problem: Problem, devices: int) -> Cell:
    try:
        plan, _ = solve(
            problem.graph,
            "zoo",
            parse_devices(f"{devices}:cpu"),
            constraints=Constraints(),
            optimizer="adamw",
            memory_limit_bytes=None,
            cost_model=ProportionalCostModel(),
        )
        _run(problem, plan)
    except Exception as error:
        return _failed(error)
    micro = f", {plan.num_microbatches} micro-batches" if plan.num_microbatches > 1 else ""
    return Cell(f"{plan.mesh}{micro}")


def _run(problem: Problem, plan: Plan) -> None:
    """One step under a plan on simulated ranks against one device.

    Raises:
        AutoparError: They differ, or the plan can't be run.
    """
    programs = localize(problem.graph, decisions_of(plan, problem.graph), problem.signatures)
    zero = [stage.zero_level for stage in plan.stages]
    actions = actions_for(programs, plan.mesh, plan.num_microbatches, plan.schedule, zero)
    verify_programs(problem.graph, programs, plan.mesh, actions, problem.values)
