"""Questions about a plan that take the model: asked of a compiled module, and by the shell."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from autopar.api.options import ConstraintOptions, user_constraints
from autopar.api.profiling import prices_for
from autopar.capture.tracing import Captured
from autopar.cluster import Cluster
from autopar.plan.answers import ParamExplanation, PlanExplanation, WhyNot
from autopar.plan.types import Plan
from autopar.report.facts import with_words
from autopar.solver.constraints import Constraints
from autopar.solver.explain import explain_with_model
from autopar.solver.explain_parameters import explain_parameters_with_model
from autopar.solver.given import constraints_of
from autopar.solver.objective import Goal, goal
from autopar.solver.planning import Planner
from autopar.solver.question import Asker, Question
from autopar.solver.relax import solve_or_explain
from autopar.solver.replan import Replan, change_of, replan
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
    return Question(
        graph=captured.graph,
        model_hash=captured.hash,
        cluster=cluster,
        constraints=constraints,
        optimizer=optimizer if captured.training else "none",
        limit_bytes=limit_bytes or cluster.memory_bytes,
        prices=lambda other: prices_for(other, graph=captured.graph),
        dress=lambda plan: dressed(plan, captured),
        time_limit_s=time_limit_s,
    )


def planner_for(
    captured: Captured,
    constraints: Constraints,
    *,
    optimizer: str,
    goal: Goal,
    time_limit_s: float | None = None,
) -> Planner:
    """Who plans a captured program on any cluster, towards any goal.

    Args:
        captured: The program.
        constraints: What the user has fixed.
        optimizer: Kind whose state is priced; inference has none.
        goal: What is minimised.
        time_limit_s: Wall-clock guard of each search.
    """

    def question(cluster: Cluster, wish: Constraints, limit_bytes: int | None) -> Question:
        return question_for(
            captured,
            cluster,
            wish,
            optimizer=optimizer,
            limit_bytes=limit_bytes,
            time_limit_s=time_limit_s,
        )

    return Planner(
        graph=captured.graph,
        model_hash=captured.hash,
        constraints=constraints,
        optimizer=optimizer if captured.training else "none",
        prices=lambda cluster: prices_for(cluster, graph=captured.graph),
        search=lambda *asked: solve_question(question(*asked)),
        dress=lambda plan: dressed(plan, captured),
        goal=goal,
        progress=progress,
    )


def dressed(plan: Plan, captured: Captured) -> Plan:
    """A plan with the user's names and words, and what capturing took for granted."""
    noted = replace(
        plan,
        assumptions=(*plan.assumptions, *captured.assumptions),
        precision=captured.precision,
    )
    return with_words(noted, captured.graph)


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
    _planner: Planner | None = field(default=None)
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
        return self._asker

    @property
    def planner(self) -> Planner:
        """Who plans the same program on other clusters; what it finds out is kept."""
        if self._planner is None:
            self._planner = planner_for(
                self.captured,
                constraints_of(self.plan.constraints),
                optimizer=self.plan.optimizer,
                goal=goal(self.plan.objective, self.plan.cost_limit),
                time_limit_s=self.time_limit_s,
            )
        return self._planner

    def replan(
        self,
        cluster: Cluster | None,
        lost: tuple[int, ...],
        slower: Mapping[int, float],
        *,
        thorough: bool,
    ) -> Replan:
        """The plan for a changed cluster, and what going there takes."""
        change = change_of(self.cluster, cluster, lost=lost, slower=slower)
        return replan(self.planner, self.plan, change, thorough=thorough)

    def explain(self, pattern: str | None) -> PlanExplanation | ParamExplanation:
        """What binds and who lost, or how the parameters that match a pattern are split."""
        if pattern is None:
            return explain_with_model(self.asker, self.plan)
        return explain_parameters_with_model(self.asker, self.plan, pattern)

    def why_not(self, constraints: Mapping[str, object]) -> WhyNot:
        """What a constraint would do to the plan."""
        wished = user_constraints(cast("ConstraintOptions", dict(constraints)))
        return why_not(self.asker, self.plan, wished.for_solver())
