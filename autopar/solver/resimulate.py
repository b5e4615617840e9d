"""A plan priced again: the same programs under other prices."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.sharding.build import localize
from autopar.sharding.programs import LocalPrograms
from autopar.solver.analysis import Analysis, optimizer_s_per_byte
from autopar.solver.exact import ExactFigures, Setting, exact_figures
from cost_models.base import CostModel


@dataclass(frozen=True, slots=True)
class Resimulator:
    """The programs of one plan, to be priced any number of times.

    Attributes:
        plan: The plan.
        analysis: Of the model that it was made for.
        programs: What its ranks run.
    """

    plan: Plan
    analysis: Analysis
    programs: LocalPrograms

    @classmethod
    def of(cls, plan: Plan, analysis: Analysis) -> Resimulator:
        """Write a plan out as programs.

        Raises:
            PlanError: The plan is of another model.
        """
        analysis = analysis.at_work(plan.mesh.num_ranks)
        decisions = decisions_of(plan, analysis.graph, gather_outputs=analysis.gathered)
        return cls(plan, analysis, localize(analysis.graph, decisions, analysis.signatures))

    def setting(self, cluster: Cluster, model: CostModel, optimizer_s_per_byte: float) -> Setting:
        """What surrounds the programs under given prices."""
        plan = self.plan
        return Setting(
            cluster=cluster,
            model=model,
            mesh=plan.mesh,
            schedule=plan.schedule,
            num_microbatches=plan.num_microbatches,
            zero_levels=tuple(stage.zero_level for stage in plan.stages),
            optimizer=plan.optimizer,
            optimizer_s_per_byte=optimizer_s_per_byte,
            warmup=plan.warmup or None,
            offloads=bool(plan.offload),
        )

    def figures(self, cluster: Cluster, model: CostModel) -> ExactFigures:
        """Seconds and bytes of the plan under other prices."""
        own = self.analysis
        per_byte = optimizer_s_per_byte(model, own.optimizer)
        return exact_figures(self.programs, self.setting(cluster, model, per_byte))
