"""A ZeRO level for every stage: beside the best plans of one level, or as the user gave them.

What a level costs the blocks of a shape is of :mod:`autopar.solver.parameter_costs`, the choice of
:mod:`autopar.solver.state_choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import ConstraintError
from autopar.solver.candidates import Shape
from autopar.solver.parameter_costs import parameter_costs
from autopar.solver.ranked import Misfit, Ranked, with_costs
from autopar.solver.ranking import Ranker
from autopar.solver.splits_problem import choice_terms_s
from autopar.solver.stages_problem import BlockMenu, StageProblem
from autopar.solver.state_choice import Chosen, FormChoice, may_gain
from autopar.solver.state_forms import leanest, with_forms

NO_LIMIT = 1 << 60

Forms = dict[int, tuple[BlockMenu, ...]]
"""ZeRO level -> the menu of every block at that level."""


def leveled(ranker: Ranker, ranked: Ranked) -> Ranked:
    """The same shape and splits with a level for every stage, if that is faster.

    Args:
        ranker: Prices levels.
        ranked: A choice with one level, or several.
    """
    shape, limit = ranked.shape, ranked.stage_problem.limit_bytes
    levels = ranker.analysis.zero_levels(shape.mesh.dp)
    if shape.mesh.num_stages == 1 or len(levels) == 1 or ranker.analysis.stage_levels:
        return ranked
    forms = _forms(ranker, ranked, levels)
    if len(forms) == 1:
        return ranked
    problem, own = _open(ranked, forms, limit), _places(forms, ranked.zero_levels)
    if not may_gain(problem, ranked.stage_problem, ranked.stages, own, ranked.estimate_s):
        return ranked
    chosen = FormChoice(problem).improved(ranked.stages.starts, own)
    found = None if chosen is None else _taken(ranker, ranked, forms, chosen)
    if found is None or found.estimate_s >= ranked.estimate_s:
        return ranked
    return replace(found, alone=ranked)


def recut(ranker: Ranker, ranked: Ranked, limit_bytes: int) -> Ranked | Misfit:
    """The same shape, splits and levels of stages with other cuts, under another limit."""
    levels = tuple(dict.fromkeys(ranked.zero_levels))
    forms = _forms(ranker, ranked, levels)
    own = _places(forms, ranked.zero_levels)
    problem = replace(_open(ranked, forms, limit_bytes), given_forms=own)
    chosen = FormChoice(problem).improved(ranked.stages.starts, own)
    if chosen is None:
        return Misfit(ranked.shape, max(levels), leanest(problem))
    return _taken(ranker, ranked, forms, chosen)


def rank_given(ranker: Ranker, shape: Shape, limit_bytes: int) -> Ranked | Misfit:
    """A good choice for a shape whose stages have given levels.

    Args:
        ranker: Prices shapes.
        shape: With as many stages as levels are given.
        limit_bytes: Memory of a device.

    Raises:
        ConstraintError: No splits of the shape are possible at all of the levels.
    """
    wanted = ranker.analysis.stage_levels
    levels = tuple(dict.fromkeys(wanted))
    best: Ranked | None = None
    misfit: Misfit | None = None
    for level in levels:
        base = ranker.rank(shape, limit_bytes=NO_LIMIT, levels=(level,))
        forms = _forms(ranker, base, levels) if isinstance(base, Ranked) else {}
        if not isinstance(base, Ranked) or len(forms) < len(levels):
            continue
        own = _places(forms, wanted)
        problem = replace(_open(base, forms, limit_bytes), given_forms=own)
        chosen = FormChoice(problem).any()
        if chosen is None:
            misfit = misfit or Misfit(shape, max(levels), leanest(problem))
            continue
        found = _taken(ranker, base, forms, chosen)
        if best is None or found.estimate_s < best.estimate_s:
            best = found
    if best is None and misfit is None:
        raise ConstraintError(
            f"constraint zero={list(wanted)}: {shape} has no splits that gradients can reach the "
            f"shards of levels {', '.join(map(str, levels))} from; give one level for all stages"
        )
    return best or misfit  # type: ignore[return-value]  # one of them is there


def _forms(ranker: Ranker, ranked: Ranked, levels: Sequence[int]) -> Forms:
    """What blocks cost at each level under the splits of a choice; its own level comes first.

    A level is left out where gradients can't reach its shards under these splits.
    """
    own = ranked.zero_level
    body = ranker.bodies.body(ranked.shape.sizes)
    owners = ranker.tables.owners(body.structure)
    options = ranked.splits.options
    found: Forms = {}
    for level in dict.fromkeys((own, *levels)):
        problem = ranked.problem
        if level != own:
            problem = ranker.parameters(ranked.shape.sizes, level, body)
            counts = [
                [len(v.options) for v in each.variables] for each in (problem, ranked.problem)
            ]
            if counts[0] != counts[1] or choice_terms_s(problem, options) is None:
                continue
        costs = parameter_costs(problem, options, owners)
        found[level] = with_costs(ranked.table.menus, costs, 1, problem.num_reduces)
    return found


def _open(ranked: Ranked, forms: Forms, limit_bytes: int) -> StageProblem:
    problem = replace(ranked.stage_problem, limit_bytes=limit_bytes)
    return with_forms(problem, list(forms.values()))


def _places(forms: Forms, levels: Sequence[int]) -> tuple[int, ...]:
    places = {level: at for at, level in enumerate(forms)}
    return tuple(places[level] for level in levels)


def _taken(ranker: Ranker, ranked: Ranked, forms: Forms, chosen: Chosen) -> Ranked:
    levels = list(forms)
    return ranker.estimated(
        replace(
            ranked,
            stage_problem=chosen.problem,
            stages=replace(chosen.solution, forms=()),
            levels=tuple(levels[form] for form in chosen.forms),
            estimate_s=chosen.time_s,
        )
    )
