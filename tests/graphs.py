"""Small hand-made graphs, torch-free, for tests of the deciding half."""

from __future__ import annotations

from autopar.ir.graph import (
    Arg,
    Graph,
    Input,
    InputKind,
    Meta,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    TensorMeta,
)


class GraphBuilder:
    """Grows a graph; every method returns a reference to the value it made."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self.metas: dict[str, Meta] = {}

    def input(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: InputKind = InputKind.USER,
        dtype: str = "float64",
    ) -> Ref:
        meta = TensorMeta(shape, dtype)
        self.inputs.append(Input(name, kind, name, meta, kind is InputKind.PARAM))
        self.metas[name] = meta
        return Ref(name)

    def param(self, name: str, shape: tuple[int, ...]) -> Ref:
        return self.input(name, shape, InputKind.PARAM)

    def op(
        self,
        name: str,
        op: str,
        args: tuple[Arg, ...],
        shape: tuple[int, ...],
        *,
        twin: str | None = None,
        backward: bool = False,
        dtype: str = "float64",
        scope: str = "",
        source: str = "",
    ) -> Ref:
        meta = TensorMeta(shape, dtype)
        phase = Phase.BACKWARD if backward or twin else Phase.FORWARD
        self.nodes.append(
            Node(name, op, args, meta, phase=phase, twin=twin, scope=scope, source=source)
        )
        self.metas[name] = meta
        return Ref(name)

    def output(self, kind: OutputKind, target: str, value: Ref) -> None:
        self.outputs.append(Output(kind, target, value))

    def build(self) -> Graph:
        return Graph(tuple(self.inputs), tuple(self.nodes), tuple(self.outputs))


def mlp(batch: int = 8, width: int = 4, hidden: int = 6, layers: int = 1) -> Graph:
    """``loss = sum(relu(x Wa) Wb ...)`` with its backward; weights are ``w0a``, ``w0b``, ..."""
    b = GraphBuilder()
    x = b.input("x", (batch, width))
    weights = [
        (b.param(f"w{i}a", (width, hidden)), b.param(f"w{i}b", (hidden, width)))
        for i in range(layers)
    ]
    tangent = b.input("t", (), InputKind.TANGENT)
    value, trail = x, []
    for i, (wa, wb) in enumerate(weights):
        up = b.op(f"up{i}", "aten.mm.default", (value, wa), (batch, hidden), scope=f"layers.{i}")
        act = b.op(f"act{i}", "aten.relu.default", (up,), (batch, hidden), scope=f"layers.{i}")
        down = b.op(f"down{i}", "aten.mm.default", (act, wb), (batch, width), scope=f"layers.{i}")
        trail.append((value, act, wa, wb))
        value = down
    loss = b.op("loss", "aten.sum.dim_IntList", (value, (0, 1), False), ())
    b.output(OutputKind.LOSS, "loss", loss)
    grad = b.op("g", "aten.expand.default", (tangent, (batch, width)), (batch, width), twin="loss")
    for i in reversed(range(layers)):
        before, act, wa, wb = trail[i]
        at = b.op(f"act{i}_t", "aten.permute.default", (act, (1, 0)), (hidden, batch))
        gb = b.op(f"gw{i}b", "aten.mm.default", (at, grad), (hidden, width), twin=f"down{i}")
        b.output(OutputKind.GRAD, f"w{i}b", gb)
        wbt = b.op(f"w{i}b_t", "aten.permute.default", (wb, (1, 0)), (width, hidden))
        ga = b.op(f"gact{i}", "aten.mm.default", (grad, wbt), (batch, hidden), twin=f"down{i}")
        gu = b.op(
            f"gup{i}",
            "aten.threshold_backward.default",
            (ga, act, 0),
            (batch, hidden),
            twin=f"act{i}",
        )
        xt = b.op(f"x{i}_t", "aten.permute.default", (before, (1, 0)), (width, batch))
        gw = b.op(f"gw{i}a", "aten.mm.default", (xt, gu), (width, hidden), twin=f"up{i}")
        b.output(OutputKind.GRAD, f"w{i}a", gw)
        if i:
            wat = b.op(f"w{i}a_t", "aten.permute.default", (wa, (1, 0)), (hidden, width))
            grad = b.op(f"gx{i}", "aten.mm.default", (gu, wat), (batch, width), twin=f"up{i}")
    return b.build()
