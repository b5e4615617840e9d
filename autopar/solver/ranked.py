"""A shape with everything chosen and an estimate, or the word that it does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.sharding.decisions import Choice, Decisions
from autopar.solver.analysis import Analysis
from autopar.solver.block_costs import BlockTable
from autopar.solver.candidates import Shape
from autopar.solver.chain_sums import Chain
from autopar.solver.greedy_stages import needed_bytes
from autopar.solver.parameter_costs import ParameterCost
from autopar.solver.schedule_choice import ChosenOrder
from autopar.solver.splits import tp_choices
from autopar.solver.splits_problem import SplitsProblem, SplitsSolution
from autopar.solver.stages_problem import (
    BlockMenu,
    StageProblem,
    StageSolution,
    bounds,
    least_memory_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A shape with splits, cuts and recompute chosen.

    Attributes:
        shape: Mesh, micro-batches, schedule.
        zero_level: The level that ``problem`` and ``table`` are of: that of all stages, unless
            ``levels`` says otherwise.
        splits: The splits.
        problem: The problem that they solve.
        table: Menus under them.
        stage_problem: The problem of the cuts.
        stages: The cuts and options.
        estimate_s: Simulated seconds of a step, from the menus' figures.
        levels: ZeRO level of every stage, where they are not all ``zero_level``.
        alone: The choice with one level for all stages that it is an improvement of.
    """

    shape: Shape
    zero_level: int
    splits: SplitsSolution
    problem: SplitsProblem
    table: BlockTable
    stage_problem: StageProblem
    stages: StageSolution
    estimate_s: float
    levels: tuple[int, ...] = ()
    alone: Ranked | None = None

    @property
    def zero_levels(self) -> tuple[int, ...]:
        """ZeRO level of every stage."""
        return self.levels or (self.zero_level,) * self.shape.mesh.num_stages

    @property
    def surrogate_s(self) -> float:
        """Seconds of a step by the surrogate."""
        return self.stages.objective_s

    @property
    def recompute_words(self) -> tuple[str, ...]:
        """Chosen option of every block."""
        menus = zip(self.stage_problem.blocks, self.stages.options, strict=True)
        return tuple(menu.options[at].name for menu, at in menus)


@dataclass(frozen=True, slots=True)
class Misfit:
    """A shape that no cut and no recomputing makes fit.

    Attributes:
        shape: The shape.
        zero_level: The leanest level that was tried.
        problem: Its cut problem.
    """

    shape: Shape
    zero_level: int
    problem: StageProblem

    @property
    def least_bytes(self) -> int:
        """A lower bound of what its fullest device needs."""
        return least_memory_bytes(self.problem)

    def needed_bytes(self) -> int:
        """What its fullest device needs in the leanest choice that the greedy finds."""
        return needed_bytes(self.problem)


def part_of(menus: tuple[BlockMenu, ...], share: float) -> tuple[BlockMenu, ...]:
    """Menus of other numbers of samples; relaxed ones of fewer have at least so much work."""
    known: dict[str, BlockMenu] = {}
    for menu in {m.key: m for m in menus}.values():
        if menu.key not in known:
            options = tuple(
                replace(
                    o,
                    forward_s=share * o.forward_s,
                    backward_s=share * o.backward_s,
                    weight_s=share * o.weight_s,
                    saved_bytes=int(share * o.saved_bytes),
                    transient_bytes=int(share * o.transient_bytes),
                    held_bytes=int(share * o.held_bytes),
                )
                for o in menu.options
            )
            known[menu.key] = replace(menu, options=options)
    return tuple(known[menu.key] for menu in menus)


def with_costs(
    menus: Sequence[BlockMenu],
    costs: Sequence[ParameterCost],
    reduces: int,
    num_reduces: int = 1,
) -> Chain:
    """Menus with what their blocks' parameters cost.

    Args:
        menus: By block.
        costs: By block.
        reduces: How often the costs' seconds of reducing are taken.
        num_reduces: Reductions of gradients per step.
    """
    keys: dict[object, str] = {}
    known: dict[object, BlockMenu] = {}
    by_object: dict[tuple[int, int], BlockMenu] = {}  # equal blocks share both as a rule

    def made(menu: BlockMenu, cost: ParameterCost) -> BlockMenu:
        row = (
            menu.key,
            cost.state_bytes,
            cost.gather_s,
            cost.reduce_s,
            cost.update_s,
            cost.other_s,
        )
        if row not in known:
            reduce_s = reduces * cost.reduce_s
            step_s = cost.step_s - cost.reduce_s + reduce_s
            known[row] = BlockMenu(
                key=keys.setdefault((menu.key, cost.state_bytes, step_s), str(len(keys))),
                options=menu.options,
                state_bytes=cost.state_bytes,
                step_s=step_s,
                gather_s=cost.gather_s,
                reduce_s=reduce_s,
                num_reduces=num_reduces,
            )
        return known[row]

    pairs = list(zip(map(id, menus), map(id, costs), strict=True))
    for pair, menu, cost in zip(pairs, menus, costs, strict=True):
        if pair not in by_object:
            by_object[pair] = made(menu, cost)
    return Chain([by_object[pair] for pair in pairs])


def in_order(ranked: Ranked, found: ChosenOrder) -> Ranked:
    """A ranked shape in another order of forwards and backwards."""
    return replace(
        ranked,
        shape=replace(ranked.shape, schedule=found.schedule, warmup=found.warmup),
        stage_problem=found.problem,
        stages=replace(ranked.stages, memory_bytes=found.memory_bytes),
        estimate_s=found.time_s,
    )


def decisions_for(analysis: Analysis, ranked: Ranked) -> Decisions:
    """What localize needs to know about a ranked shape."""
    shape, chain = ranked.shape, analysis.chain
    choices: dict[str, Mapping[str, Choice]] = dict(
        analysis.data(shape.num_microbatches, shape.mesh.dp).choices
    )
    choices["tp"] = tp_choices(ranked.problem, ranked.splits.options)
    recompute = {
        name
        for block, word in zip(ranked.table.recompute, ranked.recompute_words, strict=True)
        for name in block[word]
    }
    offload = {
        name
        for block, word in zip(ranked.table.offload, ranked.recompute_words, strict=True)
        for name in block[word]
    }
    chosen = zip(ranked.stage_problem.blocks, ranked.stages.options, strict=True)
    starts = [low for low, _ in bounds(ranked.stages.starts, len(chain.blocks))][1:]
    return Decisions(
        axis_sizes=shape.sizes,
        choices=choices,
        firsts=tuple(chain.first(i) for i in starts),
        recompute=frozenset(recompute),
        offload=frozenset(offload),
        offload_window_bytes=max(block.options[at].host_bytes for block, at in chosen),
        zero_levels=ranked.zero_levels,
        gather_outputs=analysis.gathered,
    )
