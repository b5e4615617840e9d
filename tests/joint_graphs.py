"""Joint graphs written by hand, without torch: residual networks of any depth."""

from __future__ import annotations

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


class Writer:
    """Grows a joint graph of float32 tensors."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def input(self, kind: InputKind, name: str, *shape: int, aliases: tuple[str, ...] = ()) -> str:
        meta = TensorMeta(shape, "float32")
        trained = kind is InputKind.PARAM
        self.inputs.append(Input(name, kind, name.replace("__", "."), meta, trained, aliases))
        self.shapes[name] = shape
        return name

    def op(
        self, name: str, op: str, *args: object, shape: tuple[int, ...], scope: str = "",
        twin: str | None = None,
    ) -> str:  # fmt: skip
        """Append an operator; text arguments are references."""
        refs = tuple(Ref(a) if isinstance(a, str) else a for a in args)
        phase = Phase.BACKWARD if name.startswith("d_") else Phase.FORWARD
        meta = TensorMeta(shape, "float32")
        self.nodes.append(Node(name, op, refs, meta, phase=phase, twin=twin, scope=scope))
        self.shapes[name] = shape
        return name

    def mm(self, name: str, a: str, b: str, scope: str = "", twin: str | None = None) -> str:
        shape = (self.shapes[a][0], self.shapes[b][1])
        return self.op(name, "aten.mm.default", a, b, shape=shape, scope=scope, twin=twin)

    def flip(self, name: str, a: str, twin: str | None = None) -> str:
        rows, columns = self.shapes[a]
        shape = (columns, rows)
        return self.op(name, "aten.permute.default", a, (1, 0), shape=shape, twin=twin)

    def output(self, kind: OutputKind, target: str, value: str) -> None:
        self.outputs.append(Output(kind, target.replace("__", "."), Ref(value)))

    def graph(self) -> Graph:
        return Graph(tuple(self.inputs), tuple(self.nodes), tuple(self.outputs))


def residual_network(
    depth: int, *, rows: int = 8, width: int = 8, hidden: int = 16, is_tied: bool = False
) -> Graph:
    """``h = x E``, then ``h = h + relu(h A_i) B_i`` for each layer, then ``loss = sum (h F)^2``.

    Args:
        depth: Layers.
        rows: Batch.
        width: Of ``h``.
        hidden: Between A and B.
        is_tied: Whether F is E.
    """
    w = Writer()
    x = w.input(InputKind.USER, "x", rows, width)
    first = w.input(InputKind.PARAM, "embed__weight", width, width)
    weights = [
        (
            w.input(InputKind.PARAM, f"layers__{i}__up", width, hidden),
            w.input(InputKind.PARAM, f"layers__{i}__down", hidden, width),
        )
        for i in range(depth)
    ]
    last = first if is_tied else w.input(InputKind.PARAM, "head__weight", width, width)
    tangent = w.input(InputKind.TANGENT, "tangent")
    h = w.mm("h0", x, first, "embed")
    saved = []
    for i, (up, down) in enumerate(weights):
        scope = f"layers.{i}"
        a = w.mm(f"a{i}", h, up, f"{scope}.up")
        r = w.op(f"r{i}", "aten.relu.default", a, shape=(rows, hidden), scope=f"{scope}.act")
        b = w.mm(f"b{i}", r, down, f"{scope}.down")
        saved.append((h, r))
        h = w.op(f"h{i + 1}", "aten.add.Tensor", h, b, shape=(rows, width), scope=scope)
    z = w.mm("z", h, last, "head")
    square = w.op("square", "aten.mul.Tensor", z, z, shape=(rows, width), scope="loss")
    w.output(
        OutputKind.LOSS,
        "loss",
        w.op("loss", "aten.sum.default", square, shape=(), scope="loss"),
    )
    twice = w.op("d_twice", "aten.mul.Tensor", z, 2.0, shape=(rows, width), twin="square")
    g = w.op("d_z", "aten.mul.Tensor", twice, tangent, shape=(rows, width), twin="square")
    ht = w.flip("d_hT", h, "z")
    w.output(OutputKind.GRAD, last, w.mm("d_last", ht, g, twin="z"))
    g = w.mm("d_h", g, w.flip("d_lastT", last, "z"), twin="z")
    for i in reversed(range(depth)):
        (up, down), (before, r) = weights[i], saved[i]
        rt = w.flip(f"d_rT{i}", r, f"b{i}")
        w.output(OutputKind.GRAD, down, w.mm(f"d_down{i}", rt, g, twin=f"b{i}"))
        dr = w.mm(f"d_r{i}", g, w.flip(f"d_downT{i}", down, f"b{i}"), twin=f"b{i}")
        da = w.op(
            f"d_a{i}", "aten.threshold_backward.default", dr, r, 0, shape=(rows, hidden),
            twin=f"r{i}",
        )  # fmt: skip
        xt = w.flip(f"d_hT{i}", before, f"a{i}")
        w.output(OutputKind.GRAD, up, w.mm(f"d_up{i}", xt, da, twin=f"a{i}"))
        back = w.mm(f"d_through{i}", da, w.flip(f"d_upT{i}", up, f"a{i}"), twin=f"a{i}")
        g = w.op(f"d_sum{i}", "aten.add.Tensor", g, back, shape=(rows, width))
    w.output(OutputKind.GRAD, first, w.mm("d_first", w.flip("d_xT", x, "h0"), g, twin="h0"))
    return w.graph()
