"""What planning needs to know about a model and a cluster, found once and kept.

One :class:`Analysis` serves a whole search: blocks, named dims, data splits, price lists and split
problems are made on first use and reused by every candidate that asks again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from autopar.cluster import Cluster
from autopar.errors import ConstraintError
from autopar.ir.graph import Graph, Node, OutputKind, Ref, TensorMeta
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.sharding.alike import word_of
from autopar.sharding.build import signatures_of
from autopar.sharding.placement import Placement
from autopar.sharding.propagate import DataAxes, DataSplits
from autopar.sharding.signature import OpSignature
from autopar.solver.blocks import (
    BlockChain,
    find_blocks,
    module_start,
    value_keys,
    without_instance,
)
from autopar.solver.constraints import Constraints, parameter_experts, parameter_placements
from autopar.solver.prices import PriceList
from autopar.solver.splits_build import SplitsRequest, build_splits
from autopar.solver.splits_problem import SplitsProblem
from autopar.solver.splits_structure import (
    GraphFacts,
    SplitsStructure,
    graph_facts,
    split_structure,
)
from cost_models.base import Comparable, CostModel, HostCosts, SharedMachine, slowest_group
from cost_models.local import is_cpu
from cost_models.memory import optimizer_state_bytes
from cost_models.offload import CopyPrice, copy_price, offload_s_per_byte

PROBE_ELEMENTS = 1 << 26  # large enough that bandwidth alone decides
# Constraints that change blocks, data splits or split problems; all others only leave shapes out.
_SHAPING = (
    "placements", "boundaries", "sequence_parallel", "expert_capacity", "microbatch_statistics",
    "offload",
)  # fmt: skip


@runtime_checkable
class Rehomed(Protocol):
    """What a search has worked out and another cluster may use."""

    def on(self, analysis: Analysis) -> object:
        """What of it holds for a model on another cluster with equal prices."""
        ...


@dataclass(slots=True)
class Analysis:
    """A model on a cluster.

    Attributes:
        graph: The joint graph.
        cluster: Where it runs.
        model: Prices.
        constraints: The user's.
        optimizer: Assumed optimizer.
        signatures: Named dims by operator.
        chain: Blocks.
        data_axes: Splits over ``mb`` and ``dp``.
        fixed: Parameter input -> placement over ``tp`` that the user gave.
        boundary_starts: First block of stages 1, 2, ... if the user named them.
        optimizer_s_per_byte: Seconds of an optimizer step per byte of stored parameter.
        nodes: Operators by name.
        refs: Operator -> its operands.
        metas: Shape and dtype of values with one result.
        value_keys: ``getitem`` -> the result that it picks.
        words: Operator -> a number, equal for operators that are priced alike.
        shared: What searches have worked out and others may use, by name.
    """

    graph: Graph
    cluster: Cluster
    model: CostModel
    constraints: Constraints
    optimizer: str
    signatures: dict[str, OpSignature | None] = field(init=False)
    chain: BlockChain = field(init=False)
    data_axes: DataAxes = field(init=False)
    fixed: dict[str, Placement] = field(init=False)
    experts: dict[str, int] = field(init=False)
    boundary_starts: tuple[int, ...] | None = field(init=False)
    optimizer_s_per_byte: float = field(init=False)
    nodes: dict[str, Node] = field(init=False)
    refs: dict[str, tuple[str, ...]] = field(init=False)
    metas: dict[str, TensorMeta] = field(init=False)
    value_keys: dict[str, str] = field(init=False)
    words: dict[str, int] = field(init=False)
    shared: dict[str, object] = field(default_factory=dict)
    _data: dict[tuple[int, int], DataSplits] = field(default_factory=dict)
    _structures: dict[tuple[int, int], SplitsStructure] = field(default_factory=dict)
    _groups: dict[tuple[MeshShape, str], tuple[int, ...]] = field(default_factory=dict)
    _joint_dp: dict[tuple[int, int], dict[str, Placement]] = field(default_factory=dict)
    _batch_size: int = 0
    _before: Analysis | None = None
    _siblings: dict[bool | None, Analysis] = field(default_factory=dict)
    _at_work: dict[int, Analysis] = field(default_factory=dict)
    _facts: GraphFacts | None = None
    _prices: dict[tuple[int, int, int], PriceList] = field(default_factory=dict)
    _requests: dict[tuple[int, int, int, int], SplitsRequest] = field(default_factory=dict)
    _problems: dict[tuple[int, int, int, int], SplitsProblem] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = self.graph.node_map()
        self.refs = {name: node.refs() for name, node in self.nodes.items()}
        metas = self.graph.metas().items()
        self.metas = {name: meta for name, meta in metas if isinstance(meta, TensorMeta)}
        self.value_keys = value_keys(self.graph)
        numbers: dict[object, int] = {}
        self.words = {
            node.name: numbers.setdefault(
                word_of(node, without_instance(node.op, node.args)), len(numbers)
            )
            for node in self.graph.nodes
        }
        self.signatures = signatures_of(
            self.graph, expert_capacity_percent=self.constraints.expert_capacity_percent
        )
        starts = self._boundary_names()
        self.chain = find_blocks(self.graph, forced=starts)
        self.boundary_starts = None
        if starts:
            index = {b.forward[0]: b.index for b in self.chain.blocks}
            for module, name in zip(self.constraints.boundaries, starts, strict=True):
                if not index.get(name):
                    raise ConstraintError(
                        f"constraint stages: {module!r} begins the model, so stage 0 would be "
                        "empty; name the first modules of stages 1, 2, ..."
                    )
            self.boundary_starts = tuple(index[name] for name in starts)
        self._check_depth()
        self._check_schedule()
        self.data_axes = DataAxes(self.graph, self.signatures)
        patterns = self.constraints.placements
        self.fixed = parameter_placements(self.graph, patterns, self.constraints.tp)
        self.experts = parameter_experts(self.graph, patterns)
        self.optimizer_s_per_byte = self._update_s_per_byte()

    def _update_s_per_byte(self) -> float:
        """Seconds of the optimizer's step per byte of stored parameter, copies of state included.

        Raises:
            ConstraintError: State is to be in host memory, and the way there has no figure.
        """
        found = optimizer_s_per_byte(self.model, self.optimizer)
        if self.offloads:
            probe = TensorMeta((PROBE_ELEMENTS,), "float32")
            state = optimizer_state_bytes(self.optimizer, probe) / probe.bytes
            found += state * offload_s_per_byte(self.cluster)
        return found

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's state is kept in host memory."""
        return self.constraints.offloads_optimizer and self.trains

    @property
    def host_copies(self) -> CopyPrice | None:
        """What a copy of saved values to host memory takes; None where they stay.

        On CPUs they stay: the host's memory is theirs.

        Raises:
            ConstraintError: They may go there, and the way has no figure.
        """
        wish = self.constraints
        if not (self.trains and wish.may_offload_activations) or is_cpu(self.cluster):
            return None
        return copy_price(self.cluster, "activations")

    @property
    def resident_optimizer(self) -> str:
        """An optimizer that keeps as much on the device as this one does."""
        return "none" if self.offloads and not is_cpu(self.cluster) else self.optimizer

    def under(self, constraints: Constraints) -> Analysis:
        """The same model and cluster under other constraints.

        All that does not depend on them is shared, so that asking again is cheap.

        Raises:
            ConstraintError: The constraints contradict the model.
        """
        own = self.constraints
        changed = {n for n in _SHAPING if getattr(own, n) != getattr(constraints, n)}
        if changed - {"sequence_parallel"} or (constraints.placements and own.tp != constraints.tp):
            return Analysis(self.graph, self.cluster, self.model, constraints, self.optimizer)
        other = copy.copy(self._sibling(constraints) if changed else self)
        other.constraints = constraints
        other._check_depth()
        other._check_schedule()
        return other

    def _sibling(self, constraints: Constraints) -> Analysis:
        """The same with other splits to choose from: blocks, named dims and prices are kept."""
        wish = constraints.sequence_parallel
        if wish not in self._siblings:
            other = copy.copy(self)
            other._siblings = {self.constraints.sequence_parallel: self}
            other._requests, other._problems, other.shared = {}, {}, {}
            other._before, other._at_work = None, {}
            self._siblings[wish] = other
        return self._siblings[wish]

    def on(self, cluster: Cluster, model: CostModel) -> Analysis:
        """The same model on another cluster; what does not depend on it is shared.

        Where the prices are alike (machines came or went), so are those of a mesh whose groups
        have the same links, and all that was made of them.

        Args:
            cluster: The other cluster.
            model: Its prices.
        """
        other = copy.copy(self)
        other.cluster, other.model = cluster, model
        other._prices, other._requests, other._problems = {}, {}, {}
        other._groups, other.shared, other._before = {}, {}, None
        other._siblings, other._at_work = {}, {}
        other.optimizer_s_per_byte = other._update_s_per_byte()
        if isinstance(model, Comparable) and model.prices_like(self.model):
            other._before = self
            rehomed = {
                name: value.on(other)
                for name, value in self.shared.items()
                if isinstance(value, Rehomed)
            }
            other.shared = dict(rehomed)
        return other

    def at_work(self, num_ranks: int) -> Analysis:
        """The same while only the first ``num_ranks`` ranks work; itself if prices are the same.

        Where ranks share cores, a plan that leaves some idle costs what fewer devices cost.
        """
        model = self.model
        if num_ranks not in self._at_work and isinstance(model, SharedMachine):
            found = model.at_work(num_ranks)
            if found is not model:
                self._at_work[num_ranks] = self.on(self.cluster.at_work(num_ranks), found)
        known = self._at_work.get(num_ranks)
        return self if known is None else known.under(self.constraints)

    def has_prices_of(self, before: Analysis, sizes: tuple[int, int, int]) -> bool:
        """Whether a mesh is priced as on another cluster, by the same list."""
        if sizes[1] * sizes[2] > self.cluster.num_devices or sizes not in before._prices:
            return False
        return self.prices(sizes) is before._prices[sizes]

    def _check_depth(self) -> None:
        """Refuse more stages than the model can be cut into."""
        wish = self.constraints
        stages, blocks = (wish.pp or 1) * (wish.virtual or 1), len(self.chain.blocks)
        if stages > blocks:
            each = ("block", "stage") if blocks == 1 else ("blocks", "stages")
            raise ConstraintError(
                f"constraint pp={wish.pp or 1}, virtual={wish.virtual or 1}: {stages} stages, but "
                f"the model can be cut into {blocks} {each[0]} at most; use {blocks} {each[1]}"
                + (" or fewer" if blocks > 1 else "")
            )

    def _boundary_names(self) -> tuple[str, ...]:
        """First operators of the modules that begin stages."""
        order = {n.name: i for i, n in enumerate(self.graph.nodes)}
        names: list[str] = []
        for module in self.constraints.boundaries:
            name = module_start(self.graph, module)
            if name is None:
                raise ConstraintError(
                    f"constraint stages: {module!r} runs nothing in the forward pass; "
                    "name a module whose call computes something"
                )
            if names and order[name] <= order[names[-1]]:
                raise ConstraintError(
                    f"constraint stages: {module!r} runs before the module named ahead of it; "
                    "name modules in the order in which they run"
                )
            names.append(name)
        return tuple(names)

    @property
    def batch_size(self) -> int:
        """Samples of a step; 1 if no call argument has a batch dim."""
        if not self._batch_size:
            dims = self.data_axes.batch_dims(1) if self._has_batch() else {}
            inputs = self.graph.input_map()
            sizes = [(inputs[name].meta, dim) for name, dim in dims.items()]
            found = [meta.shape[dim] for meta, dim in sizes if meta is not None]
            self._batch_size = found[0] if found else 1
        return self._batch_size

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return any(o.kind is OutputKind.GRAD for o in self.graph.outputs)

    @property
    def stage_levels(self) -> tuple[int, ...]:
        """ZeRO level of every stage if the user gave one for each."""
        wish = self.constraints.zero
        return wish if isinstance(wish, tuple) else ()

    def zero_levels(self, dp: int) -> tuple[int, ...]:
        """ZeRO levels that stages may have, fastest first.

        Args:
            dp: Data ranks.
        """
        wish = self.constraints.zero
        if wish is not None:
            return (wish,) if isinstance(wish, int) else tuple(dict.fromkeys(wish))
        if not self.trains:  # there is only the parameters' own memory to spread
            return (0, 3) if dp > 1 else (0,)
        return (1, 0, 2, 3) if dp > 1 else (0,)

    @property
    def has_loss(self) -> bool:
        """Whether the backward starts inside the step, at the program's own loss."""
        return any(o.kind is OutputKind.LOSS for o in self.graph.outputs)

    @property
    def gathered(self) -> frozenset[str]:
        """Outputs that a call returns whole: all, unless the program has its loss for training."""
        if self.is_interleavable:
            return frozenset()
        return frozenset(o.target for o in self.graph.outputs_of(OutputKind.OUTPUT))

    @property
    def is_interleavable(self) -> bool:
        """Whether forwards and backwards may alternate."""
        return self.trains and self.has_loss

    def _check_schedule(self) -> None:
        """Refuse an order of forwards and backwards that the program can't have."""
        wish, warmup = self.constraints.schedule, self.constraints.warmup
        if warmup is not None and not self.is_interleavable:
            why = "the model gives no loss of its own" if self.trains else "inference has none"
            raise ConstraintError(
                f"constraint warmup={warmup}: it is for forwards and backwards in turn, and {why}; "
                + ("pass loss=, or leave it out" if self.trains else "leave it out")
            )
        if wish is None:
            return
        if self.trains and wish is ScheduleKind.FORWARD:
            raise ConstraintError(
                "constraint schedule='forward': it has no backward, and the model is to be "
                "trained; leave schedule out, or compile with mode='inference'"
            )
        if not self.trains and wish is not ScheduleKind.FORWARD:
            raise ConstraintError(
                f"constraint schedule={wish.value!r}: inference has forwards only; leave it out"
            )
        if self.trains and not self.has_loss and wish is not ScheduleKind.GPIPE:
            raise ConstraintError(
                f"constraint schedule={wish.value!r}: the model gives no loss of its own, so all "
                "forwards run before the first backward; pass loss=, or leave schedule out"
            )

    @property
    def batch_words(self) -> str:
        """The batch for people: its size, and the dim that stands for it if samples are one."""
        stand_in = self.batch_stand_in
        number = self.batch_size
        return f"the {number} of {stand_in}" if stand_in else f"the batch of {number}"

    @property
    def batch_stand_in(self) -> str:
        """The dim that stands for a batch of one sample, in words; "" if there are more."""
        dims = self.data_axes.batch_dims(1) if self._has_batch() else {}
        inputs = self.graph.input_map()
        for name, dim in dims.items():
            meta = inputs[name].meta
            if meta is not None and dim > 0 and meta.shape[0] == 1:
                return f"dim {dim} of {inputs[name].target!r}, which stands for the batch of 1"
        return ""

    def _has_batch(self) -> bool:
        return bool(self.data_axes.batch_factors)

    def _batch_factors(self) -> Mapping[str, frozenset[str]]:
        """Factors that ``tp`` leaves to ``dp``; none if the sequence is taken for the batch."""
        if not self._has_batch() or 0 not in self.data_axes.batch_dims(1).values():
            return {}
        return self.data_axes.batch_factors

    def data(self, num_microbatches: int, dp: int) -> DataSplits:
        """Splits over ``mb`` and ``dp``.

        Raises:
            ShardingError: The batch can't be cut so.
        """
        key = (num_microbatches, dp)
        if key not in self._data:
            self._data[key] = self.data_axes.split(
                num_microbatches=num_microbatches,
                dp=dp,
                microbatch_statistics=self.constraints.microbatch_statistics,
                experts=self.experts,
            )
        return self._data[key]

    def slowest_group(self, mesh: MeshShape, axis: str) -> tuple[int, ...]:
        """:func:`~cost_models.base.slowest_group` of the cluster, found once."""
        if axis == "pp":  # what lies between neighbours is their distance alone
            mesh = replace(mesh, dp=mesh.dp * mesh.tp, tp=1)
        key = (mesh, axis)
        if key not in self._groups:
            self._groups[key] = slowest_group(self.cluster, mesh, axis)
        return self._groups[key]

    def least_share(self, pp: int) -> float:
        """What is left at least of the seconds of a pipeline whose ranks share cores.

        Operators are priced as if all ranks were busy all the time; while some wait for others,
        those get the cores (:meth:`~cost_models.base.HostCosts.shared_step_s`).
        """
        if pp == 1 or not isinstance(self.model, HostCosts):
            return 1.0
        return self.model.shared_step_s(1.0, [0.0], 0.0)

    def prices(self, sizes: tuple[int, int, int]) -> PriceList:
        """Prices with ``(mb, dp, tp)`` of these sizes."""
        if sizes not in self._prices:
            axes = [(a, n) for a, n in zip(("mb", "dp", "tp"), sizes, strict=True) if n > 1]
            mesh = MeshShape(dp=sizes[1], tp=sizes[2])
            groups = {a: self.slowest_group(mesh, a) for a, _ in axes if a != "mb"}
            known = None if self._before is None else self._before._prices.get(sizes)
            if known is None or not self._has_links_of(known.groups, groups):
                known = PriceList(
                    self.model, tuple(a for a, _ in axes), tuple(n for _, n in axes), groups
                )
            self._prices[sizes] = known
        return self._prices[sizes]

    def _has_links_of(
        self, theirs: Mapping[str, Sequence[int]], own: Mapping[str, Sequence[int]]
    ) -> bool:
        """Whether groups of the cluster before have the links of groups of this one."""
        assert self._before is not None
        before, cluster = self._before.cluster, self.cluster
        return all(
            before.links_for(theirs[axis]) == cluster.links_for(own[axis])
            and before.link_for(theirs[axis]) == cluster.link_for(own[axis])
            for axis in own
        )

    def request(self, sizes: tuple[int, int, int], zero_level: int) -> SplitsRequest:
        """What a splits problem of one mesh is made from."""
        key = (*sizes, zero_level)
        if key not in self._requests:
            before = self._before
            if before and key in before._requests and self.has_prices_of(before, sizes):
                self._requests[key] = before._requests[key]
                return self._requests[key]
            data = self.data(sizes[0], sizes[1]).choices
            self._requests[key] = SplitsRequest(
                graph=self.graph,
                structure=self._structure(sizes),
                signatures=self.signatures,
                data=data,
                axis_sizes=sizes,
                zero_level=zero_level,
                optimizer=self.resident_optimizer,
                batch_factors=self._batch_factors(),
                fixed=self.fixed,
                sequence_parallel=self.constraints.sequence_parallel,
                optimizer_s_per_byte=self.optimizer_s_per_byte,
                joint_dp=self._joint_dp.setdefault(self._data_key(sizes), {}),
            )
        return self._requests[key]

    def _structure(self, sizes: tuple[int, int, int]) -> SplitsStructure:
        """Structures differ by which splits there are over ``mb`` and ``dp``, not by how far."""
        data, key = self.data(sizes[0], sizes[1]), self._data_key(sizes)
        if key not in self._structures:
            self._structures[key] = split_structure(
                self.graph,
                self.chain,
                data.choices,
                has_mb=sizes[0] > 1,
                fixed=self.fixed,
                gather_outputs=self.gathered,
                facts=self._graph_facts(),
            )
        return self._structures[key]

    def _data_key(self, sizes: tuple[int, int, int]) -> tuple[int, int]:
        """Which splits there are over ``mb`` and ``dp``: equal ones are one object."""
        data = self.data(sizes[0], sizes[1])
        return id(data.mb), id(data.dp)

    def _graph_facts(self) -> GraphFacts:
        """What all structures share."""
        if self._facts is None:
            self._facts = graph_facts(self.graph, self.gathered)
        return self._facts

    def problem(self, sizes: tuple[int, int, int], zero_level: int) -> SplitsProblem:
        """The splits problem of one mesh, without a memory bound."""
        key = (*sizes, zero_level)
        if key not in self._problems:
            before = self._before
            if before and key in before._problems and self.has_prices_of(before, sizes):
                self._problems[key] = before._problems[key]
                return self._problems[key]
            request = self.request(sizes, zero_level)
            self._problems[key] = build_splits(request, self.prices(sizes))
        return self._problems[key]


def optimizer_s_per_byte(model: CostModel, optimizer: str) -> float:
    """Seconds of an optimizer step per byte of stored parameter: it streams all of the state.

    Where the step was measured it is what a further byte takes; what a step and a tensor take
    whatever their size is left to the exact figures.
    """
    probe = TensorMeta((PROBE_ELEMENTS,), "float32")
    if isinstance(model, HostCosts):
        whole_s, empty_s = (model.optimizer_time_s(optimizer, 1, b) for b in (probe.bytes, 0.0))
        if whole_s is not None and empty_s is not None:
            return max(0.0, whole_s - empty_s) / probe.bytes
    add_s = model.op_time_s("aten.add.Tensor", (Ref("0"), Ref("1")), [probe, probe], probe)
    state = optimizer_state_bytes(optimizer, probe) / probe.bytes
    # reads parameter, gradient and state, writes parameter and state; an add touches three
    return add_s / (3 * probe.bytes) * (3 + 2 * state)
