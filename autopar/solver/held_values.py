"""What a block holds between the two halves of its backward, at least, whatever the splits.

The half that nothing waits for reads gradients that the first half has made, and values of forward.
A gradient is held: it is never made again. A value of forward that the first half reads too is
there when the second half begins, kept or made again by the first, and held; one that the second
half alone reads is held, or made again from values that are. So what is held is a cut between the
values that are there and the readers; the least one is a linear program of the same form as what is
given up (:mod:`autopar.solver.giving_up`), with seconds for nothing.

An operator is of the first half in every stage but the first if the chain's first boundary waits
for it, and of the second half in every stage if no boundary does; others are left out.

Source: ours; halves as in :mod:`autopar.sharding.split_backward`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.sharding.stages import VIEW_OPS, ancestors
from autopar.solver.analysis import Analysis
from autopar.solver.giving_up import Value, least_kept_bytes
from autopar.solver.splits_structure import SplitsStructure

Key = tuple[int, int]
"""A value: who makes it, and which of its results."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the second half of a block's backward reads.

    Attributes:
        gradients: Values of the first half.
        values: Of forward, with what they are made from.
    """

    gradients: tuple[Key, ...]
    values: tuple[Value, ...]


@dataclass(slots=True)
class HeldValues:
    """What every block holds, whatever the sizes.

    Args:
        analysis: Model and cluster.
        structure: Groups of operators.
        crossing: Values of forward that cross a boundary.
        spare: Those of them that may be made again.
    """

    analysis: Analysis
    structure: SplitsStructure
    crossing: Collection[str]
    spare: Collection[str]
    blocks: list[Held] = field(init=False)
    _group_of: dict[str, int] = field(init=False)
    _forward: set[str] = field(init=False)
    _first: frozenset[str] = field(init=False)  # operators of the first half
    _there: set[str] = field(init=False)  # values that the first half reads

    def __post_init__(self) -> None:
        analysis, structure, chain = self.analysis, self.structure, self.analysis.chain
        self._group_of = {n: at for at, g in enumerate(structure.groups) for n in g.members}
        self._forward = {n for block in chain.blocks for n in block.forward}
        sent = [{name.partition("#")[0] for name in cut} for cut in chain.backward_cuts]
        backward = {n for block in chain.blocks for n in block.backward if n in self._group_of}
        self._first = ancestors(analysis.graph, set().union(*sent[:1])) & backward
        late = backward - ancestors(analysis.graph, set().union(*sent))
        self._there = {key for name in self._first for key in self._read(name)}
        seen: set[str] = set()
        self.blocks = [self._held([n for n in b.backward if n in late], seen) for b in chain.blocks]

    def least_bytes(self, block: int, sizes: Mapping[Key, int]) -> int:
        """Bytes that a block holds per micro-batch, at least.

        Args:
            block: Which one.
            sizes: Bytes of values, at least.
        """
        held = self.blocks[block]
        values = [sizes[v.variable, v.result] for v in held.values]
        return sum(sizes[key] for key in held.gradients) + least_kept_bytes(held.values, values)

    def _read(self, reader: str) -> Iterator[str]:
        """Values that an operator reads, views resolved."""
        analysis, stack, visited = self.analysis, list(self.analysis.refs[reader]), set[str]()
        while stack:
            name = stack.pop()
            node = self.structure.nodes.get(name)
            if node is None or name in visited:
                continue
            visited.add(name)
            if node.op in VIEW_OPS and node.op != "getitem":
                stack += analysis.refs[name]
            else:
                yield analysis.value_keys.get(name, name)

    def _key(self, value: str) -> Key:
        base, _, result = value.partition("#")
        return self._group_of[base], int(result or 0)

    def _held(self, late: list[str], seen: set[str]) -> Held:
        read = dict.fromkeys(value for name in late for value in self._read(name))
        gradients, wanted = [], []
        for value in read:
            base = value.partition("#")[0]
            if value in seen or base not in self._group_of:
                continue
            if base in self._first:
                gradients.append(self._key(value))
                seen.add(value)
            elif base in self._forward and self._counts(value):
                wanted.append(value)
        return Held(tuple(gradients), self._cone(wanted, seen))

    def _counts(self, value: str) -> bool:
        """Whether a value of forward is no spare one that may come from elsewhere."""
        return value in self._there or value not in self.spare

    def _cone(self, wanted: list[str], seen: set[str]) -> tuple[Value, ...]:
        place = {value: at for at, value in enumerate(wanted)}
        found: list[Value] = []
        for value in (order := list(wanted)):
            is_there = value in self._there or value in self.crossing
            operands: list[int] = []
            for operand in () if is_there else dict.fromkeys(self._read(value.partition("#")[0])):
                base = operand.partition("#")[0]
                is_own = base in self._forward and base in self._group_of
                if operand in seen or not is_own or not self._counts(operand):
                    continue
                if operand not in place:
                    place[operand] = len(order)
                    order.append(operand)
                operands.append(place[operand])
            key = self._key(value)
            makers = () if is_there else key[:1]
            found.append(Value(*key, len(found) < len(wanted), makers, tuple(operands)))
        seen.update(value for value in order if value in self.crossing)
        return tuple(found)
