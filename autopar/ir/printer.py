"""The text of a program: stable, one line per input, operator and output.

::

    input  p_weight: float32[4, 8] = param 'weight'
    %mm: float32[2, 4] = aten.mm.default(%x, %permute)
    output loss 'loss' = %div
"""

from __future__ import annotations

from autopar.ir.graph import Arg, Dtype, Graph, Input, Meta, Node, Output, Phase, Ref


def print_graph(graph: Graph, *, details: bool = False) -> str:
    """Text of ``graph``.

    Args:
        graph: The program.
        details: Add scope, twin and source to each operator.
    """
    lines = [format_input(entry) for entry in graph.inputs]
    lines += [format_node(node, details=details) for node in graph.nodes]
    lines += [format_output(output) for output in graph.outputs]
    return "\n".join(lines)


def format_input(entry: Input) -> str:
    """Text of one input."""
    notes = " trainable" if entry.requires_grad else ""
    if entry.aliases:
        notes += f" aliases={list(entry.aliases)}"
    if entry.master:
        notes += f" master={entry.master}"
    return f"input  {entry.name}: {format_meta(entry.meta)} = {entry.kind} {entry.target!r}{notes}"


def format_node(node: Node, *, details: bool = False) -> str:
    """Text of one operator; backward operators are marked with ``<``."""
    args = [format_arg(a) for a in node.args]
    args += [f"{key}={format_arg(value)}" for key, value in node.kwargs]
    mark = "<" if node.phase is Phase.BACKWARD else ""
    text = f"{mark}%{node.name}: {format_meta(node.meta)} = {node.op}({', '.join(args)})"
    if details:
        notes = [f"scope={node.scope}"] if node.scope else []
        notes += [f"twin={node.twin}"] if node.twin else []
        notes += [f"origin={node.origin}"] if node.origin else []
        notes += [node.source] if node.source else []
        text += f"  # {' '.join(notes)}" if notes else ""
    return text


def format_output(output: Output) -> str:
    """Text of one output."""
    return f"output {output.kind} {output.target!r} = {output.value}"


def format_meta(meta: Meta) -> str:
    """Such as ``float32[4, 8]``, or ``(float32[4], None)`` for several results."""
    if isinstance(meta, tuple):
        return f"({', '.join(map(str, meta))})"
    return "int" if meta is None else str(meta)


def format_arg(arg: Arg) -> str:
    """Text of an argument; floats in full precision."""
    if isinstance(arg, tuple):
        return f"[{', '.join(map(format_arg, arg))}]"
    if isinstance(arg, Ref | Dtype):
        return str(arg)
    return repr(arg)
