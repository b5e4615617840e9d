"""Predicts every record of a file and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autopar.errors import ConfigError
from autopar.validation.errors import SkipRecord
from autopar.validation.formulas import compare
from autopar.validation.memory import StepMemory, predict_memory, printed_bytes
from autopar.validation.metrics import Errors, Group, Verdicts, groups
from autopar.validation.predict import Pricing, StepTime, cluster_prices, predict_time
from autopar.validation.records import Kind, Recompute, Record, Skipped, read_records
from autopar.validation.works import RecordWorks, layer_of, works_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A record and its prediction.

    Attributes:
        record: The record.
        time: Of a whole step.
        memory: Of a whole step.
        pairs: (predicted, measured) of other quantities by name: a layer's passes, bytes per layer.
    """

    record: Record
    time: StepTime | None = None
    memory: StepMemory | None = None
    pairs: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def time_error(self) -> float | None:
        """Relative error of the iteration time; None where nothing was measured."""
        measured = self.record.measured.iteration_s
        if self.time is None or measured is None or self.record.is_oom:
            return None
        return self.time.total_s / measured - 1.0

    @property
    def memory_error(self) -> float | None:
        """Relative error of the printed memory; None where none was printed."""
        printed = self.record.measured.printed_bytes
        if self.memory is None or printed is None or self.record.is_oom:
            return None
        return printed_bytes(self.record, self.memory) / printed - 1.0

    @property
    def pair_errors(self) -> dict[str, float]:
        """Relative errors of :attr:`pairs`; a difference where shares are compared."""
        return {
            name: (p - m if name.endswith("overhead") else p / m - 1.0)
            for name, (p, m) in self.pairs.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSummary:
    """All records of a source."""

    source: str
    records: int
    skipped: int
    time: Errors | None
    memory: Errors | None
    other: Errors | None
    verdicts: Verdicts
    groups: tuple[Group, ...]


def validate(
    path: Path,
    *,
    source: str | None = None,
    pricing: Pricing = cluster_prices,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[tuple[Outcome, ...], tuple[Skipped, ...]]:
    """Predict every record that can be.

    Args:
        path: A file of records.
        source: Only these records.
        pricing: Prices of a record.
        progress: Called with (done, total).

    Raises:
        ConfigError: The file can't be read.
    """
    records, left_out = read_records(path, source=source)
    skipped = list(left_out)
    outcomes: list[Outcome] = []
    # neighbours in shape one after another: each shape is captured once
    order = sorted(range(len(records)), key=lambda i: _capture_key(records[i]))
    found: dict[int, Outcome] = {}
    for done, index in enumerate(order, start=1):
        record = records[index]
        try:
            found[index] = outcome_of(record, pricing)
        except (SkipRecord, ConfigError) as reason:  # one odd record does not end the others
            skipped.append(Skipped(record.name, record.source, str(reason)))
        progress(done, len(records))
    outcomes = [found[i] for i in sorted(found)]
    return tuple(outcomes), tuple(skipped)


def _capture_key(record: Record) -> tuple[object, ...]:
    shape = record.shape
    return (
        shape.arch, shape.hidden, shape.heads, shape.ffn, shape.seq, record.layout.mbs,
        record.family.explicit_attention, record.layout.cp,
    )  # fmt: skip


def outcome_of(record: Record, pricing: Pricing = cluster_prices) -> Outcome:
    """Prediction of one record, by its kind.

    Raises:
        SkipRecord: It can't be predicted.
    """
    if record.kind is Kind.FORMULA:
        return Outcome(record=record, pairs=compare(record.measured.formulas))
    if record.kind is Kind.LAYER:
        return Outcome(record=record, pairs=_layer_pairs(record, pricing))
    works = works_of(record)
    return Outcome(record=record, time=predict_time(works, pricing), memory=predict_memory(works))


def _layer_pairs(record: Record, pricing: Pricing) -> dict[str, tuple[float, float]]:
    """A single layer's passes, or what its plan adds to one that recomputes nothing."""
    measured, time = record.measured, predict_time(layer_of(record), pricing)
    forward_s, backward_s = time.forward_s[0], time.backward_s[0]
    found: dict[str, tuple[float, float]] = {}
    if measured.layer_forward_s is not None:
        found["layer forward"] = (forward_s, measured.layer_forward_s)
    if measured.layer_backward_s is not None:
        found["layer backward"] = (backward_s, measured.layer_backward_s)
    if measured.layer_overhead is not None:
        plain = predict_time(layer_of(record, recompute=Recompute.NONE, sequence=False), pricing)
        base_s = plain.forward_s[0] + plain.backward_s[0]
        overhead = (forward_s + backward_s) / base_s - 1.0
        found["layer overhead"] = (overhead, measured.layer_overhead)
    if not found:
        raise SkipRecord("measured has no time of a layer")
    return found


def summaries(outcomes: Sequence[Outcome], skipped: Sequence[Skipped]) -> tuple[SourceSummary, ...]:
    """Figures of every source, in order of first appearance."""
    names = dict.fromkeys([*(o.record.source for o in outcomes), *(s.source for s in skipped)])
    found = []
    for name in names:
        mine = [o for o in outcomes if o.record.source == name]
        steps = [o for o in mine if o.memory is not None]
        found.append(
            SourceSummary(
                source=name,
                records=len(mine),
                skipped=sum(s.source == name for s in skipped),
                time=Errors.of([e for o in mine if (e := o.time_error) is not None]),
                memory=Errors.of([e for o in mine if (e := o.memory_error) is not None]),
                other=Errors.of([e for o in mine for e in o.pair_errors.values()]),
                verdicts=Verdicts.of(
                    (o.memory is not None and not o.memory.fits, o.record.is_oom) for o in steps
                ),
                groups=groups(_runs(mine)),
            )
        )
    return tuple(found)


def _runs(outcomes: Sequence[Outcome]) -> list[tuple[tuple[object, ...], float, float]]:
    return [
        (o.record.model_key, o.time.total_s, o.record.measured.iteration_s)
        for o in outcomes
        if o.time is not None and o.time_error is not None
        and o.record.measured.iteration_s is not None
    ]  # fmt: skip


def works_of_all(path: Path) -> tuple[tuple[Record, RecordWorks], ...]:
    """Unpriced works of every step of a file, for fits of prices; others are left out."""
    found: list[tuple[Record, RecordWorks]] = []
    for record in sorted(read_records(path)[0], key=_capture_key):
        if record.kind is Kind.STEP:
            try:
                found.append((record, works_of(record)))
            except (SkipRecord, ConfigError):
                continue
    return tuple(found)
