"""Batches of which every rank holds its own rows alone compute what the global batch computes."""

from __future__ import annotations

import re
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import autopar
from autopar.capture.reference import whole_parameters
from autopar.errors import ConfigError, InputError
from autopar.ir.graph import InputKind
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.runtime.loading import Reader, ShardLoader
from autopar.runtime.shares import LocalShare, ShareOrigin, check_origin, needed_rows
from autopar.runtime.simulate import simulate_step
from autopar.sharding.build import localize
from tests.equivalence.harness import actions_for, fuzz_decisions, problem_of, worst_difference
from tests.zoo import build

ORIGIN = ShareOrigin(plan="p", rank=0, batch="b")
SAMPLES, LENGTH = 20, 6


class Numbered(Dataset):
    """Sample ``i`` is a row of ``i``; remembers what was read."""

    def __init__(self, size=SAMPLES):
        self.size = size
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return {"input_ids": torch.full((LENGTH,), index), "weight": torch.tensor(float(index))}


def rows_of_half(rank):
    """Rows of one of two data ranks: the first or the second half of the batch."""

    def rows(size):
        half = -(-size // 2)
        return tuple(range(half) if rank == 0 else range(half, size))

    return rows


def reader(rank, rows=None):
    return Reader(plan="p", rank=rank, rows=rows or rows_of_half(rank))


def shares_of(batch, rows):
    return {
        name: LocalShare(tensor[list(rows)], rows, 0, tensor.shape[0], ORIGIN)
        for name, tensor in batch.items()
    }


def ids_of(batch):
    return batch["input_ids"].local_rows()[:, 0].tolist()


# ------------------------------------------------------------ the same numbers
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("gpt2", (1, 2, 1, 1)),
        ("gpt2", (2, 2, 1, 2)),
        ("llama", (4, 2, 1, 1)),
        ("llama", (2, 2, 2, 2)),
        ("t5", (2, 2, 1, 3)),
        ("vit", (2, 4, 1, 1)),
    ],
)
def test_shares_of_a_batch_compute_what_the_whole_batch_computes(name, numbers):
    microbatches, dp, tp, stages = numbers
    problem = problem_of(*build(name))  # 8 samples with uneven counts of valid labels
    decisions = fuzz_decisions(
        problem, microbatches=microbatches, dp=dp, tp=tp, stages=stages, seed=1
    )
    programs = localize(problem.graph, decisions, problem.signatures)
    mesh = MeshShape(dp=dp, tp=tp, pp=stages)
    batch = problem.of_kind(InputKind.USER)
    rows = [needed_rows(programs, mesh, rank, 8) for rank in range(mesh.num_ranks)]
    step = simulate_step(
        programs,
        mesh,
        actions_for(programs, mesh, microbatches, ScheduleKind.ONE_F_ONE_B, (0,) * stages),
        params=whole_parameters(problem.graph, problem.values),
        inputs=[shares_of(batch, found) for found in rows],
        buffers=problem.of_kind(InputKind.BUFFER),
        constants=problem.of_kind(InputKind.CONSTANT),
        rng_key=torch.tensor(problem.rng_key),
    )
    ratio, tensor = worst_difference(step, problem.reference())
    assert ratio <= 1.0, tensor
    assert set().union(*rows) == set(range(8))
    if microbatches == 1:
        assert max(map(len, rows)) == 8 // dp


def test_each_rank_needs_the_rows_of_its_data_coordinate_in_every_microbatch():
    problem = problem_of(*build("vit"))  # its labels are read by the loss alone: no counts
    decisions = fuzz_decisions(problem, microbatches=2, dp=2, tp=2, stages=1, seed=0)
    programs = localize(problem.graph, decisions, problem.signatures)
    mesh = MeshShape(dp=2, tp=2)
    found = [needed_rows(programs, mesh, rank, 8) for rank in range(4)]
    assert found[0] == found[1], "ranks of one tensor group read the same"
    assert found[2] == found[3]
    assert set(found[0]) >= {0, 1, 4, 5}
    assert set(found[2]) >= {2, 3, 6, 7}
    assert needed_rows(programs, mesh, 4, 8) == (), "an idle rank reads nothing"
    assert needed_rows(programs, mesh, 2, 7) == tuple(range(7)), "how it is cut is not known yet"
    assert needed_rows(programs, mesh, 2, 12) == tuple(range(12)), "in more micro-batches"


def test_a_stage_that_reads_no_argument_needs_no_rows():
    problem = problem_of(*build("gpt2", layers=3))
    decisions = fuzz_decisions(problem, microbatches=1, dp=1, tp=1, stages=3, seed=2)
    programs = localize(problem.graph, decisions, problem.signatures)
    reading = {s for stages in programs.user_stages.values() for s in stages}
    assert reading == {0, 2}
    mesh = MeshShape(pp=3)
    assert [len(needed_rows(programs, mesh, rank, 8)) for rank in range(3)] == [8, 0, 8]


# ------------------------------------------------------------ a share is no batch
def test_computing_on_a_share_is_refused_and_moving_it_is_not():
    share = LocalShare(torch.arange(6).reshape(2, 3), (0, 3), 0, 4, ORIGIN)
    assert share.shape == (4, 3)
    moved = share.to(torch.int32)
    assert isinstance(moved, LocalShare)
    assert moved.local_rows().dtype == torch.int32
    assert moved.rows == (0, 3)
    assert repr(share) == "LocalShare(2 of 4 rows of int64[4, 3])"
    for compute in (lambda: share + 1, share.sum, lambda: share[0], lambda: share.ne(-100)):
        with pytest.raises(InputError, match="a share has only the rows that this rank needs"):
            compute()


def test_a_share_of_another_plan_or_rank_is_refused():
    share = LocalShare(torch.zeros(2, 3), (0, 1), 0, 4, ORIGIN)
    check_origin({"x": share}, plan="p", rank=0)
    with pytest.raises(InputError, match="'x' is a share made for rank 0 under plan p, this is ra"):
        check_origin({"x": share}, plan="p", rank=1)
    with pytest.raises(InputError, match="this is rank 0 under plan q"):
        check_origin({"x": share}, plan="q", rank=0)


# ------------------------------------------------------------ the loader
@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_read_each_row_once_and_see_batches_of_the_global_size(workers):
    seen = []
    for rank in range(2):
        data = Numbered()
        source = DataLoader(data, batch_size=8, shuffle=True, num_workers=workers)
        loader = ShardLoader(source, reader(rank), seed=3)
        batches = list(loader)
        assert [tuple(b["input_ids"].shape) for b in batches] == [(8, 6), (8, 6), (4, 6)]
        assert [tuple(b["weight"].shape) for b in batches] == [(8,), (8,), (4,)]
        seen.append([ids_of(b) for b in batches])
        if not workers:  # one sample more, for the form of a batch
            assert len(data.read) == SAMPLES // 2 + 1
    assert [len(a) + len(b) for a, b in zip(*seen, strict=True)] == [8, 8, 4]
    first, second = (list(chain(*part)) for part in seen)
    assert sorted(first + second) == list(range(SAMPLES))
    assert first != sorted(first)


def test_the_order_follows_from_seed_and_epoch_alone():
    def order(seed, epoch):
        loader = ShardLoader(DataLoader(Numbered(), batch_size=8, shuffle=True), reader(0),
                             seed=seed)  # fmt: skip
        loader.set_epoch(epoch)
        torch.manual_seed(torch.randint(0, 1000, ()).item())
        return [ids_of(b) for b in loader]

    assert order(0, 0) == order(0, 0)
    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_epochs_follow_one_another_without_set_epoch():
    loader = ShardLoader(DataLoader(Numbered(), batch_size=8, shuffle=True), reader(0))
    first, second = [[ids_of(b) for b in loader] for _ in range(2)]
    assert first != second
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert [ids_of(b) for b in loader] == first


def test_drop_last_and_the_number_of_batches_are_the_loaders():
    whole = ShardLoader(DataLoader(Numbered(), batch_size=8), reader(0))
    cut = ShardLoader(DataLoader(Numbered(), batch_size=8, drop_last=True), reader(0))
    assert (len(whole), len(cut)) == (3, 2)
    assert (len(list(whole)), len(list(cut))) == (3, 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_resumed_repeats_and_skips_no_sample(workers, ranks):
    """Saved on two ranks after five batches, inside the second epoch; resumed on one or two."""

    def make(rows, workers=0):
        source = DataLoader(Numbered(), batch_size=8, shuffle=True, num_workers=workers)
        return ShardLoader(source, reader(0, rows), seed=5)

    def everything(size):
        return tuple(range(size))

    unbroken = make(everything)
    wanted = [ids_of(b) for _ in range(3) for b in unbroken]
    first = make(rows_of_half(0), workers)
    given = [ids_of(batch) for batch in first]
    for batch in first:
        given.append(ids_of(batch))
        if len(given) == 5:
            break  # its workers have read further by now
    state = first.state_dict()
    assert state == {"epoch": 1, "batches": 2, "seed": 5, "samples": SAMPLES}
    parts = []
    for rank in range(ranks):
        resumed = make(everything if ranks == 1 else rows_of_half(rank), workers)
        resumed.load_state_dict(state)
        resumed.set_epoch(1)  # as a loop over epochs does
        parts.append([ids_of(b) for b in resumed] + [ids_of(b) for b in resumed])
    found = [list(chain(*pieces)) for pieces in zip(*parts, strict=True)]
    assert found == wanted[5:]


def test_a_position_in_other_data_is_refused():
    state = ShardLoader(DataLoader(Numbered(20), batch_size=8), reader(0)).state_dict()
    other = ShardLoader(DataLoader(Numbered(21), batch_size=8), reader(0))
    with pytest.raises(ConfigError, match="saved with samples 20, this one has 21"):
        other.load_state_dict(state)


def test_a_rank_without_rows_knows_the_form_of_a_batch():
    data = Numbered()
    loader = ShardLoader(DataLoader(data, batch_size=8), reader(1, lambda size: ()))
    batch = next(iter(loader))
    assert batch["input_ids"].shape == (8, 6)
    assert batch["input_ids"].local_rows().shape == (0, 6)
    assert data.read == [0], "one sample, for its form"


def test_what_does_not_grow_with_the_batch_is_given_whole():
    def collate(samples):
        stacked = torch.stack([s["input_ids"] for s in samples], dim=1)
        return {"ids": stacked, "positions": torch.arange(LENGTH), "kind": "text"}

    loader = ShardLoader(DataLoader(Numbered(), batch_size=8, collate_fn=collate), reader(1))
    batch = next(iter(loader))
    assert batch["ids"].batch_dim == 1
    assert batch["ids"].shape == (LENGTH, 8)
    assert batch["ids"].local_rows()[0].tolist() == [4, 5, 6, 7]
    assert type(batch["positions"]) is torch.Tensor
    assert batch["kind"] == "text"


def test_shares_of_one_batch_have_one_origin_and_those_of_another_another():
    loaders = [ShardLoader(DataLoader(Numbered(), batch_size=8), reader(r)) for r in range(2)]
    pairs = [(a["input_ids"].origin, b["input_ids"].origin) for a, b in zip(*loaders, strict=True)]
    assert all(a.batch == b.batch for a, b in pairs)
    assert len({a.batch for a, _ in pairs}) == 3
    assert [(o.plan, o.rank) for o in pairs[0]] == [("p", 0), ("p", 1)]


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(4)


def packed(samples):
    return {"tokens": torch.cat([s["input_ids"] for s in samples])}


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (lambda: [1, 2], "the loader is a list; give a torch.utils.data.DataLoader"),
        (lambda: DataLoader(Stream(), batch_size=2), "Stream has no rows to choose from"),
        (lambda: DataLoader(Numbered(), batch_size=None), "Numbered has no rows to choose from"),
        (
            lambda: DataLoader(
                Numbered(), batch_size=2, sampler=DistributedSampler(Numbered(), 2, 0)
            ),
            "has a DistributedSampler, which cuts the data once more",
        ),
    ],
)
def test_a_loader_that_has_no_global_batches_is_refused(loader, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        ShardLoader(loader(), reader(0))


def test_rows_that_belong_to_no_single_sample_are_refused():
    loader = ShardLoader(DataLoader(Numbered(), batch_size=8, collate_fn=packed), reader(0))
    with pytest.raises(InputError, match=r"'tokens' has \[6\] for one sample and \[12\] for two"):
        next(iter(loader))


def test_a_model_without_a_running_plan_is_refused():
    model, _ = build("gpt2")
    with pytest.raises(ConfigError, match="nobody knows which rows this rank needs"):
        autopar.shard_loader(DataLoader(Numbered(), batch_size=8), model)


def test_one_device_trains_on_shares_as_on_batches():
    model, batch = build("gpt2")
    twin, _ = build("gpt2")
    samples = [{name: tensor[i] for name, tensor in batch.items()} for i in range(8)]
    model = autopar.compile(model, devices=1, inputs=batch)
    loader = autopar.shard_loader(DataLoader(samples, batch_size=4), model)
    for position, share in enumerate(loader):
        part = {k: v[4 * position :][:4] for k, v in batch.items()}
        loss, wanted = model(**share).loss, twin(**part).loss
        loss.backward(), wanted.backward()
        assert torch.allclose(loss, wanted, rtol=1e-6)
    named = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, named[name].grad, rtol=1e-4, atol=1e-6), name
