"""One part of a model under one plan: kernels and collectives of forward and backward, and bytes.

A part (a block, the embedding, the head) is captured once per shape, split as Megatron does
(:mod:`autopar.validation.placing`), localized by the same code that emits real programs, and read
off the emitted forward and backward. Nothing is priced here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.ir.graph import Graph, InputKind, Node, Output, OutputKind, Ref
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.decisions import Choice, Decisions
from autopar.sharding.placement import Shard
from autopar.sharding.programs import LocalPrograms
from autopar.validation.chains import Chains
from autopar.validation.convolutions import ConvShape
from autopar.validation.models import BlockShape
from autopar.validation.placing import STREAM, megatron_choices
from autopar.validation.probes import Part, captured_graph
from cost_models.evaluate import collective_axis, payload_bytes
from cost_models.flops import FREE, VIEW_OPS, OpClass, Work
from cost_models.liveness import liveness, saved_bytes

_HELD = (OutputKind.SAVED, OutputKind.GRAD, OutputKind.SEND)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: As in :class:`cost_models.collectives.CollectiveKind`.
        payload_bytes: The larger of a rank's input and output.
        axis: Mesh axis.
    """

    kind: str
    payload_bytes: float
    axis: str


Item = Work | Collective
Items = tuple[tuple[Item, float], ...]
"""What runs, each with how often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceKey:
    """Everything that decides a piece."""

    part: Part
    shape: BlockShape | ConvShape
    tp: int = 1
    sequence_parallel: bool = False
    fused: frozenset[str] = frozenset()
    split_loss: bool = True
    recompute: str = "none"  # "none", "selective", "per-op"; whole layers are made of both passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Programs of a part on one rank.

    Attributes:
        forward: Items of a micro-batch's forward.
        backward: Items of its backward, recomputed ones included.
        saved_bytes: What forward keeps, the part's own input included.
        input_bytes: The part's input alone.
        forward_peak_bytes: Transients of forward beyond what it keeps.
        backward_peak_bytes: Transients of backward beyond what was kept.
        params: Parameters on this rank.
    """

    forward: Items
    backward: Items
    saved_bytes: float
    input_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    params: int

    @property
    def flops(self) -> float:
        """Matmul and attention FLOPs of forward and backward."""
        return sum(
            item.flops * count
            for item, count in (*self.forward, *self.backward)
            if isinstance(item, Work) and item.op_class is not OpClass.MEMORY
        )


@lru_cache(maxsize=4096)
def piece_of(key: PieceKey) -> Piece:
    """The piece of ``key``.

    Raises:
        ConfigError: ``tp`` does not divide a weight.
    """
    graph = captured_graph(key.part, key.shape)
    signatures = signatures_of(graph)
    choices: dict[str, dict[str, Choice]] = {}
    if key.tp > 1:
        choices["tp"] = megatron_choices(
            graph, signatures, key.tp,
            sequence_parallel=key.sequence_parallel, split_loss=key.split_loss,
        )  # fmt: skip
    decisions = Decisions(axis_sizes=(1, 1, key.tp), choices=choices, recompute=_remade(graph, key))
    programs = localize(graph, decisions, signatures)
    stage = programs.stages[0]
    forward = _cleaned(stage.forward, is_head=key.part in (Part.HEAD, Part.NETWORK))
    backward = _cleaned(stage.backward, is_head=key.part in (Part.HEAD, Part.NETWORK))
    again = _core_results(graph) if key.recompute == "selective" else frozenset()
    params = _parameter_sizes(graph, choices.get("tp", {}), key.tp)
    stream_bytes = _stream_bytes(programs)
    return Piece(
        forward=_items(forward, key.fused),
        # a checkpointed region runs whole, its kept results included
        backward=counted(
            (*_items(backward, key.fused), *_items_of_origin(forward, key.fused, again))
        ),
        saved_bytes=saved_bytes(stage.forward) + stream_bytes,
        input_bytes=stream_bytes,
        forward_peak_bytes=_peak(forward, key.fused, freed=()),
        backward_peak_bytes=_peak(backward, key.fused, freed=(InputKind.SAVED,)),
        params=sum(params),
    )


def _parameter_sizes(graph: Graph, choices: Mapping[str, Choice], tp: int) -> list[int]:
    """Elements of every parameter that one rank has."""
    return [
        entry.meta.numel // (tp if isinstance(choices.get(entry.name), Shard) else 1)
        for entry in graph.of_kind(InputKind.PARAM)
        if entry.meta is not None and entry.target != STREAM
    ]


def _remade(graph: Graph, key: PieceKey) -> frozenset[str]:
    """Operators that backward makes again: the choice, and inner values of fused kernels."""
    again = set(Chains(graph, key.fused).inner_values()) if key.fused else set()
    forward = [n for n in graph.nodes if n.phase == "forward" and n.op != "getitem"]
    if key.recompute == "selective":
        again |= {n.name for n in forward if ".core" in n.scope} - _core_results(graph)
    elif key.recompute == "per-op":
        matmuls = [n.name for n in forward if n.op == "aten.mm.default"]
        kept = set(matmuls[::2])
        again |= {
            n.name for n in forward if n.name not in kept and not n.op.startswith("autopar.att")
        }
    return frozenset(again)


def _core_results(graph: Graph) -> frozenset[str]:
    """Operators of attention's core whose value other modules read: it is kept by the reader."""
    nodes, users = graph.node_map(), graph.users()
    found: set[str] = set()
    for node in graph.nodes:
        if ".core" not in node.scope or node.phase != "forward":
            continue
        for user in users[node.name]:
            if ".core" not in nodes[user].scope and nodes[user].phase == "forward":
                name = node.name
                while nodes[name].op in VIEW_OPS:
                    name = nodes[name].refs()[0]
                found.add(name)
    return frozenset(found)


def _cleaned(graph: Graph, *, is_head: bool) -> Graph:
    """Without the probe's own sum and the casts of gradients to float32."""
    nodes = graph.node_map()
    outputs: list[Output] = []
    for output in graph.outputs:
        value = output.value
        if value is not None and value.name in nodes:
            node = nodes[value.name]
            if output.kind is OutputKind.GRAD and node.op == "aten._to_copy.default":
                output = replace(output, value=_ref(node))
            elif output.kind is OutputKind.LOSS and not is_head:
                output = Output(OutputKind.SEND, output.target, _ref(node))
        outputs.append(output)
    alive: set[str] = set()
    stack = [o.value.name for o in outputs if o.value is not None]
    while stack:
        name = stack.pop()
        if name not in alive:
            alive.add(name)
            stack.extend(nodes[name].refs() if name in nodes else ())
    return Graph(graph.inputs, tuple(n for n in graph.nodes if n.name in alive), tuple(outputs))


def _ref(node: Node) -> Ref:
    return Ref(node.refs()[0])


def _stream_bytes(programs: LocalPrograms) -> float:
    """Bytes of the part's input on this rank; 0 for the embedding."""
    for stage in programs.stages:
        for program in (stage.forward, stage.backward):
            for entry in program.of_kind(InputKind.PARAM):
                if entry.target == STREAM and entry.meta is not None:
                    return float(entry.meta.bytes)
    return 0.0


def _peak(graph: Graph, fused: frozenset[str], *, freed: tuple[InputKind, ...]) -> float:
    graph = Chains(graph, fused).without_inner() if fused else graph
    return float(
        liveness(
            graph, held_outputs=_HELD, freed_inputs=freed, workspace=lambda _node, _metas: 0
        ).peak_bytes
    )


def _items(graph: Graph, fused: frozenset[str]) -> Items:
    chains = Chains(graph, fused)
    metas = graph.metas()
    found: list[Item] = []
    merged = set(_epilogues(graph, chains))
    for node in graph.nodes:
        if node.op.startswith("comm."):
            operands = [metas[name] for name in node.refs()]
            payload = payload_bytes(operands[:1], node.meta)
            axis = collective_axis(node)
            found.append(Collective(node.op.removeprefix("comm."), float(payload), axis))
    for chain in chains.chains():
        if chain.nodes[0].name not in merged:
            work = chains.work_of_chain(chain)
            if work is not FREE:
                found.append(work)
    return counted((item, 1.0) for item in found)


def _items_of_origin(
    graph: Graph, fused: frozenset[str], origins: frozenset[str]
) -> tuple[tuple[Item, float], ...]:
    if not origins:
        return ()
    chains = Chains(graph, fused)
    return tuple(
        (chains.work[n.name], 1.0)
        for n in graph.nodes
        if n.origin in origins and chains.work[n.name] is not FREE
    )


def _epilogues(graph: Graph, chains: Chains) -> Iterable[str]:
    """Bias adds that the matmul before them does on its way out."""
    nodes = graph.node_map()
    for node in graph.nodes:
        if node.op == "aten.add.Tensor" and node.phase == "forward":
            makers = [nodes[b].op for b in map(chains.base, node.refs()) if b in nodes]
            if (
                makers == ["aten.mm.default"]
                and node.scope
                == nodes[next(b for b in map(chains.base, node.refs()) if b in nodes)].scope
            ):
                yield node.name


def counted(items: Iterable[tuple[Item, float]]) -> Items:
    """Equal items together, in order of first appearance."""
    total: Counter[Item] = Counter()
    for item, count in items:
        total[item] += count  # type: ignore[assignment]
    return tuple(total.items())
