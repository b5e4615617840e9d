"""What is said if nothing fits: what comes closest, by how much, and a way out that was tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.solver.assemble import Outcome
from autopar.solver.candidates import Shape, memory_shortfall
from autopar.solver.constraints import Constraints
from autopar.solver.ranked import Misfit, Ranked
from autopar.units import format_bytes, round_up_bytes

NUM_SHORTFALLS = 6  # shapes whose least memory is worked out when nothing fits
NUM_TOLD = 3  # of them
PATIENCE = 10  # times the time limit, while nothing that fits was found
ROOM_PERCENT = (100, 105, 115, 130, 160, 200)  # of the estimated need, tried as a limit


class InVain(Protocol):
    """A search that found nothing.

    Attributes:
        cluster: What was planned for.
        constraints: What was asked.
        limit_bytes: Memory of a device.
        time_limit_s: The wall-clock guard.
        gives_remedy: Whether a way out is wanted.
        ranked: Shapes that seemed to fit.
        misfits: Shapes that did not.
        errors: Why others are not possible.
    """

    cluster: Cluster
    constraints: Constraints
    limit_bytes: int
    time_limit_s: float | None
    gives_remedy: bool
    ranked: list[Ranked]
    misfits: list[Misfit]
    errors: list[str]

    @property
    def stopped_by(self) -> str:
        """``""``, ``"work"`` or ``"time"``."""
        ...

    @property
    def num_tried(self) -> int:
        """Shapes that were worked out."""
        ...

    def open_the_leanest(self, most: int) -> None:
        """Work out shapes that bounds had excluded."""
        ...

    def has_fit(self, shape: Shape, limit_bytes: int) -> bool:
        """Whether a plan of a shape is found that fits another limit."""
        ...


def nothing_fits(search: InVain, outcomes: Sequence[Outcome]) -> InfeasibleError:
    """What is closest to fitting, and the cheapest way out.

    Args:
        search: It found nothing.
        outcomes: Of shapes that were judged.
    """
    if not search.misfits and not outcomes:
        search.open_the_leanest(NUM_SHORTFALLS)
    rows = [(o.figures.peak_bytes, o.ranked.shape) for o in outcomes if o.host is None]
    hosts = [o.host.shortfall(o.ranked.shape) for o in outcomes if o.host is not None]
    nearest = sorted(search.misfits, key=lambda m: (m.least_bytes, str(m.shape)))
    rows += [(m.needed_bytes(), m.shape) for m in nearest[:NUM_SHORTFALLS]]
    rows = sorted(rows, key=lambda row: (row[0], str(row[1])))[:NUM_TOLD]
    limit = format_bytes(search.limit_bytes)
    text = f"no plan fits {search.cluster} with {limit} per device"
    if search.stopped_by == "time":
        times = "" if search.ranked else f"{PATIENCE} times "
        text = (
            f"no plan for {search.cluster} with {limit} per device was found in {times}"
            f"the time limit of {search.time_limit_s:g} s: {search.num_tried} shapes were "
            "worked out and none fits; raise the time limit"
        )
    elif search.stopped_by:
        text = (
            f"none of the {search.num_tried} most promising shapes of a plan fits "
            f"{search.cluster} with {limit} per device"
        )
    if not rows and search.errors:
        text = f"no plan is possible: {search.errors[0]}"
    remedy = _remedy(search, *rows[0]) if rows and search.gives_remedy else ""
    shortfalls = [
        memory_shortfall(shape, needed, search.limit_bytes, remedy) for needed, shape in rows
    ]
    shortfalls += hosts[: NUM_SHORTFALLS - len(shortfalls)]
    return InfeasibleError(text, tuple(shortfalls), num_tried=search.num_tried)


def _remedy(search: InVain, needed: int, shape: Shape) -> str:
    wish = search.constraints
    if wish.recompute in ("none", "selective"):
        return f"allow recompute (now {wish.recompute!r})"
    if wish.zero in (0, 1, 2) and shape.mesh.dp > 1:
        return f"allow zero=3 (now {wish.zero})"
    if isinstance(wish.zero, tuple) and min(wish.zero) < 3:
        return f"allow zero=3 in every stage (now {list(wish.zero)})"
    for name in ("tp", "pp", "num_microbatches"):
        if getattr(wish, name) is not None:
            return f"free {name} (now {getattr(wish, name)})"
    # what a shape needs was estimated under another limit: it is tried before it is promised
    limits = (round_up_bytes(needed * percent // 100) for percent in ROOM_PERCENT)
    enough = next((limit for limit in limits if search.has_fit(shape, limit)), None)
    if enough is None:
        return "use more devices, or devices with more memory"
    return f"a plan fits {format_bytes(enough)} per device; use such devices, or more of them"
