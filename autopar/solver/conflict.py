"""Which constraints contradict each other: the smallest set that alone leaves no shape."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from autopar.errors import ConstraintError, ShardingError
from autopar.solver.analysis import Analysis
from autopar.solver.candidates import shapes
from autopar.solver.constraints import Constraints, check_constraints
from autopar.solver.given import constraint_words, given_constraints
from autopar.solver.question import Asker

MAX_SETS = 120  # sets of constraints that are looked at


@dataclass(frozen=True, slots=True)
class Conflict:
    """Constraints that leave no plan, each of them needed for that.

    Attributes:
        names: Of the constraints; one if it can't be met alone.
        text: Which they are, and what the refusal of these alone says.
    """

    names: tuple[str, ...]
    text: str


def find_conflict(asker: Asker) -> Conflict | None:
    """The smallest set of the question's constraints that leaves no shape; None if all leave some.

    Nothing is solved: the sets are checked against the model and the cluster, and against the
    declared space of shapes.

    Args:
        asker: Of the question.
    """
    given = given_constraints(asker.question.constraints)
    base: Analysis | None = None
    for names in _subsets(given):
        part = {name: given[name] for name in names}
        error = None
        try:
            wanted = Constraints(**part)  # type: ignore[arg-type]
            asked = asker.question
            check_constraints(asked.graph, wanted, asked.cluster.num_devices)
            if base is None:
                model = asker.prices(asked.cluster)
                base = Analysis(asked.graph, asked.cluster, model, Constraints(), asked.optimizer)
            shapes(base.under(wanted))
        except (ConstraintError, ShardingError) as refusal:
            error = refusal
        if error is not None:
            return Conflict(names, _text(part, error))
    return None


def _subsets(given: Iterable[str]) -> list[tuple[str, ...]]:
    names = list(given)
    sets = [found for size in range(1, len(names) + 1) for found in combinations(names, size)]
    return sets[:MAX_SETS]


def _text(part: dict[str, object], error: Exception) -> str:
    if len(part) == 1:
        return str(error)
    words = [constraint_words({name: value}) for name, value in part.items()]
    joined = f"{', '.join(words[:-1])} and {words[-1]}"
    # a refusal begins by naming the constraints that it is about, which was just done
    reason = re.sub(r"^constraints? (?:\w+=\S+(?:, | and )?)+: ", "", str(error))
    return f"constraints {joined} contradict each other: {reason}"
