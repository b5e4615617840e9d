"""A run that is saved on some processes and goes on with others, under another plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist import resume_cases
from tests.dist.state_models import OPTIMIZERS
from tests.spawn import run_ranks

CASES = Path(__file__).with_name("resume_cases.py")
BEFORE, DROPOUT = resume_cases.BEFORE, resume_cases.DROPOUT

pytestmark = pytest.mark.dist


def run(world_size, do, folder, plans, kinds, *rest):
    args = (do, str(folder), ",".join(plans), ",".join(kinds), *rest)
    results = run_ranks(world_size, CASES, args=args, timeout_s=200)
    for rank, result in enumerate(results):
        assert result.output.endswith("passed\n"), f"rank {rank}:\n{result.errors[-4000:]}"
    return json.loads((Path(folder) / f"{do}-{world_size}.json").read_text())


def same_losses(found, unbroken):
    assert len(found) == 5
    assert found == pytest.approx(unbroken[BEFORE:], rel=1e-6, abs=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of four processes, and the losses of the run that went on unbroken."""
    folder = tmp_path_factory.mktemp("resume")
    return folder, run(4, "save", folder, ["pp2-dp2-zero1"], ["adamw", "sgd"])


@pytest.fixture(scope="module")
def on_two(saved):
    """Losses of two processes under other plans; what they load they save again."""
    folder, _ = saved
    return run(2, "resume", folder, ["dp2-zero3", "tp2"], ["adamw", "sgd"], "again")


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_four_processes_resumed_on_two_and_on_one_give_the_next_five_losses(saved, on_two, kind):
    folder, unbroken = saved
    wanted = unbroken[f"{kind}/pp2-dp2-zero1"]
    assert len(set(wanted)) == len(wanted), "every step moves the loss"
    for plan in ("dp2-zero3", "tp2"):
        same_losses(on_two[f"{kind}/{plan}"], wanted)
    same_losses(resume_cases.resume(folder, "one", kind, DROPOUT), wanted)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_checkpoint_saved_again_by_two_processes_is_still_that_of_the_four(saved, on_two, kind):
    folder, unbroken = saved
    assert on_two
    again = folder / f"{kind}-again"
    (folder / f"{kind}-again-{DROPOUT}").symlink_to(again)
    found = resume_cases.resume(folder, "one", f"{kind}-again", DROPOUT)
    same_losses(found, unbroken[f"{kind}/pp2-dp2-zero1"])


@pytest.mark.slow
def test_every_optimizer_goes_on_under_other_plans_on_three_four_and_eight_processes(tmp_path):
    kinds = list(OPTIMIZERS)
    unbroken = run(4, "save", tmp_path, ["pp2-dp2-zero1"], kinds)
    plans = {3: ["pp3", "tp3"], 4: ["tp4", "pp4", "dp4-zero3"], 8: ["dp4-tp2"]}
    for world_size, names in plans.items():
        found = run(world_size, "resume", tmp_path, names, kinds)
        for key, losses in found.items():
            kind, plan = key.split("/")
            wanted = unbroken[f"{kind}/pp2-dp2-zero1"][BEFORE:]
            assert losses == pytest.approx(wanted, rel=2e-6), (kind, plan)
