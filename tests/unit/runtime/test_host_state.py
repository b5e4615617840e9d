"""Optimizer state in host memory: the numbers of a whole step, a chunk at a time."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from autopar.runtime.host_state import keep_on_host

MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}
SIZES = ((40, 3), (7,), (16, 16), (1,), (2, 3, 4))


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def groups(found: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": found[:2]}, {"params": found[2:], "weight_decay": 0.1}]


def give_gradients(found: list[torch.nn.Parameter], step: int) -> None:
    for at, parameter in enumerate(found):
        generator = torch.Generator().manual_seed(100 * step + at)
        missing = at == 3 and step == 0  # a parameter that no sample reached yet
        parameter.grad = None if missing else torch.randn(parameter.shape, generator=generator)


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 30])
def test_steps_are_those_of_torch_to_the_bit(name: str, chunk_bytes: int):
    plain, hosted = parameters(), parameters()
    optimizer, reference = (MAKERS[name](groups(found)) for found in (hosted, plain))
    state = keep_on_host(optimizer, chunk_bytes)
    for step in range(4):
        give_gradients(plain, step)
        give_gradients(hosted, step)
        reference.step()
        optimizer.step()
        assert equal(plain, hosted)
        assert state.device_bytes == 0 < state.host_bytes
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 3]


def test_at_most_a_chunk_is_on_the_device(monkeypatch: pytest.MonkeyPatch):
    found = parameters()
    optimizer = torch.optim.AdamW(found)
    seen: list[int] = []
    whole = torch.optim.AdamW.step.__wrapped__

    def watched(owner, closure=None):
        value = whole(owner, closure)
        seen.append(state.device_bytes)
        return value

    hooked = torch.optim.Optimizer.profile_hook_step(watched)
    hooked.hooked = True
    monkeypatch.setattr(torch.optim.AdamW, "step", hooked)
    state = keep_on_host(optimizer, 1100)
    for step in range(2):
        give_gradients(found, step + 1)
        optimizer.step()
    largest = 2 * 4 * 256
    assert len(seen) > 4
    assert max(seen) <= max(1100, largest)
    assert state.host_bytes == sum(2 * p.numel() * 4 for p in found)


def test_a_state_dict_is_whole_and_loads_back():
    first, second = parameters(), parameters()
    optimizer = torch.optim.AdamW(first)
    state = keep_on_host(optimizer, 500)
    give_gradients(first, 1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert state.device_bytes == state.host_bytes
    assert all(v["exp_avg"].abs().sum() > 0 for v in saved["state"].values())
    other = torch.optim.AdamW(second)
    again = keep_on_host(other, 500)
    with torch.no_grad():
        for mine, theirs in zip(second, first, strict=True):
            mine.copy_(theirs)
    other.load_state_dict(saved)
    for owner, found in ((optimizer, first), (other, second)):
        give_gradients(found, 2)
        owner.step()
    assert equal(first, second)
    assert state.device_bytes == again.device_bytes == 0
    assert state.host_bytes == again.host_bytes


def test_state_that_was_replaced_is_let_go():
    found = parameters()
    optimizer = torch.optim.AdamW(found)
    state = keep_on_host(optimizer, 500)
    give_gradients(found, 1)
    optimizer.step()
    before = state.host_bytes
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gc.collect()
    give_gradients(found, 2)
    optimizer.step()
    gc.collect()
    assert state.host_bytes == before


def test_hooks_schedules_scalers_and_closures_see_one_step():
    found = parameters()
    optimizer = torch.optim.SGD(found, lr=0.1, momentum=0.9)
    keep_on_host(optimizer, 1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    give_gradients(found, 1)
    optimizer.step()
    schedule.step()
    assert calls == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.05

    def closure() -> float:
        loss = sum(p.square().sum() for p in found)
        optimizer.zero_grad()
        loss.backward()
        return float(loss.detach())

    before = closure()
    assert optimizer.step(closure) == pytest.approx(before)
    assert closure() < before
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(sum(p.square().sum() for p in found)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert calls == ["before", "after"] * 3


def test_an_error_in_a_step_leaves_the_groups_whole():
    found = parameters()
    optimizer = torch.optim.AdamW(groups(found))
    keep_on_host(optimizer, 1)
    give_gradients(found, 1)
    found[2].grad = found[2].grad.to_sparse()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 3]


def test_optimizers_whose_parameters_depend_on_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"known to be right for adadelta, .*, not for LBFGS"):
        keep_on_host(torch.optim.LBFGS(parameters()))


@pytest.mark.parametrize("early", [False, True])
def test_a_compiled_model_trains_to_the_same_bits(early: bool):
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    second = copy.deepcopy(first)
    batch = torch.randn(6, 4)
    losses = []
    for model, word in ((first, None), (second, "optimizer")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if early else None
        compiled = autopar.compile(
            model, 1, batch, loss=lambda out, _: out.square().mean(), offload=word
        )
        assert compiled.plan.offload == (word or "")
        optimizer = optimizer or torch.optim.AdamW(compiled.parameters(), lr=0.1)
        for _ in range(3):
            loss = compiled(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        moments = [s["exp_avg"].untyped_storage().nbytes() for s in optimizer.state.values()]
        assert len(moments) == 4
        assert (sum(moments) == 0) == (word is not None)
        autopar.close(compiled)
    assert torch.equal(*losses)
    assert equal(first.parameters(), second.parameters())


def test_a_checkpoint_resumes_to_the_same_bits(tmp_path):
    def trained(steps: int, folder=None):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        batch = torch.randn(6, 4)
        compiled = autopar.compile(
            model, 1, batch, loss=lambda out, _: out.square().mean(), offload="optimizer"
        )
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
        if folder is not None:
            autopar.load_checkpoint(folder, compiled, optimizer)
        for _ in range(steps):
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return compiled, optimizer

    model, optimizer = trained(2)
    autopar.save_checkpoint(tmp_path / "saved", model, optimizer)
    autopar.close(model)
    resumed, _ = trained(1, tmp_path / "saved")
    whole, _ = trained(3)
    assert equal(resumed.parameters(), whole.parameters())
    autopar.close(resumed)
    autopar.close(whole)
