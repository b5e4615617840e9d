"""The normal form of a captured program; every rewrite keeps the numbers up to rounding.

* ``addmm`` is ``mm`` and ``add``; means and variances are sums divided by static counts;
* every transposition is ``aten.permute.default``, every change of shape ``aten.view.default``,
  chains of either are one; splits are slices; slice and select backward are pads;
* copies, detached values and casts to the same dtype are gone, empty operands of ``cat`` too;
* tensors made from numbers are ``aten.full.default`` or ``aten.arange.start_step``;
* add, sub, mul and div have one name each, ``aten.<name>.Tensor``, the second operand may be a
  number; comparisons with numbers keep ``.Scalar``;
* dropout, random numbers, batch norm, negative log likelihood and attention are the neutral
  operators of :mod:`autopar.capture.neutral`;
* attention masks that depend on no input are folded to ``causal`` or nothing, repeated key and
  value heads are folded into grouped attention (:mod:`autopar.capture.rewrites.attention`);
* a matmul whose result is only read in slices is one matmul per slice, with the slices of its
  weight and bias as inputs of their own (:mod:`autopar.capture.rewrites.fused`);
* rows sorted by expert and products of them are the neutral operators of
  :mod:`autopar.capture.moe` (:mod:`autopar.capture.rewrites.moe`);
* what no output needs is removed.

Operators are named by what they do and their position among their kind, ``mm``, ``mm_1``, ...,
in program order: a name depends on the model's structure and the presence of inputs only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from autopar.capture.mask_values import classify_masks
from autopar.capture.rewrites import arithmetic, layers, picks, sampling, strided, views
from autopar.capture.rewrites.attention import RULES as ATTENTION_RULES
from autopar.capture.rewrites.attention import fold_grouped_heads, fold_masks
from autopar.capture.rewrites.builder import Rule, rebuilt
from autopar.capture.rewrites.fused import split_fused_projections
from autopar.capture.rewrites.moe import sort_by_expert
from autopar.ir.graph import Graph, Node, Phase, Ref

_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **views.RULES,
        **picks.RULES,
        **strided.RULES,
        **arithmetic.RULES,
        **layers.RULES,
        **sampling.RULES,
        **ATTENTION_RULES,
    }
)


def normalise(graph: Graph) -> Graph:
    """The normal form of a lowered program."""
    graph = without_dead(rebuilt(graph, _RULES.get))
    graph = without_dead(fold_grouped_heads(graph))
    graph = without_dead(fold_masks(graph, classify_masks))
    graph = without_dead(split_fused_projections(graph))
    graph = without_dead(sort_by_expert(graph))
    return with_stable_names(graph)


def without_dead(graph: Graph) -> Graph:
    """``graph`` without operators that no output needs."""
    needed = {o.value.name for o in graph.outputs if o.value is not None}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in needed:
            kept.append(node)
            needed.update(node.refs())
    return replace(graph, nodes=tuple(reversed(kept)))


def with_stable_names(graph: Graph) -> Graph:
    """Operators named by kind and position; twins that are gone are forgotten."""
    counts: dict[str, int] = {}
    names: dict[str, str] = {i.name: i.name for i in graph.inputs}
    taken = set(names)
    for node in graph.nodes:
        kind = node.op.split(".")[1] if "." in node.op else node.op
        while True:
            count = counts.get(kind, 0)
            counts[kind] = count + 1
            name = f"{kind}_{count}" if count else kind
            if name not in taken:
                break
        taken.add(name)
        names[node.name] = name
    forward = {n.name for n in graph.nodes if n.phase is Phase.FORWARD}
    nodes = []
    for node in graph.nodes:
        args, kwargs = node.map_refs(lambda name: Ref(names[name]))
        twin = names[node.twin] if node.twin in forward and node.twin is not None else None
        nodes.append(replace(node, name=names[node.name], args=args, kwargs=kwargs, twin=twin))
    outputs = tuple(
        replace(o, value=None if o.value is None else Ref(names[o.value.name]))
        for o in graph.outputs
    )
    return Graph(graph.inputs, tuple(nodes), outputs)
