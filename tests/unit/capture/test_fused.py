from __future__ import annotations

from dataclasses import replace

import torch

from autopar.capture.reference import bind_inputs, gradients, run_graph
from autopar.capture.rewrites.fused import split_fused_projections
from autopar.capture.tracing import capture
from autopar.ir.graph import Graph, InputKind
from autopar.ir.promote import promote
from tests.zoo import build


class _Joint(torch.nn.Module):
    """``linear`` whose result is split in two unequal parts, as gate and up."""

    def __init__(self, *, keep_whole: bool = False) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 10)
        self.keep_whole = keep_whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joint = self.proj(x)
        a, b = joint.split([4, 6], dim=-1)
        loss = (a.relu() * a).sum() + b.sigmoid().sum()
        return loss + joint.square().sum() if self.keep_whole else loss


def _parts(graph: Graph) -> list[str]:
    return [i.target for i in graph.of_kind(InputKind.PARAM) if i.part is not None]


def test_gpt2_attention_projection_is_three_matmuls() -> None:
    model, batch = build("gpt2", layers=1)
    parts = _parts(capture(model, (), batch).graph)
    name = "transformer.h.0.attn.c_attn"
    assert parts == [
        *(f"{name}.weight[1, {a}:{a + 32}]" for a in (0, 32, 64)),
        *(f"{name}.bias[0, {a}:{a + 32}]" for a in (0, 32, 64)),
    ]


def test_taking_apart_keeps_loss_and_whole_gradients() -> None:
    torch.manual_seed(0)
    model, x = _Joint().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    captured = capture(model, (x,))
    assert _parts(captured.graph) == [
        "proj.weight[0, 0:4]", "proj.weight[0, 4:10]", "proj.bias[0, 0:4]", "proj.bias[0, 4:10]",
    ]  # fmt: skip
    results = run_graph(captured.graph, bind_inputs(captured, model, (x,)))
    model(x).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients(results)[name], parameter.grad)


def test_a_result_that_is_also_read_whole_stays_fused() -> None:
    assert not _parts(capture(_Joint(keep_whole=True), (torch.randn(3, 5, 4),)).graph)


class _Rolled(torch.nn.Module):
    """The gradient of ``proj`` is read in slices, and so is what it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.proj = torch.nn.Parameter(torch.ones(5)), torch.nn.Linear(5, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj((x * self.scale).roll(1, -1)).square().mean()


def test_a_gradient_that_is_read_in_slices_is_no_fused_projection() -> None:
    torch.manual_seed(0)
    model, x = _Rolled().double(), torch.randn(3, 5, dtype=torch.float64)
    captured = capture(model, (x,))
    assert not _parts(captured.graph)
    results = run_graph(captured.graph, bind_inputs(captured, model, (x,)))
    model(x).backward()
    torch.testing.assert_close(gradients(results)["proj.weight"], model.proj.weight.grad)


def test_backward_keeps_its_forward_twins() -> None:
    model, batch = build("gpt2", layers=1)
    graph = promote(capture(model, (), batch).graph)
    nodes = graph.node_map()
    weights = {i.name for i in graph.of_kind(InputKind.PARAM) if i.part is not None}
    forward = {n.name for n in graph.nodes if n.op == "aten.mm.default" and weights & set(n.refs())}
    twins = {n.twin for n in graph.nodes if n.phase == "backward" and n.scope.endswith("c_attn")}
    assert forward & twins
    assert all(t is None or t in nodes for t in twins)


def test_taking_apart_twice_changes_nothing() -> None:
    model, batch = build("gpt2", layers=1)
    graph = capture(model, (), batch).graph
    assert split_fused_projections(graph) == replace(graph)
