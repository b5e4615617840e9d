"""Cluster files: JSON or YAML that describes devices, machines and links.

::

    {
      "format": "autopar-cluster", "version": 1,
      "devices": {                                  # optional; presets are known by name
        "lab-gpu": {
          "based_on": "a100-80gb",                  # optional: take the rest from this preset
          "kind": "cuda",
          "peak_flops": {"float32": 1.9e13, "bfloat16": 3.1e14},
          "memory": "80GiB",                        # bytes, or text
          "reserved": "4GiB",
          "memory_bandwidth_bytes_per_s": 2.0e12,
          "launch_overhead_s": 4e-6,
          "efficiency": {"matmul_fraction": 0.7},   # fields of EfficiencyCurve
          "cost_per_hour": 1.9,                     # optional; in any currency, the same for all
          "source": "our own measurements"
        }
      },
      "machines": [
        {
          "count": 4, "devices": 8, "device": "lab-gpu",
          "speed": 1.0,                             # optional: 0.5 for machines at half speed
          "intra": {"kind": "nvlink", "latency_s": 3e-6, "bandwidth_bytes_per_s": 2.2e11},
          "inter": {"kind": "infiniband", "latency_s": 8e-6, "bandwidth_bytes_per_s": 2.2e10},
          "site": "east"                            # optional: where they stand
        }
      ],
      "between_sites": {"kind": "ethernet", "latency_s": 2e-2, "bandwidth_bytes_per_s": 1e8}
    }

``intra`` and ``inter`` may be left out where the device is a preset or based on one. Bandwidths
are per device and direction (see :mod:`autopar.cluster.topology`); ``between_sites`` is needed
where machines stand at several sites. Unknown keys are refused. YAML (``.yaml``, ``.yml``) has the
same entries, and takes PyYAML (``pip install pyyaml``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autopar.cluster.device import Device, DeviceKind, EfficiencyCurve, rates
from autopar.cluster.presets import ALIASES, PRESETS, Preset
from autopar.cluster.reading import read_values
from autopar.cluster.topology import Cluster, Link, LinkKind, Machine
from autopar.errors import ConfigError
from autopar.units import parse_bytes

FORMAT = "autopar-cluster"
VERSION = 1
MAX_DEVICES = 1 << 20  # far beyond any cluster; a larger count is a slip of the keyboard


def load_cluster(path: Path | str) -> Cluster:
    """The cluster that a file describes.

    Raises:
        ConfigError: The file can't be read, is not JSON or YAML, or an entry is missing, unknown
            or out of range; the text names file and entry.
    """
    path = Path(path)
    data = read_values(path)
    return cluster_from_data(data, where=f"cluster file {str(path)!r}")


def cluster_from_data(data: object, *, where: str) -> Cluster:
    """The cluster in parsed JSON; ``where`` starts every error text."""
    known = {"format", "version", "devices", "machines", "assumptions", "between_sites"}
    top = _Entry(where, data, known)
    if top.get("format") != FORMAT or top.get("version") != VERSION:
        raise ConfigError(
            f"{where}: has format {top.get('format')!r} version {top.get('version')!r}, "
            f"expected {FORMAT!r} version {VERSION}"
        )
    presets = dict(PRESETS)
    bare: dict[str, Device] = {}
    devices = top.get("devices", {})
    if not isinstance(devices, dict):
        raise ConfigError(f"{where}: devices is a {type(devices).__name__}, must be an object")
    for name, value in devices.items():
        device, base = _device(f"{where}: devices[{name!r}]", name, value)
        presets.pop(name, None)
        if base is None:
            bare[name] = device
        else:
            presets[name] = replace(base, device=device)
    machines: list[Machine] = []
    rows = top.require("machines")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{where}: machines must be a list with at least 1 entry")
    for index, value in enumerate(rows):
        machines += _machines(f"{where}: machines[{index}]", value, presets, bare)
    notes = top.get("assumptions", [])
    if not isinstance(notes, list) or not all(isinstance(n, str) for n in notes):
        raise ConfigError(f"{where}: assumptions must be a list of texts")
    between = _link(top, "between_sites", None) if "between_sites" in top.data else None
    try:
        return Cluster(
            machines=tuple(machines),
            assumptions=(*notes, f"figures from {where}"),
            between_sites=between,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def dump_cluster(cluster: Cluster) -> str:
    """JSON text that :func:`load_cluster` reads back as an equal cluster (but for assumptions).

    Devices are written whole, so that the file does not change its meaning with the presets. Two
    devices of one name and different figures get a number appended.
    """
    names: dict[Device, str] = {}
    for machine in cluster.machines:
        if machine.device in names:
            continue
        taken = set(names.values())
        name, number = machine.device.name, 2
        while name in taken:
            name, number = f"{machine.device.name}-{number}", number + 1
        names[machine.device] = name
    rows: list[dict[str, object]] = []
    previous: Machine | None = None
    for machine in cluster.machines:
        if machine == previous:
            count = rows[-1]["count"]
            rows[-1]["count"] = (count if isinstance(count, int) else 0) + 1
            continue
        previous = machine
        rows.append(
            {
                "count": 1,
                "devices": machine.num_devices,
                "device": names[machine.device],
                "intra": asdict(machine.intra),
                "inter": asdict(machine.inter),
                **({"site": machine.site} if machine.site else {}),
                **({"host_memory": machine.host_memory_bytes} if machine.host_memory_bytes else {}),
            }
        )
    data = {
        "format": FORMAT,
        "version": VERSION,
        "devices": {name: _device_data(device) for device, name in names.items()},
        "machines": rows,
        "assumptions": list(cluster.assumptions),
    }
    if cluster.between_sites is not None:
        data["between_sites"] = asdict(cluster.between_sites)
    return json.dumps(data, indent=2) + "\n"


def _device_data(device: Device) -> dict[str, object]:
    return {
        "kind": device.kind.value,
        "peak_flops": dict(device.peak_flops),
        "memory": device.memory_bytes,
        "reserved": device.reserved_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "launch_overhead_s": device.launch_overhead_s,
        "host_operator_s": device.host_operator_s,
        "host_step_s": device.host_step_s,
        "host_link_bytes_per_s": device.host_link_bytes_per_s,
        "efficiency": asdict(device.curve),
        "source": device.source,
        **({} if device.cost_per_hour is None else {"cost_per_hour": device.cost_per_hour}),
    }


def _device(where: str, name: str, value: object) -> tuple[Device, Preset | None]:
    known = {
        "based_on", "kind", "peak_flops", "memory", "reserved", "memory_bandwidth_bytes_per_s",
        "launch_overhead_s", "host_operator_s", "host_step_s", "host_link_bytes_per_s",
        "efficiency", "cost_per_hour", "source",
    }  # fmt: skip
    entry = _Entry(where, value, known)
    base: Preset | None = None
    if "based_on" in entry.data:
        wanted = entry.text("based_on").lower()
        base = PRESETS.get(ALIASES.get(wanted, wanted))
        if base is None:
            raise ConfigError(
                f"{where}: based_on is {wanted!r}, no such preset; known are {', '.join(PRESETS)}"
            )
    old = base.device if base else None
    kind = entry.text("kind", old.kind.value if old else None)
    if kind not in set(DeviceKind):
        raise ConfigError(f"{where}: kind is {kind!r}, must be one of {[*map(str, DeviceKind)]}")
    peaks = entry.numbers("peak_flops", dict(old.peak_flops) if old else None)
    curve = _curve(entry, old.curve if old else EfficiencyCurve())
    cost = entry.number("cost_per_hour") if "cost_per_hour" in entry.data else None
    try:
        device = Device(
            name=name,
            kind=DeviceKind(kind),
            peak_flops=rates(peaks),
            memory_bytes=entry.amount("memory", old.memory_bytes if old else None),
            reserved_bytes=entry.amount("reserved", old.reserved_bytes if old else 0),
            memory_bandwidth_bytes_per_s=entry.number(
                "memory_bandwidth_bytes_per_s", old.memory_bandwidth_bytes_per_s if old else None
            ),
            launch_overhead_s=entry.number(
                "launch_overhead_s", old.launch_overhead_s if old else None
            ),
            host_operator_s=entry.number("host_operator_s", old.host_operator_s if old else 0.0),
            host_step_s=entry.number("host_step_s", old.host_step_s if old else 0.0),
            host_link_bytes_per_s=entry.number(
                "host_link_bytes_per_s", old.host_link_bytes_per_s if old else 0.0
            ),
            curve=curve,
            cost_per_hour=cost,
            source=entry.text("source", f"given in {where}"),
        )
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from None
    return device, base


def _curve(parent: _Entry, old: EfficiencyCurve) -> EfficiencyCurve:
    where = f"{parent.where}.efficiency"
    entry = _Entry(where, parent.get("efficiency", {}), set(asdict(old)))
    try:
        return EfficiencyCurve(
            matmul_fraction=entry.number("matmul_fraction", old.matmul_fraction),
            attention_fraction=entry.number("attention_fraction", old.attention_fraction),
            attention_backward_fraction=entry.number(
                "attention_backward_fraction", old.attention_backward_fraction
            ),
            conv_fraction=entry.number("conv_fraction", old.conv_fraction),
            memory_fraction=entry.number("memory_fraction", old.memory_fraction),
            tile=entry.count("tile", old.tile),
            half_tiles=entry.number("half_tiles", old.half_tiles),
            half_k=entry.number("half_k", old.half_k),
            split_k=entry.count("split_k", old.split_k),
            num_units=int(entry.number("num_units", old.num_units)),
            wave_share=entry.number("wave_share", old.wave_share),
            alignment=entry.count("alignment", old.alignment),
        )
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from None


def _machines(
    where: str, value: object, presets: Mapping[str, Preset], bare: Mapping[str, Device]
) -> list[Machine]:
    known = {"count", "devices", "device", "speed", "intra", "inter", "site", "host_memory"}
    entry = _Entry(where, value, known)
    name = entry.text("device")
    preset = presets.get(name) or presets.get(ALIASES.get(name.lower(), name.lower()))
    if name in bare:  # the file's own device, though a preset may be known by that name as well
        preset = None
    elif preset is None:
        raise ConfigError(
            f"{where}: device is {name!r}, which is neither in devices nor a preset "
            f"({', '.join(PRESETS)})"
        )
    device = bare[name] if preset is None else preset.device
    try:
        device = device.at_speed(entry.number("speed", 1.0))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    machine = Machine(
        device=device,
        num_devices=entry.count("devices"),
        intra=_link(entry, "intra", preset.intra if preset else None),
        inter=_link(entry, "inter", preset.inter if preset else None),
        site=entry.text("site", ""),
        host_memory_bytes=entry.amount("host_memory", 0),
    )
    count = entry.count("count", 1)
    if count * machine.num_devices > MAX_DEVICES:
        raise ConfigError(
            f"{where}: has {count * machine.num_devices} devices, must be from 1 to {MAX_DEVICES}"
        )
    return [machine] * count


def _link(parent: _Entry, key: str, default: Link | None) -> Link:
    if key not in parent.data and default is not None:
        return default
    where = f"{parent.where}.{key}"
    entry = _Entry(
        where,
        parent.require(key),
        {"kind", "latency_s", "bandwidth_bytes_per_s", "source", "wires"},
    )
    kind = entry.text("kind", "other")
    if kind not in set(LinkKind):
        raise ConfigError(f"{where}: kind is {kind!r}, must be one of {[*map(str, LinkKind)]}")
    try:
        return Link(
            kind=LinkKind(kind),
            latency_s=entry.number("latency_s"),
            bandwidth_bytes_per_s=entry.number("bandwidth_bytes_per_s"),
            source=entry.text("source", f"given in {where}"),
            wires=int(entry.number("wires", 0)),
        )
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from None


@dataclass(frozen=True, slots=True, init=False)
class _Entry:
    """An object of the file under checks; ``where`` starts every error text."""

    where: str
    data: dict[str, object]

    def __init__(self, where: str, value: object, known: set[str]) -> None:
        if not isinstance(value, dict):
            what = "empty" if value is None else f"a {type(value).__name__}"
            raise ConfigError(f"{where}: is {what}, must be an object")
        unknown = sorted(set(value) - known)
        if unknown:
            raise ConfigError(
                f"{where}: has unknown entry {unknown[0]!r}; allowed are {', '.join(sorted(known))}"
            )
        object.__setattr__(self, "where", where)
        object.__setattr__(self, "data", value)

    def get(self, key: str, default: object = None) -> object:
        return self.data.get(key, default)

    def require(self, key: str) -> object:
        if key not in self.data:
            raise ConfigError(f"{self.where}: {key} is missing")
        return self.data[key]

    def text(self, key: str, default: str | None = None) -> str:
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {key} is {value!r}, must be text")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.where}: {key} is {value!r}, must be a number")
        return _finite(f"{self.where}: {key}", value)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.where}: {key} is {value!r}, must be a whole number above 0")
        return value

    def amount(self, key: str, default: int | None = None) -> int:
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ConfigError(f"{self.where}: {key} is {value!r}, must be bytes or text")
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{self.where}: {key}: {error}") from None

    def numbers(self, key: str, default: dict[str, float] | None = None) -> dict[str, float]:
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} is {value!r}, must be an object of numbers")
        for name, number in value.items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ConfigError(f"{self.where}: {key}[{name!r}] is {number!r}, must be a number")
        return {
            str(name): _finite(f"{self.where}: {key}[{name!r}]", number)
            for name, number in value.items()
        }


def _finite(what: str, number: float) -> float:
    """A number that is one: JSON of Python has NaN and Infinity, which pass all comparisons."""
    try:
        found = float(number)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ConfigError(f"{what} is {found}, must be a finite number")
    return found
