"""What a user may pass to ``autopar.compile``, checked and in the solver's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.errors import ConfigError
from autopar.plan.types import ScheduleKind
from autopar.solver.constraints import Constraints


@dataclass(frozen=True, slots=True, kw_only=True)
class UserConstraints:
    """The keyword options of :func:`autopar.compile` that fix decisions; None means free."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    virtual: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    zero: int | None = None
    recompute: str | Mapping[str, str] | None = None
    placements: Mapping[str, str] = field(default_factory=dict)
    stages: Sequence[str] = ()
    sequence_parallel: bool | None = None
    microbatch_statistics: bool = False

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
                words = ", ".join(repr(k.value) for k in ScheduleKind)
                raise ConfigError(f"schedule={self.schedule!r}: must be one of {words}") from None
        return Constraints(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            virtual=self.virtual,
            num_microbatches=self.num_microbatches,
            schedule=kind,
            zero=self.zero,
            recompute=self.recompute,
            placements=self.placements,
            boundaries=tuple(self.stages),
            sequence_parallel=self.sequence_parallel,
            microbatch_statistics=self.microbatch_statistics,
        )


def as_call(
    inputs: object, args: Sequence[object] | None
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and keyword arguments of the call that ``inputs`` stands for.

    A mapping is keyword arguments (``model(**batch)``), a tuple or list positional ones
    (``model(*batch)``), anything else the only argument (``model(batch)``). ``args`` are positional
    arguments beside a mapping.
    """
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
