"""The one question that the API asks: the best plan for a model, a cluster and an objective.

* Devices of one kind, for time: :func:`autopar.solver.search.solve`.
* Devices of several kinds: :mod:`autopar.solver.mixed`, unless a constraint asks for one mesh.
* One kind, for cost: a step costs its time on the devices in use, so fewer devices may be cheaper.
  The search is run for the numbers of devices that the shapes of a search have (all, and successive
  halves), each a cluster of its own. A plan on ``w`` devices takes at least the bound of the search
  on ``w``, so the least of ``w * price * bound_w`` bounds the cost of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster
from autopar.errors import ConfigError, ConstraintError, InfeasibleError
from autopar.ir.graph import Graph, OutputKind
from autopar.plan.types import Plan
from autopar.solver.analysis import Analysis
from autopar.solver.candidates import device_counts
from autopar.solver.constraints import Constraints
from autopar.solver.mixed import MixedWish, solve_mixed, takes_pipelines, too_dear
from autopar.solver.mixed_build import MixedBuilder, Prices
from autopar.solver.near import NearAnswer, near_answer
from autopar.solver.objective import SECONDS_PER_HOUR, Goal, Objective
from autopar.solver.question import as_it_is, silent
from autopar.solver.search import MeshSearch
from autopar.solver.search_stats import SearchStats

Progress = Callable[[str], None]
Search = Callable[[Cluster, Constraints, int | None], tuple[Plan, SearchStats]]


@dataclass(slots=True, kw_only=True)
class Planner:
    """Plans one model, and keeps what it found out about it for the next plan.

    Attributes:
        graph: The joint graph.
        model_hash: Its hash.
        constraints: What the user has fixed.
        optimizer: Assumed optimizer.
        prices: Cost model of a cluster.
        search: The best plan of one mesh on a cluster under constraints and a memory limit.
        dress: Puts the user's names and words into a plan of pipelines.
        goal: What is minimised.
        progress: Called with a line of text now and then.
        time_limit_s: Wall-clock guard of each search.
        analysis: What is known of the model on some cluster; searches near a plan go on with it.
    """

    graph: Graph
    model_hash: str
    constraints: Constraints
    optimizer: str
    prices: Prices
    search: Search
    dress: Callable[[Plan], Plan] = as_it_is
    goal: Goal = field(default_factory=Goal)
    progress: Progress | None = None
    time_limit_s: float | None = None
    analysis: Analysis | None = None
    _builder: MixedBuilder | None = None

    @property
    def builder(self) -> MixedBuilder:
        """Prices of classes of machines, kept between clusters."""
        if self._builder is None:
            self._builder = MixedBuilder(self.graph, self.constraints, self.optimizer, self.prices)
        return self._builder

    def plan(self, cluster: Cluster, *, limit_bytes: int | None = None) -> tuple[Plan, SearchStats]:
        """The best plan on a cluster.

        Args:
            cluster: All machines.
            limit_bytes: Memory of a device; what it has if None.

        Raises:
            ConfigError: Cost counts and a device has no price.
            ConstraintError: The constraints contradict the model or the cluster.
            InfeasibleError: Nothing fits, or nothing is cheap enough.
        """
        if self.goal.objective is not Objective.TIME:
            check_costs(cluster)
        if self.takes_pipelines(cluster):
            wish = MixedWish(
                objective=self.goal.objective,
                cost_limit=self.goal.cost_limit,
                limit_bytes=limit_bytes,
                time_limit_s=self.time_limit_s,
            )
            plan, seconds = solve_mixed(self.builder, self.model_hash, cluster, wish, self.progress)
            return self.dress(plan), SearchStats(seconds=seconds)
        if self.goal.objective is Objective.TIME:
            plan, stats = self.search(cluster, self.constraints, limit_bytes)
            return replace(plan, cost_per_step=cost_of(plan, cluster)), stats
        return self._by_count(cluster, limit_bytes)

    def search_under(self, cluster: Cluster, constraints: Constraints) -> tuple[Plan, SearchStats]:
        """The best plan of one mesh for time under other constraints than the user's."""
        return self.search(cluster, constraints, None)

    def near(self, cluster: Cluster, plan: Plan) -> NearAnswer:
        """What is best near a plan of one mesh, for time.

        Args:
            cluster: Where it is to go on.
            plan: The plan.

        Raises:
            ConstraintError: The constraints contradict something, or leave nothing near.
            InfeasibleError: Nothing near fits.
        """
        model = self.prices(cluster)
        if self.analysis is None:
            self.analysis = Analysis(self.graph, cluster, model, self.constraints, self.optimizer)
        analysis = self.analysis.on(cluster, model).under(self.constraints)
        search = MeshSearch(
            graph=self.graph,
            model_hash=self.model_hash,
            cluster=cluster,
            constraints=self.constraints,
            optimizer=self.optimizer,
            limit_bytes=cluster.memory_bytes,
            model=model,
            progress=self.progress or silent,
            time_limit_s=self.time_limit_s,
            analysis=analysis,
        )
        found = near_answer(search, plan)
        self.analysis = analysis
        return replace(
            found,
            plan=self._told(found.plan, cluster),
            stay=None if found.stay is None else self._told(found.stay, cluster),
        )

    def _told(self, plan: Plan, cluster: Cluster) -> Plan:
        return self.dress(replace(plan, cost_per_step=cost_of(plan, cluster)))

    def takes_pipelines(self, cluster: Cluster) -> bool:
        """Whether plans on a cluster have unequal pipelines."""
        kinds = (OutputKind.GRAD, OutputKind.LOSS)
        interleaves = all(tuple(self.graph.outputs_of(kind)) for kind in kinds)
        return takes_pipelines(cluster, self.constraints, interleaves=interleaves)

    def _by_count(self, cluster: Cluster, limit_bytes: int | None) -> tuple[Plan, SearchStats]:
        """The best plan for cost, or for time within it, over the numbers of working devices."""
        found: list[tuple[Plan, SearchStats]] = []
        failure: InfeasibleError | None = None
        bounds = []
        for count in device_counts(cluster.num_devices):
            part = first_devices(cluster, count)
            try:
                plan, stats = self.search(part, self.constraints, limit_bytes)
            except InfeasibleError as error:
                failure = failure or error
                break  # fewer devices have less memory still
            except ConstraintError:
                if not found:
                    raise
                break  # the degrees that the user fixed need more devices
            cost = cost_of(plan, part)
            assert cost is not None
            found.append((replace(plan, cost_per_step=cost), stats))
            bounds.append((cost_of_devices(part, count) or 0.0) * plan.bound_s / SECONDS_PER_HOUR)
            if self.progress is not None:
                self.progress(f"{count} devices: {cost:.4g} per step")
        if not found:
            assert failure is not None
            raise failure
        limit = self.goal.cost_limit
        within = [p for p in found if limit is None or (p[0].cost_per_step or 0.0) <= limit]
        if not within:
            least = min(found, key=lambda p: p[0].cost_per_step or 0.0)[0]
            raise too_dear(least.cost_per_step or 0.0, least.time_s, limit or 0.0)
        if limit is None:
            plan, stats = min(within, key=lambda p: (p[0].cost_per_step or 0.0, p[0].time_s))
        else:
            plan, stats = min(within, key=lambda p: (p[0].time_s, p[0].cost_per_step or 0.0))
        return self._of_all(plan, cluster, min(bounds)), stats

    def _of_all(self, plan: Plan, cluster: Cluster, bound: float) -> Plan:
        """A plan for a part of a cluster as one for all of it."""
        total = cluster.num_devices
        idle = total - plan.mesh.num_ranks
        notes = [text for text in plan.assumptions if "devices stay idle" not in text]
        if idle:
            words = "cheaper" if self.goal.cost_limit is None else "within the limit of cost"
            notes.append(f"{idle} of {total} devices stay idle: fewer devices are {words}")
        return replace(
            plan,
            cluster=str(cluster),
            num_devices=total,
            assumptions=tuple(notes),
            objective=self.goal.objective.value,
            cost_bound=min(bound, plan.cost_per_step or bound),
            cost_limit=self.goal.cost_limit,
        )


def check_costs(cluster: Cluster) -> None:
    """Raise if a device has no price.

    Raises:
        ConfigError: Names the devices.
    """
    names = sorted({m.device.name for m in cluster.machines if m.device.cost_per_hour is None})
    if names:
        kinds = sorted({name.partition("@")[0] for name in names})
        given = ", ".join(f"{kind!r}: ..." for kind in kinds)
        verb = "has" if len(names) == 1 else "have"
        raise ConfigError(
            f"the objective needs prices, and {', '.join(names)} of {cluster} {verb} none; give "
            f"cost_per_hour={{{given}}}, or cost_per_hour of the device in a cluster file"
        )


def cost_of_devices(cluster: Cluster, count: int) -> float | None:
    """Price of the first ``count`` devices for an hour; None if one has none."""
    total = 0.0
    for device in cluster.devices[:count]:
        if device.cost_per_hour is None:
            return None
        total += device.cost_per_hour
    return total


def cost_of(plan: Plan, cluster: Cluster) -> float | None:
    """Price of a step of a plan of one mesh; None where a device in use has none."""
    rate = cost_of_devices(cluster, plan.mesh.num_ranks)
    return None if rate is None else rate * plan.time_s / SECONDS_PER_HOUR


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """The first ``count`` devices of a cluster.

    >>> from autopar.cluster import parse_devices
    >>> str(first_devices(parse_devices("2x8:h100-sxm"), 12))
    '8:h100-sxm + 4:h100-sxm'
    """
    machines, left = [], count
    for machine in cluster.at_work(count).machines:
        if left <= 0:
            break
        here = min(left, machine.num_devices)
        machines.append(replace(machine, num_devices=here, num_working=0))
        left -= machine.num_devices
    return replace(cluster, machines=tuple(machines))
