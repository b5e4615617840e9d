"""The JSON form of a :class:`~autopar.plan.types.Plan`, its hash, and its files.

A file holds ``{"format", "version", "checksum", "plan", "strategies"}``. The fields of ``plan`` are
those of the dataclasses, by name, none left out. In ``splits`` each operator has an index into
``strategies``, the distinct texts: a big model has 100,000 operators and some fifty strategies.
The checksum is the SHA-256 of the rest, and :func:`plan_hash` is the same number: equal plans have
equal hashes on every machine. Floats keep every bit (shortest round-trip form).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, cast, get_args, get_origin, get_type_hints

from autopar.errors import PlanError
from autopar.plan.types import Plan

FORMAT = "autopar.plan"
VERSION = 7
READABLE = (1, 2, 3, 4, 5, 6, 7)
"""Versions that can be read: a field that a version has not yet has its default."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
_LATER: Mapping[str, Mapping[str, tuple[Json, int]]] = {
    "Plan": {
        "precision": (None, 2),
        "precision_words": ({}, 2),
        "peak_at": ("", 3),
        "warmup": (None, 4),
        "rank_bytes": ([], 4),
        "links": ({}, 4),
        "model_gap": (0.0, 4),
        "pipelines": ([], 4),
        "objective": ("time", 4),
        "cost_per_step": (None, 4),
        "cost_bound": (None, 4),
        "cost_limit": (None, 4),
        "offload": ("", 5),
        "offload_window_bytes": (0, 6),
    },
    "MeshShape": {"placement": ("loop", 4)},
    "StagePlan": {"offload": ([], 6), "offload_bytes": (0, 6)},
    "TimeParts": {
        "weight_s": (0.0, 4),
        "copy_s": (0.0, 5),
        "offload_s": (0.0, 6),
        "fetch_s": (0.0, 6),
        "sync_s": (0.0, 7),
    },
    "Candidate": {"terms": (None, 4), "warmup": (None, 4), "zero_levels": ([], 5)},
}
"""Record -> fields that came later: their value in older files, and the first version."""
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_REDO = "restore the file, or plan again"


def plan_hash(plan: Plan) -> str:
    """SHA-256 of the plan's whole content, 64 hexadecimal digits; the same on every machine."""
    return _checksum(_body(plan))


def plan_to_json(plan: Plan) -> str:
    """Text form of ``plan``, one operator a line; :func:`plan_from_json` is its inverse."""
    body = _body(plan)
    head: dict[str, Json] = {"format": FORMAT, "version": VERSION, "checksum": _checksum(body)}
    return json.dumps({**head, **body}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def plan_from_json(text: str, *, source: str = "<text>", accept_edits: bool = False) -> Plan:
    """The plan that ``text`` holds.

    Args:
        text: From :func:`plan_to_json`.
        source: Name for messages, such as the file's path.
        accept_edits: Take a plan whose content does not match its checksum.

    Raises:
        PlanError: The text is cut short, damaged, edited, or of another version; the message names
            the source, the field and the remedy.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{source} is not whole JSON (line {error.lineno}, column {error.colno}: {error.msg}): "
            f"it was cut short or damaged; {_REDO}"
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{source} is no plan: its field 'format' is not {FORMAT!r}; {_REDO}")
    version = data.get("version")
    if version not in READABLE:
        raise PlanError(
            f"{source} has version {version!r}, this autopar reads version {VERSION} and older; "
            "plan again, or read it with the autopar that wrote it"
        )
    for name in ("checksum", "plan", "strategies"):
        if name not in data:
            raise PlanError(f"{source} lacks the field {name!r}; {_REDO}")
    body: dict[str, Json] = {"plan": data["plan"], "strategies": data["strategies"]}
    found = _checksum(body)
    if data["checksum"] != found and not accept_edits:
        raise PlanError(
            f"{source} was edited after it was saved: its checksum is {data['checksum']!s:.12}..., "
            f"its content has {found:.12}...; plan again, or accept the edit with "
            "load_plan(path, accept_edits=True) or --accept-edits"
        )
    return cast(Plan, _Reader(source, version).read(_with_texts(body, source), Plan, "plan"))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to a file, whole or not at all.

    Args:
        plan: The plan.
        path: File to write; replaced if it exists.

    Raises:
        PlanError: The file can't be written.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        scratch.write_text(plan_to_json(plan), encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise PlanError(
            f"can't write the plan to {target}: {error.strerror}; choose a folder that exists and "
            "may be written to"
        ) from None


def load_plan(path: str | os.PathLike[str], *, accept_edits: bool = False) -> Plan:
    """Read a plan from a file.

    Args:
        path: File that :func:`save_plan` wrote.
        accept_edits: Take a plan that was edited by hand.

    Raises:
        PlanError: As :func:`plan_from_json`, or the file can't be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"can't read the plan {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path} is not a text in UTF-8 (byte {error.start}): it is damaged or no plan; {_REDO}"
        ) from None
    return plan_from_json(text, source=str(path), accept_edits=accept_edits)


def _checksum(body: Mapping[str, Json]) -> str:
    text = json.dumps(body, separators=(",", ":"), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _body(plan: Plan) -> dict[str, Json]:
    """The plan as JSON values, with the strategies' texts in a table."""
    texts: dict[str, int] = {
        text: index
        for index, text in enumerate(
            sorted({text for table in plan.splits.values() for text in table.values()})
        )
    }
    body = json_record(plan)
    # Order of operators has no meaning, so that equal plans must not differ by it.
    body["splits"] = {
        axis: {name: texts[text] for name, text in sorted(table.items())}
        for axis, table in sorted(plan.splits.items())
    }
    return {"plan": body, "strategies": list(texts)}


def json_record(record: object) -> dict[str, Json]:
    """A dataclass of plain data as a JSON table, field by field."""
    return cast("dict[str, Json]", json_value(record))


def json_value(value: object) -> Json:
    """Plain data, dataclasses included, as JSON values; numbers that JSON lacks become texts."""
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in sorted(value.items())}
    if is_dataclass(value):
        return {f.name: _field(getattr(value, f.name), str(f.type)) for f in fields(value)}
    raise PlanError(f"a plan can't hold {value!r} of type {type(value).__name__}; use plain data")


def _field(value: object, kind: str) -> Json:
    """A field's JSON value; a sum of nothing is a whole 0, which reads back as 0.0."""
    return json_value(float(value) if kind == "float" and type(value) is int else value)


def _with_texts(body: Mapping[str, Json], source: str) -> Json:
    """The field ``plan`` with indexes in ``splits`` replaced by texts."""
    plan, strategies = body["plan"], body["strategies"]
    if not isinstance(plan, dict) or not isinstance(strategies, list):
        raise PlanError(f"{source}: 'plan' is not a table or 'strategies' not a list; {_REDO}")
    splits = plan.get("splits")
    if not isinstance(splits, dict):
        return plan  # the reader says what is wrong
    read: dict[str, Json] = {}
    for axis, table in splits.items():
        if not isinstance(table, dict):
            raise PlanError(f"{source}: field plan.splits.{axis} is not a table; {_REDO}")
        texts: dict[str, Json] = {}
        for name, index in table.items():
            if type(index) is not int or not 0 <= index < len(strategies):
                raise PlanError(
                    f"{source}: field plan.splits.{axis}.{name} is {index!r}, which is no index "
                    f"into the {len(strategies)} strategies; {_REDO}"
                )
            texts[name] = strategies[index]
        read[axis] = texts
    return {**plan, "splits": read}


class _Reader:
    """Turns JSON values into the types of the plan's fields; knows the file's name for messages."""

    def __init__(self, source: str, version: int) -> None:
        self.source = source
        self.version = version
        self.hints: dict[type, dict[str, object]] = {}

    def read(self, value: Json, kind: object, where: str) -> object:
        """``value`` as an instance of the annotation ``kind``."""
        origin = get_origin(kind)
        if origin is tuple:
            return self._tuple(value, get_args(kind), where)
        if origin is not None and issubclass(origin, Mapping):
            return self._mapping(value, get_args(kind)[1], where)
        if origin is types.UnionType:
            options = [k for k in get_args(kind) if k is not type(None)]
            return None if value is None else self.read(value, options[0], where)
        if isinstance(kind, type) and is_dataclass(kind):
            return self._record(value, kind, where)
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            if value not in list(kind):
                allowed = ", ".join(repr(k.value) for k in kind)
                raise self._bad(where, value, f"one of {allowed}")
            return kind(value)
        if kind is float and isinstance(value, str) and value in _NON_FINITE:
            return _NON_FINITE[value]
        if kind is float and type(value) is int:
            return float(value)
        if kind is float and isinstance(value, float) and not math.isfinite(value):
            raise self._bad(where, value, "a finite number")  # ours are written as texts
        if type(value) is not kind:
            raise self._bad(where, value, _WORDS.get(cast(type, kind), str(kind)))
        return value

    def _bad(self, where: str, value: Json, wanted: str) -> PlanError:
        return PlanError(f"{self.source}: field {where} is {value!r:.60}, not {wanted}; {_REDO}")

    def _tuple(self, value: Json, kinds: tuple[object, ...], where: str) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise self._bad(where, value, "a list")
        return tuple(self.read(item, kinds[0], f"{where}[{i}]") for i, item in enumerate(value))

    def _mapping(self, value: Json, kind: object, where: str) -> dict[str, object]:
        if not isinstance(value, dict):
            raise self._bad(where, value, "a table")
        return {key: self.read(item, kind, f"{where}.{key}") for key, item in value.items()}

    def _record(self, value: Json, kind: type, where: str) -> object:
        if not isinstance(value, dict):
            raise self._bad(where, value, "a table")
        if kind not in self.hints:
            resolved = get_type_hints(kind)
            self.hints[kind] = {f.name: resolved[f.name] for f in fields(kind)}
        hints = self.hints[kind]
        later = _LATER.get(kind.__name__, {})
        value = {**{n: v for n, (v, since) in later.items() if since > self.version}, **value}
        missing = [name for name in hints if name not in value]
        unknown = [name for name in value if name not in hints]
        if missing or unknown:
            fault = f"lacks the field {where}.{missing[0]}" if missing else ""
            fault = fault or f"has the field {where}.{unknown[0]}, which is unknown"
            raise PlanError(f"{self.source} {fault}; {_REDO}")
        read = {n: self.read(value[n], hint, f"{where}.{n}") for n, hint in hints.items()}
        return cast(object, kind(**read))
