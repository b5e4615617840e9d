"""Parameters that programs read in slices, each slice with a layout of its own.

A fused projection (the joint query, key and value weight of GPT-2) is one parameter to the user and
several to the programs. At rest it is one ``DTensor``. Where all slices have one layout that does
not split the sliced dim, their buffers are views of it. Else the ``DTensor`` is cut plainly by
torch's rule and the slices have buffers of their own, filled before each step from the whole
parameter; their gradients come back the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.errors import PassError
from autopar.ir.graph import Graph, InputKind, Part, TensorMeta
from autopar.sharding.placement import Layout, Placement, R, Shard
from autopar.sharding.programs import LocalPrograms, ParamSpec

_STORAGE_AXES = 2  # dp and tp; mb is time


@dataclass(frozen=True, slots=True)
class Composition:
    """A parameter and what programs read of it.

    Attributes:
        spec: The parameter as it rests: the user's name and shape.
        pieces: (spec, slice) under the names that programs use; one with None where the whole
            parameter is read.
        is_joint: Whether the pieces' buffers are views of the parameter's.
    """

    spec: ParamSpec
    pieces: tuple[tuple[ParamSpec, Part | None], ...]
    is_joint: bool


def parts_of(graph: Graph) -> dict[str, Part]:
    """Slices of parameters that a program reads, by the name it reads them under."""
    return {i.target: i.part for i in graph.of_kind(InputKind.PARAM) if i.part is not None}


def with_common_owners(local: LocalPrograms, parts: Mapping[str, Part]) -> LocalPrograms:
    """Slices of one parameter owned by one stage, the first; other stages borrow theirs."""
    owners: dict[str, int] = {}
    for name, part in parts.items():
        if name in local.params:
            owner = local.params[name].owner
            owners[part.param] = min(owner, owners.get(part.param, owner))
    if not owners:
        return local
    params = dict(local.params)
    for name, part in parts.items():
        if name in params:
            spec = params[name]
            owner = owners[part.param]
            stages = tuple(sorted({owner, *spec.stages}))
            params[name] = replace(spec, owner=owner, stages=stages)
    return replace(local, params=params)


def compositions(
    local: LocalPrograms, parts: Mapping[str, Part], metas: Mapping[str, TensorMeta]
) -> dict[str, Composition]:
    """Parameters of the programs by the user's first name.

    Args:
        local: The programs, slices of one parameter owned by one stage.
        parts: From :func:`parts_of`.
        metas: True shape and dtype of the model's parameters.
    """
    sizes = local.axis_sizes[-_STORAGE_AXES:]
    found: dict[str, Composition] = {}
    sliced: dict[str, list[tuple[ParamSpec, Part]]] = {}
    for name, spec in local.params.items():
        part = parts.get(name)
        if part is None:
            found[name] = Composition(spec, ((spec, None),), is_joint=True)
        else:
            sliced.setdefault(part.param, []).append((spec, part))
    for name, pieces in sliced.items():
        pieces.sort(key=_start)
        found[name] = _compose(name, metas[name], pieces, sizes)
    return found


def _start(piece: tuple[ParamSpec, Part]) -> int:
    return piece[1].start


def _compose(
    name: str, meta: TensorMeta, pieces: list[tuple[ParamSpec, Part]], sizes: tuple[int, ...]
) -> Composition:
    dim = pieces[0][1].dim
    bounds = [(part.start, part.stop) for _, part in pieces]
    if bounds[0][0] or bounds[-1][1] != meta.shape[dim] or not _touch(bounds):
        raise PassError(f"parameter {name!r} of {meta} is read in slices {bounds} with gaps")
    layouts = [spec.storage[-_STORAGE_AXES:] for spec, _ in pieces]
    common: list[Placement] = []
    for placements, size in zip(zip(*layouts, strict=True), sizes, strict=True):
        first = placements[0]
        common.append(first if size > 1 and len(set(placements)) == 1 else R)
    is_joint = len(set(layouts)) == 1 and Shard(dim) not in common
    first = pieces[0][0]
    spec = replace(
        first,
        name=name,
        aliases=(),
        meta=replace(meta, dtype=first.meta.dtype),
        requires_grad=any(s.requires_grad for s, _ in pieces),
        stages=tuple(sorted({stage for s, _ in pieces for stage in s.stages})),
        storage=(R, *_plain(common, meta, sizes)),
        compute=(R,) * len(first.compute),
    )
    return Composition(spec, tuple(pieces), is_joint)


def _touch(bounds: Iterable[tuple[int, int]]) -> bool:
    listed = list(bounds)
    return all(a[1] == b[0] for a, b in pairwise(listed))


def _plain(layout: list[Placement], meta: TensorMeta, sizes: tuple[int, ...]) -> Layout:
    """The layout without a dim that two axes would cut unevenly."""
    dims = [p.dim for p in layout if isinstance(p, Shard)]
    total = 1
    for size in sizes:
        total *= size
    if len(set(dims)) < len(dims) and meta.shape[dims[0]] % total:
        return (R, layout[-1])
    return tuple(layout)
