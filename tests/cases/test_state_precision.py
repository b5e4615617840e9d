"""Bytes of parameters, gradients and optimizer state against what torch allocates, by dtype."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

import autopar

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
CASES = [
    pytest.param(torch.float32, None, id="float32"),
    pytest.param(torch.bfloat16, None, id="pure bf16"),
    pytest.param(torch.float16, None, id="pure fp16"),
    pytest.param(torch.float64, None, id="float64"),
    pytest.param(torch.float32, "bf16", id="float32 masters, bf16"),
    pytest.param(torch.bfloat16, "bf16", id="bf16 model with float32 masters"),
    pytest.param(torch.float32, "fp16", id="float32 masters, fp16"),
]


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(("dtype", "precision"), CASES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_plan_counts_is_what_torch_allocates(
    name: str, dtype: torch.dtype, precision: str | None
):
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 32, bias=False)
    ).to(dtype)
    model[0].bias.requires_grad_(requires_grad=False)
    elements = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    batch = torch.randn(8, 64).to(dtype)
    compiled = autopar.compile(
        model, 1, batch, loss=lambda out, _: out.square().mean(), precision=precision,
        num_microbatches=2, optimizer=name,
    )  # fmt: skip
    try:
        optimizer = OPTIMIZERS[name](compiled.parameters())
        compiled(batch).backward()
        gradients = [p.grad for p in compiled.parameters() if p.grad is not None]
        optimizer.step()
        state = [
            value
            for values in optimizer.state.values()
            for value in values.values()
            if torch.is_tensor(value) and value.dim()  # step counters are left out
        ]
        memory = compiled.plan.stages[0].memory
        at_rest = held_bytes(compiled.parameters())
    finally:
        autopar.close(compiled)
    assert memory.optimizer_bytes == held_bytes(state)
    # a low precision has copies of what is not kept in it to compute with
    frozen = elements - trained if dtype is torch.float32 else 0
    copies = 2 * (trained + frozen) if precision else 0
    assert memory.params_bytes == at_rest + copies
    assert at_rest == (4 * trained + held_bytes([model[0].bias]) if precision else
                       elements * dtype.itemsize)  # fmt: skip
    # gradients of a low precision are summed in float32 before they take the parameter's dtype
    assert held_bytes(gradients) == trained * (4 if precision else dtype.itemsize)
    assert memory.grads_bytes == trained * max(4, dtype.itemsize)
