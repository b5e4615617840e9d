"""What localize needs to know: the plan's decisions in the vocabulary of this floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.sharding.placement import Layout, Placement, R
from autopar.sharding.programs import AXES
from autopar.sharding.signature import AxisStrategy

Choice = AxisStrategy | Placement


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Every choice that shapes the local programs.

    Attributes:
        axis_sizes: Sizes of :data:`~autopar.sharding.programs.AXES`.
        choices: Axis -> operator name -> strategy, and input name -> placement. What is not
            listed is replicated.
        firsts: First forward operator of stages 1, 2, ...; one stage if empty.
        recompute: Forward operators (global names) whose values are not kept for backward.
        offload: Forward operators whose values are kept for backward in host memory, where they are
            kept (:mod:`autopar.sharding.host_copies`).
        offload_window_bytes: Bytes on a device that are under way to the host at once, and that
            come back before they are read; a single value may be larger.
        zero_levels: ZeRO level of each stage's parameters; 0 where the tuple is short.
        gather_outputs: Paths of outputs to return whole; the others are not computed.
    """

    axis_sizes: tuple[int, int, int] = (1, 1, 1)
    choices: Mapping[str, Mapping[str, Choice]] = field(default_factory=dict)
    firsts: tuple[str, ...] = ()
    recompute: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()
    offload_window_bytes: int = 0
    zero_levels: tuple[int, ...] = ()
    gather_outputs: frozenset[str] = frozenset()

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that really split: size over one."""
        return tuple(a for a, n in zip(AXES, self.axis_sizes, strict=True) if n > 1)

    def size(self, axis: str) -> int:
        """Ranks (or micro-batches) along an axis."""
        return self.axis_sizes[AXES.index(axis)]

    def strategy(self, axis: str, name: str) -> AxisStrategy | None:
        """Chosen strategy of an operator on an axis; None for replicated."""
        choice = self.choices.get(axis, {}).get(name)
        return choice if isinstance(choice, AxisStrategy) else None

    def input_layout(self, name: str) -> Layout:
        """Layout in which programs read an input."""
        found: list[Placement] = []
        for axis, size in zip(AXES, self.axis_sizes, strict=True):
            choice = self.choices.get(axis, {}).get(name, R)
            found.append(R if size == 1 or isinstance(choice, AxisStrategy) else choice)
        return tuple(found)
