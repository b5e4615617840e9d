"""Puts copies to host memory and back around what a stage keeps for its backward.

Forward hands such a value's copy in host memory to backward in its place::

    forward    v = ...                             backward   v.in = to_device(v.host)    begins
               v.out = to_host(v)          begins             v = on_device(v.in)         awaited
               v.host = on_host(v.out, v)  awaited            ... = reader(v)

A copy begins where its value is made and runs beside what follows. It is awaited when the next one
would have more than a *window* of bytes under way, at the end at the latest: ``on_host`` reads the
value, so that it stays until then. Backward brings values in the order in which they are read, each
when less than the window of saved values is left to be read before it: by then it has freed about
as much of what forward kept. Every copy that a program begins it awaits.

Source: the idea is that of Rhu et al., "vDNN", MICRO 2016; the window is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

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

TO_HOST, ON_HOST = "local.to_host", "local.on_host"
TO_DEVICE, ON_DEVICE = "local.to_device", "local.on_device"
BEGINNINGS = frozenset({TO_HOST, TO_DEVICE})
"""Operators that begin a copy and do not wait for it."""
ENDS = frozenset({ON_HOST, ON_DEVICE})
"""Operators that wait for the copy that their first operand is."""
HOST_COPIES = BEGINNINGS | ENDS
_HOST = ".host"


def with_host_copies(
    forward: Graph, backward: Graph, offload: frozenset[str], window_bytes: int
) -> tuple[Graph, Graph]:
    """The two programs of a stage with what operators of ``offload`` make kept in host memory.

    Args:
        forward: A stage's forward program, with what it keeps as outputs SAVED.
        backward: Its backward program, with that as inputs SAVED.
        offload: Global names of operators; those whose values are not kept change nothing. What
            forward itself received stays where it is.
        window_bytes: As of :class:`~autopar.sharding.decisions.Decisions`.
    """
    chosen = offloaded_values(forward, offload)
    if not chosen:
        return forward, backward
    return (
        _with_copies_out(forward, chosen, window_bytes),
        _with_copies_in(backward, chosen, window_bytes),
    )


def offloaded_values(forward: Graph, offload: frozenset[str]) -> dict[str, TensorMeta]:
    """Values that a forward program keeps and that operators of ``offload`` make, in order."""
    if not offload:
        return {}
    table = forward.node_map()
    kept = {o.value.name for o in forward.outputs_of(OutputKind.SAVED) if o.value is not None}
    found = {}
    for node in forward.nodes:
        maker = table.get(node.refs()[0], node) if node.op == "getitem" else node
        is_chosen = node.name in kept and maker.origin in offload
        if is_chosen and isinstance(node.meta, TensorMeta):
            found[node.name] = node.meta
    return found


def host_name(value: str) -> str:
    """Name of a value's copy in host memory."""
    return f"{value}{_HOST}"


def is_host_name(name: str) -> bool:
    """Whether a saved value's name is that of a copy in host memory."""
    return name.endswith(_HOST)


def _with_copies_out(forward: Graph, chosen: dict[str, TensorMeta], window_bytes: int) -> Graph:
    nodes: list[Node] = []
    waiting: deque[Node] = deque()
    under_way = 0

    def await_one() -> None:
        nonlocal under_way
        source = waiting.popleft()
        under_way -= chosen[source.name].bytes
        name = source.name
        nodes.append(_copy(source, ON_HOST, host_name(name), f"{name}.out", name, on_host=True))

    for node in forward.nodes:
        nodes.append(node)
        if node.name not in chosen:
            continue
        size = chosen[node.name].bytes
        while waiting and under_way + size > window_bytes:
            await_one()
        nodes.append(_copy(node, TO_HOST, f"{node.name}.out", node.name, on_host=True))
        waiting.append(node)
        under_way += size
    while waiting:
        await_one()
    outputs = tuple(
        Output(o.kind, host_name(o.target), Ref(host_name(o.value.name)))
        if o.kind is OutputKind.SAVED and o.value is not None and o.value.name in chosen
        else o
        for o in forward.outputs
    )
    return Graph(forward.inputs, tuple(nodes), outputs)


def _with_copies_in(backward: Graph, chosen: dict[str, TensorMeta], window_bytes: int) -> Graph:
    order = _first_reads(backward)
    origins = {name: Node(name=name, op="", args=(), meta=meta) for name, meta in chosen.items()}
    waiting = deque(name for name in order if name in chosen)
    unread = dict(order)
    nodes: list[Node] = []

    def begin_next() -> None:
        name = waiting.popleft()
        nodes.append(_copy(origins[name], TO_DEVICE, f"{name}.in", host_name(name), back=True))

    def begin_near() -> None:
        """Begin the copies of what is read within a window."""
        before = 0
        for name, size in unread.items():
            if not waiting or before >= max(1, window_bytes):
                return
            if name == waiting[0]:
                begin_next()
            before += size

    def read(names: Iterable[str]) -> None:
        found = [name for name in dict.fromkeys(names) if name in unread]
        for name in found:
            del unread[name]
            if name in chosen:
                while name in waiting:
                    begin_next()
                nodes.append(_copy(origins[name], ON_DEVICE, name, f"{name}.in", back=True))
        if found:
            begin_near()

    begin_near()
    for node in backward.nodes:
        read(node.refs())
        nodes.append(node)
    read(o.value.name for o in backward.outputs if o.value is not None)
    return Graph(tuple(_inputs(backward, chosen)), tuple(nodes), backward.outputs)


def _first_reads(backward: Graph) -> dict[str, int]:
    """Bytes of saved values, in the order in which they are read first."""
    sizes = {
        i.name: i.meta.bytes
        for i in backward.inputs
        if i.kind is InputKind.SAVED and i.meta is not None
    }
    found: dict[str, None] = {}
    for node in backward.nodes:
        found.update(dict.fromkeys(node.refs()))
    found.update(dict.fromkeys(o.value.name for o in backward.outputs if o.value is not None))
    return {name: sizes[name] for name in found if name in sizes}


def _inputs(backward: Graph, chosen: dict[str, TensorMeta]) -> Iterator[Input]:
    for item in backward.inputs:
        if item.kind is InputKind.SAVED and item.name in chosen:
            name = host_name(item.name)
            yield Input(name, item.kind, name, replace(chosen[item.name], on_host=True))
        else:
            yield item


def _copy(
    source: Node, op: str, name: str, *operands: str, on_host: bool = False, back: bool = False
) -> Node:
    """An operator that begins or awaits the copy of what ``source`` made."""
    assert isinstance(source.meta, TensorMeta)
    return Node(
        name=name,
        op=op,
        args=tuple(Ref(o) for o in operands),
        meta=replace(source.meta, on_host=on_host),
        phase=Phase.BACKWARD if back else source.phase,
        scope=source.scope,
        origin=source.origin,
        source=source.source,
    )
