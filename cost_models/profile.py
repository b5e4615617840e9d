"""Profiles: times that were measured on a machine, as versioned JSON.

::

    {
      "format": "autopar-profile", "version": 2,
      "machine": "AMD EPYC 9004, 2 cores", "date": "2025-01-31T09:00:00+00:00",
      "versions": {"torch": "2.13.0"},
      "device": "cpu", "num_threads": 1, "num_cores": 2, "memory_bytes": 25000000000,
      "num_ranks": 2, "ranks_per_node": 2, "is_complete": true,
      "points": [
        {"kind": "matmul", "name": "", "dtype": "float32", "sizes": [1, 256, 256, 256],
         "busy": 1, "time_s": 0.0003, "spread_s": 1e-05, "repeats": 9}
      ]
    }

========================== ======================= ==============================================
kind                       sizes                   name
========================== ======================= ==============================================
``matmul``                 b, m, n, k              empty
``attention``              b, h, s, t, d           ``forward``, ``backward``
``stream``                 bytes read and written  what passes over memory: ``add``, ``copy``, ...
``launch``                 none                    ``add`` on next to no data, ``view``
``optimizer``              tensors, bytes of them  ``adamw``, ``sgd``
``accumulate``             tensors, bytes of them  empty: the gradients of one more micro-batch
``host_to_device``, back   bytes                   empty
``op``                     FLOPs, bytes moved      operator with its operands, see :func:`op_key`
``step``                   operators of the step   ``executor``: seconds beyond the operators' own
collectives                payload bytes, ranks    ``""`` inside a node, ``"2 nodes"`` across,
                                                   ``"burst"`` before it: many issued at once
``beside``                 payload bytes, ranks    ``comm``, ``compute`` alone and ``both`` at once
``lockstep``               matmuls, ranks          ``comm`` alone, ``compute`` alone, ``round``: one
                                                   after the other, all ranks in step
========================== ======================= ==============================================

``busy`` is how many ranks of a machine ran at the same time; payloads of collectives are those of
:mod:`cost_models.collectives`.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from errno import EISDIR
from math import isfinite
from os import strerror
from pathlib import Path

from autopar.errors import ConfigError
from autopar.ir.graph import Arg, Dtype, Meta, Ref

FORMAT = "autopar-profile"
VERSION = 2
MOST = 2**63 - 1  # of a number: what lies above is damage
_REMEDY = "delete it and profile again"


class PointKind(StrEnum):
    """What was measured."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    STREAM = "stream"
    LAUNCH = "launch"
    OPTIMIZER = "optimizer"
    ACCUMULATE = "accumulate"
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    OP = "op"
    STEP = "step"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    P2P = "p2p"
    BESIDE = "beside"
    LOCKSTEP = "lockstep"


K = PointKind
COLLECTIVES = (
    K.ALL_REDUCE, K.ALL_GATHER, K.REDUCE_SCATTER, K.ALL_TO_ALL, K.BROADCAST, K.P2P,
)  # fmt: skip

# Numbers in Point.sizes by kind.
NUM_SIZES: Mapping[PointKind, int] = {
    K.MATMUL: 4, K.ATTENTION: 5, K.STREAM: 1, K.LAUNCH: 0, K.OPTIMIZER: 2, K.ACCUMULATE: 2,
    K.HOST_TO_DEVICE: 1, K.DEVICE_TO_HOST: 1, K.OP: 2, K.STEP: 1, K.BESIDE: 2, K.LOCKSTEP: 2,
    **dict.fromkeys(COLLECTIVES, 2),
}  # fmt: skip

Key = tuple[PointKind, str, str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement.

    Attributes:
        kind: What.
        dtype: Element type.
        sizes: See the module's text.
        time_s: Median seconds of one run.
        name: See the module's text.
        busy: Ranks of the machine that did the same at the same time.
        spread_s: Half the distance between the quartiles of the runs.
        repeats: Runs (or groups of short ones) that the median was taken of.
    """

    kind: PointKind
    dtype: str
    sizes: tuple[int, ...]
    time_s: float
    name: str = ""
    busy: int = 1
    spread_s: float = 0.0
    repeats: int = 1

    def __post_init__(self) -> None:
        if len(self.sizes) != NUM_SIZES[self.kind]:
            raise ConfigError(
                f"point {self.kind}: has {len(self.sizes)} sizes, needs {NUM_SIZES[self.kind]}"
            )
        least = 0 if self.kind is K.OP else 1
        if any(size < least for size in self.sizes):
            raise ConfigError(
                f"point {self.kind}: sizes are {self.sizes}, must be at least {least}"
            )
        if not (isfinite(self.time_s) and self.time_s > 0):
            raise ConfigError(f"point {self.kind}: time_s is {self.time_s}, must be above 0")
        if not (isfinite(self.spread_s) and self.spread_s >= 0):
            raise ConfigError(f"point {self.kind}: spread_s is {self.spread_s}, must be at least 0")
        if self.busy < 1 or self.repeats < 1:
            raise ConfigError(
                f"point {self.kind}: busy is {self.busy} and repeats {self.repeats}, both must be "
                "at least 1"
            )

    @property
    def key(self) -> Key:
        """What was measured; equal for measurements of the same thing."""
        return (self.kind, self.name, self.dtype, self.sizes, self.busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured on one machine.

    Attributes:
        machine: The processor and how many cores, or the accelerator.
        date: Time of the measurement, ISO form.
        versions: Of the libraries, by name.
        device: torch's device type.
        num_threads: Threads that one rank computes with.
        num_cores: Cores that ranks may be put on; accelerators, if the device is one.
        memory_bytes: Memory of the whole machine; of one accelerator, if the device is one.
        num_ranks: Ranks that measured together.
        ranks_per_node: Ranks of each node.
        is_complete: Whether nothing was left out for want of time.
        points: The measurements.
    """

    machine: str
    date: str
    device: str = "cpu"
    num_threads: int = 1
    num_cores: int = 1
    memory_bytes: int = 0
    num_ranks: int = 1
    ranks_per_node: int = 1
    is_complete: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] = ()

    def of_kind(self, kind: PointKind) -> tuple[Point, ...]:
        """Points of one kind, in order."""
        return tuple(p for p in self.points if p.kind is kind)

    def with_points(self, points: Iterable[Point]) -> Profile:
        """This profile with more points; one of the same thing takes the place of an older one."""
        table = {p.key: p for p in self.points}
        table.update({p.key: p for p in points})
        return replace(self, points=tuple(table.values()))


def burst_name(name: str) -> str:
    """Name of the points of collectives that are issued together.

    >>> burst_name(""), burst_name("2 nodes")
    ('burst', 'burst 2 nodes')
    """
    return f"burst {name}".strip()


def op_key(op: str, args: Sequence[Arg], operands: Sequence[Meta]) -> str:
    """An operator with the shapes and dtypes of its operands and its other arguments as text.

    >>> from autopar.ir.graph import TensorMeta
    >>> op_key("aten.mm.default", (Ref("a"), Ref("b")), [TensorMeta((4, 8), "float32")] * 2)
    'aten.mm.default(float32[4, 8], float32[4, 8])'
    """
    metas = iter(operands)

    def text(arg: Arg) -> str:
        if isinstance(arg, Ref):
            return _meta_text(next(metas, None))
        if isinstance(arg, tuple):
            return f"({', '.join(map(text, arg))})"
        return str(arg) if isinstance(arg, Dtype | str) else repr(arg)

    return f"{op}({', '.join(text(a) for a in args)})"


def _meta_text(meta: Meta) -> str:
    if isinstance(meta, tuple):
        return f"({', '.join(map(_meta_text, meta))})"
    return "int" if meta is None else str(meta)


def check_same_machine(profile: Profile, here: Profile, *, where: str) -> None:
    """Refuse a profile that was not measured on the machine, device and libraries of ``here``.

    Raises:
        ConfigError: It names the first difference and both values.
    """
    pairs = [
        ("device", profile.device, here.device),
        ("machine", profile.machine, here.machine),
        ("num_threads", profile.num_threads, here.num_threads),
        ("torch", profile.versions.get("torch"), here.versions.get("torch")),
    ]
    for name, found, wanted in pairs:
        if found != wanted:
            raise ConfigError(
                f"{where}: {name} is {found!r}, here it is {wanted!r}; profile this machine with "
                "`autopar profile`, or delete the file"
            )


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


def check_writable(path: Path) -> None:
    """Refuse a path that :func:`save_profile` could not write, before minutes of measuring.

    Makes its folder.

    Raises:
        ConfigError: It says why.
    """
    probe = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(EISDIR, strerror(EISDIR))
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"profile {str(path)!r} can't be written: {error.strerror}; choose another file"
        ) from None


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


def without_doubles(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, for ``json.loads``'s ``object_pairs_hook``.

    Raises:
        ValueError: A name stands twice, which JSON readers resolve differently.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"name {twice[:40]!r} stands twice in one object")
    return found


def parse_profile(text: str, *, where: str = "profile") -> Profile:
    """The profile in JSON text; ``where`` starts every error text."""
    try:
        data: object = json.loads(text, object_pairs_hook=without_doubles)
    except (ValueError, RecursionError) as error:
        is_cut = isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        )
        cut = " (cut short)" if is_cut else ""
        raise ConfigError(f"{where} is not JSON{cut}: {error}; {_REMEDY}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        has = f"a {type(data).__name__}"
        if isinstance(data, dict):
            has = f"format {data.get('format')!r}"
        raise ConfigError(
            f"{where} is no profile: has {has}, expected an object of format {FORMAT!r}; name "
            "another file, or delete it and profile again"
        )
    if data.get("version") != VERSION:
        raise ConfigError(
            f"{where}: has version {data.get('version')!r}, expected {VERSION}; {_REMEDY}"
        )
    try:
        return _profile_of(data, where)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_REMEDY}") from None


def _profile_of(data: Mapping[str, object], where: str) -> Profile:
    points = data.get("points")
    if not isinstance(points, list):
        raise ConfigError(f"{where}: points must be a list")
    versions = data.get("versions", {})
    if not isinstance(versions, dict):
        raise ConfigError(f"{where}: versions must be an object")
    if not isinstance(data.get("is_complete"), bool):
        raise ConfigError(
            f"{where}: is_complete is {data.get('is_complete')!r}, must be true or false"
        )
    found = [_point(p, f"{where}: points[{i}]") for i, p in enumerate(points)]
    first: dict[Key, int] = {}
    for i, point in enumerate(found):
        if first.setdefault(point.key, i) != i:
            raise ConfigError(
                f"{where}: points[{i}] measures the same as points[{first[point.key]}]"
            )
    return Profile(
        machine=_text(data, "machine", where),
        date=_date(data, where),
        device=_text(data, "device", where),
        num_threads=_whole(data, "num_threads", where, least=1),
        num_cores=_whole(data, "num_cores", where, least=1),
        memory_bytes=_whole(data, "memory_bytes", where),
        num_ranks=_whole(data, "num_ranks", where, least=1),
        ranks_per_node=_whole(data, "ranks_per_node", where, least=1),
        is_complete=data.get("is_complete") is True,
        versions={str(name): str(version) for name, version in versions.items()},
        points=tuple(found),
    )


def _point(value: object, where: str) -> Point:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: is a {type(value).__name__}, must be an object")
    kind = _text(value, "kind", where)
    if kind not in set(PointKind):
        raise ConfigError(f"{where}: kind is {kind!r}, must be one of {', '.join(PointKind)}")
    sizes = value.get("sizes")
    if not isinstance(sizes, list) or not all(type(s) is int and s <= MOST for s in sizes):
        raise ConfigError(f"{where}: sizes is {sizes!r}, must be a list of whole numbers")
    try:
        return Point(
            PointKind(kind),
            _text(value, "dtype", where),
            tuple(sizes),
            _number(value, "time_s", where),
            name=_text(value, "name", where, ""),
            busy=_whole(value, "busy", where, 1),
            spread_s=_number(value, "spread_s", where, 0.0),
            repeats=_whole(value, "repeats", where, 1),
        )
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None


def _text(data: Mapping[str, object], key: str, where: str, default: str | None = None) -> str:
    value = data.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} is {value!r}, must be text")
    return value


def _date(data: Mapping[str, object], where: str) -> str:
    text = _text(data, "date", where)
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{where}: date is {text[:40]!r}, must be in ISO form") from None
    return text


def _number(
    data: Mapping[str, object], key: str, where: str, default: float | None = None
) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {key} is {value!r}, must be a number")
    if isinstance(value, int) and abs(value) > MOST:  # more than a float can be
        raise ConfigError(f"{where}: {key} is {value!r}, must be a number of at most {MOST}")
    return float(value)


def _whole(
    data: Mapping[str, object], key: str, where: str, default: int | None = None, *, least: int = 0
) -> int:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ConfigError(
            f"{where}: {key} is {value!r}, must be a whole number from {least} to {MOST}"
        )
    return value
