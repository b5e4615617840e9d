"""Stages whose programs differ by names alone.

A deep model cut into many stages has few different ones: the first, the last, and those between.
To price them it is enough to localize one of each. Two stages are alike if their operators are the
same one by one (operator, arguments, shapes, splits, what is kept, who reads it) and refer to each
other in the same way, if their results are of the same kinds, and if the inputs that they read are
the same, but for parameters of equal shape and dtype that no other stage reads.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Arg, Input, InputKind, Node, OutputKind, Ref
from autopar.sharding.decisions import Choice, Decisions
from autopar.sharding.localize import StageBody
from autopar.sharding.programs import AXES
from autopar.sharding.stages import StageDemand, StageMap

Words = Mapping[str, int]
"""Operator -> a number; equal for operators that are priced alike, whatever they read."""


def word_of(node: Node, args: tuple[Arg, ...]) -> Hashable:
    """What an operator's number stands for.

    Args:
        node: The operator.
        args: Its positional arguments, as far as they count.
    """
    blank = Ref("")
    plain = replace(node, args=args)
    plain_args, kwargs = plain.map_refs(lambda _: blank)
    return (node.op, plain_args, kwargs, node.meta)


@dataclass(frozen=True, slots=True)
class Likeness:
    """Which stage stands for each, and what its names are there.

    Attributes:
        of: Per stage the one that stands for it; itself if it is the first of its kind.
        names: Per stage the names of that one's values and inputs -> its own; empty if it stands
            for itself.
        targets: The same for the targets of parameters.
        scopes: The same for the scopes of operators.
    """

    of: tuple[int, ...]
    names: tuple[Mapping[str, str], ...]
    targets: tuple[Mapping[str, str], ...]
    scopes: tuple[Mapping[str, str], ...]

    @classmethod
    def none(cls, num_stages: int) -> Likeness:
        """Every stage stands for itself."""
        nothing: tuple[Mapping[str, str], ...] = ({},) * num_stages
        return cls(tuple(range(num_stages)), nothing, nothing, nothing)

    def body(
        self, stage: int, known: StageBody, demand: StageDemand, stage_map: StageMap
    ) -> StageBody:
        """The body of a stage, from that of the one that stands for it."""
        own, targets = self.names[stage], self.targets[stage]
        results = [o for o in demand.results if o.value and o.kind is not OutputKind.GRAD]
        homes = ((n.name, stage_map.stage.get(n.name)) for n in demand.nodes)
        return StageBody(
            index=stage,
            emitter=known.emitter,
            prologue=known.prologue,
            received={n: home for n, home in homes if home is not None and home != stage},
            read_inputs=dict.fromkeys(own.get(n, n) for n in known.read_inputs),
            prologue_inputs=known.prologue_inputs,
            prologue_values=known.prologue_values,
            sends={own[name]: ref for name, ref in known.sends.items()},
            results=[
                (kind, output.target, ref, layout)
                for output, (kind, _, ref, layout) in zip(results, known.results, strict=True)
            ],
            grads={targets.get(t, t): found for t, found in known.grads.items()},
        )


def likeness(
    inputs: Mapping[str, Input],
    decisions: Decisions,
    stage_map: StageMap,
    demands: Sequence[StageDemand],
    words: Words,
) -> Likeness:
    """Which stages are alike.

    Args:
        inputs: Of the joint graph, by name.
        decisions: What the plan says.
        stage_map: Stage of every operator.
        demands: What every stage makes.
        words: Of all operators.
    """
    reader = _Reader(inputs, decisions, stage_map, words)
    found = [reader.read(stage, demand) for stage, demand in enumerate(demands)]
    params: dict[str, int] = {}
    for _, outer in found:
        # a stage may read a parameter in parts
        for param in {inputs[n].param for n in outer if inputs[n].kind is InputKind.PARAM}:
            params[param] = params.get(param, 0) + 1
    first: dict[object, int] = {}
    of: list[int] = []
    names: list[Mapping[str, str]] = []
    targets: list[Mapping[str, str]] = []
    scopes: list[Mapping[str, str]] = []
    for stage, (signature, outer) in enumerate(found):
        is_shared = any(params.get(inputs[name].param, 0) > 1 for name in outer
                        if inputs[name].kind is InputKind.PARAM)  # fmt: skip
        at = stage if is_shared else first.setdefault(signature, stage)
        of.append(at)
        table: dict[str, str] = {}
        renamed: dict[str, str] = {}
        pairs = list(zip(demands[at].nodes, demands[stage].nodes, strict=True))
        scopes.append({theirs.scope: mine.scope for theirs, mine in pairs if at != stage})
        if at != stage:
            table = {theirs.name: mine.name for theirs, mine in pairs}
            for theirs, mine in zip(found[at][1], outer, strict=True):
                table[theirs] = mine
                renamed[inputs[theirs].target] = inputs[mine].target
        names.append(table)
        targets.append(renamed)
    return Likeness(tuple(of), tuple(names), tuple(targets), tuple(scopes))


@dataclass(slots=True)
class _Reader:
    inputs: Mapping[str, Input]
    decisions: Decisions
    stage_map: StageMap
    words: Words
    _numbers: dict[int, int] = field(default_factory=dict)
    _choices: dict[Choice | None, int] = field(default_factory=dict)

    def _number(self, choice: Choice | None) -> int:
        """Equal for equal choices; found by object first, which is quicker than by value."""
        found = self._numbers.get(id(choice))
        if found is None:
            found = self._choices.setdefault(choice, len(self._choices))
            self._numbers[id(choice)] = found
        return found

    def read(self, stage: int, demand: StageDemand) -> tuple[object, tuple[str, ...]]:
        """A stage's signature, and the inputs that it reads by first use."""
        decisions, stage_map = self.decisions, self.stage_map
        tables = [
            decisions.choices.get(a, {})
            for a, n in zip(AXES, decisions.axis_sizes, strict=True)
            if n > 1
        ]
        place: dict[str, int] = {}
        outer: dict[str, int] = {}
        rows: list[object] = []
        for at, node in enumerate(demand.nodes):
            name = node.name
            home = stage_map.stage.get(name, stage)
            side = (home > stage) - (home < stage)
            wiring: list[int] = []
            if not side:
                for ref in node.refs():
                    known = place.get(ref)
                    if known is None:
                        known = -1 - outer.setdefault(ref, len(outer))
                    wiring.append(known)
            readers = demand.readers.get(name, ())
            rows.append(
                (
                    self.words[name],
                    side,
                    tuple(wiring),
                    tuple([self._number(table.get(name)) for table in tables]),
                    (name in decisions.recompute, name in decisions.offload),
                    name in stage_map.backward,
                    tuple([r > stage for r in readers]),
                )
            )
            place[name] = at
        results: list[tuple[OutputKind, int | None, str]] = []
        for output in demand.results:
            value = output.value.name if output.value is not None else ""
            known = place.get(value)
            if known is None and value:
                known = -1 - outer.setdefault(value, len(outer))
            results.append((output.kind, known, output.target))
        targets = {self.inputs[name].target: at for name, at in outer.items()}
        yields = [(kind, known, targets.get(target, target)) for kind, known, target in results]
        numbers: dict[str, int] = {}
        entries = [self._input(self.inputs[name], numbers) for name in outer]
        levels = decisions.zero_levels
        level = levels[stage] if stage < len(levels) else 0
        return (tuple(rows), tuple(yields), tuple(entries), level), tuple(outer)

    def _input(self, entry: Input, numbers: dict[str, int]) -> object:
        if entry.kind is not InputKind.PARAM:
            return entry.name
        number = numbers.setdefault(entry.param, len(numbers))
        layout = self.decisions.input_layout(entry.name)
        part = entry.part
        where = None if part is None else (part.dim, part.start, part.stop)
        return number, where, entry.meta, entry.requires_grad, entry.master, layout
