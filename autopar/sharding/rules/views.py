"""Operators that rearrange, cut, join or repeat: every element of the result is one of an operand.

All of them are linear. A view is a split or merge of factors: ``(b*s, f) -> (b, s, f)``; a merged
dim splits on its outermost factor only. Dims that are cut, padded or joined are whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd, prod

from autopar.errors import ShardingError
from autopar.sharding.rules.call import Naming, OpCall, Rule, normal_dim
from autopar.sharding.signature import Dims, OpSignature


def factorise(before: Sequence[int], after: Sequence[int], naming: Naming) -> tuple[Dims, Dims]:
    """Factors that explain a view from shape ``before`` to shape ``after``.

    Both shapes are read from the outermost dim in. Where the sizes that are left divide one
    another they share a factor; where they do not, their greatest common divisor is shared and
    the rest is whole up to the next dims at which both shapes agree again.

    Args:
        before: Shape of the operand.
        after: Shape of the result, with as many elements.
        naming: Receives the factors.

    Raises:
        ShardingError: The numbers of elements differ.

    >>> naming = Naming()
    >>> factorise((8, 6), (2, 4, 6), naming)
    ((('f0', 'f1'), ('f2',)), (('f0',), ('f1',), ('f2',)))
    """
    if prod(before) != prod(after):
        raise ShardingError(
            f"a view from {list(before)} to {list(after)} has {prod(before)} elements on one side "
            f"and {prod(after)} on the other; it must keep their number"
        )
    sides = (_Side(before, "x"), _Side(after, "y"))
    if 0 in before:
        return tuple(() for _ in before), tuple(() for _ in after)
    count = 0
    while True:
        left, right = (side.left() for side in sides)
        if left == 1 and right == 1:
            return sides[0].dims(), sides[1].dims()
        common = gcd(left, right)
        if common > 1:
            names = naming.dim(f"f{count}", common)
            count += 1
            for side in sides:
                side.take(names, common)
        if common not in (left, right):
            _close(sides, naming)


def _close(sides: tuple[_Side, _Side], naming: Naming) -> None:
    """Take whole factors until both shapes agree again."""
    products = [side.rest(naming) for side in sides]
    while products[0] != products[1]:
        behind = products.index(min(products))
        products[behind] *= sides[behind].rest(naming)


class _Side:
    """One shape of a view while it is read from the outermost dim in."""

    def __init__(self, shape: Sequence[int], prefix: str) -> None:
        self._shape = tuple(shape)
        self._prefix = prefix
        self._found: list[tuple[str, ...]] = []
        self._left = 1

    def left(self) -> int:
        """Elements of the current dim that no factor explains; 1 at the end of the shape."""
        while self._left == 1 and len(self._found) < len(self._shape):
            self._left = self._shape[len(self._found)]
            self._found.append(())
        return self._left

    def take(self, names: tuple[str, ...], size: int) -> None:
        """Explain a factor of the current dim."""
        self._found[-1] += names
        self._left //= size

    def rest(self, naming: Naming) -> int:
        """Explain all that is left of the current dim by a whole factor; its size."""
        size = self.left()
        self.take(naming.dim(f"{self._prefix}{len(self._found) - 1}", size, whole=True), size)
        return size

    def dims(self) -> Dims:
        """Factors of every dim."""
        return (*self._found, *(() for _ in self._shape[len(self._found) :]))


def _alone(dims: Dims) -> set[str]:
    """Factors that are the only one of their dim."""
    return {names[0] for names in dims if len(names) == 1}


def _view(call: OpCall) -> OpSignature:
    """``view(x, sizes)``."""
    naming = Naming()
    before, after = factorise(call.shape(0), call.result_shape(), naming)
    return naming.build(
        [before],
        [after],
        linear=call.linear_positions((0,)),
        padded=(_alone(before) & _alone(after)) - naming.whole,
        shape_arg=1,
        free=True,
    )


def _permute(call: OpCall) -> OpSignature:
    """``permute(x, dims)``."""
    naming = Naming()
    dims = naming.dims(call.shape(0))
    order = call.integers(1) or ()
    return naming.build(
        [dims],
        [tuple(dims[normal_dim(d, len(dims))] for d in order)],
        linear=call.linear_positions((0,)),
        padded=naming.sizes,
        free=True,
    )


def _expand(call: OpCall) -> OpSignature:
    """``expand(x, sizes)``: a dim that is expanded splits with x whole."""
    naming = Naming()
    shape, target = call.shape(0), call.result_shape()
    outputs = naming.dims(target)
    shift = len(target) - len(shape)
    inputs = tuple(
        outputs[i + shift] if size == target[i + shift] else () for i, size in enumerate(shape)
    )
    return naming.build(
        [inputs],
        [outputs],
        linear=call.linear_positions((0,)),
        padded=naming.sizes,
        shape_arg=1,
        free=True,
    )


def _cut(
    call: OpCall,
    dims: Iterable[int],
    *,
    shape_arg: int | None = None,
    linear: bool = True,
    free: bool = False,
) -> OpSignature:
    """An operand and a result of one rank that differ along ``dims``, which are whole.

    Dims that keep their size are taken as unchanged even if they are listed: a slice that takes
    all of a dim takes all of a part.
    """
    naming = Naming()
    shape, target = call.shape(0), call.result_shape()
    changed = {d for d in (normal_dim(d, len(shape)) for d in dims) if shape[d] != target[d]}
    inputs = tuple(
        naming.dim(f"x{i}" if i in changed else f"d{i}", size, whole=i in changed)
        for i, size in enumerate(shape)
    )
    outputs = tuple(
        naming.dim(f"y{i}" if i in changed else f"d{i}", size, whole=i in changed)
        for i, size in enumerate(target)
    )
    return naming.build(
        [inputs],
        [outputs],
        linear=call.linear_positions((0,)) if linear else (),
        padded=naming.sizes.keys() - naming.whole,
        shape_arg=shape_arg,
        free=free,
    )


def _slice(call: OpCall) -> OpSignature:
    """``slice(x, dim, start, end, step)``."""
    return _cut(call, (call.integer(1, 0),), free=True)


def _slice_backward(call: OpCall) -> OpSignature:
    """``slice_backward(dy, sizes, dim, start, end, step)``."""
    return _cut(call, (call.integer(2),), shape_arg=1)


def _pad(call: OpCall) -> OpSignature:
    """``constant_pad_nd(x, pad, value)``; pad lists (before, after) from the last dim in.

    A dim with an equal cut and growth keeps its size and still moves: it is whole.
    """
    pad = call.integers(1) or ()
    rank = len(call.shape(0))
    moved = [rank - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]]
    naming = Naming()
    inputs = tuple(
        naming.dim(f"x{i}" if i in moved else f"d{i}", size, whole=i in moved)
        for i, size in enumerate(call.shape(0))
    )
    outputs = tuple(
        naming.dim(f"y{i}" if i in moved else f"d{i}", size, whole=i in moved)
        for i, size in enumerate(call.result_shape())
    )
    return naming.build(
        [inputs],
        [outputs],
        linear=call.linear_positions((0,)) if call.arg(2, 0) == 0 else (),
        padded=naming.sizes.keys() - naming.whole,
    )


def _select(call: OpCall) -> OpSignature:
    """``select(x, dim, index)``: the dim goes away."""
    naming = Naming()
    dim = normal_dim(call.integer(1), len(call.shape(0)))
    dims = naming.dims(call.shape(0), whole=(dim,))
    return naming.build(
        [dims],
        [dims[:dim] + dims[dim + 1 :]],
        linear=call.linear_positions((0,)),
        padded=naming.sizes.keys() - naming.whole,
        free=True,
    )


def _select_backward(call: OpCall) -> OpSignature:
    """``select_backward(dy, sizes, dim, index)``: zeros but for one index of the dim."""
    naming = Naming()
    target = call.result_shape()
    dim = normal_dim(call.integer(2), len(target))
    dims = naming.dims(target, whole=(dim,))
    return naming.build(
        [dims[:dim] + dims[dim + 1 :]],
        [dims],
        linear=call.linear_positions((0,)),
        padded=naming.sizes.keys() - naming.whole,
        shape_arg=1,
    )


def _slice_scatter(call: OpCall) -> OpSignature:
    """``slice_scatter(x, src, dim, start, end, step)``: x with a slice replaced."""
    naming = Naming()
    shape = call.shape_at(0)
    dim = normal_dim(call.integer(2, 0), len(shape))
    dims = naming.dims(shape, whole=(dim,))
    length = call.shape_at(1)[dim]
    source = (*dims[:dim], naming.dim("src", length, whole=True), *dims[dim + 1 :])
    return naming.build(
        [dims, source],
        [dims],
        linear=call.linear_positions((0, 1)),
        padded=naming.sizes.keys() - naming.whole,
    )


def _select_scatter(call: OpCall) -> OpSignature:
    """``select_scatter(x, src, dim, index)``: x with one index of the dim replaced."""
    naming = Naming()
    shape = call.shape_at(0)
    dim = normal_dim(call.integer(2), len(shape))
    dims = naming.dims(shape, whole=(dim,))
    return naming.build(
        [dims, dims[:dim] + dims[dim + 1 :]],
        [dims],
        linear=call.linear_positions((0, 1)),
        padded=naming.sizes.keys() - naming.whole,
    )


def _cat(call: OpCall) -> OpSignature:
    """``cat(tensors, dim)``.

    Legacy empty operands, which torch skips, join nothing; a dim along which one operand is left
    is not joined either.
    """
    naming = Naming()
    target = call.result_shape()
    dim = normal_dim(call.integer(1, 0), len(target))
    real = [n for n in range(len(call.operands)) if call.shape(n) != (0,) or len(target) == 1]
    outputs = naming.dims(target, whole=(dim,) if len(real) > 1 else ())
    inputs: list[Dims | None] = []
    for number in range(len(call.operands)):
        shape = call.shape(number)
        if number not in real:
            inputs.append(((),))
        elif len(real) == 1:
            inputs.append(outputs)
        else:
            along = naming.dim(f"x{number}", shape[dim], whole=True)
            inputs.append((*outputs[:dim], along, *outputs[dim + 1 :]))
    return naming.build(
        inputs,
        [outputs],
        linear=(frozenset(real),) if call.may_be_linear(real) else (),
        padded=naming.sizes.keys() - naming.whole,
    )


def _stack(call: OpCall) -> OpSignature:
    """``stack(tensors, dim)``: the new dim is whole."""
    naming = Naming()
    target = call.result_shape()
    dim = normal_dim(call.integer(1, 0), len(target))
    outputs = naming.dims(target, whole=(dim,))
    everything = frozenset(range(len(call.operands)))
    return naming.build(
        [outputs[:dim] + outputs[dim + 1 :] for _ in call.operands],
        [outputs],
        linear=(everything,) if call.may_be_linear(everything) else (),
        padded=naming.sizes.keys() - naming.whole,
    )


def _repeat(call: OpCall) -> OpSignature:
    """``repeat(x, repeats)``: dims that are repeated once split, the others are whole."""
    naming = Naming()
    repeats, shape = call.integers(1) or (), call.shape(0)
    shift = len(repeats) - len(shape)
    inputs = tuple(
        naming.dim(f"d{i + shift}", size, whole=repeats[i + shift] != 1)
        for i, size in enumerate(shape)
    )
    outputs: list[tuple[str, ...]] = []
    for i, count in enumerate(repeats):
        inner = inputs[i - shift] if i >= shift else ()
        outputs.append(naming.dim(f"r{i}", count, whole=True) + inner)
    return naming.build(
        [inputs],
        [tuple(outputs)],
        linear=call.linear_positions((0,)),
        padded=naming.sizes.keys() - naming.whole,
    )


def _moved_dims(call: OpCall) -> OpSignature:
    """``flip(x, dims)`` and ``roll(x, shifts, dims)``: the dims named are whole."""
    naming = Naming()
    rank = len(call.shape(0))
    position = 2 if call.op == "aten.roll.default" else 1
    moved = call.integers(position) or tuple(range(rank))
    dims = naming.dims(call.shape(0), whole=[normal_dim(d, rank) for d in moved])
    return naming.build(
        [dims],
        [dims],
        linear=call.linear_positions((0,)),
        padded=naming.sizes.keys() - naming.whole,
    )


RULES: Mapping[str, Rule] = {
    "aten.view.default": _view,
    "aten.permute.default": _permute,
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select.int": _select,
    "aten.select_backward.default": _select_backward,
    "aten.select_scatter.default": _select_scatter,
    "aten.constant_pad_nd.default": _pad,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.repeat.default": _repeat,
    "aten.flip.default": _moved_dims,
    "aten.roll.default": _moved_dims,
}
"""Rules by operator name."""
