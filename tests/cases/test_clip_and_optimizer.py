"""Optimizers around a compiled model: memory, groups, state of factored moments."""

from __future__ import annotations

import logging

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from tests.dist.state_models import batch_of, build, groups_of, optimizer_of, train


def wide():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))


def priced(optimizer, limit):
    x = torch.ones(2, 64)
    return autopar.compile(
        wide(), "1:cpu", x, loss=lambda out, _: out.square().mean(), optimizer=optimizer,
        memory_limit=limit,
    )  # fmt: skip


def test_an_optimizer_that_does_not_fit_where_another_was_priced_is_refused_with_both_numbers():
    roomy = priced("sgd", "1GiB")
    state = 2 * 4 * sum(p.numel() for p in roomy.parameters())
    limit = roomy.plan.peak_bytes + state // 2
    tight = priced("sgd", limit)
    torch.optim.SGD(tight.parameters(), lr=0.1)
    torch.optim.Adafactor(tight.parameters())
    torch.optim.SGD(tight.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="AdamW keeps .* made for 'sgd' with 0 B: .* of ") as info:
        torch.optim.AdamW(tight.parameters())
    assert "optimizer='adamw'" in str(info.value)
    with pytest.raises(ConfigError, match="Adam keeps"):
        torch.optim.Adam(tight.parameters(), amsgrad=True)
    torch.optim.Adam(roomy.parameters(), amsgrad=True)


def test_an_optimizer_that_is_not_known_is_warned_about(caplog):
    class Special(torch.optim.SGD):
        pass

    model = priced("adamw", "1GiB")
    with caplog.at_level(logging.WARNING, "autopar"):
        torch.optim.AdamW(model.parameters())
        assert "optimizer" not in caplog.text
        Special(model.parameters(), lr=0.1)
    assert "optimizer Special is not known" in caplog.text


@pytest.mark.parametrize("foreach", [True, False])
def test_optimizers_built_before_compile_train_as_in_plain_torch(foreach):
    make = lambda m: torch.optim.AdamW(groups_of(m), lr=0.01, eps=1e-3, foreach=foreach)  # noqa: E731
    plain, batch = build()
    model, _ = build()
    early = make(model)
    model = autopar.compile(model, 1, batch)
    still = torch.optim.lr_scheduler.LambdaLR(early, lambda step: 1 / (1 + step))
    reference = make(plain)
    schedule = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: 1 / (1 + step))
    found = train(model, early, still, 4, clip=0.3)
    assert found == pytest.approx(train(plain, reference, schedule, 4, clip=0.3), rel=1e-5)


def test_fused_adamw_trains_as_the_plain_one():
    plain, batch = build()
    model, _ = build()
    model = autopar.compile(model, 1, batch)
    losses = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW(groups_of(each), lr=0.01, eps=1e-3, fused=each is model)
        still = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        losses.append(train(each, optimizer, still, 4))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_groups_by_name_and_a_group_with_another_membership_are_kept_apart():
    model, batch = build()
    model = autopar.compile(model, 1, batch)
    optimizer, _ = optimizer_of("adamw", model)
    model(**batch_of(0))["loss"].backward()
    optimizer.step()
    saved = optimizer.state_dict()
    decays = {n: g["weight_decay"] for g in saved["param_groups"] for n in g["params"]}
    assert decays["embed.weight"] == 0.1
    assert decays["first.bias"] == 0.0
    one_group = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="has 2 parameter groups, the optimizer has 1"):
        one_group.load_state_dict(saved)
    fewer = {**saved, "param_groups": [{**g, "params": g["params"][1:]}
                                       for g in saved["param_groups"]]}  # fmt: skip
    with pytest.raises(ConfigError, match="has no parameter 'position'"):
        optimizer.load_state_dict(fewer)


def test_the_norm_of_no_order_is_refused():
    model, batch = build()
    model = autopar.compile(model, 1, batch)
    model(**batch)["loss"].backward()
    with pytest.raises(ConfigError, match=r"norm_type is 0.0; give a number above 0"):
        model.clip_grad_norm_(1.0, 0.0)
