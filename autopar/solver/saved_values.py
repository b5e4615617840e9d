"""What backward needs of forward, and the least that giving it up can cost.

For bounds: whatever splits are chosen and whatever is recomputed, a value that backward reads is
either kept, in bytes that no layout makes fewer, or made again by its operator, in seconds that no
split makes fewer. What crosses from block to block is kept under every choice but for *spare*
values: these cost all operators that lead to them in the block before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir.graph import TensorMeta
from autopar.sharding.placement import Layout, R
from autopar.sharding.stages import VIEW_OPS
from autopar.solver.analysis import Analysis
from autopar.solver.giving_up import Curve, Value, least_curve
from autopar.solver.held_values import Held, HeldValues, Key
from autopar.solver.prices import PriceList
from autopar.solver.recompute_blocks import Spare
from autopar.solver.splits_problem import SplitsProblem
from autopar.solver.splits_structure import SplitsStructure


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
    _values: list[tuple[Value, ...]] = field(init=False)
    _held: HeldValues = field(init=False)
    _group_of: dict[str, int] = field(init=False)
    _forward: set[str] = field(init=False)

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
        self._forward = {n for block in analysis.chain.blocks for n in block.forward}
        rows = [
            dict.fromkeys(k for n in block.backward if n in group_of for k in self._read(n))
            for block in analysis.chain.blocks
        ]
        entering = crossing.difference(*rows)  # counted once, with the first block that needs it
        seen: set[str] = set()
        self._values = []
        for keys in rows:
            read = [key for key in keys if key not in seen and self._base(key) in group_of]
            seen.update(keys)
            self._values.append(self._cone(read, crossing, entering, spares))
        self._held = HeldValues(analysis, structure, crossing, spares)

    @staticmethod
    def _base(key: str) -> str:
        return key.partition("#")[0]

    def _read(self, reader: str) -> Iterator[str]:
        """Values of forward that an operator reads, views resolved."""
        analysis, structure = self.analysis, self.structure
        stack, visited = list(analysis.refs[reader]), set[str]()
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
            if is_view or self._base(key) not in self._forward:
                stack += analysis.refs[name]
            else:
                yield key

    def _cone(
        self,
        read: list[str],
        crossing: set[str],
        entering: set[str],
        spares: Mapping[str, tuple[int, ...]],
    ) -> tuple[Value, ...]:
        """What backward reads of a block, and what that is made from.

        Args:
            read: What backward reads.
            crossing: Values that cross from block to block.
            entering: Those of them that no backward reads and no block has counted yet; without
                those that this one counts when it is done.
            spares: Makers of those that may be made again.
        """
        place = {key: at for at, key in enumerate(read)}
        operands: list[tuple[int, ...]] = []
        for key in (order := list(read)):
            found: list[int] = []
            for operand in () if key in crossing else dict.fromkeys(self._read(self._base(key))):
                is_new = operand not in place
                is_new &= operand not in crossing or operand in entering
                if is_new and self._base(operand) in self._group_of:
                    place[operand] = len(order)
                    order.append(operand)
                if operand in place:
                    found.append(place[operand])
            operands.append(tuple(found))
        entering.difference_update(order)
        return tuple(
            Value(
                variable=self._group_of[self._base(key)],
                result=int(key.partition("#")[2] or 0),
                is_read=at < len(read),
                makers=spares.get(key, ())
                if key in crossing
                else (self._group_of[self._base(key)],),
                operands=operands[at],
            )
            for at, key in enumerate(order)
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
        self, problem: SplitsProblem, prices: PriceList, operator_s: dict[int, float]
    ) -> list[Curve]:
        """Per block what it keeps and what giving that up costs, at least.

        Where values may be kept in host memory that is nothing at all, for nothing: copies run
        beside operators, of whichever block.

        Args:
            problem: Options of all operators.
            prices: Of the same mesh.
            operator_s: Least seconds per micro-batch by variable.
        """
        if self.analysis.host_copies is not None:
            return [(0, ())] * len(self._values)
        known: dict[tuple[Value, ...], Curve] = {}
        for values in self._values:
            if values not in known:
                sizes = [self._bytes((v.variable, v.result), problem, prices) for v in values]
                known[values] = least_curve(values, sizes, operator_s)
        return [known[values] for values in self._values]

    def held_bytes(self, problem: SplitsProblem, prices: PriceList) -> list[int]:
        """Per block what it holds between the halves of its backward, at least."""
        if self.analysis.host_copies is not None:
            return [0] * len(self._held.blocks)
        known: dict[Held, int] = {}
        for at, held in enumerate(self._held.blocks):
            if held not in known:
                keys = {*held.gradients, *((v.variable, v.result) for v in held.values)}
                sizes = {key: self._bytes(key, problem, prices) for key in keys}
                known[held] = self._held.least_bytes(at, sizes)
        return [known[held] for held in self._held.blocks]

    def _bytes(self, key: Key, problem: SplitsProblem, prices: PriceList) -> int:
        variable = problem.variables[key[0]]
        meta = self.structure.nodes[variable.name].metas()[key[1]]
        return _least_bytes(meta, variable.options[0].results[key[1]], prices)


def _least_bytes(meta: TensorMeta | None, layout: Layout, prices: PriceList) -> int:
    """Bytes of a rank's part of a value if ``tp`` splits it, whether it can or not."""
    if meta is None:
        return 0
    if "tp" not in prices.axes:
        return prices.local(meta, layout).bytes
    at = prices.axes.index("tp")
    whole = prices.local(meta, (*layout[:at], R, *layout[at + 1 :]))
    return whole.bytes // prices.sizes[at]
