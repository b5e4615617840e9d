"""A form of its own for the states of every stage: chosen with the cuts and what is made again.

The search takes the shapes of plans with one ZeRO level for all stages. Where that is not the best
choice (the first stage has more micro-batches in flight, or the embedding, and needs a leaner level
than the others), stages get levels of their own:

1. cuts, options and forms are solved as one program (:mod:`autopar.solver.stages`) where each
   rank has one stage;
2. from the best that is known on, one stage or one rank at a time gets another form, or a block
   moves over a boundary; what stages make again is chosen anew, and the step is run. What makes it
   shorter is kept, until nothing does or the trials are used up.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from autopar.solver.recut import Recut, even_starts
from autopar.solver.schedule_choice import sampled_counts, simulated_s
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import BlockMenu, StageProblem, StageSolution, bounds
from autopar.solver.state_forms import resolved

MAX_TRIALS = 48  # work limit: choices that are run
MAX_THINGS = 200_000  # work limit: computes of all choices that are run
MIN_TRIALS = 4
GAIN = 1e-6  # of a step, that a move must save
WORTH = 1e-3  # of a step, that forms must be able to save for the search to begin

Starts = tuple[int, ...]
Forms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Cuts, options and forms.

    Attributes:
        problem: What the blocks cost in the forms of their stages.
        solution: Cuts and options.
        forms: By stage.
        time_s: Seconds of a step, as the simulator finds them.
    """

    problem: StageProblem
    solution: StageSolution
    forms: Forms
    time_s: float


@dataclass(slots=True)
class FormChoice:
    """A search for the forms of all stages.

    Args:
        problem: The chain, with forms.
        max_trials: Choices that are run, at most.
    """

    problem: StageProblem
    max_trials: int = MAX_TRIALS
    _trials: int = 0
    _known: dict[tuple[Starts, Forms], Chosen | None] = field(default_factory=dict)

    def improved(self, starts: Starts, forms: Forms) -> Chosen | None:
        """The best choice found, from given cuts and forms on; None if none fits."""
        best = self._run(starts, forms)
        for found in self._solved():
            best = found if best is None or found.time_s < best.time_s else best
        return None if best is None else self._descended(best, recuts=False)

    def any(self) -> Chosen | None:
        """The best choice found; None if none fits."""
        count, stages = len(self.problem.blocks), self.problem.num_stages
        if count < stages:
            return None
        starts = self.problem.fixed_starts or even_starts(self.problem)
        rows = [self.problem.given_forms] if self.problem.given_forms else [
            (form,) * stages for form in range(len(self.problem.forms))
        ]  # fmt: skip
        runs = [*self._solved(), *(self._run(starts, row) for row in rows), *self._moved(starts)]
        found = [run for run in runs if run is not None]
        if not found:
            return None
        return self._descended(min(found, key=lambda run: run.time_s), recuts=True)

    def _solved(self) -> Iterator[Chosen]:
        if self.problem.virtual > 1:
            return
        found = solve_stages(self.problem)
        if found is not None:
            problem = resolved(self.problem, found.starts, found.forms)
            time_s = simulated_s(problem.mesh, problem, found)
            yield Chosen(problem, found, found.forms, time_s)

    def _moved(self, starts: Starts) -> Iterator[Chosen | None]:
        """Good cuts if all stages had one form, for ranks that have several stages."""
        problem = self.problem
        if problem.virtual == 1 or problem.fixed_starts is not None or problem.given_forms:
            return
        for form, menus in enumerate(problem.forms):
            alike = replace(problem, blocks=menus, forms=())
            found = Recut(alike, self.max_trials).improved(starts)
            if found is not None:
                yield self._run(found.starts, (form,) * problem.num_stages)

    def _descended(self, best: Chosen, *, recuts: bool) -> Chosen:
        """The best choice by moves; without ``recuts`` blocks stay until a form has changed."""
        count = sum(n for n, _ in sampled_counts(self.problem))
        most = MAX_THINGS // (2 * self.problem.num_stages * count)
        most = self._trials + max(MIN_TRIALS, min(self.max_trials, most))
        first, moved = best.forms, True
        while moved:
            moved = False
            for starts, forms in self._moves(best, recuts=recuts or best.forms != first):
                if self._trials >= most:
                    return best
                found = self._run(starts, forms)
                if found is not None and found.time_s < best.time_s * (1 - GAIN):
                    best, moved = found, True
                    break
        return best

    def _moves(self, best: Chosen, *, recuts: bool) -> Iterator[tuple[Starts, Forms]]:
        """Choices beside one, the most promising first.

        Args:
            best: That one.
            recuts: Whether blocks are moved too.
        """
        problem, starts = self.problem, best.solution.starts
        if not problem.given_forms:
            ranked = sorted(self._changes(best), key=lambda row: (-row[0], row[1]))
            for gain_s, forms in ranked:
                if gain_s > WORTH * best.time_s:
                    yield starts, forms
        if problem.fixed_starts is not None or not (recuts or problem.given_forms):
            return
        runs = bounds(starts, len(problem.blocks))
        for boundary, (before, after) in enumerate(pairwise(runs)):
            for step, source, target in ((1, after, before), (-1, before, after)):
                is_last = source[1] - source[0] == 1
                if not is_last and target[1] - target[0] < problem.most_blocks:
                    moved = list(starts)
                    moved[boundary] += step
                    yield tuple(moved), best.forms

    def _changes(self, best: Chosen) -> Iterator[tuple[float, Forms]]:
        """Other forms for one stage or one rank, with the most that they can save."""
        gains = stage_gains(self.problem, best.problem, best.solution, best.forms)
        for rank in range(self.problem.pp):
            stages = self.problem.stages_of(rank)
            for form in range(len(self.problem.forms)):
                groups = [(s,) for s in stages] + ([stages] if len(stages) > 1 else [])
                for group in groups:
                    forms = tuple(form if s in group else f for s, f in enumerate(best.forms))
                    if forms != best.forms:
                        yield sum(gains[s][form] for s in group), forms

    def _run(self, starts: Starts, forms: Forms) -> Chosen | None:
        """Given cuts and forms with the options that make them fit; None if they can't."""
        key = (starts, forms)
        if key not in self._known:
            self._trials += 1
            problem = resolved(self.problem, starts, forms)
            solution = Recut(replace(problem, fixed_starts=starts)).improved(starts)
            self._known[key] = None
            if solution is not None:
                time_s = simulated_s(problem.mesh, problem, solution)
                self._known[key] = Chosen(problem, solution, forms, time_s)
        return self._known[key]


def stage_gains(
    problem: StageProblem, own: StageProblem, solution: StageSolution, forms: Forms
) -> list[list[float]]:
    """Per stage and form the most seconds that the rank of the stage can save in that form.

    A leaner form may make room so that nothing is made again; what it takes longer per step counts
    against that. Of reductions that follow every backward all but the last may be hidden.

    Args:
        problem: With forms.
        own: The problem of the forms that stages have.
        solution: Its cuts and options.
        forms: These forms.
    """
    found = []
    for stage, (low, high) in enumerate(bounds(solution.starts, len(own.blocks))):
        extra_s = sum(
            own.blocks[i].options[solution.options[i]].total_s
            - min(o.total_s for o in own.blocks[i].options)
            for i in range(low, high)
        )
        row = []
        mine = own.blocks[low:high]
        for form, menus in enumerate(problem.forms):
            others = menus[low:high]
            less = sum(b.state_bytes for b in mine) - sum(b.state_bytes for b in others)
            slower_s = sum(map(_least_s, others)) - sum(b.step_s for b in mine)
            gain_s = (problem.num_microbatches * extra_s if less > 0 else 0.0) - slower_s
            row.append(0.0 if form == forms[stage] else gain_s)
        found.append(row)
    return found


def _least_s(block: BlockMenu) -> float:
    """Seconds of a block's once-per-step work that nothing can hide."""
    return block.once_s + block.each_s


def may_gain(
    problem: StageProblem, own: StageProblem, solution: StageSolution, forms: Forms, time_s: float
) -> bool:
    """Whether other forms for some stages can save so much of a step that a search is worth it."""
    gains = stage_gains(problem, own, solution, forms)
    return max(map(max, gains)) > WORTH * time_s
