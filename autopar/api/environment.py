"""Where this process stands: launched by ``torchrun`` or not, and on which device."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.api.profiling import profiled_machine, saved_profile
from autopar.cluster import Cluster, DeviceKind
from autopar.errors import ConfigError
from autopar.runtime.failure import FailFast, fail_fast
from autopar.runtime.place import Place
from cost_models.local import gpu_cluster, local_cluster
from cost_models.profile import load_profile, profile_cache_path

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE")


def is_launched() -> bool:
    """Whether a launcher or the user set up a job of one or more ranks."""
    if dist.is_available() and dist.is_initialized():
        return True
    return all(name in os.environ for name in _LAUNCH_VARIABLES)


def world_size() -> int:
    """Ranks of the job; 1 in a plain process."""
    if not is_launched():
        return 1
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def find_place(cluster: Cluster, model: torch.nn.Module) -> Place:
    """This process, its process group set up if a launcher started it.

    Args:
        cluster: What is planned for; CPU devices mean gloo and CPU tensors.
        model: In a plain process the place of its parameters counts.
    """
    is_cpu = all(m.device.kind is DeviceKind.CPU for m in cluster.machines)
    if not is_launched():
        first = next((p.device for p in model.parameters() if not p.is_meta), None)
        if first is None:
            first = torch.device("cpu" if is_cpu or not torch.cuda.is_available() else "cuda")
        return Place(rank=0, world_size=1, device=first, is_launched=False)
    device = torch.device("cpu")
    if not is_cpu and torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        count = torch.cuda.device_count()
        if local >= count:
            raise ConfigError(
                f"LOCAL_RANK is {local}, this machine has {count} GPUs; start at most {count} "
                "processes here, or plan for CPUs with devices='N:cpu'"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    return Place(
        rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, is_launched=True
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start ranks.

    Attributes:
        command: For a shell; for several machines with words in capitals to be filled in.
        note: What else is to know; "" where the command runs as it stands.
    """

    command: str
    note: str = ""

    def __str__(self) -> str:
        """Both in one line."""
        return f"{self.command}  ({self.note})" if self.note else self.command


def launch_of(cluster: Cluster | None, *, script: str = "") -> Launch:
    """How to start a script on the planned devices.

    Args:
        cluster: The devices; None if only a file that is not named knows them.
        script: Words after the launcher's; left out, those of this process.
    """
    script = script or (sys.argv[0] if sys.argv and sys.argv[0] else "train.py")
    machines = () if cluster is None else cluster.machines
    per_machine = {m.num_devices for m in machines}
    if len(machines) == 1:
        return Launch(f"torchrun --nproc-per-node {machines[0].num_devices} {script}")
    count = str(len(machines) or "MACHINES")
    size = str(machines[0].num_devices) if len(per_machine) == 1 else "N"
    command = (
        f"torchrun --nnodes {count} --nproc-per-node {size} --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:29500 {script}"
    )
    note = "on every machine"
    if not machines:
        note += ", N: its devices"
    elif len(per_machine) > 1:
        note += f", N = {', '.join(str(m.num_devices) for m in machines)}"
    return Launch(command, f"{note}; HOST: the address of one of them")


def local_machine(profile: Path | None = None) -> Cluster:
    """What this machine has: its GPUs, or CPU ranks; what another has, if its profile is named.

    Raises:
        ConfigError: The profile is damaged, or the saved one is not of this machine's CPU.
    """
    if profile is not None:
        return profiled_machine(load_profile(profile))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return gpu_cluster(
            properties.name,
            num_devices=torch.cuda.device_count(),
            memory_bytes=properties.total_memory,
        )
    saved = saved_profile()
    if saved is not None and saved.device != "cpu":
        raise ConfigError(
            f"profile {str(profile_cache_path())!r}: device is {saved.device!r}, here it is 'cpu'; "
            "profile this machine with `autopar profile`, or delete the file"
        )
    return local_cluster(saved)


@functools.cache
def job_watch(group: object) -> FailFast:
    """The watch over the job's ranks, one for each default process group.

    Args:
        group: The default process group; every rank must call at the same time.
    """
    del group  # the key of the cache
    return fail_fast()
