"""The cut problem of a shape: its menus, messages, and the micro-batches alive in its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.plan.schedule import Alive
from autopar.plan.types import MeshShape
from autopar.solver.analysis import Analysis
from autopar.solver.candidates import Shape
from autopar.solver.cuts import first_stages
from autopar.solver.path_bound import PathBound
from autopar.solver.schedule_choice import alive_of, flights, sampled_counts
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import BlockMenu, StageProblem, StageSolution

CUT_WORK = 1 << 17  # of finding likely cuts

_Alive = tuple[tuple[int, ...], tuple[tuple[Mapping[int, Alive], ...], ...]]


@dataclass(slots=True)
class ShapeProblems:
    """Makes cut problems; what shapes share is found once.

    Attributes:
        analysis: Model and cluster.
        num_solves: Cut problems solved by CP-SAT for a first choice.
    """

    analysis: Analysis
    num_solves: int = 0
    _flights: dict[object, _Alive] = field(default_factory=dict)
    _messages: dict[tuple[object, int], float] = field(default_factory=dict)
    _pairs: dict[object, tuple[object, tuple[float, ...]]] = field(default_factory=dict)

    def problem(
        self,
        shape: Shape,
        menus: tuple[BlockMenu, ...],
        boundary_bytes: tuple[tuple[int, int], ...],
        limit_bytes: int,
    ) -> StageProblem:
        """The cut problem of a shape under given splits.

        Args:
            shape: The shape.
            menus: Menus of all blocks.
            boundary_bytes: Per boundary the bytes of a message forward and of one backward.
            limit_bytes: Memory of a device.
        """
        mesh, count = shape.mesh, shape.num_microbatches
        boundary_s = (0.0,) * len(boundary_bytes)
        if mesh.pp > 1:
            key = (id(boundary_bytes), self.analysis.slowest_group(mesh, "pp"))
            if key not in self._pairs:  # the bytes too, so that their identity stays theirs
                known = {
                    pair: sum(self._message_s(mesh, b) for b in pair) / 2
                    for pair in set(boundary_bytes)
                }
                self._pairs[key] = (boundary_bytes, tuple(known[p] for p in boundary_bytes))
            boundary_s = self._pairs[key][1]
        in_flight, together = self.alive(shape)
        return StageProblem(
            blocks=menus,
            boundary_s=boundary_s,
            pp=mesh.pp,
            virtual=mesh.virtual,
            num_microbatches=count,
            schedule=shape.schedule,
            in_flight=in_flight,
            limit_bytes=limit_bytes,
            fixed_starts=self.analysis.boundary_starts,
            placement=mesh.placement,
            together=together,
        )

    def _message_s(self, mesh: MeshShape, num_bytes: int) -> float:
        ends = self.analysis.slowest_group(mesh, "pp")
        key = (ends, num_bytes)
        if key not in self._messages:
            model = self.analysis.model
            self._messages[key] = model.collective_time_s("p2p", num_bytes, ends)
        return self._messages[key]

    def alive(self, shape: Shape) -> _Alive:
        """Micro-batches alive per stage, and together per rank."""
        mesh, kind, warmup = shape.mesh, shape.schedule, shape.warmup
        key = (kind, replace(mesh, dp=1, tp=1), warmup, shape.num_microbatches)
        if key not in self._flights:
            count = shape.num_microbatches
            self._flights[key] = (
                flights(kind, mesh, count, warmup), alive_of(kind, mesh, count, warmup)
            )  # fmt: skip
        return self._flights[key]

    def likely_cuts(self, problem: StageProblem) -> Sequence[tuple[int, ...]]:
        """Cuts that know what ranks with several stages wait for; none for other problems."""
        if problem.virtual == 1 or problem.fixed_starts is not None or problem.forms:
            return ()
        few = replace(problem, num_microbatches=sampled_counts(problem)[-1][0])
        return PathBound(few, max_work=CUT_WORK).likely_cuts()

    def first_stages(self, problem: StageProblem) -> StageSolution | None:
        """Cuts and options by the greedy choice; None if it finds none."""
        if problem.fixed_starts is not None:
            self.num_solves += 1
            return solve_stages(problem)
        return first_stages(problem)
