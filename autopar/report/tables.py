"""The tables of a plan's report. One function per table: a plan and a width in, lines out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from math import isfinite

from autopar.plan.explain import like_for_like_s
from autopar.plan.level_words import short_levels
from autopar.plan.types import Candidate, CollectiveTotal, Plan, StagePlan
from autopar.report.fold import fold_braces, fold_ranks, fold_scopes
from autopar.report.layout import Lines, names, numbers, table, words
from autopar.report.purposes import purpose_of
from autopar.units import format_bytes, format_time

_MEMORY_PARTS = ("params", "grads", "optimizer", "activations", "transient", "buffers")


def stages_table(plan: Plan, width: int) -> Lines:
    """Who has what: ranks, layers, parameters, ZeRO level, micro-batches in flight."""
    columns = [*names("stage"), *numbers("ranks"), *words("layers"), *numbers("parameters")]
    has_zero = plan.mesh.dp > 1
    columns += numbers(*(("ZeRO",) if has_zero else ()), "in flight")
    rows = [
        [
            str(stage.index),
            fold_ranks(stage.devices),
            ", ".join(fold_scopes(_leaf_scopes(stage.scopes))) or "-",
            f"{stage.parameters:,}",
            *([str(stage.zero_level)] if has_zero else []),
            str(stage.num_in_flight),
        ]
        for stage in plan.stages
    ]
    return table(columns, rows, width)


def memory_table(plan: Plan, width: int) -> Lines:
    """Bytes by part, per stage."""
    columns = [*names("stages"), *numbers("total", "of limit", *_MEMORY_PARTS)]

    def cells(stage: StagePlan) -> tuple[str, ...]:
        parts = [getattr(stage.memory, f"{name}_bytes") for name in _MEMORY_PARTS]
        total = stage.memory.total_bytes
        share = _share(total, plan.memory_limit_bytes)
        return (_short_bytes(total), share, *map(_short_bytes, parts))

    return table(columns, _grouped(plan.stages, cells), width)


def devices_memory_table(plan: Plan, width: int) -> Lines:
    """Bytes of devices that have several stages, at their peak.

    In plans that do not tell it: what all stages hold, and the largest transient.
    """
    mesh = plan.mesh
    columns = [*numbers("ranks", "stages", "at the peak", "of limit")]
    rows = []
    for rank in range(mesh.pp):
        stages = [plan.stages[s] for s in mesh.stages_of(rank)]
        held = sum(s.memory.total_bytes - s.memory.transient_bytes for s in stages)
        total = held + max(s.memory.transient_bytes for s in stages)
        if plan.rank_bytes:
            total = plan.rank_bytes[rank]
        rows.append(
            [
                fold_ranks(stages[0].devices),
                fold_ranks(s.index for s in stages),
                format_bytes(total),
                _share(total, plan.memory_limit_bytes),
            ]
        )
    return table(columns, rows, width)


def time_table(plan: Plan, width: int) -> Lines:
    """Seconds by part, per stage: one micro-batch, then what is done once per step."""
    has_comm = any(s.time.forward_comm_s or s.time.backward_comm_s for s in plan.stages)
    comm = ("F comm", "B comm") if has_comm else ()
    syncs = any(s.time.sync_s for s in plan.stages)
    heads = ["F", *comm[:1], "B", *comm[1:], "p2p", "reduce", "unshard"]
    heads += [*(["sync"] if syncs else []), "optimizer"]
    columns = [*names("stages"), *numbers(*heads)]

    def cells(stage: StagePlan) -> tuple[str, ...]:
        time = stage.time
        parts = [time.forward_s, time.forward_comm_s, time.backward_s, time.backward_comm_s]
        parts = parts if has_comm else parts[::2]
        parts += [time.p2p_s, time.reduce_s, time.unshard_s]
        parts += [*([time.sync_s] if syncs else []), time.optimizer_s]
        return tuple(map(format_time, parts))

    return table(columns, _grouped(plan.stages, cells), width)


def shares_table(plan: Plan, width: int) -> Lines:
    """Where the time of a step goes on each pipeline rank; empty without a predicted time.

    What is left of the step is waiting: pipeline bubbles and messages that nothing hides.
    """
    if plan.time_s <= 0 or any(s.time.forward_s <= 0 for s in plan.stages):
        return []
    heads = ("compute", "collectives", "per step", "optimizer", "waiting")
    rows = []
    for rank in range(plan.mesh.pp):
        stages = [plan.stages[s] for s in plan.mesh.stages_of(rank)]
        parts = [sum(part) for part in zip(*(_busy_s(s, plan) for s in stages), strict=True)]
        parts.append(max(0.0, plan.time_s - sum(parts)))
        rows.append([fold_ranks(stages[0].devices), *(_share(part, plan.time_s) for part in parts)])
    return table([*numbers("ranks", *heads)], rows, width)


def collectives_table(plan: Plan, width: int) -> Lines:
    """Per kind of collective: calls, payload and time on one device in one step, and what for.

    Where stages differ, the least and the most are shown.
    """
    columns = [*names("axis", "when", "collective"), *numbers("calls", "payload", "time")]
    columns += words("what for", least=12, may_go=True)
    found: dict[tuple[str, str, str], list[CollectiveTotal]] = {}
    for stage in plan.stages:
        for total in stage.collectives:
            found.setdefault((total.axis, total.where, total.kind), []).append(total)
    rows = []
    for (axis, where, kind), totals in sorted(found.items()):
        rows.append(
            [
                axis,
                where.removeprefix("once "),
                kind,
                _span([t.count for t in totals], lambda n: f"{n:,.0f}"),
                _span([t.payload_bytes for t in totals], _short_bytes),
                _span([t.time_s for t in totals], format_time),
                purpose_of(kind, axis, where),
            ]
        )
    return table(columns, rows, width)


def stage_collectives_table(plan: Plan, width: int) -> Lines:
    """Per stage and mesh axis: calls, payload and time of all collectives in one step."""
    axes = list(dict.fromkeys(t.axis for s in plan.stages for t in s.collectives))
    heads = [f"{axis} {what}" for axis in axes for what in ("calls", "payload", "time")]

    def cells(stage: StagePlan) -> tuple[str, ...]:
        row: list[str] = []
        for axis in axes:
            totals = [t for t in stage.collectives if t.axis == axis]
            row.append(f"{sum(t.count for t in totals):,}")
            row.append(_short_bytes(sum(t.payload_bytes for t in totals)))
            row.append(format_time(sum(t.time_s for t in totals)))
        return tuple(row)

    return table([*names("stages"), *numbers(*heads)], _grouped(plan.stages, cells), width)


def params_table(rows: Iterable[tuple[str, int, str]], width: int) -> Lines:
    """How parameters are split: per words the patterns of names, what is replicated last."""
    patterns: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for pattern, count, text in rows:
        patterns.setdefault(text, []).append(pattern)
        counts[text] = counts.get(text, 0) + count
    ordered = sorted(patterns, key=lambda text: text == "replicated")
    columns = [*words("split"), *numbers("tensors"), *words("parameters")]
    cells = [[text, str(counts[text]), ", ".join(fold_braces(patterns[text]))] for text in ordered]
    return table(columns, cells, width)


def constraints_table(plan: Plan, width: int) -> Lines:
    """Constraints with origin and effect, the user's first."""
    columns = [*names("constraint"), *words("value"), *names("origin"), *words("effect")]
    found = sorted(plan.constraints, key=lambda c: c.origin != "user")
    rows = [[c.name, c.value, c.origin, c.effect or "-"] for c in found]
    return table(columns, rows, width)


def runners_up_table(plan: Plan, width: int) -> Lines:
    """The plan itself, then what else was considered, its times and why it lost."""
    columns = [
        *words("mesh", least=10), *names("schedule"), *numbers("mb", "ZeRO"),
        *words("recompute", least=12), *numbers("estimate", "simulated", "peak"),
        *words("why not", least=13),
    ]  # fmt: skip
    recomputed = any(stage.recompute for stage in plan.stages)
    own = [
        str(plan.mesh), plan.schedule.value, str(plan.num_microbatches),
        short_levels([s.zero_level for s in plan.stages]),
        "see above" if recomputed else "none",
        format_time(plan.objective_s) if plan.objective_s > 0 else "-", format_time(plan.time_s),
        _short_bytes(plan.peak_bytes), "(this plan)",
    ]  # fmt: skip
    rows = [own]
    for candidate in plan.runners_up:
        estimate, simulated, reason = _verdict(candidate, plan)
        rows.append(
            [
                str(candidate.mesh), candidate.schedule.value, str(candidate.num_microbatches),
                short_levels(candidate.zero_levels or (candidate.zero_level,)),
                _in_blocks(candidate.recompute), estimate, simulated,
                _short_bytes(candidate.peak_bytes), reason,
            ]
        )  # fmt: skip
    return table(columns, rows, width)


def _verdict(candidate: Candidate, plan: Plan) -> tuple[str, str, str]:
    """(Estimated time, simulated time, why it lost); a dash for what there is not."""
    time_s = candidate.time_s
    if candidate.reason.startswith("needs") or not isfinite(time_s) or time_s <= 0:
        return "-", "-", candidate.reason
    if candidate.reason.startswith("estimated"):
        own_s = like_for_like_s(plan, "estimated")
        if time_s > own_s:
            return format_time(time_s), "-", _slower(time_s, own_s)
        return format_time(time_s), "-", "not simulated: others were ranked before it"
    if candidate.reason.startswith("simulated"):
        return "-", format_time(time_s), _slower(time_s, plan.time_s)
    return "-", format_time(time_s), candidate.reason


def _in_blocks(text: str) -> str:
    """Words such as "full in 2 blocks" shortened to "2 full"."""
    return re.sub(r"(\w+) in (\d+) blocks", r"\2 \1", text)


def _slower(time_s: float, best_s: float) -> str:
    """By how much; equal times are decided by the simpler mesh."""
    percent = 100 * (time_s - best_s) / best_s if best_s > 0 else 0.0
    return f"{percent:.1f} % slower" if percent >= 0.05 else "as fast, less simple"


def _leaf_scopes(scopes: Sequence[str]) -> list[str]:
    """Without modules that contain another one of the list."""
    return [s for s in scopes if not any(other.startswith(f"{s}.") for other in scopes)]


def _busy_s(stage: StagePlan, plan: Plan) -> tuple[float, float, float, float]:
    """Seconds of a step: computing, collectives of micro-batches, once-per-step, optimizer."""
    time = stage.time
    comm_s = time.forward_comm_s + time.backward_comm_s
    compute_s = time.forward_s + time.backward_s - comm_s
    count = plan.num_microbatches
    return (
        count * compute_s,
        count * comm_s,
        time.reduce_s + time.unshard_s + time.sync_s,
        time.optimizer_s,
    )


def _grouped(
    stages: Sequence[StagePlan], cells: Callable[[StagePlan], tuple[str, ...]]
) -> list[list[str]]:
    """Rows of stages, those that look the same in one row."""
    found: dict[tuple[str, ...], list[int]] = {}
    for stage in stages:
        found.setdefault(cells(stage), []).append(stage.index)
    return [[fold_ranks(indexes), *row] for row, indexes in found.items()]


def _span(amounts: Sequence[float], text: Callable[[float], str]) -> str:
    """One amount, or the least and the most; the unit once if it is the same."""
    low, high = text(min(amounts)), text(max(amounts))
    if low == high:
        return high
    number, _, unit = low.partition(" ")
    return f"{number}-{high}" if unit == high.partition(" ")[2] else f"{low} - {high}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _short_bytes(amount_bytes: float) -> str:
    """Three digits, so that a row of eight amounts fits a terminal.

    >>> _short_bytes(268435456), _short_bytes(1610612736)
    ('256 MiB', '1.50 GiB')
    """
    number, _, unit = format_bytes(amount_bytes).partition(" ")
    return f"{number[:4].rstrip('.') if '.' in number else number} {unit}"
