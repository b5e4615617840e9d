"""Constants of bytes, rates and time, and their text forms.

Inside autopar every quantity is in seconds, bytes or FLOP. This is the only module with powers of
ten or two; only ``report`` and ``cli`` format.
"""

from __future__ import annotations

KB = 10**3
MB = 10**6
GB = 10**9
TB = 10**12
KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40
TERA = 10**12
GIGA = 10**9
MICRO_S = 1e-6
MILLI_S = 1e-3
NANO_PER_S = 10**9

_SUFFIXES = {
    "": 1, "b": 1,
    "kb": KB, "mb": MB, "gb": GB, "tb": TB,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip


def parse_bytes(text: str | int | float) -> int:
    """Bytes that ``text`` names.

    Args:
        text: A count of bytes, or a string such as ``"80GB"`` or ``"1.5 GiB"``.

    Raises:
        ValueError: The string has no number or an unknown suffix.

    >>> parse_bytes("1.5 GiB")
    1610612736
    >>> parse_bytes("80GB")
    80000000000
    """
    if isinstance(text, int | float):
        try:
            return int(text)
        except (OverflowError, ValueError):
            raise ValueError(f"{text} is not an amount of memory; write a finite number") from None
    stripped = text.strip()
    head = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    suffix = stripped[len(head) :].strip().lower()
    try:
        return int(float(head) * _SUFFIXES[suffix])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not an amount of memory; write a number with one of "
            "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        ) from None


def format_bytes(amount_bytes: float) -> str:
    """Text of an amount of memory, in binary units.

    >>> format_bytes(3 * GIB // 2)
    '1.50 GiB'
    """
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(amount_bytes) >= size:
            return f"{amount_bytes / size:.2f} {unit}"
    return f"{amount_bytes:.0f} B"


def round_up_bytes(amount_bytes: int) -> int:
    """The least amount not below ``amount_bytes`` that :func:`format_bytes` shows as it is.

    >>> shown = round_up_bytes(3 * GIB // 2 + 1)
    >>> format_bytes(shown), parse_bytes(format_bytes(shown)) >= shown
    ('1.51 GiB', True)
    """
    for size in (TIB, GIB, MIB, KIB):
        if amount_bytes >= size:
            hundredths = -(-amount_bytes * 100 // size)
            return int(hundredths / 100 * size)
    return amount_bytes


def format_time(time_s: float) -> str:
    """Text of a duration.

    >>> format_time(0.00123)
    '1.23 ms'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(time_s) >= size:
            return f"{time_s / size:.3g} {unit}"
    return f"{time_s * 1e9:.3g} ns" if time_s else "0 s"
