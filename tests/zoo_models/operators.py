"""An operator of one's own with a backward, and a function with a hand-written gradient."""

from __future__ import annotations

import torch

import autopar


@torch.library.custom_op("autopar_zoo::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    return torch.nn.functional.silu(gate) * up


@swiglu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("autopar_zoo::swiglu_backward", mutates_args=())
def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both operands."""
    sigmoid = torch.sigmoid(gate)
    return grad * up * (sigmoid + gate * sigmoid * (1 - sigmoid)), grad * gate * sigmoid


@swiglu_backward.register_fake
def _(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


swiglu.register_autograd(
    lambda ctx, grad: torch.ops.autopar_zoo.swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def register_rules() -> None:
    """Say how the operator may be split."""
    autopar.register_op("autopar_zoo::swiglu", "(b, h), (b, h) -> (b, h)")
    autopar.register_op(
        "autopar_zoo::swiglu_backward", "(b, h), (b, h), (b, h) -> (b, h), (b, h)", linear=[(0,)]
    )


class ScaledTanh(torch.autograd.Function):
    """``tanh(a x)`` with its gradient from the result."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(a * x)
        ctx.save_for_backward(x, a, y)
        return y

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, a, y = ctx.saved_tensors
        inner = grad * (1 - y * y)
        return inner * a, (inner * x).sum_to_size(a.shape)
