"""Gradients and weights with collectives in buckets, in small buckets, and one by one, over gloo.

The argument is the file that gets, by plan, what differs from single collectives.
"""

import json
import sys
import traceback

import torch

import autopar
from autopar.sharding import buckets
from tests.cases.test_buckets import Uneven
from tests.dist.ranks import RANK, WORLD, whole

FULL = buckets.BUCKET_BYTES
PLANS = {
    2: {
        "dp2": {"dp": 2, "num_microbatches": 2},
        "zero1": {"dp": 2, "zero": 1},
        "zero2": {"dp": 2, "zero": 2, "num_microbatches": 2},
        "zero3": {"dp": 2, "zero": 3},
    },
    4: {
        "zero3": {"dp": 4, "zero": 3},
        "dp2 x tp2 x zero3": {"dp": 2, "tp": 2, "zero": 3},
        "tied over stages": {"pp": 2, "dp": 2, "num_microbatches": 2, "zero": 1},
    },
}


def trained(most_bytes: int, how: dict[str, object]) -> tuple[object, dict[str, torch.Tensor]]:
    """The plan; whole gradients of two calls added up, and whole weights after two steps."""
    buckets.BUCKET_BYTES = most_bytes
    torch.manual_seed(0)
    model = Uneven().double()
    ids = torch.randint(0, 13, (8, 3))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    model = autopar.compile(model, f"{WORLD}:cpu", batch, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(2):  # the second is added to memory of the first
        model(**batch).backward()
    found = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {key}"] = whole(parameter.grad).clone()
    model.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    model(**batch).backward()
    optimizer.step()
    return model.plan, {**found, **model.full_state_dict()}


def main() -> None:
    facts = {}
    for name, degrees in PLANS[WORLD].items():
        facts[name] = ""
        try:
            plan, wanted = trained(0, degrees)
            for most_bytes in (300, FULL):
                _, found = trained(most_bytes, {"plan": plan})
                assert found.keys() == wanted.keys()
                for key, value in found.items():
                    torch.testing.assert_close(value, wanted[key], rtol=1e-11, atol=1e-13)
        except Exception:  # a fact tells what went wrong
            facts[name] = traceback.format_exc()
    if RANK == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(facts, file)


if __name__ == "__main__":
    main()
