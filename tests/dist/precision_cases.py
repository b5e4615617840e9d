"""Facts about low precision on two real processes, by name; the first argument is a folder.

Each rank writes ``<rank>.json``: fact -> "" where it holds, else what went wrong.
"""

import copy
import json
import logging
import sys
import traceback
from pathlib import Path

import torch

import autopar
from tests.dist.ranks import RANK, WORLD, everywhere

DEVICES = f"{WORLD}:cpu"
ROWS, WIDTH = 64, 16
AXES = ({"pp": 2}, {"dp": 2, "zero": 3}, {"tp": 2})


class Mlp(torch.nn.Module):
    """Three layers with norms; the loss is in the result."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x, y):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.nn.functional.gelu(layer(norm(x)))
        return {"loss": (x.float() - y).square().mean()}


def batch_of(dtype=torch.float32):
    torch.manual_seed(1)
    return {name: torch.randn(ROWS, WIDTH, dtype=dtype) for name in ("x", "y")}


def compiled(model, batch, axes, **options):
    wanted = {"pp": 1, "dp": 1, "tp": 1, "num_microbatches": 2, **axes}
    return autopar.compile(model, DEVICES, batch, optimizer="sgd", **wanted, **options)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def weights(model):
    return {name: local(p.detach()).clone() for name, p in model.named_parameters()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def gradients(model):
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def near(found, wanted, tolerance):
    """Whether the gradients that this rank holds are those of one device."""
    for name, gradient in found.items():
        gap = float((gradient.double() - wanted[name].double()).norm())
        scale = max(float(w.double().norm()) for w in wanted.values())
        assert gap <= tolerance * scale, (name, gap, scale)


def an_infinity_on_one_rank_skips_the_step_on_all(axes):
    model, batch = compiled(Mlp(), batch_of(), axes), batch_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    skipped, scales = [], []
    for step in (1, 2, 3):
        before = weights(model)
        scaler.scale(model(**batch)["loss"]).backward()
        if step == 2 and RANK == 1:
            gradient = next(p.grad for p in model.parameters() if p.grad is not None)
            local(gradient).fill_(float("inf"))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(same(before, weights(model)))
        scales.append(scaler.get_scale())
    assert everywhere(skipped) == [[False, True, False]] * WORLD
    assert everywhere(scales) == [[1024.0, 512.0, 512.0]] * WORLD


def an_overflow_in_fp16_is_shared(axes):
    model, batch = compiled(Mlp(), batch_of(), axes, precision="fp16"), batch_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28)
    before, scales, skipped = weights(model), [], []
    for _ in range(14):
        scaler.scale(model(**batch)["loss"]).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        skipped.append(same(before, weights(model)))
    assert everywhere(scales) == [scales] * WORLD
    assert everywhere(skipped) == [skipped] * WORLD
    assert skipped[0], "the first step overflows"
    assert not skipped[-1], "a later one does not"


def fp16_gradients_are_those_of_one_device(axes):
    model, batch = compiled(Mlp(), batch_of(), axes, precision="fp16"), batch_of()
    twin = Mlp()
    twin(**batch)["loss"].backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(**batch)["loss"]).backward()
    scaler.unscale_(optimizer)
    near(gradients(model), {n: p.grad for n, p in twin.named_parameters()}, 5e-3)


def masters_of_a_bf16_model_are_float32(axes):
    batch = batch_of()
    start = Mlp().bfloat16()
    model = compiled(copy.deepcopy(start), batch, axes, precision="bf16")
    twin = copy.deepcopy(start).float()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    for _ in range(3):
        loss, wanted = model(**batch)["loss"], twin(**batch)["loss"]
        loss.backward()
        wanted.backward()
        assert abs(float(loss.detach()) - float(wanted.detach())) < 2e-2
        near(gradients(model), {n: p.grad for n, p in twin.named_parameters()}, 3e-2)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {v.dtype for v in model.state_dict().values()} == {torch.bfloat16}
    full = model.full_state_dict()
    if RANK == 0:
        assert list(full) == list(twin.state_dict())
        for name, value in twin.state_dict().items():
            assert full[name].dtype == torch.bfloat16
            assert torch.allclose(full[name].float(), value, atol=2e-2), name
    masters = weights(model)
    for dtype in (torch.bfloat16, torch.float32):
        model.load_state_dict({n: v.to(dtype) for n, v in start.state_dict().items()})
        assert not same(masters, weights(model))
    model.load_state_dict(model.state_dict())
    loss = model(**batch)["loss"]
    with torch.no_grad():
        assert abs(float(loss.detach()) - float(start.float()(**batch)["loss"])) < 2e-2


def a_loop_under_autocast_equals_one_device(axes):
    batch, twin = batch_of(), Mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = compiled(Mlp(), batch, axes)
        loss, wanted = model(**batch)["loss"], twin(**batch)["loss"]
    loss.backward()
    wanted.backward()
    assert abs(float(loss.detach()) - float(wanted.detach())) < 1e-2
    near(gradients(model), {n: p.grad for n, p in twin.named_parameters()}, 2e-2)


def a_bf16_model_sums_its_gradients_in_float32(axes):
    batch = batch_of(torch.bfloat16)
    model = compiled(Mlp().bfloat16(), batch, {**axes, "num_microbatches": 4})
    exact, eager = Mlp().bfloat16().double(), Mlp().bfloat16()
    exact(**{n: v.double() for n, v in batch.items()})["loss"].backward()
    eager(**batch)["loss"].backward()
    model(**batch)["loss"].backward()
    wanted = {n: p.grad for n, p in exact.named_parameters()}
    scale = max(float(w.norm()) for w in wanted.values())
    lost = max(
        float((p.grad.double() - wanted[n]).norm()) / scale for n, p in eager.named_parameters()
    )
    found = gradients(model)
    assert {g.dtype for g in found.values()} == {torch.bfloat16}
    near(found, wanted, 2 * lost)


CHECKS = (
    an_infinity_on_one_rank_skips_the_step_on_all,
    an_overflow_in_fp16_is_shared,
    fp16_gradients_are_those_of_one_device,
    masters_of_a_bf16_model_are_float32,
    a_loop_under_autocast_equals_one_device,
    a_bf16_model_sums_its_gradients_in_float32,
)
FACTS = [f"{check.__name__}-{next(iter(axes))}" for check in CHECKS for axes in AXES]


def run(folder):
    outcome = {}
    for check in CHECKS:
        for axes in AXES:
            fact = f"{check.__name__}-{next(iter(axes))}"
            try:
                check(axes)
                outcome[fact] = ""
            except AssertionError:
                outcome[fact] = traceback.format_exc()
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    run(sys.argv[1])
