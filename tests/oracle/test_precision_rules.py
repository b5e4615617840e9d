"""Operators in a low precision, run: every value has the dtype that the program says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from autopar.capture.reference import bind_inputs, gradients, run_graph
from autopar.capture.tracing import capture
from autopar.ir.graph import Node
from autopar.ir.precision_rules import PROMOTING, RULES, WHOLE_VIEWS, Family

Tensor = torch.Tensor
ROWS = torch.tensor([0, 2])
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conv2d": F.conv2d,
    "conv_transpose2d": F.conv_transpose2d,
    "prelu": lambda x, w: F.prelu(x, w[0, :, 0, 0].to(x.dtype)),
    "max_pool2d": lambda x, _: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x, _: F.avg_pool2d(x, 2),
    "adaptive": lambda x, _: F.adaptive_avg_pool2d(x, 2),
    "bilinear": lambda x, _: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "nearest": lambda x, _: F.interpolate(x, scale_factor=2),
    "unfold": lambda x, _: F.unfold(x, 2),
    "group_norm": lambda x, _: F.group_norm(x, 2),
    "activations": lambda x, _: F.gelu(F.silu(F.mish(F.elu(F.leaky_relu(x))))),
    "hard": lambda x, _: F.hardswish(F.hardsigmoid(F.relu6(x + 1)) * x),
    "softplus": lambda x, _: F.softplus(F.logsigmoid(x)),
    "softmax": lambda x, _: x.softmax(-1) * x.log_softmax(-1),
    "logsumexp": lambda x, _: x.logsumexp(-1) + x.cumsum(-1).amax(-1),
    "sort": lambda x, _: x.sort(-1)[0] * x.topk(1)[0],
    "index": lambda x, _: x[:, ROWS] + x.index_select(1, ROWS),
    "gather": lambda x, _: x.gather(1, torch.zeros(2, 1, 8, 8, dtype=torch.long)),
    "moves": lambda x, _: torch.cat([F.pad(x, (1, 1)), F.pad(x.flip(-1), (2, 0))], -2).tril(),
    "where": lambda x, _: torch.where(x > 0, x, x * 2).clamp(-3, 3),
    "matmul": lambda x, _: x.flatten(0, 1) @ x.flatten(0, 1).transpose(1, 2),
    "einsum": lambda x, _: torch.einsum("bchw,bchv->bcwv", x, x),
    "losses": lambda x, _: F.l1_loss(x.softmax(-1), x) + F.mse_loss(x, -x),
    "cross_entropy": lambda x, _: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "attention": lambda x, _: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "a float mask": lambda x, _: F.scaled_dot_product_attention(
        x, x, x, attn_mask=torch.full((8, 8), -1e5).triu(1)
    ),
    "powers": lambda x, _: (x * x + 1).sqrt() + (x * x + 2).rsqrt() + x.exp() + x.pow(3),
    "weight norm": lambda x, w: F.conv2d(x, w / w.square().sum((1, 2, 3), keepdim=True).sqrt()),
    "scalars": lambda x, w: x * w[0, 0, 0, 0].exp() + w.mean() - 1e-3,
}  # fmt: skip


class Case(torch.nn.Module):
    """A layer, the operator, and the sum of its squares."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4, 4, 2, 2))
        self.layer = torch.nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), self.weight).float().square().sum() * 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_values_have_the_dtypes_of_the_program_and_gradients_are_near(
    name: str, precision: str
) -> None:
    model = Case(CASES[name])
    torch.manual_seed(1)
    x = torch.randn(2, 4, 8, 8)
    wrong = []

    def check(node: Node, value: object) -> None:
        values = value if isinstance(value, tuple | list) else (value,)
        for meta, one in zip(node.metas(), values, strict=False):
            if meta is not None and (f"torch.{meta.dtype}", meta.shape) != (
                str(one.dtype), tuple(one.shape),
            ):  # fmt: skip
                wrong.append((node, one.dtype))

    captured = capture(model, (x,), {}, precision=precision)
    results = run_graph(captured.graph, bind_inputs(captured, model, (x,), {}), observe=check)
    assert not wrong
    model(x).backward()
    for parameter, gradient in gradients(results).items():
        exact = model.get_parameter(parameter).grad
        assert exact is not None
        assert float((gradient - exact).norm()) < 0.05 * float(exact.norm()) + 1e-4


def test_every_rule_of_the_table_is_consistent() -> None:
    assert all(name.count(".") == 1 for name in RULES)
    assert all(RULES[name].family is Family.FOLLOW for name in PROMOTING | WHOLE_VIEWS)
    assert all(rule.family is Family.FLOAT32 for rule in RULES.values() if rule.has_dtype)
