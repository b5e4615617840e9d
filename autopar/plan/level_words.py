"""ZeRO levels of stages, in words."""

from __future__ import annotations

from collections.abc import Sequence


def level_words(levels: Sequence[int]) -> str:
    """Levels by stage, for people.

    >>> level_words((1, 1)), level_words((2, 1, 1, 2)), level_words(())
    ('1', '1 in stages 1-2, 2 in stages 0 and 3', '0')
    """
    stages: dict[int, list[int]] = {}
    for stage, level in enumerate(levels):
        stages.setdefault(level, []).append(stage)
    if len(stages) <= 1:
        return str(next(iter(stages), 0))
    return ", ".join(f"{level} in {stages_in_words(own)}" for level, own in sorted(stages.items()))


def short_levels(levels: Sequence[int]) -> str:
    """The same for a narrow column: the levels that there are.

    >>> short_levels((1, 1)), short_levels((2, 1, 1))
    ('1', '1/2')
    """
    return "/".join(map(str, sorted(set(levels)))) or "-"


def stages_in_words(numbers: Sequence[int]) -> str:
    """Such as ``stages 0-2 and 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs]
    words = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"stage{'s' * (len(numbers) > 1)} {words}"
