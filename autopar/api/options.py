"""What a user may pass to ``autopar.compile``, checked and in the solver's words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypedDict

import torch

from autopar.errors import ConfigError, ConstraintError
from autopar.plan.types import ScheduleKind
from autopar.solver.constraints import Constraints

_COUNTS = frozenset({"dp", "tp", "pp", "virtual", "num_microbatches", "zero"})
_SWITCHES = frozenset({"sequence_parallel", "microbatch_statistics"})


class ConstraintOptions(TypedDict, total=False):
    """Decisions that a user of :func:`autopar.compile` may take; what is left out is free.

    Attributes:
        dp: Ranks that split the batch.
        tp: Ranks that split operators.
        pp: Pipeline ranks.
        virtual: Stages per pipeline rank.
        num_microbatches: Micro-batches per step.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zero_bubble"`` (ZB-H1) or ``"zbv"``
            (ZB-V).
        warmup: For 1F1B, the forwards that each pipeline rank runs before its first backward, such
            as ``(5, 3, 1)``.
        zero: ZeRO level, 0 to 3; from 1 on there are 2 data ranks or more, since it splits over
            them. One for all stages, or a list with one for each.
        recompute: ``"none"``, ``"selective"``, ``"full"``, or module pattern -> one of these.
        placements: Pattern of parameter names -> ``"R"`` or ``"S(dim)"`` over ``tp``, or
            ``"S(dim)@dp"`` for experts that are split over ``dp``.
        expert_capacity: Rows that a rank has room for where experts are split, in multiples of its
            share if all experts are equally popular (1.5, say); more rows than that are an error.
            Left out: room for all rows, which is always enough.
        stages: First module of stages 1, 2, ...
        sequence_parallel: True forces, False forbids it.
        microbatch_statistics: Take batch statistics per micro-batch: another function of the
            batch, as gradient accumulation on one device.
        offload: ``"never"`` (also if left out); ``"optimizer"``: the optimizer's state is kept in
            host memory, and each step brings it to the device chunk by chunk; ``"activations"``:
            what forward keeps for backward is kept there, as much of it as is best, beside what is
            made again; a sequence of both; ``"allowed"``: either, where nothing else fits or that
            is faster.
    """

    dp: int | None
    tp: int | None
    pp: int | None
    virtual: int | None
    num_microbatches: int | None
    schedule: str | None
    zero: int | Sequence[int] | None
    recompute: str | Mapping[str, str] | None
    placements: Mapping[str, str]
    stages: Sequence[str]
    sequence_parallel: bool | None
    microbatch_statistics: bool
    expert_capacity: float | None
    warmup: Sequence[int] | None
    offload: str | Sequence[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserConstraints:
    """:class:`ConstraintOptions` as a value; None means free."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    virtual: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    zero: int | Sequence[int] | None = None
    recompute: str | Mapping[str, str] | None = None
    placements: Mapping[str, str] = field(default_factory=dict)
    stages: Sequence[str] = ()
    sequence_parallel: bool | None = None
    microbatch_statistics: bool = False
    expert_capacity: float | None = None
    warmup: Sequence[int] | None = None
    offload: str | Sequence[str] | None = None

    def for_solver(self) -> Constraints:
        """The same in the solver's type.

        Raises:
            ConfigError: ``schedule`` is no known word.
        """
        kind = None
        if self.schedule is not None:
            try:
                kind = ScheduleKind(self.schedule)
            except ValueError:
                kinds = [k for k in ScheduleKind if k is not ScheduleKind.FORWARD]
                words = ", ".join(repr(k.value) for k in kinds)
                raise ConfigError(f"schedule={self.schedule!r}: must be one of {words}") from None
        pp = len(self.warmup) if self.pp is None and self.warmup is not None else self.pp
        return Constraints(
            dp=self.dp,
            tp=self.tp,
            pp=pp,
            virtual=self.virtual,
            num_microbatches=self.num_microbatches,
            schedule=kind,
            zero=self.zero if isinstance(self.zero, int | None) else tuple(self.zero),
            recompute=self.recompute,
            placements=self.placements,
            boundaries=tuple(self.stages),
            sequence_parallel=self.sequence_parallel,
            microbatch_statistics=self.microbatch_statistics,
            expert_capacity=self.expert_capacity,
            warmup=None if self.warmup is None else tuple(self.warmup),
            offload=_offload(self.offload),
        )


def _offload(wish: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """A word, or a tuple of several."""
    if wish is None or isinstance(wish, str):
        return wish
    return wish[0] if len(wish) == 1 else tuple(wish)


def user_constraints(options: ConstraintOptions) -> UserConstraints:
    """The options as a value.

    Raises:
        ConfigError: There is no such option.
    """
    known = [item.name for item in fields(UserConstraints)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"autopar.compile() has no option {name!r}; {hint}decisions that can be fixed are "
                f"{', '.join(known)}"
            )
    _check_kinds(options)
    _check_one_rank(options)
    return UserConstraints(**options)


def _check_kinds(options: Mapping[str, object]) -> None:
    """Refuse a value of another kind; it would be misread, or fail deep inside the search."""
    for name, value in options.items():
        if value is None:
            continue
        if name == "zero":
            fits = type(value) is int or _are_counts(value)
            wanted = "a whole number, such as 2, or one for each stage, such as [1, 3]"
        elif name in _COUNTS:
            fits, wanted = type(value) is int, "a whole number, such as 2"
        elif name == "expert_capacity":
            fits = type(value) in (int, float)
            wanted = "a number, such as 1.5"
        elif name in _SWITCHES:
            fits, wanted = isinstance(value, bool), "True or False"
        elif name == "warmup":
            fits = _are_counts(value)
            wanted = "a list of whole numbers, such as [3, 2, 1]"
        elif name == "stages":
            fits, wanted = _are_texts(value), "a list of module names, such as ['layers.4']"
        elif name == "placements":
            fits, wanted = _is_table(value), "a dict, such as {'*.weight': 'S(0)'}"
        elif name == "recompute":
            fits = isinstance(value, str) or _is_table(value)
            wanted = "a word, such as 'full', or a dict, such as {'layers.*': 'full'}"
        elif name == "offload":
            fits = isinstance(value, str) or (_are_texts(value) and bool(value))
            wanted = "a word, such as 'optimizer', or several: ['optimizer', 'activations']"
        else:
            fits, wanted = isinstance(value, str), "a word"
        if not fits:
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; give {wanted}")


def _are_counts(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(type(item) is int for item in value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(item, str) for pair in value.items() for item in pair
    )


def _check_one_rank(options: ConstraintOptions) -> None:
    """Refuse what needs several ranks along ``tp`` where there is one."""
    if options.get("tp") != 1:
        return
    cut = [f"{p}: {text}" for p, text in options.get("placements", {}).items() if text != "R"]
    if options.get("sequence_parallel"):
        cut.append("sequence_parallel=True")
    if cut:
        raise ConstraintError(
            f"constraints tp=1 and {', '.join(cut)}: there is one rank along tp, and a split needs "
            "2 or more; raise tp, or leave the split out"
        )


def as_call(
    inputs: object, args: Sequence[object] | None
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and keyword arguments of the call that ``inputs`` stands for.

    A mapping is keyword arguments (``model(**batch)``), a tuple or list positional ones
    (``model(*batch)``), anything else the only argument (``model(batch)``). ``args`` are positional
    arguments beside a mapping.

    Raises:
        ConfigError: ``args`` is no list, or goes with ``inputs`` that is no mapping.
    """
    if args is not None and not isinstance(args, list | tuple):
        raise ConfigError(
            f"args={args!r} is a {type(args).__name__}; give the positional arguments in a list"
        )
    positional = tuple(args or ())
    if isinstance(inputs, Mapping):
        return positional, {str(key): value for key, value in inputs.items()}
    if inputs is None:
        return positional, {}
    if args is not None:
        raise ConfigError(
            f"args= goes with keyword arguments in inputs=, which is a {type(inputs).__name__}; "
            "give all positional arguments in one of them"
        )
    if isinstance(inputs, tuple | list) and not isinstance(inputs, torch.Size):
        return tuple(inputs), {}
    return (inputs,), {}
