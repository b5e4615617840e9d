"""Which operators of a program share a kernel, and what each kernel does.

An eager framework starts one kernel per operator, except where a library has a fused one (a norm,
``bias + GELU``, ``scale + mask + softmax``, ``dropout + add``). A compiler fuses by itself. A
fused kernel reads what comes from outside once and writes what is read outside once; values inside
stay in registers. Matmuls, convolutions, attention and collectives are kernels of their own, but
for a bias, which matmul libraries add while they write.

What is fused is told by names (a :class:`KernelFamily`): modules whose operators are one kernel
per pass, and whether a compiler is at work. A compiler is taken to fuse connected element-wise
operators and reductions over as many elements, never around a matmul.

Source: Shoeybi et al., Megatron-LM, 2019 (its fused kernels); Ansel et al., "PyTorch 2", ASPLOS
2024 (Inductor's fusion); Dao et al., FlashAttention, 2022 and 2023.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from autopar.ir.graph import Graph, Meta, Node, TensorMeta
from cost_models.flops import OpClass, Work, tensors, work_of


class Backend(StrEnum):
    """What starts the kernels."""

    EAGER = "eager"
    COMPILED = "compiled"


class AttentionKernel(StrEnum):
    """How attention is computed."""

    UNFUSED = "unfused"
    FLASH_1 = "flash-1"
    FLASH_TRITON = "flash-triton"
    FLASH_2 = "flash-2"


class Float8(StrEnum):
    """How scales of 8-bit matmuls are found: one per tensor, or one per row."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"


# Share of FlashAttention-2's rate that an attention kernel reaches on the same device. Version 1
# and its Triton form split work over heads only, and within a block the wrong way round.
# [published: version 2 is 1.7 to 3 times as fast; Dao, "FlashAttention-2", 2023]
ATTENTION_SHARE: Mapping[AttentionKernel, float] = MappingProxyType(
    {
        AttentionKernel.UNFUSED: 1.0,
        AttentionKernel.FLASH_1: 0.6,
        AttentionKernel.FLASH_TRITON: 0.6,
        AttentionKernel.FLASH_2: 1.0,
    }
)
# Share of the float8 peak that row-wise scaled matmuls reach beside tensor-wise scaled ones.
# [fitted on the rates that torchtitan's benchmarks print for both]
ROWWISE_SHARE = 0.45
# Bytes moved per element to cast an operand: read for the maximum, read again, written.
CAST_BYTES = 2 + 2 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFamily:
    """Which kernels a training program runs.

    Attributes:
        backend: Eager or compiled.
        attention: Kernel of attention operators.
        fused: Last parts of module paths whose operators are one kernel per pass, such as
            ``"norm"``; ``"norm_1"`` counts as ``"norm"``.
        float8: Scaling of 8-bit linear layers; None for the program's own dtype.
    """

    backend: Backend = Backend.EAGER
    attention: AttentionKernel = AttentionKernel.FLASH_2
    fused: frozenset[str] = frozenset()
    float8: Float8 | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One start of work on the device.

    Attributes:
        work: What it does.
        names: The operators in it, in order.
    """

    work: Work
    names: tuple[str, ...]


def program_kernels(graph: Graph, family: KernelFamily) -> list[Kernel]:
    """The kernels of a program, collectives and views left out.

    Args:
        graph: A local program; what its outputs name is read outside.
        family: Which kernels.

    Returns:
        Kernels in the order of their first operator.
    """
    kept = {o.value.name for o in graph.outputs if o.value is not None}
    return kernels_of(graph.nodes, graph.metas(), kept, family)


def kernels_of(
    nodes: Sequence[Node], metas: Mapping[str, Meta], kept: Collection[str], family: KernelFamily
) -> list[Kernel]:
    """The kernels of ``nodes``; ``kept`` names values that are read elsewhere."""
    works = {n.name: _work(n, metas) for n in nodes}
    labels = _compiled_groups(nodes, works, metas) if family.backend is Backend.COMPILED else {}
    if family.backend is Backend.EAGER:
        labels = _library_groups(nodes, works, family.fused)
    biases = _biases(nodes, works, metas, kept)
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op.startswith("comm.") or node.name in biases:
            continue
        groups.setdefault(labels.get(node.name, f"={node.name}"), []).append(node)
    readers = _readers(nodes)
    found: list[Kernel] = []
    for group in groups.values():
        names = tuple(n.name for n in group)
        if len(group) == 1:
            work = works[names[0]]
        else:
            work = _merged(group, works, metas, readers, kept)
        if work.op_class is not OpClass.FREE:
            found += [Kernel(w, names) for w in family_works(work, family)]
    return found


def family_works(work: Work, family: KernelFamily) -> tuple[Work, ...]:
    """``work`` as the family's kernels do it: attention at its rate, matmuls in 8 bits.

    A slower kernel is given more FLOPs in proportion. An 8-bit matmul is followed by the casts of
    its two operands. Batched matmuls, those of unfused attention, stay in the program's dtype.
    """
    if work.op_class is OpClass.ATTENTION:
        return (replace(work, flops=work.flops / ATTENTION_SHARE[family.attention]),)
    if work.op_class is OpClass.MATMUL and family.float8 is not None and work.dims[:1] == (1,):
        share = ROWWISE_SHARE if family.float8 is Float8.ROWWISE else 1.0
        _, m, n, k = work.dims
        cast = Work(
            op_class=OpClass.MEMORY,
            moved_bytes=float(CAST_BYTES * (m * k + k * n)),
            num_kernels=2,
        )
        return (replace(work, dtype="float8", flops=work.flops / share), cast)
    return (work,)


def _work(node: Node, metas: Mapping[str, Meta]) -> Work:
    operands = [metas.get(name) for name in node.refs()]
    return work_of(node.op, node.args, operands, node.meta)


def _merged(
    group: Sequence[Node],
    works: Mapping[str, Work],
    metas: Mapping[str, Meta],
    readers: Mapping[str, set[str]],
    kept: Collection[str],
) -> Work:
    """One kernel for the group: outside values read once, values read outside written once."""
    inside = {n.name for n in group}
    read: dict[str, int] = {}
    written = 0
    for node in group:
        if works[node.name].op_class is OpClass.FREE:
            continue
        # an operator that reads a part of its operand reads no more here than alone
        alone = works[node.name].moved_bytes
        for name in dict.fromkeys(node.refs()):
            if name not in inside:
                size = sum(t.bytes for t in tensors([metas.get(name)]))
                read[name] = max(read.get(name, 0), min(size, int(alone)))
    for node in group:
        if node.name in kept or readers.get(node.name, set()) - inside:
            written += sum(t.bytes for t in tensors(node.meta))
    busy = [works[n.name] for n in group if works[n.name].op_class is not OpClass.FREE]
    if not busy:
        return works[group[0].name]
    return Work(
        op_class=OpClass.MEMORY,
        flops=sum(w.flops for w in busy),
        moved_bytes=float(sum(read.values()) + written),
        dtype=busy[0].dtype,
    )


def _readers(nodes: Sequence[Node]) -> dict[str, set[str]]:
    table: dict[str, set[str]] = {}
    for node in nodes:
        for name in node.refs():
            table.setdefault(name, set()).add(node.name)
    return table


def _is_light(work: Work) -> bool:
    return work.op_class in (OpClass.MEMORY, OpClass.FREE)


def _library_groups(
    nodes: Sequence[Node], works: Mapping[str, Work], fused: frozenset[str]
) -> dict[str, str]:
    """Name -> module path and pass, for operators of modules that are one kernel."""
    labels = {}
    for node in nodes:
        part = node.scope.rpartition(".")[2]
        if part.partition("_")[0] in fused and _is_light(works[node.name]):
            if not node.op.startswith("comm."):
                labels[node.name] = f"{node.scope} {node.phase}"
    return labels


def _compiled_groups(
    nodes: Sequence[Node], works: Mapping[str, Work], metas: Mapping[str, Meta]
) -> dict[str, str]:
    """Name -> first operator of its group; see the module's text.

    ``level`` counts the matmuls and collectives on the longest way to an operator: operators of
    one level have none between them, so that a group never waits for itself.
    """
    level: dict[str, int] = {}
    labels: dict[str, str] = {}
    spans: dict[str, int] = {}
    heavy: set[str] = set()
    for node in nodes:
        known = [name for name in node.refs() if name in level]
        level[node.name] = max((level[n] + (n in heavy) for n in known), default=0)
        if not _is_light(works[node.name]) or node.op.startswith("comm."):
            heavy.add(node.name)
            continue
        span = _span(node, metas)
        label = node.name
        for name in known:
            joined = labels.get(name)
            if joined and level[name] == level[node.name] and _joins(spans[joined], span, node):
                label = joined
                break
        labels[node.name] = label
        spans[label] = max(spans.get(label, 0), span)
    return labels


def _span(node: Node, metas: Mapping[str, Meta]) -> int:
    """Elements that an operator goes over."""
    every = [*tensors([metas.get(n) for n in node.refs()]), *tensors(node.meta)]
    return max((t.numel for t in every), default=0)


def _joins(group_span: int, span: int, node: Node) -> bool:
    return node.op == "getitem" or span == group_span


def _biases(
    nodes: Sequence[Node],
    works: Mapping[str, Work],
    metas: Mapping[str, Meta],
    kept: Collection[str],
) -> set[str]:
    """Additions of a vector to a matmul's result that nothing else reads."""
    made_by = {n.name: n for n in nodes}
    readers = _readers(nodes)
    found: set[str] = set()
    for node in nodes:
        if node.op != "aten.add.Tensor" or len(node.refs()) != 2:
            continue
        first, second = node.refs()
        meta = metas.get(second)
        source = made_by.get(first)
        while source is not None and works[source.name].op_class is OpClass.FREE and source.refs():
            source = made_by.get(source.refs()[0])
        if (
            isinstance(meta, TensorMeta)
            and len(meta.shape) == 1
            and source is not None
            and works[source.name].op_class is OpClass.MATMUL
            and readers[first] == {node.name}
            and first not in kept
        ):
            found.add(node.name)
    return found
