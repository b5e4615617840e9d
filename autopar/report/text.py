"""A plan as text for a terminal or a file: who does what, how long, how many bytes, and why.

:func:`render_plan` gives a string without colour, the same everywhere; :func:`print_plan` writes to
a console, in colour where it is one. Numbers are formatted here and nowhere below.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autopar.plan.schedule import compute_order
from autopar.plan.schedule_text import draw_schedule
from autopar.plan.types import MeshShape, Plan, ScheduleKind
from autopar.report.fold import fold_ranks, fold_scopes, fold_words
from autopar.report.tables import (
    collectives_table,
    constraints_table,
    memory_table,
    pairs_table,
    params_table,
    runners_up_table,
    stages_table,
    time_table,
)
from autopar.units import format_bytes, format_time

SCHEDULE_WORDS = {
    ScheduleKind.GPIPE: "GPipe",
    ScheduleKind.ONE_F_ONE_B: "1F1B",
    ScheduleKind.INTERLEAVED: "interleaved 1F1B",
}


def render_plan(
    plan: Plan, *, width: int = 100, param_roles: Mapping[str, str] | None = None
) -> str:
    """The report as plain text.

    Args:
        plan: The plan.
        width: Columns, >= 60.
        param_roles: Parameter name -> words for its split, from
            :func:`autopar.report.param_words.describe_param_splits`. Without them the splits are
            summed up by operator.
    """
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, force_terminal=False, soft_wrap=False
    )
    print_plan(plan, console=console, param_roles=param_roles)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines()) + "\n"


def print_plan(
    plan: Plan,
    *,
    console: Console | None = None,
    param_roles: Mapping[str, str] | None = None,
) -> None:
    """Write the report to a console; without one to standard output, plain if it is no terminal."""
    if console is None and not sys.stdout.isatty():
        sys.stdout.write(render_plan(plan, param_roles=param_roles))
        return
    target = console or Console(highlight=False)
    for title, body in _sections(plan, param_roles, target.width):
        target.print(Text(title, style="bold"), highlight=False)
        target.print(Padding(body, (0, 0, 1, 2)), highlight=False)


def mesh_words(mesh: MeshShape) -> str:
    """The mesh in words.

    >>> mesh_words(MeshShape(pp=2, dp=4))
    'a pipeline of 2 stages x the batch over 4'
    """
    parts = []
    if mesh.num_stages > 1:
        ranks = f" on {mesh.pp} pipeline ranks" if mesh.virtual > 1 else ""
        parts.append(f"a pipeline of {mesh.num_stages} stages{ranks}")
    if mesh.dp > 1:
        parts.append(f"the batch over {mesh.dp}")
    if mesh.tp > 1:
        parts.append(f"operators over {mesh.tp}")
    return " x ".join(parts) or "one device, nothing is split"


def gap_fraction(plan: Plan) -> float | None:
    """Share of the surrogate's objective that the lower bound leaves open; None without a bound."""
    if plan.objective_s <= 0 or plan.bound_s <= 0:
        return None
    return max(0.0, (plan.objective_s - plan.bound_s) / plan.objective_s)


def _sections(
    plan: Plan, roles: Mapping[str, str] | None, width: int
) -> Iterator[tuple[str, RenderableType]]:
    yield "Plan", _header(plan)
    yield "Stages", stages_table(plan)
    yield "Memory of the worst device of each stage, against the limit", memory_table(plan)
    yield "Time of each stage: per micro-batch, and once per step", time_table(plan)
    if any(stage.collectives for stage in plan.stages):
        yield "Collectives of one device in one step", collectives_table(plan)
    yield "Splits", _splits(plan, roles)
    if plan.mesh.pp > 1:
        yield "Schedule (a backward drawn twice as long as a forward)", _schedule(plan, width)
    recompute = _recompute(plan)
    if recompute:
        yield "Recomputed in backward", Text("\n".join(recompute))
    if plan.unruled:
        yield "Operators without a rule (replicated)", _lines(plan.unruled)
    if plan.constraints:
        yield "Constraints in force", constraints_table(plan)
    if plan.runners_up:
        yield "Runners-up", runners_up_table(plan)
    if plan.assumptions:
        yield "Assumptions", _lines(plan.assumptions)
    if plan.provenance:
        yield "Provenance", pairs_table(sorted(plan.provenance.items()))


def _header(plan: Plan) -> Text:
    mesh = plan.mesh
    lines = [
        f"{mesh}: {mesh_words(mesh)}",
        f"{SCHEDULE_WORDS[plan.schedule]}, {_counted(plan.num_microbatches, 'micro-batch', 'es')}"
        + (", batch statistics per micro-batch" if plan.microbatch_statistics else ""),
        f"devices: {mesh.num_ranks} of {plan.num_devices} ({plan.cluster})",
    ]
    idle = range(mesh.num_ranks, plan.num_devices)
    if idle:
        lines.append(f"idle: rank{'s' if len(idle) > 1 else ''} {fold_ranks(idle)}")
    lines.append(f"predicted time of a step: {format_time(plan.time_s)}")
    gap = gap_fraction(plan)
    if gap is not None:
        lines.append(
            f"solver's own estimate {format_time(plan.objective_s)}, lower bound "
            f"{format_time(plan.bound_s)}, gap {100 * gap:.1f} %"
        )
    else:
        lines.append("no lower bound was proved")
    peak = f"predicted peak memory of the worst device: {format_bytes(plan.peak_bytes)}"
    if plan.memory_limit_bytes:
        share = 100 * plan.peak_bytes / plan.memory_limit_bytes
        peak += f" of {format_bytes(plan.memory_limit_bytes)} ({share:.1f} %)"
    lines.append(peak)
    lines.append(f"optimizer assumed: {plan.optimizer}")
    return Text("\n".join(lines))


def _splits(plan: Plan, roles: Mapping[str, str] | None) -> RenderableType:
    parts: list[RenderableType] = []
    if roles:
        parts.append(params_table(fold_words(roles)))
    for axis, table in plan.splits.items():
        if not roles or axis != "tp":
            parts.append(Text(f"over {axis}: {_operator_counts(table)}"))
    return Group(*parts) if parts else Text("everything is replicated")


def _operator_counts(table: Mapping[str, str]) -> str:
    """Operators that are split, counted by the name without its number."""
    split = (
        name for name, text in table.items() if "->" in text and ("S(" in text or "P(" in text)
    )
    counts = Counter(name.rstrip("0123456789").rstrip("_") for name in split)
    return ", ".join(f"{count} x {name}" for name, count in counts.most_common(12)) or "nothing"


def _schedule(plan: Plan, width: int) -> Text:
    mesh = plan.mesh
    order = compute_order(plan.schedule, mesh.pp, mesh.virtual, plan.num_microbatches)
    return Text(draw_schedule(order, max_width=max(40, width - 2)), no_wrap=True)


def _recompute(plan: Plan) -> list[str]:
    lines = []
    for stage in plan.stages:
        if stage.recompute:
            counts = _operator_counts_of(stage.recompute)
            lines.append(
                f"stage {stage.index}: {_counted(len(stage.recompute), 'operator', 's')}: {counts}"
            )
    return lines


def _operator_counts_of(names: Iterable[str]) -> str:
    plain = [n for n in names if "." not in n]
    counts = Counter(n.rstrip("0123456789").rstrip("_") for n in plain)
    dotted = fold_scopes(n for n in names if "." in n)
    return ", ".join([*(f"{c} x {n}" for n, c in counts.most_common(12)), *dotted])


def _lines(lines: Iterable[str]) -> Text:
    return Text("\n".join(f"- {line}" for line in lines))


def _counted(count: int, noun: str, plural: str) -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
