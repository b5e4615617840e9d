"""Blocks of random models that reduce, order and move elements."""

from __future__ import annotations

from tests.equivalence.model_block import Block, at_least, kept_batch, numel, without_dims
from tests.equivalence.model_generator import MAX_ELEMENTS, MAX_RANK, Builder, Value

# -- reductions, scans and orders ------------------------------------------------------------------


def _reduce(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    dims = (dim,)
    if v.rank > 2 and b.flag(0.3):
        dims = tuple(sorted({dim, b.dim(v)}))
    keep = b.flag()
    at = dims[0] if len(dims) == 1 else dims
    kind = b.pick(["mean", "sum", "var", "logsumexp", "norm", "amax", "amin", "max", "prod", "std"])
    name, batch = v.name, without_dims(v, dims)
    if keep:
        batch = None if v.batch in dims else v.batch
    if kind in ("amax", "amin"):
        reduced = f"{b.distinct(v, *dims)}.{kind}({at}, keepdim={keep})"
    elif kind == "max":
        reduced = f"{b.distinct(v, *dims)}.max({dims[0]}, keepdim={keep}).values"
    elif kind == "prod":
        reduced = f"(1 + 0.3 * {name}.tanh()).prod({dims[0]}, keepdim={keep})"
    elif kind == "norm":
        reduced = f"torch.linalg.vector_norm({name} + 2.0, 2, {at}, keepdim={keep})"
    elif kind in ("var", "std"):
        count = 1
        for d in dims:
            count *= v.shape[d]
        correction = 1 if count > 1 and b.flag() else 0
        if kind == "std":  # its slope is infinite at zero
            name = b.distinct(v, *dims) if count > 1 else None
        kind = kind if name else "var"
        reduced = f"({name or v.name}).{kind}({at}, correction={correction}, keepdim={keep})"
    else:
        reduced = f"{name}.{kind}({at}, keepdim={keep})"
    if kind in ("max", "prod") and len(dims) == 2:
        batch = (None if v.batch == dims[0] else v.batch) if keep else without_dims(v, dims[:1])
    if keep and b.flag():
        b.let(f"{v.name} - {reduced}", batch if v.batch is not None else None)
    else:
        b.let(reduced, batch)


def _mean(b: Builder, v: Value) -> None:
    dim = v.rank - 1 if v.batch != v.rank - 1 else 0
    b.let(f"{v.name}.mean({dim})", without_dims(v, (dim,)))


def _scan(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    kind = b.pick(["cumsum", "cumprod", "logcumsumexp"])
    name = f"(1 + 0.3 * {v.name}.tanh())" if kind == "cumprod" else v.name
    b.let(f"{name}.{kind}({dim})", kept_batch(v, dim))


def _order(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    name, kept = b.line(b.distinct(v, dim)), kept_batch(v, dim)
    kind = b.pick(["sort", "topk", "argmax", "argsort"])
    if kind == "sort":
        b.let(f"{name}.sort({dim}, descending={b.flag()}).values", kept)
    elif kind == "topk":
        count = b.pick(range(1, v.shape[dim] + 1))
        weights, ids = b.line(f"{name}.topk({count}, {dim})[0]"), f"{name}.topk({count}, {dim})[1]"
        b.let(f"{weights}.softmax({dim}) + {ids} * 0.1", kept)
    elif kind == "argmax":
        ids = b.line(f"{name}.argmax({dim}, keepdim=True)")
        b.let(f"{v.name}.gather({dim}, {ids})", kept)
    else:
        ids = b.line(f"{name}.argsort({dim})")
        b.let(f"torch.take_along_dim({v.name}, {ids}, {dim})", kept)


REDUCTIONS = {
    "mean": Block(_mean),
    "reduction": Block(_reduce),
    "scan": Block(_scan),
    "order": Block(_order),
}


# -- shapes ----------------------------------------------------------------------------------------


def _move(b: Builder, v: Value) -> None:
    """Dims in another order."""
    dims = list(range(v.rank))
    if b.flag():
        i, j = b.pick(dims), b.pick(dims)
        dims[i], dims[j] = dims[j], dims[i]
        text = f"{v.name}.transpose({i}, {j})"
    else:
        order = []
        rest = list(dims)
        while rest:
            order.append(rest.pop(b.pick(range(len(rest)))))
        dims = order
        text = f"{v.name}.permute({', '.join(map(str, dims))})"
    b.let(text, None if v.batch is None else dims.index(v.batch))


def _flatten(b: Builder, v: Value) -> None:
    start = b.pick(range(v.rank - 1))
    end = b.pick(range(start + 1, v.rank))
    batch = v.batch
    if batch is not None and start <= batch <= end:
        batch = None
    elif batch is not None and batch > end:
        batch -= end - start
    b.let(f"{v.name}.{b.pick(['flatten', 'flatten'])}({start}, {end})", batch)


def _unflatten(b: Builder, v: Value) -> None:
    options = [(d, f) for d, n in enumerate(v.shape) for f in (2, 3, 4, 1) if n % f == 0]
    dim, factor = b.pick(options)
    other = v.shape[dim] // factor
    sizes = (factor, other) if b.flag() else (other, factor)
    shape = (*v.shape[:dim], *sizes, *v.shape[dim + 1 :])
    batch = v.batch
    if batch is not None and batch == dim:
        batch = None
    elif batch is not None and batch > dim:
        batch += 1
    if b.flag():
        b.let(f"{v.name}.reshape({', '.join(map(str, shape))})", batch)
    else:
        b.let(f"{v.name}.unflatten({dim}, {sizes})", batch)


def _regroup(b: Builder, v: Value) -> None:
    """Two neighbouring dims taken apart and put together otherwise."""
    start = b.pick(range(v.rank - 1))
    total = v.shape[start] * v.shape[start + 1]
    first = b.pick([f for f in (2, 3, 4, 5, 6, 1) if total % f == 0])
    shape = (*v.shape[:start], first, total // first, *v.shape[start + 2 :])
    touched = v.batch in (start, start + 1)
    b.let(f"{v.name}.reshape({', '.join(map(str, shape))})", None if touched else v.batch)


def _ones(b: Builder, v: Value) -> None:
    kind = b.pick(["unsqueeze", "expand", "repeat"])
    dim = b.pick(range(v.rank + 1))
    batch = v.batch if v.batch is None or v.batch < dim else v.batch + 1
    if kind == "unsqueeze":
        b.let(f"{v.name}.unsqueeze({dim})", batch)
    elif kind == "expand":
        shape = [*v.shape[:dim], b.pick([2, 3]), *v.shape[dim:]]
        b.let(f"{v.name}.unsqueeze({dim}).expand({', '.join(map(str, shape))})", batch)
    else:
        counts = [1] * v.rank
        at = b.dim(v)
        counts[at] = 2
        b.let(f"{v.name}.repeat({', '.join(map(str, counts))})", kept_batch(v, at))


def _slice(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    size = v.shape[dim]
    kind = b.pick(["narrow", "select", "strided", "split", "unbind"])
    head = ":, " * dim
    if kind == "select":
        b.let(f"{v.name}[{head}{b.pick(range(size))}]", without_dims(v, (dim,)))
    elif kind == "unbind":
        parts = b.line(f"{v.name}.unbind({dim})")
        b.let(f"{parts}[0] + {parts}[-1].tanh()", without_dims(v, (dim,)))
    elif kind == "split":
        width = b.pick(range(1, size + 1))
        parts = b.line(f"{v.name}.split({width}, {dim})")
        b.let(f"torch.cat(({parts}[-1], {parts}[0]), {dim})", kept_batch(v, dim))
    else:
        start = b.pick(range(size))
        step = ":2" if kind == "strided" else ""
        b.let(
            f"{v.name}[{head}{start}:{b.pick(range(start + 1, size + 1))}{step}]",
            kept_batch(v, dim),
        )


def _join(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    kind = b.pick(["cat self", "cat parameter", "stack", "cat skip"])
    if kind == "cat self":
        b.let(f"torch.cat(({v.name}, {v.name}.tanh()), {dim})", kept_batch(v, dim))
    elif kind == "cat parameter":
        shape = list(v.shape)
        shape[dim] = b.pick([1, 2, 3])
        b.let(f"torch.cat(({b.param(*shape)}, {v.name}), {dim})", kept_batch(v, dim))
    elif kind == "stack":
        batch = v.batch if v.batch is None or v.batch < dim else v.batch + 1
        b.let(f"torch.stack(({v.name}, {v.name}.sin(), -{v.name}), {dim})", batch)
    else:
        fitting = [
            w
            for w in b.values
            if w.rank == v.rank
            and all(
                m == n for i, (m, n) in enumerate(zip(w.shape, v.shape, strict=True)) if i != dim
            )
        ]
        other = b.pick(fitting)
        b.let(f"torch.cat(({v.name}, {other.name}), {dim})", kept_batch(v, dim))


def _shift(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    kind = b.pick(["roll", "flip", "pad"])
    if kind == "roll":
        b.let(f"{v.name}.roll({b.pick([1, -2])}, {dim})", kept_batch(v, dim))
    elif kind == "flip":
        b.let(f"{v.name}.flip({dim})", kept_batch(v, dim))
    else:
        pads = [0, 0] * (v.rank - 1 - dim) + [b.pick([1, 0, 2]), b.pick([0, 1])]
        b.let(f"F.pad({v.name}, {pads}, value={b.pick([0.0, 0.5])})", kept_batch(v, dim))


def _index(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    size, head = v.shape[dim], ":, " * dim
    ids = [b.pick(range(size)) for _ in range(b.pick([3, 2, 4]))]
    kind = b.pick(["list", "index_select", "buffer", "two", "gather", "input", "bool"])
    if kind == "list":
        b.let(f"{v.name}[{head}{ids}]", kept_batch(v, dim))
    elif kind == "index_select":
        b.let(f"{v.name}.index_select({dim}, torch.tensor({ids}))", kept_batch(v, dim))
    elif kind == "buffer":
        name = b.line(f"torch.tensor({ids})")
        b.let(f"{v.name}[{head}{name}] * 0.5", kept_batch(v, dim))
    elif kind == "two" and v.rank >= 2:
        i, j = v.rank - 2, v.rank - 1
        pairs = [(b.pick(range(v.shape[i])), b.pick(range(v.shape[j]))) for _ in range(3)]
        rows, columns = [p[0] for p in pairs], [p[1] for p in pairs]
        lost = v.batch in (i, j)
        b.let(f"{v.name}[..., {rows}, {columns}]", None if lost else v.batch)
    elif kind == "input" and v.batch == 0 and dim != 0:
        name = b.user("at", f"torch.randint(0, {size}, ({v.shape[0]},))")
        b.let(f"{v.name}[torch.arange({v.shape[0]}){', :' * (dim - 1)}, {name}]", None)
    elif kind == "bool":
        b.let(f"{v.name} * ({v.name}.detach() > 100).logical_not()", v.batch)
    else:
        shape = list(v.shape)
        shape[dim] = 2
        made = f"torch.arange({2 * numel(v) // size}).view({shape}) % {size}"
        b.let(f"{v.name}.gather({dim}, {made})", kept_batch(v, dim))


def _scatter(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    size = v.shape[dim]
    ids = [b.pick(range(size)) for _ in range(size)]
    kind = b.pick(["scatter_add", "index_add", "index_put"])
    if kind == "scatter_add":
        view = ["1"] * v.rank
        view[dim] = "-1"
        index = f"torch.tensor({ids}).view({', '.join(view)}).expand({list(v.shape)})"
        b.let(f"torch.zeros({list(v.shape)}).to({v.name}).scatter_add({dim}, {index}, {v.name})",
              kept_batch(v, dim))  # fmt: skip
    elif kind == "index_add":
        b.let(
            f"({v.name} * 0.5).index_add({dim}, torch.tensor({ids}), {v.name})", kept_batch(v, dim)
        )
    else:
        b.let(f"({v.name} * 1.0).index_put((torch.tensor({[i % v.shape[0] for i in ids]}),), "
              f"{b.param(*v.shape[1:])}, accumulate=True)", None)  # fmt: skip


SHAPES = {
    "move": Block(_move, at_least(2)),
    "flatten": Block(_flatten, at_least(2)),
    "unflatten": Block(_unflatten, lambda v: 1 <= v.rank < MAX_RANK),
    "regroup": Block(_regroup, at_least(2)),
    "ones": Block(_ones, lambda v: 1 <= v.rank < MAX_RANK and numel(v) * 3 <= MAX_ELEMENTS),
    "slice": Block(_slice),
    "join": Block(_join, lambda v: 1 <= v.rank < MAX_RANK and numel(v) * 4 <= MAX_ELEMENTS),
    "shift": Block(_shift),
    "index": Block(_index),
    "scatter": Block(_scatter),
}
