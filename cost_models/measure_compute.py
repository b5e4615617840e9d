"""Micro-benchmarks of one device: matmuls, attention, memory, copies, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn import functional

from autopar.units import KIB, MIB
from cost_models.measure_meter import Run, Task
from cost_models.profile import PointKind

FIRST_MATMULS = ((1, 256, 256, 256), (1, 512, 512, 512), (1, 64, 256, 256), (1, 128, 512, 64))
MORE_MATMULS = (
    (1, 1024, 1024, 1024), (1, 512, 64, 512), (1, 64, 64, 64), (8, 128, 128, 64), (32, 64, 64, 32),
    (1, 1024, 256, 1024), (1, 2048, 512, 128), (1, 16, 512, 512),
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float64")
STREAM_BYTES = (32 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)
ACCELERATOR_SCALE = 8  # edges of matmuls on accelerators, which small ones do not fill
ATTENTIONS = ((4, 4, 64, 64, 32), (2, 8, 256, 256, 32), (1, 8, 512, 512, 64))
COPY_BYTES = (64 * KIB, 4 * MIB, 64 * MIB)
OPTIMIZER_TENSORS = 8
OPTIMIZER_BYTES = (16 * KIB, 1 * MIB, 8 * MIB)


def first_tasks(device: torch.device) -> Iterator[Task]:
    """What every price is fitted to: launches, a few float32 matmuls, passes over memory."""
    yield from launch_tasks(device)
    for dims in FIRST_MATMULS:
        yield matmul_task(dims, "float32", device)
    for moved_bytes in STREAM_BYTES:
        yield stream_task("add", moved_bytes, device)


def launch_tasks(device: torch.device, busy: int = 1) -> Iterator[Task]:
    """What an operator costs on next to no data, and a view."""
    small = torch.ones(4, 4, device=device)
    yield Task(kind=PointKind.LAUNCH, prepare=lambda: lambda: small + 1.0, name="add", busy=busy)
    yield Task(
        kind=PointKind.LAUNCH, prepare=lambda: lambda: small.transpose(0, 1), name="view", busy=busy
    )


def compute_tasks(device: torch.device) -> Iterator[Task]:
    """Matmuls over shapes and dtypes, attention, passes over memory, copies, optimizers."""
    for dtype in DTYPES:
        for dims in (*FIRST_MATMULS, *MORE_MATMULS):
            yield matmul_task(dims, dtype, device)
    for sizes in ATTENTIONS:
        for name in ("forward", "backward"):
            yield attention_task(sizes, name, device)
    for name in STREAMS:
        for moved_bytes in STREAM_BYTES:
            yield stream_task(name, moved_bytes, device)
    if device.type == "cuda":
        for size_bytes in COPY_BYTES:
            yield _copy_task(PointKind.HOST_TO_DEVICE, size_bytes, device)
            yield _copy_task(PointKind.DEVICE_TO_HOST, size_bytes, device)


def busy_tasks(device: torch.device, busy: int) -> Iterator[Task]:
    """The same work while ``busy`` ranks of a machine do it: what they take from each other."""
    yield from launch_tasks(device, busy)
    for dims in FIRST_MATMULS[:2]:
        yield matmul_task(dims, "float32", device, busy)
    for moved_bytes in STREAM_BYTES:
        yield stream_task("add", moved_bytes, device, busy)


def matmul_task(dims: tuple[int, ...], dtype: str, device: torch.device, busy: int = 1) -> Task:
    """A (batched) matmul ``b, m, n, k``; edges are larger on accelerators."""
    scale = ACCELERATOR_SCALE if device.type == "cuda" else 1
    b, m, n, k = dims[0], *(size * scale for size in dims[1:])

    def prepare() -> Run:
        kind = getattr(torch, dtype)
        left = torch.randn(b, m, k, device=device).to(kind)
        right = torch.randn(b, k, n, device=device).to(kind)
        if b == 1:
            left, right = left[0], right[0]
            return lambda: torch.mm(left, right)
        return lambda: torch.bmm(left, right)

    return Task(kind=PointKind.MATMUL, prepare=prepare, dtype=dtype, sizes=(b, m, n, k), busy=busy)


def attention_task(sizes: tuple[int, ...], name: str, device: torch.device) -> Task:
    """Fused causal attention ``b, h, s, t, d``, forward or backward."""

    def prepare() -> Run:
        b, h, s, t, d = sizes
        wants = name == "backward"
        q = torch.randn(b, h, s, d, device=device, requires_grad=wants)
        k = torch.randn(b, h, t, d, device=device, requires_grad=wants)
        v = torch.randn(b, h, t, d, device=device, requires_grad=wants)
        if not wants:
            return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return Task(kind=PointKind.ATTENTION, prepare=prepare, sizes=sizes, name=name)


def _edges(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 256)


# Passes over memory by name, of a flat tensor; bytes moved in units of the tensor.
STREAMS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "add": (2, lambda x: x + 1.0),
    "copy": (2, lambda x: x.clone()),
    "transposed_copy": (2, lambda x: _edges(x).t().contiguous()),
    "mul": (3, lambda x: x * x),
    "exp": (2, lambda x: torch.exp(x)),
    "gelu": (2, lambda x: functional.gelu(x)),
    "softmax": (2, lambda x: torch.softmax(_edges(x), -1)),
    "layer_norm": (2, lambda x: functional.layer_norm(_edges(x), (256,))),
    "sum": (1, lambda x: _edges(x).sum(0)),
    "gather": (2, lambda x: _edges(x)[torch.arange(x.numel() // 256, device=x.device)]),
}


def stream_task(name: str, moved_bytes: int, device: torch.device, busy: int = 1) -> Task:
    """A pass over memory that reads and writes ``moved_bytes`` in all."""
    tensors, function = STREAMS[name]

    def prepare() -> Run:
        rows = max(1, moved_bytes // (4 * 256 * tensors))
        x = torch.rand(rows * 256, device=device)
        return lambda: function(x)

    return Task(kind=PointKind.STREAM, prepare=prepare, sizes=(moved_bytes,), name=name, busy=busy)


def _copy_task(kind: PointKind, size_bytes: int, device: torch.device) -> Task:
    def prepare() -> Run:
        host = torch.ones(size_bytes // 4, pin_memory=True)
        there = torch.ones(size_bytes // 4, device=device)
        if kind is PointKind.HOST_TO_DEVICE:
            return lambda: there.copy_(host, non_blocking=True)
        return lambda: host.copy_(there, non_blocking=True)

    return Task(kind=kind, prepare=prepare, sizes=(size_bytes,))


def optimizer_tasks(device: torch.device, busy: int, name: str = "adamw") -> Iterator[Task]:
    """Steps of an optimizer; over several ranks its parameters are distributed tensors."""
    for each_bytes in OPTIMIZER_BYTES:
        yield _optimizer_task(device, busy, name, each_bytes)


def _optimizer_task(device: torch.device, busy: int, name: str, each_bytes: int) -> Task:
    def prepare() -> Run:
        def values() -> list[torch.Tensor]:
            made = [torch.randn(each_bytes // 4, device=device) for _ in range(OPTIMIZER_TENSORS)]
            return [_distributed(v) for v in made] if busy > 1 else made

        parameters = [torch.nn.Parameter(v) for v in values()]
        # no zeros: a CPU takes several times as long for the root of a zero
        for parameter, gradient in zip(parameters, values(), strict=True):
            parameter.grad = gradient
        makes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        optimizer = makes[name](parameters, lr=1e-3)
        return lambda: optimizer.step()

    return Task(
        kind=PointKind.OPTIMIZER,
        prepare=prepare,
        sizes=(OPTIMIZER_TENSORS, OPTIMIZER_TENSORS * each_bytes),
        name=name,
        busy=busy,
    )


def _distributed(value: torch.Tensor) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(value.device.type, (dist.get_world_size(),))
    return DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
