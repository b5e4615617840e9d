"""What a search minimises: the time of a step, its cost, or its time among those cheap enough.

The cost of a step is its seconds on the devices in use, each at its ``cost_per_hour``; devices that
stay idle cost nothing. The currency is the user's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autopar.errors import ConfigError

SECONDS_PER_HOUR = 3600.0


class Objective(StrEnum):
    """What is minimised.

    ``"time"`` of a step; its ``"cost"``, which is its time on the devices in use, so that fewer
    devices may be cheaper; or ``"time within cost"``, the time where a step costs no more than a
    limit.
    """

    TIME = "time"
    COST = "cost"
    TIME_WITHIN_COST = "time within cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is minimised.

    Attributes:
        objective: Time of a step, its cost, or its time among those that are cheap enough.
        cost_limit: The most that a step may cost, in the currency of ``cost_per_hour``.

    Raises:
        ConfigError: A limit without an objective that needs it, or the other way round.
    """

    objective: Objective = Objective.TIME
    cost_limit: float | None = None

    def __post_init__(self) -> None:
        limited = self.objective is Objective.TIME_WITHIN_COST
        if limited and self.cost_limit is None:
            raise ConfigError(
                "objective='time within cost' without cost_limit=; give the most that a step may "
                "cost, in the currency of cost_per_hour"
            )
        if not limited and self.cost_limit is not None:
            raise ConfigError(
                f"cost_limit={self.cost_limit:g} with objective={self.objective.value!r}: only "
                "'time within cost' has a limit; take that objective, or leave cost_limit out"
            )
        if self.cost_limit is not None and not self.cost_limit > 0:
            raise ConfigError(f"cost_limit is {self.cost_limit:g}, must be above 0")


def goal(objective: str = "time", cost_limit: float | None = None) -> Goal:
    """The goal that a user names.

    Raises:
        ConfigError: There is no such objective, or the limit does not belong to it.
    """
    try:
        kind = Objective(objective)
    except ValueError:
        known = ", ".join(repr(o.value) for o in Objective)
        raise ConfigError(f"objective={objective!r}: must be one of {known}") from None
    return Goal(objective=kind, cost_limit=cost_limit)
