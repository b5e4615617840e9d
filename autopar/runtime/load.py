"""Make the programs of a plan ready to run on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.ir.graph import Graph, OutputKind
from autopar.plan.actions import Action, ActionKind
from autopar.plan.types import MeshShape
from autopar.runtime.executor import Program, flatten
from autopar.sharding.programs import AXES, LocalPrograms
from autopar.sharding.split_backward import BackwardHalves, split_backward
from passes.base import PassContext
from passes.pipeline import build, without_outputs

EMPTY = Graph((), (), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """One stage's programs, ready to run.

    Of the backward either the whole is there or its two halves; what is not there is empty.
    """

    index: int
    unshard: Program
    prologue: Program
    forward: Program
    backward: Program
    backward_input: Program
    backward_weight: Program
    reduce: Program
    finish: Program


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPrograms:
    """What a rank runs.

    Attributes:
        local: The decided programs and their metadata.
        mesh: Ranks per axis.
        stages: Loaded stages by index; those of one pipeline rank, or all in a simulation.
        device: Where the programs run.
        forward_only: Whether nothing is saved for a backward.
    """

    local: LocalPrograms
    mesh: MeshShape
    stages: Mapping[int, LoadedStage]
    device: torch.device
    forward_only: bool = False


def load(
    local: LocalPrograms,
    mesh: MeshShape,
    *,
    stages: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
    forward_only: bool = False,
    in_halves: bool = False,
) -> LoadedPrograms:
    """Emit, verify and flatten the programs of some stages.

    Args:
        local: The decided programs.
        mesh: Ranks per axis.
        stages: Which stages; all if None.
        device: Where they run.
        forward_only: Leave out what only a backward needs, for evaluation.
        in_halves: Divide each backward into the gradients of inputs and those of weights.

    Raises:
        PassError: A program can't be emitted; this is our bug.
    """
    place = torch.device(device)
    wanted = range(len(local.stages)) if stages is None else stages
    sizes = dict(zip(AXES, local.axis_sizes, strict=True))

    def prepare(stage: int, name: str, graph: Graph) -> Program:
        full_name = f"stage {stage} {name}"
        ctx = PassContext(program=full_name, source=graph, axis_sizes=sizes, device=place)
        return flatten(build(ctx), graph, full_name)

    loaded = {}
    for index in wanted:
        stage = local.stages[index]
        forward, backward, reduce = stage.forward, stage.backward, stage.reduce
        halves = BackwardHalves(EMPTY, EMPTY)
        if forward_only:
            forward = without_outputs(forward, frozenset({OutputKind.SAVED}))
            backward = reduce = EMPTY
        elif in_halves:
            halves, backward = split_backward(backward), EMPTY
        loaded[index] = LoadedStage(
            index=index,
            unshard=prepare(index, "unshard", stage.unshard),
            prologue=prepare(index, "prologue", stage.prologue),
            forward=prepare(index, "forward", forward),
            backward=prepare(index, "backward", backward),
            backward_input=prepare(index, "backward of inputs", halves.inputs),
            backward_weight=prepare(index, "backward of weights", halves.weights),
            reduce=prepare(index, "reduce", reduce),
            finish=prepare(index, "finish", stage.finish),
        )
    return LoadedPrograms(
        local=local, mesh=mesh, stages=loaded, device=place, forward_only=forward_only
    )


def runs_halves(actions: Sequence[Action]) -> bool:
    """Whether a list runs the two halves of backwards apart."""
    return any(action.kind is ActionKind.BACKWARD_INPUT for action in actions)
