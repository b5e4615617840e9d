"""Questions about a plan that take the model: asked of a compiled module, and by the shell."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from autopar.api.environment import local_machine
from autopar.api.options import ConstraintOptions, user_constraints
from autopar.api.profiling import prices_for
from autopar.capture.normalise import with_stable_names, without_dead
from autopar.capture.tracing import Captured
from autopar.cluster import Cluster, Device, DeviceKind, parse_devices
from autopar.errors import ConfigError
from autopar.ir.graph import Graph, InputKind
from autopar.ir.precision import check_precision, lower_precision, widen_gradients
from autopar.plan.answers import ParamExplanation, PlanExplanation, WhyNot
from autopar.plan.types import Plan
from autopar.report.facts import with_words
from autopar.solver.constraints import Constraints
from autopar.solver.explain import explain_with_model
from autopar.solver.explain_parameters import explain_parameters_with_model
from autopar.solver.given import constraints_of
from autopar.solver.objective import Goal, Objective, goal
from autopar.solver.planning import Planner
from autopar.solver.question import Asker, Progress, Question, constraints_key, grown
from autopar.solver.relax import solve_or_explain
from autopar.solver.replan import Replan, change_of, pipelines_in_place, replan
from autopar.solver.why_not import OtherProgram, why_not

if TYPE_CHECKING:
    from autopar.solver.search_stats import SearchStats

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
    towards: Goal | None = None,
    profile: Path | None = None,
) -> Question:
    """The planning question of a captured program.

    Args:
        captured: The program.
        cluster: Where it runs.
        constraints: What the user has fixed.
        optimizer: Kind whose state is priced; inference has none.
        limit_bytes: Bytes that a device may use; what the cluster has if left out.
        time_limit_s: Wall-clock guard of each search.
        towards: What is minimised on devices of several kinds; the time of a step if left out.
        profile: The file that prices come from; this machine's own, if there is one, if left out.
    """
    planners: dict[object, Planner] = {}

    def planner_of(asked: Question | None) -> Planner:
        """Who plans unequal pipelines under the constraints of a question; the own ones if None."""
        wish = constraints if asked is None else asked.constraints
        kind = optimizer if asked is None else asked.optimizer
        key = (constraints_key(wish), kind)
        if key not in planners:
            planners[key] = planner_for(
                captured, wish, optimizer=kind, goal=towards or Goal(), time_limit_s=time_limit_s,
                profile=profile,
            )  # fmt: skip
        return planners[key]

    return Question(
        graph=captured.graph,
        model_hash=captured.hash,
        cluster=cluster,
        constraints=constraints,
        optimizer=optimizer if captured.training else "none",
        limit_bytes=limit_bytes or cluster.memory_bytes,
        prices=lambda other: prices_for(other, profile, captured.graph),
        dress=lambda plan: dressed(plan, captured),
        grow=lambda cluster, factor: _grown(cluster, factor, profile),
        programs=_programs(captured),
        pipelines=lambda asked, progress: _pipelines(planner_of(asked), asked, progress),
        in_place=lambda plan, other: pipelines_in_place(planner_of(None), plan, other),
        time_limit_s=time_limit_s,
    )


def _pipelines(
    planner: Planner, question: Question, progress: Progress
) -> tuple[Plan, SearchStats] | None:
    """Answers questions about unequal pipelines, and about cost; None for others."""
    is_for_time = planner.goal.objective is Objective.TIME
    if is_for_time and not planner.takes_pipelines(question.cluster):
        return None
    planner.progress = progress
    own_limit = question.limit_bytes == question.cluster.memory_bytes
    limit_bytes = None if own_limit else question.limit_bytes
    return planner.plan(question.cluster, limit_bytes=limit_bytes)


def _grown(cluster: Cluster, factor: int, profile: Path | None) -> Cluster:
    """More devices; more processes of this machine share its cores and its memory."""
    first = cluster.machines[0]
    if len(cluster.machines) > 1 or first.device.kind is not DeviceKind.CPU:
        return grown(cluster, factor)
    local = local_machine(profile)
    here = parse_devices(f"{first.num_devices}:{first.device.name}", local=local)
    more = parse_devices(f"{factor * first.num_devices}:{first.device.name}", local=local)
    if cluster.memory_bytes != here.memory_bytes:  # the user's limit, not a share of the memory
        more = more.with_memory_limit(cluster.memory_bytes)
    return more


def _programs(captured: Captured) -> dict[str, Callable[[], Graph]]:
    """The program in a lower precision, if it computes in float32 throughout."""
    if _fault_of_precision(captured):
        return {}
    low = "bf16"
    return {f"compute in precision={low!r} (float32 masters stay)": lambda: _lowered(captured, low)}


def _fault_of_precision(captured: Captured) -> str:
    """Why a captured program can't be had in another precision; "" if it can."""
    if captured.precision is not None:
        return f"was captured in {captured.precision}"
    params = list(captured.graph.of_kind(InputKind.PARAM))
    if not params:
        return "has no parameters"
    other = next((p for p in params if p.meta and p.meta.dtype != "float32"), None)
    return f"has {other.param!r} in {other.meta.dtype}" if other and other.meta else ""


def _lowered(captured: Captured, precision: str) -> Graph:
    """A program in float32 throughout as it is captured with ``precision=``."""
    graph = without_dead(lower_precision(captured.graph, precision))
    return with_stable_names(without_dead(widen_gradients(graph)))


def planner_for(
    captured: Captured,
    constraints: Constraints,
    *,
    optimizer: str,
    goal: Goal,
    time_limit_s: float | None = None,
    profile: Path | None = None,
) -> Planner:
    """Who plans a captured program on any cluster, towards any goal.

    Args:
        captured: The program.
        constraints: What the user has fixed.
        optimizer: Kind whose state is priced; inference has none.
        goal: What is minimised.
        time_limit_s: Wall-clock guard of each search.
        profile: The file that prices come from; this machine's own, if there is one, if left out.
    """

    def question(cluster: Cluster, wish: Constraints, limit_bytes: int | None) -> Question:
        return question_for(
            captured,
            cluster,
            wish,
            optimizer=optimizer,
            limit_bytes=limit_bytes,
            time_limit_s=time_limit_s,
            profile=profile,
        )

    return Planner(
        graph=captured.graph,
        model_hash=captured.hash,
        constraints=constraints,
        optimizer=optimizer if captured.training else "none",
        prices=lambda cluster: prices_for(cluster, profile, captured.graph),
        search=lambda *asked: solve_question(question(*asked)),
        dress=lambda plan: dressed(plan, captured),
        goal=goal,
        progress=progress,
        time_limit_s=time_limit_s,
    )


def dressed(plan: Plan, captured: Captured) -> Plan:
    """A plan with the user's names and words, and what capturing took for granted."""
    noted = replace(
        plan,
        assumptions=(*plan.assumptions, *captured.assumptions),
        precision=captured.precision,
    )
    return with_words(noted, captured.graph)


def solve(
    captured: Captured,
    cluster: Cluster,
    constraints: Constraints,
    *,
    optimizer: str,
    goal: Goal,
    time_limit_s: float | None = None,
    profile: Path | None = None,
) -> tuple[Plan, SearchStats]:
    """The best plan of a captured program; arguments as in :func:`planner_for`.

    Raises:
        ConstraintError: The constraints contradict something; the smallest set is named.
        InfeasibleError: Nothing fits; the ways out are told, each tried.
    """
    planner = planner_for(
        captured, constraints, optimizer=optimizer, goal=goal, time_limit_s=time_limit_s,
        profile=profile,
    )  # fmt: skip
    if not planner.takes_pipelines(cluster):
        return planner.plan(cluster)
    question = question_for(
        captured,
        cluster,
        constraints,
        optimizer=optimizer,
        time_limit_s=time_limit_s,
        towards=goal,
        profile=profile,
    )
    return solve_question(question)


def solve_question(question: Question) -> tuple[Plan, SearchStats]:
    """The plan; where there is none, an error with the ways out.

    Raises:
        ConstraintError: The constraints contradict something; the smallest set is named.
        InfeasibleError: Nothing fits.
    """
    return solve_or_explain(Asker(question, progress=progress), progress=progress)


def _kind(device: Device) -> str:
    """Its name, whatever its speed."""
    return device.name.partition("@")[0]


@dataclass(slots=True)
class Questions:
    """Answers about one plan of a captured model (what a compiled module asks).

    Attributes:
        captured: The program.
        cluster: Where the plan runs.
        plan: The plan.
        time_limit_s: Wall-clock guard of each search.
        limit_bytes: Memory of a device that the user allowed, if less or more than usual; it holds
            on changed clusters too.
        profile: The file that prices come from, if the user named one.
    """

    captured: Captured
    cluster: Cluster
    plan: Plan
    time_limit_s: float | None = None
    limit_bytes: int | None = None
    profile: Path | None = None
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
                limit_bytes=None if self.plan.pipelines else self.plan.memory_limit_bytes or None,
                time_limit_s=self.time_limit_s,
                towards=goal(self.plan.objective, self.plan.cost_limit),
                profile=self.profile,
            )
            self._asker = Asker(question, progress=progress)
        self._asker.refresh()
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
                profile=self.profile,
            )
        return self._planner

    def replan(
        self,
        devices: int | str | os.PathLike[str] | Cluster | None,
        lost: tuple[int, ...],
        slower: Mapping[int, float],
        *,
        thorough: bool,
        checkpoint_bytes_per_s: float | None = None,
    ) -> Replan:
        """The plan for a changed cluster, and what going there takes."""
        after = None if devices is None else self._as_ours(devices)
        change = change_of(self.cluster, after, lost=lost, slower=slower)
        planner = self.planner
        if planner.analysis is None and self._asker is not None and not self.plan.pipelines:
            planner.analysis = self._asker.analysis()  # what earlier answers have worked out
        return replan(
            planner,
            self.plan,
            change,
            thorough=thorough,
            checkpoint_bytes_per_s=checkpoint_bytes_per_s,
        )

    def _as_ours(self, devices: int | str | os.PathLike[str] | Cluster) -> Cluster:
        """A new cluster with what the user said about the old one: memory limit and prices."""
        named = devices if isinstance(devices, int | str | Cluster) else Path(devices)
        cluster = parse_devices(named, local=local_machine(self.profile))
        prices = {
            _kind(machine.device): machine.device.cost_per_hour for machine in self.cluster.machines
        }
        return replace(
            cluster,
            machines=tuple(
                replace(machine, device=self._told(machine.device, prices))
                for machine in cluster.machines
            ),
        )

    def _told(self, device: Device, prices: Mapping[str, float | None]) -> Device:
        if device.cost_per_hour is None:
            device = replace(device, cost_per_hour=prices.get(_kind(device)))
        limit = self.limit_bytes
        if limit is None or limit > device.memory_bytes:
            return device
        return replace(device, memory_bytes=limit, reserved_bytes=0)

    def explain(self, pattern: str | None) -> PlanExplanation | ParamExplanation:
        """What binds and who lost, or how the parameters that match a pattern are split."""
        if pattern is None:
            return explain_with_model(self.asker, self.plan)
        return explain_parameters_with_model(self.asker, self.plan, pattern)

    def why_not(self, constraints: Mapping[str, object]) -> WhyNot:
        """What a constraint, or another ``precision``, would do to the plan.

        Raises:
            ConfigError: Nothing is asked for, there is no such option, or the program can't be had
                in that precision.
        """
        given = dict(constraints)
        precision = given.pop("precision", None)
        wished = user_constraints(cast("ConstraintOptions", given)).for_solver()
        if precision is None:
            return why_not(self.asker, self.plan, wished)
        return why_not(self.asker, self.plan, wished, program=self._in_precision(precision))

    def _in_precision(self, precision: object) -> OtherProgram:
        """The same model computed in another precision."""
        word = check_precision(str(precision))
        fault = _fault_of_precision(self.captured)
        if fault:
            raise ConfigError(
                f"why not precision={word!r}: the model {fault}, and only a program in float32 "
                "throughout can be put in another precision; plan it with "
                f"autopar.compile(..., precision={word!r}) and compare with plan.diff()"
            )
        return OtherProgram(
            graph=_lowered(self.captured, word),
            words=f"precision={word!r}",
            note=f"the numbers change: {word} is computed in, parameters and state stay in float32",
            precision=word,
        )
