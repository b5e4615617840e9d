"""Autograd's view of a step: one function whose backward hands over finished gradients.

The schedule computes gradients with the loss. The loss that the user gets has a ``grad_fn`` with
the parameters as its inputs; its backward only gives what is there, so that accumulation into
``.grad``, hooks on parameters and ``torch.autograd.grad`` are torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from autopar.errors import ConfigError

Gradients = tuple[torch.Tensor | None, ...]


class StepInFlight(Protocol):
    """A step between its call and its backward."""

    def hand_over(self, tangents: Sequence[torch.Tensor | None]) -> Gradients:
        """Gradients of the trained parameters, once.

        Args:
            tangents: Those of the results; None for one that nothing was differentiated by.
        """
        ...


class _Step(torch.autograd.Function):
    """Results of a step as functions of the parameters."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        anchor: torch.Tensor,
        step: StepInFlight,
        values: tuple[torch.Tensor, ...],
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.step = step  # type: ignore[attr-defined]  # contexts take attributes
        ctx.set_materialize_grads(False)  # an output that was not used is not one with zeros
        # loops scale a loss in place, which torch forbids on a view; of a large output no copy is
        # made, and writing to it raises
        return tuple(v.clone() if v.dim() == 0 else v.view_as(v) for v in values)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *tangents: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True: second derivatives of a compiled model are not supported; "
                "call backward() without it"
            )
        step: StepInFlight = ctx.step  # type: ignore[attr-defined]
        return (None, None, None, *step.hand_over(tangents))


class _Closed(torch.autograd.Function):
    """An output that no gradient can flow into."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        anchor: torch.Tensor,
        value: torch.Tensor,
        path: str,
        inference: bool,
    ) -> torch.Tensor:
        ctx.path, ctx.inference = path, inference  # type: ignore[attr-defined]
        return value.view_as(value)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *tangents: torch.Tensor
    ) -> tuple[None, None, None, None]:
        path = ctx.path  # type: ignore[attr-defined]
        if ctx.inference:  # type: ignore[attr-defined]
            raise ConfigError(
                f"a gradient flows into output {path!r} of a model that was compiled with "
                "mode='inference'; compile it with mode='train' to train it, or call it under "
                "torch.no_grad()"
            )
        raise ConfigError(
            f"a gradient flows into output {path!r}, but the step has already differentiated the "
            "model's own loss; make that term part of the loss by loss= of autopar.compile()"
        )


def as_functions(
    step: StepInFlight, values: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """``values`` with a ``grad_fn`` that asks ``step`` for the gradients of ``parameters``."""
    # ranks without parameters need a differentiable input too
    anchor = torch.zeros((), requires_grad=True)
    results: tuple[torch.Tensor, ...] = _Step.apply(  # type: ignore[no-untyped-call]
        anchor, step, tuple(values), *parameters
    )
    return results


def close(value: torch.Tensor, path: str, *, inference: bool = False) -> torch.Tensor:
    """``value`` such that a gradient into it raises.

    Args:
        value: An output.
        path: Its path, for the message.
        inference: Whether the model was compiled for inference.
    """
    if not (value.is_floating_point() or value.is_complex()):
        return value
    anchor = torch.zeros((), requires_grad=True)
    closed: torch.Tensor = _Closed.apply(  # type: ignore[no-untyped-call]
        anchor, value, path, inference
    )
    return closed
