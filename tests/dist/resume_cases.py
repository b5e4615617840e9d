"""Save on some ranks, go on with others; writes the losses of each run as JSON."""

import json
import logging
import os
import sys
from pathlib import Path

import torch

import autopar
from autopar.plan.types import MeshShape
from tests.dist.state_models import compiled, optimizer_of, train

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
BEFORE, AFTER, DROPOUT = 3, 5, 0.25
PLANS = {
    "pp2-dp2-zero1": (MeshShape(pp=2, dp=2), 1, 0),
    "tp4": (MeshShape(tp=4), 0, 1),
    "pp4": (MeshShape(pp=4), 0, 0),
    "dp4-zero3": (MeshShape(dp=4), 3, 0),
    "dp2-zero3": (MeshShape(dp=2), 3, 0),
    "tp2": (MeshShape(tp=2), 0, 3),
    "pp2": (MeshShape(pp=2), 0, 0),
    "tp3": (MeshShape(tp=3), 0, 2),
    "pp3": (MeshShape(pp=3), 0, 0),
    "dp4-tp2": (MeshShape(dp=4, tp=2), 2, 2),
    "one": (MeshShape(), 0, 0),
}


def start(plan, kind, *, dropout):
    mesh, zero, seed = PLANS[plan]
    # other weights and another seed than the saved run: a load that did nothing would show
    model, _ = compiled(mesh, zero=zero, seed=seed, dropout=dropout, model_seed=5 * (WORLD < 4))
    return model, *optimizer_of(kind.removesuffix("-again"), model)


def save(folder, plan, kind, dropout):
    """Train, save, and train on."""
    model, optimizer, scheduler = start(plan, kind, dropout=dropout)
    before = train(model, optimizer, scheduler, BEFORE)
    path = Path(folder) / f"{kind}-{dropout}"
    autopar.save_checkpoint(path, model, optimizer, scheduler=scheduler, next_step=BEFORE)
    return before + train(model, optimizer, scheduler, AFTER, first=BEFORE)


def resume(folder, plan, kind, dropout, again=""):
    """Load and train on; saves once more at once if ``again`` names a checkpoint."""
    model, optimizer, scheduler = start(plan, kind, dropout=dropout)
    path = Path(folder) / f"{kind}-{dropout}"
    rest = autopar.load_checkpoint(path, model, optimizer, scheduler=scheduler)
    if again:
        autopar.save_checkpoint(Path(folder) / again, model, optimizer, scheduler=scheduler, **rest)
    return train(model, optimizer, scheduler, AFTER, first=rest["next_step"])


def run_all(folder, do, plans, kinds, again=""):
    found = {}
    for kind in kinds:
        for plan in plans:
            found[f"{kind}/{plan}"] = (
                save(folder, plan, kind, DROPOUT)
                if do == "save"
                else resume(folder, plan, kind, DROPOUT, again and f"{kind}-{again}")
            )
    if RANK == 0:
        (Path(folder) / f"{do}-{WORLD}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    do, where, plans, kinds, *rest = sys.argv[1:]
    run_all(where, do, plans.split(","), kinds.split(","), *rest)
    sys.stdout.write("passed\n")
