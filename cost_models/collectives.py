"""Alpha-beta time of every collective.

``n`` is the size of the group, ``alpha`` the link's latency, ``B`` its bandwidth. The **payload**
is the larger of a rank's input and output, that is

============== ===============================================================
all_reduce     the tensor
all_gather     the gathered output (``n`` times a rank's input)
reduce_scatter the input (``n`` times a rank's output)
all_to_all     a rank's input, which is as large as its output
broadcast      the tensor
p2p            the tensor that is sent
============== ===============================================================

Groups of one and payloads of 0 bytes are free. Time of the reduction arithmetic and of kernel
launches is taken to be inside alpha.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009 (ring); Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 35(12), 2009 (tree); ours (the choice).
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil, log2

from autopar.cluster.topology import GroupLinks, Link
from autopar.errors import ConfigError


class CollectiveKind(StrEnum):
    """Kinds of communication; the values are the names of the ``comm.*`` operators."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    P2P = "p2p"


class Algorithm(StrEnum):
    """How an all-reduce or broadcast goes round.

    gloo has rings only; NCCL takes what is faster for the size.
    """

    RING = "ring"
    TREE = "tree"
    BEST = "best"


def collective_kind(text: str) -> CollectiveKind:
    """The kind called ``text``, with or without ``"comm."``.

    Raises:
        ConfigError: There is none.
    """
    name = text.removeprefix("comm.")
    if name == "all_to_all_rows":  # priced by its row budget
        return CollectiveKind.ALL_TO_ALL
    try:
        return CollectiveKind(name)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no collective; known are {', '.join(CollectiveKind)}"
        ) from None


def all_reduce_time_s(
    payload_bytes: float, group_size: int, *, link: Link, algorithm: Algorithm = Algorithm.RING
) -> float:
    """Time of an all-reduce.

    Ring: ``2 (n - 1) (alpha + payload / n / B)``, a reduce-scatter and an all-gather of ``n - 1``
    equal steps. Tree: ``2 ceil(log2 n) alpha + 2 payload / B``, pipelined over two trees.

    >>> from autopar.cluster.topology import LinkKind
    >>> link = Link(kind=LinkKind.PCIE, latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    >>> round(all_reduce_time_s(4000, 4, link=link) * 1e6, 3)
    12.0
    """
    if _is_free(payload_bytes, group_size):
        return 0.0
    steps = 2 * (group_size - 1)
    ring_s = steps * link.time_s(payload_bytes / group_size)
    depth = ceil(log2(group_size))
    tree_s = 2 * depth * link.latency_s + 2 * payload_bytes / link.bandwidth_bytes_per_s
    return _choose(algorithm, ring_s, tree_s)


def all_gather_time_s(payload_bytes: float, group_size: int, *, link: Link) -> float:
    """Time of a ring all-gather, payload its output: ``(n - 1) (alpha + payload / n / B)``."""
    if _is_free(payload_bytes, group_size):
        return 0.0
    return (group_size - 1) * link.time_s(payload_bytes / group_size)


def reduce_scatter_time_s(payload_bytes: float, group_size: int, *, link: Link) -> float:
    """Time of a ring reduce-scatter, payload its input: that of the all-gather back."""
    return all_gather_time_s(payload_bytes, group_size, link=link)


def broadcast_time_s(
    payload_bytes: float, group_size: int, *, link: Link, algorithm: Algorithm = Algorithm.BEST
) -> float:
    """Time of a pipelined broadcast.

    Ring: ``(n - 1) alpha + payload / B``. Tree: ``ceil(log2 n) alpha + payload / B``.
    """
    if _is_free(payload_bytes, group_size):
        return 0.0
    send_s = payload_bytes / link.bandwidth_bytes_per_s
    ring_s = (group_size - 1) * link.latency_s + send_s
    tree_s = ceil(log2(group_size)) * link.latency_s + send_s
    return _choose(algorithm, ring_s, tree_s)


def all_to_all_time_s(payload_bytes: float, links: GroupLinks) -> float:
    """Time of an all-to-all by pairwise exchange.

    On one machine ``(n - 1) (alpha + payload / n / B)``. Over several machines, ``k`` ranks on
    each, a rank sends ``(k - 1) / n`` of its payload inside and ``(n - k) / n`` through its own
    share of the adapter; both go at the same time, so the slower one counts.
    """
    if _is_free(payload_bytes, links.size):
        return 0.0
    block_bytes = payload_bytes / links.size
    inside_s = outside_s = 0.0
    if links.intra is not None:
        inside_s = (links.per_machine - 1) * links.intra.time_s(block_bytes)
    if links.inter is not None:
        outside_s = (links.size - links.per_machine) * links.inter.time_s(block_bytes)
    return max(inside_s, outside_s)


def p2p_time_s(payload_bytes: float, *, link: Link) -> float:
    """Time from the start of a send to the end of its receive: ``alpha + payload / B``."""
    return link.time_s(payload_bytes) if payload_bytes > 0 else 0.0


def collective_time_s(
    kind: CollectiveKind,
    payload_bytes: float,
    *,
    links: GroupLinks,
    link: Link,
    algorithm: Algorithm = Algorithm.BEST,
) -> float:
    """Time of a collective of any kind.

    Args:
        kind: Which one.
        payload_bytes: See the module's text, >= 0.
        links: The group's links by level (all-to-all needs them apart).
        link: The link that bounds a ring over the group.
        algorithm: Of all-reduce and broadcast.

    Raises:
        ConfigError: ``payload_bytes`` is negative.
    """
    if payload_bytes < 0:
        raise ConfigError(f"{kind}: payload is {payload_bytes} bytes, must be at least 0")
    size = links.size
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return all_reduce_time_s(payload_bytes, size, link=link, algorithm=algorithm)
        case CollectiveKind.ALL_GATHER:
            return all_gather_time_s(payload_bytes, size, link=link)
        case CollectiveKind.REDUCE_SCATTER:
            return reduce_scatter_time_s(payload_bytes, size, link=link)
        case CollectiveKind.ALL_TO_ALL:
            return all_to_all_time_s(payload_bytes, links)
        case CollectiveKind.BROADCAST:
            return broadcast_time_s(payload_bytes, size, link=link, algorithm=algorithm)
        case CollectiveKind.P2P:
            return 0.0 if size == 1 else p2p_time_s(payload_bytes, link=link)


def _is_free(payload_bytes: float, group_size: int) -> bool:
    return group_size <= 1 or payload_bytes <= 0


def _choose(algorithm: Algorithm, ring_s: float, tree_s: float) -> float:
    match algorithm:
        case Algorithm.RING:
            return ring_s
        case Algorithm.TREE:
            return tree_s
        case Algorithm.BEST:
            return min(ring_s, tree_s)
