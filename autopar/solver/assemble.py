"""From the outcome of a search to a :class:`~autopar.plan.types.Plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autopar.plan.decisions import splits_text
from autopar.plan.time_terms import HOST_NOTE
from autopar.plan.types import AppliedConstraint, Candidate, Plan, StagePlan, TimeTerms
from autopar.sharding.decisions import Decisions
from autopar.solver.analysis import Analysis
from autopar.solver.constraints import applied_constraints
from autopar.solver.exact import ExactFigures
from autopar.solver.given import constraint_words
from autopar.solver.host_room import HostShortage
from autopar.solver.ranked import Misfit, Ranked
from autopar.solver.row_budgets import row_budgets
from autopar.solver.stages_problem import bounds
from autopar.solver.terms import estimated_terms, simulated_terms
from autopar.units import format_bytes, format_time
from cost_models.base import link_words

MAX_RUNNERS_UP = 12
MAX_SCOPES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A shape that was localized and simulated.

    Attributes:
        ranked: Shape, splits, cuts.
        decisions: The same for localize.
        figures: Exact seconds and bytes.
        fits: Whether its peak is within the limit, and the hosts have room.
        host: The host that lacks memory, if one does.
    """

    ranked: Ranked
    decisions: Decisions
    figures: ExactFigures
    fits: bool
    host: HostShortage | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.figures.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """All that was considered.

    Attributes:
        outcomes: What was simulated, the winner included.
        ranked: What was estimated, best first.
        misfits: What does not fit.
        limit_bytes: Memory of a device.
        bound_s: Lower bound over the declared space.
        model_gap: What the bound of the surrogate leaves open, as a share of the best surrogate.
        stopped_by: ``""``, ``"work"`` or ``"time"``.
    """

    outcomes: Sequence[Outcome]
    ranked: Sequence[Ranked]
    misfits: Sequence[Misfit]
    limit_bytes: int
    bound_s: float
    stopped_by: str
    model_gap: float = 0.0


def assemble_plan(analysis: Analysis, winner: Outcome, field: Field, *, model_hash: str) -> Plan:
    """The plan of a winner, with those that lost and why."""
    shape = winner.ranked.shape
    used = shape.mesh.num_ranks
    total = analysis.cluster.num_devices
    defaults = {
        "tp inside a machine": ("True", "tensor-parallel groups do not cross machines"),
        "tp splits no batch": (
            "True",
            "the batch is split by dp and by micro-batches only"
            if not analysis.batch_stand_in
            else f"dp and micro-batches alone split {analysis.batch_stand_in}",
        ),
    }
    if analysis.constraints.tp is not None:
        del defaults["tp inside a machine"]
    assumptions = [
        *analysis.cluster.assumptions,
        *([f"optimizer {analysis.optimizer}"] if analysis.trains else []),
        "collectives are not overlapped with computing",
    ]
    if analysis.trains and not analysis.has_loss:
        assumptions.append(
            "the model gives no loss of its own: all forwards run before the first backward "
            "(GPipe); loss= of autopar.compile() would allow 1F1B"
        )
    assumptions += row_budgets(analysis.graph, winner.decisions)
    if winner.figures.host_s > 0:
        assumptions.append(
            f"{format_time(winner.figures.host_s)} of a step lie outside of its programs, as "
            f"measured: calls, ranks that share cores, waiting for slower ones; {HOST_NOTE}"
        )
    if used < total:
        why = _idle_words(analysis, is_cut_short=bool(field.stopped_by))
        assumptions.append(f"{total - used} of {total} devices stay idle: {why}")
    if field.stopped_by:
        assumptions.append(f"the search was stopped by its limit of {field.stopped_by}")
    return Plan(
        model_hash=model_hash,
        cluster=str(analysis.cluster),
        num_devices=total,
        mesh=shape.mesh,
        num_microbatches=shape.num_microbatches,
        schedule=shape.schedule,
        warmup=shape.warmup,
        rank_bytes=winner.figures.rank_bytes if shape.mesh.virtual > 1 else (),
        stages=_stages(analysis, winner),
        splits=splits_text(winner.decisions.choices),
        microbatch_statistics=analysis.constraints.microbatch_statistics,
        time_s=winner.figures.step_s,
        objective_s=winner.ranked.estimate_s,
        bound_s=min(field.bound_s, winner.figures.step_s),
        model_gap=field.model_gap,
        peak_bytes=winner.figures.peak_bytes,
        peak_at=winner.figures.peak_at,
        memory_limit_bytes=field.limit_bytes,
        optimizer=analysis.optimizer,
        offload="optimizer" if analysis.offloads else "",
        offload_window_bytes=winner.decisions.offload_window_bytes,
        constraints=_constraints(analysis, defaults),
        runners_up=_runners_up(winner, field),
        unruled=_unruled(analysis),
        assumptions=tuple(assumptions),
        provenance={"prices": analysis.model.source, "splits": winner.ranked.splits.status},
        links=link_words(analysis.cluster, shape.mesh),
    )


def _idle_words(analysis: Analysis, *, is_cut_short: bool) -> str:
    """Why some devices have nothing to do."""
    wish = analysis.constraints
    given = {n: getattr(wish, n) for n in ("dp", "tp", "pp") if getattr(wish, n) is not None}
    if given:
        return f"no faster plan was found with {constraint_words(given)}"
    return "no faster plan was found" if is_cut_short else "using them is slower"


def _stages(analysis: Analysis, winner: Outcome) -> tuple[StagePlan, ...]:
    ranked, mesh = winner.ranked, winner.ranked.shape.mesh
    chain, words = analysis.chain, winner.ranked.recompute_words
    per_rank = mesh.dp * mesh.tp
    plans = []
    runs = bounds(ranked.stages.starts, len(chain.blocks))
    levels = ranked.zero_levels
    for index, ((low, high), figures) in enumerate(zip(runs, winner.figures.stages, strict=True)):
        first_rank = mesh.pipeline_rank(index) * per_rank
        recompute = tuple(
            name for i in range(low, high) for name in ranked.table.recompute[i][words[i]]
        )
        offload = tuple(
            name for i in range(low, high) for name in ranked.table.offload[i][words[i]]
        )
        plans.append(
            StagePlan(
                index=index,
                devices=tuple(range(first_rank, first_rank + per_rank)),
                first=chain.first(low),
                scopes=_scopes([chain.blocks[i].scope for i in range(low, high)]),
                recompute=recompute,
                zero_level=levels[index],
                parameters=figures.parameters,
                num_in_flight=figures.num_in_flight,
                memory=figures.memory,
                time=figures.time,
                collectives=figures.collectives,
                offload=offload,
                offload_bytes=figures.host_bytes,
            )
        )
    return tuple(plans)


def _scopes(scopes: Sequence[str]) -> tuple[str, ...]:
    """Module paths of a stage, repeats left out."""
    return tuple(dict.fromkeys(s for s in scopes if s))


def _constraints(
    analysis: Analysis, defaults: dict[str, tuple[str, str]]
) -> tuple[AppliedConstraint, ...]:
    """Constraints in force; patterns say what they matched."""
    found = []
    for item in applied_constraints(analysis.constraints, defaults):
        if item.name == "dp" and analysis.batch_stand_in:
            item = replace(item, effect=f"ranks that split {analysis.batch_stand_in}")
        if item.name == "placements":
            pattern = item.value.rpartition(": ")[0]
            inputs = analysis.graph.input_map()
            names = list(
                dict.fromkeys(
                    inputs[n].param
                    for n in (*analysis.fixed, *analysis.experts)
                    if any(fnmatchcase(t, pattern) for t in (inputs[n].param, *inputs[n].aliases))
                )
            )
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            item = replace(item, effect=f"{len(names)} parameter{'s' * (len(names) != 1)}: {shown}")
        found.append(item)
    return tuple(found)


def reason_text(time_s: float, best_s: float) -> str:
    """Why a slower plan lost."""
    return f"{format_time(time_s)} against {format_time(best_s)}"


def _recompute_text(ranked: Ranked) -> str:
    words = [w for w in ranked.recompute_words if w != "none"]
    if not words:
        return "none"
    kinds = sorted(set(words))
    return ", ".join(f"{kind} in {words.count(kind)} blocks" for kind in kinds)


def _candidate(
    ranked: Ranked, time_s: float, peak_bytes: int, reason: str, terms: TimeTerms
) -> Candidate:
    shape = ranked.shape
    return Candidate(
        mesh=shape.mesh,
        num_microbatches=shape.num_microbatches,
        schedule=shape.schedule,
        zero_level=max(ranked.zero_levels),
        zero_levels=ranked.levels if len(set(ranked.levels)) > 1 else (),
        recompute=_recompute_text(ranked),
        time_s=time_s,
        peak_bytes=peak_bytes,
        reason=reason,
        warmup=shape.warmup,
        terms=terms,
    )


def _runners_up(winner: Outcome, field: Field) -> tuple[Candidate, ...]:
    """Those that lost: simulated ones first, then the best of each mesh, then what did not fit."""
    best_s = winner.figures.step_s
    found: list[Candidate] = []
    seen = {winner.ranked.shape}
    for outcome in sorted(field.outcomes, key=lambda o: o.figures.step_s):
        if outcome is winner:
            continue
        seen.add(outcome.ranked.shape)
        peak = outcome.figures.peak_bytes
        if outcome.fits:
            reason = "simulated: " + reason_text(outcome.figures.step_s, best_s)
        elif outcome.host is not None:
            reason = str(outcome.host)
        else:
            reason = f"needs {format_bytes(peak)}, the limit is {format_bytes(field.limit_bytes)}"
        shape = outcome.ranked.shape
        terms = simulated_terms(outcome.figures, shape.mesh, shape.num_microbatches)
        found.append(_candidate(outcome.ranked, outcome.figures.step_s, peak, reason, terms))
    meshes = {shape.mesh for shape in seen}
    for item in field.ranked:
        if item.shape in seen or item.shape.mesh in meshes:
            continue
        meshes.add(item.shape.mesh)
        reason = "estimated: " + reason_text(item.estimate_s, best_s)
        peak = max(item.stages.memory_bytes)
        terms = estimated_terms(item)
        found.append(_candidate(item, item.estimate_s, peak, reason, terms))
    for misfit in field.misfits:
        if misfit.shape.mesh in meshes:
            continue
        if len(found) == MAX_RUNNERS_UP:
            break
        meshes.add(misfit.shape.mesh)
        needed = misfit.needed_bytes()
        found.append(
            Candidate(
                mesh=misfit.shape.mesh,
                num_microbatches=misfit.shape.num_microbatches,
                schedule=misfit.shape.schedule,
                warmup=misfit.shape.warmup,
                zero_level=misfit.zero_level,
                recompute="full",
                time_s=0.0,
                peak_bytes=needed,
                reason=f"needs {format_bytes(needed)}, "
                f"the limit is {format_bytes(field.limit_bytes)}",
            )
        )
    return tuple(found[:MAX_RUNNERS_UP])


def _unruled(analysis: Analysis) -> tuple[str, ...]:
    """Operators without a rule, each once per source line."""
    return tuple(
        dict.fromkeys(
            f"{n.op} at {n.source or n.name}"
            for n in analysis.graph.nodes
            if n.op != "getitem" and analysis.signatures.get(n.name) is None
        )
    )
