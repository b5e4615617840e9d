"""Long lists of dotted names made short: layer indexes become ranges, or a star.

>>> fold_scopes(["h.0", "h.1", "h.2", "ln_f"])
('h.[0-2]', 'ln_f')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def fold_scopes(names: Iterable[str]) -> tuple[str, ...]:
    """Names with equal texts but for their first number folded into one, in order of appearance.

    >>> fold_scopes(["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.3.attn"])
    ('h.[0-1,3].attn', 'h.[0-1].mlp')
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in dict.fromkeys(names):
        before, number, after = _first_number(name)
        numbers = groups.setdefault((before, after), [])
        if number is not None:
            numbers.append(number)
    return tuple(
        before
        + (f"[{_ranges(sorted(numbers))}]" if len(numbers) > 1 else "".join(map(str, numbers)))
        + after
        for (before, after), numbers in groups.items()
    )


def fold_words(words: Mapping[str, str]) -> tuple[tuple[str, int, str], ...]:
    """(Pattern, number of names, words), names that differ in numbers alone folded to ``*``.

    Where the same pattern has different words for different numbers, the numbers stay as ranges.

    >>> fold_words({"h.0.w": "split", "h.1.w": "split", "ln": "whole"})
    (('h.*.w', 2, 'split'), ('ln', 1, 'whole'))
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for name, text in words.items():
        groups.setdefault(_starred(name), {}).setdefault(text, []).append(name)
    rows: list[tuple[str, int, str]] = []
    for pattern, by_text in groups.items():
        for text, names in by_text.items():
            if len(names) == 1:
                rows.append((names[0], 1, text))
            elif len(by_text) == 1:
                rows.append((pattern, len(names), text))
            else:
                rows.append((", ".join(fold_scopes(names)), len(names), text))
    return tuple(rows)


def fold_braces(names: Iterable[str]) -> tuple[str, ...]:
    """Dotted names that differ in one part alone written once, the last two parts only.

    >>> fold_braces(["h.ln_1.weight", "h.ln_1.bias", "h.ln_2.weight", "h.ln_2.bias", "wte"])
    ('h.{ln_1,ln_2}.{weight,bias}', 'wte')
    """
    folded = tuple(dict.fromkeys(names))
    for position in (1, 2):
        groups: dict[tuple[str, str], list[str]] = {}
        for name in folded:
            parts = name.split(".")
            at = len(parts) - position
            # a lone part, or a layer's star, is no alternative to others
            can_fold = at > 0 and parts[at] != "*"
            before = ".".join(parts[:at]) if can_fold else name
            after = ".".join(parts[at + 1 :]) if can_fold else ""
            groups.setdefault((before, after), []).append(parts[at] if can_fold else "")
        folded = tuple(
            ".".join(part for part in (before, _braced(found), after) if part)
            for (before, after), found in groups.items()
        )
    return folded


def _braced(parts: list[str]) -> str:
    return f"{{{','.join(parts)}}}" if len(parts) > 1 else parts[0]


def fold_ranks(ranks: Iterable[int]) -> str:
    """Numbers as ranges.

    >>> fold_ranks((0, 1, 2, 5))
    '0-2,5'
    """
    return _ranges(sorted(ranks))


def _first_number(name: str) -> tuple[str, int | None, str]:
    """The text before the first dotted part that is a number, the number, the text after it."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal():
            before = "".join(f"{p}." for p in parts[:position])
            after = "".join(f".{p}" for p in parts[position + 1 :])
            return before, int(part), after
    return name, None, ""


def _starred(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)
