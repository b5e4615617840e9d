"""Token ids and labels in range, before anything is computed from them.

One device raises where an id has no row. A vocabulary that is split over ranks can't: an id that is
on no rank looks on each like one of another's. So what indexes a table is found in the program as
far as it follows from the call's arguments by moving elements about, and is made and compared on
the batch itself: on CPU tensors at once, on a device by an assertion that is not waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.capture.reference import run_graph
from autopar.ir.graph import Graph, InputKind, Node, Output, OutputKind, Phase, Ref, TensorMeta
from autopar.runtime.shares import LocalShare
from autopar.torch_compat import assert_later

_EMBEDDING = "aten.embedding.default"
_LOSS = "autopar.nll_loss_sum"
_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "slice.Tensor", "select.int",
        "constant_pad_nd.default", "unsqueeze.default", "squeeze.dim", "expand.default",
        "permute.default", "transpose.int", "t.default", "clone.default", "_to_copy.default",
        "alias.default", "detach.default",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """One operand that indexes a table.

    Attributes:
        graph: Makes it of call arguments.
        paths: Input name -> path of the call argument.
        size: Rows of the table.
        ignored: A value that stands for no row, or None.
        table: The table in words.
    """

    graph: Graph
    paths: Mapping[str, str]
    size: int
    ignored: int | None
    table: str

    def problem(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """What is wrong with a batch; "" if nothing is, or if it can't be seen here.

        Args:
            tensors: The call's tensors by path, whole or shares.
        """
        given = {name: tensors[path] for name, path in self.paths.items()}
        if any(isinstance(t, LocalShare) for t in given.values()) and self.graph.nodes:
            return ""  # moves of the whole batch can't be made of some of its rows
        wholes = {
            name: t.local_rows() if isinstance(t, LocalShare) else t for name, t in given.items()
        }
        index = run_graph(self.graph, wholes)[f"{OutputKind.OUTPUT}:index"]
        if not index.numel():
            return ""
        paths = " and ".join(map(repr, self.paths.values()))
        rule = f"{self.table} takes 0 to {self.size - 1}"
        wrong = (index < 0) | (index >= self.size)
        if self.ignored is not None:
            wrong &= index != self.ignored
            rule += f", or {self.ignored} for none"
        if index.device.type != "cpu":
            assert_later(~wrong.any(), f"input {paths} is out of range: {rule}")
            return ""
        if not bool(wrong.any()):
            return ""
        return f"input {paths} holds {int(index[wrong][0])}: {rule}; correct the batch"


def index_checks(graph: Graph) -> tuple[IndexCheck, ...]:
    """The checks for a captured program."""
    inputs, nodes, metas = graph.input_map(), graph.node_map(), graph.metas()
    found = []
    for node in graph.nodes:
        if node.phase is not Phase.FORWARD or node.op not in (_EMBEDDING, _LOSS):
            continue
        table, index = node.args[0], node.args[1]
        if not isinstance(table, Ref) or not isinstance(index, Ref):
            continue
        chain = _chain(index.name, graph, nodes)
        meta = metas[table.name]
        if chain is None or not isinstance(meta, TensorMeta):
            continue
        used = {name for n in chain for name in n.refs()} | {index.name}
        users = tuple(i for i in graph.of_kind(InputKind.USER) if i.name in used)
        is_loss = node.op == _LOSS
        ignored = node.args[3] if is_loss and len(node.args) > 3 else None
        owner = inputs.get(table.name)
        found.append(
            IndexCheck(
                Graph(users, chain, (Output(OutputKind.OUTPUT, "index", index),)),
                {i.name: i.target for i in users},
                meta.shape[1] if is_loss else meta.shape[0],
                ignored if isinstance(ignored, int) else None,
                f"the loss at {node.source or node.scope}"
                if is_loss or owner is None
                else repr(owner.param),
            )
        )
    return tuple(found)


def _chain(name: str, graph: Graph, nodes: Mapping[str, Node]) -> tuple[Node, ...] | None:
    """The moves that make a value of call arguments, in order; None if it is made otherwise."""
    users = {i.name for i in graph.of_kind(InputKind.USER)}
    needed: set[str] = set()
    open_names = [name]
    while open_names:
        current = open_names.pop()
        if current in users or current in needed:
            continue
        node = nodes.get(current)
        if node is None or node.op not in _MOVES:
            return None
        needed.add(current)
        open_names.extend(node.refs())
    return tuple(n for n in graph.nodes if n.name in needed)
