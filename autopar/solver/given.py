"""Constraints as a user gave them: listed, written out, and read back from a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from autopar.errors import PlanError
from autopar.plan.types import AppliedConstraint, ScheduleKind
from autopar.solver.constraints import Constraints

_COUNTS = ("dp", "tp", "pp", "virtual", "num_microbatches", "zero")


def given_constraints(constraints: Constraints) -> dict[str, object]:
    """Constraints that are not free: name -> value."""
    free = Constraints()
    return {
        f.name: getattr(constraints, f.name)
        for f in fields(constraints)
        if getattr(constraints, f.name) != getattr(free, f.name)
    }


def with_degrees(constraints: Constraints, degrees: Mapping[str, int]) -> Constraints:
    """Constraints with the degrees of a shape, where they leave them free.

    >>> with_degrees(Constraints(tp=2), {"tp": 4, "pp": 3}).pp
    3
    """

    def degree(name: str, own: int | None) -> int | None:
        return degrees.get(name) if own is None else own

    return replace(
        constraints,
        dp=degree("dp", constraints.dp),
        tp=degree("tp", constraints.tp),
        pp=degree("pp", constraints.pp),
        virtual=degree("virtual", constraints.virtual),
        num_microbatches=degree("num_microbatches", constraints.num_microbatches),
    )


def constraint_words(given: Mapping[str, object]) -> str:
    """Constraints as a user writes them.

    >>> constraint_words({"tp": 8, "boundaries": ("layers.4",)})
    "tp=8, stages=['layers.4']"
    """
    texts = []
    for name, value in given.items():
        shown = list(value) if isinstance(value, tuple) else value
        word = "stages" if name == "boundaries" else name
        texts.append(f"{word}={str(shown)!r}" if isinstance(shown, str) else f"{word}={shown!r}")
    return ", ".join(texts)


def constraints_of(applied: Iterable[AppliedConstraint]) -> Constraints:
    """The user's constraints that a plan was made under.

    Args:
        applied: ``plan.constraints``; those of other origin are left out.

    Raises:
        PlanError: One is not understood.
    """
    found: dict[str, object] = {}
    tables: dict[str, dict[str, str]] = {}
    for item in applied:
        if item.origin != "user":
            continue
        name, value = item.name, item.value
        try:
            if name in ("zero", "warmup") and value.startswith("("):
                found[name] = tuple(int(part) for part in value.strip("()").split(",") if part)
            elif name in _COUNTS:
                found[name] = int(value)
            elif name == "schedule":
                found[name] = ScheduleKind(value)
            elif name in ("placements", "recompute") and ": " in value:
                pattern, _, word = value.rpartition(": ")
                tables.setdefault(name, {})[pattern] = word
            elif name == "recompute":
                found[name] = value
            elif name == "stages":
                found["boundaries"] = tuple(value.split(", "))
            elif name in ("sequence_parallel", "microbatch_statistics"):
                found[name] = {"True": True, "False": False}[value]
            elif name == "offload":
                words = tuple(value.split(", "))
                found[name] = words if len(words) > 1 else value
            elif name == "expert_capacity":
                found[name] = float(value)
            else:
                raise PlanError(_unknown(item))
        except (ValueError, KeyError):
            raise PlanError(_unknown(item)) from None
    return Constraints(**found, **tables)  # type: ignore[arg-type]


def _unknown(item: AppliedConstraint) -> str:
    return (
        f"the plan's constraint {item.name}={item.value} is not understood; plan again with this "
        "version of autopar"
    )
