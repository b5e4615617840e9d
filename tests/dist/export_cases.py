"""Facts about exports on four ranks."""

import contextlib
import copy
import io
import logging
import os
import sys
from pathlib import Path

import torch
import transformers

import autopar
from autopar.capture.tracing import capture
from autopar.plan.types import MeshShape
from tests import zoo
from tests.dist.facts import Facts, tell
from tests.plans import hand_made_plan

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
fact = Facts()
SHARDED = MeshShape(dp=4)


@fact
def an_exported_model_opens_in_its_own_library_and_under_another_plan(folder):
    for name, mesh, seed in (("gpt2", MeshShape(pp=2, tp=2), 2), ("t5", SHARDED, 0)):
        model, batch = zoo.build(name, vocab=101)
        twin = copy.deepcopy(model)
        plan = hand_made_plan(capture(model, (), batch), mesh, seed=seed)
        model = autopar.compile(model, f"{WORLD}:cpu", batch, plan=plan)
        where = folder / name
        model.save_pretrained(where, max_shard_size="40KB")
        assert len(list(where.glob("*.safetensors"))) > 3
        library = type(twin)
        with contextlib.redirect_stderr(io.StringIO()):
            opened = library.from_pretrained(where)
        for key, value in twin.state_dict().items():
            assert torch.equal(opened.state_dict()[key], value), key
        fresh, batch = zoo.build(name, vocab=101, device="meta")
        other = hand_made_plan(capture(fresh, (), batch), MeshShape(dp=2, tp=2), zero=1)
        fresh = autopar.compile(fresh, f"{WORLD}:cpu", batch, plan=other, state_dict=where)
        third, _ = zoo.build(name, vocab=101, seed=8)
        third = autopar.compile(third, f"{WORLD}:cpu", batch, plan=plan)
        third.load_pretrained(where)
        for loaded in (fresh, third):
            state = loaded.full_state_dict()
            for key, value in twin.state_dict().items() if RANK == 0 else ():
                assert torch.equal(state[key], value), key


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tell(fact.chosen(sys.argv[2:]), Path(sys.argv[1]))
