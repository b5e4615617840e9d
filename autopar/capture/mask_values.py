"""The value of an attention mask that depends on no input, and what it says.

A mask of a long sequence is large, and models repeat it along the batch. Element-wise operators
are therefore evaluated on one copy along dims that are only repeated. Other operators (``cat``,
``cumsum``) write such copies out; what they give is looked through for dims of equal slices while
it is still small, before a comparison makes a square of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.capture.rewrites.builder import broadcast
from autopar.capture.torch_ops import to_torch, torch_callable
from autopar.ir.graph import Graph

# below this an added number leaves no weight: exp underflows to 0 in double precision too
_BANNED_BELOW = -6e4
_ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "eq.Scalar", "eq.Tensor",
        "ne.Scalar", "ne.Tensor", "lt.Scalar", "lt.Tensor", "le.Scalar", "le.Tensor",
        "gt.Scalar", "gt.Tensor", "ge.Scalar", "ge.Tensor", "bitwise_and.Tensor",
        "bitwise_or.Tensor", "bitwise_not.default", "logical_and.default", "logical_or.default",
        "logical_not.default", "logical_xor.default", "where.self", "masked_fill.Scalar",
        "_to_copy.default", "neg.default", "abs.default", "minimum.default", "maximum.default",
    )
)  # fmt: skip


def classify_masks(graph: Graph, masks: Iterable[str]) -> dict[str, tuple[bool, int]]:
    """``(causal, q_start)`` of those masks that a causal form or no mask at all can say.

    Args:
        graph: The program.
        masks: Names of values that depend on no input.
    """
    forms = {name: _form(value) for name, value in _evaluate(graph, set(masks)).items()}
    return {name: form for name, form in forms.items() if form is not None}


def _evaluate(graph: Graph, wanted: set[str]) -> dict[str, torch.Tensor]:
    needed = set(wanted)
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(node.refs())
    values: dict[str, object] = {}
    uses: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in needed:
            for name in set(node.refs()):
                uses[name] = uses.get(name, 0) + 1
    with torch.no_grad():
        for node in graph.nodes:
            if node.name not in needed:
                continue
            args = [to_torch(a, values.__getitem__) for a in node.args]
            kwargs = {k: to_torch(a, values.__getitem__) for k, a in node.kwargs}
            if node.op in _ELEMENTWISE:
                values[node.name] = _elementwise(node.op, args, kwargs)
            else:
                function = torch_callable(node.op, device=torch.device("cpu"))
                values[node.name] = _as_repeats(function(*args, **kwargs))
            for name in set(node.refs()):
                uses[name] -= 1
                if uses[name] == 0 and name not in wanted:
                    del values[name]
    result: dict[str, torch.Tensor] = {}
    for name in wanted:
        value = values[name]
        assert isinstance(value, torch.Tensor)
        result[name] = value
    return result


def _as_repeats(value: object) -> object:
    """The same value, as a view of one slice along each dim but the last whose slices are equal."""
    if not isinstance(value, torch.Tensor):
        return value
    for dim in range(value.dim() - 1):
        if value.shape[dim] > 1 and value.stride(dim) != 0:
            first = value.narrow(dim, 0, 1)
            if bool((value == first).all()):
                value = first.expand(value.shape)
    return value


def _elementwise(op: str, args: list[object], kwargs: dict[str, object]) -> torch.Tensor:
    """The operator on one copy of dims that every operand only repeats."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    shape: tuple[int, ...] = ()
    for tensor in tensors:
        shape = broadcast(shape, tensor.shape)
    wide = [t.expand(shape) for t in tensors]
    repeated = [d for d in range(len(shape)) if all(w.stride(d) == 0 for w in wide)]
    slim = []
    for tensor in wide:
        for dim in repeated:
            if shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        slim.append(tensor)
    rest = iter(slim)
    taken = [next(rest) if isinstance(a, torch.Tensor) else a for a in args]
    out = torch_callable(op)(*taken, **kwargs)
    assert isinstance(out, torch.Tensor)
    return out.expand(shape)


def _form(mask: torch.Tensor) -> tuple[bool, int] | None:
    """``(causal, q_start)`` that says the same as a mask, or None."""
    allowed = _allowed(_without_repeats(mask))
    if allowed is None:
        return None
    if bool(allowed.all()):
        return False, 0
    rows, columns = allowed.shape[-2:]
    if allowed.numel() != rows * columns:
        return None
    allowed = allowed.reshape(rows, columns)
    offset = int(allowed[0].sum()) - 1
    if offset < 0:
        return None
    if torch.equal(allowed, torch.ones_like(allowed).tril_(offset)):
        return True, offset
    return None


def _without_repeats(mask: torch.Tensor) -> torch.Tensor:
    for dim in range(mask.dim() - 2):
        if mask.shape[dim] > 1:
            first = mask.narrow(dim, 0, 1)
            if mask.stride(dim) == 0 or bool((mask == first).all()):
                mask = first
    return mask


def _allowed(mask: torch.Tensor) -> torch.Tensor | None:
    if mask.dim() < 2:
        mask = mask.expand(1, *mask.shape) if mask.dim() else mask.expand(1, 1)
    if mask.dtype == torch.bool:
        return mask
    allowed = mask == 0
    if bool((allowed | (mask < _BANNED_BELOW)).all()):
        return allowed
    return None
