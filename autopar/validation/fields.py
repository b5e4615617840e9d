"""Typed access to the fields of one record; what is missing or of a wrong type is a reason."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from autopar.validation.errors import SkipRecord

# Figures above these, or below those of LEAST, are slips of the pen or of the unit: far from what
# was ever built or run.
MOST: Mapping[str, float] = {
    "hardware.n_gpus": 2**17, "hardware.gpus_per_node": 2**10, "model.layers": 2**14,
    "model.hidden": 2**20, "model.heads": 2**14, "model.kv_heads": 2**14, "model.ffn": 2**22,
    "model.vocab": 2**24, "model.seq": 2**24, "model.base_channels": 2**14,
    "model.width_factor": 2**10, "model.image": 2**14, "parallel.pp": 2**10, "parallel.cp": 2**16,
    "parallel.tp": 2**14, "parallel.dp": 2**17, "parallel.virtual_stages": 2**7,
    "parallel.mbs": 2**17, "parallel.gbs": 2**24, "parallel.microbatches": 2**17,
    "hardware.mem_gb": 1e4, "hardware.hbm_gbs": 1e6, "hardware.intra_node_bw_gbs": 1e5,
    "hardware.inter_node_gbs_per_gpu": 1e5, "hardware.peak_bf16_tflops": 1e6,
    "measured.iter_s": 1e7, "measured.derived_iter_s": 1e7, "measured.mem_gb": 1e5,
    "measured.mem_gib": 1e5, "measured.layer_fwd_ms": 1e8, "measured.layer_bwd_ms": 1e8,
    "measured.mfu_pct": 100,
}  # fmt: skip
LEAST: Mapping[str, float] = {
    "hardware.mem_gb": 1, "hardware.hbm_gbs": 10, "hardware.intra_node_bw_gbs": 0.1,
    "hardware.inter_node_gbs_per_gpu": 1e-3, "hardware.peak_bf16_tflops": 0.1,
    "measured.iter_s": 1e-5, "measured.derived_iter_s": 1e-5, "measured.mem_gb": 1e-3,
    "measured.mem_gib": 1e-3, "measured.layer_fwd_ms": 1e-4, "measured.layer_bwd_ms": 1e-4,
    "measured.tflops_per_gpu": 1e-3, "measured.mfu_pct": 1e-2,
}  # fmt: skip
MOST_OF_ALL = 1e12  # of any other figure


class Fields:
    """The fields of an entry by path, such as ``"parallel.tp"``.

    Attributes:
        entry: The record as JSON gave it.
        assumed: Paths for which a default was taken.
    """

    def __init__(self, entry: Mapping[str, object]) -> None:
        self.entry = entry
        self.assumed: list[str] = []

    def part(self, name: str) -> Mapping[str, object]:
        """An object within the entry."""
        value = self.entry.get(name)
        if not isinstance(value, Mapping):
            raise SkipRecord(f"{name} is missing")
        return value

    def value(self, path: str) -> object:
        """As it is; None if it is missing."""
        part, _, name = path.partition(".")
        return self.part(part).get(name)

    def text(self, path: str) -> str:
        """A text that is not empty."""
        value = self.value(path)
        if value is None:
            raise SkipRecord(f"{path} is missing")
        if not isinstance(value, str) or not value:
            raise SkipRecord(f"{path} is {shown(value)}, not a text")
        return value

    def number(self, path: str, default: float | None = None) -> float:
        """A number above 0; ``default``, noted, where it is missing."""
        value = self.value(path)
        if value is None:
            if default is None:
                raise SkipRecord(f"{path} is missing")
            self.assumed.append(path)
            return default
        return _positive(path, value)

    def optional(self, path: str) -> float | None:
        """A number above 0; None where it is missing."""
        return None if self.value(path) is None else self.number(path)

    def whole(self, path: str, default: float | None = None) -> int:
        """A whole number above 0."""
        value = self.number(path, default)
        if value != int(value):
            raise SkipRecord(f"{path} is {value}, not a whole number")
        return int(value)

    def flag(self, path: str, default: bool = False) -> bool:
        """True or false; ``default``, noted, where it is missing."""
        value = self.value(path)
        if value is None:
            self.assumed.append(path)
            return default
        if not isinstance(value, bool):
            raise SkipRecord(f"{path} is {shown(value)}, not true or false")
        return value

    def given_flag(self, path: str) -> bool:
        """True or false; silence means that the feature was not there, which is no assumption."""
        return self.value(path) is not None and self.flag(path)

    def per_stage(self, path: str) -> tuple[int, ...] | None:
        """One whole number or a list of them; None where it is missing."""
        value = self.value(path)
        if value is None:
            return None
        many = value if isinstance(value, list) else [value]
        if not many:
            raise SkipRecord(f"{path} is an empty list")
        for item in many:
            if isinstance(item, bool) or not isinstance(item, int) or item < 1:
                raise SkipRecord(f"{path} has {shown(item)}, not a whole number above 0")
            _positive(path, item)
        return tuple(many)

    def numbers(self, path: str, count: int | None = None) -> tuple[float, ...]:
        """A list of (``count``) numbers of at least 0; empty where it is missing."""
        value = self.value(path)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise SkipRecord(f"{path} is {shown(value)}, not a list")
        if count is not None and len(value) != count:
            raise SkipRecord(f"{path} has {len(value)} entries, must have {count}")
        for item in value:
            if item != 0 or isinstance(item, bool):
                _positive(path, item)
        return tuple(value)


def _positive(path: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SkipRecord(f"{path} is {shown(value)}, not a number")
    if isinstance(value, float) and not isfinite(value):
        raise SkipRecord(f"{path} is {value}, not a number")
    if value <= 0:
        raise SkipRecord(f"{path} is {shown(value)}, must be above 0")
    most = MOST.get(path, MOST_OF_ALL)
    if value > most:
        raise SkipRecord(f"{path} is {shown(value)}, at most {most:g} is believed")
    if value < LEAST.get(path, 0):
        raise SkipRecord(f"{path} is {shown(value)}, at least {LEAST[path]:g} is believed")
    return float(value)


def shown(value: object) -> str:
    """A value in a reason, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
