"""Decisions given as words of the command line, as arguments of ``autopar.compile``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from autopar.errors import ConfigError
from autopar.units import parse_bytes

if TYPE_CHECKING:
    from autopar.api.options import ConstraintOptions

_PLAIN = (
    "dp", "tp", "pp", "virtual", "num_microbatches", "schedule", "sequence_parallel",
    "microbatch_statistics", "expert_capacity",
)  # fmt: skip


def decisions(args: argparse.Namespace) -> ConstraintOptions:
    """The decisions that were given.

    Raises:
        ConfigError: A pattern has no value, or words and patterns are mixed.
    """
    given: dict[str, object] = {
        name: getattr(args, name) for name in _PLAIN if getattr(args, name) is not None
    }
    if args.recompute:
        given["recompute"] = _recompute(args.recompute)
    if args.offload:
        given["offload"] = args.offload.split(",")
    if args.warmup:
        given["warmup"] = _depths("--warmup", args.warmup)
    if args.zero:
        levels = _depths("--zero", args.zero)
        given["zero"] = levels if len(levels) > 1 else levels[0]
    if args.placement:
        given["placements"] = dict(_pair("--placement", text) for text in args.placement)
    if args.stage:
        given["stages"] = list(args.stage)
    return cast("ConstraintOptions", given)


def amount(option: str, text: str) -> int:
    """Bytes that an option names.

    Raises:
        ConfigError: It names none.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def costs(texts: Sequence[str] | None) -> float | dict[str, float] | None:
    """Prices of devices: of all alike, or by name; None if none were given.

    Raises:
        ConfigError: One is no number, or names and a number alone are mixed.
    """
    if not texts:
        return None
    if len(texts) == 1 and "=" not in texts[0]:
        return _price(texts[0], texts[0])
    return {name: _price(text, value) for text in texts for name, value in [_pair_of(text)]}


def _pair_of(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(
            f"--cost-per-hour {text!r}: write DEVICE=PRICE for each, such as h100-sxm=2.5"
        )
    return name, value


def _price(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(
            f"--cost-per-hour {text!r}: write DEVICE=PRICE, such as h100-sxm=2.5, or a price alone"
        ) from None


def _recompute(texts: Sequence[str]) -> str | dict[str, str]:
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    return dict(_pair("--recompute", text) for text in texts)


def _depths(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{option} {text!r}: write whole numbers, such as 3,2,1")
    return [int(part) for part in parts]


def _pair(option: str, text: str) -> tuple[str, str]:
    pattern, sign, value = text.rpartition("=")
    if not sign or not pattern or not value:
        raise ConfigError(f"{option} {text!r}: write PATTERN=VALUE, such as 'layers.*=full'")
    return pattern, value
