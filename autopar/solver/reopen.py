"""What each block makes again, for cuts that are given: exact in when its bytes are alive.

Cuts are found under a bound of memory that is the same for every choice: all that is kept, and the
largest transient. With the cuts given more can be said. While backward is in block b of a stage,
what later blocks had kept for this micro-batch is gone:

    states + what other micro-batches keep + sum_{i <= b} saved_i + transient_b <= limit

for every block b, at every moment that decides the rank's memory (the same holds in forward, where
later blocks have kept nothing yet). So the last blocks of a stage may keep more than the first.
A backward that runs in two halves keeps more than that; there the bound above stays.

Stages of other ranks do not matter, and less work in a stage never makes a step longer: each rank
gets its own program, least seconds of what it makes again, solved by SCIP (a knapsack for each
row, whose relaxation is tight). Ranks with equal blocks and moments share one. Few of the rows
bind: those that a choice exceeds are added, the most exceeded one of each moment at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]  # has no stubs

from autopar.plan.schedule import Alive
from autopar.solver.programs import Program
from autopar.solver.stages_problem import BlockMenu, StageProblem, bounds

NODE_LIMIT = 500
MAX_GROUPS = 48  # of a rank's blocks that are decided apart
GAP = 1e-4  # share of a rank's seconds that may be left
MAX_ROUNDS = 12  # of adding rows; then all of them are added
SLACKS = (0.0, 4e-6)  # shares of the room that are left empty: the solver has a tolerance of 1e-6

Runs = Mapping[int, range]
"""Stage of a rank -> its blocks."""

_Row: TypeAlias = dict[tuple[int, int], int]
"""Block and option -> bytes."""


def best_options(problem: StageProblem, starts: Sequence[int]) -> tuple[int, ...] | None:
    """The option of every block with the least seconds under the problem's limit.

    Args:
        problem: Menus, moments and limit.
        starts: First block of stages 1, 2, ...

    Returns:
        None if nothing fits.
    """
    found = [0] * len(problem.blocks)
    rows = bounds(starts, len(problem.blocks))
    known: dict[object, list[int] | None] = {}
    for device in range(problem.pp):
        runs = {s: range(*rows[s]) for s in problem.stages_of(device)}
        places = [i for s in sorted(runs) for i in runs[s]]
        key = _key(problem, device, runs)
        if key not in known:
            known[key] = _rank_options(problem, device, runs)
        chosen = known[key]
        if chosen is None:
            return None
        for place, option in zip(places, chosen, strict=True):
            found[place] = option
    return tuple(found)


def needed_bytes(
    problem: StageProblem, starts: Sequence[int], options: Sequence[int]
) -> tuple[int, ...]:
    """Peak per pipeline rank of a choice: the independent statement of the rows."""
    rows = bounds(starts, len(problem.blocks))
    result = []
    for device in range(problem.pp):
        runs = {s: range(*rows[s]) for s in problem.stages_of(device)}
        chosen = {i: problem.blocks[i].options[options[i]] for run in runs.values() for i in run}
        most = 0
        for moment in problem.moments(device):
            alive = sum(
                chosen[i].alive_bytes(moment[s], s) for s, run in runs.items() if s in moment
                for i in run
            )  # fmt: skip
            for stage, run in runs.items():
                gone = 0
                for i in reversed(run):
                    most = max(most, alive - gone + chosen[i].transient_bytes)
                    gone += chosen[i].saved_bytes if _frees(problem, moment, stage) else 0
        states = sum(problem.blocks[i].state_bytes for i in chosen)
        result.append(problem.base_bytes + states + most)
    return tuple(result)


def _frees(problem: StageProblem, moment: Mapping[int, Alive], stage: int) -> bool:
    """Whether later blocks of a stage have let go of a micro-batch when earlier ones run."""
    if problem.schedule.splits_backward:
        return False
    return stage in moment and moment[stage].before > 0


def _key(problem: StageProblem, device: int, runs: Runs) -> object:
    """What a rank's program depends on."""
    moments = tuple(
        tuple(moment.get(s, Alive(0, 0)) for s in sorted(runs))
        for moment in problem.moments(device)
    )
    blocks = tuple(tuple(problem.blocks[i].key for i in runs[s]) for s in sorted(runs))
    return blocks, moments, 0 in runs


def _rank_options(problem: StageProblem, device: int, runs: Runs) -> list[int] | None:
    """The options of a rank's blocks, in the order of its stages."""
    every = [problem.blocks[i] for s in sorted(runs) for i in runs[s]]
    if all(len(block.options) == 1 for block in every):
        return [0] * len(every)
    room = problem.limit_bytes - problem.base_bytes - sum(block.state_bytes for block in every)
    if room <= 0:
        return None
    groups = {s: _groups(problem.blocks, run, -(-len(every) // MAX_GROUPS))
              for s, run in sorted(runs.items())}  # fmt: skip
    blocks = {g.start: _together(problem.blocks[g.start], len(g))
              for row in groups.values() for g in row}  # fmt: skip
    starts = {s: [g.start for g in row] for s, row in groups.items()}
    rows = [
        list(_memory_rows(problem, blocks, moment, starts)) for moment in problem.moments(device)
    ]
    for slack in SLACKS:
        found = _solve_by_rows(blocks, rows, room, slack)
        if found is None or not _exceeded(rows, found, room):
            break
    if found is None:
        return None
    chosen = dict(found)
    return [chosen[g.start] for row in groups.values() for g in row for _ in g]


def _groups(blocks: Sequence[BlockMenu], run: range, most: int) -> list[range]:
    """A stage's blocks in groups of neighbours that are equal and take one option together.

    Where a rank has very many blocks a choice for each is out of proportion.

    Args:
        blocks: Of the chain.
        run: The stage's.
        most: Blocks of a group.
    """
    found: list[range] = []
    for i in run:
        last = found[-1] if found else range(0)
        if len(last) and len(last) < most and blocks[i].key == blocks[last.start].key:
            found[-1] = range(last.start, i + 1)
        else:
            found.append(range(i, i + 1))
    return found


def _together(block: BlockMenu, count: int) -> BlockMenu:
    """The menu of several equal blocks; one of them is running when most is alive."""
    if count == 1:
        return block
    options = tuple(
        replace(
            o,
            forward_s=count * o.forward_s,
            backward_s=count * o.backward_s,
            weight_s=count * o.weight_s,
            saved_bytes=count * o.saved_bytes,
            held_bytes=count * o.held_bytes,
        )
        for o in block.options
    )
    return replace(block, options=options, state_bytes=count * block.state_bytes)


def _exceeded(
    rows: Sequence[Sequence[_Row]], chosen: Sequence[tuple[int, int]], room: float
) -> list[_Row]:
    """Of each moment the row that a choice exceeds most, if it exceeds one."""
    found = []
    for moment in rows:
        most, at = max((sum(row.get(c, 0) for c in chosen), at) for at, row in enumerate(moment))
        if most > room:
            found.append(moment[at])
    return found


def _solve_by_rows(
    blocks: Mapping[int, BlockMenu], rows: Sequence[Sequence[_Row]], room: float, slack: float
) -> list[tuple[int, int]] | None:
    """Block and option of the choice with the least seconds; None if none was found.

    Args:
        blocks: Of the rank.
        rows: By moment: bytes of every option.
        room: The most that a row may add up to.
        slack: Share of it that is left empty.
    """
    fastest = {i: min(b.options, key=lambda o: o.total_s) for i, b in blocks.items()}
    found: list[tuple[int, int]] | None = [
        (i, blocks[i].options.index(o)) for i, o in fastest.items()
    ]
    # rows whose tolerance is used up are met by the program, and are not to be added twice
    within = room * (1 + SLACKS[-1])
    added: list[_Row] = []
    for number in range(MAX_ROUNDS):
        assert found is not None
        more = _exceeded(rows, found, within)
        if not more:
            return found
        added += more if number + 1 < MAX_ROUNDS else [row for moment in rows for row in moment]
        found = _solve(blocks, added, room * (1 - slack))
        if found is None:
            return None
    return found


def _solve(
    blocks: Mapping[int, BlockMenu], rows: Sequence[_Row], room: float
) -> list[tuple[int, int]] | None:
    """The same under given rows."""
    program = Program("reopen")
    columns = {(i, o): program.column() for i, b in blocks.items() for o in range(len(b.options))}
    for i, block in blocks.items():
        one = [(columns[i, o], 1.0) for o in range(len(block.options))]
        program.row(one, at_least=1.0, at_most=1.0)
    for row in rows:
        program.row(
            [(at, row[pair] / room) for pair, at in columns.items() if row.get(pair)], at_most=1.0
        )
    prices = {at: blocks[i].options[o].total_s for (i, o), at in columns.items()}
    parameters = mathopt.SolveParameters(
        node_limit=NODE_LIMIT, threads=1, random_seed=0, relative_gap_tolerance=GAP
    )
    _, values = program.solved(prices, parameters)
    return [pair for pair, at in columns.items() if values[at] > 0.5] if values else None


def _memory_rows(
    problem: StageProblem,
    blocks: Mapping[int, BlockMenu],
    moment: Mapping[int, Alive],
    runs: Mapping[int, Sequence[int]],
) -> Iterator[_Row]:
    """The rows of one moment, one for each block that may be running: bytes of every option."""
    alive = {
        (i, o): option.alive_bytes(moment[s], s)
        for s, run in runs.items()
        if s in moment
        for i in run
        for o, option in enumerate(blocks[i].options)
    }
    for stage, run in runs.items():
        left = dict(alive)
        for i in reversed(run):
            row = dict(left)
            for o, option in enumerate(blocks[i].options):
                row[i, o] = row.get((i, o), 0) + option.transient_bytes
                if _frees(problem, moment, stage):
                    left[i, o] -= option.saved_bytes
            yield row
