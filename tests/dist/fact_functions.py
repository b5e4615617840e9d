"""Many facts in one launch: each is a function, its failure a text under its name."""

import json
import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from tests.spawn import run_ranks

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Facts:
    """Functions by name, run in order on every rank."""

    def __init__(self):
        self.functions = {}

    def __call__(self, function):
        self.functions[function.__name__] = function
        return function

    def run(self, folder, names=()):
        """Run all facts and write what failed, per rank, as JSON of rank 0."""
        found = {}
        for name, function in self.functions.items():
            if names and name not in names:
                continue
            text = ""
            try:
                function(Path(folder))
            except BaseException:
                text = f"rank {RANK}:\n{traceback.format_exc()}"
                sys.stderr.write(f"{name} fails on {text}\n")  # the others may wait for ever
            every = [text]
            if dist.is_initialized():
                every = [""] * WORLD
                dist.all_gather_object(every, text)
            found[name] = "\n".join(text for text in every if text)
        if RANK == 0:
            (Path(folder) / "facts.json").write_text(json.dumps(found))
        sys.stdout.write("passed\n")


def launch(script, world_size, folder, *args, timeout_s=150):
    """What failed, by fact."""
    results = run_ranks(world_size, script, args=(str(folder), *args), timeout_s=timeout_s)
    for rank, result in enumerate(results):
        assert result.output.endswith("passed\n"), f"rank {rank}:\n{result.errors[-4000:]}"
    return json.loads((Path(folder) / "facts.json").read_text())
