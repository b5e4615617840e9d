"""What others would keep of a decoder's layers, as sets of operators for the same programs.

Each returns the forward operators whose values are not kept. torch's partitioner and its program
for selective checkpointing are called as torch has them inside ``torch._functorch.partitioners``
and ``torch.distributed._tools``: there is no public way to ask them for the values that they keep,
so their private names are used here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch._functorch import partitioners
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.sac_estimator import SACStats

from autopar.capture.torch_ops import torch_callable, torch_dtype
from autopar.ir.graph import Arg, Dtype, Graph, InputKind, Node, OutputKind, Phase, Ref, TensorMeta
from autopar.sharding.stages import VIEW_OPS, backward_operators

BUDGETS = (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)


def layers_of(graph: Graph) -> dict[str, list[Node]]:
    """Layer -> its forward operators, in order."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        parts = node.scope.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if node.phase is Phase.FORWARD and at is not None:
            found.setdefault(".".join(parts[: at + 1]), []).append(node)
    return found


def full(graph: Graph) -> frozenset[str]:
    """Only what enters each layer is kept."""
    return frozenset(n.name for nodes in layers_of(graph).values() for n in nodes[:-1])


def every_second_matmul(graph: Graph) -> frozenset[str]:
    """torchtitan's policy ``op``: attention and every second matmul of a layer are kept."""
    dropped: set[str] = set()
    for nodes in layers_of(graph).values():
        count = 0
        for node in nodes[:-1]:
            if node.op == "aten.mm.default":
                count += 1
                if count % 2 == 1:
                    continue
            if node.op in ("autopar.attention", "getitem"):
                continue
            dropped.add(node.name)
    return frozenset(dropped)


def partitioned(graph: Graph) -> Iterator[tuple[float, frozenset[str]]]:
    """torch's min-cut with an activation memory budget: (budget, operators)."""
    for budget in (1.0, *BUDGETS, 0.0):
        module, names, mode = joint_module(graph)
        outputs = [o for o in graph.outputs if o.value is not None]
        info = partitioners.classify_nodes(module, _static(graph), len(_forward(outputs)))
        for node in reversed(module.graph.nodes):
            node.dist_from_bw = _distance(node, info)
        with mode:  # operators are run on fake tensors to count their arithmetic
            kept = partitioners.choose_saved_values_set(module.graph, info, memory_budget=budget)
        yield budget, _not_kept(graph, {names[n] for n in kept if n in names})


def sac_milp(
    graph: Graph, seconds: Callable[[Node], float]
) -> Iterator[tuple[float, frozenset[str]]]:
    """torch's mixed-integer program of each layer under a budget: (budget, operators).

    Args:
        graph: The joint program.
        seconds: Of an operator, the same that the choice is judged by.
    """
    from torch.distributed._tools import sac_ilp  # it needs pulp

    for budget in (1.0, *BUDGETS, 0.0):
        dropped: set[str] = set()
        for nodes in layers_of(graph).values():
            stats = _sac_stats(nodes, seconds)
            kept = sac_ilp.get_optimal_checkpointing_policy_per_module(stats, budget)
            if len(kept) != len(nodes):
                raise RuntimeError(f"torch's program of a layer has no solution at {budget}")
            dropped |= {n.name for n, keep in zip(nodes[:-1], kept, strict=False) if not keep}
        yield budget, frozenset(dropped)


def _sac_stats(nodes: list[Node], seconds: Callable[[Node], float]) -> SACStats:
    """A layer's operators in torch's terms; views cost nothing, and the last is the result."""
    views = [i for i, n in enumerate(nodes) if n.op in VIEW_OPS or n.op == "getitem"]
    sizes = [sum(m.bytes for m in n.metas() if m is not None) for n in nodes]
    return SACStats(
        func_names=[n.op for n in nodes],
        runtimes=[0.0 if i in views else 1e3 * seconds(n) for i, n in enumerate(nodes)],
        memory=[0 if i in views or i + 1 == len(nodes) else b for i, b in enumerate(sizes)],
        view_like_ops=views,
        rand_ops=[],
        saved_autograd_ops=[],
        inplace_ops=[],
        force_store_random=False,
    )


def _distance(node: fx.Node, info: partitioners.NodeInfo) -> int:
    """As :func:`partitioners.min_cut_rematerialization_partition` sets it."""
    if node.op == "output":
        return int(1e9)
    if not info.is_required_fw(node):
        return 0
    return min([int(1e9), *(user.dist_from_bw + 1 for user in node.users)])


def _forward(outputs: list) -> list:
    return [o for o in outputs if o.kind in (OutputKind.LOSS, OutputKind.MUTATION)]


def _static(graph: Graph) -> list[int]:
    """Inputs that live anyhow: all but the tangents."""
    kept = [i for i in graph.inputs if i.kind is not InputKind.TANGENT]
    return [i for i, item in enumerate(kept) if item.kind is not InputKind.USER]


def joint_module(graph: Graph) -> tuple[fx.GraphModule, dict[fx.Node, str], FakeTensorMode]:
    """The joint program as torch's partitioner takes it, names of its nodes, mode of its values."""
    target = fx.Graph()
    values: dict[str, fx.Node] = {}
    mode = FakeTensorMode()
    with mode:
        for item in graph.inputs:
            prefix = "tangents" if item.kind is InputKind.TANGENT else "primals"
            node = target.placeholder(f"{prefix}_{item.name}")
            node.meta["val"] = 0 if item.meta is None else _empty(item.meta)
            values[item.name] = node
        for source in graph.nodes:
            node = target.call_function(_callable(source.op), *_arguments(source, values))
            metas = source.metas()
            made = [None if m is None else _empty(m) for m in metas]
            node.meta["val"] = tuple(made) if isinstance(source.meta, tuple) else made[0]
            values[source.name] = node
    outputs = [o for o in graph.outputs if o.value is not None]
    ahead = _forward(outputs)
    behind = [o for o in outputs if o.kind is OutputKind.GRAD]
    target.output([values[o.value.name] for o in (*ahead, *behind)])
    module = fx.GraphModule(torch.nn.Module(), target)
    return module, {node: name for name, node in values.items()}, mode


def _empty(meta: TensorMeta) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=torch_dtype(meta.dtype))


def _callable(op: str) -> object:
    space, _, rest = op.partition(".")
    if space != "aten":
        return torch_callable(op)
    packet, _, overload = rest.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _arguments(source: Node, values: dict[str, fx.Node]) -> tuple[tuple, dict]:
    def translate(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return values[arg.name]
        if isinstance(arg, Dtype):
            return torch_dtype(arg.name)
        if isinstance(arg, tuple):
            return [translate(item) for item in arg]
        return arg

    return tuple(map(translate, source.args)), {k: translate(v) for k, v in source.kwargs}


def _not_kept(graph: Graph, kept: set[str]) -> frozenset[str]:
    """Forward operators but those whose value, or a view of it, is in ``kept``."""
    nodes = graph.node_map()
    roots: set[str] = set()
    for name in kept:
        while name in nodes and nodes[name].op in VIEW_OPS:
            roots.add(name)
            name = nodes[name].refs()[0]
        roots.add(name)
    behind = backward_operators(graph)
    return frozenset(n.name for n in graph.nodes if n.name not in behind and n.name not in roots)
