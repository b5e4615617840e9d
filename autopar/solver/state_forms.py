"""In which form the stages of a chain keep parameters, gradients and optimizer states.

A *form* is a ZeRO level. What blocks cost whatever they recompute (bytes of their states,
gathering, reducing, the optimizer) differs from form to form; all blocks of a stage have the form
of the stage, and every stage may have another one. A cut problem with several forms has the menus
of all blocks in each of them. Once every stage has one, :func:`resolved` makes a problem of them
that has no forms: each block costs what it costs in the form of its stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from autopar.solver.chain_sums import Chain
from autopar.solver.stages_problem import BlockMenu, StageProblem, bounds

Menus = tuple[BlockMenu, ...]


class Forms(tuple[Chain, ...]):
    """Per form the menu of every block; keeps what is the least of all of them."""

    @cached_property
    def least(self) -> Chain:
        """Blocks with the least that each part of their states costs in any form."""
        known: dict[str, BlockMenu] = {}
        blocks = []
        for row in zip(*self, strict=True):
            menu = known.get(row[0].key)
            if menu is None:
                parts = {
                    name: min(getattr(b, name) for b in row)
                    for name in ("state_bytes", "gather_s", "reduce_s")
                }
                step_s = parts["gather_s"] + parts["reduce_s"] + min(b.update_s for b in row)
                menu = known[row[0].key] = replace(row[0], **parts, step_s=step_s, num_reduces=1)
            blocks.append(menu)
        return Chain(blocks)


def least_of(problem: StageProblem) -> Sequence[BlockMenu]:
    """The blocks of a problem with the least that their states cost in any form."""
    if not problem.forms:
        return problem.blocks
    kept = problem.forms if isinstance(problem.forms, Forms) else Forms(map(Chain, problem.forms))
    return kept.least


def with_forms(problem: StageProblem, menus: Sequence[Menus]) -> StageProblem:
    """A cut problem whose stages have the choice among forms.

    Blocks are interchangeable from now on where they are so in every form.

    Args:
        problem: The problem; its own menus are set aside.
        menus: Per form the menu of every block; the options are the same in all of them.
    """
    forms = alike(menus)
    return replace(problem, blocks=forms[0], forms=forms if len(forms) > 1 else ())


def useful(menus: Sequence[Menus]) -> tuple[Menus, ...]:
    """Forms without those that another one is no worse than in anything, for every block.

    What a bound has to look at: a form that is left out wins nothing.
    """
    # blocks that are the same objects in every form are compared once
    rows = {tuple(map(id, row)): row for row in zip(*menus, strict=True)}
    columns = list(zip(*rows.values(), strict=True))
    kept: list[Menus] = []
    for at, own in enumerate(columns):
        # of forms that are alike in everything the first one stays
        is_vain = any(
            _covers(other, own) and (place < at or not _covers(own, other))
            for place, other in enumerate(columns)
            if place != at
        )
        if not is_vain:
            kept.append(menus[at])
    return tuple(kept)


def resolved(problem: StageProblem, starts: Sequence[int], forms: Sequence[int]) -> StageProblem:
    """The problem in which every block costs what it does in the form of its stage.

    It has no choice of forms any more, and holds for these cuts alone.

    Args:
        problem: With or without forms.
        starts: First block of stages 1, 2, ...
        forms: Form of every stage.
    """
    if not problem.forms:
        return problem
    is_mixed = len(set(forms)) > 1
    blocks: list[BlockMenu] = []
    known: dict[tuple[str, int], BlockMenu] = {}
    for form, (low, high) in zip(forms, bounds(starts, len(problem.blocks)), strict=True):
        for i in range(low, high):
            menu = problem.forms[form][i]
            if is_mixed:  # equal blocks in different forms are not interchangeable
                menu = known.setdefault((menu.key, form), replace(menu, key=f"{menu.key}/{form}"))
            blocks.append(menu)
    return replace(problem, blocks=Chain(blocks), forms=(), given_forms=())


def leanest(problem: StageProblem) -> StageProblem:
    """The problem without a choice of forms, its blocks with the smallest states of any form."""
    if not problem.forms:
        return problem
    known: dict[str, BlockMenu] = {}
    blocks = [
        known.setdefault(row[0].key, min(row, key=lambda menu: menu.state_bytes))
        for row in zip(*problem.forms, strict=True)
    ]
    return replace(problem, blocks=Chain(blocks), forms=(), given_forms=())


def with_options(problem: StageProblem, menus: Menus) -> StageProblem:
    """The problem with other options for its blocks, and the states that its blocks have."""
    known: dict[tuple[str, str], BlockMenu] = {}
    blocks = []
    for own, other in zip(problem.blocks, menus, strict=True):
        key = (own.key, other.key)
        if key not in known:
            known[key] = replace(own, key=f"{other.key}:{own.key}", options=other.options)
        blocks.append(known[key])
    return replace(problem, blocks=Chain(blocks))


def alike(menus: Sequence[Menus]) -> Forms:
    """The menus with keys that tell blocks apart which differ in any form."""
    keys: dict[tuple[str, ...], str] = {}
    made: dict[tuple[int, str], BlockMenu] = {}
    known: dict[tuple[int, ...], list[BlockMenu]] = {}  # blocks share their menus as a rule
    columns: list[list[BlockMenu]] = []
    for places in zip(*menus, strict=True):
        same = tuple(map(id, places))
        if same not in known:
            key = keys.setdefault(tuple(m.key for m in places), str(len(keys)))
            known[same] = [
                made.setdefault((form, key), replace(menu, key=key))
                for form, menu in enumerate(places)
            ]
        columns.append(known[same])
    rows = zip(*columns, strict=True)
    return Forms(map(Chain, rows))


def _covers(one: Menus, other: Menus) -> bool:
    """Whether a form costs no block more than another does, in anything."""
    return all(
        a.state_bytes <= b.state_bytes
        and a.gather_s <= b.gather_s
        and a.reduce_s <= b.reduce_s
        and a.update_s <= b.update_s
        and a.num_reduces <= b.num_reduces
        for a, b in zip(one, other, strict=True)
    )
