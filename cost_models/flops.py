"""Arithmetic and traffic of every operator of the program.

Most operators stream: they read their operands once, write their results once, and the arithmetic
hides behind that. Those that do not are listed here. FLOPs count a multiply and an add as two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from types import MappingProxyType

from autopar.ir.graph import Arg, Meta, Ref, TensorMeta
from autopar.sharding.buckets import UNPACK, lies_as_it_is
from autopar.sharding.host_copies import HOST_COPIES


class OpClass(StrEnum):
    """Which efficiency an operator runs at."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONV = "conv"
    MEMORY = "memory"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operator does.

    Attributes:
        op_class: Kind of kernel.
        flops: Floating-point operations.
        moved_bytes: Bytes read from and written to memory at least.
        dtype: Element type of the arithmetic.
        dims: ``(b, m, n, k)`` of a matmul; ``(batch x heads, query rows, key rows, head width)``
            of attention; else empty.
        num_kernels: Kernels that it starts.
        is_backward: Whether it is the backward pass of attention, which runs at a rate of its own.
    """

    op_class: OpClass
    flops: float = 0.0
    moved_bytes: float = 0.0
    dtype: str = "float32"
    dims: tuple[int, ...] = ()
    num_kernels: int = 1
    is_backward: bool = False


FREE = Work(op_class=OpClass.FREE, num_kernels=0)

# Operators whose result is a view of an operand: no kernel, no memory.
VIEW_OPS = frozenset(
    {
        "getitem",
        "aten.view.default",
        "aten.reshape.default",
        "aten._unsafe_view.default",
        "aten.permute.default",
        "aten.transpose.int",
        "aten.t.default",
        "aten.expand.default",
        "aten.slice.Tensor",
        "aten.select.int",
        "aten.unsqueeze.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.narrow.default",
        "aten.diagonal.default",
        "aten.unfold.default",
        "aten.alias.default",
        "aten.detach.default",
        "aten.view_as_real.default",
        "aten.view_as_complex.default",
    }
)

# Arithmetic on integers, done on the host.
INTEGER_OPS = frozenset({"local.start", "local.plus"})

# Operators that only make their result.
CREATION_OPS = frozenset(
    {
        "aten.full.default",
        "aten.arange.start_step",
        "aten.arange.default",
        "aten.eye.default",
        "autopar.constant",
    }
)

# Operators that read as much of their first operand as they write, not the whole of it.
LOOKUP_OPS = frozenset(
    {
        "aten.embedding.default",
        "aten.index_select.default",
        "aten.gather.default",
        "aten.index.Tensor",
        "aten.take_along_dim.default",
        "autopar.nll_loss_sum",
        "autopar.moe_dispatch",
        "autopar.moe_spread",
        "local.shard",
        "local.take_heads",
    }
)

# Arithmetic per element where it exceeds the traffic, which is so on CPUs (GPUs hide it: their
# special-function units keep up with the memory). [measured on one AMD EPYC 9004 core, torch 2.13,
# 1,024 x 1,024 float32: seconds per element times that core's 0.1 TFLOP/s]
ELEMENT_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "exp": 85, "log": 100, "sin": 125, "cos": 125, "rsqrt": 29, "sqrt": 42, "erf": 125,
        "tanh": 170, "sigmoid": 40, "silu": 41, "gelu": 46, "silu_backward": 50,
        "gelu_backward": 83, "softplus": 120, "elu": 85, "_softmax": 58, "_log_softmax": 63,
        "_softmax_backward_data": 26, "_log_softmax_backward_data": 42, "logsumexp": 90,
        "native_layer_norm": 54, "native_layer_norm_backward": 54, "native_group_norm": 54,
        "native_group_norm_backward": 54, "batch_norm": 40, "batch_norm_backward": 54,
    }
)  # fmt: skip

# Passes over the data, where it is not one. Dropout bits are a hash in plain tensor operations on
# CPUs: 6 times the traffic of one pass, measured. Sorting is a radix sort of four passes.
PASSES: Mapping[str, int] = MappingProxyType(
    {
        "dropout": 6, "uniform": 6, "normal": 12, "sort": 4, "topk": 4, "cumsum": 2, "moe_route": 4,
        "_softmax": 2, "_log_softmax": 2,
    }
)  # fmt: skip

ATTENTION_BACKWARD_RATIO = 2.5  # five matmuls of the forward's two sizes: QK again, dV, dP, dQ, dK

# Attention that no fused kernel does (dropout by our own bits, a causal block that starts later)
# holds the whole score matrix several times: 4 tensors in the working precision, and the random
# bits of dropout as three of 8 bytes.
SCORE_COPIES = 4
BITS_BYTES = 24


def work_of(op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta) -> Work:
    """What an operator does; ``operands`` in the order of its references.

    >>> a, b, c = (TensorMeta(shape, "float32") for shape in ((4, 8), (8, 2), (4, 2)))
    >>> work = work_of("aten.mm.default", (Ref("a"), Ref("b")), [a, b], c)
    >>> work.flops, work.moved_bytes
    (128.0, 224.0)
    """
    if op in VIEW_OPS or op in INTEGER_OPS or op in HOST_COPIES or op.startswith("comm."):
        return FREE
    bound = _bind(args, operands)
    if op.startswith("autopar.attention"):
        first = 1 if "backward" in op else 0
        qkv = tuple(_tensor(bound, first + i) for i in range(3))
        attention = _attention_work(op, qkv, (args, operands, results))
        return attention or _streaming(op, operands, results)
    rule = _RULES.get(op)
    if rule is not None:
        work = rule(bound, operands, results)
        if work is not None:
            return work
    return _streaming(op, operands, results)


def flops(op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta) -> float:
    """FLOPs of matmuls, convolutions and attention; 0 for all else (what MFU counts)."""
    work = work_of(op, args, operands, results)
    return 0.0 if work.op_class is OpClass.MEMORY else work.flops


def tensors(metas: Sequence[Meta] | Meta) -> list[TensorMeta]:
    """The tensors among metas, tuples flattened, integers left out."""
    if metas is None:
        return []
    if isinstance(metas, TensorMeta):
        return [metas]
    found: list[TensorMeta] = []
    for meta in metas:
        found += tensors(meta)
    return found


Bound = list["Arg | TensorMeta"]
Rule = Callable[[Bound, Sequence[Meta], Meta], "Work | None"]


def _bind(args: tuple[Arg, ...], operands: Sequence[Meta]) -> Bound:
    """``args`` with top-level references replaced by their metas."""
    bound: Bound = []
    position = 0
    for arg in args:
        if isinstance(arg, Ref):
            meta = operands[position] if position < len(operands) else None
            bound.append(meta if isinstance(meta, TensorMeta) else None)
            position += 1
        else:
            bound.append(arg)
            position += _count_refs(arg)
    return bound


def _count_refs(arg: Arg) -> int:
    if isinstance(arg, Ref):
        return 1
    return sum(map(_count_refs, arg)) if isinstance(arg, tuple) else 0


def _tensor(bound: Bound, position: int) -> TensorMeta | None:
    value = bound[position] if position < len(bound) else None
    return value if isinstance(value, TensorMeta) else None


def _bytes(*metas: Sequence[Meta] | Meta) -> float:
    return float(sum(t.bytes for meta in metas for t in tensors(meta)))


def _streaming(op: str, operands: Sequence[Meta], results: Meta) -> Work:
    made = tensors(results)
    written = sum(t.bytes for t in made)
    short = op.split(".")[1] if "." in op else op
    if op in CREATION_OPS:
        read = 0
    elif op in LOOKUP_OPS:
        # the table is read where the indices point; the other operands are read whole
        read = written + sum(t.bytes for t in tensors(operands[1:]))
    else:
        read = sum(t.bytes for t in tensors(operands))
    largest = max([t.numel for t in made] + [t.numel for t in tensors(operands)], default=0)
    dtype = next((t.dtype for t in [*made, *tensors(operands)] if t.is_float), "float32")
    return Work(
        op_class=OpClass.MEMORY,
        flops=float(largest * ELEMENT_FLOPS.get(short, 1.0)),
        moved_bytes=float((read + written) * PASSES.get(short, 1)),
        # element-wise arithmetic is done in float32 whatever is stored
        dtype="float64" if dtype == "float64" else "float32",
    )


def _matmul(
    left: TensorMeta | None, right: TensorMeta | None, operands: Sequence[Meta], results: Meta
) -> Work | None:
    if left is None or right is None or len(left.shape) < 2 or len(right.shape) < 2:
        return None
    batch = prod(left.shape[:-2])
    m, k = left.shape[-2:]
    n = right.shape[-1]
    return Work(
        op_class=OpClass.MATMUL,
        flops=2.0 * batch * m * n * k,
        moved_bytes=_bytes(operands, results),
        dtype=left.dtype,
        dims=(batch, m, n, k),
    )


def _mm(bound: Bound, operands: Sequence[Meta], results: Meta) -> Work | None:
    return _matmul(_tensor(bound, 0), _tensor(bound, 1), operands, results)


def _addmm(bound: Bound, operands: Sequence[Meta], results: Meta) -> Work | None:
    return _matmul(_tensor(bound, 1), _tensor(bound, 2), operands, results)


def _grouped_mm(bound: Bound, operands: Sequence[Meta], results: Meta) -> Work | None:
    """Each row meets the matrix of its own expert; rows that are ignored meet none."""
    rows, right = _tensor(bound, 0), _tensor(bound, 1)
    share = bound[3] if len(bound) > 3 else 1.0
    made = tensors(results)
    if rows is None or right is None or not made or not isinstance(share, float):
        return None
    depth, width = rows.shape[1], right.shape[-1]
    experts = (right if len(right.shape) == 3 else made[0]).shape[0]
    used = rows.shape[0] * share
    moved = (*tensors(operands[:2]), *made)
    return Work(
        op_class=OpClass.MATMUL,
        flops=2.0 * used * depth * width,
        moved_bytes=sum(t.bytes * (share if len(t.shape) == 2 else 1.0) for t in moved),
        dtype=rows.dtype,
        dims=(experts, max(1, round(used / max(1, experts))), width, depth),
        # one fused kernel, or one product per expert
        num_kernels=1 if rows.dtype == "bfloat16" else max(1, experts),
    )


def _convolution(bound: Bound, operands: Sequence[Meta], results: Meta) -> Work | None:
    x, weight, made = _tensor(bound, 0), _tensor(bound, 1), tensors(results)
    if x is None or weight is None or not made:
        return None
    transposed = len(bound) > 6 and bound[6] is True
    positions = x.numel // max(1, weight.shape[0]) if transposed else made[0].numel
    per_position = weight.numel if transposed else weight.numel // max(1, weight.shape[0])
    return Work(
        op_class=OpClass.CONV,
        flops=2.0 * positions * per_position,
        moved_bytes=_bytes(operands, results),
        dtype=x.dtype,
    )


def _convolution_backward(bound: Bound, operands: Sequence[Meta], results: Meta) -> Work | None:
    grad, x, weight = _tensor(bound, 0), _tensor(bound, 1), _tensor(bound, 2)
    if grad is None or x is None or weight is None:
        return None
    transposed = len(bound) > 7 and bound[7] is True
    channels = max(1, weight.shape[0])
    one = 2.0 * (x.numel if transposed else grad.numel) * (weight.numel // channels)
    mask = bound[10] if len(bound) > 10 else (True, True, True)
    wanted = mask if isinstance(mask, tuple) else (True, True, True)
    num_parts = sum(1 for part in wanted[:2] if part)
    return Work(
        op_class=OpClass.CONV,
        flops=num_parts * one,
        moved_bytes=max(1, num_parts) * _bytes(operands) + _bytes(results),
        dtype=x.dtype,
        num_kernels=max(1, num_parts),
    )


def _attention_flops(q: TensorMeta, k: TensorMeta, v: TensorMeta, *, is_causal: bool) -> float:
    """``2 B H S T (D + Dv)``, half of it if causal (the masked half is skipped in blocks)."""
    batch, heads, rows, width = q.shape
    full = 2.0 * batch * heads * rows * k.shape[-2] * (width + v.shape[-1])
    return full / 2 if is_causal else full


def score_matrix_bytes(op: str, args: tuple[Arg, ...], operands: Sequence[Meta]) -> int:
    """Temporary bytes of attention that is computed without a fused kernel; 0 for fused.

    ``args`` are those of ``autopar.attention`` or ``autopar.attention_backward``.
    """
    first, options = (1, 8) if "backward" in op else (0, 5)
    bound = _bind(args, operands)
    q, k, v = (_tensor(bound, first + i) for i in range(3))
    if q is None or k is None or v is None or len(q.shape) != 4 or len(bound) < options + 4:
        return 0
    is_causal, q_start, _, dropout_p = bound[options : options + 4]
    has_dropout = isinstance(dropout_p, int | float) and dropout_p > 0
    starts_later = is_causal is True and q_start != 0
    if not (has_dropout or starts_later or q.dtype == "float16" or v.shape[-1] != q.shape[-1]):
        return 0
    scores = q.numel // max(1, q.shape[-1]) * k.shape[-2]
    item_bytes = 8 if q.dtype == "float64" else 4
    return scores * (SCORE_COPIES * item_bytes + (BITS_BYTES if has_dropout else 0))


def _attention_work(
    op: str, qkv: tuple[TensorMeta | None, ...], call: tuple[tuple[Arg, ...], Sequence[Meta], Meta]
) -> Work | None:
    args, operands, results = call
    q, k, v = qkv
    if q is None or k is None or v is None or len(q.shape) != 4:
        return None
    is_backward = "backward" in op
    is_causal = next((a for a in args[3:] if isinstance(a, bool)), False)
    forward = _attention_flops(q, k, v, is_causal=is_causal)
    unfused = score_matrix_bytes(op, args, operands)
    return Work(
        op_class=OpClass.ATTENTION,
        flops=forward * (ATTENTION_BACKWARD_RATIO if is_backward else 1.0),
        # every temporary is written and read
        moved_bytes=_bytes(operands, results) + 2.0 * unfused,
        dtype=q.dtype,
        dims=(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3]),
        num_kernels=2 if is_backward else 1,
        is_backward=is_backward,
    )


def _lookup_backward(bound: Bound, operands: Sequence[Meta], results: Meta) -> Work:
    """A scatter into zeros: the result is written once, then read and written where rows fall."""
    made = _bytes(results)
    return Work(
        op_class=OpClass.MEMORY,
        moved_bytes=made + 2 * min(made, _bytes(operands[:1])) + _bytes(operands),
        num_kernels=2,
    )


def _unpack(bound: Bound, operands: Sequence[Meta], results: Meta) -> Work | None:
    """What lies as it is in a bucket is a view of it; all else is copied."""
    flat, dims = _tensor(bound, 0), bound[2]
    if flat is None or not isinstance(dims, tuple):
        return None
    pairs = zip(tensors(results), dims, strict=True)
    copied = [
        meta.bytes
        for meta, dim in pairs
        if not lies_as_it_is(dim if isinstance(dim, int) else None, flat.shape[0])
    ]
    return Work(op_class=OpClass.MEMORY, moved_bytes=2.0 * sum(copied)) if copied else FREE


_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        UNPACK: _unpack,
        "aten.mm.default": _mm,
        "aten.bmm.default": _mm,
        "aten.matmul.default": _mm,
        "aten.addmm.default": _addmm,
        "autopar.grouped_mm": _grouped_mm,
        "autopar.grouped_mm_weight": _grouped_mm,
        "aten.baddbmm.default": _addmm,
        "aten.convolution.default": _convolution,
        "aten.convolution_backward.default": _convolution_backward,
        "aten.embedding_dense_backward.default": _lookup_backward,
        "aten.index_put.default": _lookup_backward,
        "aten.scatter_add.default": _lookup_backward,
    }
)
