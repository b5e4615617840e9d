"""Which plans are considered: mesh shapes, micro-batches, schedules.

Tensor-parallel groups stay inside a machine unless the user asks for more. A shape may leave
devices idle: the full count is tried, and its successive halves (every count up to eight devices),
since a model that is too small loses by splitting further. Where machines are of
several sizes, which few degrees divide, so are the counts of those like the first alone. Where a
count has few divisors, or none that the batch has too, meshes that come near it are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from autopar.cluster import Cluster
from autopar.errors import ConstraintError, ShardingError, Shortfall
from autopar.plan.orders import plain_warmup
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
from autopar.solver.analysis import Analysis
from autopar.solver.constraints import Constraints, zero_words

HAND_MADE_SAMPLES = (1, 2, 4, 8)  # per rank and micro-batch

MAX_MICROBATCH_COUNTS = 7  # spread evenly if there are more divisors, beside those set up by hand
ALL_COUNTS_UP_TO = 8
VIRTUAL_STAGES = (2, 4)


@dataclass(frozen=True, slots=True)
class Shape:
    """A mesh with micro-batches and a schedule; splits, cuts and recompute are open."""

    mesh: MeshShape
    num_microbatches: int
    schedule: ScheduleKind
    warmup: tuple[int, ...] | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of mb, dp, tp."""
        return (self.num_microbatches, self.mesh.dp, self.mesh.tp)

    @property
    def degrees(self) -> dict[str, int]:
        """The shape as constraints."""
        mesh = self.mesh
        return {
            "dp": mesh.dp,
            "tp": mesh.tp,
            "pp": mesh.pp,
            "virtual": mesh.virtual,
            "num_microbatches": self.num_microbatches,
        }

    def __str__(self) -> str:
        """Such as ``pp2 x tp4, 8 micro-batches, 1f1b``."""
        plural = "" if self.num_microbatches == 1 else "es"
        text = f"{self.mesh}, {self.num_microbatches} micro-batch{plural}, {self.schedule}"
        return text if self.warmup is None else f"{text}, warm-up {self.warmup}"


def shapes(analysis: Analysis) -> tuple[Shape, ...]:
    """Every shape of the declared space, smallest number of micro-batches first.

    Raises:
        ConstraintError: The constraints leave no shape.
    """
    batch, wish = analysis.batch_size, analysis.constraints
    found = []
    for mesh in _meshes(analysis):
        warmup = None if wish.warmup == plain_warmup(mesh.pp) else wish.warmup
        for count in _microbatch_counts(analysis, batch, mesh.dp):
            if warmup is not None and count < max(warmup):
                continue  # there are no more forwards than micro-batches
            found += [Shape(mesh, count, kind, warmup) for kind in _schedules(analysis, mesh)]
    if not found:
        raise _nothing(analysis, batch)
    return tuple(found)


def _meshes(analysis: Analysis) -> Iterator[MeshShape]:
    """Meshes of the whole cluster and of its halves, then those that leave a few devices idle."""
    wish, seen = analysis.constraints, set[MeshShape]()
    for dp, tp, pp in (*_whole_degrees(analysis), *_most_degrees(analysis)):
        if wish.highest_zero and dp == 1:
            continue  # ZeRO splits over data ranks: with one it would be dropped
        for virtual, placement in _placements(wish):
            mesh = MeshShape(dp=dp, tp=tp, pp=pp, virtual=virtual, placement=placement)
            if mesh not in seen and _is_wanted(analysis, mesh):
                seen.add(mesh)
                yield mesh


def _whole_degrees(analysis: Analysis) -> Iterator[tuple[int, int, int]]:
    """``dp, tp, pp`` of meshes that use all devices, or one of the smaller numbers of them."""
    wish, cluster = analysis.constraints, analysis.cluster
    for used in _used_counts(cluster, wish):
        for tp in _tp_choices(cluster, used) if wish.tp is None else (wish.tp,):
            for pp in _pipeline_sizes(analysis, used):
                if used % (tp * pp) and wish.dp is None:
                    continue
                dp = used // (tp * pp)
                if wish.dp is not None and dp != wish.dp:
                    if used != cluster.num_devices or wish.dp * tp * pp > used:
                        continue
                    dp = wish.dp  # fixed degrees may leave devices idle
                yield dp, tp, pp


def _most_degrees(analysis: Analysis) -> Iterator[tuple[int, int, int]]:
    """``dp, tp, pp`` that use the most devices: one for each ``tp`` and doubling of ``pp``.

    A count with large prime factors has few divisors, and the batch need not have them: with 31
    machines of 8 and a batch of 2,240 no mesh uses all devices but those of 31, 62, ... stages.
    A few idle devices are better. Where all can be used, these meshes are among those that do.
    """
    wish, cluster, batch = analysis.constraints, analysis.cluster, analysis.batch_size
    total = cluster.num_devices
    if wish.dp is not None:
        return
    sizes = [d for d in range(min(total, batch), 0, -1) if batch % d == 0]
    for tp in _tp_choices(cluster, total) if wish.tp is None else (wish.tp,):
        best: dict[int, tuple[int, int, int]] = {}  # by doublings of pp: used, -pp, dp
        for pp in _pipeline_sizes(analysis, total):
            room = total // (tp * pp)
            dp = next((d for d in sizes if d <= room and _may_divide(analysis, d)), 0)
            found = (dp * tp * pp, -pp, dp)
            if 2 * found[0] > total and found > best.get(pp.bit_length(), (0, 0, 0)):
                best[pp.bit_length()] = found
        for _, minus_pp, dp in best.values():
            yield dp, tp, -minus_pp


def _may_divide(analysis: Analysis, dp: int) -> bool:
    """Whether some number of micro-batches goes with so many data ranks."""
    return bool(_microbatch_counts(analysis, analysis.batch_size, dp))


def _pipeline_sizes(analysis: Analysis, most: int) -> Sequence[int]:
    """Numbers of pipeline ranks, up to so many."""
    wish = analysis.constraints
    fixed = wish.pp if wish.warmup is None else len(wish.warmup)
    if fixed is not None:
        return (fixed,)
    return _stage_counts(analysis, min(most, len(analysis.chain.blocks)))


def _is_wanted(analysis: Analysis, mesh: MeshShape) -> bool:
    """Whether a mesh can have its stages, and the constraints speak of so many."""
    wish, blocks = analysis.constraints, len(analysis.chain.blocks)
    is_vain = mesh.num_stages > blocks or not analysis.is_interleavable
    if mesh.virtual > 1 and (mesh.pp == 1 or (wish.virtual is None and is_vain)):
        return False  # on one rank they would be one stage
    if wish.boundaries and mesh.num_stages != len(wish.boundaries) + 1:
        return False
    return not isinstance(wish.zero, tuple) or mesh.num_stages == len(wish.zero)


def _placements(wish: Constraints) -> Iterator[tuple[int, StagePlacement]]:
    """Stages per pipeline rank and how they are placed."""
    free = (1, *VIRTUAL_STAGES) if wish.warmup is None else (1,)
    for virtual in _degrees(wish.virtual, free):
        if wish.schedule is not ScheduleKind.ZBV:
            yield virtual, StagePlacement.LOOP
        if virtual == 2 and wish.schedule in (None, ScheduleKind.ZBV):
            yield virtual, StagePlacement.V


def device_counts(total: int) -> list[int]:
    """Numbers of working devices that are tried, most first.

    >>> device_counts(12), device_counts(3)
    ([12, 6, 3, 1], [3, 2, 1])
    """
    if total <= ALL_COUNTS_UP_TO:
        return list(range(total, 0, -1))
    counts = [total]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def _used_counts(cluster: Cluster, wish: Constraints) -> list[int]:
    """Numbers of working devices, most first.

    Those of the whole cluster, and of the machines like the first that come first; if the fixed
    degrees divide none of them, the largest number that they divide.
    """
    total = cluster.num_devices
    sizes = [m.num_devices for m in cluster.machines]
    alike = sum(takewhile(lambda size: size == sizes[0], sizes))
    counts = {*device_counts(total), *device_counts(alike)}
    unit = (wish.tp or 1) * (wish.pp or 1)
    if wish.dp is None and not any(count % unit == 0 for count in counts):
        counts |= {total // unit * unit} - {0}
    return sorted(counts, reverse=True)


def _tp_choices(cluster: Cluster, used: int) -> list[int]:
    """Sizes of tensor-parallel groups that stay inside the machines of the first ranks.

    A part of one machine has those that it would have as a machine of its own.
    """
    sizes, start = [], 0
    starts: list[int] = []
    for machine in cluster.machines:
        if start >= used:
            break
        sizes.append(machine.num_devices)
        starts.append(start)
        start += machine.num_devices
    first = sizes[0]
    part = used if used < first else first
    whole = [n for n in range(1, min(sizes) + 1) if first % n == 0 or part % n == 0]
    return [n for n in whole if all(start % n == 0 for start in starts)]


def _stage_counts(analysis: Analysis, most: int) -> list[int]:
    boundaries = analysis.constraints.boundaries
    if boundaries:
        stages = len(boundaries) + 1
        return [n for n in range(1, stages + 1) if stages % n == 0]
    return list(range(1, most + 1))


def _degrees(fixed: int | None, choices: Sequence[int]) -> Sequence[int]:
    return choices if fixed is None else (fixed,)


def _microbatch_counts(analysis: Analysis, batch: int, dp: int) -> list[int]:
    """Legal numbers of micro-batches for a number of data ranks."""
    wish = analysis.constraints.num_microbatches
    if batch % dp:
        return []
    counts = [n for n in range(1, batch // dp + 1) if (batch // dp) % n == 0]
    if wish is not None:
        return [n for n in counts if n == wish and _is_legal(analysis, n, dp)]
    if len(counts) > MAX_MICROBATCH_COUNTS:
        last = len(counts) - 1
        steps = MAX_MICROBATCH_COUNTS - 1
        spread = {counts[i * last // steps] for i in range(MAX_MICROBATCH_COUNTS)}
        by_hand = {n for n in counts if batch // dp // n in HAND_MADE_SAMPLES}
        counts = sorted(spread | by_hand)
    legal: list[int] = []
    if len(counts) > 2 and counts[0] == 1 and _is_legal(analysis, counts[-1], dp):
        # samples that do not mix in the most micro-batches do not in fewer
        return counts if _is_legal(analysis, 1, dp) else counts[1:]
    for count in counts:
        if not _is_legal(analysis, count, dp):
            if count > 1:
                break  # samples mix: no larger number is legal either
            continue
        legal.append(count)
    return legal


def neighbours(analysis: Analysis, shape: Shape) -> Iterator[Shape]:
    """A shape with the next smaller and the next larger legal number of micro-batches."""
    if analysis.constraints.num_microbatches is not None:
        return
    parts, count = analysis.batch_size // shape.mesh.dp, shape.num_microbatches
    divisors = [n for n in range(1, parts + 1) if parts % n == 0]
    at = divisors.index(count)
    for other in divisors[max(0, at - 1) : at] + divisors[at + 1 : at + 2]:
        if _is_legal(analysis, other, shape.mesh.dp):
            yield replace(shape, num_microbatches=other)


def _is_legal(analysis: Analysis, count: int, dp: int) -> bool:
    try:
        analysis.data(count, dp)
    except ShardingError:
        return False
    return True


def _schedules(analysis: Analysis, mesh: MeshShape) -> list[ScheduleKind]:
    wish = analysis.constraints.schedule
    if not analysis.trains:
        return [ScheduleKind.FORWARD]
    if not analysis.has_loss:  # the user computes the loss when all forwards are done
        return [ScheduleKind.GPIPE]
    if mesh.placement is StagePlacement.V:
        return [ScheduleKind.ZBV]
    if wish in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE) and mesh.virtual > 1:
        return []
    if wish is ScheduleKind.INTERLEAVED and mesh.virtual == 1 and mesh.pp > 1:
        return [wish] if analysis.constraints.virtual == 1 else []
    if wish is not None:
        return [wish]
    return [ScheduleKind.ONE_F_ONE_B if mesh.virtual == 1 else ScheduleKind.INTERLEAVED]


def _nothing(analysis: Analysis, batch: int) -> ConstraintError:
    """Why the constraints leave no shape."""
    wish, total = analysis.constraints, analysis.cluster.num_devices
    if wish.dp is not None and batch % wish.dp:
        return ConstraintError(
            f"constraint dp={wish.dp}: does not divide {analysis.batch_words}; "
            "use a divisor, or another batch"
        )
    if wish.num_microbatches is not None:
        parts = wish.num_microbatches * (wish.dp or 1)
        if batch % parts:
            given = f"num_microbatches={wish.num_microbatches}"
            given += f" with dp={wish.dp}" if wish.dp is not None else ""
            return ConstraintError(
                f"constraint {given}: {parts} does not divide {analysis.batch_words}; "
                "use a divisor, or another batch"
            )
        try:
            analysis.data(wish.num_microbatches, wish.dp or 1)
        except ShardingError as error:
            return ConstraintError(f"constraint num_microbatches={wish.num_microbatches}: {error}")
    if analysis.experts:
        try:
            analysis.data(wish.num_microbatches or 1, wish.dp or 2)
        except ShardingError as error:
            return ConstraintError(f"constraint placements: {error}")
    if wish.highest_zero:
        try:
            analysis.data(wish.num_microbatches or 1, wish.dp or 2)
        except ShardingError as error:
            return ConstraintError(
                f"constraint zero={zero_words(wish.zero)}: ZeRO splits over 2 data ranks or more, "
                f"and {error}; or leave zero out"
            )
    counts = (_microbatch_counts(analysis, batch, mesh.dp) for mesh in _meshes(analysis))
    if wish.warmup is not None and any(counts):  # nothing but the depths leaves these out
        deepest = max(wish.warmup)
        return ConstraintError(
            f"constraint warmup={wish.warmup}: {deepest} forwards before the first backward need "
            f"{deepest} micro-batches or more, and {analysis.batch_words} allows none of such "
            "numbers with the other constraints; use smaller depths, or a larger batch"
        )
    least = f"{wish.pp or 1} stages or more"
    if (wish.virtual or 1) > 1:
        least = f"virtual={wish.virtual} on 2 pipeline ranks or more"
    elif wish.schedule in (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV):
        least = f"schedule={wish.schedule} on 2 pipeline ranks or more"
    if isinstance(wish.zero, tuple):
        least = f"zero={zero_words(wish.zero)} for {len(wish.zero)} stages"
    return ConstraintError(
        f"constraints leave no plan: dp={wish.dp or 'any'}, tp={wish.tp or 'any'}, "
        f"pp={wish.pp or 'any'}, {least} on {total} devices with "
        f"{len(analysis.chain.blocks)} blocks and a batch of {batch}; free one of them"
    )


def grid(shapes: tuple[Shape, ...], batch: int) -> Iterator[Shape]:
    """The shapes that people set up by hand: powers of two over tensors, small micro-batches.

    Args:
        shapes: The declared space.
        batch: Samples of a step.
    """
    for shape in shapes:
        tp, parts = shape.mesh.tp, shape.num_microbatches * shape.mesh.dp
        if tp & (tp - 1) == 0 and batch // parts in HAND_MADE_SAMPLES:
            yield shape


def memory_shortfall(
    shape: Shape, needed_bytes: int, limit_bytes: int, remedy: str = ""
) -> Shortfall:
    """That a shape needs more memory than there is."""
    return Shortfall(
        what=f"memory of a device with {shape}",
        needed=needed_bytes,
        available=limit_bytes,
        unit="bytes",
        remedy=remedy,
        degrees=shape.degrees,
    )


def plain_shapes(shapes: Iterable[Shape]) -> frozenset[Shape]:
    """Those that need no search: one device, and the batch over as many as it can be cut for.

    Args:
        shapes: The declared space.
    """
    whole = [s for s in shapes if s.mesh.dp == s.mesh.num_ranks]
    most = max((s.mesh.dp for s in whole), default=1)
    return frozenset(s for s in whole if s.mesh.dp in (1, most))
