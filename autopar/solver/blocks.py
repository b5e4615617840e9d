"""Where a graph may be cut into stages, and which of the pieces are repeats of each other.

A *cut position* lies between two forward operators. It is a candidate where few bytes are alive:
``live[p]`` counts the values that are made before ``p`` and read at or after ``p`` by the forward
pass. What every stage makes for itself (values of call arguments alone, views of parameters) does
not count, nor do values made of parameters alone. Position ``p`` is eligible if
``live[p] <= 1.2 * max(min(live[:p+1]), min(live[p:]))``: nothing much smaller lies on both sides.
In a transformer those are the places between residual branches, in a chain the ends of its layers.
Where that leaves a long run of operators in one piece (what every layer of a decoder reads is alive
all along it), the minima are taken over half of the run on each side: nothing much smaller is near.

Between two cuts lies a *block*; operators are assigned to blocks as they are to stages
(:mod:`autopar.sharding.stages`), so that stages are runs of whole blocks. Blocks with the same
structural hash (operators, static arguments, shapes, references in canonical numbers) form a *block
class*; the k-th operators of blocks of one class form a *node class* and are decided together.
Everything is linear in the number of operators.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from autopar.ir.graph import Arg, Graph, InputKind, Node, OutputKind, Ref, TensorMeta
from autopar.sharding.stages import StageMap, assign_stages

SLACK = 1.2  # how much above the smallest a cut may be; a mask beside a residual is fine
LONG_ANCHORS = 32  # weights read and heavy operators of a piece that is cut once more,
LONG_SHARE = 1 / 8  # if it has this share of all
HEAVY_OPS = frozenset(
    {"mm", "bmm", "convolution", "attention", "embedding", "native_layer_norm", "batch_norm"}
)
# Position of the argument that tells one random operator from another and changes no price.
INSTANCE_ARGUMENT: Mapping[str, int] = {
    "autopar.dropout": 3,
    "autopar.attention": 9,
    "autopar.attention_backward": 12,
    "autopar.uniform": 1,
    "autopar.normal": 1,
}

NodeClass: TypeAlias = tuple[str, int]
"""(Block class, position): operators with equal keys are decided together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of forward operators with the backward operators that belong to them.

    Attributes:
        index: Position in the chain of blocks.
        forward: Forward operators in order; the first one may begin a stage.
        backward: The other operators, in order.
        key: Structural hash; blocks with equal keys are repeats.
        scope: The module path that its forward operators share.
    """

    index: int
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    key: str
    scope: str


@dataclass(frozen=True, kw_only=True)
class BlockChain:
    """A graph as a chain of blocks.

    Attributes:
        blocks: In forward order.
        forward_cuts: Per boundary (before block 1, 2, ...), the forward values that cross it.
        backward_cuts: The same for the values that backward sends the other way.
        block_of: Operator -> index of its block.
        node_class: Operator or input -> node class.
    """

    blocks: tuple[Block, ...]
    forward_cuts: tuple[tuple[str, ...], ...]
    backward_cuts: tuple[tuple[str, ...], ...]
    block_of: Mapping[str, int]
    node_class: Mapping[str, NodeClass]

    @property
    def classes(self) -> dict[str, tuple[int, ...]]:
        """Block class -> indices of its blocks, in order of first appearance."""
        found: dict[str, list[int]] = {}
        for block in self.blocks:
            found.setdefault(block.key, []).append(block.index)
        return {key: tuple(members) for key, members in found.items()}

    def first(self, index: int) -> str:
        """First forward operator of a block."""
        return self.blocks[index].forward[0]


def find_blocks(graph: Graph, *, forced: Sequence[str] = ()) -> BlockChain:
    """Cut a joint graph at every eligible position.

    Args:
        graph: The joint graph.
        forced: Forward operators before which there must be a cut, whatever is alive there.
    """
    whole = assign_stages(graph, ())
    forward = [
        n
        for n in graph.nodes
        if n.op != "getitem" and n.name in whole.stage and n.name in whole.forward_needed
    ]
    keys = value_keys(graph)
    starts = _starts(graph, forward, keys, frozenset(forced))
    stage_map = assign_stages(graph, tuple(forward[s].name for s in starts))
    block_of = _block_of(graph, stage_map)
    ahead: list[list[Node]] = [[] for _ in range(len(starts) + 1)]
    behind: list[list[Node]] = [[] for _ in range(len(starts) + 1)]
    for node in graph.nodes:
        side = behind if _is_behind(node, whole) else ahead
        side[block_of[node.name]].append(node)
    begin = {forward[s].name for s in starts}
    for row in ahead:  # what every stage makes for itself may precede a block's first operator
        at = next((i for i, n in enumerate(row) if n.name in begin), 0)
        row.insert(0, row.pop(at))
    common = _common_nodes(graph, stage_map, block_of)
    classes, node_class = _hash_blocks(
        graph,
        [[n for n in row if n.name not in common] for row in ahead],
        [[n for n in row if n.name not in common] for row in behind],
        block_of,
    )
    node_class.update((name, (f"common {name}", 0)) for name in common)
    forward_cuts, backward_cuts = _cut_values(graph, stage_map, keys)
    return BlockChain(
        blocks=tuple(
            Block(
                index=i,
                forward=tuple(n.name for n in ahead[i]),
                backward=tuple(n.name for n in behind[i]),
                key=classes[i],
                scope=_common_scope(ahead[i]),
            )
            for i in range(len(ahead))
        ),
        forward_cuts=forward_cuts,
        backward_cuts=backward_cuts,
        block_of=block_of,
        node_class=node_class,
    )


def value_keys(graph: Graph) -> dict[str, str]:
    """``getitem`` -> the result that it picks, as ``"operator#index"``."""
    return {n.name: f"{n.refs()[0]}#{n.args[1]}" for n in graph.nodes if n.op == "getitem"}


def module_start(graph: Graph, module: str) -> str | None:
    """First forward operator inside ``module`` that may begin a stage; None if there is none."""
    whole = assign_stages(graph, ())
    prefix = module + "."
    for node in graph.nodes:
        if node.name not in whole.stage or node.name not in whole.forward_needed:
            continue
        if node.op != "getitem" and (node.scope == module or node.scope.startswith(prefix)):
            return node.name
    return None


def _is_behind(node: Node, whole: StageMap) -> bool:
    return node.name not in whole.forward_needed


def _of_weights(graph: Graph) -> set[str]:
    """Values that are made of parameters alone, such as a weight from its direction and length."""
    found = {i.name for i in graph.inputs if i.kind is InputKind.PARAM}
    for node in graph.nodes:
        if node.refs() and all(ref in found for ref in node.refs()):
            found.add(node.name)
    return found


def _live_bytes(
    forward: Sequence[Node], keys: Mapping[str, str], without: Collection[str] = ()
) -> list[int]:
    """``live[p]``: bytes that a cut before ``forward[p]`` sends on.

    Args:
        forward: Operators that may begin a block.
        keys: As from :func:`value_keys`.
        without: Operators whose results do not count.
    """
    last_use: dict[str, int] = {}
    for index, node in enumerate(forward):
        for ref in node.refs():
            last_use[keys.get(ref, ref)] = index
    change = [0] * (len(forward) + 1)
    for index, node in enumerate(forward):
        if node.name in without:
            continue
        for place, meta in enumerate(node.metas()):
            name = f"{node.name}#{place}" if isinstance(node.meta, tuple) else node.name
            last = last_use.get(name, -1)
            if meta is not None and last > index:
                change[index + 1] += meta.bytes
                change[last + 1] -= meta.bytes
    live, now = [], 0
    for step in change:
        now += step
        live.append(now)
    return live[: len(forward)]


def _starts(
    graph: Graph, forward: Sequence[Node], keys: Mapping[str, str], forced: frozenset[str]
) -> list[int]:
    """Indices into ``forward`` at which blocks 1, 2, ... begin."""
    live = _live_bytes(forward, keys)
    # where a weight is being made, nothing of the batch may be alive yet: no place for a cut
    of_batch = _live_bytes(forward, keys, _of_weights(graph))
    anchored = _anchors(graph, forward)
    kept = {i for i, n in enumerate(forward) if i and n.name in forced}
    starts: list[int] = []
    for one_scope in (False, True):
        eligible = _eligible(forward, of_batch, one_scope=one_scope)
        for low, high in _long_runs([0, *eligible, len(forward)], anchored):
            eligible += _eligible(forward, of_batch, one_scope=one_scope, run=range(low, high))
        starts = sorted(kept | set(_one_per_gap(forward, live, sorted(eligible), anchored)))
        if len(starts) > 1:
            break
    result: list[int] = []
    for start in starts:
        before = result[-1] if result else 0
        if start in kept or any(anchored[before:start]):
            result.append(start)
    while result and result[-1] not in kept and not any(anchored[result[-1] :]):
        result.pop()
    return result


def _long_runs(cuts: Sequence[int], anchored: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs of operators between cuts that are too long to be one block."""
    most = max(LONG_ANCHORS, LONG_SHARE * sum(anchored))
    return [(low, high) for low, high in pairwise(cuts) if sum(anchored[low:high]) >= most]


def _eligible(
    forward: Sequence[Node],
    live: Sequence[int],
    *,
    one_scope: bool,
    run: range | None = None,
) -> list[int]:
    """Positions with little alive; those inside one module only if ``one_scope``.

    Args:
        forward: Operators that may begin a block.
        live: Bytes alive before each.
        one_scope: Whether modules may be cut.
        run: The operators between which to look, with minima over half of it on each side; all of
            them, with minima over all that lies before and after, if left out.
    """
    inner = range(len(forward)) if run is None else run
    reach = len(inner) if run is None else (len(inner) + 1) // 2
    positions = [p for p in inner[1:] if live[p] > 0]
    before = _lowest(positions, live, reach)
    after = _lowest(positions[::-1], live, reach)[::-1]
    result = []
    for p, low, high in zip(positions, before, after, strict=True):
        if live[p] > SLACK * max(low, high):
            continue
        if one_scope or not forward[p].scope or forward[p].scope != forward[p - 1].scope:
            result.append(p)
    return result


def _lowest(positions: Sequence[int], live: Sequence[int], reach: int) -> list[int]:
    """At each position the least of those that come before it, no further away than ``reach``."""
    found: list[int] = []
    rising: deque[int] = deque()  # each is less than all after it
    for p in positions:
        while rising and live[rising[-1]] >= live[p]:
            rising.pop()
        rising.append(p)
        while abs(p - rising[0]) > reach:
            rising.popleft()
        found.append(live[rising[0]])
    return found


def _one_per_gap(
    forward: Sequence[Node],
    live: Sequence[int],
    eligible: Iterable[int],
    anchored: Sequence[bool],
) -> list[int]:
    """Of eligible positions with no anchor between them, the one between the outermost modules."""
    best: dict[int, tuple[int, int, int]] = {}
    count, at = 0, 0
    for p in eligible:
        count += sum(anchored[at:p])
        at = p
        rank = (live[p], _shared_depth(forward[p - 1].scope, forward[p].scope), p)
        best[count] = min(best.get(count, rank), rank)
    return sorted(rank[2] for rank in best.values())


def _shared_depth(left: str, right: str) -> int:
    depth = 0
    for a, b in zip(left.split("."), right.split("."), strict=False):
        if a != b:
            break
        depth += 1
    return depth


def _anchors(graph: Graph, forward: Sequence[Node]) -> list[bool]:
    """Whether an operator makes a block worth having: it reads a weight or is heavy."""
    weights = _of_weights(graph)
    result = []
    for node in forward:
        word = node.op.split(".")[1] if "." in node.op else node.op
        reads = node.name not in weights and any(r in weights for r in node.refs())
        result.append(reads or word in HEAVY_OPS)
    return result


def _block_of(graph: Graph, stage_map: StageMap) -> dict[str, int]:
    """Operator -> block; what every stage makes for itself counts where it is first needed."""
    block_of = dict(stage_map.stage)
    users = graph.users()
    for node in reversed(graph.nodes):
        if node.name not in block_of:
            block_of[node.name] = min((block_of[u] for u in users[node.name]), default=0)
    return block_of


def _common_nodes(graph: Graph, stage_map: StageMap, block_of: Mapping[str, int]) -> set[str]:
    """What every stage makes for itself and several blocks need: part of no repeated structure."""
    loose = {n.name for n in graph.nodes if n.name not in stage_map.stage}
    readers: dict[str, set[int]] = {name: set() for name in loose}
    common: set[str] = set()
    for node in reversed(graph.nodes):
        name = node.name
        if name in loose and len(readers[name]) > 1:
            common.add(name)
        reach = readers[name] if name in loose else {block_of[name]}
        for ref in node.refs():
            if ref in loose:
                readers[ref] |= reach
    return common


def _common_scope(nodes: Sequence[Node]) -> str:
    scopes = [n.scope.split(".") for n in nodes if n.scope]
    if not scopes:
        return ""
    shared = list(scopes[0])
    for parts in scopes[1:]:
        while shared != parts[: len(shared)]:
            shared.pop()
    return ".".join(shared)


def _cut_values(
    graph: Graph, stage_map: StageMap, keys: Mapping[str, str]
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Values that cross each boundary, forward and backward; one name per value."""
    stage, count = stage_map.stage, stage_map.num_stages
    forward: list[dict[str, str]] = [{} for _ in range(count - 1)]
    backward: list[dict[str, str]] = [{} for _ in range(count - 1)]
    for node in graph.nodes:
        target = stage.get(node.name)
        if target is None:
            continue
        for ref in node.refs():
            source = stage.get(ref, target)
            side = forward if ref in stage_map.forward_needed else backward
            for boundary in range(min(source, target), max(source, target)):
                side[boundary].setdefault(keys.get(ref, ref), ref)
    return tuple(tuple(d.values()) for d in forward), tuple(tuple(d.values()) for d in backward)


def _hash_blocks(
    graph: Graph,
    ahead: Sequence[Sequence[Node]],
    behind: Sequence[Sequence[Node]],
    block_of: Mapping[str, int],
) -> tuple[list[str], dict[str, NodeClass]]:
    """Structural hash of every block, and the class of every operator and input."""
    inputs, shared = graph.input_map(), _shared_inputs(graph, block_of)
    metas = graph.metas()
    meta_texts: dict[object, str] = {}
    marks = _output_marks(graph)
    keys: list[str] = []
    node_class: dict[str, NodeClass] = {}
    for rows in zip(ahead, behind, strict=True):
        names = _Numbers(inputs, shared, metas, meta_texts)
        digest = hashlib.sha256()
        nodes = (*rows[0], *rows[1])
        for position, node in enumerate(nodes):
            digest.update(_node_text(node, names, is_ahead=position < len(rows[0])).encode())
            for kind, target in marks.get(node.name, ()):
                digest.update(f"|{kind} {names.of(target) if target else ''}".encode())
            names.table[node.name] = f"n{position}"
        key = digest.hexdigest()[:16]
        keys.append(key)
        node_class.update((n.name, (key, i)) for i, n in enumerate(nodes))
        own = [n for n in names.table if n in inputs and n not in shared]
        node_class.update((name, (key, -1 - i)) for i, name in enumerate(own))
    for entry in graph.inputs:
        node_class.setdefault(entry.name, (f"input {entry.name}", 0))
    return keys, node_class


class _Numbers:
    """Canonical names of what a block refers to: by first use, shared inputs by name."""

    def __init__(
        self,
        inputs: Mapping[str, object],
        shared: set[str],
        metas: Mapping[str, object],
        texts: dict[object, str],
    ) -> None:
        self.table: dict[str, str] = {}
        self._inputs, self._shared, self._metas, self._texts = inputs, shared, metas, texts

    def of(self, name: str) -> str:
        """Canonical name of an input or value."""
        if name not in self.table:
            entry = self._inputs.get(name)
            if entry is not None and name in self._shared:
                text = f"shared {name}"
            else:
                word = "value" if entry is None else f"input {getattr(entry, 'kind', '')}"
                trained = getattr(entry, "requires_grad", "")
                text = f"{word}{len(self.table)} {trained} {self.meta(self._metas[name])}"
            self.table[name] = text
        return self.table[name]

    def meta(self, meta: object) -> str:
        """Text of a meta."""
        if meta not in self._texts:
            parts = meta if isinstance(meta, tuple) else (meta,)
            self._texts[meta] = " ".join(map(str, parts))
        return self._texts[meta]


def _node_text(node: Node, names: _Numbers, *, is_ahead: bool) -> str:
    args, kwargs = node.map_refs(lambda name: Ref(names.of(name)))
    args = without_instance(node.op, args)
    return f"\n{node.op} {_text(args)} {_text(kwargs)} {names.meta(node.meta)} {is_ahead}"


def _text(arg: object) -> str:
    if isinstance(arg, tuple):
        return f"({','.join(map(_text, arg))})"
    return str(arg) if isinstance(arg, Ref) else repr(arg)


def without_instance(op: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """Arguments without the one that only tells a random operator from its likes."""
    at = INSTANCE_ARGUMENT.get(op)
    return args if at is None or at >= len(args) else (*args[:at], 0, *args[at + 1 :])


def _output_marks(graph: Graph) -> dict[str, list[tuple[str, str]]]:
    """Value -> (kind, input) of the outputs that it is."""
    owner = {i.target: i.name for i in graph.inputs}
    marks: dict[str, list[tuple[str, str]]] = {}
    for output in graph.outputs:
        if output.value is not None:
            target = owner.get(output.target, "") if output.kind is not OutputKind.OUTPUT else ""
            marks.setdefault(output.value.name, []).append((output.kind.value, target))
    return marks


def _shared_inputs(graph: Graph, block_of: Mapping[str, int]) -> set[str]:
    """Inputs that several blocks read."""
    names = {i.name for i in graph.inputs}
    first: dict[str, int] = {}
    shared: set[str] = set()
    for node in graph.nodes:
        block = block_of[node.name]
        for ref in node.refs():
            if ref in names and first.setdefault(ref, block) != block:
                shared.add(ref)
    return shared


def value_bytes(graph_metas: Mapping[str, object], names: Iterable[str]) -> int:
    """Global bytes of values with one result each."""
    metas = (graph_metas[n] for n in names)
    return sum(m.bytes for m in metas if isinstance(m, TensorMeta))
