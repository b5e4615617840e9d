"""What a plan says about itself, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ConfigError
from autopar.plan.answers import ShadowPrice
from autopar.plan.explain import fullest_rank
from autopar.plan.pipelines import PipelinePlan, PipelineStage
from autopar.plan.time_terms import plan_terms, term_changes, time_terms
from autopar.plan.types import (
    AppliedConstraint,
    Candidate,
    MeshShape,
    ScheduleKind,
    TimeParts,
    TimeTerms,
)
from autopar.report.text import render_plan
from autopar.units import GIB, MIB


def test_terms_are_those_of_the_busiest_rank_and_add_up_to_the_step():
    slow = TimeParts(forward_s=2.0, backward_s=4.0, forward_comm_s=0.5, reduce_s=0.25)
    quick = TimeParts(forward_s=1.0, backward_s=1.0, optimizer_s=0.125)
    terms = time_terms([quick, slow], MeshShape(pp=2), 3, 30.0)
    assert terms.compute_s == 3 * 5.5
    assert terms.collectives_s == 3 * 0.5
    assert terms.once_s == 0.25
    assert terms.total_s == pytest.approx(30.0)


def test_stages_dealt_round_robin_are_summed_by_rank():
    one = TimeParts(forward_s=1.0, backward_s=1.0)
    terms = time_terms([one] * 4, MeshShape(pp=2, virtual=2), 1, 5.0)
    assert (terms.compute_s, terms.waiting_s) == (4.0, 1.0)


def test_a_term_that_hardly_changed_is_left_out():
    before, after = TimeTerms(compute_s=1.0, once_s=1.0), TimeTerms(compute_s=1.0001, once_s=2.0)
    assert term_changes(before, after) == {"once_s": 1.0}


def test_what_binds_names_stage_numbers_and_share(example_plan):
    told = example_plan.explain()
    memory, time = told.binding[:2]
    assert memory.kind == "memory"
    assert memory.share == pytest.approx(3 / 80)
    assert memory.text.startswith("memory of stage 0 (ranks 0-3): 3.00 GiB of 80.00 GiB (3.8 %)")
    assert "activations 2.00 GiB, optimizer state 512.00 MiB" in memory.text
    assert "operators are recomputed in 1 of 2 stages" in memory.text
    assert time.kind == "time"
    assert told.terms == plan_terms(example_plan)
    links = {item.where: item.text for item in told.binding if item.kind == "link"}
    assert links["tp"].startswith("collectives over tp: 333 us of a step (1.7 %)")


def test_the_link_is_named_where_the_plan_keeps_it(example_plan):
    plan = replace(example_plan, links={"tp": "nvlink inside a machine, 382 GB/s per device"})
    texts = [item.text for item in plan.explain().binding if item.where == "tp"]
    assert texts[0].endswith("over nvlink inside a machine, 382 GB/s per device")


def test_stages_of_one_rank_share_its_memory(example_plan):
    stages = tuple(replace(s, devices=tuple(range(4))) for s in example_plan.stages)
    plan = replace(example_plan, mesh=MeshShape(virtual=2, dp=2, tp=2), stages=stages)
    rank, memory = fullest_rank(plan)
    assert rank == 0
    assert memory.activations_bytes == 3 * GIB
    assert memory.transient_bytes == 128 * MIB, "only one stage computes at a time"
    assert plan.explain().binding[0].text.startswith("memory of stages 0 and 1 (ranks 0-3)")


def _lost(**changed) -> Candidate:
    base = Candidate(
        mesh=MeshShape(dp=8), num_microbatches=2, schedule=ScheduleKind.ONE_F_ONE_B, zero_level=1,
        recompute="none", time_s=0.025, peak_bytes=GIB, reason="simulated: 25 ms against 20 ms",
    )  # fmt: skip
    return replace(base, **changed)


def test_a_runner_up_is_told_term_by_term(example_plan):
    own = plan_terms(example_plan)
    worse = replace(own, once_s=own.once_s + 0.006, waiting_s=own.waiting_s - 0.001)
    plan = replace(example_plan, runners_up=(_lost(terms=worse),))
    (loss,) = plan.explain().losses
    assert loss.measure == "simulated"
    assert loss.changes == pytest.approx({"once_s": 0.006, "waiting_s": -0.001})
    assert str(loss) == (
        "dp8, 2 micro-batches, 1f1b, ZeRO 1: simulated 25 ms, +25.0 %: once per step (gradients, "
        "parameters, sums, optimizer) +6 ms, waiting (bubbles, messages) -1 ms"
    )


def test_a_runner_up_that_does_not_fit_keeps_both_numbers(example_plan):
    reason = "needs 90.00 GiB, the limit is 80.00 GiB"
    plan = replace(example_plan, runners_up=(_lost(time_s=0.0, reason=reason),))
    (loss,) = plan.explain().losses
    assert (loss.measure, loss.reason, loss.changes) == ("memory", reason, {})


def test_what_a_plan_alone_can_not_tell_is_said_with_the_remedy(example_plan):
    told = example_plan.explain()
    assert told.prices == ()
    assert any("model.explain()" in text and "autopar explain" in text for text in told.missing)
    old = replace(example_plan, runners_up=(_lost(),))
    assert any("plan again" in text for text in old.explain().missing)
    bare = replace(example_plan, time_s=0.0)
    assert any("no predicted times" in text for text in bare.explain().missing)
    assert bare.explain().terms is None


def test_why_not_of_a_plan_alone_says_whom_to_ask(example_plan):
    with pytest.raises(ConfigError, match=r"why not tp=8 needs the model: .*model\.why_not\(tp=8"):
        example_plan.why_not(tp=8)


def test_a_pattern_tells_splits_and_who_decided(example_plan):
    words = {
        "h.0.up": "column-parallel over tp",
        "h.1.up": "column-parallel over tp",
        "ln": "whole",
    }
    pinned = AppliedConstraint(name="placements", value="h.*.up: S(0)", origin="user")
    plan = replace(example_plan, param_words=words, constraints=(pinned,))
    told = plan.explain("h.*.up")
    assert told.parameters == ("h.0.up", "h.1.up")
    assert told.splits == ("column-parallel over tp",)
    assert told.decided_by == "the user's placements: h.*.up: S(0)"
    assert plan.explain("l*").decided_by == "the solver"
    assert plan.explain("*").splits == ("2 of 3: column-parallel over tp", "1 of 3: whole")
    with pytest.raises(ConfigError, match=r"'x\.\*' matches no parameter .* 'h\.0\.up'"):
        plan.explain("x.*")


def test_a_price_of_nothing_says_so():
    same = ShadowPrice(what="more", method="re-solved", before_s=1.0, after_s=1.0)
    assert str(same) == "more: nothing gained (re-solved)"
    less = replace(same, after_s=0.9, change="with other stage cuts")
    assert str(less) == "more: 100 ms less per step, 10.00 % (re-solved, with other stage cuts)"


def test_text_has_every_section_once(example_plan):
    lines = str(example_plan.explain()).splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == [
        "What binds",
        "Where the time of a step goes",
        "Runners-up, and why they lost",
        "Not told",
    ]


def test_runners_up_are_compared_by_the_measure_that_they_have(example_plan):
    estimated = Candidate(
        mesh=MeshShape(dp=8),
        num_microbatches=1,
        schedule=ScheduleKind.GPIPE,
        zero_level=0,
        recompute="none",
        time_s=0.05,
        peak_bytes=GIB,
        reason="estimated: 50 ms against 12 ms",
    )
    # the search thought that its own plan would take 40 ms; simulated it takes much less
    plan = replace(example_plan, time_s=0.012, objective_s=0.04, runners_up=(estimated,))
    (loss,) = plan.explain().losses
    assert loss.reason == "estimated 50 ms, +25.0 % against the estimate of this plan, 40 ms"
    assert "25.0 % slower" in render_plan(plan)


def test_a_runner_up_of_pipelines_is_named_by_its_pipelines(example_plan):
    stage = PipelineStage(device="l4", devices=(0,), dp=1, tp=1, layers=(0, 2), first="a")
    pipeline = PipelinePlan(num_microbatches=4, microbatch_samples=2, stages=(stage,), time_s=2.0)
    lost = Candidate(
        mesh=MeshShape(),
        num_microbatches=4,
        schedule=ScheduleKind.ONE_F_ONE_B,
        zero_level=0,
        recompute="",
        time_s=3.0,
        peak_bytes=GIB,
        reason="4 x 2 samples: 1 l4 > 1 l4; simulated: 3 s against 2 s, 5 against 4 per step",
    )
    plan = replace(
        example_plan, mesh=MeshShape(), stages=(), splits={}, pipelines=(pipeline,), time_s=2.0,
        runners_up=(lost,),
    )  # fmt: skip
    (loss,) = plan.explain().losses
    assert loss.measure == "simulated"
    assert str(loss) == ("4 x 2 samples: 1 l4 > 1 l4: simulated 3 s, +50.0 %, 5 against 4 per step")


def test_a_limit_that_is_far_away_is_told_as_such(example_plan):
    texts = [b.text for b in example_plan.explain().binding if b.kind == "memory"]
    assert "at the peak, far from the limit; most of it" in texts[0]
    tight = replace(example_plan, memory_limit_bytes=2 * example_plan.peak_bytes)
    assert "(50.0 %) at the peak; most of it" in tight.explain().binding[0].text


def test_a_plan_alone_cannot_plan_again(example_plan):
    with pytest.raises(
        ConfigError, match=r"planning again needs the model: .*model.replan\('4:l4'"
    ):
        example_plan.replan("4:l4")
