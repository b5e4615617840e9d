"""Which operators compute in which precision, counted and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autopar.ir.graph import Graph, Node
from autopar.ir.precision_rules import FAMILY_WORDS, VIEWS, short_name
from autopar.plan.types import Plan
from autopar.report.layout import Lines, bullets, pairs

_CAST = "aten._to_copy.default"
_PASSED_OVER = frozenset({"getitem", "aten.full.default"})
_SHOWN = 8  # kinds of operators listed by name


def describe_precision(graph: Graph) -> dict[str, str]:
    """Dtype -> operators that compute in it, such as ``"12 operators: 8 x mm, 4 x add"``.

    An operator computes in the dtype of its first floating-point result. Views and numbers are
    left out, casts counted apart.
    """
    counts: dict[str, Counter[str]] = {}
    casts = 0
    for node in graph.nodes:
        if node.op == _CAST:
            casts += 1
        elif node.op not in _PASSED_OVER and short_name(node.op) not in VIEWS:
            for dtype in _dtypes(node):
                counts.setdefault(dtype, Counter())[short_name(node.op).split(".")[-1]] += 1
    words = {dtype: _listed(counts[dtype]) for dtype in sorted(counts)}
    return words | ({"casts": f"{casts} between them"} if casts else {})


def _dtypes(node: Node) -> Iterator[str]:
    found = (m.dtype for m in node.metas() if m is not None and m.is_float)
    first = next(found, None)
    if first is not None:
        yield first


def _listed(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{count} x {kind}" for kind, count in ordered[:_SHOWN])
    rest = len(ordered) - _SHOWN
    more = f" and {rest} more kind{'s' if rest > 1 else ''}" if rest > 0 else ""
    return f"{sum(counts.values())} operators: {shown}{more}"


def precision_lines(plan: Plan, width: int) -> Lines:
    """The section of the report: the rule, and what it came to."""
    rule = [f"{words}" for words in FAMILY_WORDS.values()]
    rule.append("parameters, gradients and optimizer state: in float32; buffers keep their dtype")
    return [*bullets(rule, width), "", *pairs(plan.precision_words.items(), width)]
