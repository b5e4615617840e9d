"""What the user fixes before the search, checked against the model and the cluster.

Everything left out is free. A constraint that can't be met is an error that names the constraint,
the rule, the numbers and the remedy; it is never dropped. Every constraint in force is listed in
the plan with its origin and effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import ceil, prod

from autopar.errors import ConstraintError, ShardingError
from autopar.ir.graph import Graph, Input, InputKind
from autopar.plan.orders import schedule_fault
from autopar.plan.types import AppliedConstraint, MeshShape, ScheduleKind
from autopar.sharding.placement import Placement, R, Shard, parse_placement, shard_size
from autopar.sharding.routing import ROUTE

_OVER_DP = "@dp"
RECOMPUTE_WORDS = ("none", "selective", "full")
ZERO_LEVELS = (0, 1, 2, 3)
OFFLOAD_WORDS = ("never", "allowed", "optimizer", "activations")
OFFLOADED = ("optimizer", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Decisions that are taken already; None or empty means free.

    Attributes:
        dp: Ranks that split the batch.
        tp: Ranks that split operators.
        pp: Pipeline ranks.
        virtual: Stages per pipeline rank.
        num_microbatches: Micro-batches per step.
        schedule: Order of forwards and backwards.
        zero: ZeRO level of every stage: one for all, or one for each.
        recompute: ``"none"``, ``"selective"``, ``"full"``, or module pattern -> one of these words
            (the first pattern that fits a block's module counts, the rest is free).
        placements: Pattern of parameter names -> placement over ``tp``, ``"R"`` or ``"S(dim)"``,
            or ``"S(dim)@dp"`` for experts that are split over ``dp``.
        expert_capacity: Rows that a rank has room for where experts are split, in multiples of its
            share if all experts are equally popular; None for room for all rows.
        boundaries: First module of stages 1, 2, ..., in order.
        sequence_parallel: Whether norms work on shards of the sequence over ``tp``: True forces it,
            False forbids it.
        microbatch_statistics: Take batch statistics per micro-batch.
        warmup: Forwards before the first backward, by pipeline rank, for 1F1B.
        offload: ``"never"``; ``"optimizer"``, the optimizer's state is kept in host memory;
            ``"activations"``, saved values are kept there where that is faster or nothing else
            fits; both of these; ``"allowed"``, either where that is faster or nothing else fits.
            None is never.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    virtual: int | None = None
    num_microbatches: int | None = None
    schedule: ScheduleKind | None = None
    zero: int | tuple[int, ...] | None = None
    recompute: str | Mapping[str, str] | None = None
    placements: Mapping[str, str] = field(default_factory=dict)
    boundaries: tuple[str, ...] = ()
    sequence_parallel: bool | None = None
    microbatch_statistics: bool = False
    expert_capacity: float | None = None
    warmup: tuple[int, ...] | None = None
    offload: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "virtual", "num_microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConstraintError(
                    f"constraint {name}={value}: the least is 1; leave it out for any"
                )
        self._check_zero()
        self._check_offload()
        if self.expert_capacity is not None and self.expert_capacity < 1:
            raise ConstraintError(
                f"constraint expert_capacity={self.expert_capacity}: the least is 1, room for an "
                "even share; leave it out for room for all rows"
            )
        words = (
            [self.recompute] if isinstance(self.recompute, str) else (self.recompute or {}).values()
        )
        for word in words:
            if word not in RECOMPUTE_WORDS:
                raise ConstraintError(
                    f"constraint recompute={word!r}: must be one of {', '.join(RECOMPUTE_WORDS)}"
                )
        self._check_schedule()

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state must be in host memory."""
        return "optimizer" in self._offloaded

    @property
    def may_offload_activations(self) -> bool:
        """Whether saved values may be in host memory."""
        return "activations" in self._offloaded

    @property
    def _offloaded(self) -> tuple[str, ...]:
        return self.offload if isinstance(self.offload, tuple) else (self.offload or "",)

    def _check_offload(self) -> None:
        """Refuse words that there are not, and several of which one speaks for all."""
        words = self._offloaded
        if self.offload is None or (len(words) == 1 and words[0] in OFFLOAD_WORDS):
            return
        if not words or set(words) - set(OFFLOADED) or len(set(words)) != len(words):
            raise ConstraintError(
                f"constraint offload={self.offload!r}: must be one of {', '.join(OFFLOAD_WORDS)}, "
                f"or both of {' and '.join(OFFLOADED)}"
            )

    @property
    def highest_zero(self) -> int:
        """The highest level that a stage must have; 0 if that is free."""
        return max(self.zero, default=0) if isinstance(self.zero, tuple) else self.zero or 0

    def _check_zero(self) -> None:
        """Refuse levels that there are not, and other numbers of them than of stages."""
        levels = self.zero if isinstance(self.zero, tuple) else (self.zero,)
        shown = zero_words(self.zero)
        if not levels or any(n is not None and n not in ZERO_LEVELS for n in levels):
            raise ConstraintError(f"constraint zero={shown}: the levels are 0, 1, 2 and 3")
        if not isinstance(self.zero, tuple):
            return
        counts = {"pp": self.pp, "virtual": self.virtual}
        given = ", ".join(f"{n}={v}" for n, v in counts.items() if v is not None)
        stages = None
        if self.boundaries:
            stages = len(self.boundaries) + 1
            given = f"stages={list(self.boundaries)}"
        elif self.pp is not None and (self.virtual is not None or len(levels) % self.pp):
            stages = self.pp * (self.virtual or 1)
        if stages is not None and stages != len(levels):
            raise ConstraintError(
                f"constraints zero={shown} and {given}: {len(levels)} levels for {stages} "
                f"stage{'s' * (stages != 1)}; give {stages}, or one number for all stages"
            )

    def _check_schedule(self) -> None:
        """Refuse a schedule that the number of stages or the warm-up contradicts."""
        kind, virtual = self.schedule, self.virtual or 1
        single = {ScheduleKind.ONE_F_ONE_B: "interleaved", ScheduleKind.ZERO_BUBBLE: "zbv"}
        if kind in single and virtual > 1:
            name = "1F1B" if kind is ScheduleKind.ONE_F_ONE_B else "it"
            raise ConstraintError(
                f"constraints schedule={kind.value!r} and virtual={self.virtual}: {name} has one "
                f"stage per pipeline rank; use schedule={single[kind]!r}"
            )
        if kind is ScheduleKind.ZBV and self.virtual not in (None, 2):
            raise ConstraintError(
                f"constraints schedule='zbv' and virtual={self.virtual}: it has 2 stages per "
                "pipeline rank; use virtual=2, or leave virtual out"
            )
        if kind is ScheduleKind.ZBV and self.pp == 1:
            raise ConstraintError(
                "constraints schedule='zbv' and pp=1: its V goes down and up a pipeline of 2 ranks "
                "or more; raise pp, or leave schedule out"
            )
        if virtual > 1 and self.pp == 1:
            raise ConstraintError(
                f"constraints virtual={self.virtual} and pp=1: stages of one rank that follow each "
                "other are one stage; raise pp, or leave virtual out"
            )
        if self.warmup is None:
            return
        if virtual > 1:
            raise ConstraintError(
                f"constraints warmup={self.warmup} and virtual={self.virtual}: depths are for 1F1B "
                "with one stage per pipeline rank; leave one of them out"
            )
        if self.pp is not None and self.pp != len(self.warmup):
            raise ConstraintError(
                f"constraints warmup={self.warmup} and pp={self.pp}: {len(self.warmup)} depths for "
                f"{self.pp} pipeline ranks; give one each, or leave pp out"
            )
        fault = schedule_fault(
            kind or ScheduleKind.ONE_F_ONE_B, MeshShape(pp=len(self.warmup)), self.warmup
        )
        if fault:
            raise ConstraintError(f"constraint {fault}")

    @property
    def expert_capacity_percent(self) -> int:
        """:attr:`expert_capacity` in whole percent, rounded up; 0 for None."""
        return ceil(100 * self.expert_capacity) if self.expert_capacity is not None else 0

    def recompute_of(self, scope: str) -> str | None:
        """What is fixed for a block of a module; None if it is free."""
        if self.recompute is None or isinstance(self.recompute, str):
            return self.recompute
        return next((w for p, w in self.recompute.items() if _fits(scope, p)), None)


def zero_words(zero: int | tuple[int, ...] | None) -> str:
    """Levels as a user writes them.

    >>> zero_words((1, 3)), zero_words(2)
    ('[1, 3]', '2')
    """
    return str(list(zero) if isinstance(zero, tuple) else zero)


def _fits(scope: str, pattern: str) -> bool:
    return fnmatchcase(scope, pattern) or scope.startswith(pattern + ".")


def check_constraints(graph: Graph, constraints: Constraints, num_devices: int) -> None:
    """Refuse constraints that name nothing or contradict each other, the model or the cluster.

    Raises:
        ConstraintError: The first one found; what depends on the batch is checked by the search.
    """
    degrees = {n: getattr(constraints, n) for n in ("dp", "tp", "pp")}
    product = 1
    for value in degrees.values():
        product *= value or 1
    if product > num_devices:
        named = [f"{n}={v}" for n, v in degrees.items() if v is not None]
        subject = (
            f"constraint {named[0]}: needs"
            if len(named) == 1
            else (f"constraints {', '.join(named)}: need")
        )
        lower = "it" if len(named) == 1 else "one of them"
        raise ConstraintError(
            f"{subject} {product} devices, the cluster has {num_devices}; lower {lower}, or plan "
            f"for {product} devices"
        )
    _check_zero(constraints, num_devices)
    parameter_placements(graph, constraints.placements, constraints.tp)
    _check_experts(graph, constraints)
    scopes = {n.scope for n in graph.nodes if n.scope}
    _check_boundaries(constraints, scopes)
    if isinstance(constraints.recompute, Mapping):
        known = _prefixes(scopes)
        for pattern in constraints.recompute:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ConstraintError(
                    f"constraint recompute: {pattern!r} names no module that runs; "
                    f"modules are such as {_examples(scopes)}"
                )


def _check_zero(constraints: Constraints, num_devices: int) -> None:
    """ZeRO splits over data ranks; with one of them it would be dropped."""
    if not constraints.highest_zero:
        return
    given = f"zero={zero_words(constraints.zero)}"
    if constraints.dp == 1:
        raise ConstraintError(
            f"constraints {given} and dp=1: ZeRO splits over data ranks, and there is one; use "
            "dp=2 or more, or leave zero out"
        )
    others = {n: value for n in ("tp", "pp") if (value := getattr(constraints, n)) is not None}
    taken = prod(others.values())
    if 2 * taken > num_devices:
        words = "".join(f", {n}={value}" for n, value in others.items())
        raise ConstraintError(
            f"constraint{'s' if others else ''} {given}{words}: ZeRO splits over 2 data ranks or "
            f"more, which need {2 * taken} devices, and the cluster has {num_devices}; leave zero "
            "out, or use more devices"
        )


def _check_boundaries(constraints: Constraints, scopes: set[str]) -> None:
    names = constraints.boundaries
    if not names:
        return
    if len(set(names)) != len(names):
        raise ConstraintError(f"constraint stages={names}: a module is named twice; name it once")
    stages = (constraints.pp or 0) * (constraints.virtual or 1)
    if constraints.pp is not None and len(names) != stages - 1:
        raise ConstraintError(
            f"constraint stages: {len(names)} modules begin {len(names) + 1} stages, but "
            f"pp={constraints.pp} and virtual={constraints.virtual or 1} make {stages}; "
            f"name {stages - 1}, or leave pp out"
        )
    known = _prefixes(scopes)
    for name in names:
        if name not in known:
            raise ConstraintError(
                f"constraint stages: {name!r} names no module that runs; "
                f"modules are such as {_examples(scopes)}"
            )


def _prefixes(scopes: Iterable[str]) -> set[str]:
    known: set[str] = set()
    for scope in scopes:
        parts = scope.split(".")
        known.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    return known


def _examples(names: Iterable[str]) -> str:
    return ", ".join(repr(n) for n in sorted(names)[:3]) or "none"


def parameter_placements(
    graph: Graph, patterns: Mapping[str, str], tp: int | None
) -> dict[str, Placement]:
    """Input name -> placement over ``tp`` that a pattern fixes.

    Args:
        graph: Its parameters are matched by any of their names.
        patterns: Pattern -> text of a placement.
        tp: Ranks along ``tp`` if that is fixed; shards must then not be empty.

    Raises:
        ConstraintError: A pattern names no parameter, two give one parameter different
            placements, or a placement is no placement or does not fit the shape.
    """
    fixed: dict[str, tuple[str, Placement]] = {}
    for pattern, text in patterns.items():
        if text.endswith(_OVER_DP):
            continue
        placement = _parse(pattern, text)
        for param in _matched(graph, pattern):
            _check_shape(param, pattern, placement, tp)
            other = fixed.setdefault(param.name, (pattern, placement))
            if other[1] != placement:
                raise ConstraintError(
                    f"constraint placements: parameter {param.target!r} is {other[1]} by "
                    f"{other[0]!r} and {placement} by {pattern!r}; narrow one of the patterns"
                )
    return {name: placement for name, (_, placement) in fixed.items()}


def parameter_experts(graph: Graph, patterns: Mapping[str, str]) -> dict[str, int]:
    """Input name -> dim of experts that a pattern splits over ``dp``.

    Args:
        graph: Its parameters are matched by any of their names.
        patterns: Pattern -> text of a placement; those that end in ``@dp`` count.

    Raises:
        ConstraintError: A pattern names no parameter, or is given no ``"S(dim)@dp"``.
    """
    found: dict[str, int] = {}
    for pattern, text in patterns.items():
        if not text.endswith(_OVER_DP):
            continue
        placement = _parse(pattern, text.removesuffix(_OVER_DP))
        if not isinstance(placement, Shard):
            raise ConstraintError(
                f"constraint placements: {pattern!r} is given {text!r}; over dp experts may be "
                "split, 'S(dim)@dp'"
            )
        for param in _matched(graph, pattern):
            _check_shape(param, pattern, placement, None)
            found[param.name] = placement.dim
    return found


def _matched(graph: Graph, pattern: str) -> list[Input]:
    params = tuple(graph.of_kind(InputKind.PARAM))
    matched = [p for p in params if any(fnmatchcase(n, pattern) for n in (p.param, *p.aliases))]
    if not matched:
        raise ConstraintError(
            f"constraint placements: {pattern!r} names no parameter; "
            f"parameters are such as {_examples({p.param for p in params})}"
        )
    return matched


def _check_experts(graph: Graph, constraints: Constraints) -> None:
    """Experts over ``dp`` need ranks there, and no other placement."""
    if constraints.expert_capacity is not None and not any(n.op == ROUTE for n in graph.nodes):
        raise ConstraintError(
            f"constraint expert_capacity={constraints.expert_capacity}: the model has no experts "
            "that are told apart; leave it out"
        )
    experts = parameter_experts(graph, constraints.placements)
    if experts and constraints.dp == 1:
        pattern = next(p for p, text in constraints.placements.items() if text.endswith(_OVER_DP))
        raise ConstraintError(
            f"constraint placements: {pattern!r} splits experts over dp, and dp=1; "
            "use dp=2 or more, or 'S(dim)' over tp"
        )
    both = experts.keys() & parameter_placements(graph, constraints.placements, None).keys()
    if both:
        raise ConstraintError(
            f"constraint placements: parameter {graph.input_map()[min(both)].target!r} is placed "
            "over dp and over tp; narrow one of the patterns"
        )


def _parse(pattern: str, text: str) -> Placement:
    try:
        placement = parse_placement(text)
    except ShardingError:
        placement = None
    if placement != R and not isinstance(placement, Shard):
        raise ConstraintError(
            f"constraint placements: {pattern!r} is given {text!r}; a parameter is 'R' or 'S(dim)'"
        )
    assert placement is not None
    return placement


def _check_shape(param: Input, pattern: str, placement: Placement, tp: int | None) -> None:
    if not isinstance(placement, Shard):
        return
    shape = param.meta.shape if param.meta else ()
    if not 0 <= placement.dim < len(shape):
        raise ConstraintError(
            f"constraint placements: {pattern!r} puts {placement} on parameter {param.target!r} of "
            f"shape {shape}, whose dims are 0 to {len(shape) - 1}; use one of them or 'R'"
        )
    if tp is not None and not may_shard(shape[placement.dim], tp):
        raise ConstraintError(
            f"constraint placements: {pattern!r} puts {placement} on parameter {param.target!r} of "
            f"shape {shape}: {tp} ranks over {shape[placement.dim]} rows leave one empty; use 'R'"
        )


def may_shard(size: int, parts: int) -> bool:
    """Whether no block of ``size`` over ``parts`` is empty.

    >>> may_shard(10, 4), may_shard(5, 4)
    (True, False)
    """
    return size > (parts - 1) * shard_size(size, parts)


def _text_of(name: str, value: object) -> str:
    is_list = name == "offload" and isinstance(value, tuple)
    return ", ".join(value) if is_list else str(value)  # type: ignore[arg-type]  # a tuple of texts


def applied_constraints(
    constraints: Constraints, defaults: Mapping[str, tuple[str, str]]
) -> tuple[AppliedConstraint, ...]:
    """What is in force, for the plan.

    Args:
        constraints: The user's.
        defaults: Name -> (value, effect) of what the search assumed by itself.
    """
    effects = {
        "dp": "ranks that split the batch",
        "tp": "ranks that split operators",
        "pp": "pipeline ranks",
        "virtual": "stages per pipeline rank",
        "num_microbatches": "micro-batches per step",
        "schedule": "order of forwards and backwards",
        "warmup": "forwards before the first backward, by pipeline rank",
        "zero": "ZeRO level of every stage",
        "offload": "what is kept in host memory",
        "sequence_parallel": "norms on shards of the sequence",
        "expert_capacity": "rows that a rank has room for where experts are split, in even shares",
    }
    if isinstance(constraints.zero, tuple):
        effects["zero"] = "ZeRO level of each stage"
    found = [
        AppliedConstraint(
            name=name, value=_text_of(name, getattr(constraints, name)), origin="user", effect=text
        )
        for name, text in effects.items()
        if getattr(constraints, name) is not None
    ]
    if isinstance(constraints.recompute, str):
        found.append(
            AppliedConstraint(
                name="recompute", value=constraints.recompute, origin="user", effect="every block"
            )
        )
    for name, table, effect in (
        ("recompute", constraints.recompute, "blocks of that module"),
        ("placements", constraints.placements, "placement over tp"),
    ):
        for pattern, word in table.items() if isinstance(table, Mapping) else ():
            value = f"{pattern}: {word}"
            told = "experts split over dp" if word.endswith(_OVER_DP) else effect
            found.append(AppliedConstraint(name=name, value=value, origin="user", effect=told))
    if constraints.boundaries:
        value = ", ".join(constraints.boundaries)
        found.append(
            AppliedConstraint(
                name="stages", value=value, origin="user", effect="first module of each stage"
            )
        )
    if constraints.microbatch_statistics:
        found.append(
            AppliedConstraint(
                name="microbatch_statistics",
                value="True",
                origin="user",
                effect="batch statistics are those of each micro-batch, not of the batch",
            )
        )
    for name, (value, effect) in defaults.items():
        found.append(AppliedConstraint(name=name, value=value, origin="default", effect=effect))
    return tuple(found)
