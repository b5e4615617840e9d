"""From what a user writes for ``devices=`` to a :class:`Cluster`.

::

    devices  = COUNT | SPEC | Cluster | path of a cluster file (.json, .yaml)
    SPEC     = PART { "+" PART }
    PART     = [ [ MACHINES "x" ] COUNT ":" ] NAME [ "@" SPEED ]

``4x8:h100-sxm`` is four machines of eight, ``8:a100-80gb`` eight devices (spread over machines of
the usual size), ``cpu`` one CPU process, ``4:cpu`` four on this machine. ``8:h100-sxm@0.5`` is a
machine that computes at half of its speed. The format of cluster files is in
:mod:`autopar.cluster.file`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path

from autopar.cluster.device import Device, DeviceKind
from autopar.cluster.file import MAX_DEVICES, dump_cluster, load_cluster
from autopar.cluster.presets import ALIASES, PRESETS, Preset
from autopar.cluster.reading import SUFFIXES
from autopar.cluster.topology import Cluster, Machine
from autopar.errors import ConfigError
from autopar.units import parse_bytes

__all__ = ["dump_cluster", "find_preset", "load_cluster", "parse_devices"]

_PART = re.compile(
    r"(?:(?:(-?\d+)\s*[x*]\s*)?(-?\d+)\s*:\s*)?([A-Za-z][\w.\-]*)(?:@(\d+(?:\.\d+)?(?:e-?\d+)?))?"
)
_FORMS = (
    "write a count (8), 'COUNT:NAME' ('8:a100-80gb'), 'MACHINESxCOUNT:NAME' ('4x8:h100-sxm'), "
    "several joined by ' + ', or the path of a cluster file (.json, .yaml)"
)


def parse_devices(
    spec: int | str | Path | Cluster,
    *,
    memory_limit: int | str | None = None,
    local: Cluster | None = None,
) -> Cluster:
    """The cluster that ``spec`` describes.

    Args:
        spec: See the module's text. A count means so many of what this machine has.
        memory_limit: Bytes (or text such as ``"16GiB"``) that a plan may use on each device; what
            the device has, less a reserve, if left out.
        local: What this machine has; default CPU figures if left out.

    Raises:
        ConfigError: The text is malformed, names an unknown device, or a count is out of range;
            a file is missing or invalid; the memory limit is not an amount.

    >>> str(parse_devices("4x8:h100"))
    '4x8:h100-sxm'
    >>> parse_devices("16:a100-80gb").num_devices, str(parse_devices("16:a100-80gb"))
    (16, '2x8:a100-80gb')
    """
    cluster = _parse(spec, local)
    if memory_limit is None:
        return cluster
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, int | str):
        raise ConfigError(f"memory_limit is {memory_limit!r}; write bytes or text such as '16GiB'")
    try:
        limit_bytes = parse_bytes(memory_limit)
    except ValueError as error:
        raise ConfigError(f"memory_limit: {error}") from None
    return cluster.with_memory_limit(limit_bytes)


def _parse(spec: int | str | Path | Cluster, local: Cluster | None) -> Cluster:
    if isinstance(spec, Cluster):
        return spec
    if isinstance(spec, Path):
        return load_cluster(spec)
    if isinstance(spec, bool) or not isinstance(spec, int | str):
        raise ConfigError(f"devices is {spec!r} of type {type(spec).__name__}; {_FORMS}")
    if isinstance(spec, int):
        return _local_devices(spec, local)
    text = spec.strip()
    if text.lower().endswith(SUFFIXES):
        return load_cluster(Path(text))
    if re.fullmatch(r"-?\d+", text):
        return _local_devices(int(text), local)
    machines: list[Machine] = []
    assumptions: dict[str, None] = {}
    for part in text.split("+"):
        found, notes = _parse_part(part.strip(), text, local)
        machines += found
        assumptions.update(dict.fromkeys(notes))
    return Cluster(machines=tuple(machines), assumptions=tuple(assumptions))


def _parse_part(
    part: str, whole: str, local: Cluster | None
) -> tuple[list[Machine], tuple[str, ...]]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(f"devices={whole!r}: {part!r} is not understood; {_FORMS}")
    num_machines, count, name, speed = match.groups()
    num_devices = _checked(int(count or 1), "devices", whole)
    preset = find_preset(name)
    if speed is not None:
        preset = replace(preset, device=preset.device.at_speed(float(speed)))
    if num_machines is None and local is not None and _is_cpu(preset.device, local):
        cluster = _local_devices(num_devices, local)
        return list(cluster.machines), cluster.assumptions
    if num_machines is not None:
        total = _checked(int(num_machines), "machines", whole)
        _checked(total * num_devices, "devices in all", whole)
        return [preset.machine(num_devices)] * total, _notes(preset, several=total > 1)
    full, rest = divmod(num_devices, preset.machine_size)
    machines = [preset.machine(preset.machine_size)] * full
    if rest:
        machines.append(preset.machine(rest))
    return machines, _notes(preset, several=len(machines) > 1)


def find_preset(name: str) -> Preset:
    """The preset called ``name``, upper or lower case.

    Raises:
        ConfigError: There is none; the text lists those there are, the closest first.
    """
    key = name.lower()
    key = ALIASES.get(key, key)
    if key in PRESETS:
        return PRESETS[key]
    close = [known for known in PRESETS if known.startswith(key)]
    close = close or difflib.get_close_matches(key, [*PRESETS, *ALIASES], n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ConfigError(
        f"devices: no device is called {name!r}; {hint}known are {', '.join(PRESETS)}; "
        "describe another one in a cluster file (.json, .yaml)"
    )


def _checked(count: int, what: str, whole: str) -> int:
    if not 1 <= count <= MAX_DEVICES:
        raise ConfigError(
            f"devices={whole!r}: {count} {what}, must be from 1 to {MAX_DEVICES}; {_FORMS}"
        )
    return count


def _local_devices(count: int, local: Cluster | None) -> Cluster:
    """``count`` of the devices of this machine."""
    _checked(count, "devices", str(count))
    if local is None:
        preset = PRESETS["cpu"]
        return Cluster(machines=(preset.machine(count),), assumptions=_notes(preset, several=False))
    pattern = local.machines[0]
    if pattern.device.kind is DeviceKind.CPU:
        return _cpu_ranks(count, pattern, local.assumptions)
    full, rest = divmod(count, pattern.num_devices)
    machines = (pattern,) * full
    if rest:
        machines += (replace(pattern, num_devices=rest),)
    return Cluster(machines=machines, assumptions=local.assumptions)


def _cpu_ranks(count: int, pattern: Machine, assumptions: tuple[str, ...]) -> Cluster:
    """``count`` ranks on one machine of ``pattern.num_devices`` cores: they share what it has."""
    cores = pattern.num_devices
    if count > cores:
        assumptions += (f"{count} ranks share the {cores} cores of this machine",)
    return Cluster(machines=(pattern.with_ranks(count),), assumptions=assumptions)


def _is_cpu(device: Device, local: Cluster) -> bool:
    return device.kind is DeviceKind.CPU and local.machines[0].device.kind is DeviceKind.CPU


def _notes(preset: Preset, *, several: bool) -> tuple[str, ...]:
    notes = [f"{preset.device.name}: {preset.device.source}"]
    notes.append(f"inside a machine: {preset.intra.source}")
    if several:
        notes.append(f"between machines: {preset.inter.source}")
    return tuple(dict.fromkeys(notes))
