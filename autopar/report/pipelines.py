"""The report of a plan of unequal pipelines: its own tables, in the order of the usual report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.plan.explain import explain_plan
from autopar.plan.pipelines import share_unit
from autopar.plan.types import Plan
from autopar.report.fold import fold_ranks, fold_scopes
from autopar.report.layout import Lines, bullets, names, numbers, pairs, paragraph, table, words
from autopar.report.precision import precision_lines
from autopar.report.tables import constraints_table
from autopar.units import format_bytes, format_time


def pipeline_sections(plan: Plan, width: int) -> Iterator[tuple[str, Lines]]:
    """Titles and bodies.

    Args:
        plan: A plan with pipelines.
        width: Columns of the bodies.
    """
    yield "Plan", _header(plan, width)
    yield "What binds", bullets((item.text for item in explain_plan(plan).binding), width)
    yield "Pipelines", _pipelines(plan, width)
    yield "Stages", _stages(plan, width)
    yield "Memory of a device, by stage", _memory(plan, width)
    yield "Time by stage: one micro-batch, and once per step", _time(plan, width)
    if plan.precision is not None:
        yield f"Precision {plan.precision}", precision_lines(plan, width)
    if plan.unruled:
        yield "Operators without a rule (replicated)", bullets(plan.unruled, width)
    if plan.constraints:
        yield "Constraints in force", constraints_table(plan, width)
    if plan.runners_up:
        yield "Runners-up", bullets((c.reason for c in plan.runners_up), width)
    if plan.assumptions:
        yield "Assumptions", bullets(plan.assumptions, width)
    if plan.provenance:
        yield "Provenance", pairs(sorted(plan.provenance.items()), width)


def cost_words(plan: Plan) -> str:
    """The cost of a step in words; "" where prices are not known."""
    if plan.cost_per_step is None:
        return ""
    text = f"{plan.cost_per_step:.4g} per step, in the currency of cost_per_hour"
    if plan.cost_limit is not None:
        text += f"; the limit is {plan.cost_limit:.4g}"
    if plan.cost_bound is not None and plan.objective == "cost":
        gap = max(0.0, 1 - plan.cost_bound / plan.cost_per_step) if plan.cost_per_step else 0.0
        text += f"; no searched plan costs less than {plan.cost_bound:.4g}: gap {100 * gap:.1f} %"
    return text


def _header(plan: Plan, width: int) -> Lines:
    used = Counter(
        stage.device for p in plan.pipelines for stage in p.stages for _ in stage.devices
    )
    kinds = ", ".join(f"{count} {name}" for name, count in used.items())
    rows = [
        (
            "pipelines",
            "one, 1F1B"
            if len(plan.pipelines) == 1
            else f"{len(plan.pipelines)} side by side, 1F1B in each",
        ),
        ("devices", f"{plan.num_ranks} of {plan.num_devices} ({plan.cluster}): {kinds}"),
    ]
    idle = plan.idle_ranks
    if idle:
        rows.append(("idle", f"rank{'s' if len(idle) > 1 else ''} {fold_ranks(idle)}"))
    rows.append(("time", f"{format_time(plan.time_s)} per step, predicted"))
    bound = "no lower bound was proved"
    if plan.bound_s > 0 and plan.time_s > 0:
        gap = max(0.0, 1 - plan.bound_s / plan.time_s)
        bound = (
            f"no plan on these devices takes less than {format_time(plan.bound_s)}, all of them at "
            f"full speed without waiting: gap {100 * gap:.1f} %"
        )
    rows.append(("bound", bound))
    cost = cost_words(plan)
    if cost:
        rows.append(("cost", cost))
    rows.append(
        (
            "memory",
            f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.memory_limit_bytes)} on the "
            f"fullest device ({plan.peak_at}), estimated",
        )
    )
    rows.append(("optimizer", f"{plan.optimizer}, assumed"))
    rows.append(
        ("to run", "not yet: programs are written for one mesh; plan for devices of one kind")
    )
    return pairs(rows, width)


def _pipelines(plan: Plan, width: int) -> Lines:
    columns = [
        *names("pipeline"), *numbers("devices", "stages", "micro-batches",
        f"of {share_unit(plan.assumptions)}", "share", "time"),
    ]  # fmt: skip
    total = sum(p.samples for p in plan.pipelines)
    rows = [
        [
            str(number), str(p.num_devices), str(len(p.stages)), str(p.num_microbatches),
            str(p.microbatch_samples), f"{100 * p.samples / max(1, total):.1f} %",
            format_time(p.time_s),
        ]
        for number, p in enumerate(plan.pipelines)
    ]  # fmt: skip
    note = "Time: from a pipeline's first forward to its last backward."
    return [*table(columns, rows, width), *paragraph(note, width)]


def _stages(plan: Plan, width: int) -> Lines:
    columns = [
        *names("stage", "device"), *numbers("ranks", "dp", "tp"), *words("layers"),
        *words("recompute", least=10), *numbers("in flight"),
    ]  # fmt: skip
    rows = [
        [
            f"{number}.{index}", stage.device, fold_ranks(stage.devices), str(stage.dp),
            str(stage.tp),
            f"{', '.join(fold_scopes(stage.scopes))} (blocks {stage.layers[0]}-"
            f"{stage.layers[1] - 1})",
            stage.recompute_words or "none", str(stage.num_in_flight),
        ]
        for number, p in enumerate(plan.pipelines)
        for index, stage in enumerate(p.stages)
    ]  # fmt: skip
    return table(columns, rows, width)


def _memory(plan: Plan, width: int) -> Lines:
    columns = [*names("stage", "device"), *numbers("needed", "limit", "share")]
    rows = [
        [
            f"{number}.{index}", stage.device, format_bytes(stage.memory_bytes),
            format_bytes(stage.memory_limit_bytes),
            f"{100 * stage.memory_bytes / max(1, stage.memory_limit_bytes):.1f} %",
        ]
        for number, p in enumerate(plan.pipelines)
        for index, stage in enumerate(p.stages)
    ]  # fmt: skip
    return table(columns, rows, width)


def _time(plan: Plan, width: int) -> Lines:
    columns = [
        *names("stage"), *numbers("F", "B", "to the next", "busy", "own step", "exchange"),
    ]  # fmt: skip
    rows = [
        [
            f"{number}.{index}", format_time(stage.forward_s), format_time(stage.backward_s),
            format_time(stage.p2p_s),
            f"{100 * p.num_microbatches * (stage.forward_s + stage.backward_s) / plan.time_s:.1f} %"
            if plan.time_s > 0 else "-",
            format_time(stage.step_s), format_time(stage.exchange_s),
        ]
        for number, p in enumerate(plan.pipelines)
        for index, stage in enumerate(p.stages)
    ]  # fmt: skip
    note = (
        "Busy: share of the step in forwards and backwards. Own step: gradients over dp and the "
        "optimizer. Exchange: gradients added up with other pipelines. The rest is waiting."
    )
    return [*table(columns, rows, width), *paragraph(note, width)]
