"""Cases of compiled training on real process groups; the first argument names the case."""

import copy
import logging
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import clip_grad_norm_  # imported before anything is compiled

import autopar
from autopar.capture.tracing import capture
from autopar.errors import ConfigError, InputError, PlanError
from autopar.plan.types import MeshShape
from tests.dist.facts import tell
from tests.dist.ranks import RANK, WORLD, close, refuses, whole
from tests.plans import hand_made_plan
from tests.zoo import build

# what is trained: model, pp, dp, tp, stages per rank, micro-batches, ZeRO levels
TRAINED = {
    2: {
        "t5-dp2-zero1": ("t5", 1, 2, 1, 1, 2, 1),
        "bert-tp2": ("bert", 1, 1, 2, 1, 1, 0),
        "resnet-dp2-zero3": ("resnet", 1, 2, 1, 1, 1, 3),
        "vit-pp2-interleaved": ("vit", 2, 1, 1, 2, 2, 0),
    },
    4: {
        "gpt2-pp2-tp2": ("gpt2", 2, 1, 2, 1, 2, 0),
        "llama-pp2-dp2-zero2-and-1": ("llama", 2, 2, 1, 1, 2, 2, 1),
    },
}
USED = (
    "surface", "state", "checkpoint", "early_optimizer", "refusals", "weights", "criterion", "half",
    "host_state",
)  # fmt: skip

# defaults, since pytest imports every file to look for doctests
DEVICES = f"{WORLD}:cpu"


def compiled(name, mesh, *, microbatches=1, zero=0, **options):
    """A compiled model, its eager twin and a batch."""
    model, batch = build(name)
    twin = copy.deepcopy(model)
    plan = hand_made_plan(
        capture(model, (), batch), mesh, num_microbatches=microbatches, zero=zero, num_devices=WORLD
    )
    return autopar.compile(model, DEVICES, batch, plan=plan, **options), twin, batch


def parity(name, pp, dp, tp, virtual, microbatches, *levels):
    """Three steps of two optimizers with clipping, then evaluation and a smaller batch.

    ``levels`` is the ZeRO level of all stages, or of each.
    """
    mesh = MeshShape(pp=pp, dp=dp, tp=tp, virtual=virtual)
    zero = levels if len(levels) > 1 else levels[0]
    model, twin, batch = compiled(name, mesh, microbatches=microbatches, zero=zero)
    named = dict(twin.named_parameters())
    assert set(dict(model.named_parameters())) <= set(named)
    makers = (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, foreach=True),
    )
    for make in makers:
        optimizer, reference = make(model.parameters()), make(twin.parameters())
        for _ in range(3):
            loss, wanted = model(**batch).loss, twin(**batch).loss
            close(loss, wanted, "loss")
            loss.backward()
            wanted.backward()
            for key, parameter in model.named_parameters():
                if parameter.grad is not None:
                    close(whole(parameter.grad), named[key].grad, key)
            norms = (
                clip_grad_norm_(model.parameters(), 0.5),
                clip_grad_norm_(twin.parameters(), 0.5),
            )
            close(*norms, "norm")
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        assert all(isinstance(key, str) for key in optimizer.state_dict()["state"])
    full = model.full_state_dict()
    if RANK == 0:
        wanted_state = twin.state_dict()
        assert list(full) == list(wanted_state) or set(full) == set(wanted_state)
        for key, value in wanted_state.items():
            close(full[key].float(), value.float(), key)
    else:
        assert full == {}
    small = {key: value[: value.shape[0] // 2] for key, value in batch.items()}
    close(model(**small).loss, twin(**small).loss, "loss of half the batch")
    model.eval(), twin.eval()
    with torch.no_grad():
        found, wanted = model(**batch), twin(**batch)
    assert type(found) is type(wanted)
    close(found.logits, wanted.logits, "logits")
    close(found.loss, wanted.loss, "loss in evaluation")


def surface():
    """What a training script may do beside the plain loop."""
    model, twin, batch = compiled("gpt2", MeshShape(pp=WORLD), microbatches=2)
    named = dict(twin.named_parameters())
    own = dict(model.named_parameters())
    everywhere = [None] * WORLD
    dist.all_gather_object(everywhere, sorted(own))
    assert sorted(n for names in everywhere for n in names) == sorted(named), "each has one owner"
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in own.values())
    for factor in (0.5, 0.25):  # accumulation: added, scaled by what backward received
        (model(**batch).loss * factor).backward()
        (twin(**batch).loss * factor).backward()
    for key, parameter in own.items():
        close(whole(parameter.grad), named[key].grad, key)
    for order in (1.0, 2.0, 3.0, float("inf")):
        wanted = clip_grad_norm_(twin.parameters(), 1e9, norm_type=order)
        close(model.clip_grad_norm_(1e9, order), wanted, f"norm {order}")
        close(clip_grad_norm_(own.values(), 1e9, norm_type=order), wanted, f"norm {order}")
    if RANK == WORLD - 1:
        next(iter(own.values())).grad.to_local().view(-1)[0] = float("nan")
    for order in (2.0, float("inf")):
        assert torch.isnan(model.clip_grad_norm_(1.0, order)), "a nan is seen by all"
    model.zero_grad()
    out = model(**batch)
    refuses(ConfigError, "outputs=['logits']", lambda: out.logits)
    assert out.loss.requires_grad
    assert "logits" not in vars(type(out))
    out.loss.backward()
    refuses(ConfigError, "already called", out.loss.backward)
    again = model(**batch).loss
    refuses(ConfigError, "create_graph", lambda: again.backward(create_graph=True))
    refuses(InputError, "no 'labels'", lambda: model(input_ids=batch["input_ids"]))
    odd = {**batch, "labels": batch["labels"].int()}
    refuses(InputError, "cast it to torch.int64", lambda: model(**odd))
    flat = {**batch, "input_ids": batch["input_ids"].flatten()}
    refuses(InputError, "with 1 dims", lambda: model(**flat))
    three = {key: value[:3] for key, value in batch.items()}
    close(model(**three).loss, twin(**three).loss, "loss of a batch that two does not divide")


def closing():
    """Models on equal meshes share their groups, which end with the last of them."""

    def threads():
        return len(os.listdir("/proc/self/task"))

    def trained(mesh):
        model, _, batch = compiled("gpt2", mesh)
        model(**batch).loss.backward()
        return model, batch

    split, spread = MeshShape(tp=WORLD), MeshShape(dp=WORLD)
    first, batch = trained(split)
    one = threads()
    second, _ = trained(split)
    assert threads() == one, "an equal mesh has groups already"
    autopar.close(first)
    refuses(ConfigError, "was closed by autopar.close()", lambda: first(**batch))
    second(**batch).loss.backward()
    assert threads() == one, "the second model holds them"
    third, _ = trained(spread)
    two = threads()
    assert two > one
    autopar.close(second)
    autopar.close(second)
    assert threads() < two, "nobody holds them"
    third(**batch).loss.backward()
    autopar.close(third)
    again, _ = trained(split)
    assert threads() <= one
    autopar.close(again)
    refuses(ConfigError, "not a compiled model", lambda: autopar.close(torch.nn.Linear(2, 2)))


def state():
    """State dicts of model and optimizer, by name, and back."""
    model, _, batch = compiled("gpt2", MeshShape(dp=WORLD), zero=1)
    other, _, _ = compiled("gpt2", MeshShape(pp=WORLD))
    held = model.state_dict()
    assert "lm_head.weight" in held
    assert "transformer.wte.weight" in held
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**batch).loss.backward()
    optimizer.step()
    full = model.full_state_dict()
    box = [full]
    dist.broadcast_object_list(box)
    result = other.load_state_dict(box[0])
    assert result.missing_keys == []
    assert result.unexpected_keys == []
    close(other(**batch).loss, model(**batch).loss, "loss after loading under another plan")
    refuses(
        ConfigError,
        "unexpected ['nobody']",
        lambda: other.load_state_dict({**box[0], "nobody": torch.zeros(1)}),
    )
    saved = optimizer.state_dict()
    assert set(saved["state"]) == {n for n, p in model.named_parameters()}
    moments = {
        n: {k: whole(v) if v.dim() else v for k, v in s.items()} for n, s in saved["state"].items()
    }
    resumed = torch.optim.AdamW(other.parameters(), lr=1.0)
    resumed.load_state_dict({**saved, "state": moments})
    assert resumed.param_groups[0]["lr"] == 1e-2
    for name, parameter in other.named_parameters():
        close(whole(resumed.state[parameter]["exp_avg"]), moments[name]["exp_avg"], name)


def early_optimizer():
    """Optimizers that were built before there were shards."""
    model, batch = build("gpt2")
    twin = copy.deepcopy(model)
    plan = hand_made_plan(capture(model, (), batch), MeshShape(pp=WORLD))
    before = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model = autopar.compile(model, DEVICES, plan=plan)
    waiting = torch.optim.SGD(model.parameters(), lr=0.1)
    assert model.plan is None
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(2):
        model(**batch).loss.backward()
        twin(**batch).loss.backward()
        before.step(), reference.step()
        before.zero_grad(), reference.zero_grad()
    own = {id(p) for p in model.parameters()}
    for optimizer in (before, waiting):
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == own
    named = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        close(whole(parameter), named[name], name)
    old, batch = build("gpt2")
    stale = torch.optim.SGD(old.parameters(), lr=0.1, momentum=0.9)
    old(**batch).loss.backward()
    stale.step()
    fresh = autopar.compile(old, DEVICES, batch, plan=plan)
    fresh(**batch).loss.backward()
    refuses(ConfigError, "build the optimizer after compile()", stale.step)


def refusals():
    """Launches and plans that do not fit, refused on every rank."""
    model, batch = build("gpt2")
    captured = capture(model, (), batch)
    plan = hand_made_plan(captured, MeshShape(pp=2, dp=2))
    refuses(
        ConfigError,
        f"4 devices, the launch has {WORLD} ranks",
        lambda: autopar.compile(model, inputs=batch, plan=plan),
    )
    refuses(
        ConfigError,
        f"4 devices, the launch has {WORLD} ranks",
        lambda: autopar.compile(model, 4, batch),
    )
    llama, ids = build("llama")
    fits = hand_made_plan(captured, MeshShape(pp=WORLD))
    refuses(
        PlanError,
        "made for a model with hash",
        lambda: autopar.compile(llama, DEVICES, ids, plan=fits),
    )
    other, batch = build("gpt2", layers=1 + RANK)
    refuses(
        ConfigError,
        "build the same model",
        lambda: autopar.compile(other, DEVICES, batch, plan=fits),
    )
    assert type(model).__mro__[1].__name__ != "CompiledModule", "a refused model is left as it was"


def weights():
    """Weights that differ are rank 0's; those of a meta model are the same anywhere."""
    model, batch = build("llama", seed=RANK)
    plan = hand_made_plan(capture(model, (), batch), MeshShape(dp=WORLD))
    model = autopar.compile(model, DEVICES, build("llama")[1], plan=plan)
    first = dict(build("llama", seed=0)[0].named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), first[name]), name
    whole_model, batch = build("llama", device="meta")
    alone = hand_made_plan(capture(whole_model, (), batch), MeshShape(), num_devices=WORLD)
    whole_model = autopar.compile(whole_model, DEVICES, batch, plan=alone, seed=3)
    split, _ = build("llama", device="meta")
    plan = hand_made_plan(capture(split, (), batch), MeshShape(tp=WORLD), zero=0)
    split = autopar.compile(split, DEVICES, batch, plan=plan, seed=3)
    close(split(**batch).loss, whole_model(**batch).loss, "loss of the same seed")
    wanted = torch.optim.AdamW(whole_model.parameters())  # also where there are no parameters
    whole_model(**batch).loss.backward()
    whole_model.clip_grad_norm_(1.0)
    wanted.step()
    if RANK:
        assert list(whole_model.parameters()) == []
        assert wanted.state_dict()["state"] == {}


def criterion():
    """A loss outside the model: all forwards in the call, all backwards in backward()."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
    plan = hand_made_plan(capture(model, (x,)), MeshShape(pp=WORLD), num_microbatches=2)
    model = autopar.compile(model, DEVICES, x, plan=plan)
    named = dict(twin.named_parameters())
    for _ in range(2):
        found = torch.nn.functional.cross_entropy(model(x), y)
        wanted = torch.nn.functional.cross_entropy(twin(x), y)
        close(found, wanted, "loss")
        found.backward()
        wanted.backward()
    for name, parameter in model.named_parameters():
        close(whole(parameter.grad), named[name].grad, name)


def host_state():
    """Optimizer state in host memory: the same bits, whole in state dicts, loaded back."""
    trained = []
    for offload in ("never", "optimizer"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
        batch = torch.randn(8, 6)
        model = autopar.compile(
            model, DEVICES, batch, loss=lambda out, _: out.square().mean(),
            dp=WORLD, tp=1, pp=1, zero=1, offload=offload,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:  # on by what was saved
                saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                set_optimizer_state_dict(model, optimizer, saved)
        moments = [state["exp_avg"].to_local() for state in optimizer.state.values()]
        assert moments
        assert {m.untyped_storage().nbytes() > 0 for m in moments} == {offload == "never"}
        named = optimizer.state_dict()["state"]
        assert all(isinstance(key, str) for key in named)
        trained.append((model, named))
    (first, states), (second, others) = trained
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
    for name, values in states.items():
        assert torch.equal(values["exp_avg_sq"].to_local(), others[name]["exp_avg_sq"].to_local())


def checkpoint():
    """torch's checkpoints, saved under one plan and loaded under another."""
    model, _, batch = compiled("gpt2", MeshShape(pp=WORLD), microbatches=2)
    first = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**batch).loss.backward()
    first.step()
    first.zero_grad()
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    by_name = get_optimizer_state_dict(model, first, options=flat)
    saved = {"model": model.state_dict(), "optimizer": by_name, "plain": first.state_dict()}
    dcp.save(saved, checkpoint_id=box[0])
    other, _, _ = compiled("gpt2", MeshShape(dp=WORLD), zero=1)
    second = torch.optim.AdamW(other.parameters(), lr=1e-2)
    third = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other(**batch).loss.backward()
    third.step()  # so that it has moments to load into
    third.zero_grad()
    loaded = {
        "model": other.state_dict(),
        "optimizer": get_optimizer_state_dict(other, second, options=flat),
        "plain": third.state_dict(),
    }
    dcp.load(loaded, checkpoint_id=box[0])
    set_optimizer_state_dict(other, second, loaded["optimizer"], options=flat)
    third.load_state_dict(loaded["plain"])
    for name, parameter in other.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            close(whole(third.state[parameter][key]), whole(second.state[parameter][key]), name)
    for each, optimizer in ((model, first), (other, second)):
        optimizer.zero_grad()
        each(**batch).loss.backward()
        optimizer.step()
    found, wanted = other.full_state_dict(), model.full_state_dict()
    for name, value in wanted.items():
        close(found[name], value, name)


def half():
    """Half precision with a gradient scaler: all ranks skip the same steps."""
    model, batch = build("gpt2")
    cast = torch.autocast("cpu", dtype=torch.float16)
    with cast:
        plan = hand_made_plan(capture(model, (), batch), MeshShape(pp=WORLD))
        model = autopar.compile(model, DEVICES, batch, plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)
    scales = []
    for _ in range(14):
        with cast:
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    everywhere = [None] * WORLD
    dist.all_gather_object(everywhere, scales)
    assert all(other == scales for other in everywhere)
    assert scales[0] < 2.0**24, "the first step overflows"
    assert scales[-1] == scales[-2], "and a later one does not"


def wrong_rank():
    """One rank passes a wrong batch: all end with its error."""
    model, _, batch = compiled("gpt2", MeshShape(pp=WORLD))
    model(**batch).loss.backward()
    if RANK == 1:
        batch = {**batch, "labels": batch["labels"].int()}
    model(**batch).loss.backward()
    model(**batch).loss.backward()


def different_calls(what):
    """The ranks pass different batches, shapes or modes: all are told which, before the step."""
    model, _, batch = compiled("gpt2", MeshShape(dp=WORLD))
    if what == "content" and RANK == 1:
        batch["input_ids"] = batch["input_ids"].flip(0)
    if what != "content":
        model(**batch).loss.backward()
    if what == "shape" and RANK == 1:
        batch = {name: tensor[:4] for name, tensor in batch.items()}
    if what == "mode":
        model.train(RANK == 0)
    said = {
        "content": "different calls: the content of input 'input_ids' is ",
        "shape": "input 'input_ids' is int64[4, 16] on rank 1, int64[8, 16] on rank 0",
        "mode": "the mode is eval on rank 1, train on rank 0",
    }[what]
    refuses(InputError, said, lambda: model(**batch))


def trained():
    """Training equals one device, told by model and mesh in one launch."""

    def training(name, numbers):
        def holds():
            parity(*numbers)

        holds.__name__ = name
        return holds

    tell(training(*item) for item in TRAINED[WORLD].items())


def used():
    """What is true of compiled models on ranks that live on, told by name in one launch."""
    tell(globals()[name] for name in USED)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    case, *numbers = sys.argv[1:]
    if case == "parity":
        parity(numbers[0], *map(int, numbers[1:]))
    else:
        globals()[case](*numbers)
    sys.stdout.write("passed\n")
