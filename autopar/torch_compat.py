"""Every private name of torch that autopar uses, behind functions of our own.

Checked with torch 2.11 to 2.14. torch is imported inside the functions: importing this module
costs nothing, so the torch-free layers may sit beside it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SCOPE_KEY = "autopar_scope"
SOURCE_KEY = "autopar_source"


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


@dataclass(frozen=True, slots=True)
class SchemaArgument:
    """One argument of an operator's schema."""

    name: str
    keyword_only: bool
    default: object


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """Name and arguments of a torch operator.

    Attributes:
        namespace: Such as ``"aten"``.
        name: Such as ``"mm"``.
        overload: Such as ``"default"``.
        arguments: In schema order.
        random: Whether torch tags it as drawing random numbers.
    """

    namespace: str
    name: str
    overload: str
    arguments: tuple[SchemaArgument, ...]
    random: bool


@functools.cache
def operator_schema(target: object) -> OperatorSchema | None:
    """Schema of what an fx node calls, or None if that is no torch operator."""
    import torch

    overload: Any = target
    if not isinstance(overload, torch._ops.OpOverload):
        return None
    return OperatorSchema(
        overload.namespace,
        overload._opname,
        overload._overloadname,
        tuple(
            SchemaArgument(a.name, a.kwarg_only, a.default_value if a.has_default_value() else None)
            for a in overload._schema.arguments
        ),
        torch.Tag.nondeterministic_seeded in overload.tags,
    )


def state_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps its own parameters and buffers."""
    return module._parameters, module._buffers


def fake_mode() -> Any:
    """A new fake-tensor mode; plain tensors hidden in attributes of a model are tolerated."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """Exceptions by which tracing reports a value that only a real run would know."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )


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


@contextlib.contextmanager
def no_mkldnn() -> Iterator[None]:
    """Keep operators that exist only in the CPU's oneDNN library (whole LSTMs) out of a trace."""
    import torch

    # torch.backends.mkldnn.flags sets TF32 as well, which warns on every use
    binding: Any = torch._C
    before = binding._get_mkldnn_enabled()
    binding._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        binding._set_mkldnn_enabled(before)


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


def export_joint(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> JointTrace:
    """The functional joint graph of ``module(*inputs)``, which must give a flat tuple.

    Every alias of a tied parameter is an input of its own. Outputs that need no gradient have no
    tangent. Without anything that needs a gradient the graph is the forward alone.

    Args:
        module: A module whose parameters and buffers are fake tensors of one fake mode.
        inputs: Fake tensors of the same mode.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack, compiling_flag(), node_annotations():
        joint = aot_export_joint_with_descriptors(
            stack, module, tuple(inputs), {}, decompositions=_decompositions()
        )
    graph_module = joint.graph_module
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    output = graph_module.graph.output_node()
    return JointTrace(
        graph_module,
        tuple(_input_role(node.meta["desc"]) for node in placeholders),
        tuple(_output_role(desc) for desc in output.meta["desc"]),
    )


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


def grouped_mm_builtin() -> Any:
    """The function that ``torch.nn.functional.grouped_mm`` calls; None where there is none."""
    import torch

    return getattr(torch, "_grouped_mm", None)


def total_norm_helper() -> Any:
    """The function that ``torch.nn.utils.clip_grad_norm_`` looks up to compute the norm."""
    from torch.nn.utils import clip_grad

    return clip_grad._get_total_norm


def replace_total_norm_helper(helper: Any) -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` call ``helper`` instead.

    The function is looked up in its module when it is called: whoever imported
    ``clip_grad_norm_`` earlier gets the new helper too.
    """
    import torch
    from torch.nn.utils import clip_grad

    clip_grad._get_total_norm = helper
    torch.nn.utils.get_total_norm = helper


def watch_optimizers(observer: Any, fill: Any) -> Any:
    """Call ``observer(optimizer)`` after an optimizer was given a parameter group.

    torch has no hook for the birth of an optimizer, and refuses an empty list of parameters: such
    an optimizer is given what ``fill()`` returns, if that is not None.

    Returns:
        The function that ends the watch.
    """
    from torch.optim.optimizer import Optimizer

    methods: Any = Optimizer
    watchers = getattr(methods, "autopar_watchers", None)
    if watchers is None:
        watchers = methods.autopar_watchers = []
        add_param_group, init = methods.add_param_group, methods.__init__

        @functools.wraps(add_param_group)
        def watched_add(self: Any, param_group: dict[str, Any]) -> None:
            add_param_group(self, param_group)
            for watch, _ in tuple(watchers):
                watch(self)

        @functools.wraps(init)
        def watched_init(self: Any, params: Any, defaults: dict[str, Any]) -> None:
            if hasattr(params, "__iter__") and not hasattr(params, "shape"):
                params = list(params)
                fillers = [filler() for _, filler in watchers] if not params else []
                params.extend([found for found in fillers if found is not None][:1])
            init(self, params, defaults)

        methods.add_param_group, methods.__init__ = watched_add, watched_init
    entry = (observer, fill)
    watchers.append(entry)
    return lambda: watchers.remove(entry)
