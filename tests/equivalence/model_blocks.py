"""The blocks of random models: one or a few lines of torch each, over every kind of operator.

A block has a condition on the value that it continues and a function that appends its lines. The
blocks of one family stand in one table; ``BLOCKS`` has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.equivalence.model_generator import MAX_ELEMENTS, MAX_RANK, Builder, Value


@dataclass(frozen=True)
class Block:
    """A kind of block.

    Attributes:
        grow: Appends its lines; a loss returns its expression.
        fits: Whether it can continue a value.
    """

    grow: Callable[[Builder, Value], object]
    fits: Callable[[Value], bool] = lambda v: v.rank >= 1


def _numel(v: Value) -> int:
    total = 1
    for size in v.shape:
        total *= size
    return total


def _at_least(rank: int) -> Callable[[Value], bool]:
    return lambda v: v.rank >= rank


def _kept(v: Value, dim: int) -> int | None:
    """The batch dim after ``dim`` has been mixed."""
    return None if v.batch == dim else v.batch


def _without(v: Value, dims: tuple[int, ...]) -> int | None:
    """The batch dim after ``dims`` have been reduced."""
    if v.batch is None or v.batch in dims:
        return None
    return v.batch - sum(d < v.batch for d in dims)


# -- sources ---------------------------------------------------------------------------------------


def _matrix(b: Builder) -> None:
    name = b.user("x", f"torch.randn({b.batch}, {b.size()})")
    b.let(f"{name} * 1.0", 0)


def _sequence(b: Builder) -> None:
    name = b.user("x", f"torch.randn({b.batch}, {b.size()}, {b.pick([8, 4, 6, 5])})")
    b.let(f"{name} * 1.0", 0)


def _image(b: Builder) -> None:
    side = b.pick([4, 5, 6])
    name = b.user("x", f"torch.randn({b.batch}, {b.pick([4, 2, 3, 1])}, {side}, {side})")
    b.let(f"{name} * 1.0", 0)


def _time_major(b: Builder) -> None:
    name = b.user("x", f"torch.randn({b.size()}, {b.batch}, {b.pick([8, 4, 6])})")
    b.let(f"{name} * 1.0", 1)


def _tokens(b: Builder) -> None:
    rows, width = b.pick([12, 10, 7]), b.pick([8, 4, 6])
    ids = b.user("ids", f"torch.randint(0, {rows}, ({b.batch}, {b.pick([6, 4, 5, 8])}))")
    table = b.attribute(f"nn.Embedding({rows}, {width})")
    b.linears.append((f"{table}.weight", width, rows))
    v = b.let(f"{table}({ids})", 0)
    if b.flag():
        places = b.attribute(f"nn.Embedding({v.shape[1]}, {width})")
        b.let(f"{v.name} + {places}(torch.arange({v.shape[1]}))", 0)


SOURCES: dict[str, Callable[[Builder], None]] = {
    "matrix": _matrix,
    "sequence": _sequence,
    "tokens": _tokens,
    "image": _image,
    "time-major": _time_major,
}


# -- layers ----------------------------------------------------------------------------------------


def _linear(b: Builder, v: Value) -> None:
    width = b.size()
    layer = b.attribute(f"nn.Linear({v.shape[-1]}, {width}, bias={b.flag()})")
    b.linears.append((f"{layer}.weight", v.shape[-1], width))
    b.let(f"{layer}({v.name})", _kept(v, v.rank - 1))


def _tied(b: Builder, v: Value) -> None:
    width = v.shape[-1]
    fitting = [w for w in b.linears if width in w[1:]]
    if not fitting:
        _linear(b, v)
        return
    name, inside, _ = b.pick(fitting)
    weight = name if inside == width else f"{name}.t()"
    b.let(f"F.linear({v.name}, {weight})", _kept(v, v.rank - 1))


def _mlp(b: Builder, v: Value) -> None:
    width, hidden = v.shape[-1], b.pick([8, 6, 5])
    up = b.attribute(f"nn.Linear({width}, {hidden})")
    down = b.attribute(f"nn.Linear({hidden}, {width})")
    b.let(f"{v.name} + {down}(F.gelu({up}({v.name})))", _kept(v, v.rank - 1))


def _conv2d(b: Builder, v: Value) -> None:
    inside = v.shape[1]
    groups = b.pick([g for g in (1, 2, 3, 4, inside) if inside % g == 0])
    outside = groups * b.pick([2, 1, 3])
    kernel = b.pick([k for k in (3, 1, 2) if k <= min(v.shape[2:]) + 2])
    stride, bias = b.pick([1, 2]), b.flag()
    layer = b.attribute(
        f"nn.Conv2d({inside}, {outside}, {kernel}, stride={stride}, padding=1, groups={groups}, "
        f"bias={bias})"
    )
    b.let(f"{layer}({v.name})", 0 if v.batch == 0 else None)


def _conv1d(b: Builder, v: Value) -> None:
    inside, outside = v.shape[1], b.pick([4, 2, 3, 6])
    dilation = b.pick([1, 2])
    layer = b.attribute(
        f"nn.Conv1d({inside}, {outside}, 2, padding={dilation}, dilation={dilation})"
    )
    b.let(f"{layer}({v.name})", 0 if v.batch == 0 else None)


def _pool(b: Builder, v: Value) -> None:
    kept = 0 if v.batch == 0 else None
    kind = b.pick(["avg", "adaptive", "nearest", "bilinear", "max"])
    if kind == "avg":
        b.let(f"F.avg_pool2d({v.name}, 2, padding=1)", kept)
    elif kind == "adaptive":
        b.let(f"F.adaptive_avg_pool2d({v.name}, {b.pick([1, 2])})", kept)
    elif kind == "max":
        b.let(f"F.max_pool2d({b.distinct(v)}, 2, stride=1)", kept)
    else:
        more = "" if kind == "nearest" else ", align_corners=False"
        b.let(f"F.interpolate({v.name}, scale_factor=2, mode={kind!r}{more})", kept)


def _layer_norm(b: Builder, v: Value) -> None:
    dims = b.pick([1, 1, 2]) if v.rank > 2 else 1
    shape = ", ".join(map(str, v.shape[-dims:]))
    affine = b.flag(0.8)
    kept = v.batch if v.batch is not None and v.batch < v.rank - dims else None
    if b.flag(0.3):
        layer = b.attribute(f"nn.RMSNorm(({shape},), eps=1e-3, elementwise_affine={affine})")
    else:
        layer = b.attribute(f"nn.LayerNorm(({shape},), eps=1e-3, elementwise_affine={affine})")
    b.let(f"{layer}({v.name})", kept)


def _group_norm(b: Builder, v: Value) -> None:
    channels = v.shape[1]
    groups = b.pick([g for g in (1, 2, 3, 4, channels) if channels % g == 0])
    layer = b.attribute(f"nn.GroupNorm({groups}, {channels}, eps=1e-3)")
    b.let(f"{layer}({v.name})", 0 if v.batch == 0 else None)


def _batch_norm(b: Builder, v: Value) -> None:
    layer = b.attribute(f"nn.BatchNorm{'2d' if v.rank == 4 else '1d'}({v.shape[1]}, eps=1e-2)")
    b.let(f"{layer}({v.name})", 0 if v.batch == 0 else None)


def _dropout(b: Builder, v: Value) -> None:
    b.let(f"F.dropout({v.name}, {b.pick([0.1, 0.5])}, training=True)", v.batch)


LAYERS = {
    "linear": Block(_linear),
    "tied linear": Block(_tied),
    "mlp": Block(_mlp, _at_least(2)),
    "conv1d": Block(_conv1d, lambda v: v.rank == 3),
    "conv2d": Block(_conv2d, lambda v: v.rank == 4),
    "pool2d": Block(_pool, lambda v: v.rank == 4 and min(v.shape[2:]) > 1 and _numel(v) < 700),
    "layer norm": Block(_layer_norm),
    "group norm": Block(_group_norm, lambda v: v.rank >= 2 and _numel(v) // v.shape[0] > 1),
    "batch norm": Block(
        _batch_norm,
        lambda v: v.rank in (2, 3, 4) and _numel(v) // v.shape[1] > 1,
    ),
    "dropout": Block(_dropout),
}


# -- attention -------------------------------------------------------------------------------------


def _mask_of(b: Builder, batch: int, heads: int, length: int) -> str:
    kind = b.pick(["causal", "none", "bool input", "float parameter", "bool constant"])
    if kind == "causal":
        return ", is_causal=True"
    if kind == "none":
        return ""
    if kind == "bool input":  # every row reads at least its own column
        eye = f"torch.eye({length}, dtype=torch.bool)"
        made = f"(torch.rand({batch}, 1, {length}, {length}) > 0.4) | {eye}"
        return f", attn_mask={b.user('mask', made)}"
    if kind == "bool constant":
        return f", attn_mask=torch.ones({length}, {length}, dtype=torch.bool).tril(1)"
    shape = b.pick([(length, length), (heads, length, length), (1, heads, 1, length)])
    return f", attn_mask={b.param(*shape)}"


def _sdpa(b: Builder, q: str, k: str, v: str, *, shape: tuple[int, ...], grouped: bool) -> str:
    batch, heads, length = shape[:3]
    mask = _mask_of(b, batch, heads, length)
    drop = f", dropout_p={b.pick([0.0, 0.0, 0.2])}"
    more = ", enable_gqa=True" if grouped else ""
    return f"F.scaled_dot_product_attention({q}, {k}, {v}{mask}{drop}{more})"


def _attention(b: Builder, v: Value) -> None:
    batch, length, width = v.shape
    heads, head = b.pick([(2, 4), (4, 2), (3, 2), (1, 4), (6, 2)])
    kv = b.pick([n for n in (heads, 1, 2, 3) if heads % n == 0])
    q = b.attribute(f"nn.Linear({width}, {heads * head})")
    k = b.attribute(f"nn.Linear({width}, {kv * head}, bias=False)")
    w = b.attribute(f"nn.Linear({width}, {kv * head})")
    out = b.attribute(f"nn.Linear({heads * head}, {width})")
    names = [
        b.line(f"{layer}({v.name}).view({batch}, {length}, {n}, {head}).transpose(1, 2)")
        for layer, n in ((q, heads), (k, kv), (w, kv))
    ]
    o = b.line(_sdpa(b, *names, shape=(batch, heads, length), grouped=kv != heads))
    merged = b.pick([f"reshape({batch}, {length}, {heads * head})", "flatten(2)"])
    b.let(f"{out}({o}.transpose(1, 2).{merged})", v.batch if v.batch == 0 else None)


def _fused_qkv(b: Builder, v: Value) -> None:
    batch, length, width = v.shape
    heads, head = b.pick([(2, 4), (4, 2), (3, 2)])
    layer = b.attribute(f"nn.Linear({width}, {3 * heads * head})")
    if b.flag():
        whole = b.line(f"{layer}({v.name}).view({batch}, {length}, 3, {heads}, {head})")
        parts = [f"{whole}[:, :, {i}].transpose(1, 2)" for i in range(3)]
    elif b.flag():
        whole = b.line(f"{layer}({v.name}).view({batch}, {length}, {heads}, 3, {head})")
        parts = [f"{whole}.unbind(3)[{i}].transpose(1, 2)" for i in range(3)]
    else:
        whole = b.line(f"{layer}({v.name}).chunk(3, -1)")
        shape = f"{batch}, {length}, {heads}, {head}"
        parts = [f"{whole}[{i}].unflatten(-1, ({heads}, {head})).transpose(1, 2)" for i in range(3)]
        del shape
    names = [b.line(part) for part in parts]
    o = b.line(_sdpa(b, *names, shape=(batch, heads, length), grouped=False))
    b.let(f"{o}.permute(0, 2, 1, 3).flatten(2)", v.batch if v.batch == 0 else None)


def _manual_attention(b: Builder, v: Value) -> None:
    scores = b.line(f"torch.einsum('bsd,btd->bst', {v.name}, {v.name}) / {v.shape[-1] ** 0.5:.3f}")
    b.let(f"torch.softmax({scores}, -1) @ {v.name}", v.batch if v.batch == 0 else None)


ATTENTION = {
    "attention": Block(_attention, lambda v: v.rank == 3),
    "fused qkv": Block(_fused_qkv, lambda v: v.rank == 3),
    "attention by hand": Block(_manual_attention, lambda v: v.rank == 3),
}


# -- element-wise ----------------------------------------------------------------------------------

_SMOOTH = (
    "torch.tanh({})", "F.gelu({})", "torch.sigmoid({})", "F.silu({})", "F.softplus({})",
    "torch.sin({})", "torch.exp(-{} ** 2)", "F.mish({})", "torch.erf({})", "F.logsigmoid({})",
    "F.gelu({}, approximate='tanh')", "torch.log1p({} ** 2)", "torch.rsqrt(1 + {} ** 2)",
    "({}.tanh() + 1.5) ** 1.5", "1.0 / (1.5 + torch.cos({}))", "-{}", "{} / 3.0", "2.0 - {}",
)  # fmt: skip
_KINKED = (
    "F.relu({})", "{}.abs()", "F.leaky_relu({})", "F.hardtanh({})", "F.elu({})",
    "torch.clamp({}, -0.5, 0.7)", "F.hardswish({})", "F.relu6({})", "{}.clamp_min(-0.3)",
    "torch.sign({}) * 0.5 + {}",
)  # fmt: skip


def _smooth(b: Builder, v: Value) -> None:
    b.let(b.pick(_SMOOTH).replace("{}", v.name), v.batch)


def _kinked(b: Builder, v: Value) -> None:
    shifted = b.line(b.generic(v))
    b.let(b.pick(_KINKED).replace("{}", shifted), v.batch)


def _broadcast(b: Builder, v: Value) -> None:
    """With a parameter of fewer dims, or with sizes of one."""
    first = b.pick(range(v.rank))
    shape = [n if b.flag(0.7) else 1 for n in v.shape[first:]]
    other = b.param(*shape)
    text = b.pick(["{} + {o}", "{} * {o}", "{o} - {}", "{} / (2.5 + {o}.tanh())", "{o} * {} + {}"])
    b.let(text.replace("{o}", other).replace("{}", v.name), v.batch)


def _skip(b: Builder, v: Value) -> None:
    """With an earlier value that broadcasts to it."""
    fitting = [
        w
        for w in b.values
        if w.rank <= v.rank
        and all(m in (n, 1) for m, n in zip(w.shape[::-1], v.shape[::-1], strict=False))
    ]
    other = b.pick(fitting)
    text = b.pick(["{} + {o}", "{} * {o}.tanh()", "torch.lerp({}, {o}, 0.3)", "{} - {o}"])
    shift = v.rank - other.rank
    aligned = other.batch is None or other.batch + shift == v.batch
    b.let(
        text.replace("{o}", other.name).replace("{}", v.name), v.batch if aligned else None
    )


def _where(b: Builder, v: Value) -> None:
    shifted = b.line(b.generic(v))
    kind = b.pick(["where", "masked_fill", "maximum", "tril", "constant mask"])
    if kind == "where":
        b.let(f"torch.where({shifted} > 0, {v.name}, {v.name} * 0.3)", v.batch)
    elif kind == "masked_fill":
        b.let(f"{v.name}.masked_fill({shifted} < -0.5, 0.25)", v.batch)
    elif kind == "maximum":
        b.let(f"torch.maximum({shifted}, {b.param(v.shape[-1])})", v.batch)
    elif kind == "tril" and v.rank >= 2:
        b.let(f"{v.name}.{b.pick(['tril', 'triu'])}({b.pick([0, 1, -1])})", v.batch)
    else:
        mask = f"torch.arange({v.shape[-1]}) % 3 == 1"
        b.let(f"{v.name}.masked_fill({mask}, 0.5)", v.batch)


def _softmax(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    kind = b.pick(["softmax", "log_softmax"])
    b.let(f"F.{kind}({v.name}, {dim})", _kept(v, dim))


ELEMENTWISE = {
    "smooth": Block(_smooth, lambda v: True),
    "kinked": Block(_kinked, lambda v: True),
    "broadcast": Block(_broadcast),
    "skip": Block(_skip, lambda v: True),
    "where": Block(_where),
    "softmax": Block(_softmax),
}


def _reduce(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    dims = (dim,)
    if v.rank > 2 and b.flag(0.3):
        dims = tuple(sorted({dim, b.dim(v)}))
    keep = b.flag()
    at = dims[0] if len(dims) == 1 else dims
    kind = b.pick(["mean", "sum", "var", "logsumexp", "norm", "amax", "amin", "max", "prod", "std"])
    name, batch = v.name, _without(v, dims)
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
        batch = (None if v.batch == dims[0] else v.batch) if keep else _without(v, dims[:1])
    if keep and b.flag():
        b.let(f"{v.name} - {reduced}", batch if v.batch is not None else None)
    else:
        b.let(reduced, batch)


def _mean(b: Builder, v: Value) -> None:
    dim = v.rank - 1 if v.batch != v.rank - 1 else 0
    b.let(f"{v.name}.mean({dim})", _without(v, (dim,)))


def _scan(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    kind = b.pick(["cumsum", "cumprod", "logcumsumexp"])
    name = f"(1 + 0.3 * {v.name}.tanh())" if kind == "cumprod" else v.name
    b.let(f"{name}.{kind}({dim})", _kept(v, dim))


def _order(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    name, kept = b.line(b.distinct(v, dim)), _kept(v, dim)
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
        b.let(f"{v.name}.repeat({', '.join(map(str, counts))})", _kept(v, at))


def _slice(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    size = v.shape[dim]
    kind = b.pick(["narrow", "select", "strided", "split", "unbind"])
    head = ":, " * dim
    if kind == "select":
        b.let(f"{v.name}[{head}{b.pick(range(size))}]", _without(v, (dim,)))
    elif kind == "unbind":
        parts = b.line(f"{v.name}.unbind({dim})")
        b.let(f"{parts}[0] + {parts}[-1].tanh()", _without(v, (dim,)))
    elif kind == "split":
        width = b.pick(range(1, size + 1))
        parts = b.line(f"{v.name}.split({width}, {dim})")
        b.let(f"torch.cat(({parts}[-1], {parts}[0]), {dim})", _kept(v, dim))
    else:
        start = b.pick(range(size))
        step = ":2" if kind == "strided" else ""
        b.let(f"{v.name}[{head}{start}:{b.pick(range(start + 1, size + 1))}{step}]", _kept(v, dim))


def _join(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    kind = b.pick(["cat self", "cat parameter", "stack", "cat skip"])
    if kind == "cat self":
        b.let(f"torch.cat(({v.name}, {v.name}.tanh()), {dim})", _kept(v, dim))
    elif kind == "cat parameter":
        shape = list(v.shape)
        shape[dim] = b.pick([1, 2, 3])
        b.let(f"torch.cat(({b.param(*shape)}, {v.name}), {dim})", _kept(v, dim))
    elif kind == "stack":
        batch = v.batch if v.batch is None or v.batch < dim else v.batch + 1
        b.let(f"torch.stack(({v.name}, {v.name}.sin(), -{v.name}), {dim})", batch)
    else:
        fitting = [
            w
            for w in b.values
            if w.rank == v.rank
            and all(m == n for i, (m, n) in enumerate(zip(w.shape, v.shape, strict=True)) if i != dim)
        ]
        other = b.pick(fitting)
        b.let(f"torch.cat(({v.name}, {other.name}), {dim})", _kept(v, dim))


def _shift(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    kind = b.pick(["roll", "flip", "pad"])
    if kind == "roll":
        b.let(f"{v.name}.roll({b.pick([1, -2])}, {dim})", _kept(v, dim))
    elif kind == "flip":
        b.let(f"{v.name}.flip({dim})", _kept(v, dim))
    else:
        pads = [0, 0] * (v.rank - 1 - dim) + [b.pick([1, 0, 2]), b.pick([0, 1])]
        b.let(f"F.pad({v.name}, {pads}, value={b.pick([0.0, 0.5])})", _kept(v, dim))


def _index(b: Builder, v: Value) -> None:
    dim = b.dim(v)
    size, head = v.shape[dim], ":, " * dim
    ids = [b.pick(range(size)) for _ in range(b.pick([3, 2, 4]))]
    kind = b.pick(["list", "index_select", "buffer", "two", "gather", "input", "bool"])
    if kind == "list":
        b.let(f"{v.name}[{head}{ids}]", _kept(v, dim))
    elif kind == "index_select":
        b.let(f"{v.name}.index_select({dim}, torch.tensor({ids}))", _kept(v, dim))
    elif kind == "buffer":
        name = b.line(f"torch.tensor({ids})")
        b.let(f"{v.name}[{head}{name}] * 0.5", _kept(v, dim))
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
        made = f"torch.arange({2 * _numel(v) // size}).view({shape}) % {size}"
        b.let(f"{v.name}.gather({dim}, {made})", _kept(v, dim))


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
              _kept(v, dim))  # fmt: skip
    elif kind == "index_add":
        b.let(f"({v.name} * 0.5).index_add({dim}, torch.tensor({ids}), {v.name})", _kept(v, dim))
    else:
        b.let(f"({v.name} * 1.0).index_put((torch.tensor({[i % v.shape[0] for i in ids]}),), "
              f"{b.param(*v.shape[1:])}, accumulate=True)", None)  # fmt: skip


SHAPES = {
    "move": Block(_move, _at_least(2)),
    "flatten": Block(_flatten, _at_least(2)),
    "unflatten": Block(_unflatten, lambda v: 1 <= v.rank < MAX_RANK),
    "regroup": Block(_regroup, _at_least(2)),
    "ones": Block(_ones, lambda v: 1 <= v.rank < MAX_RANK and _numel(v) * 3 <= MAX_ELEMENTS),
    "slice": Block(_slice),
    "join": Block(_join, lambda v: 1 <= v.rank < MAX_RANK and _numel(v) * 4 <= MAX_ELEMENTS),
    "shift": Block(_shift),
    "index": Block(_index),
    "scatter": Block(_scatter),
}


# -- contractions ----------------------------------------------------------------------------------


def _matmul(b: Builder, v: Value) -> None:
    kind = b.pick(["parameter", "left", "batched", "einsum", "self"])
    *outer, rows, width = v.shape
    lost = v.batch is not None and v.batch >= v.rank - 2
    batch = None if lost else v.batch
    if kind == "parameter":
        weight = b.param(width, b.size(), scale=width**-0.5)
        b.let(f"{v.name} @ {weight}", _kept(v, v.rank - 1))
    elif kind == "left":
        weight = b.param(b.size(), rows, scale=rows**-0.5)
        b.let(f"{weight} @ {v.name}", _kept(v, v.rank - 2))
    elif kind == "batched" and v.rank == 3:
        weight = b.param(outer[0], width, b.size(), scale=width**-0.5)
        b.let(f"torch.bmm({v.name}, {weight})", _kept(v, 2))
    elif kind == "einsum":
        weight = b.param(rows, width, 4, scale=(rows * width) ** -0.5)
        b.let(f"torch.einsum('...sd,sde->...e', {v.name}, {weight})", batch)
    else:
        b.let(f"{v.name} @ {v.name}.transpose(-1, -2) / {width}", batch)


def _outer(b: Builder, v: Value) -> None:
    weight = b.param(b.pick([2, 3, 4]))
    b.let(f"{v.name}[..., None] * {weight}", v.batch)


CONTRACTIONS = {
    "matmul": Block(_matmul, _at_least(2)),
    "outer": Block(_outer, lambda v: 1 <= v.rank < MAX_RANK and 4 * _numel(v) <= MAX_ELEMENTS),
}

BLOCKS: dict[str, Block] = {
    **LAYERS, **ELEMENTWISE, **REDUCTIONS, **SHAPES, **CONTRACTIONS, **ATTENTION,
}  # fmt: skip


# -- losses ----------------------------------------------------------------------------------------


def _weighted_sum(b: Builder, v: Value) -> str:
    shape = v.shape[-1:] if v.rank else ()
    return b.line(f"({v.name} * {b.param(*shape)}).{b.pick(['sum', 'mean'])}()")


def _squares(b: Builder, v: Value) -> str:
    target = b.user("target", f"torch.randn({list(v.shape)})")
    kind = b.pick(["mse_loss", "smooth_l1_loss", "mse_loss"])
    return b.line(f"F.{kind}({v.name}, {target}, reduction={b.pick(['mean', 'sum'])!r})")


def _cross_entropy(b: Builder, v: Value) -> str:
    rows, classes = _numel(v) // v.shape[-1], v.shape[-1]
    labels = f"torch.randint(0, {classes}, {list(v.shape[:-1])})"
    if b.flag() and rows > 2:  # some rows do not count
        labels += f".masked_fill(torch.arange({rows}).view({list(v.shape[:-1])}) % 3 == 0, -100)"
    name = b.user("labels", labels)
    smooth = b.pick(["", ", label_smoothing=0.1"])
    logits = v.name if v.rank == 2 else f"{v.name}.reshape(-1, {classes})"
    flat = name if v.rank == 2 else f"{name}.reshape(-1)"
    return b.line(f"F.cross_entropy({logits}, {flat}{smooth})")


def _logistic(b: Builder, v: Value) -> str:
    target = b.user("target", f"torch.rand({list(v.shape)})")
    return b.line(f"F.binary_cross_entropy_with_logits({v.name}, {target})")


def _divergence(b: Builder, v: Value) -> str:
    target = b.user("target", f"torch.randn({list(v.shape)}).softmax(-1)")
    kind = b.pick(["batchmean", "sum"])
    return b.line(f"F.kl_div(F.log_softmax({v.name}, -1), {target}, reduction={kind!r})")


def _z_loss(b: Builder, v: Value) -> str:
    return b.line(f"({v.name}.logsumexp(-1) ** 2).mean()")


LOSSES: dict[str, Block] = {
    "weighted sum": Block(_weighted_sum, lambda v: True),
    "squares": Block(_squares, lambda v: True),
    "cross entropy": Block(_cross_entropy, lambda v: v.rank >= 2),
    "logistic": Block(_logistic),
    "divergence": Block(_divergence, _at_least(2)),
    "z loss": Block(_z_loss),
}
