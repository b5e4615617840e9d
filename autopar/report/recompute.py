"""Which modules are computed again in backward, and about how many bytes that saves.

Words are by layer: ``everything``; or what alone is kept, ``everything but self_attn.q_proj``; or
what alone is made again, ``only input_layernorm, mul of mlp``, whichever list is shorter. A module
is named alone if all that backward needs of it has the same fate, else the kinds of its operators
are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Node, Phase, TensorMeta
from autopar.plan.types import DP_AXIS, MB_AXIS, TP_AXIS, Plan
from autopar.report.fold import fold_scopes
from autopar.sharding.placement import Placement, R, local_shape
from autopar.sharding.signature import AxisStrategy
from autopar.sharding.stages import VIEW_OPS
from autopar.units import format_bytes

_AXES = (MB_AXIS, DP_AXIS, TP_AXIS)
_OUTSIDE = "outside of blocks"


def describe_recompute(plan: Plan, graph: Graph) -> dict[int, tuple[str, ...]]:
    """Per stage that recomputes: a sentence per group of blocks, then one on memory.

    Bytes are those of values that backward reads and that are not kept for it, on one device. They
    are estimated from the graph; the plan's memory table is exact.
    """
    if not any(stage.recompute for stage in plan.stages):
        return {}
    reader = _Reader(plan, graph)
    dropped = {name for stage in plan.stages for name in stage.recompute}
    whole, kept = reader.kept_bytes(frozenset()), reader.kept_bytes(dropped)
    found: dict[int, tuple[str, ...]] = {}
    for stage in plan.stages:
        if not stage.recompute:
            continue
        saved = whole.get(stage.index, 0) - kept.get(stage.index, 0)
        lines = [f"{blocks}: {words}" for blocks, words in reader.blocks(stage.index, dropped)]
        if saved > 0:
            text = f"keeps about {format_bytes(saved)} less per micro-batch"
            if stage.num_in_flight > 1:
                total = format_bytes(saved * stage.num_in_flight)
                text += f", {total} with {stage.num_in_flight} in flight"
            lines.append(text)
        found[stage.index] = tuple(lines)
    return found


@dataclass(slots=True)
class _Reader:
    """The graph's forward values under a plan's splits."""

    plan: Plan
    graph: Graph
    forward: dict[str, Node] = field(default_factory=dict)
    stage_of: dict[str, int] = field(default_factory=dict)
    parsed: dict[str, AxisStrategy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        firsts = {stage.first: stage.index for stage in self.plan.stages[1:] if stage.first}
        stage = 0
        for node in self.graph.nodes:
            if node.phase is Phase.FORWARD:
                stage = firsts.get(node.name, stage)
                self.forward[node.name] = node
                self.stage_of[node.name] = stage

    def needs(self, dropped: Collection[str]) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
        """What backward needs if the values of ``dropped`` are not kept: (stage, value).

        Returns:
            What is kept, and what is made again; views are neither.
        """
        kept: set[tuple[int, str]] = set()
        again: set[tuple[int, str]] = set()
        seen: set[tuple[int, str]] = set()
        waiting = [
            (self.stage_of[ref], ref)
            for node in self.graph.nodes
            if node.phase is Phase.BACKWARD
            for ref in node.refs()
            if ref in self.forward
        ]
        while waiting:
            stage, name = key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            node = self.forward[name]
            is_here = self.stage_of[name] == stage
            is_view = node.op in VIEW_OPS and node.op != "getitem"
            if is_view or (is_here and self._maker(node).name in dropped):
                refs = node.refs() if is_view else self._maker(node).refs()
                waiting += [(stage, ref) for ref in refs if ref in self.forward]
                if not is_view:
                    again.add(key)
            else:
                kept.add(key)
        return kept, again

    def kept_bytes(self, dropped: Collection[str]) -> dict[int, int]:
        """Bytes that stages keep per micro-batch if the values of ``dropped`` are not kept."""
        result: dict[int, int] = {}
        for stage, name in self.needs(dropped)[0]:
            result[stage] = result.get(stage, 0) + self._local_bytes(self.forward[name])
        return result

    def blocks(self, stage: int, dropped: Collection[str]) -> list[tuple[str, str]]:
        """(Blocks, what of them is computed again), blocks with the same words together."""
        kept, again = self.needs(dropped)
        groups: dict[str, list[str]] = {}
        own = self._by_block(stage, again)
        held = self._by_block(stage, kept)
        for block, operators in own.items():
            words = _words(operators, held.get(block, ()))
            groups.setdefault(words, []).append(block)
        return [(", ".join(fold_scopes(_leaves(found))), words) for words, found in groups.items()]

    def _by_block(
        self, stage: int, keys: Collection[tuple[int, str]]
    ) -> dict[str, list[tuple[str, str]]]:
        """Block -> (module inside it, kind) of the operators of a stage, in the graph's order."""
        found: dict[str, list[tuple[str, str]]] = {}
        makers = dict.fromkeys(
            self._maker(node).name for name, node in self.forward.items() if (stage, name) in keys
        )
        for name in makers:
            node = self.forward[name]
            if self.stage_of[name] != stage:
                continue
            block = _block(node.scope)
            inner = node.scope[len(block) :].lstrip(".") if node.scope.startswith(block) else ""
            found.setdefault(block, []).append((inner, _kind(node.op)))
        return found

    def _maker(self, node: Node) -> Node:
        """The operator whose result a ``getitem`` picks; else the node itself."""
        return self.forward.get(node.refs()[0], node) if node.op == "getitem" else node

    def _local_bytes(self, node: Node) -> int:
        meta = node.metas()[0]
        if not isinstance(meta, TensorMeta):
            return 0
        base, index = node.name, 0
        if node.op == "getitem":
            base, item = node.refs()[0], node.args[1]
            index = item if isinstance(item, int) else 0
        layout = [self._placement(axis, base, index) for axis in _AXES]
        sizes = (self.plan.num_microbatches, self.plan.mesh.dp, self.plan.mesh.tp)
        return TensorMeta(local_shape(meta.shape, layout, sizes), meta.dtype).bytes

    def _placement(self, axis: str, name: str, index: int) -> Placement:
        text = self.plan.splits.get(axis, {}).get(name, "")
        if "->" not in text:
            return R
        if text not in self.parsed:
            self.parsed[text] = AxisStrategy.parse(text)
        outputs = self.parsed[text].outputs
        return outputs[index] if index < len(outputs) else R


def _block(scope: str) -> str:
    """A module path up to its first number: the layer that it is in.

    >>> _block("transformer.h.3.attn.c_proj")
    'transformer.h.3'
    """
    parts = scope.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: at + 1]) or _OUTSIDE


def _leaves(scopes: Collection[str]) -> list[str]:
    """Without modules that contain another one of the list."""
    return [s for s in scopes if not any(other.startswith(f"{s}.") for other in scopes)]


def _kind(op: str) -> str:
    """The operator's plain name: ``mm`` of ``aten.mm.default``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def _words(again: Collection[tuple[str, str]], kept: Collection[tuple[str, str]]) -> str:
    """What is made again of a block, given (module, kind) of its operators on either side.

    >>> _words([("mlp", "mul"), ("norm", "rsqrt")], [("mlp", "mul"), ("up", "mm"), ("q", "mm")])
    'only 1 of 2 mul of mlp, norm'
    """
    if not kept:
        return "everything"
    less, more = _items(again, kept), _items(kept, again)
    if len(more) <= len(less):
        return f"everything but {', '.join(more)}"
    return f"only {', '.join(less)}"


def _items(side: Collection[tuple[str, str]], other: Collection[tuple[str, str]]) -> list[str]:
    """Names of one side: whole modules, or kinds of operators of shared ones."""
    shared = {module for module, _ in other}
    here, there = Counter(side), Counter(other)
    found: dict[str, None] = {}
    for module, kind in side:
        if module and module not in shared:
            found[module] = None
            continue
        count, total = here[module, kind], here[module, kind] + there[module, kind]
        text = kind if count == total else f"{count} of {total} {kind}"
        found[f"{text} of {module}" if module else text] = None
    return list(found)


def recompute_summary(facts: Mapping[int, tuple[str, ...]]) -> list[tuple[list[int], str]]:
    """(Stages, sentences), stages that say the same together but for the numbers of layers."""
    groups: dict[str, list[int]] = {}
    for stage, lines in facts.items():
        groups.setdefault("; ".join(lines), []).append(stage)
    return [(stages, text) for text, stages in groups.items()]
