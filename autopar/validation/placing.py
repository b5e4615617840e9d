"""The split that Megatron writes by hand, as decisions about every operator of one block.

Weights named in :data:`COLUMNS` are cut by output features, those in :data:`ROWS` by input
features; everything else follows: an operator keeps the shards that it is given, a pending sum is
completed by the next operator of the residual stream, which is whole (a plain tensor-parallel
group) or cut along the sequence (sequence parallelism). Source: Shoeybi et al., Megatron-LM, 2019;
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import ConfigError
from autopar.ir.graph import Graph, Input, InputKind, Node, OutputKind, TensorMeta
from autopar.sharding.decisions import Choice
from autopar.sharding.placement import Partial, Placement, R, Shard
from autopar.sharding.signature import (
    AxisStrategy,
    OpSignature,
    axis_strategies,
    replicated_strategy,
)

COLUMNS = ("query_key_value", "query", "key", "value", "gate", "up", "head", "embedding")
ROWS = ("out", "down")
STREAM = "x"
LOSS = "loss"
_SEQUENCE = Shard(0)


def megatron_choices(
    graph: Graph,
    signatures: Mapping[str, OpSignature | None],
    tp: int,
    *,
    sequence_parallel: bool,
    split_loss: bool = True,
) -> dict[str, Choice]:
    """Strategy of every operator and placement of every parameter over ``tp`` ranks.

    Args:
        graph: A probe of :mod:`autopar.validation.models`.
        signatures: Its named dims.
        tp: Ranks.
        sequence_parallel: Whether the residual stream is cut along the sequence (dim 0).
        split_loss: Whether the loss sees parts of the vocabulary, else gathered scores.

    Raises:
        ConfigError: A weight can't be cut into so many parts.
    """
    placer = _Placer(graph, signatures, tp, sequence_parallel=sequence_parallel)
    placer.whole_scope = "" if split_loss else LOSS
    return placer.run()


class _Placer:
    def __init__(
        self,
        graph: Graph,
        signatures: Mapping[str, OpSignature | None],
        tp: int,
        *,
        sequence_parallel: bool,
    ) -> None:
        self.graph, self.signatures, self.tp = graph, signatures, tp
        self.stream: Placement = _SEQUENCE if sequence_parallel else R
        self.choices: dict[str, Choice] = {}
        self.layout: dict[str, Placement] = {}
        self.in_stream: set[str] = set()  # values that are cut along the sequence
        self.metas = graph.metas()
        self.nodes = graph.node_map()
        self.whole_scope = ""  # module whose operators run whole on every rank
        self.gradient_of = _gradient_tails(graph)

    def run(self) -> dict[str, Choice]:
        for entry in self.graph.inputs:
            placement = self._of_input(entry)
            self.layout[entry.name] = placement
            if placement != R:
                self.choices[entry.name] = placement
        for node in self.graph.nodes:
            if node.op == "getitem":
                key = f"{node.refs()[0]}#{node.args[1]}"
                self.layout[node.name] = self.layout[key]
                if key in self.in_stream:
                    self.in_stream.add(node.name)
            else:
                self._place(node)
        return self.choices

    def _of_input(self, entry: Input) -> Placement:
        if entry.kind is not InputKind.PARAM or entry.meta is None:
            return R
        if entry.target == STREAM:
            if self.stream != R:
                self.in_stream.add(entry.name)
                self._check(entry, 0)
            return self.stream
        owner, _, leaf = entry.target.rpartition(".")
        name = owner.rpartition(".")[2]
        if name in COLUMNS:
            return self._check(entry, 0)
        if name in ROWS and leaf == "weight":
            return self._check(entry, 1)
        return R

    def _check(self, entry: Input, dim: int) -> Shard:
        size = entry.meta.shape[dim] if entry.meta is not None else 0
        if size % self.tp:
            raise ConfigError(
                f"parameter {entry.target!r}: dim {dim} of size {size} is not a multiple of "
                f"tp {self.tp}; choose a tp that divides it"
            )
        return Shard(dim)

    def _place(self, node: Node) -> None:
        signature = self.signatures.get(node.name)
        best: AxisStrategy | None = None
        wanted, is_inner = self._wanted_operands(node)
        is_whole = bool(self.whole_scope) and node.scope.split(".")[-1] == self.whole_scope
        if signature is not None and is_whole:
            best, is_inner = replicated_strategy(signature), False
        elif signature is not None:
            target = self._wanted_result(node)
            is_inner |= target is not None and target != self.stream
            if target is None and all(w == R for w in wanted):
                best = replicated_strategy(signature)
            else:
                best = min(
                    axis_strategies(signature, self.tp),
                    key=lambda s: self._misfit(node, s, wanted, target),
                )
            if not best.is_replicated:
                self.choices[node.name] = best
        for index in range(len(node.metas())):
            key = f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name
            made = R if best is None else best.outputs[index]
            self.layout[key] = made
            if isinstance(made, Shard) and not is_inner:
                self.in_stream.add(key)

    def _wanted_operands(self, node: Node) -> tuple[list[Placement], bool]:
        """Layouts in which the operator should read, and whether a cut weight is behind it."""
        refs = node.refs()
        have = [self.layout[ref] for ref in refs]
        if node.op == "aten.permute.default" and refs[0] in self.in_stream:
            return [R], True  # gathered before it is turned: the other product reads it unturned
        inner = [
            isinstance(h, Shard) and r not in self.in_stream
            for h, r in zip(have, refs, strict=True)
        ]
        if any(inner):
            return [h if i else R for h, i in zip(have, inner, strict=True)], True
        if not any(isinstance(h, Partial) for h in have):
            return have, False
        signature = self.signatures.get(node.name)
        is_tail = node.name in self.gradient_of and len(refs) == 1
        passes = is_tail or (signature is not None and signature.free)
        if passes or (all(isinstance(h, Partial) for h in have) and len(have) > 1):
            return have, False
        return [self.stream if isinstance(h, Partial) else h for h in have], False

    def _wanted_result(self, node: Node) -> Placement | None:
        """Layout of the first result where readers or a cut parameter ask for one."""
        param = self.gradient_of.get(node.name)
        if param is not None and isinstance(placement := self.choices.get(param), Shard):
            return placement if param not in self.in_stream else None
        made = node.metas()[0] if node.metas() else None
        twin = self.nodes.get(node.twin or "")
        operands = [self.metas.get(r) for r in node.refs()]
        largest = max((m.numel for m in operands if isinstance(m, TensorMeta)), default=0)
        if made is None or twin is None or 16 * largest > made.numel:
            return None
        # a gradient that begins here is laid out as the value that it belongs to
        for ref in twin.refs():
            other = self.metas.get(ref)
            if isinstance(other, TensorMeta) and other.shape == made.shape:
                return self.layout[ref]
        return None

    def _misfit(
        self,
        node: Node,
        strategy: AxisStrategy,
        wanted: list[Placement],
        target: Placement | None,
    ) -> tuple[bool, float, float, bool]:
        """How far a strategy is from what is wanted: moved bytes, then bytes made per rank."""
        moved = 0.0
        for ref, want, takes in zip(node.refs(), wanted, strategy.inputs, strict=True):
            meta = self.metas.get(ref)
            if want == takes:
                continue
            if isinstance(takes, Partial) or isinstance(want, Partial):
                return (True, float("inf"), 0.0, True)
            size = float(meta.bytes) if isinstance(meta, TensorMeta) else 0.0
            # a whole operand is cut for free, but only where another one asks for it
            moved += size if want != R else size / (16 * self.tp)
        misses = target is not None and strategy.outputs[0] != target
        made = sum(
            float(m.bytes) / (self.tp if isinstance(p, Shard) else 1)
            for m, p in zip(node.metas(), strategy.outputs, strict=True)
            if isinstance(m, TensorMeta)
        )
        return misses, moved, made, any(isinstance(p, Partial) for p in strategy.outputs)


def _gradient_tails(graph: Graph) -> dict[str, str]:
    """Operators that only shape or cast a parameter's gradient -> that parameter's input."""
    by_target = {i.target: i.name for i in graph.of_kind(InputKind.PARAM)}
    nodes = graph.node_map()
    count: dict[str, int] = {}
    for node in graph.nodes:
        for ref in node.refs():
            count[ref] = count.get(ref, 0) + 1
    found: dict[str, str] = {}
    for output in graph.outputs_of(OutputKind.GRAD):
        if output.value is None:
            continue
        name = output.value.name
        while name in nodes:
            found[name] = by_target[output.target]
            node = nodes[name]
            # the operator that makes the gradient is the last one: it has other operands too
            if len(node.refs()) != 1 or count.get(node.refs()[0], 0) > 1:
                break
            name = node.refs()[0]
    return found
