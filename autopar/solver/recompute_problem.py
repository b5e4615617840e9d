"""What a block may keep for its backward, as plain data, and the figures of a choice.

The problem speaks of the *local* operators of one block: those that
:mod:`autopar.sharding.localize` emits, collectives included, each with its seconds and with the
storages that it makes and reads. A *group* is all local operators of
one operator of the graph (a matmul and the collective that resolves its sum): they are remade
together or not at all, as in :class:`~autopar.sharding.decisions.Decisions`. What comes from the
block before may be a group as well: it stands for the operators that lead to it there.

A choice is a set of groups. What backward reads is kept, unless its operator is in the set: then
it is made again from its own operands, which are kept or made again in turn. Views are always made
again.

What is kept may be kept in host memory instead, by *units*: all that one operator of the graph
makes and backward keeps. Copies run beside the block's operators; what they take longer than these
is waited for. :func:`figures` is the independent statement of what a choice costs; it follows
:mod:`autopar.sharding.split` and :mod:`cost_models.liveness` step by step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cost_models.offload import FREE_COPIES, CopyPrice

ALWAYS_REMADE = -1
ALWAYS_KEPT = -2
UNHIDDEN = 0.005  # of a copy's seconds, though it is no longer than its block: the last ones of a
# forward and the first ones of a backward have nothing beside them, others come unevenly


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOp:
    """One local operator.

    Attributes:
        reads: Values: below the number of operators the result of that operator, else an input.
        group: Which group it is part of; :data:`ALWAYS_REMADE` for views and for what only backward
            needs, :data:`ALWAYS_KEPT` for what must not be made again.
        seconds: Of one run.
        is_backward: Whether backward runs it in any case.
        makes: Storages that it allocates.
        holds: Storages behind its result.
        workspace_bytes: Extra bytes while it runs.
    """

    reads: tuple[int, ...]
    group: int = ALWAYS_KEPT
    seconds: float = 0.0
    is_backward: bool = False
    makes: tuple[int, ...] = ()
    holds: tuple[int, ...] = ()
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInput:
    """What a block reads and does not make.

    Attributes:
        holds: Storages behind it.
        is_received: Whether it is there in forward alone, so that backward has it if it is kept.
        is_gradient: Whether it is a gradient from a later block.
    """

    holds: tuple[int, ...] = ()
    is_received: bool = False
    is_gradient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeProblem:
    """A block.

    Attributes:
        ops: Forward and backward operators in order.
        inputs: What they read and do not make.
        storage_bytes: Size of each storage.
        kept_bytes: What keeping a storage costs this block: its size, or 0 where it lasts anyway
            (parameters) or counts with another block.
        forward_roots: Values that forward must yield whatever is kept.
        backward_roots: Values that backward must yield.
        groups: Operators of the graph in each group.
        sent_roots: Those values of ``backward_roots`` that earlier blocks wait for.
        units: Operators of the graph whose values may be kept in host memory; empty if none may.
        unit_of: By operator its unit, -1 if it has none; empty without units.
        copy: Price of a copy to host memory, and of one back.
        beside_s: Seconds of the block's forward and of its backward, beside which copies run.
    """

    ops: tuple[BlockOp, ...]
    inputs: tuple[BlockInput, ...]
    storage_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    forward_roots: tuple[int, ...]
    backward_roots: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    sent_roots: tuple[int, ...] = ()
    units: tuple[str, ...] = ()
    unit_of: tuple[int, ...] = ()
    copy: CopyPrice = FREE_COPIES
    beside_s: tuple[float, float] = (0.0, 0.0)

    def unit(self, value: int) -> int:
        """Unit of a value; -1 if it has none."""
        return self.unit_of[value] if value < len(self.unit_of) else -1

    def late_s(self, copy_s: float, extra_s: float) -> tuple[float, float]:
        """Seconds of waiting for copies: in a forward, and in a backward.

        Args:
            copy_s: Seconds of the copies, one way.
            extra_s: Seconds of what backward makes again.
        """
        forward_s, backward_s = self.beside_s
        least_s = UNHIDDEN * copy_s
        return (
            least_s + max(0.0, copy_s - forward_s),
            least_s + max(0.0, copy_s - backward_s - extra_s),
        )

    @property
    def first_reads(self) -> tuple[int, ...]:
        """Values of forward that backward reads in any case."""
        ops = self.ops
        found: dict[int, None] = {}
        for op in ops:
            if op.is_backward:
                found.update(dict.fromkeys(r for r in op.reads if not self.is_backward(r)))
        found.update(dict.fromkeys(r for r in self.backward_roots if not self.is_backward(r)))
        return tuple(found)

    def is_backward(self, value: int) -> bool:
        """Whether a value is made by an operator of backward."""
        return value < len(self.ops) and self.ops[value].is_backward

    def holds(self, value: int) -> tuple[int, ...]:
        """Storages behind a value."""
        count = len(self.ops)
        return self.ops[value].holds if value < count else self.inputs[value - count].holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a choice costs.

    Attributes:
        saved_bytes: Kept on the device from forward to backward.
        extra_s: Seconds of what backward makes again.
        transient_bytes: The most that is alive in one pass beyond what is kept.
        remade: Groups of the choice that are needed again; the others change nothing.
        offloaded: Units of the choice of which something is kept.
        host_bytes: Kept in host memory.
        late_s: Seconds of waiting for copies, in forward and in backward.
    """

    saved_bytes: int
    extra_s: float
    transient_bytes: int
    remade: frozenset[int]
    offloaded: frozenset[int] = frozenset()
    host_bytes: int = 0
    late_s: tuple[float, float] = (0.0, 0.0)

    @property
    def total_s(self) -> float:
        """Seconds beyond those of a block that keeps all on the device."""
        return self.extra_s + sum(self.late_s)


def figures(
    problem: RecomputeProblem, choice: Collection[int], offload: Collection[int] = ()
) -> Figures:
    """The figures of a choice of groups that are made again, and of units in host memory."""
    ops = problem.ops
    kept, again = _closure(problem, choice)
    remade = frozenset(ops[i].group for i in again if ops[i].group >= 0)
    storages = {s for value in kept for s in problem.holds(value)}
    ahead = _needed(problem, [*problem.forward_roots, *kept])
    forward = [i for i in ahead if not ops[i].is_backward]
    backward = _lazy_order(problem, again)
    away = {value for value in kept if problem.unit(value) in offload}
    there = {s for value in away for s in problem.holds(value)}
    there -= {s for value in kept - away for s in problem.holds(value)}
    peak = max(
        _peak_bytes(problem, forward, given=(), held=storages, roots=problem.forward_roots),
        _peak_bytes(
            problem, backward, given=storages, held=(), roots=problem.backward_roots, again=there
        ),
    )
    host_bytes = sum(problem.kept_bytes[s] for s in there)
    extra_s = sum(ops[i].seconds for i in sorted(again) if ops[i].group >= 0)
    return Figures(
        saved_bytes=sum(problem.kept_bytes[s] for s in storages) - host_bytes,
        extra_s=extra_s,
        # what it copies out or brings back, which is no more than as much of its neighbour
        transient_bytes=peak + host_bytes,
        remade=remade,
        offloaded=frozenset(problem.unit(value) for value in away),
        host_bytes=host_bytes,
        late_s=problem.late_s(
            sum(problem.copy.seconds(problem.kept_bytes[s]) for s in sorted(there)), extra_s
        ),
    )


def held_bytes(problem: RecomputeProblem, choice: Collection[int]) -> int:
    """Bytes that stay between the halves of a backward that is run in two, under a choice.

    The first half makes what earlier blocks wait for, the second one the rest, from what is kept,
    what the first half made and what it was given, as in
    :func:`autopar.sharding.split_backward.split_backward`.
    """
    ops, count = problem.ops, len(problem.ops)
    kept, again = _closure(problem, choice)
    running = {i for i, op in enumerate(ops) if op.is_backward} | again
    early = _ancestors(problem, problem.sent_roots, running)
    needed = _ancestors(problem, problem.backward_roots, running)
    held: set[int] = set()
    seen: set[int] = set()
    stack = [i for i in needed if ops[i].is_backward and i not in early]
    stack += [r for r in problem.backward_roots if r not in problem.sent_roots]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in kept or value in early:
            held.update(problem.holds(value))
        elif value >= count:
            if problem.inputs[value - count].is_gradient:
                held.update(problem.holds(value))
        elif value in running:
            if not ops[value].makes and any(r in early for r in ops[value].reads):
                held.update(problem.holds(value))  # a part of what the first half made
            else:
                stack.extend(ops[value].reads)
    saved = {s for value in kept for s in problem.holds(value)}
    made = {s for i in running for s in ops[i].makes} - saved
    return sum((problem.storage_bytes if s in made else problem.kept_bytes)[s] for s in held)


def left_bytes(problem: RecomputeProblem) -> int:
    """Bytes that a block's backward makes for no other block: gradients of weights.

    They are there until the backward of the whole stage is done.
    """
    ops, sent = problem.ops, {s for r in problem.sent_roots for s in problem.holds(r)}
    made = {s for op in ops if op.is_backward for s in op.makes} - sent
    left = {s for root in problem.backward_roots for s in problem.holds(root)} & made
    return sum(problem.storage_bytes[s] for s in left)


def _ancestors(problem: RecomputeProblem, roots: Iterable[int], within: set[int]) -> set[int]:
    """Those of some operators that ``roots`` depend on through them."""
    found: set[int] = set()
    stack = [r for r in roots if r in within]
    while stack:
        value = stack.pop()
        if value not in found:
            found.add(value)
            stack.extend(r for r in problem.ops[value].reads if r in within)
    return found


def _closure(problem: RecomputeProblem, choice: Collection[int]) -> tuple[set[int], set[int]]:
    """Values that are kept, and operators that are made again."""
    count = len(problem.ops)
    kept: set[int] = set()
    again: set[int] = set()
    stack = list(problem.first_reads)
    while stack:
        value = stack.pop()
        if value in kept or value in again:
            continue
        if value >= count:
            if problem.inputs[value - count].is_received:
                kept.add(value)
            continue
        op = problem.ops[value]
        if op.group == ALWAYS_REMADE or op.group in choice:
            again.add(value)
            stack.extend(op.reads)
        else:
            kept.add(value)
    return kept, again


def _needed(problem: RecomputeProblem, roots: Iterable[int]) -> list[int]:
    """Operators of forward that ``roots`` depend on, in order."""
    count = len(problem.ops)
    found: set[int] = set()
    stack = [r for r in roots if r < count]
    while stack:
        value = stack.pop()
        if value in found or problem.ops[value].is_backward:
            continue
        found.add(value)
        stack.extend(r for r in problem.ops[value].reads if r < count)
    return sorted(found)


def _lazy_order(problem: RecomputeProblem, again: Collection[int]) -> list[int]:
    """Backward's operators; each remade one right before its first reader."""
    ops = problem.ops
    running = {i for i, op in enumerate(ops) if op.is_backward} | set(again)
    alive: set[int] = set()
    stack = [r for r in problem.backward_roots if r in running]
    while stack:
        value = stack.pop()
        if value not in alive:
            alive.add(value)
            stack.extend(r for r in ops[value].reads if r in running)
    placed: dict[int, None] = {}
    for first in (*(i for i in sorted(alive) if ops[i].is_backward), *problem.backward_roots):
        stack = [first]
        while stack:
            top = stack[-1]
            if top in placed or top not in alive:
                stack.pop()
                continue
            missing = [r for r in ops[top].reads if r in alive and r not in placed]
            if missing:
                stack.extend(reversed(missing))
                continue
            placed[top] = None
            stack.pop()
    return list(placed)


def _peak_bytes(
    problem: RecomputeProblem,
    order: Sequence[int],
    *,
    given: Collection[int],
    held: Collection[int],
    roots: Iterable[int],
    again: Collection[int] = (),
) -> int:
    """The most that is alive at once while operators run in an order.

    Args:
        problem: The block.
        order: The operators.
        given: Storages that are there at first and die at their last use.
        held: Storages whose bytes are counted elsewhere, also before they are made.
        roots: Values that stay to the end.
        again: Storages in whose place, once they are read, as much for the next block is brought.
    """
    stay = {s for root in roots for s in problem.holds(root)} | set(held)
    last: dict[int, int] = {}
    for position, index in enumerate(order):
        op = problem.ops[index]
        for value in op.reads:
            for storage in problem.holds(value):
                last[storage] = position
        for storage in op.holds:
            last[storage] = position
    dying: dict[int, list[int]] = {}
    for storage, position in last.items():
        dying.setdefault(position, []).append(storage)
    made = {s for index in order for s in problem.ops[index].makes}
    live, peak = -sum(problem.kept_bytes[s] for s in made & set(held)), 0
    alive: set[int] = set()
    unread = set(again)
    for position, index in enumerate(order):
        op = problem.ops[index]
        if unread:
            read = unread.intersection(s for value in op.reads for s in problem.holds(value))
            live += sum(problem.kept_bytes[s] for s in read)
            unread -= read
        for storage in op.makes:
            if storage in held:
                live += problem.kept_bytes[storage]
            else:
                live += problem.storage_bytes[storage]
                alive.add(storage)
        peak = max(peak, live + op.workspace_bytes)
        for storage in dying.get(position, ()):
            if storage in stay:
                continue
            if storage in alive:
                live -= problem.storage_bytes[storage]
            elif storage in given:
                live -= problem.kept_bytes[storage]
    return peak
