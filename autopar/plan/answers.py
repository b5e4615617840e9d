"""Answers to questions about plans, as values: what binds, why not otherwise, what differs.

Each has its numbers in fields and says them in words: ``sections()`` for a report that keeps to a
width, ``str()`` for a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from autopar.plan.time_terms import TERM_WORDS, change_words
from autopar.plan.types import CollectiveTotal, TimeTerms
from autopar.units import format_bytes, format_time

Sections: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
"""Titles, each with its sentences."""

RE_SOLVED = "re-solved"
RE_SIMULATED = "re-simulated"


def sections_text(sections: Sections) -> str:
    """Titles with their sentences below them, empty ones left out."""
    blocks = [
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines
    ]
    return "\n".join(blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Something that the plan is near the limit of.

    Attributes:
        kind: ``"memory"``, ``"time"`` or ``"link"``.
        where: Which stage, rank or axis, in words.
        share: Of the limit (memory), or of the step (time, link).
        text: A sentence.
    """

    kind: str
    where: str
    share: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPrice:
    """What a little more of something would be worth; each was tried.

    Attributes:
        what: Such as ``"1 GiB more memory on each device"``.
        method: ``"re-solved"``: the whole search under it; ``"re-simulated"``: this plan under it.
        before_s: Seconds of a step now.
        after_s: Seconds of a step with it.
        change: What the other plan does differently, in words; "" if it is the same.
    """

    what: str
    method: str
    before_s: float
    after_s: float
    change: str = ""

    def __str__(self) -> str:
        """One sentence."""
        gain = self.before_s - self.after_s
        share = gain / self.before_s if self.before_s > 0 else 0.0
        if abs(share) < 5e-5:
            return f"{self.what}: nothing gained ({self.method})"
        word = "less" if gain > 0 else "more"
        text = f"{self.what}: {format_time(abs(gain))} {word} per step, {100 * abs(share):.2f} %"
        return f"{text} ({self.method}{', ' + self.change if self.change else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A plan that lost.

    Attributes:
        name: Mesh, micro-batches, schedule, ZeRO level.
        time_s: Its seconds; 0 if nothing was priced.
        measure: ``"simulated"``, ``"estimated"`` or ``"memory"`` (it does not fit).
        changes: Term -> seconds that it needs more than the plan; empty if that is not known.
        reason: Why it lost, in words.
    """

    name: str
    time_s: float
    measure: str
    changes: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        """One sentence."""
        text = f"{self.name}: {self.reason}"
        return f"{text}: {change_words(self.changes)}" if self.changes else text


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExplanation:
    """Why a plan is as it is.

    Attributes:
        binding: What it is near the limit of, the tightest first.
        terms: Where its time goes; None without figures.
        prices: What more of something would be worth; empty without the model.
        losses: The runners-up.
        missing: What could not be said, each with the remedy.
    """

    binding: tuple[Binding, ...]
    terms: TimeTerms | None = None
    prices: tuple[ShadowPrice, ...] = ()
    losses: tuple[Loss, ...] = ()
    missing: tuple[str, ...] = ()

    def sections(self) -> Sections:
        """What binds, what more would be worth, who lost and why."""
        return (
            ("What binds", tuple(item.text for item in self.binding)),
            ("Where the time of a step goes", _terms_lines(self.terms)),
            ("What more would be worth", tuple(map(str, self.prices))),
            ("Runners-up, and why they lost", tuple(map(str, self.losses))),
            ("Not told", self.missing),
        )

    def __str__(self) -> str:
        """All of it, a sentence a line."""
        return sections_text(self.sections())


def _terms_lines(terms: TimeTerms | None) -> tuple[str, ...]:
    if terms is None or terms.total_s <= 0:
        return ()
    rows = {name: getattr(terms, name) for name in TERM_WORDS}
    return tuple(
        f"{TERM_WORDS[name]}: {format_time(part_s)}, {100 * part_s / terms.total_s:.1f} %"
        for name, part_s in sorted(rows.items(), key=lambda item: -item[1])
        if part_s > 0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another split of a parameter's operators.

    Attributes:
        placement: Such as ``"S(0)"`` or ``"R"``, over ``tp``.
        delta_s: Seconds per step of all operators and reshards beyond those of the plan's splits,
            everything else free to adapt; None if no legal splits are left.
        text: A sentence.
    """

    placement: str
    delta_s: float | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamExplanation:
    """How some parameters are split, and what that causes.

    Attributes:
        pattern: What was asked for.
        parameters: Names that match.
        splits: How they are split, in words, one sentence for each way.
        decided_by: ``"solver"``, or the user's constraint.
        gathered: Where and when they are gathered whole, in words.
        collectives: That their operators cause in one step on one device, all of its layers
            together: in a pipeline the device on which they take longest.
        collectives_on: In a pipeline which device that is; "" without one.
        alternatives: What other splits would cost; empty without the model, or with one tp rank.
        missing: What could not be said, each with the remedy.
    """

    pattern: str
    parameters: tuple[str, ...]
    splits: tuple[str, ...]
    decided_by: str
    gathered: tuple[str, ...] = ()
    collectives: tuple[CollectiveTotal, ...] = ()
    collectives_on: str = ""
    alternatives: tuple[Alternative, ...] = ()
    missing: tuple[str, ...] = ()

    def sections(self) -> Sections:
        """Splits, gathering, collectives, alternatives."""
        device = "one device"
        if self.collectives_on:
            device = f"a device of {self.collectives_on}, where they take longest"
        return (
            (f"{self.pattern}: {_counted(len(self.parameters), 'parameter')}", self.splits),
            ("Decided by", (self.decided_by,)),
            ("Gathered", self.gathered),
            (
                f"Collectives that they cause in one step on {device}",
                tuple(map(collective_words, self.collectives)),
            ),
            ("Alternatives", tuple(a.text for a in self.alternatives)),
            ("Not told", self.missing),
        )

    def __str__(self) -> str:
        """All of it, a sentence a line."""
        return sections_text(self.sections())


def collective_words(total: CollectiveTotal) -> str:
    """A collective in words."""
    return (
        f"{total.kind} over {total.axis}, {total.where}: {_counted(total.count, 'call')}, "
        f"{format_bytes(total.payload_bytes)}, {format_time(total.time_s)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """What a constraint would do.

    Attributes:
        asked: The constraint, such as ``"tp=8"``.
        verdict: ``"it is the plan"``, ``"slower"``, ``"as fast"``, ``"faster"`` (a search that was
            cut short had missed it), ``"infeasible"`` or ``"refused"``; of a plan that was made for
            its cost ``"dearer"``, ``"as cheap"`` or ``"cheaper"``.
        before_s: Seconds of the plan.
        after_s: Seconds under the constraint; 0 if there is no plan.
        name: What the plan under the constraint is.
        changes: Term -> seconds that it needs more.
        reasons: Why, in sentences; limits with both numbers.
        differences: What that plan does differently, in sentences.
        costs: Price of a step before and after, where cost is what is minimised.
    """

    asked: str
    verdict: str
    before_s: float
    after_s: float = 0.0
    name: str = ""
    changes: Mapping[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    costs: tuple[float, float] | None = None

    @property
    def headline(self) -> str:
        """One sentence."""
        if self.verdict in ("infeasible", "refused"):
            return f"{self.asked}: {self.verdict}"
        if self.verdict == "it is the plan":
            return f"{self.asked}: the plan is so already ({self.name})"
        old, new = self.costs or (self.before_s, self.after_s)
        percent = 100 * (new / old - 1) if old > 0 else 0.0
        amount = "" if self.verdict.startswith("as ") else f" by {abs(percent):.2f} %"
        if self.costs is not None:
            return (
                f"{self.asked}: {self.verdict}{amount}: {new:.4g} per step "
                f"({format_time(self.after_s)}) with {self.name} against {old:.4g} "
                f"({format_time(self.before_s)})"
            )
        return (
            f"{self.asked}: {self.verdict}{amount}: {format_time(self.after_s)} with {self.name} "
            f"against {format_time(self.before_s)}"
        )

    def sections(self) -> Sections:
        """The verdict with its reasons, and what that plan is."""
        changed = (change_words(self.changes),) if self.changes else ()
        return (
            (self.headline, (*self.reasons, *changed)),
            ("That plan, against this one", self.differences),
        )

    def __str__(self) -> str:
        """All of it, a sentence a line."""
        text = sections_text(self.sections())
        return text or self.headline


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
