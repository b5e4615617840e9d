"""A plain one-device interpreter of a program: the reference of every equivalence check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from autopar.capture.calls import bind_call
from autopar.capture.torch_ops import to_torch, torch_callable, torch_dtype
from autopar.capture.tracing import Captured
from autopar.errors import InputError
from autopar.ir.graph import FLOAT_DTYPES, Graph, Input, InputKind, Node, OutputKind, TensorMeta

_DOUBLE = "float64"


def run_graph(
    graph: Graph,
    inputs: Mapping[str, torch.Tensor],
    *,
    device: torch.device | None = None,
    observe: Callable[[Node, object], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Outputs of ``graph`` by ``"<kind>:<target>"``, such as ``"grad:lm_head.weight"``.

    Several outputs of one kind and target (gradients of a tied weight) are summed; outputs
    without a value are left out. A value is dropped after its last use.

    Args:
        graph: A program of aten and neutral operators.
        inputs: A tensor for every input, by input name; see :func:`bind_inputs`.
        device: Where operators without operands make their results.
        observe: Called with each operator and its value.

    Raises:
        InputError: An input is missing, or an operator fails on the values.
    """
    missing = [i.name for i in graph.inputs if i.name not in inputs]
    if missing:
        raise InputError(f"run_graph: no value for inputs {missing}; the program needs them all")
    values: dict[str, object] = {i.name: inputs[i.name] for i in graph.inputs}
    last_use = _last_uses(graph)
    with torch.no_grad(), default_floats((graph,)):
        for position, node in enumerate(graph.nodes):
            function = torch_callable(node.op, device=device)
            args = [to_torch(a, values.__getitem__) for a in node.args]
            kwargs = {k: to_torch(a, values.__getitem__) for k, a in node.kwargs}
            try:
                values[node.name] = function(*args, **kwargs)
            except (IndexError, RuntimeError) as error:
                raise InputError(
                    f"{node.op} at {node.source or node.scope or node.name} fails on this batch: "
                    f"{error}; check the values of the inputs, such as ids and labels in range"
                ) from error
            if observe is not None:
                observe(node, values[node.name])
            for name in last_use.get(position, ()):
                del values[name]
        results: dict[str, torch.Tensor] = {}
        for output in graph.outputs:
            if output.value is None:
                continue
            value = values[output.value.name]
            assert isinstance(value, torch.Tensor), output
            name = f"{output.kind}:{output.target}"
            results[name] = results[name] + value if name in results else value
    return _with_whole_gradients(graph, results)


@contextlib.contextmanager
def default_floats(graphs: Iterable[Graph]) -> Iterator[None]:
    """Let integers become doubles while the body runs, if programs know no other float.

    An operator that makes floats of integers alone (``ids * 0.5``) does so in torch's default
    dtype, of which a promoted program says nothing.
    """
    before = torch.get_default_dtype()
    metas: list[TensorMeta | None] = []
    for graph in graphs:
        metas += [entry.meta for entry in graph.inputs]
        metas += [meta for node in graph.nodes for meta in node.metas()]
    found = {m.dtype for m in metas if m is not None and m.dtype in FLOAT_DTYPES}
    if found == {_DOUBLE}:
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _with_whole_gradients(
    graph: Graph, results: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients of a parameter's parts joined under the parameter's name."""
    parts: dict[str, list[Input]] = {}
    for entry in graph.of_kind(InputKind.PARAM):
        if entry.part is not None and f"{OutputKind.GRAD}:{entry.target}" in results:
            parts.setdefault(entry.param, []).append(entry)
    for name, entries in parts.items():
        ordered = sorted(((e.part.start, e) for e in entries if e.part is not None), key=_start)
        pieces = [results.pop(f"{OutputKind.GRAD}:{e.target}") for _, e in ordered]
        dim = entries[0].part.dim if entries[0].part is not None else 0
        results[f"{OutputKind.GRAD}:{name}"] = torch.cat(pieces, dim)
    return results


def _start(pair: tuple[int, Input]) -> int:
    return pair[0]


def whole_parameters(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters by the user's name, parts joined.

    Args:
        graph: The program.
        inputs: Values by input name, as :func:`bind_inputs` gives them.
    """
    found: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for entry in graph.of_kind(InputKind.PARAM):
        start, dim = (entry.part.start, entry.part.dim) if entry.part is not None else (0, 0)
        found.setdefault(entry.param, []).append((start, dim, inputs[entry.name]))
    return {
        name: pieces[0][2]
        if len(pieces) == 1
        else torch.cat([p[2] for p in sorted(pieces, key=lambda p: p[0])], pieces[0][1])
        for name, pieces in found.items()
    }


def _last_uses(graph: Graph) -> dict[int, list[str]]:
    kept = {o.value.name for o in graph.outputs if o.value is not None}
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        last[node.name] = position
        for name in node.refs():
            last[name] = position
    table: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in kept:
            table.setdefault(position, []).append(name)
    return table


def bind_inputs(
    captured: Captured,
    model: torch.nn.Module,
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    batch: object = None,
    graph: Graph | None = None,
    rng_key: int = 0,
    tangents: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors for the inputs of ``captured.graph``, by input name.

    Args:
        captured: What was captured from ``model``.
        model: Gives parameters and buffers; must not be on the meta device.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        batch: The batch of the loss function, if it was given one.
        graph: A promoted form of the program; floating-point inputs are cast to its dtypes.
        rng_key: Key of the random operators.
        tangents: Gradients of the outputs by path; ones where there is none.

    Raises:
        InputError: An entry of the call is missing.
    """
    state: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state.update(model.named_buffers(remove_duplicate=False))
    user = bind_call(model, args, kwargs or {}, batch=batch).tensors()
    bound: dict[str, torch.Tensor] = {}
    for entry in (graph or captured.graph).inputs:
        assert entry.meta is not None, entry
        dtype = torch_dtype(entry.meta.dtype)
        match entry.kind:
            case InputKind.PARAM | InputKind.BUFFER:
                value = state[entry.param].detach()
                if entry.part is not None:
                    part = entry.part
                    value = value.narrow(part.dim, part.start, part.stop - part.start)
            case InputKind.USER:
                if entry.target not in user:
                    raise InputError(f"the call has no tensor {entry.target!r}: {sorted(user)}")
                value = user[entry.target].detach()
            case InputKind.CONSTANT:
                value = captured.constants[entry.name]
            case InputKind.RNG:
                value = torch.tensor(rng_key, dtype=torch.int64)
            case _:
                given = (tangents or {}).get(entry.target)
                value = given if given is not None else torch.ones(entry.meta.shape)
        bound[entry.name] = value.to(dtype)
    return bound


def gradients(results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients by parameter name, of what :func:`run_graph` returned."""
    return _of_kind(results, OutputKind.GRAD)


def mutations(results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """New values of buffers by name, of what :func:`run_graph` returned."""
    return _of_kind(results, OutputKind.MUTATION)


def _of_kind(results: Mapping[str, torch.Tensor], kind: OutputKind) -> dict[str, torch.Tensor]:
    prefix = f"{kind}:"
    return {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
