"""The short string form of a rule: ``"(m, k+), (k+, n) -> (m, n)"``.

Each operand and result is a parenthesised list of dims. A dim is a factor's name, ``1`` for a
dim of size one or one that is broadcast, or several names joined by ``*`` for a merged dim,
outermost first. After a name, ``!`` keeps the factor whole and ``+`` says that the results
without it are sums over it. ``_`` stands for an operand that is no tensor or a result that may
be missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.errors import ShardingError
from autopar.ir.graph import TensorMeta
from autopar.sharding.rules.call import Naming, OpCall
from autopar.sharding.signature import Dims, OpSignature

_FACTOR = re.compile(r"([A-Za-z_]\w*)([!+]?)")
_TENSORS = re.compile(r"\(([^()]*)\)|_")

Pattern = tuple[tuple[str, ...], ...] | None
"""Names per dim of one tensor; None for a place without a tensor."""


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed rule string; call it to bind it to an operator instance.

    Attributes:
        text: The string.
        inputs: Names per dim of each operand.
        outputs: Names per dim of each result.
        whole: Factors that must not be split.
        summed: Factors that results without them are sums over.
        linear: Groups of *argument positions* that pass pending sums.
        padded: Factors whose blocks may be uneven.
    """

    text: str
    inputs: tuple[Pattern, ...]
    outputs: tuple[Pattern, ...]
    whole: frozenset[str]
    summed: frozenset[str]
    linear: tuple[tuple[int, ...], ...] = ()
    padded: frozenset[str] = frozenset()

    def __call__(self, call: OpCall) -> OpSignature:
        """The signature of ``call``.

        Raises:
            ShardingError: The call has another number of tensors or dims than the rule, or one
                factor stands for two sizes.
        """
        self._check_count(call, "operands", len(self.inputs), len(call.operands))
        self._check_count(call, "results", len(self.outputs), len(call.results))
        naming = Naming()
        self._sizes(call, naming)
        inputs = [self._bind(p, m, naming) for p, m in zip(self.inputs, call.operands, strict=True)]
        outputs = [
            None if m is None else self._bind(p, m, naming)
            for p, m in zip(self.outputs, call.results, strict=True)
        ]
        naming.whole |= self.whole & frozenset(naming.sizes)
        return naming.build(
            inputs,
            outputs,
            reductions=dict.fromkeys(sorted(self.summed), "sum"),
            linear=call.linear_positions(*self.linear),
            padded=self.padded,
        )

    def _check_count(self, call: OpCall, what: str, expected: int, found: int) -> None:
        if expected != found:
            raise ShardingError(
                f"rule of {call.op!r} names {expected} {what}, the call has {found}; "
                f"list every tensor of the call in {self.text!r}, with _ for one that is missing"
            )

    def _sizes(self, call: OpCall, naming: Naming) -> None:
        """Size every factor: from dims of one factor first, then from merged dims."""
        pairs: list[tuple[tuple[str, ...], int]] = []
        tensors = zip((*self.inputs, *self.outputs), (*call.operands, *call.results), strict=True)
        for pattern, meta in tensors:
            if pattern is None or meta is None:
                continue
            if len(pattern) != len(meta.shape):
                raise ShardingError(
                    f"rule of {call.op!r} gives {len(pattern)} dims to a tensor of shape "
                    f"{meta.shape}; write one name per dim in {self.text!r}"
                )
            pairs += zip(pattern, meta.shape, strict=True)
        known: dict[str, int] = {}
        for names, size in sorted(pairs, key=lambda pair: len(pair[0])):
            missing = [name for name in names if name not in known]
            if len(missing) == 1 and size % prod(known[n] for n in names if n in known) == 0:
                known[missing[0]] = size // prod(known[n] for n in names if n in known)
            elif missing:
                raise ShardingError(
                    f"rule of {call.op!r} can't size {'*'.join(names)!r} of {size} elements; "
                    f"its factors must stand alone elsewhere in {self.text!r}"
                )
            if prod(known[n] for n in names) != size and names:
                raise ShardingError(
                    f"rule of {call.op!r}: {'*'.join(names)!r} has {size} elements here and "
                    f"{prod(known[n] for n in names)} elsewhere; use two names in {self.text!r}"
                )
        naming.sizes.update({name: size for name, size in known.items() if size > 1})

    def _bind(self, pattern: Pattern, meta: TensorMeta | None, naming: Naming) -> Dims:
        if pattern is None or meta is None:
            return tuple(() for _ in (meta.shape if meta else ()))
        return tuple(tuple(n for n in names if n in naming.sizes) for names in pattern)


def template(text: str, *, linear: Sequence[Sequence[int]] = (), padded: str = "") -> Template:
    """Parse the string form of a rule.

    Args:
        text: Such as ``"(m, k+), (k+, n) -> (m, n)"``.
        linear: Groups of argument positions: with these operands pending sums and the others
            whole, every result is a pending sum.
        padded: Names, separated by spaces, of factors whose blocks may be uneven.

    Raises:
        ShardingError: The string is malformed.

    >>> template("(m, k+), (k+, n) -> (m, n)").summed
    frozenset({'k'})
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise _malformed(text, "it has no '->'")
    marks: dict[str, str] = {}
    inputs = _tensors(text, left, marks)
    outputs = _tensors(text, right, marks)
    if not outputs:
        raise _malformed(text, "no result follows '->'")
    named_in = {n for pattern in inputs if pattern for names in pattern for n in names}
    summed = frozenset(n for n, mark in marks.items() if mark == "+")
    for name in sorted(summed - named_in):
        raise _malformed(text, f"{name!r} is summed but no operand has it")
    in_all = [
        n
        for n in sorted(summed)
        if all(p is None or n in {m for d in p for m in d} for p in outputs)
    ]
    if in_all:
        raise _malformed(text, f"{in_all[0]!r} is marked '+' but every result has it")
    lost = {
        n
        for n in named_in - summed
        if marks.get(n) != "!"
        and any(p is not None and all(n not in d for d in p) for p in outputs)
    }
    if lost:
        raise _malformed(
            text, f"{min(lost)!r} is missing in a result; mark it '+' (summed) or '!' (kept whole)"
        )
    unknown = set(padded.split()) - named_in
    if unknown:
        raise _malformed(text, f"{min(unknown)!r} is padded but no operand has it")
    for group in linear:
        for position in group:
            if position < 0:
                raise _malformed(text, f"linear position {position} is negative")
    return Template(
        text=text,
        inputs=inputs,
        outputs=outputs,
        whole=frozenset(n for n, mark in marks.items() if mark == "!"),
        summed=summed,
        linear=tuple(tuple(group) for group in linear),
        padded=frozenset(padded.split()),
    )


def _tensors(text: str, side: str, marks: dict[str, str]) -> tuple[Pattern, ...]:
    rest = _TENSORS.sub("", side).replace(",", "").strip()
    if rest:
        raise _malformed(text, f"{rest!r} stands outside of parentheses")
    found: list[Pattern] = []
    for match in _TENSORS.finditer(side):
        if match.group(0) == "_":
            found.append(None)
            continue
        body = match.group(1).strip()
        dims = [part.strip() for part in body.split(",")] if body else []
        found.append(tuple(_factors(text, dim, marks) for dim in dims))
    return tuple(found)


def _factors(text: str, dim: str, marks: dict[str, str]) -> tuple[str, ...]:
    if dim == "1":
        return ()
    names: list[str] = []
    for part in dim.split("*"):
        match = _FACTOR.fullmatch(part.strip())
        if match is None:
            raise _malformed(text, f"{part.strip()!r} is no factor")
        name, mark = match.groups()
        if mark and marks.setdefault(name, mark) != mark:
            raise _malformed(text, f"{name!r} is marked both '!' and '+'")
        names.append(name)
    return tuple(names)


def _malformed(text: str, why: str) -> ShardingError:
    return ShardingError(f"rule {text!r}: {why}; write it like '(b, s, k+), (k+, n) -> (b, s, n)'")
