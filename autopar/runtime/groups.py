"""The process groups of a mesh.

One group per mesh axis for collectives, from a :class:`DeviceMesh` with the axes (pp, dp, tp). For
messages:

* NCCL has one two-rank group per *directed* pair of ranks. Operations of one communicator run in
  the order of their issue, so that in a shared one two large sends that cross would wait for each
  other.
* gloo sends on the world group: it keeps the order of each directed pair (measured, 50 messages of
  mixed sizes in flight) and both directions are independent, so more groups would buy nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import ConfigError
from autopar.plan.types import DP_AXIS, PP_AXIS, TP_AXIS, MeshShape
from autopar.sharding.programs import LocalPrograms

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
