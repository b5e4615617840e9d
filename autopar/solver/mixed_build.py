"""From a model and a cluster of several kinds of devices to a :class:`MixedProblem`.

Every class is analysed as a cluster of its own: splits of operators are chosen and blocks priced
for each ``tp`` and each number of samples on a rank, with the class's own devices. Data ranks
inside a stage multiply that without another solution: they spread optimizer state and stored
parameters (ZeRO 1) in proportion to what :mod:`cost_models.memory` says of the block's parameters,
and add a reduce-scatter of gradients and an all-gather of parameters per step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster, Machine
from autopar.errors import ConstraintError, InfeasibleError, ShardingError
from autopar.ir.graph import Graph, InputKind, TensorMeta
from autopar.ir.precision_rules import sum_dtype
from autopar.plan.types import MeshShape
from autopar.solver.analysis import Analysis
from autopar.solver.block_costs import BlockTable, BlockTables, Sizes
from autopar.solver.constraints import Constraints
from autopar.solver.lanes import Lanes
from autopar.solver.mixed_pipelines import never, unit_of
from autopar.solver.mixed_problem import DeviceClass, MixedProblem, StageKind
from autopar.solver.recompute_blocks import BlockLocalizer
from autopar.solver.splits import solve_splits
from autopar.solver.splits_problem import SplitsProblem
from autopar.solver.stages_problem import BlockMenu
from cost_models.base import CostModel, slowest_group
from cost_models.memory import StateBytes, parameter_state_bytes

Prices = Callable[[Cluster], CostModel]

NO_WAY = (ShardingError, ConstraintError, InfeasibleError)
SURE_SIZES = (1, 2)  # samples on a rank that are always priced, to see whether more are faster
LEAST_GAIN = 0.02  # more samples on a rank are tried while a sample gets faster by this share
MAX_SIZES = 8  # sizes of a pipeline's micro-batches
MAX_PIPELINES = 6
MAX_STAGES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Splits and menus of one class, ``tp`` and number of samples on a rank.

    Attributes:
        problem: The splits problem.
        options: Its solution.
        table: Menus of all blocks.
    """

    problem: SplitsProblem
    options: tuple[int, ...]
    table: BlockTable

    @property
    def sample_s(self) -> float:
        """Seconds of the whole chain at its fastest, per micro-batch."""
        return sum(min(o.total_s for o in menu.options) for menu in self.table.menus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A problem with what a plan needs beside it.

    Attributes:
        problem: The problem.
        analyses: By class.
        priced: (class, tp, samples on a rank) -> splits and menus.
        homes: Parameter input -> its block.
    """

    problem: MixedProblem
    analyses: tuple[Analysis, ...]
    priced: dict[tuple[int, int, int], Priced]
    homes: dict[str, int]

    def of_kind(self, kind: StageKind) -> Priced:
        """Splits and menus of a kind."""
        return self.priced[kind.device_class, kind.tp, kind.samples // kind.dp]


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of whole parameters by block: all, gradients and compute copies."""

    total: list[int]
    grads: list[int]
    params: list[int]


@dataclass(slots=True)
class MixedBuilder:
    """Builds problems for one model, and keeps the prices of classes between clusters.

    Attributes:
        graph: The joint graph.
        constraints: What holds for blocks: recomputing, placements, sequence parallelism.
        optimizer: Assumed optimizer.
        prices: Cost model of a cluster.
    """

    graph: Graph
    constraints: Constraints
    optimizer: str
    prices: Prices
    _base: Analysis | None = None
    _analyses: dict[Cluster, Analysis] = field(default_factory=dict)
    _tables: dict[Cluster, BlockTables] = field(default_factory=dict)
    _priced: dict[tuple[Machine, int, int, int], Priced | None] = field(default_factory=dict)
    _splits: dict[
        tuple[Machine, int, int, int], tuple[Sizes, SplitsProblem, tuple[int, ...]] | None
    ] = field(default_factory=dict)
    _lanes: Lanes = field(default_factory=Lanes)
    _localizer: BlockLocalizer | None = None
    _whole: dict[int, _States] = field(default_factory=dict)

    def build(
        self,
        cluster: Cluster,
        limit_bytes: int | None = None,
        *,
        is_late: Callable[[], bool] = never,
        wanted: Collection[tuple[int, int]] | None = None,
    ) -> Built:
        """The problem on a cluster.

        Args:
            cluster: All machines.
            limit_bytes: Memory of a device of any class; what each has if None.
            is_late: Whether to price no more sizes of micro-batches than one of each kind.
            wanted: ``tp`` and samples on a rank that are priced; all that may be of use if None.

        Raises:
            InfeasibleError: No way to run the model's blocks was found on any class.
        """
        classes = classes_of(cluster, limit_bytes)
        alone = [
            Cluster(machines=(cluster.machines[cls.machines[0]],) * len(cls.machines))
            for cls in classes
        ]
        analyses = [self._analysis(own) for own in alone]
        with self._lanes.open():
            priced = self._all_priced(classes, alone, is_late, wanted)
        if not priced:
            raise InfeasibleError(f"no block of the model can be run on {cluster}")
        chain = analyses[0].chain
        homes = parameter_homes(analyses[0])
        problem = MixedProblem(
            cluster=cluster,
            model=self.prices(cluster),
            classes=classes,
            kinds=tuple(_kinds(classes, analyses, priced, homes, self._whole)),
            batch=analyses[0].batch_size,
            gradient_bytes=gradient_bytes(analyses[0], homes),
            max_pipelines=min(MAX_PIPELINES, cluster.num_devices),
            max_stages=min(MAX_STAGES, len(chain.blocks)),
            stand_in=analyses[0].batch_stand_in,
        )
        return Built(problem=problem, analyses=tuple(analyses), priced=priced, homes=homes)

    def _all_priced(
        self,
        classes: Sequence[DeviceClass],
        alone: Sequence[Cluster],
        is_late: Callable[[], bool],
        wanted: Collection[tuple[int, int]] | None,
    ) -> dict[tuple[int, int, int], Priced]:
        """By class, ``tp`` and samples on a rank; ``alone`` has the machines of each class."""
        ways = [
            (index, own, tp)
            for index, (cls, own) in enumerate(zip(classes, alone, strict=True))
            for tp in range(1, cls.machine_size + 1)
            if cls.machine_size % tp == 0
        ]
        if wanted is None:
            for _, own, tp in ways:
                for samples in SURE_SIZES:
                    if not is_late():
                        self._expect(own, tp, samples)
        priced: dict[tuple[int, int, int], Priced] = {}
        for index, own, tp in ways:
            if wanted is None:
                sizes = self._sizes(own, tp, is_late)
            else:
                few = sorted(n for width, n in wanted if width == tp)
                made = [(n, self._price(own, tp, n)) for n in few]
                sizes = [(n, found) for n, found in made if found is not None]
            priced.update({(index, tp, samples): found for samples, found in sizes})
        return priced

    def _analysis(self, cluster: Cluster) -> Analysis:
        if cluster not in self._analyses:
            model = self.prices(cluster)
            if self._base is None:
                self._base = Analysis(self.graph, cluster, model, self.constraints, self.optimizer)
                self._analyses[cluster] = self._base
            else:
                self._analyses[cluster] = self._base.on(cluster, model)
            if self._localizer is None:
                self._localizer = BlockLocalizer(self._base)
            analysis = self._analyses[cluster]
            self._tables[cluster] = BlockTables(analysis, self._localizer, self._lanes)
        return self._analyses[cluster]

    def _sizes(
        self, own: Cluster, tp: int, is_late: Callable[[], bool]
    ) -> list[tuple[int, Priced]]:
        """Samples on a rank, fewest first, while more of them make a sample faster."""
        batch = self._analyses[own].batch_size
        found: list[tuple[int, Priced]] = []
        samples, best_s = 1, float("inf")
        while samples <= batch and not (found and is_late()):
            if batch % samples:
                samples += 1
                continue
            made = self._price(own, tp, samples)
            if made is not None:
                each_s = made.sample_s / samples
                if each_s > best_s * (1 - LEAST_GAIN):
                    break
                best_s = each_s
                found.append((samples, made))
            samples *= 2
        return found

    def _key(self, own: Cluster, tp: int, samples: int) -> tuple[Machine, int, int, int]:
        return own.machines[0], tp, samples, self._analyses[own].batch_size

    def _split(
        self, own: Cluster, tp: int, samples: int
    ) -> tuple[Sizes, SplitsProblem, tuple[int, ...]] | None:
        """Sizes of a mesh, its splits problem and the solution; None if there is none."""
        key, analysis = self._key(own, tp, samples), self._analyses[own]
        if key not in self._splits:
            sizes = (analysis.batch_size // samples, 1, tp)
            try:
                problem = analysis.problem(sizes, 0)
                self._splits[key] = sizes, problem, solve_splits(problem).options
            except NO_WAY:
                self._splits[key] = None
        return self._splits[key]

    def _expect(self, own: Cluster, tp: int, samples: int) -> None:
        """Start menus that will be asked for, so that they are found while splits are chosen."""
        if self._analyses[own].batch_size % samples or self._key(own, tp, samples) in self._priced:
            return
        split = self._split(own, tp, samples)
        if split is not None:
            with suppress(*NO_WAY):  # told where they are asked for
                self._tables[own].expect(*split)

    def _price(self, own: Cluster, tp: int, samples: int) -> Priced | None:
        key = self._key(own, tp, samples)
        if key not in self._priced:
            split = self._split(own, tp, samples)
            self._priced[key] = None
            del self._splits[key]
            if split is not None:
                sizes, problem, options = split
                with suppress(*NO_WAY):
                    table = self._tables[own].table(sizes, problem, options)
                    self._priced[key] = Priced(problem=problem, options=options, table=table)
        return self._priced[key]


def classes_of(cluster: Cluster, limit_bytes: int | None = None) -> tuple[DeviceClass, ...]:
    """Equal machines together, in order of appearance."""
    members: dict[Machine, list[int]] = {}
    for index, machine in enumerate(cluster.machines):
        members.setdefault(machine, []).append(index)
    return tuple(
        DeviceClass(
            name=machine.device.name,
            machines=tuple(indices),
            machine_size=machine.num_devices,
            limit_bytes=limit_bytes or machine.device.usable_bytes,
            cost_per_hour=machine.device.cost_per_hour,
        )
        for machine, indices in members.items()
    )


def parameter_homes(analysis: Analysis) -> dict[str, int]:
    """Parameter input -> the first block that reads it."""
    homes: dict[str, int] = {}
    names = {i.name for i in analysis.graph.of_kind(InputKind.PARAM)}
    for node in analysis.graph.nodes:
        block = analysis.chain.block_of.get(node.name)
        for ref in analysis.refs[node.name] if block is not None else ():
            if ref in names and block is not None:
                homes[ref] = min(homes.get(ref, block), block)
    return homes


def gradient_bytes(analysis: Analysis, homes: dict[str, int]) -> tuple[int, ...]:
    """Per block, gradients of its whole parameters."""
    amounts = [0] * len(analysis.chain.blocks)
    for entry in analysis.graph.of_kind(InputKind.PARAM):
        if entry.meta is not None and entry.requires_grad and entry.name in homes:
            dtype = sum_dtype(entry.master or entry.meta.dtype)
            amounts[homes[entry.name]] += TensorMeta(entry.meta.shape, dtype).bytes
    return tuple(amounts)


def _states(analysis: Analysis, homes: dict[str, int], dp: int) -> _States:
    count = len(analysis.chain.blocks)
    found = _States([0] * count, [0] * count, [0] * count)
    known: dict[tuple[TensorMeta, str, bool], StateBytes] = {}  # many are alike
    for entry in analysis.graph.of_kind(InputKind.PARAM):
        if entry.meta is None or entry.name not in homes:
            continue
        master = entry.master or entry.meta.dtype
        key = (entry.meta, master, entry.requires_grad)
        state = known.get(key)
        if state is None:
            state = known[key] = parameter_state_bytes(
                entry.meta,
                optimizer=analysis.optimizer,
                zero_level=1 if dp > 1 else 0,
                dp=dp,
                master_dtype=master,
                requires_grad=entry.requires_grad,
            )
        at = homes[entry.name]
        found.total[at] += state.total_bytes
        found.grads[at] += state.grad_bytes
        found.params[at] += entry.meta.bytes
    return found


def _kinds(
    classes: Sequence[DeviceClass],
    analyses: Sequence[Analysis],
    priced: dict[tuple[int, int, int], Priced],
    homes: dict[str, int],
    whole: dict[int, _States],
) -> list[StageKind]:
    """Every class, ``tp``, samples on a rank and number of data ranks in whole units.

    ``whole`` keeps what states take on a number of data ranks, whatever the cluster.
    """
    batch = analyses[0].batch_size
    kinds = []
    for (c, tp, samples), found in priced.items():
        cls, analysis = classes[c], analyses[c]
        unit = unit_of(cls.num_devices, cls.machine_size)
        for dp in range(1, cls.num_devices // tp + 1):
            size = dp * samples
            if batch % size or (dp * tp) % unit:
                continue
            if dp not in whole:
                whole[dp] = _states(analysis, homes, dp)
            menus = found.table.menus
            if dp > 1:
                menus = _spread(analysis, menus, whole.setdefault(1, _states(analysis, homes, 1)),
                                whole[dp], (dp, tp))  # fmt: skip
            kinds.append(
                StageKind(
                    device_class=c,
                    dp=dp,
                    tp=tp,
                    samples=size,
                    zero_level=1 if dp > 1 else 0,
                    blocks=menus,
                    boundary_bytes=tuple(max(pair) for pair in found.table.boundary_bytes),
                )
            )
    return _fewer_sizes(kinds, analyses[0].batch_size)


def _spread(
    analysis: Analysis,
    menus: Sequence[BlockMenu],
    alone: _States,
    spread: _States,
    mesh: tuple[int, int],
) -> tuple[BlockMenu, ...]:
    """Menus of blocks whose states are spread over data ranks."""
    dp, tp = mesh
    group = slowest_group(analysis.cluster, MeshShape(dp=dp, tp=tp), "dp")
    known: dict[tuple[str, int, float], str] = {}
    found = []
    for at, menu in enumerate(menus):
        state, step_s = menu.state_bytes, menu.step_s
        if alone.total[at]:
            part = menu.state_bytes / alone.total[at]  # of the block's parameters, by tp
            state = -(-menu.state_bytes * spread.total[at] // alone.total[at])
            step_s = menu.step_s / dp
            for kind, amount in (
                ("reduce_scatter", alone.grads[at]),
                ("all_gather", alone.params[at]),
            ):
                step_s += analysis.model.collective_time_s(kind, amount * part, group)
        key = known.setdefault((menu.key, state, step_s), f"{menu.key}/{len(known)}")
        found.append(replace(menu, key=key, state_bytes=state, step_s=step_s))
    return tuple(found)


def _fewer_sizes(kinds: list[StageKind], batch: int) -> list[StageKind]:
    """A spread of the sizes of micro-batches: those that most kinds can take, all classes alike."""
    sizes = sorted({kind.samples for kind in kinds})
    if len(sizes) <= MAX_SIZES:
        return kinds
    # the pipeline needs many micro-batches: the smaller sizes are dense, the larger ones sparse
    last = len(sizes) - 1
    kept = {sizes[i * last // (MAX_SIZES - 1)] for i in range(MAX_SIZES)}
    return [kind for kind in kinds if kind.samples in kept]
