"""Bytes that the CPU's libraries hold while an operator runs, against torch's allocator."""

import pytest
import torch

from autopar.ir.graph import Graph, Node, Ref, TensorMeta
from cost_models.liveness import cpu_workspace
from tests.bench.live_bytes import peak_allocated_bytes

X, W, Y = (4, 32, 12, 12), (64, 32, 3, 3), (4, 64, 12, 12)
SETTING = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)


def meta(shape):
    return TensorMeta(shape, "float32")


def args_of(op, operands):
    """With a first dim that is gathered or scattered."""
    refs = tuple(map(Ref, operands))
    extra = {"comm.all_gather": (0, "dp", 8), "comm.reduce_scatter": ("sum", 0, "dp")}
    return refs + extra.get(op, ())


def workspace(op, made, **operands):
    node = Node("made", op, args_of(op, operands), meta=made)
    return cpu_workspace(Graph((), (node,), ()))(node, operands)


def test_a_convolution_rearranges_the_larger_side_and_the_weight():
    found = workspace("aten.convolution.default", meta(Y), x=meta(X), w=meta(W))
    assert found == meta(Y).bytes + meta(W).bytes
    x, w = torch.randn(X), torch.randn(W)

    def run():
        torch.ops.aten.convolution.default(x, w, None, *SETTING)

    run()
    measured = peak_allocated_bytes(run) - meta(Y).bytes
    assert measured <= 1.01 * found


@pytest.mark.parametrize("wanted", [(True, True, False), (False, True, False)])
def test_its_backward_rearranges_input_and_gradient(wanted):
    made = tuple(meta(s) for s in (X, W, (64,)))
    found = workspace("aten.convolution_backward.default", made, dy=meta(Y), x=meta(X), w=meta(W))
    assert found == sum(meta(s).bytes for s in (X, W, Y))
    dy, x, w = (torch.randn(s) for s in (Y, X, W))

    def run():
        torch.ops.aten.convolution_backward.default(dy, x, w, None, *SETTING, list(wanted))

    run()
    results = sum(meta(s).bytes for s, is_wanted in zip((X, W), wanted, strict=False) if is_wanted)
    assert peak_allocated_bytes(run) - results <= 1.01 * found


def test_gloo_gathers_into_a_buffer_of_its_own():
    assert workspace("comm.all_gather", meta((8, 3)), block=meta((4, 3))) == 96
    assert workspace("comm.reduce_scatter", meta((4, 3)), whole=meta((8, 3))) == 96
