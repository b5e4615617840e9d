"""Every exception that autopar raises on purpose.

::

    AutoparError
    ├── ConfigError(ValueError)        an argument, file or option is wrong
    │   ├── ConstraintError            a user's constraint names nothing or contradicts another
    │   ├── PlanError                  a plan is damaged, or belongs to another model or cluster
    │   └── InputError                 a batch does not fit the plan (shape, dtype, device)
    ├── CaptureError(RuntimeError)     the model can't be captured (the user's line is named)
    ├── ShardingError(ValueError)      a placement or rule is illegal
    ├── InfeasibleError(RuntimeError)  no plan satisfies the limits (carries Shortfall records)
    ├── PassError(RuntimeError)        a rewrite left an invalid program (our bug)
    ├── EquivalenceError(AssertionError) a plan's numbers differ from one device
    ├── RowBudgetError(RuntimeError)   more rows were routed to a rank than it has room for
    ├── DeadlockError(RuntimeError)    simulated ranks can't proceed, or their collectives differ
    └── RankError(RuntimeError)        a rank failed; carries the first rank's error
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.units import format_bytes, format_time


class AutoparError(Exception):
    """Base class of every deliberate error."""


class ConfigError(AutoparError, ValueError):
    """An argument, a file or an option is wrong."""


class ConstraintError(ConfigError):
    """A user's constraint names nothing, or contradicts another one."""


class PlanError(ConfigError):
    """A plan is damaged, or was made for another model or cluster."""


class InputError(ConfigError):
    """A batch does not fit the plan: shape, dtype, device or missing entry."""


class CaptureError(AutoparError, RuntimeError):
    """The model can't be captured; the text names the user's own source line."""


class ShardingError(AutoparError, ValueError):
    """A placement or a sharding rule is illegal for the tensor at hand."""


class PassError(AutoparError, RuntimeError):
    """A rewrite left an invalid program; this is a bug of autopar, not of the user."""


class EquivalenceError(AutoparError, AssertionError):
    """The plan's numbers differ from those of one device."""


class RowBudgetError(AutoparError, RuntimeError):
    """More rows were routed to the experts of a rank than it has room for."""


class DeadlockError(AutoparError, RuntimeError):
    """Simulated ranks can't proceed, or disagree about a collective."""


class RankError(AutoparError, RuntimeError):
    """A rank failed; the text is that of the first rank that did."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """One limit that no plan could meet.

    Attributes:
        what: The limit in words, such as ``"memory of stage 1"``.
        needed: The least amount that any plan needs, in ``unit``.
        available: The amount that there is, in ``unit``.
        unit: Name of the unit, such as ``"bytes"``.
        remedy: The cheapest way out, as an imperative sentence; "" if none is known.
        degrees: Of the plan that comes closest, such as ``{"dp": 2, "tp": 4}``.
    """

    what: str
    needed: float
    available: float
    unit: str
    remedy: str
    degrees: Mapping[str, int] = field(default_factory=dict)

    def amount(self, number: float) -> str:
        """A number of the limit's unit, in words."""
        if self.unit == "bytes":
            return format_bytes(number)
        return f"{number:{',.0f' if number == int(number) else '.4g'}} {self.unit}"

    def __str__(self) -> str:
        """One line: what, both numbers, remedy."""
        text = f"{self.what}: needs {self.amount(self.needed)}, has {self.amount(self.available)}"
        return f"{text}; {self.remedy}" if self.remedy else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """A way out of an infeasible question; it was tried.

    Attributes:
        what: What to change, as an imperative sentence.
        time_s: Seconds of a step of the plan that there is then: the price.
        plan: That plan in a few words.
        peak_bytes: Its peak on the worst device.
    """

    what: str
    time_s: float
    plan: str
    peak_bytes: int

    def __str__(self) -> str:
        """One line: what to do, and the plan that there is then."""
        peak = format_bytes(self.peak_bytes)
        return f"{self.what}: {format_time(self.time_s)} per step with {self.plan}, {peak}"


class InfeasibleError(AutoparError, RuntimeError):
    """No plan satisfies the limits.

    Attributes:
        shortfalls: The limits that failed, worst first.
        relaxations: Ways out, each tried, fastest plan first.
        notes: What was tried in vain, and what was not tried.
        num_tried: Shapes of plans that were worked out before it was said.
    """

    def __init__(
        self,
        message: str,
        shortfalls: tuple[Shortfall, ...] = (),
        *,
        relaxations: tuple[Relaxation, ...] = (),
        notes: tuple[str, ...] = (),
        num_tried: int = 0,
    ) -> None:
        self.message = message
        self.shortfalls = shortfalls
        self.relaxations = relaxations
        self.notes = notes
        self.num_tried = num_tried
        lines = [message, *(f"  - {shortfall}" for shortfall in shortfalls)]
        if relaxations:
            lines += ["ways out, each tried, fastest first:"]
            lines += [f"  - {relaxation}" for relaxation in relaxations]
        if notes:
            lines += ["tried in vain, or not tried:", *(f"  - {note}" for note in notes)]
        super().__init__("\n".join(lines))
