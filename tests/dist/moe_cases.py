"""Mixtures of experts compiled on two real processes: facts, each noted with what went wrong.

The first argument is the file that gets the facts as JSON. At the end more rows are routed to a
rank than it has room for; nobody catches that error.
"""

import copy
import json
import sys
import traceback

import torch

import autopar
from tests.dist.ranks import RANK, close, whole
from tests.moe_models import build_plain, build_transformer, route_all_to

EXPERTS_OVER_DP = {"*.experts.gate_up_proj": "S(0)@dp"}
EXPERTS_OVER_TP = {"*.experts.gate_up_proj": "S(0)"}


def trains(name, **options):
    """Two steps of clipped AdamW, the weights, a smaller batch, and evaluation."""
    model, batch = build_transformer(name, num_hidden_layers=1)
    twin = copy.deepcopy(model)
    named = dict(twin.named_parameters())
    fixed = {"pp": 1, "num_microbatches": 1, "zero": 0, "recompute": "none"}
    model = autopar.compile(model, "2:cpu", batch, **(fixed | options))
    makers = (model.parameters(), twin.parameters())
    optimizer, reference = (torch.optim.AdamW(p, lr=1e-2, eps=1e-3) for p in makers)
    for _ in range(2):
        loss, wanted = model(**batch).loss, twin(**batch).loss
        close(loss, wanted, "loss")
        loss.backward()
        wanted.backward()
        for key, parameter in model.named_parameters():
            close(whole(parameter.grad), named[key].grad, key)
        close(
            whole(model.clip_grad_norm_(0.5)),
            torch.nn.utils.clip_grad_norm_(list(twin.parameters()), 0.5),
            "norm",
        )
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    full = model.full_state_dict()
    for key, value in twin.state_dict().items() if RANK == 0 else ():
        close(full[key].float(), value.float(), key)
    for count in (4, 3):  # three rows do not divide by two ranks
        small = {key: value[:count] for key, value in batch.items()}
        loss, wanted = model(**small).loss, twin(**small).loss
        close(loss, wanted, f"loss of {count} rows")
        loss.backward()
        wanted.backward()
    for key, parameter in model.named_parameters():
        close(whole(parameter.grad), named[key].grad, f"{key} of both batches")
    model.eval(), twin.eval()
    with torch.no_grad():
        close(model(**batch).logits, twin(**batch).logits, "logits")
    return model


def experts_over_dp():
    options = {"placements": EXPERTS_OVER_DP, "expert_capacity": 1.9}
    model = trains("mixtral", dp=2, **options)
    sizes = {k: tuple(p.to_local().shape) for k, p in model.named_parameters() if "experts" in k}
    assert {shape[0] for shape in sizes.values()} == {2}, sizes  # two of four experts on each rank
    assert "190 % of an even share" in " ".join(model.report().split())


def experts_over_tp():
    model = trains("qwen3-moe", tp=2, placements=EXPERTS_OVER_TP)
    sizes = {k: tuple(p.to_local().shape) for k, p in model.named_parameters() if "experts" in k}
    assert {shape[0] for shape in sizes.values()} == {2}, sizes


def biased_experts_over_dp():
    trains("gpt-oss", dp=2, placements=EXPERTS_OVER_DP, zero=1)


def overflow():
    """All tokens to one expert, whose rank has room for an even share."""
    model, batch = build_plain("SortedAndBack")
    route_all_to(model, 3)
    model = autopar.compile(
        model, "2:cpu", batch, dp=2, pp=1, placements={"up": "S(0)@dp"}, expert_capacity=1.0
    )
    model(**batch)


FACTS = (
    experts_over_dp,
    experts_over_tp,
    biased_experts_over_dp,
)

if __name__ == "__main__":
    found = {}
    for fact in FACTS:
        try:
            fact()
            found[fact.__name__] = ""
        except Exception:  # whatever it is, the test of that fact shows it
            found[fact.__name__] = traceback.format_exc()
    if RANK == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)
    overflow()
