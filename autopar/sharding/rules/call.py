"""One operator instance as rules see it: arguments, shapes, and helpers to name dims.

Conventions of all rules: a dim of size one (or zero) has no factor, ``()``; a dim that is
broadcast has none either; factors of one operator are named by the rule, and names mean nothing
across operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from autopar.errors import ShardingError
from autopar.ir.graph import Arg, Meta, Node, Ref, TensorMeta
from autopar.sharding.signature import AxisStrategy, Dims, OpSignature


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operator with its references replaced by operand numbers; hashable, so it is a memo key.

    Attributes:
        op: Operator name.
        args: Positional arguments; ``Ref("0")`` is operand 0 in the order of ``Node.refs()``.
        kwargs: Keyword-only arguments, likewise.
        operands: Meta of each operand; None for one that is no tensor.
        results: Meta of each result; None for a result that does not exist.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[TensorMeta | None, ...]
    results: tuple[TensorMeta | None, ...]

    @staticmethod
    def of(node: Node, operand_metas: Sequence[Meta]) -> OpCall:
        """The call that ``node`` makes, given the meta of each operand in ``refs()`` order."""
        numbers = iter(range(len(operand_metas)))
        args, kwargs = node.map_refs(lambda _: Ref(str(next(numbers))))
        operands = tuple(m if isinstance(m, TensorMeta) else None for m in operand_metas)
        return OpCall(node.op, args, kwargs, operands, node.metas())

    def arg(self, position: int, default: Arg = None) -> Arg:
        """Positional argument, or ``default`` if the call leaves it out."""
        return self.args[position] if position < len(self.args) else default

    def kwarg(self, name: str, default: Arg = None) -> Arg:
        """Keyword-only argument, or ``default`` if the call leaves it out."""
        return next((value for key, value in self.kwargs if key == name), default)

    def operand(self, position: int) -> int | None:
        """Operand number of a positional argument; None if it is a constant or left out."""
        arg = self.arg(position)
        return int(arg.name) if isinstance(arg, Ref) else None

    def shape(self, operand: int | None) -> tuple[int, ...]:
        """Shape of an operand by number; ``()`` for a number or nothing."""
        meta = None if operand is None else self.operands[operand]
        return () if meta is None else meta.shape

    def shape_at(self, position: int) -> tuple[int, ...]:
        """Shape of the tensor at a positional argument."""
        return self.shape(self.operand(position))

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of a result; ``()`` for one that does not exist."""
        meta = self.results[index]
        return () if meta is None else meta.shape

    def integer(self, position: int, default: int = 0) -> int:
        """Positional argument that must be an int."""
        value = self.arg(position, default)
        if not isinstance(value, int):
            raise ShardingError(f"{self.op}: argument {position} is {value!r}, not an int")
        return value

    def integers(self, position: int) -> tuple[int, ...] | None:
        """Positional argument that must be a list of ints; an int counts as a list of one.

        None if it is missing or None.
        """
        value = self.arg(position)
        if value is None:
            return None
        items = value if isinstance(value, tuple) else (value,)
        found = tuple(item for item in items if isinstance(item, int))
        if len(found) != len(items):
            raise ShardingError(f"{self.op}: argument {position} is {value!r}, not a list of ints")
        return found

    def linear_positions(self, *groups: Iterable[int]) -> tuple[frozenset[int], ...]:
        """Groups of argument *positions* as groups of operand numbers.

        A group with a position that is no tensor is dropped, as are groups that pending sums
        can't pass: bool has no sums, and a cast to an integer rounds each part.
        """
        found: list[frozenset[int]] = []
        for group in groups:
            numbers = [self.operand(position) for position in group]
            present = frozenset(n for n in numbers if n is not None)
            if len(present) == len(numbers) and self.may_be_linear(present):
                found.append(present)
        return tuple(found)

    def may_be_linear(self, group: Iterable[int]) -> bool:
        """Whether the dtypes of the operands and results allow pending sums through."""
        sources = [self.operands[n] for n in group]
        if any(m is None or m.dtype == "bool" for m in sources):
            return False
        results = [m for m in self.results if m is not None]
        if any(m.dtype == "bool" for m in results):
            return False
        rounds = any(m is not None and _has_fractions(m) for m in sources)
        return not (rounds and any(not _has_fractions(m) for m in results))


def _has_fractions(meta: TensorMeta) -> bool:
    return meta.is_float or meta.dtype.startswith("complex")


Rule: TypeAlias = Callable[[OpCall], OpSignature | None]
"""Named dims of a call; None if this call (not the operator) has no rule."""


@dataclass(slots=True)
class Naming:
    """Collects factors while a rule names dims, then builds the signature.

    Attributes:
        sizes: Size of every factor so far.
        whole: Factors that must not be split.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def dim(self, name: str, size: int, *, whole: bool = False) -> tuple[str, ...]:
        """Factors of a dim that is one factor: ``(name,)``, or ``()`` for size zero or one."""
        if size <= 1:
            return ()
        if self.sizes.setdefault(name, size) != size:
            raise ShardingError(f"factor {name!r} has sizes {self.sizes[name]} and {size}")
        if whole:
            self.whole.add(name)
        return (name,)

    def dims(self, shape: Sequence[int], *, prefix: str = "d", whole: Iterable[int] = ()) -> Dims:
        """One factor per dim, named by position; ``whole`` lists dims that must stay whole."""
        kept = frozenset(whole)
        return tuple(
            self.dim(f"{prefix}{i}", size, whole=i in kept) for i, size in enumerate(shape)
        )

    def build(  # noqa: PLR0913  # the fields of OpSignature
        self,
        inputs: Sequence[Dims | None],
        outputs: Sequence[Dims | None],
        *,
        reductions: dict[str, str] | None = None,
        linear: tuple[frozenset[int], ...] = (),
        extra: Iterable[AxisStrategy | None] = (),
        padded: Iterable[str] | None = None,
        pad_fill: float = 0.0,
        shape_arg: int | None = None,
        shape_result: int = 0,
        free: bool = False,
    ) -> OpSignature:
        """The signature.

        Args:
            inputs: As in :class:`OpSignature`.
            outputs: As in :class:`OpSignature`.
            reductions: As in :class:`OpSignature`; factors without a size are dropped.
            linear: As in :class:`OpSignature`.
            extra: As in :class:`OpSignature`; None entries are dropped.
            padded: Factors that may be uneven; None for none.
            pad_fill: As in :class:`OpSignature`.
            shape_arg: As in :class:`OpSignature`.
            shape_result: As in :class:`OpSignature`.
            free: As in :class:`OpSignature`.
        """
        return OpSignature(
            sizes=self.sizes,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            reductions={k: v for k, v in (reductions or {}).items() if k in self.sizes},
            whole=frozenset(self.whole),
            linear=linear,
            extra=tuple(s for s in extra if s is not None),
            padded=frozenset(padded or ()) & frozenset(self.sizes),
            pad_fill=pad_fill,
            shape_arg=shape_arg,
            shape_result=shape_result,
            free=free,
        )


def normal_dim(dim: int, rank: int) -> int:
    """A dim counted from the front; a rank of zero counts as one."""
    return dim % max(rank, 1)


def broadcast_dims(naming: Naming, shape: Sequence[int], target: Sequence[int]) -> Dims:
    """Dims of a tensor that is broadcast to ``target``; factors are named by the target's dims."""
    shift = len(target) - len(shape)
    return tuple(
        naming.dim(f"d{i + shift}", size) if size == target[i + shift] else ()
        for i, size in enumerate(shape)
    )
