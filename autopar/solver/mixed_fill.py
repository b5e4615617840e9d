"""Cuts of one pipeline whose first micro-batch is through soonest, by dynamic programming.

For a sequence of kinds and a longest stage ``C``, with ``t`` the least time of a run of blocks on a
kind (:mod:`autopar.solver.mixed_runs`) and ``c`` a message across a boundary::

    f[s, low] = min over high of  t_s(low, high) + 2 c_s(high) + f[s + 1, high]
    with t_s(low, high) <= C

Where ``C`` is near the least one hardly a boundary can move: those between the first block that the
stages from ``s`` on can begin with, and the last that those before can end with, are looked at. As
many micro-batches follow the first one, the period counts most: ``C`` goes from the longest stage
at hand up, until no cut can be better or the work limit is reached.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.solver.mixed_pipelines import PipelineSearch, Template
from autopar.solver.mixed_problem import PipelineChoice

CAP_RATIO = 1.001  # from one longest stage to the next
MAX_CAPS = 24  # work limit: longest stages that are tried
ROUNDING = 1e-9  # relative, of sums in another order

_Row = dict[int, tuple[float, int]]  # first block -> seconds from there on, first of the next stage


def with_less_fill(search: PipelineSearch, pipeline: PipelineChoice) -> PipelineChoice:
    """A pipeline with other cuts, if one of them is estimated to be faster."""
    count = pipeline.num_microbatches
    kinds = [stage.kind for stage in pipeline.stages]
    best = search.priced(pipeline.stages)
    cap_s = max(search.stage_s(stage)[0] for stage in pipeline.stages) * (1 + ROUNDING)
    least_s = _least_pass_s(search, kinds)
    for _ in range(MAX_CAPS):
        found = least_fill(search, kinds, most=count, longest_s=cap_s)
        if found is not None and found.time_s(count, shares=False) < best.time_s(
            count, shares=False
        ):
            best = found
        # any other cut has a stage longer than that, and each further micro-batch waits for it
        if least_s + (count - 1) * cap_s >= best.time_s(count, shares=False):
            break
        cap_s *= CAP_RATIO
    return PipelineChoice(stages=best.stages, num_microbatches=count)


def least_fill(
    search: PipelineSearch, kinds: Sequence[int], *, most: int, longest_s: float
) -> Template | None:
    """The cuts of least fill among those with no longer stage; None if there are none.

    Args:
        search: With the prices of runs.
        kinds: In forward order.
        most: Micro-batches that go through it.
        longest_s: The longest that a stage may take.
    """
    depth = len(kinds)
    ranges = _boundaries(search, kinds, most, longest_s)
    if ranges is None:
        return None
    behind: _Row = {search.problem.num_blocks: (0.0, 0)}
    rows: list[_Row] = []
    for s in range(depth - 1, -1, -1):
        flight, prices, row = min(depth - s, most), search.prices[kinds[s]], {}
        for low in ranges[s]:
            found = [
                (prices.time_s(low, high, flight) + rest_s, high)
                for high, (rest_s, _) in behind.items()
                if low < high and prices.fits(low, high, flight, longest_s)
            ]
            if found:
                time_s, high = min(found)
                if s > 0:
                    time_s += 2 * search.hop_s(kinds[s - 1], kinds[s], low - 1)
                row[low] = time_s, high
        rows.append(row)
        behind = row
    if 0 not in behind:
        return None
    starts = [0]
    for row in reversed(rows[1:]):  # of all stages but the last, from the first on
        starts.append(row[starts[-1]][1])
    return search.template(kinds, starts, most=most)


def _boundaries(
    search: PipelineSearch, kinds: Sequence[int], most: int, longest_s: float
) -> list[range] | None:
    """By stage, the blocks that it may begin with; None if the stages can't run all blocks."""
    depth, n = len(kinds), search.problem.num_blocks
    first, at = [0] * depth, n
    for s in range(depth - 1, -1, -1):
        low = search.longest_run(kinds[s], at, min(depth - s, most), longest_s)
        if low >= at:
            return None
        first[s] = at = max(low, s)
    if at > 0:
        return None
    last = [0]
    for s in range(depth - 1):
        fits, flight, high = search.prices[kinds[s]].fits, min(depth - s, most), last[s]
        while high < n - (depth - 1 - s) and fits(last[s], high + 1, flight, longest_s):
            high += 1
        last.append(high)
    return [range(a, b + 1) for a, b in zip(first, last, strict=True)]


def _least_pass_s(search: PipelineSearch, kinds: Sequence[int]) -> float:
    """Seconds of a micro-batch through all blocks, at least."""
    used = [search.problem.kinds[kind] for kind in set(kinds)]
    return sum(
        min(min(o.total_s for o in kind.blocks[j].options) for kind in used)
        for j in range(search.problem.num_blocks)
    )
