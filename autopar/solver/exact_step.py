"""A step of a plan's programs: its seconds, and its simulation where that is asked for.

Where stages read of their neighbours alone, programs do nothing beside computing and parameters are
gathered once, the order as numbers tells the seconds (:mod:`autopar.solver.order_times`); what
programs add is done before the first compute and after the last. All else is simulated, and so is
any step whose spans are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from autopar.plan.actions import Action, ActionKind
from autopar.plan.order_codes import CODED_KINDS
from autopar.plan.orders import codes_of, order_of, receives_ahead
from autopar.plan.schedule import ActionLists, Edge, Order, action_lists, decoded
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.solver.order_times import ends_of, settled_count
from autopar.solver.step_rows import GATHER, NUM_THINGS, REDUCE, StepRow, step_rows
from cost_models.simulate import Simulation, StageSeconds, simulate


@dataclass(slots=True, kw_only=True, eq=False)
class ExactStep:
    """A step of given stages.

    Attributes:
        kind: The schedule.
        mesh: Which pipeline rank has which stages.
        num_microbatches: Micro-batches.
        warmup: As for :func:`~autopar.plan.orders.order_of`.
        zero_levels: By stage.
        forward_edges: (s, t) where a forward of t reads of the forward of s.
        backward_edges: The same of backwards.
        ties: (owner, borrower) of weights that two stages share.
        stages: Seconds by stage.
        links: Seconds of a message by (source stage, target stage).
    """

    kind: ScheduleKind
    mesh: MeshShape
    num_microbatches: int
    warmup: tuple[int, ...] | None
    zero_levels: tuple[int, ...]
    forward_edges: frozenset[Edge]
    backward_edges: frozenset[Edge]
    ties: tuple[Edge, ...]
    stages: Sequence[StageSeconds]
    links: Mapping[Edge, float]
    _simulation: Simulation | None = None

    @property
    def order(self) -> Order:
        """Who computes what in which order."""
        return order_of(self.kind, self.mesh, self.num_microbatches, self.warmup)

    def rank_lists(self) -> ActionLists:
        """What every rank does, but for messages."""
        return action_lists(self.order, self.mesh, tied=self.ties, zero_levels=self.zero_levels)

    def memory_lists(self) -> Sequence[Sequence[Action]]:
        """The same for those who count bytes, whose actions need no micro-batches.

        What every rank holds at a moment follows from how often it has done what, and repeats
        itself: so few micro-batches are listed as all moments of the step need.
        """
        if self.kind is ScheduleKind.FORWARD or max(self.zero_levels, default=0) >= 2:
            return self.rank_lists()
        count = settled_count(self.kind, self.mesh, self.num_microbatches, self.warmup)
        order = step_rows(self.kind, self.mesh, count, self.warmup)
        return [_actions(row) for row in order.rows]

    def rank_list(self, rank: int) -> Sequence[Action]:
        """What one rank does."""
        rows = codes_of(self.kind, self.mesh, self.num_microbatches, self.warmup)
        order = (decoded(*rows[rank]),)
        return action_lists(order, self.mesh, tied=self.ties, zero_levels=self.zero_levels)[0]

    def simulation(self) -> Simulation:
        """The step up to the last reduction."""
        if self._simulation is None:
            lists = action_lists(
                self.order,
                self.mesh,
                forward_edges=self.forward_edges,
                backward_edges=self.backward_edges,
                tied=self.ties,
                zero_levels=self.zero_levels,
                prefetch=receives_ahead(self.warmup),
            )
            self._simulation = simulate(lists, self.stages, p2p_s=self.links)
        return self._simulation

    def makespan_s(self) -> float:
        """Seconds of the step up to the last reduction."""
        return self._counted_s() if self.is_plain else self.simulation().makespan_s

    @property
    def is_plain(self) -> bool:
        """Whether the order as numbers tells the seconds."""
        ranks = [self.mesh.pipeline_rank(s) for s in range(self.mesh.num_stages)]
        ahead = {(s - 1, s) for s in range(1, len(ranks)) if ranks[s - 1] != ranks[s]}
        forward, backward = (
            {(a, b) for a, b in edges if ranks[a] != ranks[b]}
            for edges in (self.forward_edges, self.backward_edges)
        )
        back = set() if self.kind is ScheduleKind.FORWARD else {(t, s) for s, t in ahead}
        gathers_once = self.mesh.virtual == 1 or max(self.zero_levels, default=0) < 3
        is_silent = not any(stage.segments or stage.segments_at for stage in self.stages)
        return gathers_once and is_silent and (forward, backward) == (ahead, back)

    def _counted_s(self) -> float:
        """The same as the simulator finds, in the same order of sums."""
        mesh, reduce = self.mesh, ActionKind.REDUCE_GRAD
        now = [
            sum((self.stages[s].of(ActionKind.PROLOGUE) for s in sorted(mesh.stages_of(r))), 0.0)
            for r in range(mesh.pp)
        ]
        self._tie(now, ActionKind.FETCH_TIED)
        # from level 2 on gradients are reduced after every backward
        levels = self.zero_levels or (0,) * mesh.num_stages
        rows = zip(self.stages, levels, strict=True)
        each_s = [stage.of(reduce) if level >= 2 else 0.0 for stage, level in rows]
        once = [level < 2 for level in levels]
        now, free = ends_of(
            self.kind, mesh, self.num_microbatches, self.warmup, self.stages, self.links,
            each_s=each_s, begin_s=now, reduces_once=once,
        )  # fmt: skip
        if self.kind is not ScheduleKind.FORWARD:
            self._tie(now, ActionKind.SYNC_TIED)
        return max((*now, *free), default=0.0)

    def _tie(self, now: list[float], kind: ActionKind) -> None:
        """Move ranks on by what is exchanged for weights that two stages share."""
        for owner, borrower in sorted(set(self.ties)):
            one, other = (self.mesh.pipeline_rank(s) for s in (owner, borrower))
            amounts = [self.stages[s].of(kind) for s in (owner, borrower)]
            if one == other:
                amounts = amounts if kind is ActionKind.FETCH_TIED else amounts[::-1]
                now[one] = now[one] + amounts[0] + amounts[1]
            else:
                now[one] = now[other] = max(now[one], now[other]) + max(amounts)


def _actions(row: StepRow) -> Sequence[Action]:
    """A row whose parameters are gathered once and whose gradients are reduced once."""
    table: list[tuple[Action, ...]] = []
    for stage in row.stages:
        own: list[tuple[Action, ...]] = [(Action(stage, kind),) for kind in CODED_KINDS]
        own += [()] * (NUM_THINGS - len(own))
        own[GATHER] = (Action(stage, ActionKind.UNSHARD),)
        own[REDUCE] = (Action(stage, ActionKind.RESHARD), Action(stage, ActionKind.REDUCE_GRAD))
        table += own
    return list(chain.from_iterable(map(table.__getitem__, row.things)))
