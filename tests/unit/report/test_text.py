"""The report as text: golden, and what it says about missing numbers."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from autopar.plan.types import Candidate, CollectiveTotal, MeshShape, Plan, ScheduleKind
from autopar.report.text import gap_fraction, mesh_words, print_plan, render_plan

AMOUNT = re.compile(r"\d[\d,.]* (?:B|KiB|MiB|GiB|ms|us|ns|s|%)(?!\w)")
GOLDEN = """\
Plan
  mesh       pp2 x dp2 x tp2: a pipeline of 2 stages x the batch over 2 x operators over 2
  schedule   1F1B, 4 micro-batches
  devices    8 of 9 (1x9:h100-sxm)
  idle       rank 8
  time       20 ms per step, predicted
  bound      no searched plan takes less than 18.5 ms: gap 7.5 %
  memory     3.00 GiB at the peak of the worst device, 3.8 % of the limit of 80.00 GiB, predicted
  optimizer  adamw, assumed

What binds
  - memory of stage 0 (ranks 0-3): 3.00 GiB of 80.00 GiB (3.8 %) at the peak, far from the limit;
    most of it activations 2.00 GiB, optimizer state 512.00 MiB, parameters 256.00 MiB; operators
    are recomputed in 1 of 2 stages
  - time of stage 0 (ranks 0-3): busy for 70.0 % of the step, computing for 42.0 %; it waits for
    30.0 %, other pipeline ranks for as much or more
  - collectives over tp: 333 us of a step (1.7 %)
  - messages between stages: 80 us of a step (0.4 %)

Stages
  stage  ranks  layers                                 parameters  ZeRO  in flight
  ────────────────────────────────────────────────────────────────────────────────
  0        0-3  transformer.wte, transformer.h.[0-2]   62,000,000     1          2
  1        4-7  transformer.h.[3-5], transformer.ln_f  62,000,000     1          1

Memory of a device, by stage
  stages     total  of limit   params    grads  optimizer  activations  transient  buffers
  ────────────────────────────────────────────────────────────────────────────────────────
  0       3.13 GiB     3.9 %  256 MiB  256 MiB    512 MiB     2.00 GiB    128 MiB   1000 B
  1       2.13 GiB     2.7 %  256 MiB  256 MiB    512 MiB     1.00 GiB    128 MiB   1000 B

Time by stage: one micro-batch, and once per step
  stages     F  F comm     B  B comm    p2p  reduce  unshard  optimizer
  ─────────────────────────────────────────────────────────────────────
  0-1     1 ms  300 us  2 ms  600 us  10 us    1 ms      0 s       1 ms
  F comm and B comm are the parts of F and B in collectives.

  Where the 20 ms of a step go:
  ranks  compute  collectives  per step  optimizer  waiting
  ─────────────────────────────────────────────────────────
    0-3   42.0 %       18.0 %     5.0 %      5.0 %   30.0 %
    4-7   42.0 %       18.0 %     5.0 %      5.0 %   30.0 %
  Per step: gradients reduced, parameters gathered, losses summed. Waiting: the rest, for other
  stages (bubbles), for messages that nothing hides.

Collectives of one device in one step
  axis  when     collective  calls   payload    time  what for
  ──────────────────────────────────────────────────────────────────
  tp    forward  all_reduce     24  3.00 MiB  333 us  completes sums

Splits
  x: dim 0 in 2 data ranks
  over data ranks (dp): 1 operator split, the others replicated
  over tp ranks: 2 operators split, the others replicated
  ZeRO-1: optimizer state is sharded over dp; gradients are whole until the end of the step

  split          tensors  parameters
  ──────────────────────────────────
  dim 1 over tp        1  w
  Parameters that are not listed are replicated over tp.

Schedule (a backward drawn twice as long as a forward)
  1F1B: one forward and one backward in turn
  waiting: 30.0 % of a step, the mean of the pipeline ranks
  rank 0  F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --
  rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. ..

Recomputed in backward
  stage 1: 3 operators: 2 x gelu, 1 x mul

Operators without a rule (replicated)
  - aten.foo.default at model.py:12

Constraints in force
  constraint    value   origin   effect
  ─────────────────────────────────────────────
  memory_limit  80 GiB  default  all the memory

Runners-up
  mesh             schedule  mb  ZeRO  recompute  estimate  simulated      peak  why not
  ───────────────────────────────────────────────────────────────────────────────────────────
  pp2 x dp2 x tp2  1f1b       4     1  see above     19 ms      20 ms  3.00 GiB  (this plan)
  dp8              gpipe      1     3  none              -          -  90.0 GiB  does not fit
  mb: micro-batches. Estimates rank the candidates; the best few are simulated from the programs
  that they would run, and that decides. Percentages are against this plan, by the measure that both
  have: of those not simulated against its estimate.

Assumptions
  - prices come from data sheets

Provenance
  prices  data sheet
  torch   2.13.0
"""


def test_the_moment_of_the_peak_is_told_if_the_plan_has_it(example_plan):
    where = "stage 0, backward of micro-batch 3, at aten.mm of layers.5"
    assert f"peak       {where}\n" in render_plan(replace(example_plan, peak_at=where))
    assert "peak       " not in render_plan(example_plan)


def test_what_the_bound_leaves_open_among_the_estimates_is_told(example_plan):
    text = " ".join(render_plan(replace(example_plan, model_gap=0.004), width=100).split())
    assert "gap 7.5 % (0.4 % among the solver's own estimates)" in text


def test_report_golden(example_plan):
    assert render_plan(example_plan, width=100) == GOLDEN


def large_plan(plan: Plan) -> Plan:
    """Eight stages that all differ, long names, candidates of every kind."""
    stages = tuple(
        replace(
            plan.stages[index % 2],
            index=index,
            devices=tuple(range(1000 * index, 1000 * index + 512)),
            scopes=tuple(f"model.decoder.very_long_name_of_layers.{k}.block" for k in range(3)),
            parameters=123_456_789_012 + index,
            time=replace(plan.stages[0].time, forward_s=1.234e-3 * (index + 1)),
            collectives=tuple(
                CollectiveTotal(
                    kind=kind, axis=axis, where=where, count=1000 + index,
                    payload_bytes=(index + 1) * 12_345_678, time_s=1.23e-3 * (index + 1),
                )
                for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
                for axis in ("dp", "tp")
                for where in ("forward", "backward", "once per step")
            ),
        )
        for index in range(8)
    )  # fmt: skip
    reasons = ("simulated: slow", "estimated: slow", "needs 99.99 GiB, the limit is 80.00 GiB")
    candidates = tuple(
        Candidate(
            mesh=MeshShape(pp=16, dp=32, tp=8, virtual=4), num_microbatches=512,
            schedule=ScheduleKind.INTERLEAVED, zero_level=3, time_s=0.0256,
            recompute="full in 12 blocks, selective in 34 blocks", peak_bytes=2**36 + 12345,
            reason=reason,
        )
        for reason in reasons
    )  # fmt: skip
    names = [f"p_model_layers_{k}_mlp_experts_{k}_gate_proj_weight" for k in range(9)]
    return replace(
        plan,
        mesh=MeshShape(pp=4, virtual=2, dp=2, tp=2),
        schedule=ScheduleKind.INTERLEAVED,
        stages=stages,
        splits={**plan.splits, "tp": dict.fromkeys(names, "S(1)")},
        runners_up=candidates,
        assumptions=("words " * 40 + "x" * 150,),
        unruled=(f"aten.foo.default at {'a/' * 80}model.py:12",),
    )


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_longer_than_the_width_and_no_number_is_cut(example_plan, width):
    for plan in (example_plan, large_plan(example_plan)):
        text = render_plan(plan, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert all(line == line.rstrip() for line in text.splitlines())
        wide = set(AMOUNT.findall(render_plan(plan, width=400)))
        assert wide <= set(AMOUNT.findall(text))


def test_without_a_width_it_is_that_of_the_terminal_or_100(example_plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    assert render_plan(example_plan) == render_plan(example_plan, width=72)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.__stdout__", None)
    assert render_plan(example_plan) == render_plan(example_plan, width=100)


def test_a_width_below_the_least_is_taken_as_60(example_plan):
    assert render_plan(example_plan, width=20) == render_plan(example_plan, width=60)


def test_titles_are_bold_on_a_terminal_alone(example_plan):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, terminal = io.StringIO(), Terminal()
    print_plan(example_plan, width=100, file=plain)
    print_plan(example_plan, width=100, file=terminal)
    assert plain.getvalue() == GOLDEN
    assert "\033[1mStages\033[0m\n" in terminal.getvalue()
    assert re.sub(r"\033\[\d+m", "", terminal.getvalue()) == GOLDEN


def test_arguments_are_told_with_their_dim_and_parts(example_plan):
    splits = {"mb": {"u_ids": "S(0)", "u_labels": "S(0)"}, "dp": {"u_ids": "S(0)"}}
    text = render_plan(replace(example_plan, splits=splits), width=100)
    assert "  ids: dim 0 in 4 micro-batches x 2 data ranks\n" in text
    assert "  labels: dim 0 in 4 micro-batches\n" in text


@pytest.mark.parametrize(
    ("reason", "time_s", "cells"),
    [
        ("simulated: slow", 0.025, r"none +- +25 ms +90.0 GiB +25.0 % slower"),
        ("estimated: slow", 0.021, r"none +21 ms +- +90.0 GiB +10.5 % slower"),
        ("estimated: slow", 0.019, r"none +19 ms +- +90.0 GiB +not simulated: others were"),
        ("needs 90 GiB", 0.0, r"none +- +- +90.0 GiB +needs 90 GiB"),
    ],
)
def test_a_runner_up_has_the_time_that_was_found_and_the_reason(
    example_plan, reason, time_s, cells
):
    candidate = replace(example_plan.runners_up[0], reason=reason, time_s=time_s)
    text = render_plan(replace(example_plan, runners_up=(candidate,)), width=140)
    assert re.search(cells, text)


def test_zero_is_told_per_level(example_plan):
    assert "ZeRO-1: optimizer state is sharded over dp" in render_plan(example_plan, width=100)
    first, second = example_plan.stages
    mixed = replace(example_plan, stages=(replace(first, zero_level=0), second))
    text = render_plan(mixed, width=100)
    assert "no ZeRO in stages 0: every data rank has whole parameters" in text
    assert "ZeRO-1 in stages 1: optimizer state is sharded over dp" in text
    candidate = replace(mixed.runners_up[0], zero_level=2, zero_levels=(2, 1))
    text = render_plan(replace(mixed, runners_up=(candidate,)), width=160)
    rows = [line for line in text.splitlines() if re.search(r" (0/1|1/2) ", line)]
    assert len(rows) == 2, "the plan's own row, and that of the runner-up"


def test_state_in_host_memory_is_told_with_its_copies(example_plan):
    first, *rest = example_plan.stages
    first = replace(first, time=replace(first.time, optimizer_s=0.03, copy_s=0.02))
    plan = replace(example_plan, offload="optimizer", stages=(first, *rest))
    text = " ".join(render_plan(plan, width=100).split())
    assert "its state in host memory, copied both ways in 20 ms of a step" in text
    assert "host memory" not in render_plan(example_plan, width=100)


def test_devices_with_several_stages_have_a_memory_row_of_their_own(example_plan):
    text = render_plan(large_plan(example_plan), width=100)
    # 256 + 256 + 512 MiB and 1000 B per stage, 2 GiB of activations, 128 MiB once
    assert re.search(r"0-511 +0,4 +6\.13 GiB +7\.7 %", text)


def test_stages_that_differ_have_their_collectives_summed_up(example_plan):
    text = render_plan(large_plan(example_plan), width=100)
    assert "1,000-1,007" in text
    assert "By stage:" in text


def test_a_plan_for_one_device_has_no_pipeline_and_no_idle_ranks(example_plan):
    stage = replace(example_plan.stages[0], devices=(0,), collectives=())
    text = render_plan(
        replace(
            example_plan,
            mesh=MeshShape(),
            num_devices=1,
            stages=(stage,),
            splits={},
            num_microbatches=1,
            bound_s=0.0,
        ),
        width=100,
    )
    assert "1 device: one device, nothing is split" in text
    assert "1 micro-batch\n" in text
    assert "everything is replicated" in text
    assert "no lower bound was proved" in text
    for absent in ("idle", "Schedule (", "Collectives", "bubbles"):
        assert absent not in text


def test_ranks_that_all_compute_the_same_are_told(example_plan):
    assert "no operator is split" not in render_plan(example_plan, width=100)
    text = render_plan(replace(example_plan, splits={}), width=100)
    assert "over tp ranks: no operator is split, each rank computes all" in text.replace(
        "data ranks (dp) and ", ""
    )


def test_several_idle_ranks_are_named(example_plan):
    text = render_plan(replace(example_plan, num_devices=12), width=100)
    assert re.search("idle +ranks 8-11\n", text)


def test_an_interleaved_plan_draws_its_stages(example_plan):
    mesh = MeshShape(pp=2, virtual=2, dp=2)
    plan = replace(
        example_plan,
        mesh=mesh,
        schedule=ScheduleKind.INTERLEAVED,
        stages=tuple(
            replace(example_plan.stages[i % 2], index=i, devices=(2 * (i % 2), 2 * (i % 2) + 1))
            for i in range(4)
        ),
    )
    text = render_plan(plan, width=100)
    assert "a pipeline of 4 stages on 2 pipeline ranks x the batch over 2" in text
    assert "interleaved 1F1B, 4 micro-batches" in text
    assert "rank 0  0F0 0F1 2F0 2F1" in text


def test_mesh_words_of_every_axis():
    assert mesh_words(MeshShape(tp=4)) == "operators over 4"
    assert mesh_words(MeshShape()) == "one device, nothing is split"


def test_a_dim_that_stands_for_the_batch_is_named(example_plan):
    splits = {**example_plan.splits, "dp": {**example_plan.splits["dp"], "x": "S(1)"}}
    text = render_plan(replace(example_plan, splits=splits), width=100)
    assert "dim 1 of x over 2 x operators over 2" in text
    assert "the batch over" not in text
    splits["dp"]["labels"] = "S(0)"  # a batch that is not the first dim everywhere
    assert "the batch over 2" in render_plan(replace(example_plan, splits=splits), width=100)


def test_the_gap_is_a_share_of_the_predicted_time(example_plan):
    # (20 ms - 18.5 ms) / 20 ms
    assert gap_fraction(example_plan) == pytest.approx(1.5 / 20)
    assert gap_fraction(replace(example_plan, bound_s=0.0)) is None
