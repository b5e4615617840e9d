"""Splits of rows that were sorted by expert: of tokens, and of experts.

A *group* is one ``moe_route`` and all values with a dim of its rows. A rank may sort and keep rows
of its own (:class:`~autopar.sharding.placement.Routed`) if every reader of such a value allows it:

* ``moe_dispatch`` makes rows of tokens, ``moe_combine`` tokens of rows, grouped products read and
  make rows; each has splits of its own, for one form of rows and one axis:

  ==================  ========================  ====================  ======================
  operator            tokens split (T)          experts split (E)     both, exchanged (X)
  ==================  ========================  ====================  ======================
  moe_route           S(0) -> T(0) P(sum) V     R -> E(0) S(0) V      S(0) -> X(0) S(0) V
  moe_dispatch        S(0) T(0) V -> T(0)       R E(0) V -> E(0)      S(0) X(0) V -> X(0)
  grouped_mm          T(0) R P(sum) -> T(0)     E(0) S(0) S(0) -> E(0), likewise for X
  grouped_mm_weight   T(0) T(0) P(sum) -> P     E(0) E(0) S(0) -> S(0), likewise for X
  moe_spread          R P(sum) T(0) -> T(0)     S(0) S(0) E(0) -> E(0), likewise for X
  moe_run_sums        T(0) P(sum) -> P(sum)     E(0) S(0) -> S(0), likewise for X
  moe_combine         T(0) T(0) V -> S(0)       E(0) E(0) V -> P(sum)  X(0) X(0) V -> S(0)
  ==================  ========================  ====================  ======================

* any other operator may read rows if it treats each row alike: the rows are one factor of their
  own that splits without a lowering, and every operand with that factor has rows of this group.
  Reduced over, that factor leaves a pending sum where tokens are split; where experts are, what
  lies behind the own rows would be summed too, so that such a group has no E and no X.

Otherwise the group is sorted whole on every rank, as any sort is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Graph, InputKind, Node
from autopar.sharding.placement import (
    P,
    Partial,
    Placement,
    R,
    Routed,
    RoutedForm,
    Shard,
    V,
)
from autopar.sharding.signature import AxisStrategy, Dims, OpSignature

Signatures = Mapping[str, OpSignature | None]

ROUTE, DISPATCH = "autopar.moe_route", "autopar.moe_dispatch"
COMBINE, SPREAD = "autopar.moe_combine", "autopar.moe_spread"
RUN_SUMS = "autopar.moe_run_sums"
GROUPED_MM, GROUPED_MM_WEIGHT = "autopar.grouped_mm", "autopar.grouped_mm_weight"

_T = Routed(0, RoutedForm.TOKENS)
_S = Shard(0)
_FORMS = tuple(RoutedForm)


def _splits_of_operators(capacity_percent: int) -> dict[str, dict[RoutedForm, AxisStrategy]]:
    """Splits of the operators that make and read rows, by form.

    What splits experts carries no factor: splits of the tokens on other axes do not exclude it.
    """
    e, x = (Routed(0, f, capacity_percent) for f in _FORMS[1:])
    rows = {
        ROUTE: (
            AxisStrategy((_S,), (_T, P, V), "t"),
            AxisStrategy((R,), (e, _S, V), "", "moe_route"),
            AxisStrategy((_S,), (x, _S, V), "", "moe_route"),
        ),
        DISPATCH: (
            AxisStrategy((_S, _T, V), (_T,), "t"),
            AxisStrategy((R, e, V), (e,)),
            AxisStrategy((_S, x, V), (x,), "", "moe_dispatch"),
        ),
        COMBINE: (
            AxisStrategy((_T, _T, V), (_S,), "t"),
            AxisStrategy((e, e, V), (P,)),
            AxisStrategy((x, x, V), (_S,), "", "moe_combine"),
        ),
        SPREAD: (
            AxisStrategy((R, P, _T), (_T,), "r"),
            *(AxisStrategy((_S, _S, own), (own,)) for own in (e, x)),
        ),
        RUN_SUMS: (
            AxisStrategy((_T, P), (P,), "r"),
            *(AxisStrategy((own, _S), (_S,)) for own in (e, x)),
        ),
        GROUPED_MM: (
            AxisStrategy((_T, R, P), (_T,), "r"),
            *(AxisStrategy((own, _S, _S), (own,), "", "grouped_product") for own in (e, x)),
        ),
        GROUPED_MM_WEIGHT: (
            AxisStrategy((_T, _T, P), (P,), "r"),
            *(AxisStrategy((own, own, _S), (_S,), "", "grouped_product") for own in (e, x)),
        ),
    }
    return {op: dict(zip(_FORMS, splits, strict=True)) for op, splits in rows.items()}


@dataclass(frozen=True, slots=True)
class _Rows:
    """A value that belongs to a group.

    Attributes:
        group: Name of the group's ``moe_route``.
        kind: ``"rows"``, or the result of the ``moe_route``: ``"order"``, ``"counts"``,
            ``"splits"``.
        dim: Dim of the rows.
    """

    group: str
    kind: str
    dim: int = 0


@dataclass(slots=True)
class _Groups:
    """What is known of the groups of a graph.

    Attributes:
        capacity_percent: Row budget of splits over experts.
        offers: Splits by operator and form.
        values: Value, or ``operator#result``, to what it is.
        splits: Operator -> its group, and its splits by form.
        banned: (group, form) that some reader does not allow.
    """

    capacity_percent: int
    offers: Mapping[str, Mapping[RoutedForm, AxisStrategy]]
    values: dict[str, _Rows] = field(default_factory=dict)
    splits: dict[str, tuple[str, Mapping[RoutedForm, AxisStrategy]]] = field(default_factory=dict)
    banned: set[tuple[str, RoutedForm]] = field(default_factory=set)

    def ban(self, *groups: str, forms: tuple[RoutedForm, ...] = _FORMS) -> None:
        self.banned.update((group, form) for group in groups for form in forms)


def with_routed_splits(
    graph: Graph, signatures: Signatures, capacity_percent: int = 0
) -> dict[str, OpSignature | None]:
    """``signatures`` with the splits of tokens and experts of every group that allows them.

    Args:
        graph: The joint graph.
        signatures: Named dims by operator, as the rules give them.
        capacity_percent: Rows that a rank has room for where experts are split, in percent of its
            share if all experts are equally popular; 0 for all rows.
    """
    result = dict(signatures)
    if not any(node.op == ROUTE for node in graph.nodes):
        return result
    groups = _Groups(capacity_percent, _splits_of_operators(capacity_percent))
    for node in graph.nodes:
        _visit(groups, node, signatures.get(node.name))
    for output in graph.outputs:
        found = groups.values.get(output.value.name) if output.value is not None else None
        if found is not None and found.kind != "counts":
            groups.ban(found.group)
    made: dict[tuple[int, tuple[AxisStrategy, ...]], OpSignature] = {}
    for name, (group, splits) in groups.splits.items():
        signature = signatures[name]
        extra = tuple(s for form, s in splits.items() if (group, form) not in groups.banned)
        if signature is not None and extra:
            # equal operators keep sharing one signature
            key = (id(signature), extra)
            if key not in made:
                made[key] = replace(signature, extra=(*signature.extra, *extra))
            result[name] = made[key]
    return result


def _visit(groups: _Groups, node: Node, signature: OpSignature | None) -> None:
    values = groups.values
    if node.op == "getitem":
        found = values.get(f"{node.refs()[0]}#{node.args[1]}")
        if found is not None:
            values[node.name] = found
        return
    read = [values.get(ref) for ref in node.refs()]
    groups_read = {v.group for v in read if v is not None and v.kind != "counts"}
    if node.op == ROUTE:
        groups.ban(*groups_read)  # experts of rows that are sorted already
        for index, kind in enumerate(("order", "counts", "splits")):
            values[f"{node.name}#{index}"] = _Rows(node.name, kind)
        _offer(groups, node, node.name)
        return
    wanted = _WANTED.get(node.op)
    if wanted is not None:
        group = next((v.group for v in read if v is not None), "")
        fits = all(
            (v is None) if kind == "" else (v is not None and v == _Rows(group, kind))
            for v, kind in zip(read, wanted, strict=True)
        )
        if fits:
            _offer(groups, node, group)
            if node.op in (DISPATCH, GROUPED_MM, SPREAD):
                values[node.name] = _Rows(group, "rows")
        else:
            groups.ban(*groups_read)
        return
    if groups_read:
        _visit_reader(groups, node, signature, read)


_WANTED: Mapping[str, tuple[str, ...]] = {
    DISPATCH: ("", "order", "splits"),
    COMBINE: ("rows", "order", "splits"),
    SPREAD: ("", "counts", "order"),
    RUN_SUMS: ("rows", "counts"),
    GROUPED_MM: ("rows", "", "counts"),
    GROUPED_MM_WEIGHT: ("rows", "rows", "counts"),
}
"""What each operand must be; "" for what is in no group."""


def _offer(groups: _Groups, node: Node, group: str) -> None:
    groups.splits[node.name] = group, groups.offers[node.op]


def _visit_reader(
    groups: _Groups, node: Node, signature: OpSignature | None, read: list[_Rows | None]
) -> None:
    """An operator that may or may not treat each row alike."""
    rows = [v if v is not None and v.kind != "counts" else None for v in read]
    involved = {v.group for v in rows if v is not None}
    factor = None if signature is None else _factor_of_rows(signature, rows)
    if signature is None or factor is None or len(involved) != 1:
        groups.ban(*involved)
        return
    group = involved.pop()
    outputs = [_dim_of(dims, factor) for dims in signature.outputs]
    lost = [
        d is None and dims is not None for d, dims in zip(outputs, signature.outputs, strict=True)
    ]
    if any(lost):
        groups.ban(group, forms=_FORMS[1:])
        if signature.reductions.get(factor) is None:
            groups.ban(group)
            return
    splits = {}
    for form in _FORMS:
        budget = 0 if form is RoutedForm.TOKENS else groups.capacity_percent
        results: list[Placement] = []
        for dim, dims in zip(outputs, signature.outputs, strict=True):
            if dim is not None:
                results.append(Routed(dim, form, budget))
            else:
                results.append(R if dims is None else Partial(signature.reductions.get(factor, "")))
        splits[form] = AxisStrategy(
            tuple(R if v is None else Routed(v.dim, form, budget) for v in rows),
            tuple(results),
            factor if form is RoutedForm.TOKENS else "",
        )
    groups.splits[node.name] = group, splits
    for index, dim in enumerate(outputs):
        if dim is not None:
            key = f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name
            groups.values[key] = _Rows(group, "rows", dim)


def _factor_of_rows(signature: OpSignature, rows: list[_Rows | None]) -> str | None:
    """The factor of the rows, if the operator treats each row alike."""
    found: set[str] = set()
    for value, dims in zip(rows, signature.inputs, strict=True):
        if value is not None:
            if value.kind != "rows" or dims is None or len(dims[value.dim]) != 1:
                return None
            found.add(dims[value.dim][0])
    if len(found) != 1:
        return None
    factor = found.pop()
    if factor in signature.whole:
        return None
    for value, dims in zip(rows, signature.inputs, strict=True):
        at = [i for i, factors in enumerate(dims or ()) if factor in factors]
        if at != ([] if value is None else [value.dim]):
            return None
    for dims in signature.outputs:
        at = [i for i, factors in enumerate(dims or ()) if factor in factors]
        if len(at) > 1 or any(len((dims or ())[i]) != 1 for i in at):
            return None
    return factor


def _dim_of(dims: Dims | None, factor: str) -> int | None:
    return next((i for i, factors in enumerate(dims or ()) if factor in factors), None)


# -- what plans and constraints ask ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """A parameter that has an entry per expert.

    Attributes:
        group: Name of the ``moe_route`` whose experts it belongs to.
        dim: Its dim of experts.
        is_free: Whether its experts may be split with exchanged rows.
    """

    group: str
    dim: int
    is_free: bool


def expert_weights(graph: Graph, signatures: Signatures) -> dict[str, ExpertWeight]:
    """Parameters that hold the matrices or entries of experts, by input name.

    Args:
        graph: The joint graph.
        signatures: Of :func:`with_routed_splits`.
    """
    route_of: dict[str, str] = {}
    dims: dict[str, list[tuple[str, int] | None]] = {
        i.name: [(i.name, d) for d in range(len(i.meta.shape) if i.meta else 0)]
        for i in graph.of_kind(InputKind.PARAM)
    }
    found: dict[str, ExpertWeight] = {}
    for node in graph.nodes:
        refs = node.refs()
        if node.op == ROUTE:
            route_of[node.name] = node.name
        elif node.op == "getitem" and refs[0] in route_of:
            route_of[node.name] = route_of[refs[0]]
        elif node.op in _WEIGHTS and refs[_WEIGHTS[node.op][1]] in route_of:
            weight, counts = (refs[i] for i in _WEIGHTS[node.op])
            signature = signatures.get(node.name)
            offered = signature.extra if signature is not None else ()
            is_free = any(_has_form(s, RoutedForm.EXCHANGED) for s in offered)
            source = (dims.get(weight) or [None])[0]
            if source is not None:
                found[source[0]] = ExpertWeight(route_of[counts], source[1], is_free)
        elif len(refs) == 1 and refs[0] in dims:
            dims[node.name] = _followed(node, dims[refs[0]], signatures.get(node.name))
    return found


_WEIGHTS: Mapping[str, tuple[int, int]] = {GROUPED_MM: (1, 2), SPREAD: (0, 1)}
"""Operands that have the experts' entries, and their counts."""


def _followed(
    node: Node, sources: list[tuple[str, int] | None], signature: OpSignature | None
) -> list[tuple[str, int] | None]:
    """Which dim of a parameter each dim of an operator's result is."""
    if signature is None or isinstance(node.meta, tuple) or signature.inputs[0] is None:
        return []
    origin = {
        factors: source
        for factors, source in zip(signature.inputs[0], sources, strict=True)
        if factors
    }
    return [origin.get(factors) for factors in signature.outputs[0] or ()]


def _has_form(strategy: AxisStrategy, form: RoutedForm) -> bool:
    return any(
        isinstance(p, Routed) and p.form is form for p in (*strategy.inputs, *strategy.outputs)
    )


def routes_rows(strategy: AxisStrategy) -> bool:
    """Whether an operand or result has rows whose order is a rank's own."""
    return any(_has_form(strategy, form) for form in _FORMS)


def exchanges_rows(strategy: AxisStrategy) -> bool:
    """Whether rows are sent to the ranks of their experts."""
    return _has_form(strategy, RoutedForm.EXCHANGED)


def splits_experts(strategy: AxisStrategy) -> bool:
    """Whether the rows of a rank are those of its own experts."""
    return exchanges_rows(strategy) or _has_form(strategy, RoutedForm.EXPERTS)


def capacity_percent_of(choices: Mapping[str, Mapping[str, object]]) -> int:
    """Row budget that choices were made with, in percent; 0 for room for all rows."""
    for table in choices.values():
        for choice in table.values():
            if isinstance(choice, AxisStrategy):
                for placement in (*choice.inputs, *choice.outputs):
                    if isinstance(placement, Routed) and placement.capacity_percent:
                        return placement.capacity_percent
    return 0


def are_rows_consistent(graph: Graph, choices: Mapping[str, object]) -> bool:
    """Whether every operator reads rows in the form in which they are made, over one axis.

    Args:
        graph: The graph.
        choices: Operator -> strategy over the axis; what is left out is replicated.
    """
    made: dict[str, Placement] = {}
    for node in graph.nodes:
        choice = choices.get(node.name)
        strategy = choice if isinstance(choice, AxisStrategy) else None
        if node.op == "getitem":
            made[node.name] = made.get(f"{node.refs()[0]}#{node.args[1]}", R)
            continue
        for index, ref in enumerate(node.refs()):
            have, want = made.get(ref, R), R if strategy is None else strategy.inputs[index]
            if have != want and (isinstance(have, Routed) or isinstance(want, Routed)):
                return False
        for index in range(len(node.metas())):
            key = f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name
            made[key] = R if strategy is None else strategy.outputs[index]
    return True
