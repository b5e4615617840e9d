"""What one device refuses but a trace on tensors without data lets pass."""

from __future__ import annotations

from autopar.capture.torch_ops import is_random
from autopar.errors import CaptureError
from autopar.ir.graph import Graph, Node, Ref, TensorMeta

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


def check_random(graph: Graph) -> None:
    """Refuse operators whose random numbers would depend on the plan.

    Args:
        graph: A normalised program; random operators with a counter-based form are neutral by now.

    Raises:
        CaptureError: Names the first one and its line.
    """
    for node in graph.nodes:
        if is_random(node.op):
            raise random_refusal(node)


def random_refusal(node: Node) -> CaptureError:
    """The error of an operator that draws random numbers from a state."""
    return CaptureError(
        f"{node.op} at {node.source or 'an unknown line'} draws random numbers in a way that has "
        "no counter-based form; draw them outside the model and pass them in"
    )
