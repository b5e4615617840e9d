"""What backward needs of forward, and the least that giving it up can cost.

For bounds: whatever splits are chosen and whatever is recomputed, a value that backward reads is
either kept, in bytes that no layout makes fewer, or made again by its operator, in seconds that no
split makes fewer. What crosses from block to block is kept under every choice but for *spare*
values: these cost all operators that lead to them in the block before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.graph import TensorMeta
from autopar.sharding.placement import Layout, R
from autopar.sharding.stages import VIEW_OPS
from autopar.solver.analysis import Analysis
from autopar.solver.prices import PriceList
from autopar.solver.recompute_blocks import Spare
from autopar.solver.splits_problem import SplitsProblem
from autopar.solver.splits_structure import SplitsStructure

RATIO_STEP = 1.25  # values whose price per byte differs by less are given up together

Curve = tuple[int, tuple[tuple[int, float], ...]]
"""Bytes that a block keeps at most; then (bytes, seconds) of giving parts up, cheapest first."""


@dataclass(frozen=True, slots=True)
class _Root:
    """A value that backward reads, views resolved.

    Attributes:
        variable: Who makes it.
        result: Which of its results.
        shares: Values that the same operator makes for backward.
        makers: Who is run to make it again; empty if it is kept under every choice.
    """

    variable: int
    result: int
    shares: int
    makers: tuple[int, ...]


@dataclass(slots=True)
class SavedValues:
    """What each block keeps for its backward, whatever the sizes.

    Args:
        analysis: Model and cluster.
        structure: Groups of operators.
        spares: By block a value from the block before that may be made again, None if there is
            none.
    """

    analysis: Analysis
    structure: SplitsStructure
    spares: tuple[Spare | None, ...]
    _roots: list[tuple[_Root, ...]] = field(init=False)
    _group_of: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        analysis, structure = self.analysis, self.structure
        group_of = {name: at for at, g in enumerate(structure.groups) for name in g.members}
        self._group_of = group_of
        crossing = {
            analysis.value_keys.get(name, name)
            for cut in analysis.chain.forward_cuts
            for name in cut
        }
        spares = {
            analysis.value_keys.get(s.name, s.name): tuple(
                group_of[n]
                for n in s.operators
                if n in group_of and structure.nodes[n].op not in VIEW_OPS
            )
            for s in self.spares
            if s is not None
        }
        forward = {n for block in analysis.chain.blocks for n in block.forward}
        seen: set[str] = set()
        self._roots = []
        for block in analysis.chain.blocks:
            keys: dict[str, None] = {}
            readers = [name for name in block.backward if name in group_of]
            stack = [ref for name in readers for ref in analysis.refs[name]]
            visited: set[str] = set()
            while stack:
                name = stack.pop()
                node = structure.nodes.get(name)
                if node is None or name in visited:
                    continue
                is_item = name in analysis.value_keys  # of an operator of forward, maybe
                if name in structure.backward and not is_item:
                    continue
                visited.add(name)
                key = analysis.value_keys.get(name, name)
                is_view = node.op in VIEW_OPS and node.op != "getitem"
                if is_view or key.partition("#")[0] not in forward:
                    stack += analysis.refs[name]
                elif key not in seen:
                    keys[key] = None
            seen |= keys.keys()
            bases = [key.partition("#")[0] for key in keys]
            self._roots.append(
                tuple(
                    _Root(
                        group_of[base],
                        int(key.partition("#")[2] or 0),
                        bases.count(base),
                        spares.get(key, ()) if key in crossing else (group_of[base],),
                    )
                    for key, base in zip(keys, bases, strict=True)
                    if base in group_of
                )
            )

    def boundary_bytes(
        self, problem: SplitsProblem, prices: PriceList
    ) -> tuple[tuple[int, int], ...]:
        """Per boundary the bytes of a message forward and of one backward, at least."""
        chain, nodes = self.analysis.chain, self.structure.nodes

        def least(names: tuple[str, ...]) -> int:
            total = 0
            for name in names:
                base, _, index = self.analysis.value_keys.get(name, name).partition("#")
                at, node = self._group_of.get(base), nodes.get(base)
                if at is not None and node is not None:
                    result = int(index or 0)
                    layout = problem.variables[at].options[0].results[result]
                    total += _least_bytes(node.metas()[result], layout, prices)
            return total

        known: dict[tuple[str, ...], int] = {}
        for names in (*chain.forward_cuts, *chain.backward_cuts):
            if names not in known:
                known[names] = least(names)
        return tuple(
            (known[ahead], known[back])
            for ahead, back in zip(chain.forward_cuts, chain.backward_cuts, strict=True)
        )

    def curves(
        self, problem: SplitsProblem, prices: PriceList, operator_s: Mapping[int, float]
    ) -> list[Curve]:
        """Per block what it keeps and what giving that up costs, at least.

        Args:
            problem: Options of all operators.
            prices: Of the same mesh.
            operator_s: Least seconds per micro-batch by variable.
        """
        known: dict[tuple[_Root, ...], Curve] = {}
        for roots in self._roots:
            if roots not in known:
                known[roots] = self._curve(roots, problem, prices, operator_s)
        return [known[roots] for roots in self._roots]

    def _curve(
        self,
        roots: tuple[_Root, ...],
        problem: SplitsProblem,
        prices: PriceList,
        operator_s: Mapping[int, float],
    ) -> Curve:
        total = 0
        steps: list[tuple[float, int, float]] = []
        for root in roots:
            name = problem.variables[root.variable].name
            meta = self.structure.nodes[name].metas()[root.result]
            layout = problem.variables[root.variable].options[0].results[root.result]
            size = _least_bytes(meta, layout, prices)
            total += size
            if root.makers and size > 0:
                seconds = sum(operator_s.get(at, 0.0) for at in root.makers) / root.shares
                steps.append((seconds / size, size, seconds))
        steps.sort()
        merged: list[tuple[float, int, float]] = []
        for ratio, size, seconds in steps:
            if merged and ratio <= RATIO_STEP * merged[-1][0]:
                first, before, _ = merged[-1]
                merged[-1] = (first, before + size, first * (before + size))
            else:
                merged.append((ratio, size, seconds))
        return total, tuple((size, seconds) for _, size, seconds in merged)


def _least_bytes(meta: TensorMeta | None, layout: Layout, prices: PriceList) -> int:
    """Bytes of a rank's part of a value if ``tp`` splits it, whether it can or not."""
    if meta is None:
        return 0
    if "tp" not in prices.axes:
        return prices.local(meta, layout).bytes
    at = prices.axes.index("tp")
    whole = prices.local(meta, (*layout[:at], R, *layout[at + 1 :]))
    return whole.bytes // prices.sizes[at]
