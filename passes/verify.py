"""Check an emitted module, node by node, against the program that was decided."""

from __future__ import annotations

import torch
from torch import fx

from autopar.errors import PassError
from autopar.ir.graph import Meta, TensorMeta
from passes.base import NAME_KEY, VALUE_KEY, PassContext


def verify(module: fx.GraphModule, ctx: PassContext) -> None:
    """Raise unless the module is well-formed and every value has the decided shape and dtype.

    Nodes that the source does not have are checked for form only. The module must keep the
    source's inputs, in order, and its number of outputs.

    Raises:
        PassError: Names the program, the node, and both shapes.
    """
    module.graph.lint()
    metas = ctx.source.metas()
    inputs = [n.meta[NAME_KEY] for n in module.graph.find_nodes(op="placeholder")]
    expected = [i.name for i in ctx.source.inputs]
    if inputs != expected:
        raise PassError(f"{ctx.program}: the inputs are {inputs}, decided were {expected}")
    for node in module.graph.nodes:
        name = node.meta.get(NAME_KEY)
        if node.op != "call_function" or name not in metas:
            continue
        if VALUE_KEY not in node.meta:
            raise PassError(f"{ctx.program}: {name} has no meta[{VALUE_KEY!r}]; run propagate")
        found, decided = node.meta[VALUE_KEY], metas[name]
        if not _agrees(found, decided):
            raise PassError(
                f"{ctx.program}: {name} = {node.target} yields {_text(found)}, "
                f"decided was {_meta_text(decided)}"
            )
    results = module.graph.output_node().args[0]
    count = len(results) if isinstance(results, tuple | list) else 1
    if count != len(ctx.source.outputs):
        raise PassError(
            f"{ctx.program}: the module yields {count} values, decided were "
            f"{len(ctx.source.outputs)}"
        )


def _agrees(found: object, decided: Meta) -> bool:
    if isinstance(decided, tuple):
        if not isinstance(found, tuple | list) or len(found) != len(decided):
            return False
        return all(m is None or _agrees(f, m) for f, m in zip(found, decided, strict=True))
    if decided is None:
        return not isinstance(found, torch.Tensor)
    return isinstance(found, torch.Tensor) and _text(found) == _meta_text(decided)


def _text(found: object) -> str:
    if isinstance(found, torch.Tensor):
        return f"{str(found.dtype).removeprefix('torch.')}[{', '.join(map(str, found.shape))}]"
    if isinstance(found, tuple | list):
        return f"({', '.join(map(_text, found))})"
    return str(found)


def _meta_text(decided: Meta) -> str:
    if isinstance(decided, TensorMeta):
        return str(decided)
    if isinstance(decided, tuple):
        return f"({', '.join(map(_meta_text, decided))})"
    return "an integer"
