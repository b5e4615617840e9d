"""The program that autopar reasons about: a torch-free, immutable operator graph.

One :class:`Graph` holds a joint forward and backward program in execution order. Values are named;
an argument refers to a value with :class:`Ref`. Operators are named as torch names them
(``"aten.mm.default"``), the neutral operators of autopar are ``"autopar.*"``, collectives are
``"comm.*"`` and rank-local index arithmetic is ``"local.*"``. ``"getitem"`` picks one result of an
operator with several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TypeAlias

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
FLOAT_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and element type of a tensor.

    Attributes:
        shape: Sizes of the dims.
        dtype: torch's name of the element type without the prefix, such as ``"float32"``.
        on_host: Whether it lies in the host's memory, in a local program that copies it there.
    """

    shape: tuple[int, ...]
    dtype: str
    on_host: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that the tensor takes on its device when it is dense; none if it is on the host."""
        return 0 if self.on_host else self.numel * ITEM_BYTES[self.dtype]

    @property
    def host_bytes(self) -> int:
        """Bytes that the tensor takes of the host's memory."""
        return self.numel * ITEM_BYTES[self.dtype] if self.on_host else 0

    @property
    def is_float(self) -> bool:
        """Whether the elements are real floating-point numbers."""
        return self.dtype in FLOAT_DTYPES

    def __str__(self) -> str:
        """Such as ``float32[4, 16]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value called ``name``."""

    name: str

    def __str__(self) -> str:
        """The name with a percent sign, as in ``%mm_3``."""
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype as an argument, such as ``Dtype("float32")``."""

    name: str

    def __str__(self) -> str:
        """The dtype's name."""
        return self.name


Arg: TypeAlias = "bool | int | float | str | Ref | Dtype | tuple[Arg, ...] | None"
Meta: TypeAlias = "TensorMeta | tuple[TensorMeta | None, ...] | None"
"""A tensor, several results (``None`` where an operator returns nothing), or an integer (None)."""


class Phase(StrEnum):
    """Which pass of the training step an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class InputKind(StrEnum):
    """Where a program input comes from."""

    PARAM = "param"
    BUFFER = "buffer"
    USER = "user"
    TANGENT = "tangent"
    RNG = "rng"
    CONSTANT = "constant"
    # kinds that only local programs have
    COORD = "coord"
    RECV = "recv"
    SAVED = "saved"
    PROLOGUE = "prologue"
    GRAD = "grad"


class OutputKind(StrEnum):
    """What a program output is for."""

    LOSS = "loss"
    OUTPUT = "output"
    MUTATION = "mutation"
    GRAD = "grad"
    # kinds that only local programs have
    SEND = "send"
    SAVED = "saved"
    PROLOGUE = "prologue"
    PARAM = "param"


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of a parameter that a program reads as an input of its own.

    Attributes:
        param: The parameter's first name.
        dim: Sliced dim.
        start: First index.
        stop: One beyond the last index.
    """

    param: str
    dim: int
    start: int
    stop: int

    def __str__(self) -> str:
        """Such as ``h.0.attn.c_attn.weight[1, 0:32]``."""
        return f"{self.param}[{self.dim}, {self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Input:
    """A named input of a program.

    Attributes:
        name: Name of the value.
        kind: Where it comes from.
        target: The user's own name: a parameter or buffer name, the path of a call argument
            (``"labels"``, ``"batch.ids"``), the value's name for the local kinds.
        meta: Shape and dtype; None for an integer (coordinates).
        requires_grad: Whether it is a trainable parameter.
        aliases: Other names of the same tensor (tied weights), in registration order.
        part: The slice of a parameter that this input is; ``target`` is then its text, and so is
            the target of its gradient.
        master: Dtype in which a parameter rests, if it is another one than that of ``meta``.
    """

    name: str
    kind: InputKind
    target: str
    meta: TensorMeta | None
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()
    part: Part | None = None
    master: str = ""

    @property
    def param(self) -> str:
        """The user's name of the parameter, also for a part of it."""
        return self.part.param if self.part is not None else self.target


@dataclass(frozen=True, slots=True)
class Output:
    """A named output of a program.

    Attributes:
        kind: What it is for.
        target: Parameter name for gradients, buffer name for mutations, path in the model's
            result for outputs, the value's name for the local kinds. A tied parameter may have
            several gradient outputs with the same target: they are summed.
        value: The value; None for a gradient that does not exist.
    """

    kind: OutputKind
    target: str
    value: Ref | None


@dataclass(frozen=True, slots=True)
class Node:
    """One operator.

    Attributes:
        name: Name of its value; unique in the graph.
        op: Operator name.
        args: Positional arguments in the order of the operator's schema.
        kwargs: Keyword-only arguments that are not their default (device and layout left out).
        meta: Shape and dtype of its result or results.
        phase: Forward or backward.
        twin: Name of the forward operator that a backward operator differentiates, if known.
        scope: Path of the module whose call made it, such as ``"model.layers.0.mlp"``.
        origin: In a local program, the name of the global operator it came from.
        source: The user's source line, ``"file.py:12 in forward"``, if known.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    meta: Meta
    kwargs: tuple[tuple[str, Arg], ...] = ()
    phase: Phase = Phase.FORWARD
    twin: str | None = None
    scope: str = ""
    origin: str = ""
    source: str = field(default="", compare=False)
    _refs: tuple[str, ...] | None = field(default=None, init=False, compare=False, repr=False)

    def refs(self) -> tuple[str, ...]:
        """Names of the operands in order of appearance, repeats included."""
        known = self._refs
        if known is None:
            found: list[str] = []
            _collect(self.args, found)
            for _, value in self.kwargs:
                _collect(value, found)
            known = tuple(found)
            object.__setattr__(self, "_refs", known)  # asked for by every walk over a graph
        return known

    def metas(self) -> tuple[TensorMeta | None, ...]:
        """Result metas as a tuple, one entry for an operator with one result."""
        return self.meta if isinstance(self.meta, tuple) else (self.meta,)

    def kwarg(self, name: str, default: Arg = None) -> Arg:
        """Value of a keyword-only argument."""
        return next((value for key, value in self.kwargs if key == name), default)

    def map_refs(
        self, change: Callable[[str], Arg]
    ) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """Arguments and keyword arguments with every reference replaced by ``change(name)``."""
        args = tuple(map_arg(a, change) for a in self.args)
        return args, tuple((k, map_arg(v, change)) for k, v in self.kwargs)


def map_arg(arg: Arg, change: Callable[[str], Arg]) -> Arg:
    """``arg`` with every :class:`Ref` replaced by ``change(name)``."""
    if isinstance(arg, Ref):
        return change(arg.name)
    if isinstance(arg, tuple):
        return tuple(map_arg(a, change) for a in arg)
    return arg


def _collect(arg: Arg, found: list[str]) -> None:
    if isinstance(arg, Ref):
        found.append(arg.name)
    elif isinstance(arg, tuple):
        for item in arg:
            _collect(item, found)


@dataclass(frozen=True)
class Graph:
    """A program: inputs, operators in execution order, outputs."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    @cached_property
    def kept(self) -> dict[str, object]:
        """What is found out about this very graph, by name, for those who ask again."""
        return {}

    def metas(self) -> dict[str, Meta]:
        """Meta of every value by name."""
        table: dict[str, Meta] = {i.name: i.meta for i in self.inputs}
        table.update((n.name, n.meta) for n in self.nodes)
        return table

    def node_map(self) -> dict[str, Node]:
        """Operators by name."""
        return {n.name: n for n in self.nodes}

    def input_map(self) -> dict[str, Input]:
        """Inputs by name."""
        return {i.name: i for i in self.inputs}

    def users(self) -> dict[str, list[str]]:
        """Names of the operators that read each value, in order; outputs not included."""
        table: dict[str, list[str]] = {i.name: [] for i in self.inputs}
        for node in self.nodes:
            table[node.name] = []
            for ref in dict.fromkeys(node.refs()):
                table[ref].append(node.name)
        return table

    def of_kind(self, kind: InputKind) -> Iterator[Input]:
        """Inputs of one kind, in order."""
        return (i for i in self.inputs if i.kind is kind)

    def outputs_of(self, kind: OutputKind) -> Iterator[Output]:
        """Outputs of one kind, in order."""
        return (o for o in self.outputs if o.kind is kind)
