"""What differs between two plans."""

from __future__ import annotations

from dataclasses import replace

from autopar.plan.explain import plan_name
from autopar.plan.io import plan_from_json, plan_to_json
from autopar.plan.pipelines import SHARED_DIM, PipelinePlan, PipelineStage
from autopar.plan.types import AppliedConstraint, MeshShape, ScheduleKind
from autopar.report.text import render_plan
from autopar.units import GIB


def rows(changes) -> dict[str, tuple[str, str]]:
    return {change.what: (change.before, change.after) for change in changes}


def test_equal_plans_differ_in_nothing(example_plan):
    diff = example_plan.diff(plan_from_json(plan_to_json(example_plan)))
    assert diff.is_empty
    assert str(diff).startswith("The plans are the same")


def test_shape_schedule_and_constraints(example_plan):
    pinned = AppliedConstraint(name="dp", value="8", origin="user")
    other = replace(
        example_plan, mesh=MeshShape(dp=8), num_microbatches=1, schedule=ScheduleKind.GPIPE,
        stages=example_plan.stages[:1], constraints=(pinned,),
    )  # fmt: skip
    diff = example_plan.diff(other)
    found = rows(diff.shape)
    assert found["mesh"] == ("pp2 x dp2 x tp2", "dp8")
    assert found["micro-batches"] == ("4", "1")
    assert found["schedule"] == ("1f1b", "gpipe")
    assert found["constraints of the user"] == ("none", "dp=8")
    assert "devices" not in found
    assert rows(diff.stages)["number of stages"] == ("2", "1")
    assert rows(diff.stages)["operators recomputed"] == ("3", "0")


def test_stages_are_compared_one_by_one(example_plan):
    first, second = example_plan.stages
    moved = replace(second, first="add_9", scopes=("transformer.h.4",), recompute=(), zero_level=2)
    diff = example_plan.diff(replace(example_plan, stages=(first, moved)))
    assert rows(diff.stages) == {
        "ZeRO level": ("1", "1 in stage 0, 2 in stage 1"),
        "stage 1 begins with": ("transformer.h.3 (add_1)", "transformer.h.4 (add_9)"),
        "stage 1 recomputes": ("3 operators", "0 operators"),
    }


def test_layers_that_change_alike_are_one_row(example_plan):
    before = {f"h.{i}.up.weight": "replicated" for i in range(4)} | {"ln.weight": "replicated"}
    after = dict.fromkeys(before, "column-parallel over tp") | {"ln.weight": "replicated"}
    diff = replace(example_plan, param_words=before).diff(replace(example_plan, param_words=after))
    assert rows(diff.splits) == {
        "h.*.up.weight (4)": ("replicated", "column-parallel over tp"),
    }


def test_operators_of_other_models_are_not_compared(example_plan):
    other = replace(example_plan, model_hash="other", splits={})
    diff = example_plan.diff(other)
    assert diff.splits == ()
    assert "different models" in diff.notes[0]


def test_memory_and_time_by_part(example_plan):
    first, second = example_plan.stages
    fuller = replace(first, memory=replace(first.memory, activations_bytes=4 * GIB))
    slower = replace(fuller, time=replace(first.time, forward_s=2e-3))
    other = replace(example_plan, stages=(slower, second), time_s=0.024, peak_bytes=5 * GIB)
    diff = example_plan.diff(other)
    memory = rows(diff.memory)
    assert memory["peak of the worst device"] == ("3.00 GiB", "5.00 GiB")
    assert memory["activations of the fullest device"] == ("2.00 GiB", "4.00 GiB")
    assert "the fullest device" not in memory  # it is the same one
    assert rows(diff.time)["step (+20.00 %)"] == ("20 ms", "24 ms")
    assert diff.terms["compute_s"] > 0
    assert diff.time_s == (0.02, 0.024)


def pipelined(plan, *texts: str, assumptions: tuple[str, ...] = ()):
    """The plan with a pipeline for each text: how its only stage splits the operator ``mm``."""
    pipelines = tuple(
        PipelinePlan(
            num_microbatches=2,
            microbatch_samples=4,
            stages=(
                PipelineStage(
                    device="l4", devices=(at,), dp=1, tp=1, layers=(0, 1), first="mm",
                    splits={"mm": text} if text else {},
                ),
            ),
        )
        for at, text in enumerate(texts)
    )  # fmt: skip
    return replace(
        plan, pipelines=pipelines, stages=(), splits={}, mesh=MeshShape(), assumptions=assumptions
    )


def test_a_mesh_and_unequal_pipelines_are_compared_in_what_both_keep(example_plan):
    other = pipelined(example_plan, "S(0) R -> S(0) | m")
    for diff in (example_plan.diff(other), other.diff(example_plan)):
        assert diff.splits == ()
        assert "splits, memory by part and time by term are kept differently" in diff.notes[0]
        assert set(rows(diff.shape)) >= {"mesh"}
        assert not diff.is_empty


def test_splits_of_unequal_pipelines_are_compared_operator_by_operator(example_plan):
    whole, rows_split = pipelined(example_plan, ""), pipelined(example_plan, "S(0) R -> S(0) | m")
    assert whole.diff(whole).is_empty
    assert rows(whole.diff(rows_split).splits) == {
        "operators and inputs over tp (1 differ)": ("0 split", "1 split")
    }
    # the same operator in two pipelines counts once, and not at all if nothing changed
    twice = pipelined(example_plan, "S(0) R -> S(0) | m", "S(0) R -> S(0) | m")
    assert twice.diff(rows_split).splits == ()


def test_pipelines_that_share_positions_do_not_count_samples(example_plan):
    plan = pipelined(example_plan, "")
    assert "2 x 4 samples: " in plan_name(plan)
    note = SHARED_DIM + "dim 1 of 'ids', which stands for the batch of 1"
    alone = pipelined(example_plan, "", assumptions=(note,))
    assert "2 x 4 positions: " in plan_name(alone)
    assert "2 x 4 positions: " in str(alone.diff(pipelined(example_plan, "", "")))
    text = render_plan(alone, width=100)
    assert "of positions" in text
    assert "samples" not in text
