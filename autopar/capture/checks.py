"""What one device refuses but a trace on tensors without data lets pass."""

from __future__ import annotations

from autopar.errors import CaptureError
from autopar.ir.graph import Graph, Ref, TensorMeta

_ONE_DTYPE = frozenset(
    f"aten.{name}.default" for name in ("mm", "bmm", "addmm", "baddbmm", "convolution")
)


def check_dtypes(graph: Graph) -> None:
    """Refuse products of tensors of different dtypes, as the kernels do.

    Args:
        graph: A program as it was traced.

    Raises:
        CaptureError: Names the first such operator, its line and both dtypes.
    """
    metas = {i.name: i.meta for i in graph.inputs} | {n.name: n.meta for n in graph.nodes}
    for node in graph.nodes:
        if node.op not in _ONE_DTYPE:
            continue
        operands = [metas[arg.name] for arg in node.args if isinstance(arg, Ref)]
        found = [meta.dtype for meta in operands if isinstance(meta, TensorMeta)]
        odd = next((dtype for dtype in found if dtype != found[0]), None)
        if odd is not None:
            raise CaptureError(
                f"{node.op} at {node.source or node.scope or node.name} is given "
                f"torch.{found[0]} and torch.{odd}, which one device refuses; cast the inputs of "
                f"the model to the dtype of its weights"
            )
