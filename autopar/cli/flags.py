"""Texts of the API in the words of the command line: ``lost=[3]`` is ``--lost 3`` there.

Errors and answers name what a caller of Python would write. A command says the same with the flags
that it has; what it has no flag for (``loss=``) stays, since it takes a script.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Mapping

from autopar.plan.io import Json

_OTHER_NAMES = {
    "placements": "placement",
    "stages": "stage",
    "checkpoint_bytes_per_s": "checkpoint-speed",
    "time_limit_s": "time-limit",
}
_NAMES = (
    "devices", "memory_limit", "profile", "optimizer", "mode", "precision", "objective",
    "cost_limit", "cost_per_hour", "time_limit_s", "dp", "tp", "pp", "virtual",
    "num_microbatches", "zero", "schedule", "warmup", "recompute", "placements", "stages",
    "sequence_parallel", "microbatch_statistics", "expert_capacity", "offload", "lost", "slower",
    "thorough", "checkpoint_bytes_per_s", "accept_edits", "before",
)  # fmt: skip
_JOINED = frozenset({"zero", "warmup", "offload"})
"""Flags whose values are written with commas; of others each value has the flag again."""
_LITERAL = r"\[[^\[\]]*\]|\([^()]*\)|\{[^{}]*\}|'[^']*'|\"[^\"]*\"|-?[\w.+]*\w"
_PAIR = re.compile(rf"(?<![\w.\-'\"])({'|'.join(_NAMES)})=({_LITERAL})?")
_CALL = re.compile(r"(?:model\.)?why_not\((\w+=[^()]*)\)")
_UNDERSCORED = "|".join(name for name in _NAMES if "_" in name)
_BARE = re.compile(
    rf"(?<![\w.\-'\"])(?:({_UNDERSCORED})(?![\w=.\['\"])(?! of the device)"
    rf"|(?<=constraint )({'|'.join(_NAMES)})(?=:)|(?<=leave )({'|'.join(_NAMES)})(?= out)"
    rf"|(?<=^)({'|'.join(_NAMES)})(?= is |: (?!.* -> )))"
)  # "schedule: zbv -> 1f1b" tells what a plan has, and asks for nothing
_TWICE = re.compile(r"(--[a-z-]+) \(\1\)")


def as_flags(text: str, flags: Collection[str]) -> str:
    """A text with the flags of a command for the keywords that they stand for.

    Args:
        text: For people.
        flags: That the command has.

    >>> as_flags("name what changed: lost= or slower={3: 0.5}", {"--lost", "--slower"})
    'name what changed: --lost or --slower 3=0.5'
    >>> as_flags("constraints zero=[2, 1] and pp=3: 2 levels", {"--zero", "--pp"})
    'constraints --zero 2,1 and --pp 3: 2 levels'
    """

    def in_call(match: re.Match[str]) -> str:
        return f"autopar why-not ... {_PAIR.sub(lambda m: _flag(m[1], m[2]), match[1])}"

    def pair(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        return _flag(name, value) if _option(name) in flags else match[0]

    def bare(match: re.Match[str]) -> str:
        option = _option(match[1] or match[2] or match[3] or match[4])
        return option if option in flags else match[0]

    text = _PAIR.sub(pair, _CALL.sub(in_call, text))
    return _TWICE.sub(r"\1", _BARE.sub(bare, text))


def in_flags(record: Json, flags: Collection[str]) -> Json:
    """A record for programs with :func:`as_flags` of each of its texts."""
    if isinstance(record, str):
        return as_flags(record, flags)
    if isinstance(record, list):
        return [in_flags(item, flags) for item in record]
    if isinstance(record, dict):
        return {name: in_flags(value, flags) for name, value in record.items()}
    return record


def _option(name: str) -> str:
    return f"--{_OTHER_NAMES.get(name, name).replace('_', '-')}"


def _flag(name: str, text: str | None) -> str:
    """A keyword with its value as words of a shell."""
    option = _option(name)
    if text is None:
        return option
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a word that is no literal, such as "any"
        return f"{option} {text}"
    if isinstance(value, bool):
        return option if value else f"--no-{option[2:]}"
    if isinstance(value, Mapping):
        return " ".join(f"{option} {_word(f'{key}={_shown(v)}')}" for key, v in value.items())
    if isinstance(value, list | tuple):
        words = [_shown(item) for item in value]
        if name in _JOINED:
            return f"{option} {','.join(words)}"
        return " ".join(f"{option} {_word(word)}" for word in words)
    return f"{option} {_word(_shown(value))}"


def _shown(value: object) -> str:
    return "..." if value is ... else str(value)


def _word(text: str) -> str:
    return text if text.endswith("=...") else shlex.quote(text)
