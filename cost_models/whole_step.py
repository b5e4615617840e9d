"""A simulated plan with what its figures do not place, so that it ends when the step does.

:func:`~cost_models.plan_simulation.simulate_plan` has what stages do: passes, messages, reductions.
The step that is printed has more: sums and outputs that all ranks get, seconds outside of programs
on a host that was measured (calls, shared cores, waiting for slower ranks), an optimizer that
begins when the last rank is done, pipelines that wait for each other. All of it is a remainder
here, drawn after the passes and before what is last, though in a run it is spread over the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.plan.actions import ActionKind
from autopar.plan.types import Plan
from cost_models.plan_simulation import simulate_plan
from cost_models.spans import Simulation, Span

SYNC = "sums, losses and outputs on all ranks"
HOST = "calls, shared cores, waiting for slower ranks (spread over the step)"
OTHERS = "waiting for other pipelines"
SAME = 1e-9  # of the step: less is the rounding of sums
_LAST = frozenset({ActionKind.OPTIMIZER})
_LAST_OF_PIPELINES = frozenset({ActionKind.REDUCE_GRAD, ActionKind.OPTIMIZER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """Seconds of a rank in which none of its programs runs.

    Attributes:
        rank: Pipeline rank.
        words: What they are.
        start_s: Start.
        end_s: End.
    """

    rank: int
    words: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """A step up to its end.

    Attributes:
        simulation: What stages do; its makespan is the step.
        remainders: What else the step takes, in order.
    """

    simulation: Simulation
    remainders: tuple[Remainder, ...]


def whole_step(plan: Plan) -> WholeStep:
    """The step of a plan, ``time_s`` long.

    A plan has one figure for the messages of a stage, where the step had one for each. Where that
    makes the passes longer than the step leaves them, they are drawn shorter, all alike.

    Args:
        plan: With figures of its stages; without a predicted time it is left as it is simulated.
    """
    simulation = simulate_plan(plan)
    if plan.time_s <= 0 or simulation.makespan_s <= 0:
        return WholeStep(simulation=simulation, remainders=())
    kinds = _LAST_OF_PIPELINES if plan.pipelines else _LAST
    first = [s for s in simulation.spans if s.action.kind not in kinds]
    last = [
        [s for s in row if s.rank == rank and s.action.kind in kinds]
        for rank, row in enumerate(simulation.by_rank)
    ]
    lengths = [max(s.end_s for s in row) - row[0].start_s if row else 0.0 for row in last]
    ends = [0.0] * simulation.num_ranks
    for span in first:
        for rank in (span.rank, span.rank if span.peer is None else span.peer):
            ends[rank] = max(ends[rank], span.end_s)
    if plan.pipelines:  # each ends with the step, having waited for the others
        begins = [plan.time_s - length_s for length_s in lengths]
    else:  # a step of the optimizer comes after the last rank's gradients
        ends = [max(ends)] * len(ends)
        begins = [plan.time_s - max(lengths)] * len(ends)
    scale = min(1.0, *(b / e for b, e in zip(begins, ends, strict=True) if e > 0))
    spans = [s._replace(start_s=s.start_s * scale, end_s=s.end_s * scale) for s in first]
    for row, begin_s in zip(last, begins, strict=True):
        spans += [_moved(s, begin_s - row[0].start_s) for s in row]
    spans.sort(key=lambda s: s.start_s)
    return WholeStep(
        simulation=replace(simulation, spans=tuple(spans), makespan_s=plan.time_s),
        remainders=tuple(
            part
            for rank, (end_s, begin_s) in enumerate(zip(ends, begins, strict=True))
            for part in _remainders(plan, rank, end_s * scale, begin_s)
        ),
    )


def _moved(span: Span, by_s: float) -> Span:
    return span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s)


def _remainders(plan: Plan, rank: int, start_s: float, end_s: float) -> list[Remainder]:
    """What fills the seconds from a rank's last pass to what comes last."""
    if plan.pipelines:
        parts = [(OTHERS, end_s - start_s)]
    else:
        sums_s = max(
            sum(plan.stages[s].time.sync_s for s in plan.mesh.stages_of(r))
            for r in range(plan.mesh.pp)
        )
        sums_s = min(sums_s, end_s - start_s)
        parts = [(SYNC, sums_s), (HOST, end_s - start_s - sums_s)]
    found = []
    for words, seconds in parts:
        if seconds > SAME * plan.time_s:
            found.append(
                Remainder(rank=rank, words=words, start_s=start_s, end_s=start_s + seconds)
            )
            start_s += seconds
    return found
