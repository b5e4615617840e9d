"""Joint export by torch: the private names of torch behind the tracing of a model.

Checked with torch 2.11 to 2.14. What only saves time is left out where torch has no such name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import CaptureError

if TYPE_CHECKING:
    import torch

SCOPE_KEY = "autopar_scope"
SOURCE_KEY = "autopar_source"
_LAZY_MODULE = "torch.fx._lazy_graph_module"
_PROXY_MODULE = "torch.fx.experimental.proxy_tensor"
_NO_FUNCTION_NAMES = "_disable_torch_fn_metadata_mode"  # which function of torch made a node


@dataclass(frozen=True, slots=True)
class TracedInput:
    """Role of one placeholder of a joint graph.

    Attributes:
        kind: ``"param"``, ``"buffer"``, ``"user"`` or ``"tangent"``.
        target: Qualified name of a parameter or buffer, else "".
        index: Position among the user's inputs, or of the output that a tangent belongs to.
    """

    kind: str
    target: str = ""
    index: int = -1


@dataclass(frozen=True, slots=True)
class TracedOutput:
    """Role of one output of a joint graph.

    Attributes:
        kind: ``"output"``, ``"grad"``, ``"param_mutation"``, ``"buffer_mutation"`` or
            ``"user_mutation"``.
        target: Qualified name for gradients and mutations, else "".
        index: Position among the outputs or the user's inputs.
    """

    kind: str
    target: str = ""
    index: int = -1


@dataclass(frozen=True, slots=True)
class JointTrace:
    """A functional joint forward and backward fx graph with the roles of its ends."""

    module: torch.fx.GraphModule
    inputs: tuple[TracedInput, ...]
    outputs: tuple[TracedOutput, ...]


@contextlib.contextmanager
def compiling_flag() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true while the body runs.

    Model libraries ask this flag before they branch on tensor values; without it the metadata
    pass of the export, which runs on functional tensors, takes those branches.
    """
    import torch

    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def annotate_next_nodes(*, scope: str | None = None, source: str | None = None) -> None:
    """Set the module path or source line that fx nodes created from now on carry."""
    import torch

    custom = torch.fx.traceback.get_current_meta().setdefault("custom", {})
    if scope is not None:
        custom[SCOPE_KEY] = scope
    if source is not None:
        custom[SOURCE_KEY] = source


@contextlib.contextmanager
def node_annotations() -> Iterator[None]:
    """Keep node metadata while tracing, and drop our own annotations afterwards."""
    import torch

    with torch.fx.traceback.preserve_node_meta():
        meta = torch.fx.traceback.get_current_meta()
        before = meta.get("custom")
        meta["custom"] = dict(before or {})
        try:
            yield
        finally:
            meta = torch.fx.traceback.get_current_meta()
            if before is None:
                meta.pop("custom", None)
            else:
                meta["custom"] = before


@contextlib.contextmanager
def only_the_graph() -> Iterator[None]:
    """Traces made in the body, on this thread, have no code to run and no copies of values.

    torch writes a graph out as Python code twice, and gives every node a detached copy of its
    value and a description of that. The code is made when it is asked for instead. In a functional
    graph no value changes, so that each may stand for itself.
    """
    with _lazy_code(), _values_for_themselves():
        yield


def _lazy_code() -> contextlib.AbstractContextManager[None]:
    use = _optional(_LAZY_MODULE, "_use_lazy_graph_module")
    lazy: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    return lazy if use is None else use(True)


@contextlib.contextmanager
def _values_for_themselves() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensor

    original = _optional(_PROXY_MODULE, "set_meta")
    if original is None:
        yield
        return
    thread = threading.get_ident()

    def set_meta(proxy: Any, val: Any) -> Any:
        if type(val) is not FakeTensor or threading.get_ident() != thread:
            return original(proxy, val)
        proxy.node.meta["val"] = val
        return proxy

    module: Any = importlib.import_module(_PROXY_MODULE)
    module.set_meta = set_meta
    try:
        yield
    finally:
        module.set_meta = original


def _optional(module: str, name: str) -> Any:
    """What a module calls ``name``; None where it, or the module, is not there."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def export_joint(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> JointTrace:
    """The functional joint graph of ``module(*inputs)``, which must give a flat tuple.

    Every alias of a tied parameter is an input of its own. Outputs that need no gradient have no
    tangent. Without anything that needs a gradient the graph is the forward alone.

    Args:
        module: A module whose parameters and buffers are fake tensors of one fake mode.
        inputs: Fake tensors of the same mode.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    parameters = inspect.signature(aot_export_joint_with_descriptors).parameters
    extras: dict[str, Any] = {_NO_FUNCTION_NAMES: True} if _NO_FUNCTION_NAMES in parameters else {}
    with contextlib.ExitStack() as stack, compiling_flag(), node_annotations(), only_the_graph():
        joint = aot_export_joint_with_descriptors(
            stack, module, tuple(inputs), {}, decompositions=_decompositions(), **extras
        )
    graph_module = joint.graph_module
    _refuse_effects(graph_module)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    output = graph_module.graph.output_node()
    return JointTrace(
        graph_module,
        tuple(_input_role(node.meta["desc"]) for node in placeholders),
        tuple(_output_role(desc) for desc in output.meta["desc"]),
    )


def _refuse_effects(graph_module: torch.fx.GraphModule) -> None:
    """Refuse operators that do more than give a result: torch orders them by values of its own."""
    for node in graph_module.graph.nodes:
        if str(node.target) == "with_effects":
            where = (node.meta.get("custom") or {}).get(SOURCE_KEY) or "an unknown line"
            raise CaptureError(
                f"{node.args[1]} at {where} does more than give a result (it checks values or "
                "prints), which has no place in a plan; compute it outside the model"
                + _EFFECT_REMEDIES.get(str(node.args[1]), "")
            )


_EFFECT_REMEDIES = {
    "aten._linalg_check_errors.default": ", or take the form of the function that does not check, "
    "such as torch.linalg.cholesky_ex, inv_ex or solve_ex",
}


# composite layers and losses that torch can take apart into element-wise operators and sums
_TAKEN_APART = (
    "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm",
    "native_group_norm_backward", "mse_loss", "mse_loss_backward", "smooth_l1_loss",
    "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward", "binary_cross_entropy",
    "binary_cross_entropy_backward", "binary_cross_entropy_with_logits", "soft_margin_loss",
    "soft_margin_loss_backward", "log_sigmoid_forward", "log_sigmoid_backward", "glu",
    "glu_backward", "addcmul", "addcdiv", "lerp", "_prelu_kernel", "_prelu_kernel_backward",
    "l1_loss", "addr", "addmv", "xlogy",
)  # fmt: skip


@functools.cache
def _decompositions() -> dict[Any, Any]:
    import torch
    from torch._decomp import get_decompositions

    names = [name for name in _TAKEN_APART if hasattr(torch.ops.aten, name)]
    return dict(get_decompositions([getattr(torch.ops.aten, name) for name in names]))


def _input_role(descriptor: Any) -> TracedInput:
    from torch._functorch._aot_autograd import descriptors as d

    match descriptor:
        case d.ParamAOTInput():
            return TracedInput("param", target=descriptor.target)
        case d.BufferAOTInput():
            return TracedInput("buffer", target=descriptor.target)
        case d.PlainAOTInput():
            return TracedInput("user", index=descriptor.idx)
        case d.TangentAOTInput():
            output: Any = descriptor.output
            if isinstance(output, d.InputMutationAOTOutput):
                changed = _input_role(output.mutated_input)
                raise NotImplementedError(
                    f"forward changes {changed.kind} {changed.target or changed.index} in place, "
                    "which needs a gradient; compute a new tensor instead"
                )
            return TracedInput("tangent", index=output.idx)
    raise NotImplementedError(f"graph input of kind {type(descriptor).__name__}")


def _output_role(descriptor: Any) -> TracedOutput:
    from torch._functorch._aot_autograd import descriptors as d

    match descriptor:
        case d.PlainAOTOutput():
            return TracedOutput("output", index=descriptor.idx)
        case d.GradAOTOutput():
            of = _input_role(descriptor.grad_of)
            return TracedOutput("grad", target=of.target, index=of.index)
        case d.InputMutationAOTOutput():
            of = _input_role(descriptor.mutated_input)
            return TracedOutput(f"{of.kind}_mutation", target=of.target, index=of.index)
        case None:
            return TracedOutput("none")
    raise NotImplementedError(f"graph output of kind {type(descriptor).__name__}")
