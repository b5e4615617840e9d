"""Facts about batches on real ranks, two by two: data and tensor parallel."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import autopar
from autopar.capture.tracing import capture
from autopar.errors import InputError
from autopar.plan.types import MeshShape
from autopar.runtime.loading import Reader, ShardLoader
from autopar.runtime.shares import LocalShare, ShareOrigin
from tests.dist.facts import tell
from tests.dist.ranks import RANK, WORLD
from tests.plans import hand_made_plan

# defaults, since pytest imports every file to look for doctests
SAMPLES, LENGTH, WORDS, BATCH = 20, 6, 32, 8


class Words(Dataset):
    """Made-up samples with uneven numbers of ignored labels; remembers what was read."""

    def __init__(self, shift=0):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
        self.ids = (self.ids + shift) % WORDS
        self.read = []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.read.append(index)
        labels = self.ids[index].clone()
        labels[: index % LENGTH] = -100
        return {"input_ids": self.ids[index], "labels": labels}


class Model(torch.nn.Module):
    """A language model with its loss inside: a mean over the labels that count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(WORDS, 16)
        self.inner = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, WORDS)

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.inner(self.embed(input_ids))))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        )
        return {"loss": loss, "logits": logits}


def loader_of(data, **options):
    return DataLoader(data, batch_size=BATCH, shuffle=True, **options)


def example():
    data = Words()
    rows = [data[i] for i in range(BATCH)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def compiled(mesh, microbatches=1):
    model, batch = Model(), example()
    plan = hand_made_plan(
        capture(model, (), batch), mesh, num_microbatches=microbatches, num_devices=WORLD
    )
    return autopar.compile(model, f"{WORLD}:cpu", batch, plan=plan)


def square(microbatches=1):
    return compiled(MeshShape(dp=2, tp=2), microbatches)


@functools.cache
def shared(microbatches=1):
    """For facts that leave the weights as they are."""
    return square(microbatches)


def whole_batches(seed, epochs):
    """What one process would see."""
    data = Words()
    alone = ShardLoader(
        loader_of(data),
        Reader(plan="", rank=0, rows=lambda size: tuple(range(size))),
        seed=seed,
    )
    return [
        {key: share.local_rows() for key, share in batch.items()}
        for _ in range(epochs)
        for batch in alone
    ]


def train(model, optimizer, batch):
    loss = model(**batch)["loss"]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def refuses(text, call):
    with pytest.raises(InputError, match=re.escape(text)):
        call()


# ------------------------------------------------------------ facts
def each_rank_reads_only_its_rows():
    model, data = shared(), Words()
    loader = autopar.shard_loader(loader_of(data), model, seed=2)
    shares = list(loader)
    assert [tuple(s["labels"].shape) for s in shares] == [(8, 6), (8, 6), (4, 6)]
    assert len(data.read) == SAMPLES // 2 + 1  # one sample more, for the form of a batch
    held = sum(s["labels"].local_rows().nbytes for s in shares)
    everywhere = [None] * WORLD
    dist.all_gather_object(everywhere, (sorted(set(data.read)), held))
    assert everywhere[0] == everywhere[1], "a tensor group reads the same"
    assert everywhere[2] == everywhere[3]
    assert set(everywhere[0][0]) | set(everywhere[2][0]) == set(range(SAMPLES))
    assert not set(everywhere[0][0]) & set(everywhere[2][0])
    assert held == SAMPLES * LENGTH * 8 // 2


def training_on_shares_equals_one_process():
    for microbatches in (1, 2):
        model, alone = square(microbatches), Model()
        loader = autopar.shard_loader(loader_of(Words()), model, seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        reference = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-3)
        found = [train(model, optimizer, share) for _ in range(2) for share in loader]
        wanted = [train(alone, reference, batch) for batch in whole_batches(3, 2)]
        assert len(found) == 6
        assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-5), (found, wanted)
        whole = model.full_state_dict()
        if RANK == 0:
            for name, value in alone.state_dict().items():
                assert torch.allclose(whole[name], value, rtol=1e-4, atol=1e-5), name


def a_run_is_resumed_under_another_plan_without_repeating_a_sample():
    model, alone = square(), Model()
    loader = autopar.shard_loader(loader_of(Words(), num_workers=1), model, seed=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    wanted = [train(alone, reference, batch) for batch in whole_batches(4, 2)]
    found = []
    for share in loader:
        found.append(train(model, optimizer, share))
        if len(found) == 2:
            break
    box = [model.full_state_dict()]
    dist.broadcast_object_list(box)
    other, data = compiled(MeshShape(pp=2, dp=2), 2), Words()
    other.load_state_dict(box[0])
    resumed = autopar.shard_loader(loader_of(data), other, seed=4)
    resumed.load_state_dict(loader.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    found += [train(other, optimizer, share) for share in resumed]
    assert resumed.epoch == 1
    found += [train(other, optimizer, share) for share in resumed]
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-4), (found, wanted)


def an_odd_last_batch_is_used_by_every_rank_idle_ones_included():
    """Thirteen samples in batches of four, on two stages of four ranks."""
    model, alone, data = compiled(MeshShape(pp=2)), Model(), Subset(Words(), range(13))
    loader = autopar.shard_loader(DataLoader(data, batch_size=4), model)
    found = []
    for share in loader:
        loss = model(**share)["loss"]
        loss.backward()
        found.append(loss.item())
    wanted = []
    for batch in DataLoader(data, batch_size=4):
        loss = alone(**batch)["loss"]
        loss.backward()
        wanted.append(loss.item())
    assert len(found) == 4
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-5)
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    assert torch.allclose(model.clip_grad_norm_(1e9), norm, rtol=1e-5)


def evaluation_takes_shares_too():
    model, alone = shared(), Model()
    loader = autopar.shard_loader(loader_of(Words()), model, seed=5)
    model.eval()
    with torch.no_grad():
        for share, batch in zip(loader, whole_batches(5, 1), strict=True):
            found, wanted = model(**share), alone(**batch)
            assert torch.allclose(found["logits"], wanted["logits"], atol=1e-5)
            assert torch.allclose(found["loss"], wanted["loss"], rtol=1e-5)
    model.train()


def different_global_batches_are_refused_at_the_first_step():
    model, batch = square(), example()
    batch = {key: value.roll(RANK, 0) for key, value in batch.items()}
    refuses("the content of input 'input_ids' is ", lambda: model(**batch))


def batches_of_a_distributed_sampler_are_refused_at_the_first_step():
    model, data = shared(), Words()
    sampler = DistributedSampler(data, WORLD, RANK, shuffle=False)
    batch = next(iter(DataLoader(data, batch_size=4, sampler=sampler)))
    refuses("call the model on every rank, with the same global batch", lambda: model(**batch))


def the_share_of_another_rank_is_refused():
    model = shared()
    share = next(iter(autopar.shard_loader(loader_of(Words()), model)))
    origin = share["labels"].origin
    foreign = {
        key: LocalShare(
            s.local_rows(), s.rows, 0, BATCH, ShareOrigin(
                plan=origin.plan, rank=0, batch=origin.batch
            ),
        )
        for key, s in share.items()
    }  # fmt: skip
    refuses("the rank of the share in input 'input_ids' is 0 on rank 1, its own on rank 0",
            lambda: model(**foreign))  # fmt: skip


def shares_of_different_batches_are_refused_at_any_step():
    model = shared()
    shares = list(autopar.shard_loader(loader_of(Words()), model))
    model(**shares[0])["loss"].backward()
    refuses("the batch of the share in input 'input_ids' is ",
            lambda: model(**shares[1 if RANK == 3 else 0]))  # fmt: skip


def shares_of_another_plan_are_refused():
    model, other = shared(), shared(2)
    share = next(iter(autopar.shard_loader(loader_of(Words()), other)))
    refuses(f"'input_ids' is a share made for rank {RANK} under plan", lambda: model(**share))
    own = next(iter(autopar.shard_loader(loader_of(Words()), model)))
    mixed = share if RANK == 2 else own
    refuses("the plan of the share in input 'input_ids' is ", lambda: model(**mixed))


def a_share_on_one_rank_and_a_batch_on_another_are_refused():
    model = shared()
    share = next(iter(autopar.shard_loader(loader_of(Words()), model)))
    given = share if RANK else example()
    refuses("the form of input 'input_ids' is a share on rank 1, a global batch on rank 0",
            lambda: model(**given))  # fmt: skip


def a_dataset_that_gives_ranks_different_samples_is_refused():
    model = square()
    loader = autopar.shard_loader(loader_of(Words(shift=RANK == 3)), model)
    refuses("ranks 2 and 3 hold the same 4 rows of input 'input_ids' with different content",
            lambda: model(**next(iter(loader))))  # fmt: skip


def a_batch_of_another_size_is_read_whole_and_gives_the_same_numbers():
    for size in (7, 12):
        loader = autopar.shard_loader(DataLoader(Words(), batch_size=size), shared(2))
        found = shared(2)(**next(iter(loader)))["loss"]
        wanted = Model()(**next(iter(DataLoader(Words(), batch_size=size))))["loss"]
        assert torch.allclose(found, wanted, rtol=1e-5)


FACTS = (
    each_rank_reads_only_its_rows,
    training_on_shares_equals_one_process,
    a_run_is_resumed_under_another_plan_without_repeating_a_sample,
    an_odd_last_batch_is_used_by_every_rank_idle_ones_included,
    evaluation_takes_shares_too,
    different_global_batches_are_refused_at_the_first_step,
    batches_of_a_distributed_sampler_are_refused_at_the_first_step,
    the_share_of_another_rank_is_refused,
    shares_of_different_batches_are_refused_at_any_step,
    shares_of_another_plan_are_refused,
    a_share_on_one_rank_and_a_batch_on_another_are_refused,
    a_dataset_that_gives_ranks_different_samples_is_refused,
    a_batch_of_another_size_is_read_whole_and_gives_the_same_numbers,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    tell(FACTS)
