from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ConfigError
from autopar.ir.graph import TensorMeta
from cost_models.memory import (
    OptimizerKind,
    optimizer_state_bytes,
    parameter_state_bytes,
    shard_meta,
)

MATRIX = TensorMeta((10, 4), "float32")
VECTOR = TensorMeta((6,), "float32")


@pytest.mark.parametrize(
    ("optimizer", "matrix_bytes", "vector_bytes"),
    [
        ("adamw", 320, 48),  # two tensors of 160 and of 24 bytes
        ("adam", 320, 48),
        ("sgd", 0, 0),
        ("sgd-momentum", 160, 24),
        ("adafactor", 56, 24),  # 10 rows and 4 columns of 4 bytes; vectors whole
        ("none", 0, 0),
    ],
)
def test_optimizer_state_by_hand(optimizer, matrix_bytes, vector_bytes):
    assert optimizer_state_bytes(optimizer, MATRIX) == matrix_bytes
    assert optimizer_state_bytes(optimizer, VECTOR) == vector_bytes


def test_an_unknown_optimizer_is_refused_with_those_known():
    with pytest.raises(ConfigError, match=r"optimizer is 'lion'; .* adamw, adam, sgd, sgd-mom"):
        optimizer_state_bytes("lion", MATRIX)


def _parts(level: int, **options):
    state = parameter_state_bytes(MATRIX, zero_level=level, dp=4, **options)
    return (
        state.stored_bytes,
        state.compute_bytes,
        state.grad_bytes,
        state.optimizer_bytes,
        state.is_compute_lasting,
    )


def test_zero_levels_by_hand():
    # a share is 3 of 10 rows: 48 bytes of 160
    assert _parts(0) == (160, 0, 160, 320, True)
    assert _parts(1) == (48, 160, 160, 96, True)
    assert _parts(2) == (48, 160, 48, 96, True)
    assert _parts(3) == (48, 160, 48, 96, False)


def test_frozen_parameters_have_no_gradient_and_no_state():
    assert _parts(0, requires_grad=False) == (160, 0, 0, 0, True)
    assert _parts(2, requires_grad=False) == (160, 0, 0, 0, True)
    assert _parts(3, requires_grad=False) == (48, 160, 0, 0, False)


def test_bfloat16_with_float32_masters_takes_18_bytes_per_parameter():
    # 4 master + 2 compute copy + 4 gradient + 8 Adam
    half = TensorMeta((10, 4), "bfloat16")
    state = parameter_state_bytes(half, master_dtype="float32")
    assert state.total_bytes == 40 * 18


def test_one_rank_is_not_spread():
    assert parameter_state_bytes(MATRIX, zero_level=3) == parameter_state_bytes(MATRIX)


def test_a_scalar_is_not_cut():
    assert shard_meta(TensorMeta((), "float32"), 8).shape == ()


@given(
    rows=st.integers(1, 300), columns=st.integers(1, 20), dp=st.integers(1, 16),
    optimizer=st.sampled_from(list(OptimizerKind)),
)  # fmt: skip
def test_a_higher_level_never_keeps_more_for_the_whole_step(rows, columns, dp, optimizer):
    lasting = []
    for level in range(4):
        state = parameter_state_bytes(
            TensorMeta((rows, columns), "float32"), optimizer=optimizer, zero_level=level, dp=dp
        )
        # level 1 holds a share beside the whole compute copy: compare what it saves elsewhere
        lasting.append(state.grad_bytes + state.optimizer_bytes)
    assert lasting == sorted(lasting, reverse=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"zero_level": 4}, "zero_level is 4, must be 0, 1, 2 or 3"), ({"dp": 0}, "dp is 0, must be")],
)
def test_out_of_range_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        parameter_state_bytes(MATRIX, **options)
