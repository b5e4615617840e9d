"""The problem of cutting a chain of blocks into stages, as plain data, and its objective.

See :mod:`autopar.solver.stages` for the formulation that solves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.errors import ConfigError
from autopar.plan.schedule import Alive
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement

SPREAD = 4  # an interleaved stage may be longer than the mean by one part in so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a block.

    Attributes:
        name: What is recomputed: ``"none"``, ``"selective"``, ``"full"``.
        forward_s: Seconds of forward per micro-batch.
        backward_s: Seconds of backward per micro-batch, recomputing included.
        saved_bytes: Kept from forward to backward per micro-batch in flight.
        transient_bytes: The most that is alive inside one pass beyond that.
        weight_s: The part of ``backward_s`` that makes gradients of weights alone.
        held_bytes: Kept between the two halves of a backward per micro-batch.
        host_bytes: Kept in host memory from forward to backward per micro-batch.
        left_bytes: Made by the backward and there until that of the whole stage is done.
    """

    name: str
    forward_s: float
    backward_s: float
    saved_bytes: int
    transient_bytes: int
    weight_s: float = 0.0
    held_bytes: int = 0
    host_bytes: int = 0
    left_bytes: int = 0

    def alive_bytes(self, alive: Alive, stage: int) -> int:
        """Bytes of what is in flight; the first stage does all of a backward in its second half."""
        held = self.saved_bytes if stage == 0 else self.held_bytes
        return alive.before * self.saved_bytes + alive.between * held

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMenu:
    """One block of the chain.

    Attributes:
        key: Blocks with equal keys have equal menus and are interchangeable.
        options: The menu, not empty.
        state_bytes: Parameters, gradients and optimizer state on one device.
        step_s: Seconds once per step (gradient reduction, parameter gathering, optimizer).
        gather_s: What of them comes before the first micro-batch.
        reduce_s: What of them follows backwards: the last one, or each one in equal parts.
        num_reduces: Reductions of the block's gradients per step.
    """

    key: str
    options: tuple[Option, ...]
    state_bytes: int
    step_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    num_reduces: int = 1

    @property
    def each_s(self) -> float:
        """Seconds of reducing after every backward; 0 where that follows the last one alone."""
        return self.reduce_s / self.num_reduces if self.num_reduces > 1 else 0.0

    @property
    def once_s(self) -> float:
        """Seconds once per step: ``step_s`` without what follows every backward."""
        return self.step_s - self.reduce_s if self.num_reduces > 1 else self.step_s

    @property
    def update_s(self) -> float:
        """What of ``step_s`` follows when all ranks are done: the optimizer."""
        return max(0.0, self.step_s - self.gather_s - self.reduce_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """The chain and the pipeline it is cut for.

    Attributes:
        blocks: In forward order.
        boundary_s: Seconds of one message over the boundary before block 1, 2, ..., one way.
        pp: Pipeline ranks.
        virtual: Stages per rank.
        num_microbatches: Micro-batches per step.
        schedule: Order of forwards and backwards.
        in_flight: Most micro-batches alive at once, per stage.
        together: Per rank, micro-batches alive in its stages at moments that no other one exceeds;
            empty: every stage at its most.
        limit_bytes: Memory of a device.
        base_bytes: Bytes on every device whatever it runs.
        fixed_starts: First block of stages 1, 2, ... if given by the user.
        placement: Which rank has which stages.
        forms: Per form that the states of a stage may have, the menu of every block in it; each
            stage has one for all of its blocks. Empty: the one that ``blocks`` have.
        given_forms: Form of every stage, where that is fixed.
    """

    blocks: tuple[BlockMenu, ...]
    boundary_s: tuple[float, ...]
    pp: int
    virtual: int
    num_microbatches: int
    schedule: ScheduleKind
    in_flight: tuple[int, ...]
    limit_bytes: int
    base_bytes: int = 0
    fixed_starts: tuple[int, ...] | None = None
    placement: StagePlacement = StagePlacement.LOOP
    together: tuple[tuple[Mapping[int, Alive], ...], ...] = ()
    forms: tuple[tuple[BlockMenu, ...], ...] = ()
    given_forms: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.fixed_starts is not None and len(self.fixed_starts) != self.num_stages - 1:
            raise ConfigError(
                f"StageProblem: {len(self.fixed_starts)} fixed starts, but {self.num_stages} "
                f"stages need {self.num_stages - 1}; consider shapes with the named stages only"
            )

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.pp * self.virtual

    @property
    def menus(self) -> tuple[tuple[BlockMenu, ...], ...]:
        """Per form the menu of every block; there is one form at least."""
        return self.forms or (self.blocks,)

    @property
    def most_blocks(self) -> int:
        """Most blocks that a stage may take.

        Where ranks have several stages these are to be about equally long: ranks pass them in
        step, and a rank that is in a long one holds up those that are in short ones. That is part
        of the declared space, so that the bound may rely on it.
        """
        count, stages = len(self.blocks), self.num_stages
        if self.virtual == 1 or self.fixed_starts is not None:
            return count
        return -(-count // stages) + max(1, count // (SPREAD * stages))

    @property
    def mesh(self) -> MeshShape:
        """The pipeline alone."""
        return MeshShape(pp=self.pp, virtual=self.virtual, placement=self.placement)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Stages of a pipeline rank."""
        return self.mesh.stages_of(device)

    def moments(self, device: int) -> tuple[Mapping[int, Alive], ...]:
        """Micro-batches alive in the stages of a rank, at the moments that decide its memory."""
        if self.together:
            return self.together[device]
        return ({s: Alive(self.in_flight[s], 0) for s in self.stages_of(device)},)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """Cuts and options.

    Attributes:
        starts: First block of stages 1, 2, ...
        options: Index of the chosen option per block.
        objective_s: The surrogate, recomputed from the choice.
        bound_s: Lower bound of the surrogate over all choices.
        memory_bytes: Estimated peak per pipeline rank.
        is_optimal: Whether the search ended by proof.
        forms: Form of every stage's states; empty where there is no choice.
    """

    starts: tuple[int, ...]
    options: tuple[int, ...]
    objective_s: float
    bound_s: float
    memory_bytes: tuple[int, ...]
    is_optimal: bool
    forms: tuple[int, ...] = ()


def bounds(starts: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Half-open runs of blocks, given the first block of stages 1, 2, ...

    >>> bounds([2, 3], 5)
    [(0, 2), (2, 3), (3, 5)]
    """
    return list(pairwise((0, *starts, count)))


def surrogate_s(problem: StageProblem, starts: Sequence[int], options: Sequence[int]) -> float:
    """The surrogate of a choice: the independent statement of the objective."""
    runs = bounds(starts, len(problem.blocks))
    chosen = [b.options[o] for b, o in zip(problem.blocks, options, strict=True)]
    forward = [sum(chosen[i].forward_s for i in range(*run)) for run in runs]
    each = [sum(problem.blocks[i].each_s for i in range(*run)) for run in runs]
    backward = [sum(chosen[i].backward_s for i in range(*run)) for run in runs]
    backward = [b + e for b, e in zip(backward, each, strict=True)]
    total = [f + b for f, b in zip(forward, backward, strict=True)]
    step = [sum(problem.blocks[i].once_s for i in range(*run)) for run in runs]
    message = [0.0, *(problem.boundary_s[s - 1] for s in starts)]
    count, p = problem.num_microbatches, problem.pp
    device_step = max(sum(step[s] for s in problem.stages_of(d)) for d in range(p))
    rounds = (ScheduleKind.GPIPE, ScheduleKind.FORWARD)
    if problem.schedule in rounds and problem.virtual == 1:
        period = max(forward) + max(backward)
        return sum(total) + 2 * sum(message) + (count - 1) * period + device_step
    if problem.schedule.splits_backward:
        weight = [
            sum(chosen[i].weight_s for i in range(*run)) + e
            for run, e in zip(runs, each, strict=True)
        ]
        first = [t - w for t, w in zip(total, weight, strict=True)]
        ahead = [sum(forward[:d]) + sum(message[: d + 1]) for d in range(p)]
        busy = [sum(total[s] for s in problem.stages_of(d)) for d in range(p)]
        chain = sum(first) + 2 * sum(message) + (count - 1) * max(total)
        return max(*(a + count * b for a, b in zip(ahead, busy, strict=True)), chain) + device_step
    if problem.virtual == 1:
        period = max(
            (sum(total[i : j + 1]) + 2 * sum(message[i + 1 : j + 1])) / (j - i + 1)
            for i in range(p)
            for j in range(i, p)
        )
        return sum(total) + 2 * sum(message) + (count - 1) * period + device_step
    # ranks pass the chunks in step, so each chunk lasts as long as its slowest stage
    period = sum(max(total[chunk : chunk + p]) for chunk in range(0, len(total), p))
    fill = sum(total[s] + 2 * message[s + 1] for s in range(p - 1))
    chain = sum(total) + 2 * sum(message) + (count - 1) * max(total)
    return max(count * period + fill, chain) + device_step


def memory_bytes(
    problem: StageProblem, starts: Sequence[int], options: Sequence[int]
) -> tuple[int, ...]:
    """Estimated peak per pipeline rank."""
    runs = bounds(starts, len(problem.blocks))
    result = []
    saved, held = [0] * len(runs), [0] * len(runs)
    for stage, run in enumerate(runs):
        chosen = [problem.blocks[i].options[options[i]] for i in range(*run)]
        saved[stage] = sum(o.saved_bytes for o in chosen)
        # the first stage does all of a backward in its second half
        held[stage] = sum(o.held_bytes for o in chosen) if stage else saved[stage]
    for device in range(problem.pp):
        amount, transient = problem.base_bytes, 0
        for stage in problem.stages_of(device):
            for i in range(*runs[stage]):
                amount += problem.blocks[i].state_bytes
                transient = max(transient, problem.blocks[i].options[options[i]].transient_bytes)
        alive = max(
            sum(n.before * saved[s] + n.between * held[s] for s, n in moment.items())
            for moment in problem.moments(device)
        )
        result.append(amount + alive + transient)
    return tuple(result)


def left_beside_bytes(
    problem: StageProblem, starts: Sequence[int], options: Sequence[int]
) -> tuple[int, int]:
    """What the backward of the worst stage takes beyond its estimate, at least and at most.

    The estimate takes blocks as if each were alone. A block's backward runs beside what those of
    later blocks of its stage have left: gradients of weights take the place of what these blocks
    had saved, and may be more. At most all of it is there when most is needed.
    """
    chosen = [b.options[o] for b, o in zip(problem.blocks, options, strict=True)]
    least = most = 0
    for low, high in bounds(starts, len(chosen)):
        largest = max(o.transient_bytes for o in chosen[low:high])
        left = grown = 0  # so far, without what was freed; of blocks that leave more than that
        for option in reversed(chosen[low:high]):
            least = max(least, left + option.transient_bytes - largest)
            left += option.left_bytes - option.saved_bytes
            grown += max(0, option.left_bytes - option.saved_bytes)
        most = max(most, grown)
    return least, most


def least_memory_bytes(problem: StageProblem) -> int:
    """What the fullest device needs at least: the mean over the devices of the leanest choice."""
    states = sum(b.state_bytes for b in problem.blocks)
    saved = sum(min(o.saved_bytes for o in b.options) for b in problem.blocks)
    return problem.base_bytes + (states + saved * min(problem.in_flight)) // problem.pp
