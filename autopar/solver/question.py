"""A planning question, and someone who answers variations of it: other limits, other clusters.

Explanations are made of true numbers: whatever is claimed of another memory limit, constraint or
cluster was solved under it. What the variations share (blocks, named dims, splits of one mesh) is
found once, and equal variations are solved once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from time import monotonic

from autopar.cluster import Cluster, DeviceKind
from autopar.errors import AutoparError, ConstraintError, InfeasibleError, ShardingError
from autopar.ir.graph import Graph
from autopar.plan.explain import plan_name
from autopar.plan.types import Plan
from autopar.solver.analysis import Analysis
from autopar.solver.constraints import Constraints
from autopar.solver.search import solve
from autopar.solver.search_stats import SearchStats
from autopar.units import format_time
from cost_models.base import CostModel

Progress = Callable[[str], None]
Refusal = InfeasibleError | ConstraintError | ShardingError
Prices = Callable[[Cluster], CostModel]

MAX_SOLVES = 48  # work limit of one explanation
GUARDED = 4  # times the time limit of one search, if there is one, guard all of them


def silent(_: str) -> None:
    """No progress is wanted."""


def grown(cluster: Cluster, factor: int) -> Cluster:
    """A cluster of the same kind with ``factor`` times the devices.

    A single machine of CPU processes gets more of them; else there are more machines.

    >>> from autopar.cluster import parse_devices
    >>> str(grown(parse_devices("2:cpu"), 2)), str(grown(parse_devices("4x8:h100-sxm"), 2))
    ('4:cpu', '8x8:h100-sxm')
    """
    first = cluster.machines[0]
    if len(cluster.machines) == 1 and first.device.kind is DeviceKind.CPU:
        return replace(cluster, machines=(replace(first, num_devices=factor * first.num_devices),))
    machines = tuple(machine for machine in cluster.machines for _ in range(factor))
    return replace(cluster, machines=machines)


def as_it_is(plan: Plan) -> Plan:
    """A plan without the user's words is left as it is."""
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What :func:`~autopar.solver.search.solve` is asked.

    Attributes:
        graph: The joint graph.
        model_hash: Its hash.
        cluster: Where it runs.
        constraints: What the user has fixed.
        optimizer: Assumed optimizer.
        limit_bytes: Memory of a device that a plan may use.
        prices: Prices of a cluster.
        dress: Puts the user's names and words into a plan.
        grow: A cluster of the same kind with so many times the devices.
        programs: What to change, in words -> the program of the same model that there is then,
            made when it is tried.
        time_limit_s: Wall-clock guard of each search.
        pipelines: Answers a question whose plan may have unequal pipelines, dressed; None for one
            that the search of one mesh answers.
        in_place: A plan of unequal pipelines on the same devices of a cluster with other figures;
            None if it does not fit there.
    """

    graph: Graph
    model_hash: str
    cluster: Cluster
    constraints: Constraints
    optimizer: str
    limit_bytes: int
    prices: Prices
    dress: Callable[[Plan], Plan] = as_it_is
    grow: Callable[[Cluster, int], Cluster] = grown
    programs: Mapping[str, Callable[[], Graph]] = field(default_factory=dict)
    time_limit_s: float | None = None
    pipelines: Callable[[Question, Progress], tuple[Plan, SearchStats] | None] | None = None
    in_place: Callable[[Plan, Cluster], Plan | None] | None = None


@dataclass(slots=True)
class Asker:
    """Solves a question and variations of it.

    Attributes:
        question: The question.
        progress: Told a line for each variation.
        max_solves: How many searches may be run.
        num_solves: How many were.
    """

    question: Question
    progress: Progress = silent
    max_solves: int = MAX_SOLVES
    num_solves: int = 0
    _begin_s: float = field(default_factory=monotonic)
    _known: dict[object, Plan | Refusal] = field(default_factory=dict)
    _analyses: dict[object, Analysis] = field(default_factory=dict)
    _prices: dict[Cluster, CostModel] = field(default_factory=dict)
    _graphs: list[Graph] = field(default_factory=list)

    @property
    def is_spent(self) -> bool:
        """Whether no more searches may be run: by their number, or by the clock that guards."""
        guard_s = self.question.time_limit_s
        is_late = guard_s is not None and monotonic() - self._begin_s > GUARDED * guard_s
        return self.num_solves >= self.max_solves or is_late

    def refresh(self) -> None:
        """Begin another explanation: what was solved is kept, the limits count anew."""
        self.num_solves = 0
        self._begin_s = monotonic()

    def first(self, progress: Progress = silent) -> tuple[Plan, SearchStats]:
        """The answer to the question itself, with the statistics of its search.

        Raises:
            ConstraintError: The constraints contradict something.
            InfeasibleError: Nothing fits.
        """
        self.num_solves += 1
        plan, stats = self._solve(self.question, progress)
        self._known[self._key(self.question)] = plan
        return plan, stats

    def ask(
        self,
        what: str,
        *,
        constraints: Constraints | None = None,
        cluster: Cluster | None = None,
        limit_bytes: int | None = None,
        optimizer: str | None = None,
        graph: Graph | None = None,
    ) -> Plan | Refusal | None:
        """The plan of a variation, or why there is none; None if no more searches may be run.

        Args:
            what: The variation in words, for the progress.
            constraints: Other constraints.
            cluster: Another cluster.
            limit_bytes: Another memory limit.
            optimizer: Another optimizer.
            graph: Another program of the same model, such as one of lower precision.
        """
        own = self.question
        varied = replace(
            own,
            constraints=constraints or own.constraints,
            cluster=cluster or own.cluster,
            limit_bytes=limit_bytes or own.limit_bytes,
            optimizer=optimizer or own.optimizer,
            graph=graph or own.graph,
        )
        key = self._key(varied)
        if key not in self._known:
            if self.is_spent:
                return None
            self.num_solves += 1
            try:
                self._known[key] = self._solve(varied, silent)[0]
            except (InfeasibleError, ConstraintError, ShardingError) as error:
                self._known[key] = error
        found = self._known[key]
        told = _first_line(found) if isinstance(found, AutoparError) else _told(found)
        self.progress(f"{what}: {told}")
        return found

    def analysis(self, question: Question | None = None) -> Analysis:
        """What planning knows about a model on a cluster under constraints.

        Raises:
            ConstraintError: The constraints contradict the model.
        """
        asked = question or self.question
        base_key = (self._index(asked.graph), asked.cluster, asked.optimizer)
        key = (*base_key, constraints_key(asked.constraints))
        if key not in self._analyses:
            base = self._analyses.get(base_key)
            if base is None:
                model = self.prices(asked.cluster)
                found = Analysis(
                    asked.graph, asked.cluster, model, asked.constraints, asked.optimizer
                )
                self._analyses[base_key] = found
            else:
                found = base.under(asked.constraints)
            self._analyses[key] = found
        return self._analyses[key]

    def prices(self, cluster: Cluster) -> CostModel:
        """Prices of a cluster, made once."""
        if cluster not in self._prices:
            self._prices[cluster] = self.question.prices(cluster)
        return self._prices[cluster]

    def _key(self, question: Question) -> object:
        return (
            self._index(question.graph),
            question.cluster,
            question.optimizer,
            question.limit_bytes,
            constraints_key(question.constraints),
        )

    def _index(self, graph: Graph) -> int:
        """A number for a graph: to compare two is dear, and they are few."""
        for index, known in enumerate(self._graphs):
            if known is graph:
                return index
        self._graphs.append(graph)
        return len(self._graphs) - 1

    def _solve(self, question: Question, progress: Progress) -> tuple[Plan, SearchStats]:
        if question.pipelines is not None and question.graph is self.question.graph:
            found = question.pipelines(question, progress)
            if found is not None:
                return found
        plan, stats = solve(
            question.graph,
            question.model_hash,
            question.cluster,
            constraints=question.constraints,
            optimizer=question.optimizer,
            memory_limit_bytes=question.limit_bytes,
            cost_model=self.prices(question.cluster),
            progress=progress,
            time_limit_s=question.time_limit_s,
            analysis=self._analysis_or_none(question),
            gives_remedy=False,
        )
        return question.dress(plan) if question.graph is self.question.graph else plan, stats

    def _analysis_or_none(self, question: Question) -> Analysis | None:
        """None where constraints are wrong: the search then says so, in its own order."""
        try:
            return self.analysis(question)
        except (ConstraintError, ShardingError):
            return None


def constraints_key(constraints: Constraints) -> tuple[object, ...]:
    """Equal for equal constraints; tables count by their content and order."""
    return tuple(
        tuple(value.items()) if hasattr(value, "items") else value
        for value in (getattr(constraints, f.name) for f in fields(constraints))
    )


def _told(plan: Plan) -> str:
    return f"{format_time(plan.time_s)} with {plan_name(plan)}"


def _first_line(error: AutoparError) -> str:
    return str(error).partition("\n")[0]
