"""Predicted bytes of every moment of a program against those that torch holds."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.capture.reference import bind_inputs, run_graph
from autopar.capture.tracing import capture
from autopar.ir.graph import Graph, Node
from cost_models.liveness import liveness
from tests.zoo import build, tiny_models


def _held_bytes(graph: Graph, inputs: dict[str, torch.Tensor]) -> list[int]:
    """Bytes of all storages but the inputs' that are alive after each operator."""
    of_inputs = {value.untyped_storage()._cdata for value in inputs.values()}
    alive: dict[int, tuple[StorageWeakRef, int]] = {}
    held: list[int] = []

    def observe(node: Node, value: object) -> None:
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in of_inputs:
                    alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        for key in [key for key, (reference, _) in alive.items() if reference.expired()]:
            del alive[key]
        held.append(sum(size for _, size in alive.values()))

    run_graph(graph, inputs, observe=observe)
    return held


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", tiny_models())
def test_liveness_is_an_upper_bound_and_close(name, dropout):
    model, batch = build(name, dropout=dropout)
    captured = capture(model, kwargs=batch)
    held = _held_bytes(captured.graph, bind_inputs(captured, model, kwargs=batch))
    predicted = liveness(captured.graph, held_outputs=(), workspace=lambda node, metas: 0)
    for node, actual, bound in zip(captured.graph.nodes, held, predicted.timeline, strict=True):
        assert actual <= bound, f"{node.name} ({node.op}) holds {actual} bytes, predicted {bound}"
    # the fused attention of the CPU returns its result transposed, so that the view after it does
    # not copy; other kernels do not, and the prediction is for them
    assert predicted.peak_bytes <= max(held) * (1.08 if dropout == 0 else 1.001)
