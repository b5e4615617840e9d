"""Attention in normal form: random keys put in, masks folded, repeated heads grouped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from autopar.capture.rewrites.builder import Builder, Rule, Value
from autopar.ir.graph import Arg, Graph, Node, Ref, TensorMeta

ATTENTION = "autopar.attention"
ATTENTION_BACKWARD = "autopar.attention_backward"
# positions of arguments in attention; those after ``v`` stand two later in its backward, which
# has ``o`` and ``lse`` there, and one more for ``do`` in front
MASK, KEY, CAUSAL, Q_START, DROPOUT_P, OP_ID = 3, 4, 5, 6, 8, 9
BACKWARD_SHIFT = 3
K, V = 1, 2


def _attention(b: Builder, node: Node) -> Value:
    args = list(node.args)
    dropout_p = args[DROPOUT_P]
    assert isinstance(dropout_p, int | float)
    if dropout_p > 0:
        args[KEY] = b.rng_key()
        args[OP_ID] = b.random_id()
    assert isinstance(node.meta, tuple)
    return b.emit_tuple(ATTENTION, args, node.meta)


def _attention_backward(b: Builder, node: Node) -> Value:
    args = list(node.args)
    picked = b.producer(args[4])  # o, a result of the forward
    assert picked is not None
    forward = b.producer(picked.args[0])
    assert forward is not None
    assert forward.op == ATTENTION, f"{node.name} reads {forward.op}"
    for position in (KEY, OP_ID):
        args[position + BACKWARD_SHIFT] = forward.args[position]
    assert isinstance(node.meta, tuple)
    need_dmask = bool(args[-1]) and args[MASK + BACKWARD_SHIFT] is not None
    args[-1] = need_dmask
    return b.emit_tuple(
        ATTENTION_BACKWARD, args, (*node.meta[:3], node.meta[3] if need_dmask else None)
    )


RULES: Mapping[str, Rule] = MappingProxyType(
    {ATTENTION: _attention, ATTENTION_BACKWARD: _attention_backward}
)


class _Edits:
    """Changes to single operators of a program, applied together."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.node_map()
        self.users = graph.users()
        self.metas = graph.metas()
        self.is_output = {o.value.name for o in graph.outputs if o.value is not None}
        self.changed: dict[str, Node] = {}
        self.replaced: dict[str, str] = {}

    def node(self, value: Arg) -> Node | None:
        """Operator of a value, with the changes made so far."""
        if not isinstance(value, Ref):
            return None
        return self.changed.get(value.name, self.nodes.get(value.name))

    def set(self, node: Node) -> None:
        """Give the operator of this name new content."""
        self.changed[node.name] = node

    def picks(self, node: Node, index: int) -> list[Node]:
        """``getitem`` operators that take result ``index``."""
        picked = (self.nodes[name] for name in self.users[node.name])
        return [n for n in picked if n.op == "getitem" and n.args[1] == index]

    def result(self) -> Graph:
        """The program after all changes."""

        def renamed(name: str) -> Arg:
            while name in self.replaced:
                name = self.replaced[name]
            return Ref(name)

        nodes = []
        for node in self.graph.nodes:
            new = self.changed.get(node.name, node)
            args, kwargs = new.map_refs(renamed)
            nodes.append(replace(new, args=args, kwargs=kwargs))
        outputs = []
        for output in self.graph.outputs:
            value = output.value
            if value is not None:
                moved = renamed(value.name)
                assert isinstance(moved, Ref)
                value = moved
            outputs.append(replace(output, value=value))
        return Graph(self.graph.inputs, tuple(nodes), tuple(outputs))


def fold_grouped_heads(graph: Graph) -> Graph:
    """Read key and value heads that were repeated for every query head from the originals.

    Before: ``k = view(expand(view(k0, (B, KV, 1, T, D)), (B, KV, n, T, D)), (B, H, T, D))``, and
    in the backward the sum of dk over the n copies. After: attention reads ``k0``, its backward
    gives dk0. The same numbers up to the order of that sum.
    """
    edits = _Edits(graph)
    for node in graph.nodes:
        if node.op == ATTENTION:
            _fold_heads_of(edits, node, _backward_of(edits, node))
    return edits.result()


def _backward_of(edits: _Edits, forward: Node) -> list[Node]:
    """Backward operators that read results of an attention operator."""
    found: dict[str, Node] = {}
    for item in edits.picks(forward, 0):
        for name in edits.users[item.name]:
            user = edits.nodes[name]
            if user.op == ATTENTION_BACKWARD and user.args[4] == Ref(item.name):
                found[name] = user
    return list(found.values())


def _fold_heads_of(edits: _Edits, forward: Node, backwards: list[Node]) -> None:
    originals = [_original(edits, forward.args[position]) for position in (K, V)]
    if any(original is None for original in originals):
        return
    shapes = [edits.metas[o.name] for o in originals if o is not None]
    heads = {meta.shape[1] for meta in shapes if isinstance(meta, TensorMeta)}
    if len(heads) != 1:
        return
    sums: list[tuple[Node, Node, Node]] = []  # gradient, its sum, backward
    for backward in backwards:
        for position in (K, V):
            for gradient in edits.picks(backward, position):
                found = _group_sums(edits, gradient, next(iter(heads)))
                if found is None:
                    return
                sums += [(gradient, total, backward) for total in found]
    first, second = originals
    assert first is not None
    assert second is not None
    edits.set(replace(forward, args=(forward.args[0], first, second, *forward.args[3:])))
    for backward in backwards:
        metas = backward.metas()
        slim = (metas[0], *(_with_heads(metas[p], next(iter(heads))) for p in (K, V)), metas[3])
        args = (*backward.args[:2], first, second, *backward.args[4:])
        edits.set(replace(backward, args=args, meta=slim))
        for position in (K, V):
            for gradient in edits.picks(backward, position):
                edits.set(replace(gradient, meta=slim[position]))
    for gradient, total, _ in sums:
        assert isinstance(total.meta, TensorMeta)
        view_args = (Ref(gradient.name), total.meta.shape)
        edits.set(replace(total, op="aten.view.default", args=view_args, kwargs=()))


def _with_heads(meta: TensorMeta | None, heads: int) -> TensorMeta | None:
    if meta is None:
        return None
    return replace(meta, shape=(meta.shape[0], heads, *meta.shape[2:]))


def _original(edits: _Edits, value: Arg) -> Ref | None:
    """What repeated heads were made from, as a value of shape (B, KV, T, D)."""
    view = edits.node(value)
    if view is None or view.op != "aten.view.default":
        return None
    expand = edits.node(view.args[0])
    if expand is None or expand.op != "aten.expand.default":
        return None
    sizes = expand.args[1]
    single = edits.node(expand.args[0])
    if not isinstance(sizes, tuple) or len(sizes) != 5 or single is None:
        return None
    if single.op != "aten.view.default" or not isinstance(single.args[0], Ref):
        return None
    source = edits.metas[single.args[0].name]
    assert isinstance(single.meta, TensorMeta)
    expected = (*sizes[:2], *sizes[3:])
    if not isinstance(source, TensorMeta) or source.shape != expected or single.meta.shape[2] != 1:
        return None
    if single.meta.shape[:2] != sizes[:2]:  # batch or heads themselves are expanded
        return None
    return single.args[0]


def _group_sums(edits: _Edits, gradient: Node, heads: int) -> list[Node] | None:
    """Sums over the copies of a head that read ``gradient``, or None if something else reads it."""
    assert isinstance(gradient.meta, TensorMeta)
    batch, all_heads, rows, width = gradient.meta.shape
    grouped = (batch, heads, all_heads // heads, rows, width)
    sums: list[Node] = []
    if gradient.name in edits.is_output:
        return None
    for name in edits.users[gradient.name]:
        view = edits.nodes[name]
        if view.op != "aten.view.default" or view.args[1] != grouped:
            return None
        for user in (edits.nodes[n] for n in edits.users[name]):
            if user.op != "aten.sum.dim_IntList" or user.args[1] != (2,) or user.kwargs:
                return None
            sums.append(user)
    return sums


MaskForm = tuple[bool, int]
"""``(causal, q_start)`` that says the same as a mask."""
Classify = Callable[[Graph, Iterable[str]], Mapping[str, MaskForm]]
"""Evaluates values of a program; the form of those that ``causal`` and ``q_start`` can say."""

_LEAVES_NO_WEIGHT = -6e4  # exp of a score below this is 0, also in double precision


def fold_masks(graph: Graph, classify: Classify) -> Graph:
    """Say masks that no input has a part in by ``causal``, where they can be said so.

    A mask may be such a value as a whole, or its sum with a bias that does depend on inputs:
    ``add(bias, fixed)`` or ``where(fixed, bias, -inf)``, or its conjunction with one,
    ``bitwise_and(fixed, padding)``; then the rest stays as the mask. The
    gradient of the bias is the same, since banned positions have none.
    """
    edits = _Edits(graph)
    free: dict[str, bool] = dict.fromkeys((i.name for i in graph.inputs), False)
    for node in graph.nodes:
        free[node.name] = all(free[name] for name in node.refs())
    parts: dict[str, tuple[str, Ref | None]] = {}  # attention -> fixed part, bias
    for node in graph.nodes:
        if node.op == ATTENTION and isinstance(node.args[MASK], Ref) and not node.args[CAUSAL]:
            found = _fixed_part(edits, node.args[MASK], free)
            if found is not None:
                parts[node.name] = found
    forms = classify(graph, {fixed for fixed, _ in parts.values()})
    for name, (fixed, bias) in parts.items():
        if fixed in forms:
            causal, q_start = forms[fixed]
            for node, shift in _both(edits, name):
                edits.set(_with_form(node, shift, bias, causal, q_start))
    for node in graph.nodes:
        if node.op == ATTENTION:
            _strip_expand(edits, node.name)
    return edits.result()


def _both(edits: _Edits, name: str) -> list[tuple[Node, int]]:
    """An attention operator and its backwards, with the shift of their arguments."""
    forward = edits.nodes[name]
    backwards = [
        (edits.changed.get(b.name, b), BACKWARD_SHIFT) for b in _backward_of(edits, forward)
    ]
    return [(edits.changed.get(name, forward), 0), *backwards]


def _fixed_part(
    edits: _Edits, mask: Arg, free: Mapping[str, bool]
) -> tuple[str, Ref | None] | None:
    """The part of a mask that depends on no input, and the rest."""
    assert isinstance(mask, Ref)
    if free[mask.name]:
        return mask.name, None
    node = edits.node(mask)
    if node is None:
        return None
    if node.op == "aten.where.self":
        fixed, bias, banned = node.args
        fill = edits.node(banned)
        value = fill.args[1] if fill is not None and fill.op == "aten.full.default" else 0
        if not isinstance(value, int | float) or value > _LEAVES_NO_WEIGHT:
            return None
    elif node.op in ("aten.add.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default"):
        first, second = node.args
        swap = isinstance(first, Ref) and free[first.name]
        fixed, bias = (first, second) if swap else (second, first)
    else:
        return None
    if not isinstance(fixed, Ref) or not free[fixed.name] or not isinstance(bias, Ref):
        return None
    metas = edits.metas
    whole, part, rest = (metas[ref.name] for ref in (mask, fixed, bias))
    assert isinstance(whole, TensorMeta)
    assert isinstance(part, TensorMeta)
    assert isinstance(rest, TensorMeta)
    # the gradient of a float mask keeps its shape only if the bias has that shape
    fits = part.shape[-2:] == whole.shape[-2:] and (rest == whole or rest.dtype == "bool")
    return (fixed.name, bias) if fits else None


def _with_form(node: Node, shift: int, mask: Ref | None, causal: bool, q_start: int) -> Node:
    args = list(node.args)
    args[MASK + shift], args[CAUSAL + shift], args[Q_START + shift] = mask, causal, q_start
    if mask is None and shift:
        args[-1] = False
    return replace(node, args=tuple(args))


def _strip_expand(edits: _Edits, name: str) -> None:
    """Read a mask before it is repeated along the batch; attention repeats it by itself."""
    both = _both(edits, name)
    expand = edits.node(both[0][0].args[MASK])
    if expand is None or expand.op != "aten.expand.default":
        return
    if any(shift and node.args[-1] for node, shift in both):  # its gradient has this shape
        return
    for node, shift in both:
        args = list(node.args)
        args[MASK + shift] = expand.args[0]
        edits.set(replace(node, args=tuple(args)))
