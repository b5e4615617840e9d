"""The problem of choosing operator splits, as plain data, and the price of a choice.

A *variable* is a node class (operators of repeated blocks), an input class or a *join* (the sum of
two gradients of one tied parameter). Its options fix the layouts of its operands and results over
all mesh axes. A *flow* is a class of values with the same producer and readers: what the producer
yields must be brought to what each reader wants. Readers share a reshard as programs do:

* one reshard per (value, wanted layout) and pass, whoever reads it;
* one that does not grow the tensor is made once for forward and backward together;
* what runs once per step (prologue, gradient reduction) is shared among itself.

All seconds are per step: work per micro-batch is multiplied by the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from autopar.sharding.decisions import Choice
from autopar.sharding.placement import Layout, R


class Pass(IntEnum):
    """When a reader runs."""

    FORWARD = 0
    BACKWARD = 1
    PROLOGUE = 2
    STEP = 3


@dataclass(frozen=True, slots=True)
class SplitOption:
    """One way to run a variable.

    Attributes:
        choice: What is stored in the plan; None for joins and other constants.
        operands: Layout in which each operand is wanted.
        results: Layout of each result.
        time_s: Seconds per step of one member, without reshards of its operands.
        memory_bytes: Bytes that one member holds: state of a parameter, saved results.
        once_s: What of ``time_s`` falls once per step, whatever the number of micro-batches.
        update_s: What of it is the optimizer's.
    """

    choice: Choice | None
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    time_s: float
    memory_bytes: int = 0
    once_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SplitVariable:
    """Operators or inputs that are decided together.

    Attributes:
        name: Of the first member.
        members: Names in the graph.
        options: At least one.
        is_once: Whether its seconds fall once per step, whatever the number of micro-batches.
    """

    name: str
    members: tuple[str, ...]
    options: tuple[SplitOption, ...]
    is_once: bool = False


@dataclass(frozen=True, slots=True)
class Reader:
    """Operand ``operand`` of variable ``variable``, read in pass ``when``."""

    variable: int
    operand: int
    when: Pass


@dataclass(frozen=True, slots=True)
class Move:
    """A reshard: its seconds each time, and whether both passes share it."""

    time_s: float
    is_shared: bool


@dataclass(frozen=True, slots=True)
class Flow:
    """Values with the same producer and the same readers.

    Attributes:
        variable: Producer.
        result: Which of its results.
        count: How many such values the graph has.
        readers: Who reads it.
        moves: (producer's layout, wanted layout), both as the pass sees them -> reshard. What is
            missing can't be made.
    """

    variable: int
    result: int
    count: int
    readers: tuple[Reader, ...]
    moves: Mapping[tuple[Layout, Layout], Move]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitsProblem:
    """All of it.

    Attributes:
        variables: In the order of the graph.
        flows: Their values.
        num_microbatches: Runs of forward and backward per step.
        has_mb: Whether the first axis of every layout is ``mb``.
        num_reduces: How often gradients are reduced per step (each micro-batch from ZeRO 2 on).
        fixed_s: Seconds per step that no choice changes.
        limit_bytes: Bound of the sum of ``memory_bytes``; None for no bound.
    """

    variables: tuple[SplitVariable, ...]
    flows: tuple[Flow, ...]
    num_microbatches: int
    has_mb: bool = False
    num_reduces: int = 1
    fixed_s: float = 0.0
    limit_bytes: int | None = None

    def weight(self, when: Pass) -> int:
        """Runs per step of a pass."""
        if when is Pass.STEP:
            return self.num_reduces
        return 1 if when is Pass.PROLOGUE else self.num_microbatches

    def seen(self, layout: Layout, when: Pass) -> Layout:
        """A layout as a pass sees it: what runs once per step has the whole batch."""
        return (R, *layout[1:]) if self.has_mb and is_once(when) else layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitsSolution:
    """The chosen options.

    Attributes:
        options: Index per variable.
        objective_s: Seconds per step, recomputed from the choice.
        bound_s: Lower bound over all choices.
        status: ``"optimal"`` or ``"feasible"``.
        stopped_by: ``""``, ``"nodes"`` or ``"time"``.
        num_columns: Variables of the program that was solved.
    """

    options: tuple[int, ...]
    objective_s: float
    bound_s: float
    status: str
    stopped_by: str = ""
    num_columns: int = 0
    terms_s: Mapping[str, float] = field(default_factory=dict)


def sharing_group(when: Pass, move: Move) -> int:
    """Readers with equal groups share the reshard."""
    if when is Pass.BACKWARD and move.is_shared:
        return int(Pass.FORWARD)
    return int(when)


def is_once(when: Pass) -> bool:
    """Whether a pass runs once per step."""
    return when in (Pass.PROLOGUE, Pass.STEP)


def choice_terms_s(problem: SplitsProblem, options: tuple[int, ...]) -> dict[str, float] | None:
    """Seconds per step of a choice, by cause; None if some value can't be brought to a reader.

    The independent statement of the objective: ``"operators"`` + ``"reshards"`` + ``"fixed"``.
    """
    operators = reshards = 0.0
    for variable, at in zip(problem.variables, options, strict=True):
        operators += len(variable.members) * variable.options[at].time_s
    for flow in problem.flows:
        source = _chosen(problem, options, flow.variable).results[flow.result]
        made: dict[tuple[int, Layout], float] = {}
        for reader in flow.readers:
            target = _chosen(problem, options, reader.variable).operands[reader.operand]
            have, want = problem.seen(source, reader.when), problem.seen(target, reader.when)
            move = flow.moves.get((have, want))
            if move is None:
                return None
            group = sharing_group(reader.when, move)
            made[group, want] = move.time_s * problem.weight(reader.when)
        reshards += flow.count * sum(made.values())
    return {"operators": operators, "reshards": reshards, "fixed": problem.fixed_s}


def choice_memory_bytes(problem: SplitsProblem, options: tuple[int, ...]) -> int:
    """Bytes of a choice."""
    pairs = zip(problem.variables, options, strict=True)
    return sum(len(v.members) * v.options[at].memory_bytes for v, at in pairs)


def _chosen(problem: SplitsProblem, options: tuple[int, ...], variable: int) -> SplitOption:
    return problem.variables[variable].options[options[variable]]
