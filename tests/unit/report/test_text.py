"""The report as text: golden, and what it says about missing numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan.types import MeshShape, ScheduleKind
from autopar.report.text import gap_fraction, mesh_words, render_plan

ROLES = {"h.0.w": "row-parallel over tp", "h.1.w": "row-parallel over tp"}
GOLDEN = """\
Plan
  pp2 x dp2 x tp2: a pipeline of 2 stages x the batch over 2 x operators over 2
  1F1B, 4 micro-batches
  devices: 8 of 9 (1x9:h100-sxm)
  idle: rank 8
  predicted time of a step: 20 ms
  solver's own estimate 19 ms, lower bound 18.5 ms, gap 2.6 %
  predicted peak memory of the worst device: 3.00 GiB of 80.00 GiB (3.8 %)
  optimizer assumed: adamw

Stages
  stage  ranks  layers                                 parameters  ZeRO  in flight
  ────────────────────────────────────────────────────────────────────────────────
  0        0-3  transformer.wte, transformer.h.[0-2]   62,000,000     1          2
  1        4-7  transformer.h.[3-5], transformer.ln_f  62,000,000     1          1

Memory of the worst device of each stage, against the limit
  stage   params    grads   optim.    activ.   trans.  buffers     total  of limit
  ────────────────────────────────────────────────────────────────────────────────
  0      256 MiB  256 MiB  512 MiB  2.00 GiB  128 MiB   1000 B  3.13 GiB     3.9 %
  1      256 MiB  256 MiB  512 MiB  1.00 GiB  128 MiB   1000 B  2.13 GiB     2.7 %

Time of each stage: per micro-batch, and once per step
  stage     F  F comm     B  B comm    p2p  reduce  unshard  optimizer     step
  ─────────────────────────────────────────────────────────────────────────────
  0      1 ms  300 us  2 ms  600 us  10 us    1 ms      0 s       1 ms  17.6 ms
  1      1 ms  300 us  2 ms  600 us  10 us    1 ms      0 s       1 ms  17.6 ms

Collectives of one device in one step
  stages  collective  axis  where    calls   payload    time
  ──────────────────────────────────────────────────────────
  0-1     all_reduce  tp    forward     24  3.00 MiB  333 us

Splits
  parameters  tensors  split
  ─────────────────────────────────────────
  h.*.w             2  row-parallel over tp
  over dp: 1 x mm

Schedule (a backward drawn twice as long as a forward)
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
  mesh  schedule  micro-b.  ZeRO  recompute  time       peak  why not
  ────────────────────────────────────────────────────────────────────────
  dp8   gpipe            1     3  none          -  90.00 GiB  does not fit

Assumptions
  - prices come from data sheets

Provenance
  prices  data sheet
  torch   2.13.0
"""


def test_report_golden(example_plan):
    assert render_plan(example_plan, param_roles=ROLES) == GOLDEN


def test_without_roles_the_split_operators_are_counted(example_plan):
    text = render_plan(example_plan)
    assert "over tp: 2 x mm" in text
    assert "over dp: 1 x mm" in text


def test_the_report_keeps_to_the_width_it_is_given(example_plan):
    text = render_plan(example_plan, width=72, param_roles=ROLES)
    assert max(map(len, text.splitlines())) <= 72


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
        )
    )
    assert "1 device: one device, nothing is split" in text
    assert "1 micro-batch\n" in text
    assert "everything is replicated" in text
    assert "no lower bound was proved" in text
    for absent in ("idle", "Schedule (", "Collectives"):
        assert absent not in text


def test_several_idle_ranks_are_named(example_plan):
    assert "idle: ranks 8-11" in render_plan(replace(example_plan, num_devices=12))


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
    text = render_plan(plan)
    assert "a pipeline of 4 stages on 2 pipeline ranks x the batch over 2" in text
    assert "interleaved 1F1B, 4 micro-batches" in text
    assert "rank 0  0F0 0F1 2F0 2F1" in text


def test_mesh_words_of_every_axis():
    assert mesh_words(MeshShape(tp=4)) == "operators over 4"
    assert mesh_words(MeshShape()) == "one device, nothing is split"


def test_the_gap_is_a_share_of_the_objective(example_plan):
    # (19 ms - 18.5 ms) / 19 ms
    assert gap_fraction(example_plan) == pytest.approx(0.5 / 19)
    assert gap_fraction(replace(example_plan, bound_s=0.0)) is None
