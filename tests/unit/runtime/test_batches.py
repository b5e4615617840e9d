"""What a batch must have in common with the captured one."""

import pytest
import torch

from autopar.errors import InputError
from autopar.ir.graph import TensorMeta
from autopar.runtime.batches import changed_inputs, check_batch

CAPTURED = {"ids": TensorMeta((4, 8), "int64"), "mask": TensorMeta((4, 8), "bool")}
CPU = torch.device("cpu")


def batch(**changes):
    return {
        "ids": torch.zeros(4, 8, dtype=torch.int64),
        "mask": torch.ones(4, 8, dtype=torch.bool),
    } | changes


def test_the_captured_batch_passes():
    check_batch(batch(), CAPTURED, CPU, rank=0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"ids": torch.zeros(4, 8)}, r"rank 1: input 'ids' is float32\[4, 8\], .*; cast it"),
        ({"ids": torch.zeros(4, dtype=torch.int64)}, r"with 1 dims, .* with 2; give"),
        ({"extra": torch.zeros(1)}, r"an unknown 'extra'; the plan was made for 'ids', 'mask'"),
        ({"ids": torch.zeros(4, 8, dtype=torch.int64, device="meta")}, r"is on meta, this"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_the_remedy(wrong, text):
    with pytest.raises(InputError, match=text):
        check_batch(batch(**wrong), CAPTURED, CPU, rank=1)


def test_a_missing_entry_is_named():
    with pytest.raises(InputError, match=r"^the batch has no 'mask'; the plan"):
        check_batch({"ids": batch()["ids"]}, CAPTURED, CPU, rank=None)


def test_other_sizes_are_told():
    longer = batch(ids=torch.zeros(4, 9, dtype=torch.int64))
    assert changed_inputs(longer, CAPTURED) == ("'ids' [4, 9] instead of [4, 8]",)
