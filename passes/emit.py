"""Write a decided program as an ``fx.GraphModule``: one fx node per operator, nothing decided here.

Names are kept in ``node.meta["autopar_name"]`` (fx renames what it likes). Three translations:
dtypes become ``torch.dtype``, factories get the device, and ``aten.view.default`` runs as a
reshape, since the layout of a local tensor after a collective is not the one that was captured.

:func:`propagate` puts fake values in ``node.meta["val"]``. Equal operators on equal operands are
evaluated once: a model of eighty equal layers costs one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.capture.torch_ops import FACTORIES, torch_callable, torch_dtype
from autopar.errors import PassError
from autopar.ir.graph import Arg, Dtype, Graph, Node, Ref, TensorMeta
from autopar.sharding.host_copies import TO_DEVICE
from autopar.torch_compat import fake_mode
from passes.base import NAME_KEY, VALUE_KEY, PassContext
from passes.comm_ops import COMM_NAMES, COMM_OPS, result_shape
from passes.local_ops import LOCAL_OPS

FxArg: TypeAlias = (
    "bool | int | float | str | fx.Node | torch.dtype | list[FxArg] | tuple[FxArg, ...] | None"
)


def emit(graph: Graph, ctx: PassContext) -> fx.GraphModule:
    """The program as an fx module with one placeholder per input and a flat tuple of results.

    An output without a value yields None. ``meta["val"]`` is set on every node.

    Raises:
        PassError: An operator has no implementation, or an argument refers to nothing.
    """
    target_graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for item in graph.inputs:
        node = target_graph.placeholder(fx_name(item.name))
        node.meta[NAME_KEY] = item.name
        values[item.name] = node
    for source in graph.nodes:
        values[source.name] = _emit_node(target_graph, source, values, ctx)
    results = tuple(None if o.value is None else values[o.value.name] for o in graph.outputs)
    target_graph.output(results)
    module = fx.GraphModule(torch.nn.Module(), target_graph)
    propagate(module, ctx)
    return module


def fx_name(name: str) -> str:
    """A Python identifier for a value's name."""
    text = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return text if text[:1].isalpha() else f"v_{text}"


def implementation(op: str) -> Callable[..., object]:
    """What runs an operator.

    Raises:
        PassError: Nothing does.
    """
    if op in COMM_OPS:
        return COMM_OPS[op]
    try:
        return LOCAL_OPS[op] if op.startswith("local.") else torch_callable(op)
    except KeyError as error:
        raise PassError(
            f"operator {op!r} has no torch implementation; add one to capture/torch_ops.py "
            "or passes/local_ops.py"
        ) from error


def _emit_node(
    target_graph: fx.Graph, source: Node, values: dict[str, fx.Node], ctx: PassContext
) -> fx.Node:
    target = implementation(source.op)

    def translate(arg: Arg) -> FxArg:
        if isinstance(arg, Ref):
            if arg.name not in values:
                raise PassError(
                    f"{ctx.program}: {source.name} reads {arg}, which is not defined yet"
                )
            return values[arg.name]
        if isinstance(arg, Dtype):
            return torch_dtype(arg.name)
        if isinstance(arg, tuple):
            return [translate(item) for item in arg]
        return arg

    args = tuple(translate(arg) for arg in source.args)
    kwargs = {key: translate(value) for key, value in source.kwargs}
    if source.op in FACTORIES or source.op == TO_DEVICE:
        kwargs["device"] = ctx.device  # type: ignore[assignment]  # fx accepts devices
    node = target_graph.create_node("call_function", target, args, kwargs, fx_name(source.name))  # type: ignore[arg-type]
    node.meta[NAME_KEY] = source.name
    return node


def propagate(module: fx.GraphModule, ctx: PassContext) -> None:
    """Set ``meta["val"]`` of every node: a fake tensor, a tuple of them, or an example integer.

    Raises:
        PassError: An operator refuses its operands' shapes or dtypes.
    """
    declared = {i.name: i.meta for i in ctx.source.inputs}
    mode = fake_mode()
    seen: dict[tuple[object, ...], object] = {}
    with mode, torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "placeholder":
                meta = declared[node.meta[NAME_KEY]]
                node.meta[VALUE_KEY] = 0 if meta is None else _empty(meta, ctx.device)
            elif node.op == "call_function":
                key = _signature(node)
                if key not in seen:
                    seen[key] = _evaluate(node, ctx)
                node.meta[VALUE_KEY] = seen[key]


def _empty(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=torch_dtype(meta.dtype), device=device)


def _signature(node: fx.Node) -> tuple[object, ...]:
    """Key under which two nodes yield the same fake value."""

    def of(value: object) -> object:
        if isinstance(value, fx.Node):
            return of(value.meta[VALUE_KEY])
        if isinstance(value, torch.Tensor):
            return ("tensor", tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, list | tuple):
            return (type(value), *map(of, value))
        return (type(value), value)  # 1, 1.0 and True are equal but not the same argument

    kwargs = tuple((key, of(value)) for key, value in node.kwargs.items())
    return (node.target, of(node.args), kwargs)


def _evaluate(node: fx.Node, ctx: PassContext) -> object:
    args: list[object] = [map_arg(a, lambda n: n.meta[VALUE_KEY]) for a in node.args]
    kwargs = map_arg(node.kwargs, lambda n: n.meta[VALUE_KEY])
    if not callable(node.target):
        raise PassError(f"{ctx.program}: {node.meta[NAME_KEY]} has no function to call")
    if node.target in COMM_NAMES:
        tensor, *rest = args
        if not isinstance(tensor, torch.Tensor):
            raise PassError(f"{ctx.program}: {node.meta[NAME_KEY]} communicates no tensor")
        kind = COMM_NAMES[node.target]
        shape = result_shape(kind, tuple(tensor.shape), tuple(rest), ctx.axis_sizes)
        return tensor.new_empty(shape)
    try:
        return node.target(*args, **kwargs)
    except Exception as error:
        raise PassError(
            f"{ctx.program}: {node.meta[NAME_KEY]} = {node.target} refuses its operands "
            f"{[_shape_text(a) for a in args]}: {error}"
        ) from error


def _shape_text(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return value
