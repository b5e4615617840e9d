"""The blocks of random models: one or a few lines of torch each, over every kind of operator.

A block has a condition on the value that it continues and a function that appends its lines. The
blocks of one family stand in one table; ``BLOCKS`` has them all.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.equivalence.model_block import Block, at_least, kept_batch, numel
from tests.equivalence.model_blocks_shapes import REDUCTIONS, SHAPES
from tests.equivalence.model_generator import MAX_ELEMENTS, MAX_RANK, Builder, Value

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
    b.let(f"{layer}({v.name})", kept_batch(v, v.rank - 1))


def _tied(b: Builder, v: Value) -> None:
    width = v.shape[-1]
    fitting = [w for w in b.linears if width in w[1:]]
    if not fitting:
        _linear(b, v)
        return
    name, inside, _ = b.pick(fitting)
    weight = name if inside == width else f"{name}.t()"
    b.let(f"F.linear({v.name}, {weight})", kept_batch(v, v.rank - 1))


def _mlp(b: Builder, v: Value) -> None:
    width, hidden = v.shape[-1], b.pick([8, 6, 5])
    up = b.attribute(f"nn.Linear({width}, {hidden})")
    down = b.attribute(f"nn.Linear({hidden}, {width})")
    b.let(f"{v.name} + {down}(F.gelu({up}({v.name})))", kept_batch(v, v.rank - 1))


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
    "mlp": Block(_mlp, at_least(2)),
    "conv1d": Block(_conv1d, lambda v: v.rank == 3),
    "conv2d": Block(_conv2d, lambda v: v.rank == 4),
    "pool2d": Block(_pool, lambda v: v.rank == 4 and min(v.shape[2:]) > 1 and numel(v) < 700),
    "layer norm": Block(_layer_norm),
    "group norm": Block(_group_norm, lambda v: v.rank >= 2 and numel(v) // v.shape[0] > 1),
    "batch norm": Block(
        _batch_norm,
        lambda v: v.rank in (2, 3, 4) and numel(v) // v.shape[1] > 1,
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
    b.let(text.replace("{o}", other.name).replace("{}", v.name), v.batch if aligned else None)


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
    b.let(f"F.{kind}({v.name}, {dim})", kept_batch(v, dim))


ELEMENTWISE = {
    "smooth": Block(_smooth, lambda v: True),
    "kinked": Block(_kinked, lambda v: True),
    "broadcast": Block(_broadcast),
    "skip": Block(_skip, lambda v: True),
    "where": Block(_where),
    "softmax": Block(_softmax),
}


# -- contractions ----------------------------------------------------------------------------------


def _matmul(b: Builder, v: Value) -> None:
    kind = b.pick(["parameter", "left", "batched", "einsum", "self"])
    *outer, rows, width = v.shape
    lost = v.batch is not None and v.batch >= v.rank - 2
    batch = None if lost else v.batch
    if kind == "parameter":
        weight = b.param(width, b.size(), scale=width**-0.5)
        b.let(f"{v.name} @ {weight}", kept_batch(v, v.rank - 1))
    elif kind == "left":
        weight = b.param(b.size(), rows, scale=rows**-0.5)
        b.let(f"{weight} @ {v.name}", kept_batch(v, v.rank - 2))
    elif kind == "batched" and v.rank == 3:
        weight = b.param(outer[0], width, b.size(), scale=width**-0.5)
        b.let(f"torch.bmm({v.name}, {weight})", kept_batch(v, 2))
    elif kind == "einsum":
        weight = b.param(rows, width, 4, scale=(rows * width) ** -0.5)
        b.let(f"torch.einsum('...sd,sde->...e', {v.name}, {weight})", batch)
    else:
        b.let(f"{v.name} @ {v.name}.transpose(-1, -2) / {width}", batch)


def _outer(b: Builder, v: Value) -> None:
    weight = b.param(b.pick([2, 3, 4]))
    b.let(f"{v.name}[..., None] * {weight}", v.batch)


CONTRACTIONS = {
    "matmul": Block(_matmul, at_least(2)),
    "outer": Block(_outer, lambda v: 1 <= v.rank < MAX_RANK and 4 * numel(v) <= MAX_ELEMENTS),
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
    rows, classes = numel(v) // v.shape[-1], v.shape[-1]
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
    "divergence": Block(_divergence, at_least(2)),
    "z loss": Block(_z_loss),
}
