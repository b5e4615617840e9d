"""A two-stage network written by hand as local programs, with its reference in plain torch.

``y = relu(x W1) W2`` is stage 0 (tensor parallel: W1 by columns, W2 by rows, an all_reduce),
``loss = sum((y W3)^2)`` is stage 1 (W3 stored in blocks over dp: gathered before, scattered after).
The batch of 8 rows is split over micro-batches and dp.
"""

from __future__ import annotations

import torch

from autopar.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    TensorMeta,
)
from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.sharding.placement import P, R, Shard
from autopar.sharding.programs import (
    LocalPrograms,
    ParamSpec,
    ResultSpec,
    StagePrograms,
    TensorSpec,
)

ROWS, WIDTH, HIDDEN, CLASSES = 8, 4, 6, 3
EMPTY = Graph((), (), ())


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float64")


def node(name: str, op: str, args: tuple, *shape: int, phase: Phase = Phase.FORWARD) -> Node:
    refs = tuple(Ref(a[1:]) if isinstance(a, str) and a.startswith("%") else a for a in args)
    return Node(name, op, refs, meta(*shape), phase=phase)


def inp(kind: InputKind, target: str, *shape: int) -> Input:
    return Input(target, kind, target, meta(*shape))


def out(kind: OutputKind, target: str, value: str) -> Output:
    return Output(kind, target, Ref(value))


def two_stage(
    mesh: MeshShape, num_microbatches: int = 2, *, drop_all_reduce: bool = False
) -> LocalPrograms:
    """Local programs for a mesh with pp 1 or 2."""
    rows = ROWS // (num_microbatches * mesh.dp)
    all_rows = rows * mesh.dp
    cols = HIDDEN // mesh.tp
    stored = WIDTH // mesh.dp
    params = [inp(InputKind.PARAM, "W1", WIDTH, cols), inp(InputKind.PARAM, "W2", cols, WIDTH)]
    x = inp(InputKind.USER, "x", rows, WIDTH)
    y = inp(InputKind.RECV, "y", rows, WIDTH)
    w3 = inp(InputKind.PARAM, "W3", WIDTH, CLASSES)

    def reduced(value: str) -> tuple:
        return ("%" + value, "sum", "tp")

    name = "y_partial" if not drop_all_reduce else "y"
    forward0 = Graph(
        (*params, x),
        (
            node("a", "aten.mm.default", ("%x", "%W1"), rows, cols),
            node("h", "aten.relu.default", ("%a",), rows, cols),
            node(name, "aten.mm.default", ("%h", "%W2"), rows, WIDTH),
            *(
                ()
                if drop_all_reduce
                else (node("y", "comm.all_reduce", reduced(name), rows, WIDTH),)
            ),
        ),
        (out(OutputKind.SEND, "y", "y"), out(OutputKind.SAVED, "h", "h")),
    )
    forward1 = Graph(
        (w3, y),
        (
            node("z", "aten.mm.default", ("%y", "%W3"), rows, CLASSES),
            node("sq", "aten.mul.Tensor", ("%z", "%z"), rows, CLASSES),
            node("loss", "aten.sum.default", ("%sq",)),
            node("z_all", "comm.all_gather", ("%z", 0, "dp", all_rows), all_rows, CLASSES),
        ),
        (
            out(OutputKind.LOSS, "loss", "loss"),
            out(OutputKind.SAVED, "z", "z"),
            out(OutputKind.OUTPUT, "z", "z_all"),
        ),
    )  # fmt: skip
    backward1 = Graph(
        (w3, y, inp(InputKind.SAVED, "z", rows, CLASSES), inp(InputKind.TANGENT, "loss")),
        (
            node("g", "aten.mul.Tensor", ("%z", 2.0), rows, CLASSES),
            node("gt", "aten.mul.Tensor", ("%g", "%loss"), rows, CLASSES),
            node("yt", "aten.permute.default", ("%y", (1, 0)), WIDTH, rows),
            node("dW3", "aten.mm.default", ("%yt", "%gt"), WIDTH, CLASSES),
            node("W3t", "aten.permute.default", ("%W3", (1, 0)), CLASSES, WIDTH),
            node("dy", "aten.mm.default", ("%gt", "%W3t"), rows, WIDTH),
        ),
        (out(OutputKind.GRAD, "W3", "dW3"), out(OutputKind.SEND, "dy", "dy")),
    )
    backward0 = Graph(
        (
            params[1],
            x,
            inp(InputKind.SAVED, "h", rows, cols),
            inp(InputKind.RECV, "dy", rows, WIDTH),
        ),
        (
            node("ht", "aten.permute.default", ("%h", (1, 0)), cols, rows),
            node("dW2", "aten.mm.default", ("%ht", "%dy"), cols, WIDTH),
            node("W2t", "aten.permute.default", ("%W2", (1, 0)), WIDTH, cols),
            node("dh", "aten.mm.default", ("%dy", "%W2t"), rows, cols),
            node("da", "aten.threshold_backward.default", ("%dh", "%h", 0), rows, cols),
            node("xt", "aten.permute.default", ("%x", (1, 0)), WIDTH, rows),
            node("dW1", "aten.mm.default", ("%xt", "%da"), WIDTH, cols),
        ),
        (out(OutputKind.GRAD, "W1", "dW1"), out(OutputKind.GRAD, "W2", "dW2")),
    )
    unshard0 = Graph(tuple(params), (), tuple(out(OutputKind.PARAM, n, n) for n in ("W1", "W2")))
    unshard1 = Graph(
        (inp(InputKind.PARAM, "W3", stored, CLASSES),),
        (node("full", "comm.all_gather", ("%W3", 0, "dp", WIDTH), WIDTH, CLASSES),),
        (out(OutputKind.PARAM, "W3", "full"),),
    )
    reduce0 = Graph(
        (inp(InputKind.GRAD, "W1", WIDTH, cols), inp(InputKind.GRAD, "W2", cols, WIDTH)),
        (
            node("r1", "comm.all_reduce", ("%W1", "sum", "dp"), WIDTH, cols),
            node("r2", "comm.all_reduce", ("%W2", "sum", "dp"), cols, WIDTH),
        ),
        (out(OutputKind.GRAD, "W1", "r1"), out(OutputKind.GRAD, "W2", "r2")),
    )
    reduce1 = Graph(
        (inp(InputKind.GRAD, "W3", WIDTH, CLASSES),),
        (node("r3", "comm.reduce_scatter", ("%W3", "sum", 0, "dp"), stored, CLASSES),),
        (out(OutputKind.GRAD, "W3", "r3"),),
    )
    finish1 = Graph(
        (inp(InputKind.GRAD, "loss"),),
        (node("total", "comm.all_reduce", ("%loss", "sum", "dp")),),
        (out(OutputKind.LOSS, "loss", "total"),),
    )

    def param(name: str, owner: int, storage: tuple, compute: tuple, *shape: int) -> ParamSpec:
        return ParamSpec(
            name=name, aliases=(), meta=meta(*shape), requires_grad=True, owner=owner,
            stages=(owner,), storage=storage, compute=compute,
        )  # fmt: skip

    by_cols, by_rows = (R, R, Shard(1)), (R, R, Shard(0))
    return LocalPrograms(
        axis_sizes=(num_microbatches, mesh.dp, mesh.tp),
        stages=(
            StagePrograms(index=0, unshard=unshard0, prologue=EMPTY, forward=forward0,
                          backward=backward0, reduce=reduce0, finish=EMPTY),
            StagePrograms(index=1, unshard=unshard1, prologue=EMPTY, forward=forward1,
                          backward=backward1, reduce=reduce1, finish=finish1),
        ),
        params={
            "W1": param("W1", 0, by_cols, by_cols, WIDTH, HIDDEN),
            "W2": param("W2", 0, by_rows, by_rows, HIDDEN, WIDTH),
            "W3": param("W3", 1, (R, Shard(0), R), (R, R, R), WIDTH, CLASSES),
        },
        buffers={},
        buffer_stages={},
        users={"x": TensorSpec(meta(ROWS, WIDTH), (Shard(0), Shard(0), R))},
        user_stages={"x": (0,)},
        tangents={"loss": TensorSpec(meta(), (R, R, R))},
        results=(
            ResultSpec(kind=OutputKind.LOSS, target="loss", stage=1,
                       spec=TensorSpec(meta(), (P, P, R))),
            ResultSpec(kind=OutputKind.OUTPUT, target="z", stage=1,
                       spec=TensorSpec(meta(ROWS, CLASSES), (Shard(0), R, R))),
        ),
        forward_edges={(0, 1): ("y",)},
        backward_edges={(1, 0): ("dy",)},
        edge_metas={"y": meta(rows, WIDTH), "dy": meta(rows, WIDTH)},
        grads={
            (0, "W1"): TensorSpec(meta(WIDTH, HIDDEN), (P, P, Shard(1))),
            (0, "W2"): TensorSpec(meta(HIDDEN, WIDTH), (P, P, Shard(0))),
            (1, "W3"): TensorSpec(meta(WIDTH, CLASSES), (P, P, R)),
        },
    )  # fmt: skip


def two_stage_actions(
    mesh: MeshShape,
    num_microbatches: int = 2,
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
    zero_levels: tuple[int, ...] = (),
):
    """Action lists for the two stages; on one pipeline rank ``mesh.virtual`` must be 2."""
    order = compute_order(kind, mesh.pp, mesh.virtual, num_microbatches)
    return action_lists(
        order, mesh, forward_edges=[(0, 1)], backward_edges=[(1, 0)], zero_levels=zero_levels
    )


def two_stage_data() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(Parameters, call arguments), float64, seeded."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    params = {"W1": draw(WIDTH, HIDDEN), "W2": draw(HIDDEN, WIDTH), "W3": draw(WIDTH, CLASSES)}
    return params, {"x": draw(ROWS, WIDTH)}


def two_stage_reference(
    params: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """(Loss, gradients, z) by autograd."""
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    z = torch.relu(inputs["x"] @ leaves["W1"]) @ leaves["W2"] @ leaves["W3"]
    loss = z.pow(2).sum()
    loss.backward()
    grads = {n: p.grad for n, p in leaves.items() if p.grad is not None}
    return loss.detach(), grads, z.detach()
