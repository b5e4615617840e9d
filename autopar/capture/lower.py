"""The traced fx graph as a program: arguments bound, names of the user, twins and scopes.

The result still has torch's operators as traced; :mod:`autopar.capture.normalise` follows.

* *Arguments* are bound positionally by the operator's schema, defaults filled in; keyword-only
  arguments stay if they are not their default. Devices, layouts and memory formats are left out.
* *Names*: inputs are ``p_``, ``b_`` or ``u_`` and the user's name with underscores, tangents
  ``t_``. Here operators are called as in the trace with a ``%`` before it, which no input's name
  has (a tangent may well be ``t_1``, as a transposition is); they get their final names in
  normalisation.
* *Twins*: a backward operator carries the sequence number of the autograd node it came from; the
  first forward operator with that number made the autograd node. Gradient-accumulation adds
  carry a wrong number and have no twin.
* *Scope and source* of a backward operator are its twin's.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import torch

from autopar.capture.rewrites.strided import dense_order
from autopar.capture.torch_ops import dtype_name, meta_of
from autopar.errors import CaptureError
from autopar.ir.graph import (
    Arg,
    Dtype,
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
from autopar.torch_compat import OperatorSchema, operator_schema
from autopar.torch_tracing import SCOPE_KEY, SOURCE_KEY, JointTrace, TracedInput, TracedOutput

_PLACEMENT_ARGS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_OPERATOR_MARK = "%"
_MAX_INLINE_ELEMENTS = 4096  # a larger constant becomes an input: program text stays small
_INPUT_KINDS = {
    "param": (InputKind.PARAM, "p_"),
    "buffer": (InputKind.BUFFER, "b_"),
    "user": (InputKind.USER, "u_"),
    "tangent": (InputKind.TANGENT, "t_"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The user's names for the ends of a trace.

    Attributes:
        prefix: Start of qualified names that is not the user's.
        user_paths: Path of each user input.
        output_paths: Path of each output; the loss first, if there is one.
        has_loss: Whether the first output is the loss.
        tied: Groups of names of one tensor, in registration order.
        trainable: Names of parameters that need a gradient.
    """

    prefix: str
    user_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    has_loss: bool
    tied: tuple[tuple[str, ...], ...]
    trainable: frozenset[str]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program and the tensors of its constant inputs by name."""

    graph: Graph
    constants: Mapping[str, torch.Tensor]


def lower(trace: JointTrace, roles: Roles) -> Lowered:
    """The program of a trace, not yet normalised.

    Raises:
        CaptureError: The trace has something that no program can say.
    """
    return _Lowering(trace, roles).run()


class _Lowering:
    def __init__(self, trace: JointTrace, roles: Roles) -> None:
        self.trace = trace
        self.roles = roles
        self.first_name = {name: group[0] for group in roles.tied for name in group}
        self.aliases = {group[0]: group[1:] for group in roles.tied}
        self.values: dict[torch.fx.Node, Ref] = {}
        self.inputs: dict[str, Input] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.by_sequence: dict[int, Node] = {}

    def run(self) -> Lowered:
        """The program."""
        roles = iter(self.trace.inputs)
        for fx_node in self.trace.module.graph.nodes:
            if fx_node.op == "placeholder":
                self._input(fx_node, next(roles))
            elif fx_node.op == "get_attr":
                self._constant(fx_node)
            elif fx_node.op == "call_function":
                self._operator(fx_node)
        outputs = self._outputs()
        graph = Graph(tuple(self.inputs.values()), tuple(self.nodes), outputs)
        return Lowered(graph, self.constants)

    def _user_name(self, target: str) -> str:
        name = target.removeprefix(self.roles.prefix)
        return self.first_name.get(name, name)

    def _input(self, fx_node: torch.fx.Node, role: TracedInput) -> None:
        kind, prefix = _INPUT_KINDS[role.kind]
        match role.kind:
            case "user":
                target = self.roles.user_paths[role.index]
            case "tangent":
                target = self.roles.output_paths[role.index]
            case _:
                target = self._user_name(role.target)
        name = wanted = _identifier(prefix + target)
        number = len(self.inputs)
        while name in self.inputs and self.inputs[name].target != target:
            name = f"{wanted}_{number}"  # two paths that differ in punctuation
            number += 1
        if name not in self.inputs:
            meta = meta_of(fx_node.meta["val"])
            trained = kind is InputKind.PARAM and target in self.roles.trainable
            self.inputs[name] = Input(
                name, kind, target, meta, trained, self.aliases.get(target, ())
            )
        self.values[fx_node] = Ref(name)

    def _constant(self, fx_node: torch.fx.Node) -> None:
        tensor = getattr(self.trace.module, str(fx_node.target))
        meta = meta_of(tensor)
        name = _identifier(f"c_{fx_node.name}")
        if tensor.numel() > _MAX_INLINE_ELEMENTS:
            self.constants[name] = tensor.detach()
            self.inputs[name] = Input(name, InputKind.CONSTANT, name, meta)
        else:
            values = tuple(tensor.detach().reshape(-1).tolist())
            args: tuple[Arg, ...] = (values, meta.shape, Dtype(meta.dtype))
            self.nodes.append(Node(name, "autopar.constant", args, meta))
        self.values[fx_node] = Ref(name)

    def _operator(self, fx_node: torch.fx.Node) -> None:
        kwargs: tuple[tuple[str, Arg], ...] = ()
        if fx_node.target is operator.getitem:
            op, args = "getitem", tuple(map(self._arg, fx_node.args))
        elif (schema := operator_schema(fx_node.target)) is not None:
            op = _op_name(schema)
            args, kwargs = self._bind(fx_node, schema)
            if op.startswith("aten.as_strided"):
                check_strided(fx_node, op)
        else:
            raise CaptureError(
                f"the model uses {fx_node.target}, a call that is no torch operator "
                f"({_source(fx_node) or 'source unknown'}); leave it out of the compiled module"
            )
        backward = fx_node.meta.get("partitioner_tag") == "is_backward"
        twin = self._twin(fx_node) if backward else None
        node = Node(
            name=f"{_OPERATOR_MARK}{fx_node.name}",
            op=op,
            args=args,
            meta=_meta(fx_node.meta.get("val")),
            kwargs=kwargs,
            phase=Phase.BACKWARD if backward else Phase.FORWARD,
            twin=twin.name if twin is not None else None,
            scope=twin.scope if twin is not None else "" if backward else _scope(fx_node),
            source=twin.source if twin is not None else "" if backward else _source(fx_node),
        )
        if not backward and "seq_nr" in fx_node.meta:
            self.by_sequence.setdefault(fx_node.meta["seq_nr"], node)
        self.nodes.append(node)
        self.values[fx_node] = Ref(node.name)

    def _twin(self, fx_node: torch.fx.Node) -> Node | None:
        if fx_node.meta.get("is_gradient_acc"):
            return None
        return self.by_sequence.get(fx_node.meta.get("seq_nr", -1))

    def _bind(
        self, fx_node: torch.fx.Node, schema: OperatorSchema
    ) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        for position, argument in enumerate(schema.arguments):
            if argument.name in _PLACEMENT_ARGS:
                continue
            if position < len(fx_node.args):
                value = self._arg(fx_node.args[position])
            elif argument.name in fx_node.kwargs:
                value = self._arg(fx_node.kwargs[argument.name])
            else:
                value = self._arg(argument.default)
            if not argument.keyword_only:
                args.append(value)
            elif value != self._arg(argument.default):
                kwargs.append((argument.name, value))
        return tuple(args), tuple(kwargs)

    def _arg(self, value: object) -> Arg:
        match value:
            case torch.fx.Node():
                return self.values[value]
            case torch.dtype():
                return Dtype(dtype_name(value))
            case tuple() | list():
                return tuple(self._arg(item) for item in value)
            case None | bool() | int() | float() | str():
                return value
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                raise CaptureError("the model's sizes depend on values; give them fixed sizes")
            case torch.device() | torch.layout() | torch.memory_format():
                return None
        raise CaptureError(f"an operator has an argument of type {type(value).__name__}: {value!r}")

    def _outputs(self) -> tuple[Output, ...]:
        fx_outputs: Sequence[object] = self.trace.module.graph.output_node().args[0]  # type: ignore[assignment]
        outputs: list[Output] = []
        for value, role in zip(fx_outputs, self.trace.outputs, strict=True):
            ref = self.values[value] if isinstance(value, torch.fx.Node) else None
            output = self._output(role, ref)
            if output is not None:
                outputs.append(output)
        return tuple(outputs)

    def _output(self, role: TracedOutput, ref: Ref | None) -> Output | None:
        match role.kind:
            case "output":
                is_loss = self.roles.has_loss and role.index == 0
                kind = OutputKind.LOSS if is_loss else OutputKind.OUTPUT
                return Output(kind, self.roles.output_paths[role.index], ref)
            case "grad" if role.target:
                name = self._user_name(role.target)
                return Output(OutputKind.GRAD, name, ref) if name in self.roles.trainable else None
            case "buffer_mutation" | "param_mutation":
                return Output(OutputKind.MUTATION, self._user_name(role.target), ref)
            case "user_mutation":
                self._refuse_change(role, ref)
        return None

    def _refuse_change(self, role: TracedOutput, ref: Ref | None) -> NoReturn:
        sources = [n.source for n in self.nodes if ref is not None and n.name == ref.name]
        raise CaptureError(
            f"the model changes its input {self.roles.user_paths[role.index]!r} in place at "
            f"{next(filter(None, sources), 'an unknown line')}; a compiled model leaves the "
            "caller's tensors as they are: work on a copy, x = x.clone(), or use the operator "
            "without the underscore"
        )


def check_strided(fx_node: torch.fx.Node, op: str) -> None:
    """Refuse a read or write by strides that depends on the layout of memory.

    Raises:
        CaptureError: The tensor is not dense, or not all of it is read or written.
    """
    tensors = [a.meta["val"] for a in fx_node.args if isinstance(a, torch.fx.Node)]
    base, count = tensors[0], len(tensors)
    sizes, strides = (_ints(fx_node.args[count + i]) for i in (0, 1))
    offset = fx_node.args[count + 2] if len(fx_node.args) > count + 2 else None
    order = dense_order(sizes, strides)
    if base.is_contiguous() and not offset and order is not None and prod(sizes) == base.numel():
        return
    raise CaptureError(
        f"{op} at {_source(fx_node) or 'an unknown line'} {'writes' if count > 1 else 'reads'} "
        f"{prod(sizes)} of {base.numel()} elements by strides {tuple(strides)}, which no program "
        "without a memory layout can say; use slicing, view, expand or unfold"
    )


def _ints(value: object) -> tuple[int, ...]:
    assert isinstance(value, Sequence), value
    return tuple(int(item) for item in value)


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text)


def _op_name(schema: OperatorSchema) -> str:
    name = f"{schema.namespace}.{schema.name}"
    return name if schema.namespace == "autopar" else f"{name}.{schema.overload}"


def _meta(value: object) -> Meta:
    if isinstance(value, torch.Tensor):
        return meta_of(value)
    if isinstance(value, tuple | list):
        return tuple(_single_meta(item) for item in value)
    return None


def _single_meta(value: object) -> TensorMeta | None:
    return meta_of(value) if isinstance(value, torch.Tensor) else None


def _custom(fx_node: torch.fx.Node, key: str) -> str:
    return str((fx_node.meta.get("custom") or {}).get(key, ""))


def _scope(fx_node: torch.fx.Node) -> str:
    return _custom(fx_node, SCOPE_KEY)


def _source(fx_node: torch.fx.Node) -> str:
    return _custom(fx_node, SOURCE_KEY)
