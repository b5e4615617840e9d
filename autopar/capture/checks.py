"""What one device refuses but a trace on tensors without data lets pass."""

from __future__ import annotations

import torch

from autopar.capture.torch_ops import is_random
from autopar.errors import CaptureError
from autopar.ir.graph import Graph, Node, Ref, TensorMeta
from autopar.torch_compat import is_torch_compiled

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


def check_sparse(graph: Graph) -> None:
    """Refuse sparse tensors, such as the gradient of an embedding with ``sparse=True``.

    Args:
        graph: A program as it was traced.

    Raises:
        CaptureError: Names the first one and its line.
    """
    for node in graph.nodes:
        if "sparse_coo" in node.op:
            where = f" in module {node.scope!r}" if node.scope else ""
            raise CaptureError(
                f"{node.op} at {node.source or 'an unknown line'}{where} makes a sparse tensor, "
                "which a plan can't split; for an embedding leave sparse=True out"
            )


def check_torch_compile(model: torch.nn.Module) -> None:
    """Refuse a model with a part that went through ``torch.compile``.

    Raises:
        CaptureError: Names the module.
    """
    for path, module in model.named_modules():
        if is_torch_compiled(module):
            own = getattr(module, "_orig_mod", module)
            raise CaptureError(
                f"torch.compile was applied to module {path or type(own).__name__!r} "
                f"({type(own).__name__}), whose operators can't be seen then; give autopar.compile "
                "the model without torch.compile"
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
