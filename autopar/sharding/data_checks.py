"""What the splits over the data axes are checked against, and small questions about a graph."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import ShardingError
from autopar.ir.graph import Graph, OutputKind, TensorMeta
from autopar.sharding.decisions import Choice
from autopar.sharding.dim_classes import Signatures
from autopar.sharding.placement import P, R
from autopar.sharding.signature import AxisStrategy, OpSignature


def size_of(meta: TensorMeta | None, dim: int) -> int:
    """Size of a dim; 0 of a value that is not known."""
    return meta.shape[dim] if meta else 0


def smallest_factor(size: int) -> int:
    """Smallest prime factor; 1 for sizes under two.

    >>> [smallest_factor(n) for n in (1, 8, 15, 7)]
    [1, 2, 3, 7]
    """
    return next((n for n in range(2, size + 1) if size % n == 0), 1)


def distinct_signatures(graph: Graph, signatures: Signatures) -> dict[int, OpSignature]:
    """Signatures by identity, repeats left out."""
    found: dict[int, OpSignature] = {}
    for node in graph.nodes:
        signature = signatures.get(node.name)
        if signature is not None:
            found.setdefault(id(signature), signature)
    return found


def check_results(graph: Graph, choices: Mapping[str, Choice], size: int) -> None:
    """Losses and gradients must be sums over micro-batches, or not depend on them."""
    nodes = graph.node_map()
    for output in graph.outputs:
        if output.value is None or output.kind not in (OutputKind.LOSS, OutputKind.GRAD):
            continue
        node = nodes.get(output.value.name)
        if node is None:
            continue
        base = nodes[node.refs()[0]] if node.op == "getitem" else node
        choice = choices.get(base.name)
        index = node.args[1] if node.op == "getitem" else 0
        have = (
            choice.outputs[index]
            if isinstance(choice, AxisStrategy) and isinstance(index, int)
            else R
        )
        if have not in (P, R):
            raise ShardingError(
                f"{output.kind.value} {output.target!r} is {have} over {size} micro-batches, "
                "not a sum over them; use num_microbatches=1"
            )
