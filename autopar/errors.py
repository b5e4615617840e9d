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

from dataclasses import dataclass

from autopar.units import format_bytes


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
        remedy: The cheapest way out, as an imperative sentence.
    """

    what: str
    needed: float
    available: float
    unit: str
    remedy: str

    def __str__(self) -> str:
        """One line: what, both numbers, remedy."""
        is_memory = self.unit == "bytes"
        needed, available = (
            format_bytes(n) if is_memory else f"{n:,.0f} {self.unit}"
            for n in (self.needed, self.available)
        )
        return f"{self.what}: needs {needed}, has {available}; {self.remedy}"


class InfeasibleError(AutoparError, RuntimeError):
    """No plan satisfies the limits.

    Attributes:
        shortfalls: The limits that failed, worst first.
    """

    def __init__(self, message: str, shortfalls: tuple[Shortfall, ...] = ()) -> None:
        self.shortfalls = shortfalls
        super().__init__("\n  - ".join([message, *map(str, shortfalls)]))
