"""Copies to host memory beside the operators of a program: pieces on lanes, and what is waited for.

A program that keeps values in host memory (:mod:`autopar.sharding.host_copies`) begins copies and
awaits them. Copies run one after another, in the order in which they begin, whatever their
direction; operators go on until they come to what awaits a copy. Every program awaits its own, so
that its seconds do not depend on what ran before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.graph import Node, TensorMeta
from autopar.sharding.host_copies import BEGINNINGS, ENDS
from cost_models.lanes import Lane, Segment
from cost_models.offload import CopyPrice


@dataclass(slots=True)
class CopyLane:
    """Goes through a program, operator by operator.

    Attributes:
        price: Of a copy, one way.
        now_s: When the operators that were gone through have ended.
        copied_bytes: Bytes of all copies.
        copy_s: Seconds of all copies.
        stalled_s: Seconds of ``now_s`` in which copies were waited for.
    """

    price: CopyPrice
    now_s: float = 0.0
    copied_bytes: int = 0
    copy_s: float = 0.0
    stalled_s: float = 0.0
    _free_s: float = 0.0
    _piece_s: float = 0.0
    _joins: list[str] = field(default_factory=list)
    _end_s: dict[str, float] = field(default_factory=dict)
    _pieces: list[Segment] = field(default_factory=list)

    def operator(self, seconds: float) -> None:
        """An operator or a collective."""
        self.now_s += seconds
        self._piece_s += seconds

    def visit(self, node: Node) -> bool:
        """Whether an operator begins or awaits a copy; then it is gone through."""
        if node.op in BEGINNINGS:
            self._begin(node)
        elif node.op in ENDS:
            self._await(node.refs()[0])
        else:
            return False
        return True

    def segments(self) -> tuple[Segment, ...]:
        """What the program does on which lane; empty if it copies nothing."""
        if not self._end_s:
            return ()
        self._cut()
        return tuple(self._pieces)

    def _begin(self, node: Node) -> None:
        assert isinstance(node.meta, TensorMeta)
        size = node.meta.bytes or node.meta.host_bytes
        seconds = self.price.seconds(size)
        self._cut()
        self._free_s = max(self.now_s, self._free_s) + seconds
        self._end_s[node.name] = self._free_s
        self.copied_bytes += size
        self.copy_s += seconds
        self._pieces.append(
            Segment(lane=Lane.COPY, seconds=seconds, label=node.name, overlaps=True)
        )

    def _await(self, copy: str) -> None:
        if self._piece_s > 0:
            self._cut()
        self._joins.append(copy)
        late_s = self._end_s[copy] - self.now_s
        if late_s > 0:
            self.now_s += late_s
            self.stalled_s += late_s

    def _cut(self) -> None:
        """End the piece of computing that was gone through."""
        if self._piece_s > 0 or self._joins:
            self._pieces.append(
                Segment(lane=Lane.COMPUTE, seconds=self._piece_s, joins=tuple(self._joins))
            )
        self._piece_s, self._joins = 0.0, []
