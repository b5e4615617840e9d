"""What parameters cost each block: their state, and what is done with them once per step.

Bringing them into the layout of their use, reducing their gradients, the optimizer. A parameter
that several blocks read counts with the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.solver.splits_problem import Pass, SplitsProblem
from autopar.solver.splits_structure import GroupKind, SplitsStructure


@dataclass(slots=True)
class ParameterCost:
    """What the parameters of one block cost per step and hold.

    Attributes:
        gather_s: Seconds of bringing them into the layout of their use.
        reduce_s: Seconds of reducing their gradients.
        update_s: Seconds of the optimizer.
        other_s: Seconds of joining the gradients of tied ones.
        state_bytes: Parameters, gradients and optimizer state.
    """

    gather_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0
    state_bytes: int = 0

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.gather_s + self.reduce_s + self.update_s + self.other_s


@dataclass(frozen=True, slots=True)
class Owners:
    """Which parameters count with which block: the first one that reads them.

    Attributes:
        row_of: Per block the number of its row; blocks with the same parameters share one.
        rows: Groups of inputs, joins and wholes, once for each member.
        is_join: By group.
    """

    row_of: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    is_join: tuple[bool, ...]


def parameter_costs(
    problem: SplitsProblem, options: Sequence[int] | None, owners: Owners
) -> list[ParameterCost]:
    """State, gathering, gradient reduction, by block; equal blocks share one object.

    Args:
        problem: The problem.
        options: The choice; the least that each part can be under any choice if None.
        owners: Of the problem's structure.
    """
    reduce_s = _reduce_seconds(problem, options)
    known: list[ParameterCost] = []
    for row in owners.rows:
        cost = ParameterCost()
        known.append(cost)
        for at in row:
            variable, is_join = problem.variables[at], owners.is_join[at]
            if variable.is_once or is_join:
                menu = variable.options if options is None else [variable.options[options[at]]]
                update_s = min(o.update_s for o in menu)
                rest_s = min(o.time_s - o.update_s for o in menu)
                cost.state_bytes += min(o.memory_bytes for o in menu)
                cost.update_s += update_s
                cost.reduce_s += reduce_s.get(at, 0.0)
                if is_join:
                    cost.other_s += rest_s
                else:
                    cost.gather_s += rest_s
    return [known[at] for at in owners.row_of]


def owners_of(structure: SplitsStructure, home: Mapping[str, int], num_blocks: int) -> Owners:
    """From the first block that reads each input."""
    wholes = {w: min(home.get(n, 0) for n in parts) for w, parts in structure.wholes.items()}
    owned: list[list[int]] = [[] for _ in range(num_blocks)]
    for at, group in enumerate(structure.groups):
        if group.kind in (GroupKind.INPUT, GroupKind.JOIN, GroupKind.WHOLE):
            for name in group.members:
                place = wholes[name] if name in wholes else home.get(name.removeprefix("join "), 0)
                owned[place].append(at)
    known: dict[tuple[int, ...], int] = {}
    row_of = tuple([known.setdefault(tuple(row), len(known)) for row in owned])
    is_join = tuple(group.kind is GroupKind.JOIN for group in structure.groups)
    return Owners(row_of, tuple(known), is_join)


def _reduce_seconds(problem: SplitsProblem, options: Sequence[int] | None) -> dict[int, float]:
    """Variable -> seconds per step of reducing the gradients of one member."""
    found: dict[int, float] = {}
    for flow in problem.flows:
        for reader in flow.readers:
            if reader.when is not Pass.STEP:
                continue
            if options is None:
                time_s = min((move.time_s for move in flow.moves.values()), default=0.0)
            else:
                source = problem.variables[flow.variable].options[options[flow.variable]]
                target = problem.variables[reader.variable].options[options[reader.variable]]
                have, want = source.results[flow.result], target.operands[reader.operand]
                pair = (problem.seen(have, Pass.STEP), problem.seen(want, Pass.STEP))
                time_s = flow.moves[pair].time_s
            time_s *= problem.weight(Pass.STEP)
            found[reader.variable] = found.get(reader.variable, 0.0) + time_s
    return found
