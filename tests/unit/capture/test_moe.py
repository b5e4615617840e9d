"""Sorting by expert is found in captured programs, and its operators mean what they say."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.nn import functional

from autopar.capture import moe
from autopar.capture.reference import bind_inputs, gradients, run_graph
from autopar.capture.tracing import Captured, capture
from autopar.errors import RowBudgetError
from autopar.ir.graph import Graph
from autopar.ir.promote import promote
from tests.moe_models import (
    HIDDEN,
    PLAIN,
    SORTED,
    TRANSFORMERS,
    Batch,
    TopKExperts,
    build,
    build_plain,
    build_transformer,
)

_GENERAL = ("aten.sort.", "aten.argsort.", "aten.histc.", "aten.cumsum.", "_grouped_mm")


def _ops(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes}


@cache
def _captured(name: str) -> tuple[torch.nn.Module, Batch, Captured]:
    model, batch = build(name)
    return model, batch, capture(model, (), batch)


@pytest.mark.parametrize("name", [*SORTED, *TRANSFORMERS])
def test_sorts_by_expert_become_neutral_operators(name: str) -> None:
    ops = _ops(_captured(name)[2].graph)
    neutral = {f"autopar.{n}" for n in ("moe_route", "moe_dispatch", "moe_combine", "grouped_mm")}
    assert neutral <= ops
    assert not [op for op in ops if op.startswith(_GENERAL) or "grouped_mm_fallback" in op]
    assert "autopar.grouped_mm_ends" not in ops


@pytest.mark.parametrize("name", [*PLAIN, *TRANSFORMERS])
def test_loss_and_gradients_of_the_captured_program_are_those_of_eager_torch(name: str) -> None:
    model, batch, captured = _captured(name)
    graph = promote(captured.graph)
    results = run_graph(graph, bind_inputs(captured, model, (), batch, graph=graph))
    found = gradients(results)
    output = model(**batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    (wanted,) = (
        v for k, v in results.items() if k in ("loss:output", "loss:output.loss", "loss:loss")
    )
    torch.testing.assert_close(wanted.float(), loss.detach(), rtol=1e-5, atol=1e-6)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[key].float(), parameter.grad, rtol=1e-4, atol=1e-6)


def test_experts_in_bfloat16_are_found_too() -> None:
    model, batch = build_transformer("mixtral")
    ops = _ops(capture(model.bfloat16(), (), batch).graph)
    assert {"autopar.grouped_mm", "autopar.grouped_mm_weight"} <= ops
    assert not [op for op in ops if "_grouped_mm" in op]


class _OrderIsRead(TopKExperts):
    """What the order of the slots is flows into the result."""

    def mix(self, t: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        ends = functional.one_hot(flat, self.experts).sum(0).cumsum(0).to(torch.int32)
        h = functional.grouped_mm(t[order // self.k], self.up, offs=ends).relu()
        out = functional.grouped_mm(h, self.down, offs=ends)
        return torch.zeros_like(t).index_add(0, order // self.k, out * order.unsqueeze(-1) * 1e-3)


def test_a_program_that_reads_the_order_in_another_way_keeps_its_numbers() -> None:
    torch.manual_seed(0)
    model = _OrderIsRead()
    batch = {"x": torch.randn(4, 3, HIDDEN), "y": torch.randn(4, 3, HIDDEN)}
    captured = capture(model, (), batch)
    results = run_graph(captured.graph, bind_inputs(captured, model, (), batch))
    loss = model(**batch)
    loss.backward()
    torch.testing.assert_close(results["loss:output"], loss.detach())
    torch.testing.assert_close(gradients(results)["up"], model.up.grad)


class _SortOnly(torch.nn.Module):
    """A sort that has nothing to do with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values, order = ids.sort()
        return (values * self.scale[order]).sum()


def test_other_sorts_stay_sorts() -> None:
    captured = capture(_SortOnly(), (torch.tensor([3, 1, 2, 5, 4, 0]),))
    assert not [op for op in _ops(captured.graph) if op.startswith("autopar.moe")]


def test_a_grouped_product_without_a_sort_has_gradients() -> None:
    torch.manual_seed(0)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 4, 8))

        def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return functional.grouped_mm(rows, self.weight, offs=ends).square().sum()

    model, rows = Product(), torch.randn(7, 4)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    captured = capture(model, (rows, ends))
    results = run_graph(captured.graph, bind_inputs(captured, model, (rows, ends)))
    model(rows, ends).backward()
    torch.testing.assert_close(gradients(results)["weight"], model.weight.grad)


# -- the operators by hand -----------------------------------------------------------------------


def test_slots_are_sorted_by_expert_and_counted_by_hand() -> None:
    order, counts, splits = moe.moe_route(torch.tensor([2, 0, 2, 1, 0, 2]), 4, 2)
    assert order.tolist() == [1, 4, 3, 0, 2, 5]
    assert counts.tolist() == [2, 1, 3, 0]
    assert splits.tolist() == [[2, 1, 3, 0], [2, 1, 3, 0]]


def test_dispatch_and_combine_by_hand() -> None:
    order, _, splits = moe.moe_route(torch.tensor([2, 0, 2, 1]), 3, 2)
    x = torch.tensor([[1.0], [10.0]])
    rows = moe.moe_dispatch(x, order, splits, 2)
    assert rows.flatten().tolist() == [1.0, 10.0, 1.0, 10.0]  # slots 1, 3, 0, 2
    out = moe.moe_combine(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), order, splits, 2, (2, 1))
    assert out.flatten().tolist() == [4.0, 6.0]  # slots 0 and 1 are rows 2 and 0, 2 and 3: 3 and 1


def test_rows_behind_the_last_run_do_not_count() -> None:
    nan = float("nan")
    counts = torch.tensor([1, 2])
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [nan, nan]])
    weight = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    product = moe.grouped_mm(rows, weight, counts, 1.0)
    assert product.flatten().tolist() == [1.0, 4.0, 7.0, 0.0]
    assert moe.grouped_mm_weight(rows, product, counts, 1.0).isfinite().all()
    assert moe.moe_run_sums(rows, counts).tolist() == [[1.0, 0.0], [1.0, 2.0]]
    spread = moe.moe_spread(torch.tensor([5.0, 6.0]), counts, torch.arange(4))
    assert spread.tolist() == [5.0, 6.0, 6.0, 0.0]


def test_an_id_that_is_no_expert_is_refused() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        moe.moe_route(torch.tensor([0, 4]), 4, 1)


def test_more_rows_than_there_is_room_for_name_operator_numbers_and_remedy() -> None:
    splits = torch.zeros(2, 4, dtype=torch.int64)
    assert moe.check_rows(splits, torch.tensor([8]), 8, "route of mlp").equal(splits)
    with pytest.raises(
        RowBudgetError,
        match=r"^route of mlp: 9 rows were routed .* has room for 8; raise expert_capacity",
    ):
        moe.check_rows(splits, torch.tensor([9]), 8, "route of mlp")


def test_plain_models_have_a_batch_of_their_own_size() -> None:
    _, batch = build_plain("Dense", batch=2)
    assert batch["x"].shape[0] == 2
