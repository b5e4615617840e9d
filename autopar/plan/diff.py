"""What differs between two plans; two files are enough, no model is needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar.plan.answers import Sections, sections_text
from autopar.plan.explain import fullest_rank, plan_name, rank_words
from autopar.plan.level_words import level_words
from autopar.plan.pipelines import share_unit
from autopar.plan.time_terms import TERM_WORDS, plan_terms, term_changes
from autopar.plan.types import Plan, StagePlan
from autopar.units import format_bytes, format_time

_NUMBER = re.compile(r"(?<=[._])\d+(?=[._]|$)")
_MEMORY = {
    "params_bytes": "parameters",
    "grads_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations",
    "transient_bytes": "transient",
    "buffers_bytes": "buffers",
}
_MAX_ROWS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that differs; texts for people.

    Attributes:
        what: Such as ``"mesh"`` or ``"memory of stage 0: activations"``.
        before: In the first plan.
        after: In the second.
    """

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.what}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """What differs.

    Attributes:
        before: The first plan in a few words.
        after: The second.
        time_s: Seconds of a step of both.
        peak_bytes: Peak of the worst device of both.
        shape: Mesh, micro-batches, schedule, devices, limits.
        stages: Cuts, devices, recompute, ZeRO level.
        splits: Parameters by pattern.
        memory: Bytes by stage and part.
        time: Seconds by term.
        terms: Term -> seconds that the second needs more.
        notes: What makes the two hard to compare.
    """

    before: str
    after: str
    time_s: tuple[float, float]
    peak_bytes: tuple[int, int]
    shape: tuple[Change, ...] = ()
    stages: tuple[Change, ...] = ()
    splits: tuple[Change, ...] = ()
    memory: tuple[Change, ...] = ()
    time: tuple[Change, ...] = ()
    terms: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the plans do the same and promise the same."""
        return not (self.shape or self.stages or self.splits or self.memory or self.time)

    def sections(self) -> Sections:
        """By kind."""
        if self.is_empty:
            return (("The plans are the same", (self.before,)), ("Notes", self.notes))
        return (
            ("Plans", (f"before: {self.before}", f"after:  {self.after}")),
            ("Shape", tuple(map(str, self.shape))),
            ("Stages", tuple(map(str, self.stages))),
            ("Splits", tuple(map(str, self.splits))),
            ("Memory", tuple(map(str, self.memory))),
            ("Time", tuple(map(str, self.time))),
            ("Notes", self.notes),
        )

    def __str__(self) -> str:
        """All of it, a change a line."""
        return sections_text(self.sections())


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """What the second plan does differently from the first."""
    notes = []
    if before.model_hash != after.model_hash:
        notes.append("the plans are of different models (or batches): operators are not compared")
    if bool(before.pipelines) != bool(after.pipelines):
        notes.append(
            "one plan is a mesh, the other unequal pipelines: splits, memory by part and "
            "time by term are kept differently and not compared"
        )
    old, new = plan_terms(before), plan_terms(after)
    terms = {} if old is None or new is None else term_changes(old, new)
    return PlanDiff(
        before=plan_name(before),
        after=plan_name(after),
        time_s=(before.time_s, after.time_s),
        peak_bytes=(before.peak_bytes, after.peak_bytes),
        shape=tuple(_shape(before, after)),
        stages=tuple(_stages(before, after)),
        splits=tuple(_splits(before, after)) if not notes else (),
        memory=tuple(_memory(before, after)),
        time=tuple(_time(before, after)),
        terms=terms,
        notes=tuple(notes),
    )


def _state_places(before: Plan, after: Plan) -> tuple[str, str]:
    """Where the optimizer's state is kept."""
    first, second = ("host memory" if p.offload else "the devices" for p in (before, after))
    return first, second


def _changes(rows: Iterable[tuple[str, object, object]]) -> list[Change]:
    return [
        Change(what=what, before=str(old), after=str(new)) for what, old, new in rows if old != new
    ]


def _shape(before: Plan, after: Plan) -> list[Change]:
    def user(plan: Plan) -> str:
        found = [f"{c.name}={c.value}" for c in plan.constraints if c.origin == "user"]
        return ", ".join(found) or "none"

    return _changes(
        [
            ("cluster", before.cluster, after.cluster),
            ("devices", before.num_devices, after.num_devices),
            ("mesh", _shape_words(before), _shape_words(after)),
            ("idle devices", len(before.idle_ranks), len(after.idle_ranks)),
            ("micro-batches", before.num_microbatches, after.num_microbatches),
            ("schedule", before.schedule.value, after.schedule.value),
            ("warm-up", _warmup(before), _warmup(after)),
            ("optimizer", before.optimizer, after.optimizer),
            ("optimizer state", *_state_places(before, after)),
            ("precision", before.precision or "the model's", after.precision or "the model's"),
            (
                "memory limit",
                format_bytes(before.memory_limit_bytes),
                format_bytes(after.memory_limit_bytes),
            ),
            ("constraints of the user", user(before), user(after)),
        ]
    )


def _warmup(plan: Plan) -> str:
    return ", ".join(map(str, plan.warmup)) if plan.warmup else "that of the schedule"


def _shape_words(plan: Plan) -> str:
    if plan.pipelines:
        count = len(plan.pipelines)
        return f"{count} pipeline{'s' * (count > 1)} of their own shapes"
    return str(plan.mesh)


def _pipelines(before: Plan, after: Plan) -> list[Change]:
    """Pipeline by pipeline, in the order in which plans list them."""
    old, new = (
        [pipeline.words(share_unit(plan.assumptions)) for pipeline in plan.pipelines]
        for plan in (before, after)
    )
    most = max(len(old), len(new))
    padded = [row + ["none"] * (most - len(row)) for row in (old, new)]
    return _changes((f"pipeline {i}", *pair) for i, pair in enumerate(zip(*padded, strict=True)))


def _stages(before: Plan, after: Plan) -> list[Change]:
    if before.pipelines or after.pipelines:
        return _pipelines(before, after)
    rows: list[tuple[str, object, object]] = [
        ("number of stages", len(before.stages), len(after.stages))
    ]
    levels = [level_words([s.zero_level for s in plan.stages]) for plan in (before, after)]
    rows.append(("ZeRO level", levels[0], levels[1]))
    if len(before.stages) != len(after.stages):
        counts = [sum(len(s.recompute) for s in plan.stages) for plan in (before, after)]
        rows.append(("operators recomputed", f"{counts[0]:,}", f"{counts[1]:,}"))
        away = [sum(s.offload_bytes for s in plan.stages) for plan in (before, after)]
        rows.append(("saved values in host memory", format_bytes(away[0]), format_bytes(away[1])))
        return _changes(rows)
    for old, new in zip(before.stages, after.stages, strict=True):
        where = f"stage {old.index}"
        rows += [
            (f"{where} ranks", _ranks(old), _ranks(new)),
            (f"{where} begins with", _start(old), _start(new)),
            (f"{where} recomputes", _recomputed(old), _recomputed(new)),
            (f"{where} in host memory", _on_host(old), _on_host(new)),
        ]
    return _changes(rows)


def _ranks(stage: StagePlan) -> str:
    if not stage.devices:
        return "none"
    first, last = stage.devices[0], stage.devices[-1]
    return f"{first}-{last}" if last > first else str(first)


def _start(stage: StagePlan) -> str:
    return f"{stage.scopes[0]} ({stage.first})" if stage.scopes else stage.first or "nothing"


def _recomputed(stage: StagePlan) -> str:
    count = len(stage.recompute)
    return f"{count:,} operator{'' if count == 1 else 's'}"


def _on_host(stage: StagePlan) -> str:
    return f"{format_bytes(stage.offload_bytes)} of saved values per micro-batch"


def _pipeline_splits(before: Plan, after: Plan) -> list[Change]:
    """Operators whose splits over ``tp`` in the stages that have them, as a set, are others."""
    old, new = map(_texts_of_pipelines, (before, after))
    differ = sum(old.get(name) != new.get(name) for name in {*old, *new})
    what = f"operators and inputs over tp ({differ:,} differ)"
    counts = [f"{len(texts):,} split" for texts in (old, new)]
    return [Change(what=what, before=counts[0], after=counts[1])] if differ else []


def _texts_of_pipelines(plan: Plan) -> dict[str, set[str]]:
    """Operator -> how it is split in any pipeline; what is replicated in all is left out."""
    found: dict[str, set[str]] = {}
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        for name, text in stage.splits.items():
            found.setdefault(name, set()).add(text)
    return found


def _splits(before: Plan, after: Plan) -> list[Change]:
    """Parameters by pattern: numbers in their names stand for all layers that change alike."""
    if before.pipelines or after.pipelines:
        return _pipeline_splits(before, after)
    names = dict.fromkeys([*before.param_words, *after.param_words])
    groups: dict[tuple[str, str, str], int] = {}
    for name in names:
        old, new = (
            plan.param_words.get(name, "whole" if plan.mesh.num_ranks == 1 else "replicated")
            for plan in (before, after)
        )
        if old != new:
            key = (_NUMBER.sub("*", name), old, new)
            groups[key] = groups.get(key, 0) + 1
    rows = [
        Change(what=f"{pattern} ({count})" if count > 1 else pattern, before=old, after=new)
        for (pattern, old, new), count in groups.items()
    ]
    for axis in ("mb", "dp", "tp"):
        old_texts, new_texts = before.splits.get(axis, {}), after.splits.get(axis, {})
        differ = sum(
            old_texts.get(name) != new_texts.get(name) for name in {*old_texts, *new_texts}
        )
        if differ:
            counts = [f"{len(texts):,} split" for texts in (old_texts, new_texts)]
            what = f"operators and inputs over {axis} ({differ:,} differ)"
            rows.append(Change(what=what, before=counts[0], after=counts[1]))
    return _cut(rows)


def _memory(before: Plan, after: Plan) -> list[Change]:
    rows: list[tuple[str, object, object]] = [
        (
            "peak of the worst device",
            format_bytes(before.peak_bytes),
            format_bytes(after.peak_bytes),
        )
    ]
    if before.pipelines or after.pipelines:
        return _changes(rows)
    if not before.stages or not after.stages:
        return _changes(rows)
    (old_rank, old), (new_rank, new) = fullest_rank(before), fullest_rank(after)
    if (before.mesh.pp, after.mesh.pp) != (1, 1):
        places = rank_words(before, old_rank), rank_words(after, new_rank)
        rows.append(("the fullest device", *places))
    for name, words in _MEMORY.items():
        amounts = [format_bytes(getattr(memory, name)) for memory in (old, new)]
        rows.append((f"{words} of the fullest device", amounts[0], amounts[1]))
    return _changes(rows)


def _time(before: Plan, after: Plan) -> list[Change]:
    percent = 100 * (after.time_s / before.time_s - 1) if before.time_s > 0 else 0.0
    rows = (
        [
            Change(
                what=f"step ({percent:+.2f} %)",
                before=format_time(before.time_s),
                after=format_time(after.time_s),
            )
        ]
        if before.time_s != after.time_s
        else []
    )
    old, new = plan_terms(before), plan_terms(after)
    if old is not None and new is not None:
        for name, words in TERM_WORDS.items():
            first, second = getattr(old, name), getattr(new, name)
            if first != second:
                rows.append(
                    Change(what=words, before=format_time(first), after=format_time(second))
                )
    return rows


def _cut(rows: list[Change]) -> list[Change]:
    if len(rows) <= _MAX_ROWS:
        return rows
    rest = len(rows) - _MAX_ROWS
    more = Change(what=f"and {rest} more patterns", before="...", after="...")
    return [*rows[:_MAX_ROWS], more]
