"""Who is decided together and who reads what: the part of a splits problem that no size changes.

Operators of one node class with the same splits over ``mb`` and ``dp`` form a *group*; so do
inputs, wanted outputs with the same layout (*sinks*), the gradients of a tied parameter (*joins*),
and the parts of a parameter that programs read in parts (*wholes*). The same structure serves every
size of the axes, as long as the same axes split.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autopar.ir.graph import Graph, InputKind, Node, OutputKind, TensorMeta
from autopar.ir.precision_rules import sum_dtype
from autopar.sharding.decisions import Choice
from autopar.sharding.parameters import parameter_inputs
from autopar.sharding.placement import Placement, R, Replicate, Shard
from autopar.sharding.signature import AxisStrategy
from autopar.sharding.stages import VIEW_OPS, assign_stages, stage_demands
from autopar.solver.blocks import BlockChain, value_keys
from autopar.solver.splits_problem import Pass, Reader

DataChoices = Mapping[str, Mapping[str, Choice]]


class GroupKind(StrEnum):
    """What a group's members are."""

    INPUT = "input"
    NODE = "node"
    SINK = "sink"
    JOIN = "join"
    WHOLE = "whole"


@dataclass(slots=True)
class Group:
    """What is decided together.

    Attributes:
        kind: What the members are.
        members: Their names.
        in_body: Whether it runs once per micro-batch.
        in_prologue: Whether it runs once per step.
        from_prologue: Per operand, whether it comes from the prologue.
        used: Results that somebody reads.
        saved: Results that forward keeps for backward.
        is_read: Whether some operator reads it.
        mb: Placement over ``mb`` of a sink.
        parts: (group, result) of what a join adds or a whole consists of.
    """

    kind: GroupKind
    members: list[str]
    in_body: bool = True
    in_prologue: bool = False
    from_prologue: tuple[bool, ...] = ()
    used: frozenset[int] = frozenset({0})
    saved: frozenset[int] = frozenset()
    is_read: bool = True
    mb: Placement = R
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FlowShape:
    """A class of values: producer, readers, how many, shape.

    A fixed one must be read in the layout in which it is made; a bound one by every reader that
    can read it so. ``values`` are their names, where operators read them.
    """

    group: int
    result: int
    count: int
    readers: tuple[Reader, ...]
    meta: TensorMeta
    is_fixed: bool = False
    is_bound: bool = False
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitsStructure:
    """Groups and flows of one graph under given data splits.

    Attributes:
        groups: In the order of the graph.
        flows: Their values.
        charges: (group, result, ``"loss"`` or ``"grad"``): results that cost something at the end.
        metas: Global metas of values with one result.
        nodes: Operators by name.
        wholes: Name of a whole -> names of its part inputs, in order.
        backward: Operators of the backward pass.
        has_mb: Whether ``mb`` splits.
    """

    groups: tuple[Group, ...]
    flows: tuple[FlowShape, ...]
    charges: tuple[tuple[int, int, str], ...]
    metas: Mapping[str, TensorMeta]
    nodes: Mapping[str, Node]
    wholes: Mapping[str, tuple[str, ...]]
    backward: frozenset[str]
    has_mb: bool


def summed_meta(parameter: TensorMeta) -> TensorMeta:
    """Shape and dtype in which a parameter's gradients are added."""
    return TensorMeta(parameter.shape, sum_dtype(parameter.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """What structures of one graph share, whatever the data splits.

    Attributes:
        nodes: Operators by name.
        metas: Global metas of values with one result.
        keys: ``getitem`` -> the result that it picks.
        backward: Operators of the backward pass.
        wanted: Operators that some result depends on.
        read: Names that these read.
        used: Operator with several results -> those that somebody wants.
        saved: Results that forward keeps for backward: what backward reads, views resolved.
    """

    nodes: Mapping[str, Node]
    metas: Mapping[str, TensorMeta]
    keys: Mapping[str, str]
    backward: frozenset[str]
    wanted: set[str]
    read: set[str]
    used: Mapping[str, frozenset[int]]
    saved: set[str]


def graph_facts(graph: Graph, gather_outputs: frozenset[str] = frozenset()) -> GraphFacts:
    """The facts of a graph.

    Args:
        graph: The joint graph.
        gather_outputs: Outputs that are returned whole.
    """
    stage_map = assign_stages(graph, ())
    wanted = stage_demands(graph, stage_map, gather_outputs)[0].wanted
    keys, nodes, backward = value_keys(graph), graph.node_map(), stage_map.backward
    used: dict[str, set[int]] = {}
    for name, key in keys.items():
        if name in wanted:
            base, _, index = key.partition("#")
            used.setdefault(base, set()).add(int(index))
    read: set[str] = set()
    saved: set[str] = set()
    for node in graph.nodes:
        if node.name not in wanted:
            continue
        read.update(node.refs())
        for ref in node.refs() if node.name in backward else ():
            name = ref
            while name in nodes and nodes[name].op in VIEW_OPS and name not in keys:
                name = nodes[name].refs()[0]
            if name in nodes and name not in backward:
                saved.add(keys.get(name, name))
    return GraphFacts(
        nodes=nodes,
        metas={n: m for n, m in graph.metas().items() if isinstance(m, TensorMeta)},
        keys=keys,
        backward=backward,
        wanted=wanted,
        read=read,
        used={name: frozenset(results) for name, results in used.items()},
        saved=saved,
    )


def split_structure(
    graph: Graph,
    chain: BlockChain,
    data: DataChoices,
    *,
    has_mb: bool,
    fixed: Mapping[str, Placement] | None = None,
    gather_outputs: frozenset[str] = frozenset(),
    facts: GraphFacts | None = None,
) -> SplitsStructure:
    """The structure of a graph.

    Args:
        graph: The joint graph.
        chain: Its blocks.
        data: Axis -> choices over ``mb`` and ``dp``.
        has_mb: Whether ``mb`` splits.
        fixed: Inputs whose placement is given: they are decided with their likes only.
        gather_outputs: Outputs that are returned whole.
        facts: Of the graph, if they are known.
    """
    known = facts or graph_facts(graph, gather_outputs)
    return _Maker(graph, chain, data, has_mb, fixed or {}, gather_outputs, known).make()


@dataclass(slots=True)
class _Maker:
    graph: Graph
    chain: BlockChain
    data: DataChoices
    has_mb: bool
    fixed: Mapping[str, Placement]
    gather_outputs: frozenset[str]
    facts: GraphFacts
    groups: list[Group] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[Reader]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(init=False)
    _table: dict[Hashable, int] = field(default_factory=dict)
    _cut_of: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    _by_id: dict[int, int] = field(default_factory=dict)
    _numbers: dict[Choice, int] = field(default_factory=dict)
    _readers: dict[tuple[int, int, Pass], Reader] = field(default_factory=dict)

    def make(self) -> SplitsStructure:
        facts = self.facts
        self.keys = facts.keys
        body, prologue = self._runs()
        self._inputs()
        wholes = self._wholes()
        self._operators(body, prologue)
        charges = self._outputs()
        return SplitsStructure(
            groups=tuple(self.groups),
            flows=(*self._flows(), *self._links(wholes, facts.metas)),
            charges=charges,
            metas=facts.metas,
            nodes=facts.nodes,
            wholes=wholes,
            backward=facts.backward,
            has_mb=self.has_mb,
        )

    def _add(self, key: Hashable, name: str, group: Group) -> int:
        at = self._table.get(key)
        if at is None:
            at = self._table[key] = len(self.groups)
            self.groups.append(group)
        else:
            self.groups[at].members.append(name)
        self.group_of[name] = at
        return at

    def _data_key(self, name: str) -> tuple[int, int]:
        """Which splits over ``mb`` and ``dp`` a value has, as numbers."""
        return (self._number(self._over_mb.get(name)), self._number(self._over_dp.get(name)))

    def _number(self, choice: Choice | None) -> int:
        if choice is None:
            return -1
        known = self._by_id.get(id(choice))  # equal ones are one object as a rule
        if known is None:
            known = self._numbers.setdefault(choice, len(self._numbers))
            self._by_id[id(choice)] = known
        return known

    @property
    def _over_mb(self) -> Mapping[str, Choice]:
        return self.data.get("mb", {})

    @property
    def _over_dp(self) -> Mapping[str, Choice]:
        return self.data.get("dp", {})

    # -- what runs when ------------------------------------------------------------------------
    def _mb(self, name: str) -> Placement:
        base, _, index = self.keys.get(name, name).partition("#")
        choice = self.data.get("mb", {}).get(base, R)
        return choice.outputs[int(index or 0)] if isinstance(choice, AxisStrategy) else choice

    def _cuts(self, node: Node) -> tuple[bool, ...]:
        """Per operand, whether the micro-batch can't make it and the prologue has to."""
        known = self._cut_of.get(node.name)
        if known is None:
            known = self._cut_of[node.name] = self._find_cuts(node)
        return known

    def _find_cuts(self, node: Node) -> tuple[bool, ...]:
        if not self.has_mb or node.op == "getitem":
            return (False,) * len(node.refs())
        choice = self._over_mb.get(node.name)
        cuts = []
        for operand, ref in enumerate(node.refs()):
            want = choice.inputs[operand] if isinstance(choice, AxisStrategy) else R
            have = self._mb(ref)
            cuts.append(have is not want and not isinstance(have, Replicate) and have != want)
        return tuple(cuts)

    def _runs(self) -> tuple[set[str], set[str]]:
        """Operators of the forward and backward programs, and of the prologue."""
        if not self.has_mb:
            return self.facts.wanted, set()
        wanted = self.facts.wanted
        body = {o.value.name for o in self.graph.outputs if o.value and o.value.name in wanted}
        prologue: set[str] = set()
        for node in reversed(self.graph.nodes):
            if node.name not in wanted:
                continue
            if node.name in body:
                cuts = self._cuts(node)
                if any(cuts):
                    for ref, cut in zip(node.refs(), cuts, strict=True):
                        (prologue if cut else body).add(ref)
                else:
                    body.update(node.refs())
            if node.name in prologue:
                prologue.update(node.refs())
        return body, prologue

    # -- groups --------------------------------------------------------------------------------
    def _inputs(self) -> None:
        read = self.facts.read
        for entry in self.graph.inputs:
            key = (
                self.chain.node_class[entry.name],
                self._data_key(entry.name),
                entry.kind,
                self.fixed.get(entry.name),
                entry.name in read,
            )
            group = Group(GroupKind.INPUT, [entry.name], is_read=entry.name in read)
            self._add(key, entry.name, group)

    def _wholes(self) -> dict[str, tuple[str, ...]]:
        """Parameters that are read in parts: their parts are stored, and gathered, together."""
        found: dict[str, tuple[str, ...]] = {}
        for target, entries in parameter_inputs(self.graph).items():
            if entries[0].part is not None:
                names = tuple(e.name for e in entries)
                places = tuple((self.group_of[n], 0) for n in names)
                name = f"whole {target}"
                group = Group(GroupKind.WHOLE, [name], parts=places)
                self._add(("whole", places), name, group)
                found[name] = names
        return found

    def _links(
        self, wholes: Mapping[str, tuple[str, ...]], metas: Mapping[str, TensorMeta]
    ) -> list[FlowShape]:
        """What ties a whole to its parts, a join to its gradients: they are taken as they are."""
        links = []
        for at, group in enumerate(self.groups):
            if group.kind is GroupKind.WHOLE:
                shapes = [metas[n] for n in wholes[group.members[0]]]
            elif group.kind is GroupKind.JOIN:
                joined = summed_meta(metas[group.members[0].removeprefix("join ")])
                shapes = [joined] * len(group.parts)
            else:
                continue
            for operand, (part, result) in enumerate(group.parts):
                readers = (Reader(at, operand, Pass.STEP),)
                count, meta = len(group.members), shapes[operand]
                links.append(FlowShape(part, result, count, readers, meta, is_fixed=True))
        return links

    def _operators(self, body: set[str], prologue: set[str]) -> None:
        facts, none, first = self.facts, frozenset[int](), frozenset({0})
        rows = [n for n in self.graph.nodes if n.op != "getitem" and n.name in facts.wanted]
        for node in rows:
            name, used = node.name, first
            if isinstance(node.meta, tuple):
                used = facts.used.get(name, none)
                saved = frozenset(i for i in range(len(node.meta)) if f"{name}#{i}" in facts.saved)
            else:
                saved = first if name in facts.saved else none
            runs = (name in body, name in prologue, self._cuts(node))
            mark = (self.chain.node_class[name], self._data_key(name), runs, used, saved)
            at = self._table.get(mark)
            if at is not None:
                self.groups[at].members.append(name)
                self.group_of[name] = at
                continue
            group = Group(
                GroupKind.NODE, [name], in_body=runs[0], in_prologue=runs[1],
                from_prologue=runs[2], used=used, saved=saved,
            )  # fmt: skip
            self._add(mark, name, group)
        for node in rows:
            self._read(node, body, prologue)

    def _read(self, node: Node, body: set[str], prologue: set[str]) -> None:
        at, cuts = self.group_of[node.name], self._cuts(node)
        when = Pass.BACKWARD if node.name in self.facts.backward else Pass.FORWARD
        in_body, in_prologue = node.name in body, node.name in prologue
        for operand, ref in enumerate(node.refs()):
            row = self.readers.setdefault(self.keys.get(ref, ref), [])
            if in_body:
                row.append(self._reader(at, operand, Pass.PROLOGUE if cuts[operand] else when))
            if in_prologue:
                row.append(self._reader(at, operand, Pass.PROLOGUE))

    def _reader(self, variable: int, operand: int, when: Pass) -> Reader:
        """A reader; equal ones are one object."""
        key = (variable, operand, when)
        known = self._readers.get(key)
        if known is None:
            known = self._readers[key] = Reader(variable, operand, when)
        return known

    def _outputs(self) -> tuple[tuple[int, int, str], ...]:
        """Readers for what leaves the graph, and what costs something at the end."""
        owner = {i.target: i.name for i in self.graph.of_kind(InputKind.PARAM)}
        grads: dict[str, list[str]] = {}
        charges: dict[tuple[int, int, str], None] = {}
        for output in self.graph.outputs:
            if output.value is None:
                continue
            key = self.keys.get(output.value.name, output.value.name)
            if output.kind is OutputKind.GRAD:
                grads.setdefault(output.target, []).append(key)
            elif output.kind is OutputKind.LOSS:
                charges[*self._place(key), "loss"] = None
            elif output.kind is OutputKind.MUTATION or output.target in self.gather_outputs:
                mb = self._mb(output.value.name)
                name = f"output {output.target}"
                sink = self._add(("sink", mb), name, Group(GroupKind.SINK, [name], mb=mb))
                self.readers.setdefault(key, []).append(self._reader(sink, 0, Pass.FORWARD))
        for target, keys in grads.items():
            param = self._reader(self.group_of[owner[target]], 0, Pass.STEP)
            source = keys[0]
            if len(keys) > 1:
                source = f"join {owner[target]}"
                parts = tuple(map(self._place, keys))
                self._add(source, source, Group(GroupKind.JOIN, [source], parts=parts))
            else:
                charges[*self._place(source), "grad"] = None
            self.readers.setdefault(source, []).append(param)
        return tuple(charges)

    def _place(self, key: str) -> tuple[int, int]:
        base, _, index = key.partition("#")
        return self.group_of[base], int(index or 0)

    def _bound(self) -> set[str]:
        """Parameters whose shards the user fixed, and views of them: the wish is about their use.

        Without this a weight could be stored as wished and gathered before every use.
        """
        bound = {name for name, placement in self.fixed.items() if isinstance(placement, Shard)}
        for node in self.graph.nodes:
            is_same = node.op in VIEW_OPS or node.op == "aten._to_copy.default"
            if is_same and node.refs() and bound.issuperset(node.refs()):
                bound.add(node.name)
        return bound

    def _flows(self) -> tuple[FlowShape, ...]:
        metas, nodes = self.facts.metas, self.facts.nodes
        values: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
        rows: dict[tuple[int, ...], tuple[Reader, ...]] = {}
        bound_values = self._bound()
        bound: set[tuple[int, int]] = set()
        meta_of: dict[tuple[int, int], TensorMeta | None] = {}
        for key, readers in self.readers.items():
            place = self._place(key)
            if key in bound_values:
                bound.add(place)
            if place not in meta_of or key.startswith("join "):
                meta_of[place] = self._meta(key, nodes, metas)
            order = sorted(readers, key=_reader_key) if len(readers) > 1 else readers
            ids = tuple([id(r) for r in order])
            rows.setdefault(ids, tuple(order))
            values.setdefault((*place, ids), []).append(key)
        return tuple(
            FlowShape(
                group, result, len(own), rows[ids], meta,
                is_bound=(group, result) in bound, values=tuple(own),
            )
            for (group, result, ids), own in values.items()
            if (meta := meta_of[group, result]) is not None
        )  # fmt: skip

    @staticmethod
    def _meta(
        key: str, nodes: Mapping[str, Node], metas: Mapping[str, TensorMeta]
    ) -> TensorMeta | None:
        """Shape and dtype of a value, or of a join of gradients."""
        base, _, index = key.partition("#")
        if key.startswith("join "):
            joined = metas.get(key.removeprefix("join "))
            return None if joined is None else summed_meta(joined)
        if base in nodes:
            return nodes[base].metas()[int(index or 0)]
        return metas.get(key)


def _reader_key(reader: Reader) -> tuple[int, int, Pass]:
    return (reader.variable, reader.operand, reader.when)
