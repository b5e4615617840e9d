"""Bytes that a program holds while it runs: the peak of liveness, never a sum.

A value is freed after its last use. Views keep their base; a reshape that copies allocates
(:mod:`cost_models.storage`). Inputs stay, unless their kind is freed by the caller (saved values
die at their last use in a backward program). Outputs of kinds that are counted elsewhere (saved
activations) add nothing; or, where that count begins with the program, they are taken off it until
they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, InputKind, Meta, Node, OutputKind, TensorMeta
from autopar.sharding.buckets import PACK
from cost_models.flops import BITS_BYTES, score_matrix_bytes, tensors
from cost_models.storage import Storages, storages

# Inputs that outlive the micro-batch, so that saving them is free.
LASTING_INPUTS = frozenset(
    {
        InputKind.PARAM, InputKind.BUFFER, InputKind.CONSTANT, InputKind.PROLOGUE,
        InputKind.COORD, InputKind.RNG,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Memory of one run of a program.

    Attributes:
        peak_bytes: The most that is alive at once, less what was alive at the start (freed inputs
            count against it); at least 0.
        peak_at: Operator that runs then; "" if nothing is ever allocated.
        end_bytes: What is left at the end beyond inputs and outputs that are counted elsewhere.
        timeline: Bytes alive during each operator, in order, on the same scale; may be negative
            where inputs were freed.
    """

    peak_bytes: int
    peak_at: str
    end_bytes: int
    timeline: tuple[int, ...]


def liveness(
    graph: Graph,
    *,
    held_outputs: Collection[OutputKind] = (OutputKind.SAVED,),
    freed_inputs: Collection[InputKind] = (),
    input_groups: Mapping[str, str] | None = None,
    granularity_bytes: int = 1,
    workspace: Callable[[Node, Mapping[str, Meta]], int] | None = None,
    held_when_made: bool = False,
) -> Liveness:
    """Memory over one run of ``graph``.

    Args:
        graph: The program.
        held_outputs: Kinds of outputs whose bytes are counted elsewhere.
        freed_inputs: Kinds of inputs that the caller gives away: they die at their last use.
        input_groups: Names of inputs that share memory, to the name of that memory; such a group
            dies when its last member does. Inputs that are left out are by themselves.
        granularity_bytes: Allocations are rounded up to a multiple of it (CUDA: 512).
        workspace: Extra bytes while an operator runs; :func:`workspace_bytes` if left out.
        held_when_made: Whether outputs of ``held_outputs`` are counted elsewhere from the start of
            the program on, though they are there only once they are made.
    """
    memory = storages(graph)
    groups = input_groups or {}
    size = {key: -(-n // granularity_bytes) * granularity_bytes for key, n in memory.bytes.items()}
    for item in graph.inputs:
        key = groups.get(item.name)
        if key is not None:
            size[f"group:{key}"] = max(size.get(f"group:{key}", 0), size.get(item.name, 0))
    home = {i.name: f"group:{groups[i.name]}" for i in graph.inputs if i.name in groups}

    held = _storages_of_outputs(graph, memory, home, lambda kind: kind in held_outputs)
    kept = _storages_of_outputs(graph, memory, home, lambda kind: kind not in held_outputs)
    given = {
        home.get(i.name, i.name): i.kind in freed_inputs and i.meta is not None
        for i in graph.inputs
    }
    last_use = _last_uses(graph, memory, home)
    dying: dict[int, list[str]] = {}
    for key, position in last_use.items():
        if key not in held and key not in kept and given.get(key, True):
            dying.setdefault(position, []).append(key)

    live = peak = 0
    peak_at = ""
    timeline: list[int] = []
    extra = workspace or workspace_bytes
    metas = graph.metas()
    # a gift that no operator reads is dropped by the first one
    unused = [k for k, free in given.items() if free and k not in last_use and k not in held | kept]
    live -= sum(size.get(k, 0) for k in unused)
    if held_when_made:
        own = {k for n in graph.nodes for k in memory.of[n.name] if _owner(k) == n.name}
        live -= sum(size[key] for key in own & held)
    for position, node in enumerate(graph.nodes):
        for key in memory.of[node.name]:
            if _owner(key) == node.name and (held_when_made or key not in held):
                live += size[key]
        during = live + extra(node, metas)
        timeline.append(during)
        if during > peak:
            peak, peak_at = during, node.name
        for key in dying.get(position, ()):
            live -= size.get(key, 0)
    return Liveness(peak_bytes=peak, peak_at=peak_at, end_bytes=live, timeline=tuple(timeline))


def peak_transient_bytes(
    graph: Graph,
    *,
    held_outputs: Collection[OutputKind] = (OutputKind.SAVED,),
    freed_inputs: Collection[InputKind] = (),
    input_groups: Mapping[str, str] | None = None,
    granularity_bytes: int = 1,
) -> int:
    """The most that is alive beyond the program's inputs; arguments as of :func:`liveness`."""
    return liveness(
        graph,
        held_outputs=held_outputs,
        freed_inputs=freed_inputs,
        input_groups=input_groups,
        granularity_bytes=granularity_bytes,
    ).peak_bytes


def saved_storages(
    graph: Graph, *, lasting: Collection[InputKind] = LASTING_INPUTS
) -> dict[str, tuple[str, ...]]:
    """Storages behind each saved output, by its target; parameters and the like left out.

    As ``input_groups`` of the backward program, take the first storage of each target.
    """
    memory = storages(graph)
    kinds = {i.name: i.kind for i in graph.inputs}
    return {
        output.target: tuple(k for k in memory.of[output.value.name] if kinds.get(k) not in lasting)
        for output in graph.outputs_of(OutputKind.SAVED)
        if output.value is not None
    }


def saved_bytes(
    graph: Graph,
    *,
    lasting: Collection[InputKind] = LASTING_INPUTS,
    granularity_bytes: int = 1,
) -> int:
    """Bytes that one run of ``graph`` leaves for its backward, shared storages counted once."""
    memory = storages(graph)
    keys = {k for group in saved_storages(graph, lasting=lasting).values() for k in group}
    return sum(-(-memory.bytes[k] // granularity_bytes) * granularity_bytes for k in keys)


def host_bytes(graph: Graph) -> int:
    """Bytes that one run of ``graph`` leaves for its backward in host memory."""
    metas = graph.metas()
    outputs = [o.value.name for o in graph.outputs_of(OutputKind.SAVED) if o.value is not None]
    return sum(t.host_bytes for name in outputs for t in tensors(metas[name]))


# They hold their result a second time: rows picked and then masked, or a product before its place.
_ROW_COPIES = frozenset(
    {
        "autopar.moe_spread", "autopar.moe_run_sums", "autopar.grouped_mm", "local.group_runs",
        "autopar.grouped_mm_weight",
    }
)  # fmt: skip


def workspace_bytes(node: Node, metas: Mapping[str, Meta]) -> int:
    """Temporary bytes inside one operator, of the implementations that autopar runs.

    Collectives along a dim other than the first move it to the front and back, one copy each.
    Random bits are hashed in three 64-bit temporaries. Attention without a fused kernel holds its
    score matrix; the fused backward of grouped heads repeats K and V and gets their gradients.
    Combining the rows of a token's slots holds all slots twice before they are added.
    """
    results = tensors(node.meta)
    made = sum(t.bytes for t in results)
    operands = [metas[name] for name in node.refs()]
    if node.op == "comm.all_gather":
        return made if node.args[1] != 0 else 0
    if node.op == "comm.reduce_scatter":
        return sum(t.bytes for t in tensors(operands)) if node.args[2] != 0 else 0
    if node.op == "comm.all_to_all_rows":
        return made
    if node.op == "comm.all_to_all":
        return 2 * made
    if node.op in _ROW_COPIES:
        return made
    if node.op == "autopar.moe_combine":
        slots = node.args[3]
        return made if slots == 1 else 2 * made * (slots if isinstance(slots, int) else 1)
    if node.op in ("autopar.dropout", "autopar.uniform"):
        return BITS_BYTES * results[0].numel
    if node.op == "autopar.normal":
        return (BITS_BYTES + 8) * results[0].numel
    if node.op == "autopar.attention":
        return score_matrix_bytes(node.op, node.args, operands)
    if node.op == "autopar.attention_backward":
        dq, dk, dv = results[:3]
        group = dq.shape[1] // max(1, dk.shape[1]) if len(dq.shape) == 4 else 1
        repeated = 2 * group * (dk.bytes + dv.bytes) if group > 1 else 0
        return score_matrix_bytes(node.op, node.args, operands) or repeated
    return 0


_BLOCK_CHANNELS = 16


def cpu_workspace(graph: Graph) -> Callable[[Node, Mapping[str, Meta]], int]:
    """:func:`workspace_bytes` and what the CPU's libraries hold, for :func:`liveness`.

    gloo gathers into a buffer of its own, and reduce-scatters a copy of an operand that was not
    packed for it. oneDNN rearranges tensors for convolutions, channels in blocks of 16: weight and
    the larger one of input and result, or for a backward, whose three results are made one after
    the other, weight, input and gradient.

    Source: measured with torch 2.13's profiler, shapes of 1 to 3 dims.
    """
    packed = {node.name for node in graph.nodes if node.op == PACK}

    def scratch_bytes(node: Node, metas: Mapping[str, Meta]) -> int:
        operands = [t for name in node.refs() for t in tensors(metas[name])]
        match node.op:
            case "comm.all_gather":
                return sum(t.bytes for t in tensors(node.meta))
            case "comm.reduce_scatter" if not packed.intersection(node.refs()):
                return operands[0].bytes
            case "aten.convolution.default":
                (made,), (given, weight) = tensors(node.meta), operands[:2]
                return max(_in_blocks(made), _in_blocks(given)) + _in_blocks(weight)
            case "aten.convolution_backward.default":
                return sum(map(_in_blocks, operands[:3]))
        return 0

    return lambda node, metas: workspace_bytes(node, metas) + scratch_bytes(node, metas)


def _in_blocks(tensor: TensorMeta) -> int:
    """Bytes of a tensor whose channels (dim 1) are filled up to whole blocks."""
    channels = tensor.shape[1]
    padded = -(-channels // _BLOCK_CHANNELS) * _BLOCK_CHANNELS
    return tensor.bytes // max(1, channels) * padded


def _owner(storage: str) -> str:
    return storage.rpartition("#")[0] if "#" in storage else storage


def _storages_of_outputs(
    graph: Graph, memory: Storages, home: Mapping[str, str], chosen: Callable[[OutputKind], bool]
) -> set[str]:
    return {
        home.get(key, key)
        for output in graph.outputs
        if chosen(output.kind) and output.value is not None
        for key in memory.of[output.value.name]
    }


def _last_uses(graph: Graph, memory: Storages, home: Mapping[str, str]) -> dict[str, int]:
    """Position of the last operator that reads or makes each storage."""
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in (node.name, *node.refs()):
            if node.op == "getitem" and name != node.name:
                continue  # picking a result is no use of its siblings
            for key in memory.of[name]:
                last[home.get(key, key)] = position
    return last
