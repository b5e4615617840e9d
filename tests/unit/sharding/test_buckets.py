"""Which collectives share a bucket, in what order, and what they compute."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from autopar.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorMeta
from autopar.plan.types import MeshShape
from autopar.runtime.executor import execute, flatten
from autopar.runtime.lockstep import Traffic, run_lockstep
from autopar.sharding.buckets import full_bucket, in_buckets
from autopar.sharding.emitter import Emitter
from autopar.sharding.placement import Layout, P, R, Shard, local_shape
from cost_models.liveness import peak_transient_bytes
from cost_models.storage import storages
from passes.base import PassContext
from passes.pipeline import build

SIZES = {"dp": 3, "tp": 2}
Moved = Sequence[tuple[tuple[int, ...], str, Layout, Layout]]
UNEVEN: Moved = [
    ((5, 7), "float64", (P, R), (R, R)),
    ((), "float64", (P, R), (R, R)),
    ((4,), "float64", (P, P), (R, R)),
    ((5, 7), "float64", (P, R), (Shard(0), R)),
    ((2, 5, 3), "float64", (P, R), (Shard(1), R)),
    ((7, 4), "float64", (P, P), (Shard(0), Shard(1))),
    ((5, 7), "float64", (Shard(0), R), (R, R)),
    ((2, 8, 3), "float64", (Shard(1), R), (R, R)),
    ((3, 8), "float64", (R, Shard(1)), (R, R)),
    ((6,), "float32", (P, R), (R, R)),
    ((2, 2), "float32", (P, R), (R, R)),
    ((0, 3), "float64", (P, R), (R, R)),
]


def program(moved: Moved) -> Graph:
    """A program that brings each tensor from one layout to another."""
    emitter = Emitter(tuple(SIZES), tuple(SIZES.values()))
    inputs, outputs = [], []
    for index, (shape, dtype, have, want) in enumerate(moved):
        name = f"in{index}"
        local = TensorMeta(local_shape(shape, have, emitter.sizes), dtype)
        inputs.append(Input(name, InputKind.GRAD, name, local))
        ref = emitter.reshard(emitter.bind(name, local), shape, have, want)
        outputs.append(Output(OutputKind.GRAD, name, ref))
    coords = [Input(f"coord_{a}", InputKind.COORD, a, None) for a in sorted(emitter.used_coords)]
    return Graph((*inputs, *coords), tuple(emitter.nodes), tuple(outputs))


def run(graph: Graph) -> tuple[list[list[torch.Tensor]], Traffic]:
    """The results of every rank; operands are random and other ones on each rank."""
    loaded = flatten(build(PassContext(program="p", source=graph, axis_sizes=SIZES)), graph, "p")
    mesh = MeshShape(**SIZES)
    results: list[list[torch.Tensor]] = [[] for _ in range(mesh.num_ranks)]

    def rank_of(rank: int):
        values: list[object] = []
        generator = torch.Generator().manual_seed(rank)
        coordinate = dict(zip(("pp", "dp", "tp"), mesh.coordinate(rank), strict=True))
        for item in graph.inputs:
            if item.meta is None:
                values.append(coordinate[item.target])
            else:
                dtype = getattr(torch, item.meta.dtype)
                values.append(torch.randn(item.meta.shape, generator=generator, dtype=dtype))
        results[rank] = yield from execute(loaded, values)

    traffic = run_lockstep([rank_of(rank) for rank in range(mesh.num_ranks)], mesh)
    return results, traffic


@pytest.mark.parametrize("most_bytes", [150, 400, 10**9])
def test_a_program_in_buckets_computes_the_same_bits(most_bytes: int) -> None:
    alone = program(UNEVEN)
    together = in_buckets(alone, SIZES, most_bytes)
    wanted, before = run(alone)
    found, after = run(together)
    for rank, (one, other) in enumerate(zip(wanted, found, strict=True)):
        for index, (x, y) in enumerate(zip(one, other, strict=True)):
            assert x.shape == y.shape, (rank, UNEVEN[index])
            assert torch.equal(x, y), (rank, UNEVEN[index])
            assert y.is_contiguous()
    assert sum(after.collectives.values()) < sum(before.collectives.values())
    # padding travels along, nothing else does; the sums of floats fall where they fell
    assert sum(after.collective_bytes.values()) <= 1.5 * sum(before.collective_bytes.values())


def test_kinds_axes_dtypes_and_levels_have_buckets_of_their_own() -> None:
    found = in_buckets(program(UNEVEN), SIZES, 10**9)
    packs = [n for n in found.nodes if n.op == "local.pack"]
    dtypes = [n.metas()[0].dtype for n in packs]
    assert dtypes.count("float32") == 1
    ops = [n.op for n in found.nodes if n.op.startswith("comm.")]
    # all that waits for a sum over tp is summed over dp after it
    assert ops.index("comm.reduce_scatter") < len(ops) - 1
    for node in found.nodes:
        if node.op == "local.pack":
            operands = [found.metas()[name] for name in node.refs()]
            assert len({m.dtype for m in operands if isinstance(m, TensorMeta)}) == 1


def _all_reduces(sizes: Sequence[int]) -> Graph:
    return program([((n,), "float32", (P, R), (R, R)) for n in sizes])


def test_buckets_are_bounded_and_large_tensors_go_alone_and_uncopied() -> None:
    found = in_buckets(_all_reduces([10, 10, 500, 10, 10, 10]), SIZES, 120)
    reduced = [found.metas()[n.refs()[0]].shape for n in found.nodes if n.op == "comm.all_reduce"]
    assert reduced == [(500,), (1, 30), (1, 20)]


def test_the_next_bucket_is_under_way_when_one_is_taken_apart() -> None:
    found = in_buckets(_all_reduces([10] * 6), SIZES, 80)
    order = [n.op for n in found.nodes if n.op in ("comm.all_reduce", "local.unpack")]
    reduce, unpack = "comm.all_reduce", "local.unpack"
    assert order == [reduce, reduce, unpack, reduce, unpack, unpack]


def test_what_is_alone_in_its_bucket_is_left_as_it_is() -> None:
    graph = program([((4,), "float32", (P, R), (R, R)), ((4,), "float64", (P, R), (R, R))])
    assert in_buckets(graph, SIZES) is graph
    none = Graph((), (), ())
    assert in_buckets(none, SIZES) is none


def test_gradients_are_views_of_their_bucket_and_take_no_memory_of_their_own() -> None:
    graph = _all_reduces([100] * 8)
    found = in_buckets(graph, SIZES, 10**9)
    memory = storages(found)
    outputs = {memory.of[o.value.name] for o in found.outputs if o.value}
    assert len(outputs) == 1
    freed = (InputKind.GRAD,)
    most = peak_transient_bytes(found, freed_inputs=freed)
    assert most <= 8 * 400  # the bucket, beside the gradients that it is made of


@pytest.mark.parametrize("moved", [*UNEVEN[:2], *UNEVEN[3:5], *UNEVEN[6:9]])
def test_the_share_of_a_full_bucket_is_by_bytes(moved: tuple[object, ...]) -> None:
    graph = program([moved])  # type: ignore[list-item]
    comm = next(n for n in graph.nodes if n.op.startswith("comm."))
    operand = graph.metas()[comm.refs()[0]]
    assert isinstance(operand, TensorMeta)
    found = full_bucket(comm, operand, SIZES)
    assert found is not None
    bucket, share = found
    done = [n for n in bucket.nodes if n.op.startswith("comm.")]
    assert [n.op for n in done] == [comm.op]
    metas = bucket.metas()

    def payload(node: Node, table: dict[str, object]) -> int:
        return max(m.bytes for m in (table[node.refs()[0]], node.meta))  # type: ignore[union-attr]

    padded = payload(comm, graph.metas())  # type: ignore[arg-type]
    assert share * payload(done[0], metas) == pytest.approx(padded, rel=0.45)  # type: ignore[arg-type]
    assert 24 * 2**20 < payload(done[0], metas) <= 25 * 2**20  # type: ignore[arg-type]


def test_a_bucket_is_only_priced_for_what_may_share_one() -> None:
    meta = TensorMeta((8, 4), "float32")
    whole = Node("x", "comm.all_to_all", (Ref("y"), 0, 1, "dp", 24), meta)
    assert full_bucket(whole, meta, SIZES) is None
    large = TensorMeta((2**23,), "float32")
    assert (
        full_bucket(Node("x", "comm.all_reduce", (Ref("y"), "sum", "dp"), large), large, SIZES)
        is None
    )
