"""The process groups of a mesh.

One group per mesh axis for collectives, from a :class:`DeviceMesh` with the axes (pp, dp, tp). For
messages:

* NCCL has one two-rank group per *directed* pair of ranks. Operations of one communicator run in
  the order of their issue, so that in a shared one two large sends that cross would wait for each
  other.
* gloo sends on the world group: it keeps the order of each directed pair (measured, 50 messages of
  mixed sizes in flight) and both directions are independent, so more groups would buy nothing.

Models that run on equal meshes share their groups: a step ends with nothing under way, and torch
keeps every group, with its threads and connections, until it is destroyed. When that is must be
the same on all ranks, so it does not follow from what a rank's garbage collector does: groups are
destroyed by :meth:`GroupLease.close`, or with the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import ConfigError
from autopar.plan.types import DP_AXIS, PP_AXIS, TP_AXIS, MeshShape
from autopar.sharding.programs import LocalPrograms
from autopar.torch_compat import forget_groups

MESH_AXES = (PP_AXIS, DP_AXIS, TP_AXIS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """Who talks to whom, for one rank.

    Attributes:
        mesh: Ranks per axis.
        rank: Global rank of this process.
        device_mesh: torch's mesh with the axes (pp, dp, tp).
        axes: Group of this rank by axis.
        pairs: (Source, target) -> group for messages; empty where the world group serves.
        backend: ``"gloo"`` or ``"nccl"``.
    """

    mesh: MeshShape
    rank: int
    device_mesh: DeviceMesh
    axes: Mapping[str, dist.ProcessGroup]
    pairs: Mapping[tuple[int, int], dist.ProcessGroup]
    backend: str


@dataclass(slots=True)
class _Shared:
    """Groups, and how many hold them."""

    groups: ProcessGroups | None
    holders: int = 0


_SHARED: dict[tuple[object, ...], _Shared] = {}


class GroupLease:
    """Groups that this process holds, maybe with others.

    Attributes:
        groups: None on a rank that the mesh does not use.
    """

    def __init__(self, key: tuple[object, ...], groups: ProcessGroups | None) -> None:
        self.groups = groups
        self._key: tuple[object, ...] | None = key

    def close(self) -> None:
        """Destroy the groups unless another model holds them; every rank calls it. Once."""
        if self._key is None:
            return
        key, self._key = self._key, None
        self.groups = None  # a backend's threads end with the last reference to its group
        shared = _SHARED.get(key)
        if shared is None:  # its world is gone
            return
        shared.holders -= 1
        if shared.holders > 0:
            return
        del _SHARED[key]
        if shared.groups is not None and dist.is_initialized():
            _destroy(shared.groups)


def _destroy(groups: ProcessGroups) -> None:
    """Destroy all groups but the world's, by which torch joins an axis over all ranks."""
    kept = {dist.group.WORLD.group_name}  # type: ignore[union-attr]  # there is a world
    for group in (*groups.axes.values(), *groups.pairs.values()):
        if group.group_name not in kept:
            kept.add(group.group_name)
            dist.destroy_process_group(group)
    forget_groups(groups.device_mesh)


def lease_groups(mesh: MeshShape, programs: LocalPrograms, device_type: str) -> GroupLease:
    """The groups of a mesh, those of another model if it has equal ones; every rank calls it.

    Arguments and errors as those of :func:`create_groups`.
    """
    world = dist.group.WORLD
    for key in [key for key in _SHARED if key[0] is not world]:
        del _SHARED[key]  # of a job that was left
    pairs = () if str(dist.get_backend()) == "gloo" else tuple(rank_pairs(mesh, programs))
    key = (world, mesh.pp, mesh.dp, mesh.tp, device_type, pairs)
    if key not in _SHARED:
        _SHARED[key] = _Shared(create_groups(mesh, programs, device_type))
    shared = _SHARED[key]
    shared.holders += 1
    return GroupLease(key, None if shared.groups is None else replace(shared.groups, mesh=mesh))


def create_groups(
    mesh: MeshShape, programs: LocalPrograms, device_type: str
) -> ProcessGroups | None:
    """Create all groups; every rank of the world calls it, also those without work.

    Args:
        mesh: Ranks per axis.
        programs: Tell which pairs of ranks exchange messages.
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        None on a rank that the mesh does not use.

    Raises:
        ConfigError: The world has fewer ranks than the mesh.
    """
    world = dist.get_world_size()
    if world < mesh.num_ranks:
        raise ConfigError(
            f"the plan needs {mesh.num_ranks} ranks ({mesh}), the launch has {world}; start more "
            "processes or plan for fewer devices"
        )
    backend = str(dist.get_backend())
    grid = torch.arange(mesh.num_ranks).view(mesh.pp, mesh.dp, mesh.tp)
    device_mesh = DeviceMesh(device_type, grid, mesh_dim_names=MESH_AXES)
    pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
    if backend != "gloo":
        for source, target in rank_pairs(mesh, programs):
            group = dist.new_group([source, target])
            if isinstance(group, dist.ProcessGroup):  # else this rank is not in it
                pairs[source, target] = group
    rank = dist.get_rank()
    if rank >= mesh.num_ranks:
        return None
    return ProcessGroups(
        mesh=mesh,
        rank=rank,
        device_mesh=device_mesh,
        axes={axis: device_mesh.get_group(axis) for axis in MESH_AXES},
        pairs=pairs,
        backend=backend,
    )


def rank_pairs(mesh: MeshShape, programs: LocalPrograms) -> list[tuple[int, int]]:
    """Directed pairs of global ranks that exchange messages, in one order for all ranks."""
    stage_pairs: set[tuple[int, int]] = {*programs.forward_edges, *programs.backward_edges}
    for param in programs.params.values():
        for borrower in param.stages:
            stage_pairs |= {(param.owner, borrower), (borrower, param.owner)}
    for stages in programs.buffer_stages.values():
        stage_pairs |= {(a, b) for a in stages for b in stages}
    return sorted(_ranks_of(stage_pairs, mesh))


def _ranks_of(stage_pairs: Iterable[tuple[int, int]], mesh: MeshShape) -> set[tuple[int, int]]:
    found = set()
    for source, target in stage_pairs:
        first, second = mesh.pipeline_rank(source), mesh.pipeline_rank(target)
        if first != second:
            for dp in range(mesh.dp):
                for tp in range(mesh.tp):
                    found.add((mesh.rank_of(first, dp, tp), mesh.rank_of(second, dp, tp)))
    return found
