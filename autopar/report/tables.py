"""The tables of a plan's report. One function per table: a Plan in, a rich Table out."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from rich import box
from rich.table import Table

from autopar.plan.types import Plan, StagePlan
from autopar.report.fold import fold_ranks, fold_scopes
from autopar.units import format_bytes, format_time


def stages_table(plan: Plan) -> Table:
    """Who has what: ranks, layers, parameters, ZeRO level, micro-batches in flight."""
    table = _table("stage", "ranks", "layers", "parameters", "ZeRO", "in flight")
    table.columns[2].justify = "left"
    table.columns[2].overflow = "fold"
    for stage in plan.stages:
        table.add_row(
            str(stage.index),
            fold_ranks(stage.devices),
            ", ".join(fold_scopes(stage.scopes)) or "-",
            f"{stage.parameters:,}",
            str(stage.zero_level) if plan.mesh.dp > 1 else "-",
            str(stage.num_in_flight),
        )
    return table


def memory_table(plan: Plan) -> Table:
    """Bytes by part."""
    names = ("params", "grads", "optimizer", "activations", "transient", "buffers", "total")
    table = _table("stage", "params", "grads", "optim.", "activ.", "trans.", "buffers", *names[6:])
    table.add_column("of limit", justify="right")
    for stage in plan.stages:
        parts = [getattr(stage.memory, f"{name}_bytes") for name in names]
        limit = plan.memory_limit_bytes
        share = f"{100 * stage.memory.total_bytes / limit:.1f} %" if limit else "-"
        table.add_row(str(stage.index), *map(_short_bytes, parts), share)
    return table


def time_table(plan: Plan) -> Table:
    """Seconds by part."""
    table = _table(
        "stage", "F", "F comm", "B", "B comm", "p2p", "reduce", "unshard", "optimizer", "step"
    )
    for stage in plan.stages:
        time = stage.time
        table.add_row(
            str(stage.index),
            *map(
                format_time,
                (
                    time.forward_s, time.forward_comm_s, time.backward_s, time.backward_comm_s,
                    time.p2p_s, time.reduce_s, time.unshard_s, time.optimizer_s,
                    busy_time_s(stage, plan.num_microbatches),
                ),
            ),
        )  # fmt: skip
    return table


def busy_time_s(stage: StagePlan, num_microbatches: int) -> float:
    """Seconds of one step in which the stage computes or communicates, overlap not counted off."""
    time = stage.time
    per_microbatch = time.forward_s + time.forward_comm_s + time.backward_s + time.backward_comm_s
    return num_microbatches * per_microbatch + time.reduce_s + time.unshard_s + time.optimizer_s


def collectives_table(plan: Plan) -> Table:
    """Calls, payload and time by kind, axis and place; stages with the same rows share them."""
    table = _table("stages", "collective", "axis", "where", "calls", "payload", "time")
    for column in table.columns[1:4]:
        column.justify = "left"
    by_rows: dict[tuple[object, ...], list[int]] = {}
    for stage in plan.stages:
        by_rows.setdefault(stage.collectives, []).append(stage.index)
    for stage in plan.stages:
        indexes = by_rows.pop(stage.collectives, [])
        for total in stage.collectives if indexes else ():
            table.add_row(
                fold_ranks(indexes), total.kind, total.axis, total.where, f"{total.count:,}",
                format_bytes(total.payload_bytes), format_time(total.time_s),
            )  # fmt: skip
    return table


def params_table(rows: Iterable[tuple[str, int, str]]) -> Table:
    """Parameter patterns and how they are split."""
    table = _table("parameters", "tensors", "split")
    table.columns[0].overflow = "fold"
    table.columns[2].justify = "left"
    for pattern, count, words in rows:
        table.add_row(pattern, str(count), words)
    return table


def constraints_table(plan: Plan) -> Table:
    """Constraints with origin and effect."""
    table = _left_table("constraint", "value", "origin", "effect")
    for constraint in plan.constraints:
        table.add_row(constraint.name, constraint.value, constraint.origin, constraint.effect)
    return table


def runners_up_table(plan: Plan) -> Table:
    """What else was considered, and why it lost."""
    table = _table("mesh", "schedule", "micro-b.", "ZeRO", "recompute", "time", "peak", "why not")
    table.columns[1].justify = table.columns[4].justify = table.columns[7].justify = "left"
    table.columns[7].overflow = "fold"
    for candidate in plan.runners_up:
        # A candidate that does not fit has no time.
        time = format_time(candidate.time_s) if isfinite(candidate.time_s) else "-"
        table.add_row(
            str(candidate.mesh), candidate.schedule.value, str(candidate.num_microbatches),
            str(candidate.zero_level), candidate.recompute, time,
            format_bytes(candidate.peak_bytes), candidate.reason,
        )  # fmt: skip
    return table


def pairs_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Names and values without a heading."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in pairs:
        table.add_row(name, value)
    return table


def _table(first: str, *others: str) -> Table:
    """A table whose first column is left-aligned and whose others hold numbers."""
    table = _left_table(first, *others)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _left_table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading)
    return table


def _short_bytes(amount_bytes: int) -> str:
    """Three digits, so that a row of eight amounts fits a terminal.

    >>> _short_bytes(268435456), _short_bytes(1610612736)
    ('256 MiB', '1.50 GiB')
    """
    number, _, unit = format_bytes(amount_bytes).partition(" ")
    return f"{number[:4].rstrip('.') if '.' in number else number} {unit}"
