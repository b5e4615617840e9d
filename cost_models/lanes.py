"""What a device does at once: lanes, the pieces of an action on them, slow-downs, shared links.

A device has four lanes. ``compute`` does one thing at a time; ``intra`` (links inside a node),
``inter`` (links between nodes) and ``copy`` (host memory) each run their collectives or copies one
after another. Messages between pipeline ranks have a queue for each directed pair and use the
medium, ``intra`` or ``inter``, beside the collectives on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from autopar.errors import ConfigError


class Lane(StrEnum):
    """What one device can keep busy at the same time."""

    COMPUTE = "compute"
    INTRA = "intra"
    INTER = "inter"
    COPY = "copy"


COMMUNICATION_LANES = (Lane.INTRA, Lane.INTER, Lane.COPY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of an action, on one lane.

    The pieces of an action start in order. One that does not overlap starts when the one before it
    that does not overlap has ended, and holds back all that follows. One that overlaps enters its
    lane at that moment too, but holds nothing back: what reads its result names it in ``joins``.
    The step ends when all have ended.

    Attributes:
        lane: Where.
        seconds: Alone on its lane, with nothing that slows it.
        label: What it is, such as ``"all_gather layers.3"``; what ``joins`` of others refer to.
        overlaps: Whether the action goes on beside it; not on the compute lane.
        joins: Labels of overlapping segments that have to end before this one starts: those of the
            same stage and micro-batch, else those that the stage issued once per step. The last
            one issued counts; a label that was not issued is an error.
    """

    lane: Lane
    seconds: float
    label: str = ""
    overlaps: bool = False
    joins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (isfinite(self.seconds) and self.seconds >= 0):
            raise ConfigError(
                f"segment {self.label!r} on {self.lane}: takes {self.seconds} seconds, must be a "
                "number of at least 0"
            )
        if self.overlaps and self.lane is Lane.COMPUTE:
            raise ConfigError(
                f"segment {self.label!r}: the compute lane does one thing at a time; only segments "
                f"on {', '.join(COMMUNICATION_LANES)} overlap"
            )


@dataclass(frozen=True, slots=True)
class Interference:
    """How much slower a lane is while another lane of the same device is busy.

    Attributes:
        factors: (Slowed lane, busy lane) -> factor of at least 1; 1 for those left out. With
            several busy lanes the factors multiply. A message counts on both of its devices and is
            slowed by the worse one.
    """

    factors: Mapping[tuple[Lane, Lane], float]

    def __post_init__(self) -> None:
        for (slowed, busy), factor in self.factors.items():
            if not (isfinite(factor) and factor >= 1):
                raise ConfigError(
                    f"interference: {slowed} beside {busy} has the factor {factor}, must be at "
                    "least 1 (the seconds beside it over the seconds alone)"
                )

    @classmethod
    def between(cls, compute: float, communication: float) -> Interference:
        """The same for all lanes of communication.

        Args:
            compute: Factor of compute while any one of them is busy.
            communication: Factor of each of them while compute is busy.
        """
        pairs = [(lane, Lane.COMPUTE) for lane in COMMUNICATION_LANES]
        factors = {(busy, slowed): compute for slowed, busy in pairs}
        return cls({**factors, **dict.fromkeys(pairs, communication)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLink:
    """A link that several pipeline ranks use, such as the adapters of a node.

    Of ``n`` transfers on it at the same time each goes at ``min(1, full_speed / n)`` of its speed
    alone. A message uses the link of its sender.

    Attributes:
        ranks: Pipeline ranks behind it.
        lane: Which traffic of theirs goes over it: messages and collectives of that lane.
        full_speed: Transfers at once that do not slow each other.
    """

    ranks: tuple[int, ...]
    lane: Lane = Lane.INTER
    full_speed: float = 1.0

    def __post_init__(self) -> None:
        if self.lane is Lane.COMPUTE or not self.full_speed > 0:
            raise ConfigError(
                f"shared link of ranks {self.ranks}: is on lane {self.lane} with full_speed "
                f"{self.full_speed}; the lane must be one of communication, full_speed above 0"
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise ConfigError(
                f"shared link of ranks {self.ranks}: a rank stands twice; name each once"
            )


def links_of_nodes(node_of: Sequence[int], *, full_speed: float = 1.0) -> tuple[SharedLink, ...]:
    """One shared link to other nodes for each node.

    Args:
        node_of: Node of every pipeline rank.
        full_speed: As of :class:`SharedLink`.

    >>> [link.ranks for link in links_of_nodes([0, 0, 1])]
    [(0, 1), (2,)]
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        members.setdefault(node, []).append(rank)
    return tuple(
        SharedLink(ranks=tuple(ranks), full_speed=full_speed)
        for _, ranks in sorted(members.items())
    )
