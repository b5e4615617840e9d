"""Facts about checkpoints and exports on four ranks."""

import contextlib
import copy
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import autopar
from autopar.capture.tracing import capture
from autopar.errors import ConfigError
from autopar.plan.types import MeshShape
from tests.dist.facts import Facts, tell
from tests.dist.ranks import RANK, WORLD, everywhere, whole
from tests.dist.state_models import (
    build,
    compiled,
    optimizer_of,
    train,
)
from tests.plans import hand_made_plan

fact = Facts()
STAGES, SHARDED = MeshShape(pp=4), MeshShape(dp=4)


def trained(mesh, kind="adamw", steps=2, **options):
    # torch's API asks for the state of unused parameters too, which no checkpoint has
    model, twin = compiled(mesh, unused=False, **options)
    optimizer, scheduler = optimizer_of(kind, model)
    train(model, optimizer, scheduler, steps)
    return model, twin, optimizer, scheduler


def go_on(model, optimizer, steps=3):
    still = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return train(model, optimizer, still, steps, first=2)


def same(found, wanted, what="losses"):
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    assert worst < 2e-6, (what, found, wanted)


@fact
def dcp_saves_and_loads_what_plain_torch_code_passes_under_another_plan(folder):
    model, _, optimizer, _ = trained(STAGES)
    where = folder / "user"
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=where)
    other, _ = compiled(SHARDED, zero=3, model_seed=3, unused=False)
    resumed, _ = optimizer_of("adamw", other)
    target = dict(zip(("model", "optim"), get_state_dict(other, resumed), strict=True))
    dcp.load(target, checkpoint_id=where)
    result = set_state_dict(
        other, resumed, model_state_dict=target["model"], optim_state_dict=target["optim"]
    )
    assert not result.missing_keys
    lrs = [[g["lr"] for g in o.param_groups] for o in (optimizer, resumed)]
    assert lrs[0] == lrs[1]
    assert lrs[0][0] != 0.02, "the schedule moved it"
    same(go_on(other, resumed), go_on(model, optimizer))


@fact
def nested_and_flat_optimizer_states_round_trip_with_groups_that_are_empty_on_a_rank(folder):
    model, _, optimizer, _ = trained(STAGES)
    counts = everywhere([len(group["params"]) for group in optimizer.param_groups])
    assert any(0 in numbers for numbers in counts)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        where = folder / f"flat-{flat}"
        dcp.save({"optim": saved}, checkpoint_id=where)
        other, _ = compiled(MeshShape(pp=2, dp=2), zero=1, unused=False)
        fresh, _ = optimizer_of("adamw", other)
        target = {"optim": get_optimizer_state_dict(other, fresh, options=options)}
        dcp.load(target, checkpoint_id=where)
        set_optimizer_state_dict(other, fresh, target["optim"], options=options)
        whole_options = StateDictOptions(full_state_dict=True)
        states = [
            get_optimizer_state_dict(m, o, options=whole_options)
            for m, o in ((model, optimizer), (other, fresh))
        ]
        _equal_states(*states)


def _equal_states(first, second):
    assert first["state"].keys() == second["state"].keys()
    for name, values in first["state"].items():
        for key, value in values.items():
            other = second["state"][name][key]
            assert torch.allclose(whole(value), whole(other), atol=1e-6), (name, key)
    groups = [
        [{k: v for k, v in g.items() if k != "params"} for g in s["param_groups"]]
        for s in (first, second)
    ]
    assert groups[0] == groups[1]
    names = [[set(g["params"]) for g in s["param_groups"]] for s in (first, second)]
    assert names[0] == names[1]


@fact
def full_states_are_those_of_the_same_training_in_plain_torch(_):
    model, twin, optimizer, _ = trained(STAGES)
    reference, scheduler = optimizer_of("adamw", twin)
    train(twin, reference, scheduler, 2)
    options = StateDictOptions(full_state_dict=True)
    wanted = get_optimizer_state_dict(twin, reference)
    _equal_states(get_optimizer_state_dict(model, optimizer, options=options), wanted)
    weights = get_model_state_dict(model, options=options)
    assert weights.keys() == twin.state_dict().keys()
    on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_cpu = get_model_state_dict(model, options=on_first)
    assert bool(on_cpu) == (RANK == 0)
    moments = get_optimizer_state_dict(model, optimizer, options=on_first)
    assert bool(moments) == (RANK == 0)
    other, _ = compiled(MeshShape(tp=4), seed=1, model_seed=2, unused=False)
    fresh, _ = optimizer_of("adamw", other)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, on_cpu, options=spread)
    set_optimizer_state_dict(other, fresh, moments, options=spread)
    plain, _ = build(seed=9, unused=False)
    plain.load_state_dict({n: v.clone() for n, v in weights.items()})
    again, _ = optimizer_of("adamw", plain)
    set_optimizer_state_dict(plain, again, copy.deepcopy(wanted))
    losses = [go_on(m, o) for m, o in ((model, optimizer), (other, fresh), (plain, again))]
    same(losses[1], losses[0])
    same(losses[2], losses[0])


@fact
def a_state_of_plain_torch_is_taken_up_by_name_and_one_by_position_refused(_):
    twin, _ = build(unused=False)
    reference, scheduler = optimizer_of("adamw", twin)
    train(twin, reference, scheduler, 2)
    model, _ = compiled(MeshShape(pp=2, tp=2), unused=False)
    model.load_state_dict(twin.state_dict())
    optimizer, _ = optimizer_of("adamw", model)
    optimizer.load_state_dict(get_optimizer_state_dict(twin, reference))
    same(go_on(model, optimizer), go_on(twin, reference))
    text = ""
    try:
        optimizer.load_state_dict(reference.state_dict())
    except ConfigError as error:
        text = str(error)
    assert "keyed by position" in text, text
    split, _ = compiled(MeshShape(dp=2, tp=2), seed=1, zero=1, unused=False)
    split.load_state_dict(twin.state_dict())
    fresh, _ = optimizer_of("adamw", split)
    fresh.load_state_dict(reference.state_dict())  # every rank has all: the user's own order
    same(go_on(split, fresh), go_on(twin, reference))


@fact
def named_parameters_in_an_optimizer_keep_their_names(_):
    model, twin = compiled(STAGES)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    saved = optimizer.state_dict()["param_groups"][0]
    assert saved["params"] == [n for n, _ in twin.named_parameters()]
    if list(model.parameters()):
        assert saved["param_names"] == saved["params"]
    optimizer.load_state_dict(optimizer.state_dict())
    held = optimizer.param_groups[0]
    assert held.get("param_names", []) == [n for n, _ in model.named_parameters()]


@fact
def wrong_checkpoints_are_refused_with_the_same_words_on_every_rank(folder):
    model, _, optimizer, _ = trained(STAGES)
    where = folder / "right"
    autopar.save_checkpoint(where, model, optimizer)
    before = {n: whole(p.detach()).clone() for n, p in model.named_parameters()}
    cases = []
    larger, _ = compiled(SHARDED, vocab=14, unused=False)
    cases.append((larger, where, "'embed.weight' has shape (13, 10) there and (14, 10) here"))
    torch.manual_seed(0)
    other, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.ones(4, 4)
    plan = hand_made_plan(capture(other, (x,)), SHARDED)
    other = autopar.compile(other, f"{WORLD}:cpu", x, plan=plan)
    cases.append((other, where, "4 names are missing ('0.weight', '0.bias', '1.weight', '1.bias')"))
    cases.append((model, folder / "nowhere", "there is no checkpoint at"))
    if RANK == 0:
        (folder / "empty").mkdir()
        for name, change in (("torn", _tear), ("beheaded", _behead)):
            target = folder / name
            target.mkdir()
            for file in where.iterdir():
                (target / file.name).write_bytes(file.read_bytes())
            change(target)
    dist.barrier()
    cases.append((model, folder / "empty", "is not a complete checkpoint"))
    cases.append((model, folder / "torn", "is not a complete checkpoint"))
    cases.append((model, folder / "beheaded", "can't be read"))
    for each, path, text in cases:
        found = ""
        with contextlib.suppress(ConfigError):
            try:
                autopar.load_checkpoint(path, each)
            except ConfigError as error:
                found = str(error)
                raise
        assert text in found, (text, found)
        assert len(set(everywhere(found))) == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter.detach()), before[name])
    autopar.load_checkpoint(where, model, optimizer)


def _tear(path):
    file = sorted(path.glob("*.distcp"))[0]
    file.write_bytes(file.read_bytes()[:-40])


def _behead(path):
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:50])


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    tell(fact.chosen(sys.argv[2:]), Path(sys.argv[1]))
