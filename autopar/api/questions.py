"""Questions about a plan that take the model: asked of a compiled module, and by the shell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from autopar.api.environment import local_machine
from autopar.api.options import ConstraintOptions, user_constraints
from autopar.api.profiling import prices_for
from autopar.capture.normalise import with_stable_names, without_dead
from autopar.capture.tracing import Captured
from autopar.cluster import Cluster, DeviceKind, parse_devices
from autopar.ir.graph import Graph, InputKind
from autopar.ir.precision import lower_precision, widen_gradients
from autopar.plan.answers import ParamExplanation, PlanExplanation, WhyNot
from autopar.plan.types import Plan
from autopar.report.facts import with_words
from autopar.solver.constraints import Constraints
from autopar.solver.explain import explain_with_model
from autopar.solver.explain_parameters import explain_parameters_with_model
from autopar.solver.given import constraints_of
from autopar.solver.question import Asker, Question, grown
from autopar.solver.relax import solve_or_explain
from autopar.solver.why_not import why_not

if TYPE_CHECKING:
    from autopar.solver.search import SearchStats

logger = logging.getLogger("autopar.progress")


def progress(line: str) -> None:
    """A line of the search, for who listens to the logger ``autopar.progress``."""
    logger.info("%s", line)


def question_for(
    captured: Captured,
    cluster: Cluster,
    constraints: Constraints,
    *,
    optimizer: str,
    limit_bytes: int | None = None,
    time_limit_s: float | None = None,
) -> Question:
    """The planning question of a captured program.

    Args:
        captured: The program.
        cluster: Where it runs.
        constraints: What the user has fixed.
        optimizer: Kind whose state is priced; inference has none.
        limit_bytes: Bytes that a device may use; what the cluster has if left out.
        time_limit_s: Wall-clock guard of each search.
    """

    def dress(plan: Plan) -> Plan:
        noted = replace(
            plan,
            assumptions=(*plan.assumptions, *captured.assumptions),
            precision=captured.precision,
        )
        return with_words(noted, captured.graph)

    return Question(
        graph=captured.graph,
        model_hash=captured.hash,
        cluster=cluster,
        constraints=constraints,
        optimizer=optimizer if captured.training else "none",
        limit_bytes=limit_bytes or cluster.memory_bytes,
        prices=lambda other: prices_for(other, graph=captured.graph),
        dress=dress,
        grow=_grown,
        programs=_programs(captured),
        time_limit_s=time_limit_s,
    )


def _grown(cluster: Cluster, factor: int) -> Cluster:
    """More devices; more processes of this machine share its cores and its memory."""
    first = cluster.machines[0]
    if len(cluster.machines) > 1 or first.device.kind is not DeviceKind.CPU:
        return grown(cluster, factor)
    local = local_machine()
    here = parse_devices(f"{first.num_devices}:{first.device.name}", local=local)
    more = parse_devices(f"{factor * first.num_devices}:{first.device.name}", local=local)
    if cluster.memory_bytes != here.memory_bytes:  # the user's limit, not a share of the memory
        more = more.with_memory_limit(cluster.memory_bytes)
    return more


def _programs(captured: Captured) -> dict[str, Callable[[], Graph]]:
    """The program in a lower precision, if it computes in float32 throughout."""
    params = list(captured.graph.of_kind(InputKind.PARAM))
    is_whole = all(p.meta is None or p.meta.dtype == "float32" for p in params)
    if captured.precision is not None or not params or not is_whole:
        return {}
    low = "bf16"

    def lowered() -> Graph:
        graph = without_dead(lower_precision(captured.graph, low))
        return with_stable_names(without_dead(widen_gradients(graph)))

    return {f"compute in precision={low!r} (float32 masters stay)": lowered}


def solve_question(question: Question) -> tuple[Plan, SearchStats]:
    """The plan; where there is none, an error with the ways out.

    Raises:
        ConstraintError: The constraints contradict something; the smallest set is named.
        InfeasibleError: Nothing fits.
    """
    return solve_or_explain(Asker(question, progress=progress), progress=progress)


@dataclass(slots=True)
class Questions:
    """Answers about one plan of a captured model (what a compiled module asks).

    Attributes:
        captured: The program.
        cluster: Where the plan runs.
        plan: The plan.
        time_limit_s: Wall-clock guard of each search.
    """

    captured: Captured
    cluster: Cluster
    plan: Plan
    time_limit_s: float | None = None
    _asker: Asker | None = field(default=None)

    @property
    def asker(self) -> Asker:
        """Who solves the plan's question again; what is asked twice is solved once."""
        if self._asker is None:
            question = question_for(
                self.captured,
                self.cluster,
                constraints_of(self.plan.constraints),
                optimizer=self.plan.optimizer,
                limit_bytes=self.plan.memory_limit_bytes or None,
                time_limit_s=self.time_limit_s,
            )
            self._asker = Asker(question, progress=progress)
        self._asker.refresh()
        return self._asker

    def explain(self, pattern: str | None) -> PlanExplanation | ParamExplanation:
        """What binds and who lost, or how the parameters that match a pattern are split."""
        if pattern is None:
            return explain_with_model(self.asker, self.plan)
        return explain_parameters_with_model(self.asker, self.plan, pattern)

    def why_not(self, constraints: Mapping[str, object]) -> WhyNot:
        """What a constraint would do to the plan."""
        wished = user_constraints(cast("ConstraintOptions", dict(constraints)))
        return why_not(self.asker, self.plan, wished.for_solver())
