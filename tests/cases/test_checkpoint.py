"""Checkpoints in one process: what they hold, what they refuse, what a kill leaves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar.errors import ConfigError
from autopar.plan.types import MeshShape
from autopar.runtime import checkpoint
from tests.dist.state_models import OPTIMIZERS, batch_of, build, compiled, optimizer_of, train

ALONE = MeshShape()


def trained(kind="adamw", *, steps=2, **options):
    model, _ = compiled(ALONE, **options)
    optimizer, scheduler = optimizer_of(kind, model)
    train(model, optimizer, scheduler, steps)
    return model, optimizer, scheduler


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_resumed_run_goes_on_bit_for_bit_with_its_dropout_and_schedule(tmp_path, kind):
    model, optimizer, scheduler = trained(kind, dropout=0.3)
    autopar.save_checkpoint(tmp_path / "c", model, optimizer, scheduler=scheduler, epoch=3)
    wanted = train(model, optimizer, scheduler, 3, first=2)
    other, _ = compiled(ALONE, dropout=0.3, model_seed=8)
    resumed, schedule = optimizer_of(kind, other)
    rest = autopar.load_checkpoint(tmp_path / "c", other, resumed, scheduler=schedule)
    assert rest == {"epoch": 3}
    assert train(other, resumed, schedule, 3, first=2) == wanted
    assert schedule.last_epoch == scheduler.last_epoch
    assert other.get_rng_state() == model.get_rng_state()


def test_dropout_goes_on_with_a_saved_counter_and_not_without():
    model, *_ = trained(dropout=0.5)
    counter = model.get_rng_state()
    assert counter == {"seed": 0, "step": 2}
    losses = []
    for state in (counter, counter, {"seed": 0, "step": 7}, {"seed": 1, "step": 2}):
        model.set_rng_state(state)
        losses.append(float(model(**batch_of(0))["loss"].detach()))
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_plain_torch_opens_a_checkpoint_and_goes_on(tmp_path):
    model, optimizer, scheduler = trained(unused=False)
    autopar.save_checkpoint(tmp_path / "c", model, optimizer)
    plain, _ = build(seed=5, unused=False)
    resumed, schedule = optimizer_of("adamw", plain)
    target = dict(zip(("model", "optim"), get_state_dict(plain, resumed), strict=True))
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=tmp_path / "c")
    set_state_dict(
        plain, resumed, model_state_dict=target["model"], optim_state_dict=target["optim"]
    )
    schedule.load_state_dict(scheduler.state_dict())
    wanted = train(model, optimizer, scheduler, 3, first=2)
    assert train(plain, resumed, schedule, 3, first=2) == pytest.approx(wanted, rel=2e-6)
    assert int(plain.state_dict()["norm.num_batches_tracked"]) == 5


def test_a_job_killed_while_it_saves_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model, optimizer, _ = trained()
    path = tmp_path / "c"
    autopar.save_checkpoint(path, model, optimizer, step=1)
    write = checkpoint.save_state

    def torn(state, checkpoint_id, **options):
        write(state, checkpoint_id=checkpoint_id, **options)
        (checkpoint_id / ".metadata").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_state", torn)
    with pytest.raises(KeyboardInterrupt):
        autopar.save_checkpoint(path, model, optimizer, step=2)
    assert autopar.load_checkpoint(path, model, optimizer) == {"step": 1}
    monkeypatch.undo()
    path.rename(tmp_path / "c.previous")  # as between the two renames of a save
    assert autopar.load_checkpoint(path, model, optimizer) == {"step": 1}
    autopar.save_checkpoint(path, model, optimizer, step=3)
    assert autopar.load_checkpoint(path, model, optimizer) == {"step": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_half_written_and_foreign_checkpoints_are_refused_before_anything_changes(tmp_path):
    model, optimizer, _ = trained()
    path = tmp_path / "c"
    autopar.save_checkpoint(path, model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ConfigError, match="was saved without an optimizer"):
        autopar.load_checkpoint(path, model, optimizer)
    with pytest.raises(ConfigError, match="has no entry 'sampler', it has none"):
        autopar.load_checkpoint(path, model, sampler=object())
    larger, _ = compiled(ALONE, vocab=20)
    with pytest.raises(ConfigError, match=r"'embed.weight' has shape \(13, 10\) there and \(20,"):
        autopar.load_checkpoint(path, larger)
    fewer, _ = compiled(ALONE, unused=False)
    with pytest.raises(ConfigError, match=r"0 names are missing \(none\), 1 unexpected \('spare'"):
        autopar.load_checkpoint(path, fewer)
    with pytest.raises(ConfigError, match="there is no checkpoint at"):
        autopar.load_checkpoint(tmp_path / "d", model)
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"__0_0.distcp has \d+ bytes of \d+"):
        autopar.load_checkpoint(path, model)
    (path / ".metadata").unlink()
    with pytest.raises(ConfigError, match="its table of contents, .metadata, is missing"):
        autopar.load_checkpoint(path, model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_what_can_t_be_saved_is_refused_before_anything_is_written(tmp_path):
    model, optimizer, _ = trained()
    path = tmp_path / "c"
    autopar.save_checkpoint(path, model, optimizer, epoch=1)
    with pytest.raises(ConfigError, match=r"hook= is a function that can't be written"):
        autopar.save_checkpoint(path, model, optimizer, epoch=2, hook=lambda: 1)
    assert autopar.load_checkpoint(path, model, optimizer) == {"epoch": 1}
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ConfigError, match=r"file is a file; name a directory, or remove it"):
        autopar.save_checkpoint(file, model)
    assert file.read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "file"]


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused_with_its_options(tmp_path):
    model, optimizer, _ = trained("adamw")
    autopar.save_checkpoint(tmp_path / "c", model, optimizer)
    with pytest.raises(ConfigError, match=r"another optimizer than SGD: .*'betas'.*'dampening'"):
        autopar.load_checkpoint(tmp_path / "c", model, torch.optim.SGD(model.parameters(), lr=0.1))
    similar, _ = optimizer_of("adamw", model)
    torch.optim.lr_scheduler.OneCycleLR(similar, max_lr=0.1, total_steps=10)
    autopar.load_checkpoint(tmp_path / "c", model, similar)
    assert similar.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_models_that_do_not_run_are_told_what_to_do_before_they_save(tmp_path):
    plain, _ = build()
    with pytest.raises(ConfigError, match="call the model once before"):
        autopar.save_checkpoint(tmp_path / "c", plain)
    lazy = autopar.compile(plain, 1)
    with pytest.raises(ConfigError, match="pass inputs="):
        autopar.load_checkpoint(tmp_path / "c", lazy)


def test_an_optimizer_of_another_model_is_not_saved_with_this_one(tmp_path):
    model, _, _ = trained()
    _, other, _ = trained()
    with pytest.raises(ConfigError, match="holds no parameters of this compiled model"):
        autopar.save_checkpoint(tmp_path / "c", model, other)


class Rows:
    """A loader that knows where it is."""

    def __init__(self, seen):
        self.position, self.seen = 0, seen

    def __iter__(self):
        while self.position < 9:
            self.seen.append(self.position)
            self.position += 1
            yield batch_of(self.seen[-1])

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_a_loader_goes_on_where_the_checkpoint_was_taken_and_no_row_is_lost_or_seen_twice(tmp_path):
    seen, losses = [], []

    def run(stop=None):
        loader = Rows(seen)
        model, _ = compiled(ALONE, dropout=0.2, model_seed=len(seen))
        optimizer, scheduler = optimizer_of("adamw", model)
        if (tmp_path / "c").exists():
            autopar.load_checkpoint(
                tmp_path / "c", model, optimizer, scheduler=scheduler, loader=loader
            )
            del seen[loader.position :], losses[loader.position :]  # done again from there
        for batch in loader:
            loss = model(**batch)["loss"]
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if loader.position in (2, 4, 6):
                extra = {"scheduler": scheduler, "loader": loader}
                autopar.save_checkpoint(tmp_path / "c", model, optimizer, **extra)
            if loader.position == stop:
                return  # killed at step 5: the last checkpoint is of step 4

    run(stop=5)
    assert seen == [0, 1, 2, 3, 4]
    run()
    assert seen == list(range(9))
    broken = list(losses)
    for file in (tmp_path / "c").iterdir():
        file.unlink()
    (tmp_path / "c").rmdir()
    seen.clear(), losses.clear()
    run()
    assert broken == losses
