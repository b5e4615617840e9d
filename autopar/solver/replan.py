"""Plan again after the cluster changed, starting from the plan that runs.

1. The old shape on what is left is evaluated first: the pipelines whose devices are still there, or
   the old mesh with fewer data ranks. That is what *staying* means, and a hint for the search.
2. The new plan is searched. For one mesh that is done near the old one, with what is known of it
   (:mod:`autopar.solver.near`); all shapes are searched on request, or if nothing near fits.
3. What both need to move is worked out exactly (:mod:`autopar.plan.migration`). Moving costs
   seconds once, the faster plan saves some each step: the break-even is where they meet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from autopar.cluster import Cluster, Machine
from autopar.errors import ConfigError, ConstraintError, InfeasibleError
from autopar.garbage import no_collections
from autopar.ir.graph import InputKind, TensorMeta
from autopar.plan.diff import PlanDiff
from autopar.plan.holdings import holdings
from autopar.plan.migration import Migration, migration
from autopar.plan.pipelines import PipelinePlan
from autopar.plan.types import Plan
from autopar.solver.constraints import Constraints
from autopar.solver.given import constraint_words, constraints_of, given_constraints
from autopar.solver.mixed import MixedWish, mixed_plan, solve_mixed
from autopar.solver.mixed_build import Built
from autopar.solver.mixed_choice import NUM_POLISHED, MixedAnswer, Simulated, evaluated, shares
from autopar.solver.mixed_pipelines import PipelineSearch, Template
from autopar.solver.mixed_problem import PipelineChoice, StageChoice, place
from autopar.solver.objective import Objective
from autopar.solver.planning import Planner, cost_of
from autopar.units import format_time
from cost_models.memory import optimizer_state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """The answer.

    Attributes:
        plan: The new plan.
        stay: The old shape on the devices that are left; None where it can't go on.
        diff: What the new plan does differently from the old one.
        migration: What travels to the new plan.
        stay_migration: What travels to go on with the old shape.
        is_thorough: Whether all shapes were searched, or those near the old one.
        searched: What was searched, if that is not all, and what it leaves open.
        matched: Which devices were taken for which, if that is not plain.
    """

    plan: Plan
    stay: Plan | None
    diff: PlanDiff
    migration: Migration
    stay_migration: Migration | None
    is_thorough: bool
    searched: str = ""
    matched: str = ""

    @property
    def saved_s(self) -> float:
        """Seconds per step that the new plan saves against staying; infinite if that can't be."""
        return math.inf if self.stay is None else self.stay.time_s - self.plan.time_s

    @property
    def break_even_steps(self) -> float:
        """Steps after which the move has paid; 0 if it costs no more, infinite if it never does."""
        extra_s = self.migration.seconds
        extra_s -= 0.0 if self.stay_migration is None else self.stay_migration.seconds
        if self.stay is None or (extra_s <= 0 and self.saved_s >= 0):
            return 0.0
        return extra_s / self.saved_s if self.saved_s > 0 else math.inf

    @property
    def break_even_s(self) -> float:
        """The same in seconds of training under the new plan, the move included."""
        steps = self.break_even_steps
        return math.inf if math.isinf(steps) else self.migration.seconds + steps * self.plan.time_s

    def __str__(self) -> str:
        """The new plan, what travels, and whether it pays."""
        lines = [str(self.plan), f"to move: {self.migration}"]
        if self.stay is None or self.stay_migration is None:
            lines.append("to stay: not possible, the old shape does not fit what is there now")
        else:
            lines.append(
                f"to stay: {format_time(self.stay.time_s)} per step on {self.stay.num_ranks} "
                f"device{'' if self.stay.num_ranks == 1 else 's'}; {self.stay_migration}"
            )
            steps = self.break_even_steps
            if math.isinf(steps):
                lines.append("break-even: never, staying is as fast")
            elif steps == 0:
                lines.append("break-even: at once, to move takes no longer than to stay")
            else:
                whole = math.ceil(steps)
                end_s = self.migration.seconds + whole * self.plan.time_s
                lines.append(
                    f"break-even: after {whole:,} step{'' if whole == 1 else 's'}, "
                    f"{format_time(end_s)} from the start of the move"
                )
        if self.plan.pipelines:
            lines.append("to run: not yet; unequal pipelines are planned, saved and shown")
        own = constraint_words(given_constraints(constraints_of(self.plan.constraints)))
        if own:
            lines.append(f"under: {own} (the user's, as for the old plan)")
        if self.matched:
            lines.append(f"devices: {self.matched}")
        if not self.is_thorough:
            default = "searched: shapes near the old one; thorough=True (--thorough) searches all"
            lines.append(self.searched or default)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happened to a cluster.

    Attributes:
        cluster: The new one.
        ranks: Old rank -> new rank of the same device; those that are gone are left out.
        matched: How devices were matched, in words, where some were not.
    """

    cluster: Cluster
    ranks: Mapping[int, int]
    matched: str = ""


def change_of(
    before: Cluster,
    after: Cluster | None = None,
    *,
    lost: tuple[int, ...] = (),
    slower: Mapping[int, float] | None = None,
) -> Change:
    """The change from one cluster to another.

    Args:
        before: The old cluster.
        after: The new one; its machines are taken for the old ones in order, kind by kind, whatever
            their speed: those of the same size first, then those of the same device. With it
            ``lost`` and ``slower`` are left out.
        lost: Old machines that are gone.
        slower: Old machine -> factor of its speed.

    Raises:
        ConfigError: Nothing changed or too much is named, a machine is not there, or a factor is
            not above 0.
    """
    if (after is None) == (not lost and not slower):
        raise ConfigError("replan: name the new devices=, or what changed: lost= or slower=")
    if after is not None:
        return _matched(before, after)
    changed = before
    for number, factor in sorted((slower or {}).items()):
        if number in lost:
            raise ConfigError(f"replan: machine {number} is both in lost= and in slower=")
        changed = changed.with_speed(number, factor)
    if set(lost) == set(range(len(before.machines))):
        raise ConfigError(f"replan: all {len(before.machines)} machines of {before} are lost")
    ranks: dict[int, int] = {}
    old = new = 0
    for index, machine in enumerate(before.machines):
        if index not in lost:
            ranks.update({old + i: new + i for i in range(machine.num_devices)})
            new += machine.num_devices
        old += machine.num_devices
    return Change(cluster=changed.without_machines(lost), ranks=ranks)


def _matched(before: Cluster, after: Cluster) -> Change:
    """Machines of one device and size for each other, in order; then those of one device.

    Of two machines of unlike size as many devices are taken for each other as both have.
    """

    def device(machine: Machine) -> str:
        return machine.device.name.partition("@")[0]

    starts = [list(accumulate((m.num_devices for m in c.machines), initial=0))
              for c in (before, after)]  # fmt: skip
    ranks: dict[int, int] = {}
    old = list(enumerate(before.machines))
    new = list(enumerate(after.machines))
    for same_size in (True, False):
        for number, machine in list(old):
            for other, candidate in new:
                sizes = {machine.num_devices, candidate.num_devices}
                if device(machine) == device(candidate) and len(sizes) <= 2 - same_size:
                    low, high = starts[0][number], starts[1][other]
                    ranks.update({low + i: high + i for i in range(min(sizes))})
                    old.remove((number, machine))
                    new.remove((other, candidate))
                    break
    return Change(
        cluster=after, ranks=dict(sorted(ranks.items())), matched=_words(before, after, len(ranks))
    )


def _words(before: Cluster, after: Cluster, num_kept: int) -> str:
    """How devices were matched, where some were not."""
    total = before.num_devices
    if num_kept == min(total, after.num_devices):
        return ""
    kinds = [{m.device.name.partition("@")[0] for m in c.machines} for c in (before, after)]
    gone = sorted(kinds[0] - kinds[1])
    text = f"{num_kept} of {total} go on"
    if gone:
        text += f"; {after} has no {', '.join(gone)}"
    if kinds[0] & kinds[1]:
        text += (
            "; machines are taken for the old ones of their device in order, and of one of another "
            "size as many devices as both have"
        )
    return text


@no_collections()
def replan(
    planner: Planner,
    plan: Plan,
    change: Change,
    *,
    thorough: bool = False,
    checkpoint_bytes_per_s: float | None = None,
) -> Replan:
    """The plan for a changed cluster, beside what staying would give.

    Args:
        planner: Of the same model; what it knows is used again.
        plan: The plan that runs.
        change: What happened.
        thorough: Search all shapes of one mesh, not those near the old one alone.
        checkpoint_bytes_per_s: How fast the job reads a checkpoint; the time that it takes is left
            out where nobody says.

    Raises:
        InfeasibleError: Nothing fits what is left.
        ConstraintError: The constraints contradict it.
    """
    searched = ""
    if planner.takes_pipelines(change.cluster):
        found, stay, is_thorough = _pipelines(planner, plan, change, thorough=thorough)
    else:
        found, stay, searched = _mesh(planner, plan, change, thorough=thorough)
        is_thorough = not searched
    if stay is not None and _is_better(planner, stay, found):
        found = stay
    states, held = state_bytes(planner), holdings(plan, planner.graph)

    def travel(to: Plan) -> Migration:
        return migration(
            plan, to, planner.graph, change.cluster, ranks=change.ranks, state_bytes=states,
            checkpoint_bytes_per_s=checkpoint_bytes_per_s, held=held,
        )  # fmt: skip

    to_new = travel(found)
    to_stay = None if stay is None else to_new if stay is found else travel(stay)
    return Replan(
        plan=found,
        stay=stay,
        diff=plan.diff(found),
        migration=to_new,
        stay_migration=to_stay,
        is_thorough=is_thorough,
        searched=searched,
        matched=change.matched,
    )


def _is_better(planner: Planner, plan: Plan, other: Plan) -> bool:
    """Whether a plan is better than another by what is minimised."""
    if planner.goal.objective is Objective.COST:
        return (plan.cost_per_step or math.inf) < (other.cost_per_step or math.inf)
    limit = planner.goal.cost_limit
    affords = limit is None or (plan.cost_per_step or math.inf) <= limit
    return affords and plan.time_s < other.time_s


def state_bytes(planner: Planner) -> dict[str, int]:
    """Parameter -> bytes of its optimizer state."""
    found: dict[str, int] = {}
    for entry in planner.graph.of_kind(InputKind.PARAM):
        if entry.meta is not None and entry.requires_grad:
            meta = TensorMeta(entry.meta.shape, entry.master or entry.meta.dtype)
            amount = optimizer_state_bytes(planner.optimizer, meta)
            found[entry.param] = found.get(entry.param, 0) + amount
    return found


# -- one mesh ------------------------------------------------------------------------------------
def _mesh(
    planner: Planner, plan: Plan, change: Change, *, thorough: bool
) -> tuple[Plan, Plan | None, str]:
    """The new plan, the old shape, and what was searched if that is not all."""
    # a search near the old shape asks for the fastest plan alone
    is_for_time = planner.goal.objective is Objective.TIME
    if not thorough and is_for_time and not plan.pipelines:
        try:
            answer = planner.near(change.cluster, plan)
        except (InfeasibleError, ConstraintError):
            pass  # no shape near the old one is possible: all others are asked
        else:
            return answer.plan, answer.stay, str(answer)
    stay = _fewer_data_ranks(planner, plan, change.cluster)
    found = planner.plan(change.cluster)[0]
    # its degrees were fixed to find it, and nobody asked for them
    return found, None if stay is None else replace(stay, constraints=found.constraints), ""


def _searched(
    planner: Planner, cluster: Cluster, constraints: Constraints, own: Constraints
) -> Plan:
    """A search under other constraints, told as one under the user's own."""
    found, _ = planner.search_under(cluster, constraints)
    names = {
        name
        for name in ("dp", "tp", "pp", "virtual", "num_microbatches", "zero")
        if getattr(own, name) is None and getattr(constraints, name) is not None
    }
    kept = tuple(c for c in found.constraints if c.name not in names)
    return replace(found, constraints=kept, cost_per_step=cost_of(found, cluster))


def _fewer_data_ranks(planner: Planner, plan: Plan, cluster: Cluster) -> Plan | None:
    """The old mesh with as many data ranks as there are devices for; None if there is none."""
    mesh, own = plan.mesh, planner.constraints
    if plan.pipelines:
        return None
    per_replica = mesh.num_ranks // mesh.dp
    samples = mesh.dp * plan.num_microbatches  # parts of the batch
    for dp in range(min(mesh.dp, cluster.num_devices // per_replica), 0, -1):
        if own.dp is not None and dp != own.dp:
            continue
        if samples % dp:
            continue
        fixed = replace(
            own,
            dp=dp,
            tp=mesh.tp,
            pp=mesh.pp,
            virtual=mesh.virtual,
            num_microbatches=samples // dp,
        )
        try:
            return _searched(planner, cluster, fixed, own)
        except (InfeasibleError, ConstraintError):
            continue
    return None


# -- pipelines -----------------------------------------------------------------------------------
def _pipelines(
    planner: Planner, plan: Plan, change: Change, *, thorough: bool
) -> tuple[Plan, Plan | None, bool]:
    goal = planner.goal
    built = planner.builder.build(change.cluster)
    parts = [built] if thorough or not plan.pipelines else [_near(built, plan), built]
    stay = _in_place(planner, plan, change)
    for part in parts:
        wish = MixedWish(
            objective=goal.objective,
            cost_limit=goal.cost_limit,
            num_polished=NUM_POLISHED if part is built else 1,
            time_limit_s=planner.time_limit_s,
        )
        choice = _those_left(part, plan)
        simulated = None if choice is None else evaluated(part.problem, choice)
        if choice is not None and simulated is not None:
            if stay is None:
                stay = planner.dress(mixed_plan(part, _alone(simulated), planner.model_hash, wish))
            wish = replace(wish, hints=(choice,))
        try:
            found, _ = solve_mixed(
                planner.builder, planner.model_hash, change.cluster, wish, planner.progress,
                built=part,
            )  # fmt: skip
        except InfeasibleError:
            if part is built:
                raise
            continue  # no shape near the old one is possible: all others are asked
        return planner.dress(found), stay, part is built
    raise AssertionError("the last part returns or raises")


def _near(built: Built, plan: Plan) -> Built:
    """The problem with those kinds of stages whose micro-batches the old plan has."""
    sizes = {p.microbatch_samples for p in plan.pipelines}
    kinds = tuple(k for k in built.problem.kinds if k.samples in sizes)
    return replace(built, problem=replace(built.problem, kinds=kinds)) if kinds else built


def _alone(simulated: Simulated) -> MixedAnswer:
    return MixedAnswer(best=simulated, others=(), bound_s=0.0, cost_bound=None)


def _in_place(planner: Planner, plan: Plan, change: Change) -> Plan | None:
    """The old plan where all of its devices are still there, some of them slower or faster.

    A mesh goes on as one, at the pace of its slowest device.
    """
    if not plan.pipelines:
        return _fewer_data_ranks(planner, plan, change.cluster)
    used = {r for pipeline in plan.pipelines for stage in pipeline.stages for r in stage.devices}
    if not all(rank in change.ranks for rank in used):
        return None
    return pipelines_in_place(planner, plan, change.cluster, change.ranks)


def pipelines_in_place(
    planner: Planner, plan: Plan, cluster: Cluster, ranks: Mapping[int, int] | None = None
) -> Plan | None:
    """The same pipelines on the same devices of a cluster with other figures.

    A stage goes on at the pace of its slowest machine: it is priced as if all of its machines were
    such ones. What blocks keep for the backward is chosen anew.

    Args:
        planner: Of the same model.
        plan: A plan of unequal pipelines.
        cluster: The cluster.
        ranks: Rank under the plan -> rank on the cluster; the same if left out.

    Returns:
        None if a stage does not fit any more.
    """
    machines = list(cluster.machines)
    moved = {r: r for r in range(plan.num_devices)} if ranks is None else ranks
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        own = [moved[r] for r in stage.devices]
        slow = cluster.slowest_device(own)
        for index in {cluster.machine_of(r) for r in own}:
            machines[index] = replace(machines[index], device=slow)
    wanted = {(s.tp, p.microbatch_samples // s.dp) for p in plan.pipelines for s in p.stages}
    try:
        built = planner.builder.build(replace(cluster, machines=tuple(machines)), wanted=wanted)
    except InfeasibleError:
        return None
    search = PipelineSearch(built.problem)
    choice: list[PipelineChoice] = []
    for pipeline in plan.pipelines:
        template = _template(
            search,
            built,
            [
                (
                    built.problem.cluster.device_of(moved[s.devices[0]]).name,
                    s.dp,
                    s.tp,
                    pipeline.microbatch_samples,
                    s.layers,
                )
                for s in pipeline.stages
            ],
        )
        if template is None:
            return None
        choice.append(template.choice(pipeline.num_microbatches))
    simulated = evaluated(built.problem, tuple(choice))
    if simulated is None:
        return None
    wish = MixedWish(objective=planner.goal.objective, cost_limit=planner.goal.cost_limit)
    made = planner.dress(mixed_plan(built, _alone(simulated), planner.model_hash, wish))
    return replace(made, cluster=str(cluster), pipelines=_on_old_ranks(made, plan, moved))


def _on_old_ranks(made: Plan, plan: Plan, ranks: Mapping[int, int]) -> tuple[PipelinePlan, ...]:
    """Pipelines on the devices that they have: the problem counts devices and names any."""
    return tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, devices=tuple(ranks[r] for r in old.devices))
                for stage, old in zip(pipeline.stages, before.stages, strict=True)
            ),
        )
        for pipeline, before in zip(made.pipelines, plan.pipelines, strict=True)
    )


def _those_left(built: Built, plan: Plan) -> tuple[PipelineChoice, ...] | None:
    """The old pipelines that still have their devices, with the batch shared among them."""
    search = PipelineSearch(built.problem)
    known = [_template(search, built, stages) for stages in _stages_of(plan)]
    left = [template for template in known if template is not None]
    left.sort(key=lambda t: t.period_s / t.samples)
    while left:
        counts = shares(left, built.problem.batch)
        if counts is not None:
            made = [t.choice(count) for t, count in zip(left, counts, strict=True)]
            if place(built.problem, made) is not None:
                return tuple(sorted(made, key=lambda p: (-p.num_microbatches, str(p.stages))))
        left.pop()  # the slowest makes room for the others
    return None


def _stages_of(plan: Plan) -> list[list[tuple[str, int, int, int, tuple[int, ...]]]]:
    """Per pipeline and stage: device, dp, tp, samples of a micro-batch, blocks."""
    return [
        [(s.device, s.dp, s.tp, p.microbatch_samples, s.layers) for s in p.stages]
        for p in plan.pipelines
    ]


def _template(
    search: PipelineSearch,
    built: Built,
    stages: list[tuple[str, int, int, int, tuple[int, ...]]],
) -> Template | None:
    """An old pipeline in the new problem; None if a kind of its stages is not there any more."""
    problem = built.problem
    names = [cls.name for cls in problem.classes]
    kinds = {(names[k.device_class], k.dp, k.tp, k.samples): i for i, k in enumerate(problem.kinds)}
    made = []
    for s, (device, dp, tp, samples, (low, high)) in enumerate(stages):
        kind = kinds.get((device, dp, tp, samples))
        if kind is None:
            return None
        options = search.prices[kind].options(low, high, len(stages) - s)
        if options is None:
            return None
        made.append(StageChoice(kind=kind, low=low, high=high, options=options))
    return search.priced(tuple(made))
