"""Facts about bad batches and odd pipelines; the first argument says how many ranks it is for.

Every rank runs under a hash seed of its own.
"""

import contextlib
import math
import os
import sys
import time

import torch
import torch.distributed as dist

import autopar
import cost_models.local
from autopar.api import plan as plan_only
from autopar.capture.tracing import capture
from autopar.errors import ConfigError, InputError
from autopar.plan.io import plan_hash
from autopar.plan.types import MeshShape
from tests.dist.data_cases import WORDS, Model, example
from tests.dist.facts import tell
from tests.dist.ranks import RANK, WORLD, refuses
from tests.plans import hand_made_plan

# defaults, since pytest imports every file to look for doctests
DEVICES = f"{WORLD}:cpu"


def models():
    """The same model under three plans."""
    batch = example()
    for mesh, count in (
        (MeshShape(dp=WORLD), 1), (MeshShape(pp=WORLD), 2), (MeshShape(tp=WORLD), 1)
    ):  # fmt: skip
        model = Model()
        plan = hand_made_plan(
            capture(model, (), batch), mesh, num_microbatches=count, num_devices=WORLD
        )
        yield autopar.compile(model, DEVICES, batch, plan=plan)


def one_model():
    return next(iter(models()))


def spoilt(name, value):
    batch = example()
    batch[name] = batch[name].clone()
    batch[name][2, 5] = value
    return batch


# ------------------------------------------------------------ two ranks
class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        )

    def forward(self, x, y):
        return ((self.body(x) - y) ** 2).mean()


def a_nan_in_the_batch_gives_what_one_device_gives_on_every_rank():
    torch.manual_seed(3)
    batch = {"x": torch.randn(8, 8), "y": torch.randn(8, 4)}
    bad = {**batch, "x": batch["x"].clone()}
    bad["x"][3, 3] = math.nan
    for mesh in (MeshShape(dp=2), MeshShape(pp=2), MeshShape(tp=2)):
        model = Regression()
        plan = hand_made_plan(capture(model, (), batch), mesh, num_microbatches=2)
        model = autopar.compile(model, DEVICES, batch, plan=plan)
        clip = torch.nn.utils.clip_grad_norm_
        for _ in range(2):
            loss = model(**bad)
            assert loss.isnan()
            loss.backward()
            assert clip(model.parameters(), 1.0, norm_type=math.inf).isnan()
            for call in (
                lambda m=model: m.clip_grad_norm_(1.0, error_if_nonfinite=True),
                lambda m=model, c=clip: c(m.parameters(), 1.0, error_if_nonfinite=True),
            ):
                refuses(RuntimeError, "of the gradients is nan", call)
            model.zero_grad()
        loss, alone = model(**batch), Regression()
        wanted = alone(**batch)
        assert torch.allclose(loss, wanted, rtol=1e-5)
        loss.backward(), wanted.backward()
        norm = model.clip_grad_norm_(1e9, error_if_nonfinite=True)
        assert torch.allclose(norm, clip(alone.parameters(), 1e9), rtol=1e-5)


def a_token_id_out_of_range_is_named_on_every_rank_under_every_plan():
    for model in models():
        text = f"step 1: input 'input_ids' holds {WORDS}: 'embed.weight' takes 0 to {WORDS - 1}"
        refuses(InputError, text, lambda m=model: m(**spoilt("input_ids", WORDS)))
        refuses(
            InputError, "holds -1: 'embed.weight'", lambda m=model: m(**spoilt("input_ids", -1))
        )
        model(**example())["loss"].backward()
        refuses(InputError, "step 2: input", lambda m=model: m(**spoilt("input_ids", WORDS)))


def a_token_id_out_of_range_is_named_where_the_vocabulary_is_split():
    model = autopar.compile(Model(), DEVICES, example(), tp=2, placements={"embed.weight": "S(0)"})
    refuses(InputError, "'embed.weight' takes 0 to 31", lambda: model(**spoilt("input_ids", 32)))
    assert torch.allclose(model(**example())["loss"], Model()(**example())["loss"], rtol=1e-5)


def a_label_out_of_range_is_named_and_an_ignored_one_is_none():
    for model in models():
        text = f"input 'labels' holds {WORDS}: the loss at data_cases.py"
        refuses(InputError, text, lambda m=model: m(**spoilt("labels", WORDS)))
        assert model(**spoilt("labels", -100))["loss"].isfinite()


def batches_of_another_kind_are_refused():
    model, batch = one_model(), example()
    ids, labels = batch["input_ids"], batch["labels"]
    for given, text in (
        ({**batch, "labels": labels.int()}, "'labels' is int32[8, 6], the plan was made for int64"),
        (
            {**batch, "input_ids": ids.to("meta")},
            "'input_ids' is on meta, this rank computes on cp",
        ),
        ({name: tensor[:0] for name, tensor in batch.items()}, "which is empty; give at least one"),
        ({**batch, "labels": None}, "the batch has no 'labels'"),
        ({**batch, "input_ids": ids.tolist()}, "the batch has no 'input_ids'"),
        ({**batch, "labels": labels[:4]}, "'labels' [4, 6] instead of [8, 6]"),
    ):
        refuses(InputError, text, lambda g=given: model(**g))
    refuses(ConfigError, "missing a required argument: 'labels'", lambda: model(input_ids=ids))
    refuses(ConfigError, "an unexpected keyword argument 'mask'", lambda: model(**batch, mask=ids))
    assert torch.allclose(model(**batch)["loss"], Model()(**batch)["loss"], rtol=1e-5)


def an_optimizer_of_the_parameters_before_compiling_is_refused_once_it_has_state():
    model, batch = Model(), example()
    stale = torch.optim.AdamW(model.parameters())
    model(**batch)["loss"].backward()
    stale.step()
    model = autopar.compile(model, DEVICES, batch, dp=2)
    model(**batch)["loss"].backward()
    refuses(ConfigError, "holds parameters from before autopar.compile()", stale.step)


def a_loss_that_is_no_scalar_is_refused():
    batch = {**example(), "batch": example()["labels"]}
    for loss, text in (
        (lambda out, labels: out["logits"], "must return a scalar tensor, got shape (8, 6, 32)"),
        (lambda out, labels: 1.0, "must return a scalar tensor, got <class 'float'>"),
        (lambda out, labels: labels.sum(), "depends on no trainable parameter"),
    ):
        refuses(ConfigError, text, lambda f=loss: autopar.compile(Model(), DEVICES, batch, loss=f))


def arguments_of_compile_that_differ_between_ranks_are_refused():
    for name, values in (("dp", (2, 1)), ("seed", (0, 1)), ("zero", (0, 1))):
        refuses(
            ConfigError,
            f"autopar.compile({name}=) is {values[1]} on rank 1 and {values[0]} on rank 0",
            lambda n=name, v=values: autopar.compile(Model(), DEVICES, example(), **{n: v[RANK]}),
        )


def a_model_wrapped_once_more_is_refused():
    refuses(
        ConfigError,
        "DistributedDataParallel would average the gradients of Model once more",
        lambda: torch.nn.parallel.DistributedDataParallel(one_model()),
    )


def a_loss_may_be_scaled_in_place():
    model, alone, batch = one_model(), Model(), example()
    for each in (model, alone):
        loss = each(**batch)["loss"]
        loss *= 0.5
        loss.backward()
    wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    assert torch.allclose(model.clip_grad_norm_(1e9), wanted, rtol=1e-5)


# ------------------------------------------------------------ any number of ranks
class TwoStreams(torch.nn.Module):
    """Four blocks over two streams and a skip: every cut has several tensors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.left = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.right = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, y):
        a, b, skip = x, x.flip(1), torch.tanh(x)
        for left, right in zip(self.left, self.right, strict=True):
            a, b = torch.tanh(left(a) + b), torch.tanh(right(b)) * a
        return ((a + b + skip - y) ** 2).mean()


def _stages(microbatches):
    torch.manual_seed(5)
    batch = {"x": torch.randn(12, 8), "y": torch.randn(12, 8)}
    model, alone = TwoStreams(), TwoStreams()
    plan = hand_made_plan(
        capture(model, (), batch), MeshShape(pp=WORLD), num_microbatches=microbatches
    )
    model = autopar.compile(model, DEVICES, batch, plan=plan)
    for _ in range(2):
        loss, wanted = model(**batch), alone(**batch)
        loss.backward(), wanted.backward()
        assert torch.allclose(loss, wanted, rtol=1e-5)
    named = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        found = parameter.grad.full_tensor()
        assert torch.allclose(found, named[name].grad, rtol=1e-4, atol=1e-6), name
    return model


def cuts_of_several_tensors_arrive():
    model = _stages(4)
    edges = model._autopar_state.session.planned_programs.forward_edges
    assert len(edges) >= WORLD - 1
    assert max(map(len, edges.values())) >= 2


def fewer_microbatches_than_stages_train_as_one_device():
    for microbatches in range(1, WORLD):
        _stages(microbatches)


def ranks_with_different_surroundings_have_one_plan():
    """Another batch, hash seed, memory and speed on each rank."""
    batch = {name: tensor.roll(RANK, 0) for name, tensor in example().items()}
    time.sleep(0.1 * RANK)
    memory = cost_models.local.host_memory_bytes
    cost_models.local.host_memory_bytes = lambda: memory() >> RANK
    hashes = []
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, cost_models.local, "host_memory_bytes", memory)
        for turn in range(20):
            options = ({}, {"pp": 2}, {"tp": 2})[turn % 3]
            model = autopar.compile(Model(), WORLD, batch, **options)
            hashes.append(plan_hash(model.plan))
    alone = plan_only(Model(), "4x8:a100-80gb", batch)
    everywhere = [None] * WORLD
    dist.all_gather_object(everywhere, (hashes, plan_hash(alone), hash("seed")))
    assert all(other[:2] == everywhere[0][:2] for other in everywhere)
    assert len({other[2] for other in everywhere}) == WORLD, "hash seeds differ"


FACTS = {
    2: (
        a_nan_in_the_batch_gives_what_one_device_gives_on_every_rank,
        a_token_id_out_of_range_is_named_on_every_rank_under_every_plan,
        a_token_id_out_of_range_is_named_where_the_vocabulary_is_split,
        a_label_out_of_range_is_named_and_an_ignored_one_is_none,
        batches_of_another_kind_are_refused,
        an_optimizer_of_the_parameters_before_compiling_is_refused_once_it_has_state,
        a_loss_that_is_no_scalar_is_refused,
        arguments_of_compile_that_differ_between_ranks_are_refused,
        a_model_wrapped_once_more_is_refused,
        a_loss_may_be_scaled_in_place,
        ranks_with_different_surroundings_have_one_plan,
        cuts_of_several_tensors_arrive,
        fewer_microbatches_than_stages_train_as_one_device,
    ),
    4: (
        ranks_with_different_surroundings_have_one_plan,
        cuts_of_several_tensors_arrive,
        fewer_microbatches_than_stages_train_as_one_device,
    ),
}

if __name__ == "__main__":
    if "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = str(RANK + 1)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    torch.set_num_threads(1)
    tell(FACTS[WORLD])
