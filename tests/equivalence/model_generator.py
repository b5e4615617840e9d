"""Random small models, as Python source, and random plans for them.

A model is grown block by block (:mod:`tests.equivalence.model_blocks`), every line evaluated as it
is written, so that shapes come from torch itself. What it does is smooth where it is evaluated:
kinks and comparisons are fed values shifted by a random parameter, sorts and maxima values that
cannot tie. Rounding then stays rounding.

Everything random comes from one function ``pick(options)``; options stand in the order of growing
complexity, so that hypothesis shrinks towards few and simple blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from hypothesis import strategies as st
from torch import nn

T = TypeVar("T")
Pick = Callable[[Sequence], object]

MAX_ELEMENTS = 3000
MAX_RANK = 5
LARGE = 16.0
"""Values above this are scaled down, so that no exponential overflows."""


@dataclass(frozen=True)
class Value:
    """A floating-point value of the model.

    Attributes:
        name: Variable.
        shape: Its shape.
        batch: The dim of the samples; None once it is gone, merged or unknown.
    """

    name: str
    shape: tuple[int, ...]
    batch: int | None

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Model:
    """A generated model.

    Attributes:
        source: Python text of the class ``Model`` and the function ``inputs``.
        blocks: How often each block was used.
        batch: Samples of the batch.
    """

    source: str
    blocks: Counter
    batch: int

    def build(self) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """The module with seeded weights, in training mode, and a batch."""
        scope: dict = {"torch": torch, "nn": nn, "F": nn.functional, "math": math}
        exec(compile(self.source, "<generated>", "exec"), scope)
        torch.manual_seed(0)
        module = scope["Model"]().train()
        torch.manual_seed(1)
        return module, scope["inputs"]()

    def __repr__(self) -> str:
        return f"\n{self.source}\n"


@dataclass
class Builder:
    """A model that grows.

    Attributes:
        pick: Chooses one of several options.
        batch: Samples.
        values: Values made so far, the latest last.
        linears: Weights of linear layers and tables, for tying: (name, in, out).
    """

    pick: Pick
    batch: int
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    linears: list[tuple[str, int, int]] = field(default_factory=list)
    blocks: Counter = field(default_factory=Counter)
    scope: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        owner = nn.Module()
        self.scope = {"self": owner, "torch": torch, "nn": nn, "F": nn.functional, "math": math}

    # -- choices ---------------------------------------------------------------------------------
    def flag(self, share: float = 0.5) -> bool:
        """True with about this probability."""
        return bool(self.pick([False] * round(10 * (1 - share)) + [True] * round(10 * share)))

    def dim(self, v: Value, *, any_share: float = 0.1) -> int:
        """A dim of ``v``, rarely that of the batch: a plan may then have micro-batches."""
        others = [d for d in range(v.rank) if d != v.batch]
        if not others or self.flag(any_share):
            return self.pick(range(v.rank))
        return self.pick(others)

    def size(self) -> int:
        """Of a new dim."""
        return self.pick([4, 8, 6, 2, 3, 5, 7, 9, 1])

    # -- lines -----------------------------------------------------------------------------------
    def attribute(self, expression: str) -> str:
        """A new attribute of the module."""
        name = f"m{len(self.init)}"
        self.init.append(f"self.{name} = {expression}")
        exec(f"self.{name} = {expression}", self.scope)
        return f"self.{name}"

    def param(self, *shape: int, scale: float = 1.0) -> str:
        """A new parameter of random values."""
        text = ", ".join(map(str, shape)) or "()"
        factor = "" if scale == 1.0 else f" * {scale:.3g}"
        return self.attribute(f"nn.Parameter(torch.randn({text}){factor})")

    def user(self, name: str, expression: str) -> str:
        """A call argument, made by ``expression`` and rarely used twice."""
        while name in self.inputs:
            name += "x"
        self.inputs[name] = expression
        exec(f"{name} = {expression}", self.scope)
        return name

    def line(self, expression: str) -> str:
        """Assign an expression to a new variable that need not be a float tensor."""
        name = f"v{len(self.body)}"
        with torch.no_grad():
            exec(f"{name} = {expression}", self.scope)
        self.body.append(f"{name} = {expression}")
        return name

    def let(self, expression: str, batch: int | None) -> Value:
        """Assign a floating-point expression to a new variable, scaled down if it is large."""
        name = self.line(expression)
        tensor = self.scope[name]
        assert tensor.is_floating_point()
        assert tensor.isfinite().all(), f"{self.source()}\n{expression} is not finite"
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        if largest > LARGE:
            name = self.line(f"{name} * {LARGE / 4 / largest:.2g}")
        shape = tuple(tensor.shape)
        is_batch = batch is not None and batch < len(shape) and shape[batch] == self.batch
        value = Value(name, shape, batch if is_batch else None)
        self.values.append(value)
        return value

    def generic(self, v: Value) -> str:
        """``v`` shifted by random numbers, so that no kink lies at its values."""
        if v.rank == 0:
            return f"({v.name} + {self.param()})"
        return f"({v.name} + {self.param(v.shape[-1])})"

    def distinct(self, v: Value, *dims: int) -> str:
        """``v`` with random numbers added, so that no two elements along ``dims`` are equal."""
        shape = [1 if d == v.batch and d not in dims else n for d, n in enumerate(v.shape)]
        return f"({v.name} + {self.param(*shape)})"

    def source(self) -> str:
        """The model as Python."""
        names = "".join(f", {name}" for name in self.inputs)
        lines = [
            "class Model(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in self.init),
            "",
            f"    def forward(self{names}):",
            *(f"        {line}" for line in self.body),
            "",
            "def inputs():",
            "    return {",
            *(f"        {name!r}: {text}," for name, text in self.inputs.items()),
            "    }",
        ]
        return "\n".join(lines)


def generate(pick: Pick) -> Model:
    """A random model with its loss."""
    from tests.equivalence.model_blocks import BLOCKS, LOSSES, SOURCES  # they need Builder

    builder = Builder(pick, batch=pick([4, 8, 6, 12, 3, 2, 5, 9]))
    source = pick(list(SOURCES))
    SOURCES[source](builder)
    builder.blocks[source] += 1
    for _ in range(pick([3, 4, 5, 6, 7, 8, 9, 10, 2, 1])):
        v = builder.values[-1] if builder.flag(0.8) else pick(builder.values)
        fitting = [name for name, block in BLOCKS.items() if block.fits(v)]
        name = pick(fitting)
        BLOCKS[name].grow(builder, v)
        builder.blocks[name] += 1
        if math.prod(builder.values[-1].shape) > MAX_ELEMENTS:
            BLOCKS["mean"].grow(builder, builder.values[-1])
    losses = []
    for _ in range(pick([1, 1, 1, 2, 3])):
        v = builder.values[-1] if not losses else pick(builder.values)
        fitting = [name for name, block in LOSSES.items() if block.fits(v)]
        name = pick(fitting)
        losses.append(LOSSES[name].grow(builder, v))
        builder.blocks[name] += 1
    weights = [1.0, 0.5, 0.25]
    text = " + ".join(f"{w} * {loss}" for w, loss in zip(weights, losses, strict=False))
    # other gradients may be zero but for rounding (of a mean of a softmax): this one is not
    first = builder.values[0]
    text += f" + 0.3 * ({first.name} * {builder.param(first.shape[-1])}).mean()"
    builder.body.append(f"return {text}")
    return Model(builder.source(), builder.blocks, builder.batch)


@dataclass(frozen=True)
class PlanDraw:
    """Degrees and seed of a random plan."""

    dp: int
    tp: int
    pp: int
    virtual: int
    microbatches: int
    schedule: str
    zero: int
    recompute: float
    seed: int

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp


def draw_plan(pick: Pick, batch: int) -> PlanDraw:
    """A plan of 2 to 8 ranks; whether the model allows it is found when it is made.

    The data ranks and micro-batches mostly divide the batch: else the plan is refused.
    """
    strict = pick([True] * 9 + [False])
    degrees = [
        (dp, tp, pp)
        for pp in (1, 2, 3, 4)
        for tp in (1, 2, 3, 4, 8)
        for dp in (1, 2, 3, 4)
        if 2 <= dp * tp * pp <= 8 and (batch % dp == 0 or not strict)
    ]
    dp, tp, pp = pick(degrees)
    microbatches = pick([m for m in (1, 2, 3, 4) if batch % (m * dp) == 0 or not strict])
    schedule = pick(["1f1b", "gpipe", "interleaved"]) if pp > 1 else pick(["1f1b", "gpipe"])
    virtual = 2 if schedule == "interleaved" else 1
    return PlanDraw(
        dp=dp,
        tp=tp,
        pp=pp,
        virtual=virtual,
        microbatches=microbatches,
        schedule=schedule,
        zero=pick([0, 1, 2, 3]),
        recompute=pick([0.0, 0.5, 1.0]),
        seed=pick(range(1000)),
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Random models."""
    return generate(lambda options: draw(st.sampled_from(list(options))))


@st.composite
def plans(draw: st.DrawFn, batch: int) -> PlanDraw:
    """Random plans for a batch of so many samples."""
    return draw_plan(lambda options: draw(st.sampled_from(list(options))), batch)
