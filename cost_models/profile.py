"""Profiles: times that were measured on a machine, as versioned JSON.

::

    {
      "format": "autopar-profile", "version": 1,
      "machine": "AMD EPYC 9004, 2 cores", "date": "2025-01-31",
      "versions": {"torch": "2.13.0"},
      "device": "cpu", "num_threads": 1, "num_cores": 2, "memory_bytes": 25000000000,
      "points": [
        {"kind": "matmul", "dtype": "float32", "sizes": [1, 256, 256, 256], "time_s": 0.0003}
      ]
    }

Sizes by kind: ``matmul`` b, m, n, k; ``stream`` bytes read and written by one pass over memory;
``launch`` nothing (the time of an operator on next to no data); the collectives payload bytes (see
:mod:`cost_models.collectives`) and ranks.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import isfinite
from pathlib import Path

from autopar.errors import ConfigError

FORMAT = "autopar-profile"
VERSION = 1


class PointKind(StrEnum):
    """What was measured."""

    MATMUL = "matmul"
    STREAM = "stream"
    LAUNCH = "launch"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    P2P = "p2p"


# Numbers in Point.sizes by kind.
NUM_SIZES: Mapping[PointKind, int] = {
    PointKind.MATMUL: 4, PointKind.STREAM: 1, PointKind.LAUNCH: 0, PointKind.ALL_REDUCE: 2,
    PointKind.ALL_GATHER: 2, PointKind.REDUCE_SCATTER: 2, PointKind.ALL_TO_ALL: 2,
    PointKind.BROADCAST: 2, PointKind.P2P: 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement.

    Attributes:
        kind: What.
        dtype: Element type.
        sizes: See the module's text.
        time_s: Median seconds of one run.
    """

    kind: PointKind
    dtype: str
    sizes: tuple[int, ...]
    time_s: float

    def __post_init__(self) -> None:
        if len(self.sizes) != NUM_SIZES[self.kind]:
            raise ConfigError(
                f"point {self.kind}: has {len(self.sizes)} sizes, needs {NUM_SIZES[self.kind]}"
            )
        if any(size < 1 for size in self.sizes):
            raise ConfigError(f"point {self.kind}: sizes are {self.sizes}, must be at least 1")
        if not (isfinite(self.time_s) and self.time_s > 0):
            raise ConfigError(f"point {self.kind}: time_s is {self.time_s}, must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured on one machine.

    Attributes:
        machine: The processor and how many cores.
        date: Day of the measurement, ISO form.
        versions: Of the libraries, by name.
        device: torch's device type.
        num_threads: Threads that one rank computes with.
        num_cores: Cores that ranks may be put on.
        memory_bytes: Memory of the whole machine.
        points: The measurements.
    """

    machine: str
    date: str
    device: str = "cpu"
    num_threads: int = 1
    num_cores: int = 1
    memory_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] = ()

    def of_kind(self, kind: PointKind) -> tuple[Point, ...]:
        """Points of one kind, in order."""
        return tuple(p for p in self.points if p.kind is kind)


def profile_cache_path(cache_home: Path | None = None) -> Path:
    """Where the profile of this machine is kept between runs.

    Args:
        cache_home: Folder of caches; ``~/.cache`` if left out.
    """
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", platform.node() or "machine")
    return (cache_home or Path.home() / ".cache") / "autopar" / f"profile-{host}-v{VERSION}.json"


def dump_profile(profile: Profile) -> str:
    """JSON text that :func:`parse_profile` reads back as an equal profile."""
    data: dict[str, object] = {"format": FORMAT, "version": VERSION}
    data.update(asdict(profile))
    data["versions"] = dict(sorted(profile.versions.items()))
    return json.dumps(data, indent=1) + "\n"


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` to ``path``, making its folder; readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(dump_profile(profile), encoding="utf-8")
    partial.replace(path)


def load_profile(path: Path | str) -> Profile:
    """The profile in a file.

    Raises:
        ConfigError: The file can't be read or is no valid profile; the text names file and entry.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"profile {str(path)!r} can't be read: {reason}; make one with `autopar profile`"
        ) from None
    return parse_profile(text, where=f"profile {str(path)!r}")


def parse_profile(text: str, *, where: str = "profile") -> Profile:
    """The profile in JSON text; ``where`` starts every error text."""
    try:
        data: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}; delete it and profile again") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: is a {type(data).__name__}, must be an object")
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise ConfigError(
            f"{where}: has format {data.get('format')!r} version {data.get('version')!r}, expected "
            f"{FORMAT!r} version {VERSION}; delete it and profile again"
        )
    points = data.get("points")
    if not isinstance(points, list):
        raise ConfigError(f"{where}: points must be a list")
    versions = data.get("versions", {})
    if not isinstance(versions, dict):
        raise ConfigError(f"{where}: versions must be an object")
    return Profile(
        machine=_text(data, "machine", where),
        date=_text(data, "date", where),
        device=_text(data, "device", where),
        num_threads=_whole(data, "num_threads", where),
        num_cores=_whole(data, "num_cores", where),
        memory_bytes=_whole(data, "memory_bytes", where),
        versions={str(name): str(version) for name, version in versions.items()},
        points=tuple(_point(p, f"{where}: points[{i}]") for i, p in enumerate(points)),
    )


def _point(value: object, where: str) -> Point:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: is a {type(value).__name__}, must be an object")
    kind = _text(value, "kind", where)
    if kind not in set(PointKind):
        raise ConfigError(f"{where}: kind is {kind!r}, must be one of {', '.join(PointKind)}")
    sizes, time_s = value.get("sizes"), value.get("time_s")
    if not isinstance(sizes, list) or not all(isinstance(s, int) for s in sizes):
        raise ConfigError(f"{where}: sizes is {sizes!r}, must be a list of whole numbers")
    if isinstance(time_s, bool) or not isinstance(time_s, int | float):
        raise ConfigError(f"{where}: time_s is {time_s!r}, must be a number")
    try:
        return Point(PointKind(kind), _text(value, "dtype", where), tuple(sizes), float(time_s))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _text(data: Mapping[str, object], key: str, where: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} is {value!r}, must be text")
    return value


def _whole(data: Mapping[str, object], key: str, where: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where}: {key} is {value!r}, must be a whole number of at least 0")
    return value
