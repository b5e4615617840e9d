"""A plan as text for a terminal or a file: who does what, how long, how many bytes, and why.

:func:`render_plan` gives a string without colour; :func:`print_plan` writes it, with bold titles on
a terminal. Lines are laid out here for a width and nothing wraps them again. Numbers are formatted
here and nowhere below.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import TextIO

from autopar.ir.graph import Graph
from autopar.plan.explain import explain_plan
from autopar.plan.level_words import stages_in_words
from autopar.plan.time_terms import HOST_NOTE
from autopar.plan.types import DP_AXIS, MB_AXIS, TP_AXIS, MeshShape, Plan
from autopar.report.facts import ZERO_WORDS, Facts, facts_of, split_counts
from autopar.report.fold import fold_ranks
from autopar.report.layout import Lines, bullets, indented, pairs, paragraph
from autopar.report.pipelines import cost_words, pipeline_sections
from autopar.report.precision import precision_lines
from autopar.report.recompute import recompute_summary
from autopar.report.schedule import SCHEDULE_WORDS, schedule_lines, schedule_title
from autopar.report.tables import (
    collectives_table,
    constraints_table,
    devices_memory_table,
    memory_table,
    params_table,
    runners_up_table,
    shares_table,
    stage_collectives_table,
    stages_table,
    time_table,
)
from autopar.units import format_bytes, format_time

DEFAULT_WIDTH = 100
LEAST_WIDTH = 60
INDENT = 2


def render_plan(plan: Plan, *, width: int | None = None, graph: Graph | None = None) -> str:
    """The report as plain text; no line is longer than the width.

    Args:
        plan: The plan.
        width: Columns, at least 60. Left out: those of the terminal, or 100 where there is none.
        graph: The graph that the plan was made for. With it parameters and what is recomputed are
            told by the model's own names.
    """
    columns = max(LEAST_WIDTH, terminal_width() if width is None else width)
    lines: Lines = []
    if plan.pipelines:
        sections = pipeline_sections(plan, columns - INDENT)
    else:
        sections = _sections(plan, facts_of(plan, graph), columns - INDENT)
    for title, body in sections:
        lines += [*([""] if lines else []), *paragraph(title, columns), *indented(body, INDENT)]
    return "\n".join(lines) + "\n"


def print_plan(
    plan: Plan,
    *,
    width: int | None = None,
    graph: Graph | None = None,
    file: TextIO | None = None,
) -> None:
    """Write the report to a file, standard output if left out; titles are bold on a terminal."""
    target = sys.stdout if file is None else file
    text = render_plan(plan, width=width, graph=graph)
    target.write(bold_titles(text) if target.isatty() else text)


def bold_titles(text: str) -> str:
    """The text with its titles, the lines that are not indented, in bold."""
    return "".join(
        f"\033[1m{line}\033[0m\n" if line and not line.startswith(" ") else f"{line}\n"
        for line in text.splitlines()
    )


def terminal_width() -> int:
    """Columns of the terminal (or the variable COLUMNS); 100 where there is none."""
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns


def mesh_words(mesh: MeshShape, cut: str = "the batch") -> str:
    """The mesh in words.

    Args:
        mesh: The mesh.
        cut: What data ranks split.

    >>> mesh_words(MeshShape(pp=2, dp=4))
    'a pipeline of 2 stages x the batch over 4'
    """
    parts = []
    if mesh.num_stages > 1:
        ranks = f" on {mesh.pp} pipeline ranks" if mesh.virtual > 1 else ""
        parts.append(f"a pipeline of {mesh.num_stages} stages{ranks}")
    if mesh.dp > 1:
        parts.append(f"{cut} over {mesh.dp}")
    if mesh.tp > 1:
        parts.append(f"operators over {mesh.tp}")
    return " x ".join(parts) or "one device, nothing is split"


def gap_fraction(plan: Plan) -> float | None:
    """Share of the predicted time that the lower bound leaves open; None without a bound."""
    if plan.time_s <= 0 or plan.bound_s <= 0:
        return None
    return max(0.0, (plan.time_s - plan.bound_s) / plan.time_s)


def binding_lines(plan: Plan, width: int) -> Lines:
    """What the plan is near the limit of: memory, time, links."""
    return bullets((item.text for item in explain_plan(plan).binding), width)


def _sections(plan: Plan, facts: Facts, width: int) -> Iterator[tuple[str, Lines]]:
    yield "Plan", _header(plan, facts, width)
    yield "What binds", binding_lines(plan, width)
    yield "Stages", stages_table(plan, width)
    yield "Memory of a device, by stage", _memory(plan, width)
    yield "Time by stage: one micro-batch, and once per step", _time(plan, width)
    if any(stage.collectives for stage in plan.stages):
        yield "Collectives of one device in one step", _collectives(plan, width)
    yield "Splits", _splits(plan, facts, width)
    if plan.precision is not None:
        yield f"Precision {plan.precision}", precision_lines(plan, width)
    if plan.mesh.pp > 1:
        yield schedule_title(plan), schedule_lines(plan, width)
    if facts.recompute:
        yield "Recomputed in backward", _recompute(facts, width)
    if plan.unruled:
        yield "Operators without a rule (replicated)", bullets(plan.unruled, width)
    if plan.constraints:
        yield "Constraints in force", constraints_table(plan, width)
    if plan.runners_up:
        yield "Runners-up", _runners_up(plan, width)
    if plan.assumptions:
        yield "Assumptions", bullets(plan.assumptions, width)
    if plan.provenance:
        yield "Provenance", pairs(sorted(plan.provenance.items()), width)


def _cut_words(facts: Facts) -> str:
    """What data ranks split: the batch, or the dim that stands for a batch of one sample."""
    dims = {
        name: by_axis[DP_AXIS] for name, by_axis in facts.arguments.items() if DP_AXIS in by_axis
    }
    if not dims or 0 in dims.values():
        return "the batch"
    return " and ".join(
        f"dim {dim} of {', '.join(n for n in dims if dims[n] == dim)}"
        for dim in sorted(set(dims.values()))
    )


def _header(plan: Plan, facts: Facts, width: int) -> Lines:
    mesh = plan.mesh
    microbatches = _counted(plan.num_microbatches, "micro-batch", "es")
    rows = [
        ("mesh", f"{mesh}: {mesh_words(mesh, _cut_words(facts))}"),
        (
            "schedule",
            f"{SCHEDULE_WORDS[plan.schedule]}, {microbatches}"
            + (f", warm-up of {', '.join(map(str, plan.warmup))}" if plan.warmup else "")
            + (", batch statistics per micro-batch" if plan.microbatch_statistics else ""),
        ),
        ("devices", f"{mesh.num_ranks} of {plan.num_devices} ({plan.cluster})"),
    ]
    idle = range(mesh.num_ranks, plan.num_devices)
    if idle:
        rows.append(("idle", f"rank{'s' if len(idle) > 1 else ''} {fold_ranks(idle)}"))
    rows.append(("time", f"{format_time(plan.time_s)} per step, predicted"))
    gap = gap_fraction(plan)
    if gap is None:
        rows.append(("bound", "no lower bound was proved"))
    else:
        least = format_time(plan.bound_s)
        text = f"no searched plan takes less than {least}: gap {100 * gap:.1f} %"
        if plan.model_gap > 0:
            text += f" ({100 * plan.model_gap:.1f} % among the solver's own estimates)"
        rows.append(("bound", text))
    cost = cost_words(plan)
    if cost:
        rows.append(("cost", cost))
    peak = f"{format_bytes(plan.peak_bytes)} at the peak of the worst device"
    if plan.memory_limit_bytes:
        share = 100 * plan.peak_bytes / plan.memory_limit_bytes
        peak += f", {share:.1f} % of the limit of {format_bytes(plan.memory_limit_bytes)}"
    rows.append(("memory", f"{peak}, predicted"))
    if plan.peak_at:
        rows.append(("peak", plan.peak_at))
    rows += [("to the host", text) for text in offload_words(plan)]
    if plan.mode == "train":
        rows.append(("optimizer", f"{plan.optimizer}, assumed{_copies(plan)}"))
    return pairs(rows, width)


def offload_words(plan: Plan) -> list[str]:
    """What stages keep in host memory of a micro-batch; stages that do alike in one line."""
    found: dict[str, list[int]] = {}
    for stage in plan.stages:
        if stage.offload:
            time = stage.time
            text = (
                f"{format_bytes(stage.offload_bytes)} of activations per micro-batch and device, "
                f"{format_time(time.offload_s)} there and {format_time(time.fetch_s)} back, "
                "beside computing"
            )
            found.setdefault(text, []).append(stage.index)
    return [f"{stages_in_words(stages)}: {text}" for text, stages in found.items()]


def _copies(plan: Plan) -> str:
    """Where the optimizer's state is, if it is not on the devices."""
    if not plan.offload:
        return ""
    copy_s = max((stage.time.copy_s for stage in plan.stages), default=0.0)
    return f"; its state in host memory, copied both ways in {format_time(copy_s)} of a step"


def _memory(plan: Plan, width: int) -> Lines:
    lines = memory_table(plan, width)
    if plan.mesh.virtual > 1:
        lines += ["", *devices_memory_table(plan, width)]
    return lines


def _time(plan: Plan, width: int) -> Lines:
    lines = time_table(plan, width)
    if any(s.time.forward_comm_s or s.time.backward_comm_s for s in plan.stages):
        lines += paragraph("F comm and B comm are the parts of F and B in collectives.", width)
    shares = shares_table(plan, width)
    if shares:
        title = f"Where the {format_time(plan.time_s)} of a step go:"
        note = "Per step: gradients reduced, parameters gathered, losses summed. Waiting: the rest"
        if plan.mesh.pp > 1:
            note += ", for other stages (bubbles), for messages that nothing hides"
        lines += ["", title, *shares]
        lines += paragraph(f"{note}{_host_words(plan)}.", width)
    return lines


def _host_words(plan: Plan) -> str:
    """What is waited for on a machine whose host was measured."""
    is_told = any(HOST_NOTE in text for text in plan.assumptions)
    return ", for shared cores and slower ranks" if is_told else ""


def _collectives(plan: Plan, width: int) -> Lines:
    lines = collectives_table(plan, width)
    if len({stage.collectives for stage in plan.stages}) > 1:
        lines += ["", "By stage:", *stage_collectives_table(plan, width)]
    return lines


def _splits(plan: Plan, facts: Facts, width: int) -> Lines:
    lines: Lines = []
    for text in [*_argument_words(plan, facts), *_operator_words(plan, facts), *_zero_words(plan)]:
        lines += paragraph(text, width, indent="  ", first="")
    if facts.parameters:
        lines += ["", *params_table(facts.parameters, width)]
        if facts.num_operators is None:
            lines += paragraph("Parameters that are not listed are replicated over tp.", width)
    return lines or ["everything is replicated"]


def _argument_words(plan: Plan, facts: Facts) -> Iterator[str]:
    """Which call arguments are cut, along which dim, into what."""
    parts = {
        MB_AXIS: _counted(plan.num_microbatches, "micro-batch", "es"),
        DP_AXIS: _counted(plan.mesh.dp, "data rank", "s"),
    }
    groups: dict[str, list[str]] = {}
    for name, dims in facts.arguments.items():
        by_dim: dict[int, list[str]] = {}
        for axis, dim in dims.items():
            if axis != DP_AXIS or plan.mesh.dp > 1:
                by_dim.setdefault(dim, []).append(axis)
        text = "; ".join(
            f"dim {dim} in {' x '.join(parts[a] for a in sorted(axes, reverse=True))}"
            for dim, axes in by_dim.items()
        )
        groups.setdefault(text, []).append(name)
    for text, found in groups.items():
        yield f"{', '.join(found)}: {text}"
    if facts.whole_arguments:
        yield f"{', '.join(facts.whole_arguments)}: whole on every rank"
    together: dict[tuple[int, ...], list[str]] = {}
    for name, stages in facts.readers.items():
        together.setdefault(stages, []).append(name)
    for stages, found in together.items():
        places = " and ".join(map(str, stages)) if len(stages) < 3 else ", ".join(map(str, stages))
        words = f"stage{'s' if len(stages) > 1 else ''} {places}" if stages else "no stage"
        yield f"{', '.join(found)}: read by {words}"


def _operator_words(plan: Plan, facts: Facts) -> Iterator[str]:
    """How many operators each axis splits."""
    words = {MB_AXIS: "micro-batches (mb)", DP_AXIS: "data ranks (dp)", TP_AXIS: "tp ranks"}
    ranks = {DP_AXIS: plan.mesh.dp, TP_AXIS: plan.mesh.tp}
    total = "" if facts.num_operators is None else f" of {facts.num_operators:,}"
    same: dict[str, list[str]] = {}
    for axis in words:
        split, pending = split_counts(plan, axis)
        if split or pending:
            noun = "operator" if split == 1 and not total else "operators"
            text = f"{split:,}{total} {noun} split"
            text += f", {pending:,} pass a pending sum on" if pending else ""
            text += ", the others replicated" if facts.num_operators != split + pending else ""
            same.setdefault(text, []).append(words[axis])
        elif ranks.get(axis, 1) > 1:
            same.setdefault("no operator is split, each rank computes all", []).append(words[axis])
    for text, axes in same.items():
        yield f"over {' and '.join(axes)}: {text}"


def _zero_words(plan: Plan) -> Iterator[str]:
    if plan.mesh.dp == 1:
        return
    levels: dict[int, list[int]] = {}
    for stage in plan.stages:
        levels.setdefault(stage.zero_level, []).append(stage.index)
    for level, stages in sorted(levels.items()):
        which = f" in stages {fold_ranks(stages)}" if len(levels) > 1 else ""
        if level:
            yield f"ZeRO-{level}{which}: {ZERO_WORDS[level]}"
        else:
            yield f"no ZeRO{which}: every data rank has whole parameters and optimizer state"


def _recompute(facts: Facts, width: int) -> Lines:
    lines: Lines = []
    for stages, text in recompute_summary(facts.recompute):
        name = f"stage{'s' if len(stages) > 1 else ''} {fold_ranks(stages)}: "
        lines += paragraph(text, width, indent="  ", first=name)
    return lines


def _runners_up(plan: Plan, width: int) -> Lines:
    note = (
        "mb: micro-batches. Estimates rank the candidates; the best few are simulated from the "
        "programs that they would run, and that decides. Percentages are against this plan, by the "
        "measure that both have: of those not simulated against its estimate."
    )
    return [*runners_up_table(plan, width), *paragraph(note, width)]


def _counted(count: int, noun: str, plural: str) -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
