"""Every operator of six captured models, with the values it has there, against its rule."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.capture.reference import bind_inputs, run_graph
from autopar.capture.tracing import capture
from autopar.ir.graph import Node, TensorMeta
from autopar.ir.promote import promote
from autopar.sharding import rules
from autopar.sharding.rules import OpCall
from tests.oracle.shard_oracle import Case, check_strategies
from tests.zoo import build, tiny_models

DROPOUT = 0.1


@cache
def model_cases(name: str) -> tuple[Case, ...]:
    """One case per distinct operator instance of a model, in float64."""
    model, batch = build(name, layers=1, batch=4, seq=8, dropout=DROPOUT)
    captured = capture(model, kwargs=batch)
    graph = promote(captured.graph)
    values: dict[str, object] = dict(
        bind_inputs(captured, model, kwargs=batch, graph=graph, rng_key=3)
    )
    inputs = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
    found: dict[OpCall, Case] = {}

    def observe(node: Node, value: object) -> None:
        values[node.name] = value
        if node.op == "getitem":
            return
        operands = tuple(values[ref] for ref in node.refs())
        tensors = tuple(x for x in operands if isinstance(x, torch.Tensor))
        assert len(tensors) == len(operands), node
        results = tuple(value) if isinstance(node.meta, tuple) else (value,)  # type: ignore[call-overload]
        case = Case(node, tensors, results, f"{name}: {node.name} {node.op}")
        found.setdefault(OpCall.of(node, case.metas()), case)

    run_graph(graph, inputs, observe=observe)
    return tuple(found.values())


@pytest.mark.parametrize("name", tiny_models())
def test_every_operator_of_the_models_has_a_rule(name: str) -> None:
    unruled = {case.node.op for case in model_cases(name) if case.signature() is None}
    assert not unruled


@pytest.mark.parametrize("name", tiny_models())
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)], ids=str)
def test_offered_splits_of_the_models_equal_the_whole_operator(
    name: str, sizes: tuple[int, ...]
) -> None:
    failures = [f for case in model_cases(name) for f in check_strategies(case, sizes)]
    assert not failures, "\n".join(failures[:20])


@pytest.mark.parametrize("name", tiny_models())
def test_announced_results_of_the_models_are_the_real_ones(name: str) -> None:
    for case in model_cases(name):
        for meta, value in zip(case.node.metas(), case.results, strict=True):
            if isinstance(meta, TensorMeta):
                assert value is not None, case.label
                assert tuple(value.shape) == meta.shape, case.label


def test_signatures_are_shared_by_equal_operators() -> None:
    memo: dict[OpCall, rules.OpSignature | None] = {}
    cases = model_cases("llama")
    for case in (*cases, *cases):
        rules.signature(case.node, case.metas(), memo=memo)
    assert len(memo) == len(cases)
