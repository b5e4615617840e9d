"""Run a whole step of all ranks in one process and put their results together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from autopar.capture.reference import default_floats
from autopar.errors import EquivalenceError
from autopar.ir.graph import OutputKind
from autopar.plan.actions import Action
from autopar.plan.types import MeshShape
from autopar.runtime.blocks import assemble, take_block
from autopar.runtime.finish import finish, share_outputs
from autopar.runtime.inputs import StepInputs
from autopar.runtime.load import LoadedPrograms, load, runs_halves
from autopar.runtime.lockstep import Traffic, run_lockstep
from autopar.runtime.requests import Running
from autopar.runtime.step import RankStep
from autopar.sharding.placement import Layout, Shard
from autopar.sharding.programs import LocalPrograms

GRADIENT_FLOOR_FRACTION = 1e-3
REPLICA_TOLERANCE = 1e-12
"""Largest difference between replicas, relative to the largest element: float64 rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """What all ranks made together.

    Attributes:
        losses: By path.
        grads: Whole gradients by parameter.
        buffers: Whole buffers after the step.
        outputs: Whole outputs by path.
        traffic: Collectives and messages.
        peak_saved_bytes: Per rank, most bytes held between F and B.
        replica_gap: Largest difference between ranks that hold the same values, over all losses,
            gradients, buffers and outputs, relative to the largest element (of a gradient: at least
            to a thousandth of the largest gradient).
    """

    losses: Mapping[str, torch.Tensor]
    grads: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    traffic: Traffic
    peak_saved_bytes: tuple[int, ...]
    replica_gap: float

    @property
    def loss(self) -> torch.Tensor:
        """The first loss."""
        return next(iter(self.losses.values()))


def simulate_step(  # noqa: PLR0913 - a step has that many parts
    programs: LocalPrograms,
    mesh: MeshShape,
    actions: Sequence[Sequence[Action]],
    *,
    params: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]],
    buffers: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    rng_key: torch.Tensor | None = None,
    loss_tangent: float | torch.Tensor = 1.0,
    tangents: Mapping[str, torch.Tensor] | None = None,
    forward_only: bool = False,
    loaded: LoadedPrograms | None = None,
    replica_tolerance: float = REPLICA_TOLERANCE,
) -> SimulatedStep:
    """One step of every rank, in lockstep.

    Args:
        programs: What the ranks run.
        mesh: Ranks per axis.
        actions: Per pipeline rank, its action list.
        params: Whole parameters by first name.
        inputs: Whole call arguments by path, or a list of every rank's shares of them.
        buffers: Whole buffers by name.
        constants: Captured constants.
        rng_key: Key of the random operators.
        loss_tangent: Gradient with respect to the loss.
        tangents: Whole gradients with respect to outputs, for models without a loss.
        forward_only: Evaluate; the actions hold no backward.
        loaded: The same programs already loaded, to save the emission.
        replica_tolerance: Largest allowed ``replica_gap``.

    Raises:
        DeadlockError: The ranks can't go on, or disagree.
        EquivalenceError: Ranks that should hold the same values do not.
    """
    graphs = [g for s in programs.stages for g in (s.prologue, s.forward, s.backward)]
    if loaded is None:
        with default_floats(graphs):
            in_halves = any(map(runs_halves, actions))
            loaded = load(programs, mesh, forward_only=forward_only, in_halves=in_halves)
    steps = []
    for rank in range(mesh.num_ranks):
        given = StepInputs(
            params=stored_params(programs, mesh, rank, params),
            buffers=dict(buffers or {}),
            users=inputs if isinstance(inputs, Mapping) else inputs[rank],
            rng_key=rng_key,
            constants=constants or {},
            loss_tangent=loss_tangent,
            tangents=tangents or {},
        )
        steps.append(RankStep(loaded, rank, given, measure=True))
    outputs: list[dict[str, torch.Tensor]] = [{} for _ in steps]

    def whole_step(step: RankStep) -> Running:
        yield from step.run(actions[step.pp])
        yield from finish(step)
        outputs[step.rank] = yield from share_outputs(step)

    running = [whole_step(step) for step in steps]
    with default_floats(graphs):
        traffic = run_lockstep(running, mesh, lambda rank: steps[rank].position)
    return _together(programs, mesh, steps, outputs, traffic, replica_tolerance)


def stored_params(
    programs: LocalPrograms, mesh: MeshShape, rank: int, params: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Storage blocks of the parameters that a rank's stages own."""
    pp, dp, tp = mesh.coordinate(rank)
    return {
        name: take_block(params[name], spec.storage, (0, dp, tp), (1, *programs.axis_sizes[1:]))
        for name, spec in programs.params.items()
        if mesh.pipeline_rank(spec.owner) == pp
    }


def _together(
    programs: LocalPrograms,
    mesh: MeshShape,
    steps: Sequence[RankStep],
    outputs: Sequence[Mapping[str, torch.Tensor]],
    traffic: Traffic,
    tolerance: float,
) -> SimulatedStep:
    gaps: dict[str, float] = {"nothing": 0.0}
    grads = {}
    blocks_of = {
        name: blocks
        for name, param in programs.params.items()
        if (blocks := _gradient_blocks(steps, name, param.owner))
    }
    every = [b for blocks in blocks_of.values() for b in blocks.values()]
    floor = GRADIENT_FLOOR_FRACTION * max(map(_largest, every), default=0.0)
    for name, blocks in blocks_of.items():
        param = programs.params[name]
        grads[name], gaps[f"gradient of {name}"] = _whole(
            blocks, param.meta.shape, param.storage[1:], mesh, floor
        )
    losses = {}
    for path in steps[0].losses:
        losses[path] = steps[0].losses[path]
        gaps[f"loss {path}"] = _gap([s.losses[path] for s in steps])
    buffers = {}
    for name, stages in programs.buffer_stages.items():
        own = {mesh.pipeline_rank(s) for s in stages}
        copies = [s.buffers[name] for s in steps if s.pp in own]
        if copies:
            buffers[name] = copies[0]
            gaps[f"buffer {name}"] = _gap(copies)
    made = {}
    specs = {r.target: r.spec for r in programs.results if r.kind is OutputKind.OUTPUT}
    for path, spec in specs.items():
        for pp in range(mesh.pp):
            blocks = {s.dp_tp: outputs[s.rank][path] for s in steps if s.pp == pp}
            made[path], gaps[f"output {path}"] = _whole(
                blocks, spec.meta.shape, spec.layout[1:], mesh
            )
    worst = max(gaps, key=lambda name: gaps[name])
    if gaps[worst] > tolerance:
        raise EquivalenceError(
            f"{worst} differs between ranks that hold the same values by {gaps[worst]:.3g} of its "
            f"largest element, allowed is {tolerance:.3g}"
        )
    return SimulatedStep(
        losses=losses,
        grads=grads,
        buffers=buffers,
        outputs=made,
        traffic=traffic,
        peak_saved_bytes=tuple(s.peak_saved_bytes for s in steps),
        replica_gap=gaps[worst],
    )


def _gradient_blocks(
    steps: Sequence[RankStep], name: str, owner: int
) -> dict[tuple[int, int], torch.Tensor]:
    """A parameter's gradient on the ranks of its stage, by (dp, tp); empty if there is none."""
    sums = {s.dp_tp: s.gradients[owner] for s in steps if s.mailbox.is_own(owner)}
    return {at: total[name] for at, total in sums.items() if name in total}


def _whole(
    blocks: Mapping[tuple[int, int], torch.Tensor],
    shape: Sequence[int],
    layout: Layout,
    mesh: MeshShape,
    floor: float = 0.0,
) -> tuple[torch.Tensor, float]:
    """The whole tensor from the blocks by (dp, tp), and the largest gap between replicas."""

    def first(dp: int, tp: int) -> tuple[int, int]:
        """Where the first replica of a block is."""
        return (
            dp if isinstance(layout[0], Shard) else 0,
            tp if isinstance(layout[1], Shard) else 0,
        )

    gap = max(
        _gap([blocks[first(dp, tp)], blocks[dp, tp]], floor)
        for dp, tp in product(range(mesh.dp), range(mesh.tp))
    )
    whole = assemble(lambda at: blocks[at[0], at[1]], shape, layout, (mesh.dp, mesh.tp))
    return whole, gap


def doubles(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float64; both parts of a complex one."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _largest(tensor: torch.Tensor) -> float:
    """Largest finite absolute element."""
    if tensor.numel() == 0:
        return 0.0
    return float(doubles(tensor).nan_to_num(0.0, 0.0, 0.0).abs().max())


def _gap(copies: Sequence[torch.Tensor], floor: float = 0.0) -> float:
    """Largest difference from the first copy, relative to its largest element; NaNs agree."""
    first = doubles(copies[0])
    worst = 0.0
    for copy in map(doubles, copies[1:]):
        same = (copy == first) | (copy.isnan() & first.isnan())
        if not bool(same.all()):
            difference = torch.where(same, 0.0, (copy - first).abs())
            worst = max(worst, float(difference.nan_to_num(float("inf")).max()))
    scale = max(_largest(first), floor)
    return 0.0 if worst == 0.0 else worst / scale if scale > 0.0 else float("inf")
