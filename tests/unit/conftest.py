"""A small plan that tests of the JSON form, the report and the command line share."""

from __future__ import annotations

import pytest

from autopar.plan.types import (
    AppliedConstraint,
    Candidate,
    CollectiveTotal,
    MemoryParts,
    MeshShape,
    Plan,
    ScheduleKind,
    StagePlan,
    TimeParts,
)
from autopar.units import GIB, MIB


def _stage(index: int) -> StagePlan:
    layers = tuple(f"transformer.h.{k}" for k in range(3 * index, 3 * index + 3))
    return StagePlan(
        index=index,
        devices=tuple(range(4 * index, 4 * index + 4)),
        first=f"add_{index}",
        scopes=("transformer.wte", *layers) if index == 0 else (*layers, "transformer.ln_f"),
        recompute=("gelu_1", "gelu_2", "mul_3") if index else (),
        zero_level=1,
        parameters=62_000_000,
        num_in_flight=2 - index,
        memory=MemoryParts(
            params_bytes=256 * MIB,
            grads_bytes=256 * MIB,
            optimizer_bytes=512 * MIB,
            activations_bytes=(2 - index) * GIB,
            transient_bytes=128 * MIB,
            buffers_bytes=1000,
        ),
        time=TimeParts(
            forward_s=1e-3,
            backward_s=2e-3,
            forward_comm_s=3e-4,
            backward_comm_s=6e-4,
            p2p_s=1e-5,
            reduce_s=1e-3,
            optimizer_s=1e-3,
        ),
        collectives=(
            CollectiveTotal(
                kind="all_reduce",
                axis="tp",
                where="forward",
                count=24,
                payload_bytes=3 * MIB,
                time_s=1 / 3000,  # no short decimal: the JSON form must keep every bit
            ),
        ),
    )


@pytest.fixture
def example_plan() -> Plan:
    """Two stages of four ranks, and a ninth device that is idle."""
    return Plan(
        model_hash="0123abcd",
        cluster="1x9:h100-sxm",
        num_devices=9,
        mesh=MeshShape(pp=2, dp=2, tp=2),
        num_microbatches=4,
        schedule=ScheduleKind.ONE_F_ONE_B,
        stages=(_stage(0), _stage(1)),
        splits={
            "tp": {"mm_1": "R S(1) -> S(1) | n", "mm_2": "S(1) S(0) -> P(sum) | k", "w": "S(1)"},
            "dp": {"mm_1": "S(0) R -> S(0) | m", "x": "S(0)"},
        },
        time_s=0.02,
        objective_s=0.019,
        bound_s=0.0185,
        peak_bytes=3 * GIB,
        memory_limit_bytes=80 * GIB,
        constraints=(
            AppliedConstraint(
                name="memory_limit", value="80 GiB", origin="default", effect="all the memory"
            ),
        ),
        runners_up=(
            Candidate(
                mesh=MeshShape(dp=8),
                num_microbatches=1,
                schedule=ScheduleKind.GPIPE,
                zero_level=3,
                recompute="none",
                time_s=float("inf"),
                peak_bytes=90 * GIB,
                reason="does not fit",
            ),
        ),
        unruled=("aten.foo.default at model.py:12",),
        assumptions=("prices come from data sheets",),
        provenance={"torch": "2.13.0", "prices": "data sheet"},
    )
