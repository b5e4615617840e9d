"""What each block makes again, for cuts that are given: exact in when its bytes are alive.

Cuts are found under a bound of memory that is the same for every choice: all that is kept, and the
largest transient. With the cuts given more can be said. While backward is in block b of a stage,
what later blocks had kept for this micro-batch is gone:

    states + what other micro-batches keep + sum_{i <= b} saved_i + transient_b <= limit

for every block b, at every moment that decides the rank's memory (the same holds in forward, where
later blocks have kept nothing yet). So the last blocks of a stage may keep more than the first.
A backward that runs in two halves keeps more than that; there the bound above stays.

Stages of other ranks do not matter, and less work in a stage never makes a step longer: each rank
gets its own program, least seconds of what it makes again, solved by CP-SAT. Ranks with equal
blocks and moments share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortools.sat.python import cp_model

from autopar.plan.schedule import Alive
from autopar.solver.stages_problem import BlockMenu, Option, StageProblem, bounds

UNIT_BYTES = 1 << 12  # CP-SAT is integer-only; bytes are rounded up to this
TIME_STEPS = 1 << 24  # resolution of a rank's seconds
WORK_LIMIT = 1.0  # deterministic seconds for each rank

Runs = Mapping[int, range]
"""Stage of a rank -> its blocks."""


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
    blocks = {i: problem.blocks[i] for s in sorted(runs) for i in runs[s]}
    if all(len(block.options) == 1 for block in blocks.values()):
        return [0] * len(blocks)
    model = cp_model.CpModel()
    takes = {
        i: [model.new_bool_var(f"x{i},{o}") for o in range(len(block.options))]
        for i, block in blocks.items()
    }
    for row in takes.values():
        model.add_exactly_one(row)
    states = sum(block.state_bytes for block in blocks.values())
    room = (problem.limit_bytes - problem.base_bytes - states) // UNIT_BYTES
    if room < 0:
        return None
    for moment in problem.moments(device):
        _add_memory(model, problem, (moment, runs, blocks, takes), room)
    _add_objective(model, blocks, takes)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = WORK_LIMIT
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [
        next(o for o, take in enumerate(takes[i]) if solver.boolean_value(take)) for i in blocks
    ]


_Row = tuple[
    Mapping[int, Alive], Runs, Mapping[int, BlockMenu], Mapping[int, list[cp_model.IntVar]]
]


def _add_memory(model: cp_model.CpModel, problem: StageProblem, row: _Row, room: int) -> None:
    """The rows of one moment: one for each block that may be running."""
    moment, runs, blocks, takes = row
    alive = {
        (i, o): _units(option.alive_bytes(moment[s], s))
        for s, run in runs.items()
        if s in moment
        for i in run
        for o, option in enumerate(blocks[i].options)
    }
    for stage, run in runs.items():
        left = dict(alive)
        for i in reversed(run):
            weights = dict(left)
            for o, option in enumerate(blocks[i].options):
                weights[i, o] = weights.get((i, o), 0) + _units(option.transient_bytes)
                if _frees(problem, moment, stage):
                    # down, where what is alive was rounded up once per micro-batch
                    left[i, o] -= option.saved_bytes // UNIT_BYTES
            variables = [takes[i][o] for i, o in weights]
            total = cp_model.LinearExpr.weighted_sum(variables, list(weights.values()))
            model.add(total <= room)


def _add_objective(
    model: cp_model.CpModel,
    blocks: Mapping[int, BlockMenu],
    takes: Mapping[int, list[cp_model.IntVar]],
) -> None:
    """Seconds beyond the fastest option of each block."""
    least_s = {i: min(map(_seconds, block.options)) for i, block in blocks.items()}
    most_s = sum(max(map(_seconds, block.options)) - least_s[i] for i, block in blocks.items())
    unit_s = most_s / TIME_STEPS or 1.0
    variables = [take for row in takes.values() for take in row]
    weights = [
        round((_seconds(option) - least_s[i]) / unit_s)
        for i in takes
        for option in blocks[i].options
    ]
    model.minimize(cp_model.LinearExpr.weighted_sum(variables, weights))


def _seconds(option: Option) -> float:
    return option.total_s


def _units(num_bytes: int) -> int:
    return -(-num_bytes // UNIT_BYTES)
