"""Facts about state around the step on four ranks: ties, clipping, optimizers, initialisation."""

import copy
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,  # all of them imported before anything is compiled
)

import autopar
from autopar.capture.tracing import capture
from autopar.errors import ConfigError
from autopar.plan.types import MeshShape
from tests.dist.facts import Facts, tell
from tests.dist.ranks import RANK, WORLD, everywhere, whole
from tests.dist.state_models import (
    VOCAB,
    batch_of,
    compiled,
    groups_of,
    optimizer_of,
)
from tests.plans import hand_made_plan

fact = Facts()
STAGES, SPLIT, SHARDED = MeshShape(pp=4), MeshShape(pp=2, tp=2), MeshShape(dp=4)


def close(found, wanted, what, rtol=2e-5):
    found = whole(found.detach())
    worst = float((found - wanted).abs().max()) if found.numel() else 0.0
    assert torch.allclose(found, wanted, rtol=rtol, atol=2e-6), (what, worst)


def refuses(text, call, kind=ConfigError):
    with pytest.raises(kind, match=re.escape(text)):
        call()


def whole_state(model):
    box = [model.full_state_dict()]
    dist.broadcast_object_list(box)
    return box[0]


def backward(model, step=0, vocab=VOCAB):
    loss = model(**batch_of(step, vocab))["loss"]
    loss.backward()
    return loss.detach()


def same_training(model, twin, make, *, steps=5, clip=None, vocab=VOCAB):
    """The compiled model and its twin stay together, step by step, tied copies bit by bit."""
    optimizers = make(model), make(twin)
    for step in range(steps):
        close(backward(model, step, vocab), backward(twin, step, vocab), f"loss {step}")
        if clip is not None:
            norms = [clip_grad_norm_(m.parameters(), clip) for m in (model, twin)]
            close(*norms, f"norm {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = whole_state(model)
        assert torch.equal(state["embed.weight"], state["head.weight"])
        for name, value in twin.state_dict().items():
            close(state[name].float(), value.float(), f"{name} after step {step}")


# ------------------------------------------------------------------ tied weights
@fact
def a_tied_weight_on_two_stages_trains_as_one_under_three_optimizers(_):
    runs = (STAGES, "sgd", None), (SPLIT, "adamw", None), (STAGES, "sgd", 0.05)
    for mesh, kind, clip in runs:
        model, twin = compiled(mesh)
        same_training(model, twin, lambda m, k=kind: optimizer_of(k, m)[0], clip=clip)


@fact
def a_tied_weight_is_one_parameter_with_the_gradient_of_both_uses(_):
    model, twin = compiled(STAGES)
    owned = [n for names in everywhere([n for n, _ in model.named_parameters()]) for n in names]
    assert sorted(owned) == sorted(n for n, _ in twin.named_parameters())
    backward(model), backward(twin)
    held = dict(model.named_parameters())
    if "embed.weight" in held:
        close(held["embed.weight"].grad, twin.embed.weight.grad, "tied gradient")
        state = model.state_dict()
        assert state["embed.weight"].to_local().data_ptr() == (
            state["head.weight"].to_local().data_ptr()
        )


@fact
def every_row_of_an_unevenly_sharded_tied_vocabulary_is_trained(_):
    model, twin = compiled(SHARDED, zero=3, vocab=10)
    assert everywhere(model.embed.weight.to_local().shape[0]) == [3, 3, 3, 1]
    all_rows_train(model, twin, 10)


def all_rows_train(model, twin, vocab):
    before = twin.embed.weight.detach().clone()
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    same_training(model, twin, sgd, steps=3, vocab=vocab)
    moved = (whole_state(model)["embed.weight"] - before).abs().amax(1)
    assert (moved > 1e-5).all(), moved


@fact
def a_vocabulary_split_over_tensor_ranks_has_one_placement_for_both_uses(_):
    from tests.dist.state_models import build

    vocab, shards = {4: (10, [3, 3, 3, 1]), 3: (101, [34, 34, 33])}[WORLD]
    options = {"tp": WORLD, "dp": 1, "pp": 1, "placements": {"embed.weight": "S(0)"}}
    model, batch = build(vocab=vocab)
    twin = copy.deepcopy(model)
    model = autopar.compile(model, f"{WORLD}:cpu", batch, **options)
    assert model.head.weight is model.embed.weight
    assert everywhere(model.embed.weight.to_local().shape[0]) == shards
    all_rows_train(model, twin, vocab)


@fact
def a_split_that_leaves_a_rank_without_rows_trains_all_rows_or_is_refused(_):
    from tests.dist.state_models import build

    model, batch = build(vocab=5)
    options = {"tp": 4, "dp": 1, "pp": 1, "placements": {"embed.weight": "S(0)"}}
    with pytest.raises(autopar.ConstraintError, match="4 ranks over 5 rows leave one empty"):
        autopar.compile(model, f"{WORLD}:cpu", batch, **options)
    captured = capture(model, (), batch)
    twin = copy.deepcopy(model)
    for seed in range(100):
        plan = hand_made_plan(captured, MeshShape(tp=4), seed=seed)
        if plan.splits["tp"].get("p_embed_weight") == "S(0)":
            break
    model = autopar.compile(model, f"{WORLD}:cpu", batch, plan=plan)
    assert everywhere(model.embed.weight.to_local().shape[0]) == [2, 2, 1, 0]
    all_rows_train(model, twin, 5)


@fact
def state_dicts_of_a_tied_model_are_strict_both_ways_with_plain_torch(_):
    from tests.dist.state_models import build

    for mesh in (STAGES, MeshShape(tp=4)):
        model, twin = compiled(mesh)
        state = whole_state(model)
        assert set(state) == set(twin.state_dict())
        other, _ = build(seed=3)
        other.load_state_dict(state, strict=True)
        close(backward(other), backward(twin), "loss of the loaded plain model")
        fresh, _ = build(seed=4)
        model.load_state_dict(fresh.state_dict(), strict=True)
        close(backward(model), backward(fresh), "loss of the loaded compiled model")
        once = {n: v for n, v in state.items() if n != "head.weight"}
        assert model.load_state_dict(once, strict=True).missing_keys == []
        refuses("missing ['first.bias']", lambda m=model, s=state: m.load_state_dict(
            {n: v for n, v in s.items() if n != "first.bias"}
        ))  # fmt: skip


# ------------------------------------------------------------------ clipping
@fact
def the_clipped_norm_is_the_whole_models_under_every_order(_):
    model, twin = compiled(SPLIT)
    assert not any(torch.equal(p, q) for p, q in [(twin.spare, twin.position)])
    for order in (1.0, 2.0, float("inf")):
        for most in (0.05, 1e6):
            for foreach in (True, False) if order == 2.0 else (None,):
                for each in (model, twin):
                    each.zero_grad()
                    backward(each)
                wanted = clip_grad_norm_(twin.parameters(), most, order)
                found = clip_grad_norm_(model.parameters(), most, order, foreach=foreach)
                assert len(set(everywhere(float(found)))) == 1
                close(found, wanted, f"norm of order {order}")
                for name, parameter in model.named_parameters():
                    grad = dict(twin.named_parameters())[name].grad
                    assert (parameter.grad is None) == (grad is None), name
                    if grad is not None:
                        close(parameter.grad, grad, f"{name} clipped to {most}")
    assert "spare" in dict(twin.named_parameters())
    assert twin.spare.grad is None
    assert twin.position.grad is None


@fact
def torchs_other_clipping_functions_see_the_whole_model(_):
    model, twin = compiled(SPLIT)
    backward(model), backward(twin)
    grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, twin)]
    norm, wanted = get_total_norm(grads[0]), get_total_norm(grads[1])
    close(norm, wanted, "get_total_norm")
    clip_grads_with_norm_(model.parameters(), 0.03, norm)
    clip_grads_with_norm_(twin.parameters(), 0.03, wanted)
    clip_grad_value_(model.parameters(), 0.002)
    clip_grad_value_(twin.parameters(), 0.002)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            close(parameter.grad, dict(twin.named_parameters())[name].grad, name)
            assert float(whole(parameter.grad).abs().max()) <= 0.00201


@fact
def a_nan_on_one_rank_is_in_every_ranks_norm(_):
    for mesh in (STAGES, SHARDED):
        model, _ = compiled(mesh, zero=3 if mesh is SHARDED else 0)
        backward(model)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        grads = [g for g in grads if g.to_local().numel()]
        last = max(rank for rank, count in enumerate(everywhere(len(grads))) if count)
        assert last > 0
        if last == RANK:
            grads[0].to_local().view(-1)[0] = float("nan")
        for order in (1.0, 2.0, float("inf")):
            norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None], order)
            assert torch.isnan(norm), (mesh, order)
        refuses(
            "the total norm of order 2.0",
            lambda m=model: clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True),
            RuntimeError,
        )


@fact
def gradients_of_a_module_that_is_not_compiled_join_the_norm_once(_):
    model, twin = compiled(MeshShape(dp=2, tp=2), zero=1)
    torch.manual_seed(1)
    beside = torch.nn.Linear(3, 3)
    other = copy.deepcopy(beside)
    for layer in (beside, other):
        layer(torch.ones(2, 3)).sum().backward()
    backward(model), backward(twin)
    for foreach in (True, False):
        found = clip_grad_norm_([*model.parameters(), *beside.parameters()], 0.5, foreach=foreach)
        wanted = clip_grad_norm_([*twin.parameters(), *other.parameters()], 0.5)
        close(found, wanted, "norm with plain parameters")
        close(beside.weight.grad, other.weight.grad, "plain gradient")
        close(model.first.weight.grad, twin.first.weight.grad, "sharded gradient")
    beside.weight.grad.mul_(RANK + 1)
    refuses("have another norm on rank", lambda: clip_grad_norm_(
        [*model.parameters(), *beside.parameters()], 0.5
    ))  # fmt: skip


# ------------------------------------------------------------------ optimizers
@fact
def an_optimizers_state_is_keyed_by_name_and_its_groups_are_the_same_on_all_ranks(_):
    model, twin = compiled(STAGES)
    optimizer = torch.optim.AdamW(groups_of(model))
    backward(model)
    optimizer.step()
    saved = optimizer.state_dict()
    wanted = [
        [n for n, p in twin.named_parameters() if (p.dim() > 1) == matrices]
        for matrices in (True, False)
    ]
    assert [group["params"] for group in saved["param_groups"]] == wanted
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.01, 0.0]
    states = everywhere(sorted(saved["state"]))
    trained = [n for n, p in twin.named_parameters() if p.requires_grad and n != "spare"]
    found = sorted(n for names in states for n in names)
    assert found == sorted(trained), (states, trained)
    mine = {n: id(p) for n, p in model.named_parameters()}
    assert set(saved["state"]) <= set(mine)
    moved = {**saved, "param_groups": saved["param_groups"][::-1]}
    refuses("in group 1, the optimizer in group 0", lambda: optimizer.load_state_dict(moved))


@fact
def adafactor_steps_shards_as_whole_tensors(_):
    for mesh, zero, foreach in ((SHARDED, 3, True), (MeshShape(tp=4), 0, False), (SPLIT, 0, True)):
        model, twin = compiled(mesh, zero=zero, seed=1)
        make = lambda m, f=foreach: torch.optim.Adafactor(  # noqa: E731
            groups_of(m), lr=0.05, eps=(1e-2, 1e-3), weight_decay=0.1, foreach=f
        )
        same_training(model, twin, make, steps=3)


# ------------------------------------------------------------------ initialisation
class Initialised(torch.nn.Module):
    """A model with an initialiser of its own."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 10)
        self.second = torch.nn.Linear(10, 6)
        self.register_buffer("table", torch.zeros(6))
        self.register_buffer("cache", torch.ones(6))
        self.inner = torch.nn.Module()
        self.inner.register_buffer("cache", self.cache)

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean() + (self.table * self.cache).sum()

    def init_weights(self, state):
        self.table = torch.arange(6.0)
        self.first.weight.data.normal_(std=0.5)
        torch.nn.init.kaiming_uniform_(self.second.weight)
        with torch.no_grad():
            self.first.bias.fill_(0.25)
        self.second.load_state_dict(state, strict=False)


def initialised(mesh, **options):
    torch.manual_seed(0)
    model, x = Initialised(), torch.ones(8, 6)
    plan = hand_made_plan(capture(model, (x,)), mesh, **options)
    return autopar.compile(copy.deepcopy(model), f"{WORLD}:cpu", x, plan=plan), model, x


@fact
def weights_set_after_compile_are_those_set_before(_):
    bias = {"bias": torch.linspace(0, 1, 6)}
    for mesh, options in ((SHARDED, {"zero": 3}), (MeshShape(tp=4), {"seed": 2}), (SHARDED, {})):
        model, twin, x = initialised(mesh, **options)
        torch.manual_seed(11)
        twin.init_weights(bias)
        torch.manual_seed(11 + RANK)  # rank 0's numbers count
        model.init_weights({"bias": _like(model.second.bias, bias["bias"])})
        close(model(x), twin(x), "loss")
        state = whole_state(model)
        for name, value in twin.state_dict().items():
            assert torch.equal(state[name], value), name
        replicas = everywhere([whole(p.detach()) for p in model.parameters()])
        for other in replicas:
            assert all(map(torch.equal, other, replicas[0]))
        model.load_state_dict({n: v + 1 for n, v in twin.state_dict().items()})
        assert torch.equal(whole_state(model)["table"], twin.table + 1)


def _like(parameter, value):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


@fact
def writes_that_programs_can_not_see_are_refused_by_name(_):
    model, _, x = initialised(SHARDED)
    kept = model.first.weight
    model.first.weight = torch.nn.Parameter(torch.zeros(10, 6))
    refuses("parameter 'first.weight' was replaced", lambda: model(x))
    model.first.weight = kept
    model.cache = torch.full((6,), 3.0)
    refuses("'cache', 'inner.cache' was assigned under some", lambda: model(x))
    model.inner.cache = model.cache
    assert float(model(x)) == float(model(x))
    assert model.inner.cache is model.cache
    assert float(model.cache[0]) == 3.0
    model.table = torch.zeros(7)
    refuses("assigned a tensor of shape (7,), it was compiled with (6,)", lambda: model(x))
    staged, _, _ = initialised(MeshShape(pp=4))
    own = next(iter(staged.parameters()), None)
    if own is not None:
        refuses("a model in several pipeline stages", lambda: torch.nn.init.normal_(own))
    dist.barrier()


@fact
def a_compiled_model_is_not_copied_but_says_what_to_do(_):
    model, _, _ = initialised(SHARDED)
    refuses("copy.deepcopy of a compiled Initialised", lambda: copy.deepcopy(model))


# ------------------------------------------------------------------ frozen parameters
class Adapted(torch.nn.Module):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self, width, rank=2):
        super().__init__()
        self.base = torch.nn.Linear(width, width).requires_grad_(False)
        self.down = torch.nn.Linear(width, rank, bias=False)
        self.up = torch.nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@fact
def adapters_in_all_layers_train_beside_a_frozen_base(_):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Adapted(8) for _ in range(4)])
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    twin = copy.deepcopy(model)
    loss = lambda out, target: (out - target).square().mean()  # noqa: E731
    model = autopar.compile(
        model, f"{WORLD}:cpu", {"input": x, "batch": y}, loss=loss, pp=2, dp=2, tp=1
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (model, twin)]
    for _ in range(3):
        found, wanted = model(input=x, batch=y), loss(twin(x), y)
        close(found, wanted, "loss")
        found.backward(), wanted.backward()
        with_grad = [n for n, p in model.named_parameters() if p.grad is not None]
        assert all("base" not in name for name in with_grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trained = {n for names in everywhere([n for n, p in model.named_parameters()
               if p.requires_grad]) for n in names}  # fmt: skip
    assert trained == {n for n, p in twin.named_parameters() if p.requires_grad}
    state = whole_state(model)
    for name, value in twin.state_dict().items():
        close(state[name], value, name)
    adapters = sum(p.numel() * 4 for p in twin.parameters() if p.requires_grad)
    most = max(s.memory.grads_bytes for s in model.plan.stages)
    assert 0 < most <= adapters
    assert max(s.memory.optimizer_bytes for s in model.plan.stages) <= 2 * adapters
    next(p for n, p in model.named_parameters() if "base" in n).requires_grad_(True)
    refuses("was frozen when the model was compiled", lambda: model(input=x, batch=y))


# ------------------------------------------------------------------ buffers
@fact
def statistics_and_counters_move_once_per_step_as_on_one_device(_):
    for mesh in (SHARDED, STAGES):
        model, twin = compiled(mesh)
        for step in range(2):
            backward(model, step), backward(twin, step)
        state = whole_state(model)
        for name in ("norm.running_mean", "norm.running_var"):
            close(state[name], twin.state_dict()[name], name)
        assert int(state["norm.num_batches_tracked"]) == 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    tell(fact.chosen(sys.argv[2:]), Path(sys.argv[1]))
