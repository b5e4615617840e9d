"""Run an emitted program as a generator: yield at each collective, free each value at its last use.

:func:`flatten` turns an fx module into a flat list of steps over numbered slots; constants sit in
slots of their own, so that most steps are ``slots[i] = function(*itemgetter(...)(slots))``. That
costs a third of a microsecond per operator, beside some microseconds of the operator itself.

Calls are boxed: :func:`execute` empties the list of inputs that it is given, so that a saved
activation dies at its last use and not when the caller's frame ends.

A collective is issued where it stands in the program and waited for right before its first user.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.errors import PassError
from autopar.ir.graph import Graph
from autopar.runtime.requests import Collective
from passes.base import NAME_KEY
from passes.comm_ops import COMM_NAMES
from passes.local_ops import pack

Slots: TypeAlias = list[object]
Gather: TypeAlias = Callable[[Slots], tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class Step:
    """One operator.

    Attributes:
        call: Function of the gathered operands; for a collective it makes the request.
        gather: Reads the operands from the slots.
        slot: Where the result goes.
        frees: Slots whose last reader this is.
        waits: Slots of collectives that this step is the first to read.
        is_request: Whether the step asks the driver.
        name: Name of the value, for messages.
    """

    call: Callable[..., object]
    gather: Gather
    slot: int
    frees: tuple[int, ...]
    waits: tuple[int, ...]
    is_request: bool
    name: str


@dataclass(frozen=True, slots=True)
class Program:
    """A program ready to run.

    Attributes:
        name: Such as ``"stage 1 forward"``.
        graph: The decided program; its inputs and outputs give the order of values.
        steps: Operators in order.
        template: Slots with the constants filled in.
        input_slots: Slot of each input; -1 for one that nobody reads.
        output_slots: Slot of each output; -1 for None.
        output_waits: Slots of collectives that only the outputs read.
    """

    name: str
    graph: Graph
    steps: tuple[Step, ...]
    template: tuple[object, ...]
    input_slots: tuple[int, ...]
    output_slots: tuple[int, ...]
    output_waits: tuple[int, ...]


def flatten(module: fx.GraphModule, graph: Graph, name: str) -> Program:
    """Turn an emitted module into steps.

    Args:
        module: From :func:`passes.pipeline.build`.
        graph: The program it was emitted from.
        name: For messages.
    """
    nodes = list(module.graph.nodes)
    results = nodes[-1].args[0]
    template: Slots = []
    slot_of: dict[fx.Node, int] = {}
    constants: dict[tuple[type, str], int] = {}

    def new_slot(value: object = None) -> int:
        template.append(value)
        return len(template) - 1

    def constant_slot(value: object) -> int:
        key = (type(value), repr(value))
        if key not in constants:
            constants[key] = new_slot(value)
        return constants[key]

    last_reader: dict[fx.Node, fx.Node] = {}
    first_reader: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            last_reader[operand] = node
            first_reader.setdefault(operand, node)
    dies_at: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last_reader.items():
        dies_at.setdefault(reader, []).append(node)
    waited_at: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in first_reader.items():
        if node.target in COMM_NAMES:
            waited_at.setdefault(reader, []).append(node)

    steps: list[Step] = []
    input_slots: list[int] = []
    for node in nodes[:-1]:
        if node.op == "placeholder":
            slot_of[node] = new_slot() if node.users else -1
            input_slots.append(slot_of[node])
            continue
        if node.op != "call_function" or not callable(node.target):
            raise PassError(f"{name}: {node.name} is a {node.op}; a program holds functions only")
        slot_of[node] = new_slot()
        frees = tuple(slot_of[n] for n in dies_at.get(node, ()))
        steps.append(
            Step(
                call=_request_maker(node) if node.target in COMM_NAMES else _function(node),
                gather=_gather(node, slot_of, constant_slot),
                slot=slot_of[node],
                frees=frees if node.users else (*frees, slot_of[node]),
                waits=tuple(slot_of[n] for n in waited_at.get(node, ())),
                is_request=node.target in COMM_NAMES,
                name=str(node.meta.get(NAME_KEY, node.name)),
            )
        )
    outputs = results if isinstance(results, tuple | list) else (results,)
    return Program(
        name=name,
        graph=graph,
        steps=tuple(steps),
        template=tuple(template),
        input_slots=tuple(input_slots),
        output_slots=tuple(slot_of[n] if isinstance(n, fx.Node) else -1 for n in outputs),
        output_waits=tuple(slot_of[n] for n in waited_at.get(nodes[-1], ())),
    )


def execute(
    program: Program, inputs: list[object]
) -> Generator[Collective, object, list[torch.Tensor | None]]:
    """Run a program.

    Args:
        program: What to run.
        inputs: One value per input of ``program.graph``; the list is emptied.

    Returns:
        One tensor per output, None for an output without a value.
    """
    slots = list(program.template)
    if len(inputs) != len(program.input_slots):
        raise PassError(f"{program.name}: {len(inputs)} inputs, needs {len(program.input_slots)}")
    for slot, value in zip(program.input_slots, inputs, strict=True):
        if slot >= 0:
            slots[slot] = value
    inputs.clear()
    value = None  # or this frame would keep the last input alive
    handover: list[object] = []  # a request in a local name would keep its operand alive
    step = None
    try:
        for step in program.steps:
            for slot in step.waits:
                slots[slot] = _arrived(slots[slot])
            if step.is_request:
                handover.append(step.call(*step.gather(slots)))
                for slot in step.frees:
                    slots[slot] = None
                slots[step.slot] = yield handover.pop()  # type: ignore[misc]  # a Collective
            else:
                slots[step.slot] = step.call(*step.gather(slots))
                for slot in step.frees:
                    slots[slot] = None
        step = None
        for slot in program.output_waits:
            slots[slot] = _arrived(slots[slot])
    except Exception as error:
        if step is not None:
            error.add_note(
                f"while running {step.name} of {program.name}{_source(program, step.name)}"
            )
        raise
    return [None if slot < 0 else slots[slot] for slot in program.output_slots]  # type: ignore[misc]


def _arrived(value: object) -> object:
    return value if isinstance(value, torch.Tensor) else value.wait()  # type: ignore[attr-defined]  # a Pending


def _source(program: Program, name: str) -> str:
    node = program.graph.node_map().get(name)
    if node is None:
        return ""
    return f" ({node.op}{f' from {node.source}' if node.source else ''})"


def _gather(
    node: fx.Node, slot_of: dict[fx.Node, int], constant_slot: Callable[[object], int]
) -> Gather:
    """A function that reads the operands from the slots."""
    if _has_nested_nodes(node):
        args, kwargs = node.args, node.kwargs
        slots_of = {n: slot_of[n] for n in node.all_input_nodes}

        def gather_nested(slots: Slots) -> tuple[object, ...]:
            def read(operand: fx.Node) -> fx.node.Argument:
                return slots[slots_of[operand]]  # type: ignore[return-value]  # a tensor

            return (map_arg(args, read), map_arg(kwargs, read))

        return gather_nested
    wanted = [slot_of[a] if isinstance(a, fx.Node) else constant_slot(a) for a in node.args]
    if not wanted:
        return lambda slots: ()
    if len(wanted) == 1:
        only = wanted[0]
        return lambda slots: (slots[only],)
    return itemgetter(*wanted)


def _has_nested_nodes(node: fx.Node) -> bool:
    """Whether a list or a keyword argument holds values, as in a concatenation."""
    found: list[fx.Node] = []

    def note(operand: fx.Node) -> fx.Node:
        found.append(operand)
        return operand

    map_arg([a for a in node.args if not isinstance(a, fx.Node)], note)
    map_arg(node.kwargs, note)
    return bool(found)


def _function(node: fx.Node) -> Callable[..., object]:
    """The operator as a function of what :func:`_gather` reads."""
    function = node.target
    if not callable(function):
        raise PassError(f"{node.name} has no function to call")
    if _has_nested_nodes(node):
        return lambda args, kwargs: function(*args, **kwargs)
    return partial(function, **node.kwargs) if node.kwargs else function


def _request_maker(node: fx.Node) -> Callable[..., Collective]:
    """A function from a collective's operands to its request; dims become non-negative."""
    kind = COMM_NAMES[node.target]  # type: ignore[index]  # checked by the caller
    name = str(node.meta.get(NAME_KEY, node.name))
    operand = node.args[0]
    # a bucket is new memory; if it is packed for this collective alone, it need not be kept
    given = isinstance(operand, fx.Node) and operand.target is pack and len(operand.users) == 1

    def make(tensor: torch.Tensor, *rest: object) -> Collective:
        rank = tensor.dim()
        match kind, rest:
            case "all_reduce", (str(op), str(axis)):
                return Collective(kind, tensor, axis, op=op, node=name, is_given=given)
            case "all_gather", (int(dim), str(axis), int(size)):
                return Collective(kind, tensor, axis, dim=dim % rank, out_size=size, node=name)
            case "reduce_scatter", (str(op), int(dim), str(axis)):
                return Collective(kind, tensor, axis, op=op, dim=dim % rank, node=name)
            case "all_to_all", (int(gather), int(scatter), str(axis), int(size)):
                return Collective(
                    kind, tensor, axis, dim=gather % rank, scatter_dim=scatter % rank,
                    out_size=size, node=name,
                )  # fmt: skip
            case "all_to_all_rows", (torch.Tensor() as splits, str(axis), int(size), bool(back)):
                return Collective(
                    kind, tensor, axis, out_size=size, node=name, splits=splits, is_back=back
                )
        raise PassError(f"{name}: comm.{kind} has no form with the arguments {rest}")

    return make
