"""Batches of other sizes than the planned one: the numbers of one device, or a refusal."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.reference import bind_inputs
from autopar.capture.tracing import capture
from autopar.errors import ShardingError
from autopar.ir.promote import promote
from autopar.plan.decisions import decisions_of
from autopar.plan.types import MeshShape, Plan
from autopar.runtime import session
from autopar.runtime.equivalence import verify_programs
from autopar.runtime.fitting import FittedData, how_fitted
from autopar.runtime.variants import schedule_actions, transfer, with_storage_of
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.decisions import Decisions
from autopar.sharding.propagate import split_data_axes
from tests.cases.small_models import SmallGPT, tokens
from tests.plans import hand_made_plan

F = nn.functional


def check_other_batch(
    model: nn.Module,
    planned: Mapping[str, object],
    batch: Mapping[str, object],
    mesh: MeshShape,
    microbatches: int,
    zero: int = 0,
) -> tuple[FittedData, Plan]:
    """A batch under the plan of another one, on simulated ranks against one device."""
    first = capture(model, (), planned)
    plan = hand_made_plan(first, mesh, num_microbatches=microbatches, zero=zero)
    decisions = decisions_of(plan, first.graph)
    home = localize(first.graph, decisions, signatures_of(first.graph))
    captured = capture(model, (), batch)
    decisions, fitted = transfer(decisions, first.graph, captured.graph)
    graph = promote(captured.graph)
    local = with_storage_of(home, localize(graph, decisions, signatures_of(graph)))
    now = replace(plan, num_microbatches=fitted.num_microbatches)
    actions = schedule_actions(local, now, backward=True, has_loss=captured.has_loss)
    values = bind_inputs(captured, model, (), batch, graph=graph)
    verify_programs(graph, local, plan.mesh, actions, values)
    return fitted, plan


PP2, DP2 = MeshShape(pp=2), MeshShape(dp=2)


@pytest.fixture(scope="module")
def gpt() -> SmallGPT:
    torch.manual_seed(0)
    return SmallGPT(layers=1)


@pytest.mark.parametrize(
    ("size", "mesh", "microbatches", "zero", "wanted"),
    [
        # planned are 8 samples; "wanted": micro-batches, and whether the data ranks share the batch
        (10, PP2, 4, 0, (5, True)),
        (7, PP2, 4, 0, (7, True)),
        (3, PP2, 4, 0, (3, True)),
        (1, PP2, 4, 0, (1, True)),
        (7, DP2, 1, 3, (7, False)),
        (6, DP2, 1, 1, (1, True)),
        (16, MeshShape(dp=2, pp=2), 2, 1, (4, True)),
        (7, MeshShape(dp=2, pp=2), 2, 2, (7, False)),
        (10, MeshShape(tp=2, pp=2, virtual=2), 4, 0, (5, True)),
    ],
    ids=str,
)
def test_a_batch_of_any_size_has_the_gradients_of_one_device(
    gpt: SmallGPT,
    size: int,
    mesh: MeshShape,
    microbatches: int,
    zero: int,
    wanted: tuple[int, bool],
) -> None:
    fitted, plan = check_other_batch(gpt, tokens(8), tokens(size), mesh, microbatches, zero)
    assert (fitted.num_microbatches, fitted.shares_batch) == wanted
    words = how_fitted(fitted, plan)
    assert (f"in {wanted[0]} micro-batches instead of" in words) == (wanted[0] != microbatches)
    assert ("2 data ranks do not divide it" in words) == (not wanted[1])


@pytest.mark.parametrize(("size", "length"), [(8, 24), (5, 8)])
def test_a_batch_of_any_length_has_the_gradients_of_one_device(
    gpt: SmallGPT, size: int, length: int
) -> None:
    check_other_batch(gpt, tokens(8), tokens(size, length), MeshShape(pp=2, tp=2), 4)


def test_statistics_per_microbatch_keep_their_number_of_microbatches() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layer(x)).square().sum()

    model = Normed()
    first = capture(model, (torch.randn(8, 4),))
    found = split_data_axes(
        first.graph,
        signatures_of(first.graph),
        num_microbatches=4,
        dp=1,
        microbatch_statistics=True,
    )
    decisions = Decisions(axis_sizes=(4, 1, 1), choices=found.choices)
    second = capture(model, (torch.randn(6, 4),))
    with pytest.raises(ShardingError, match=r"6 samples do not divide into the planned 4 micro-"):
        transfer(decisions, first.graph, second.graph, microbatch_statistics=True)
    # without such statistics samples of a batch norm mix: one micro-batch then
    moved, fitted = transfer(decisions, first.graph, second.graph)
    assert fitted.num_microbatches == moved.axis_sizes[0] == 1


# -- what is a batch, and what is not --------------------------------------------------------------


class Packed(nn.Module):
    """Documents of one row behind each other; offsets say where each begins."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.qkv = nn.Linear(8, 24)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.shape[1])
        document = (places[:, None] >= offsets[None, 1:]).sum(-1)
        mask = (document[:, None] == document[None]) & (places[:, None] >= places[None])
        q, k, v = self.qkv(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        logits = self.head(x + o.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits[0, :-1], ids[0, 1:])


@pytest.mark.parametrize("mesh", [PP2, MeshShape(tp=2)], ids=str)
def test_packed_documents_of_another_total_length_have_the_gradients_of_one_device(
    mesh: MeshShape,
) -> None:
    torch.manual_seed(0)

    def packed(*lengths: int) -> dict[str, torch.Tensor]:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        return {"ids": torch.randint(0, 20, (1, sum(lengths))), "offsets": offsets}

    check_other_batch(Packed(), packed(5, 7, 4), packed(9, 2), mesh, microbatches=1)


class Traps(nn.Module):
    """Tensors as long as the batch, or nearly, that are not of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        weights = (offsets[1:] - offsets[:-1]).float().mean()
        return ((self.layer(x) * scale).sum(-1).square() * weights).mean()


def test_offsets_and_a_scale_as_long_as_the_batch_are_not_cut() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6), "offsets": torch.arange(5) * 3, "scale": torch.randn(4)}
    fitted, _ = check_other_batch(Traps(), batch, batch, MeshShape(dp=2), microbatches=2)
    cut = {n for n, c in fitted.splits.choices["dp"].items() if n.startswith("u_")}
    assert cut == {"u_x"}


class TimeMajor(nn.Module):
    """Position ids (3, B, S), values (S, B, E), and a label for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.layer = nn.Embedding(16, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, places: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x + self.places(places).sum(0).transpose(0, 1)
        return F.cross_entropy(self.layer(x.cumsum(0)[-1]), labels)


@pytest.mark.parametrize("size", [8, 6, 3])
def test_the_batch_dim_is_found_where_it_stands(size: int) -> None:
    torch.manual_seed(0)

    def batch(samples: int) -> dict[str, torch.Tensor]:
        return {
            "x": torch.randn(5, samples, 6),
            "places": torch.randint(0, 16, (3, samples, 5)),
            "labels": torch.randint(0, 5, (samples,)),
        }

    fitted, _ = check_other_batch(
        TimeMajor(), batch(8), batch(size), MeshShape(dp=2), microbatches=2
    )
    axis = "dp" if fitted.shares_batch else "mb"
    cut = {n: str(c) for n, c in fitted.splits.choices[axis].items() if n.startswith("u_")}
    assert cut == {"u_x": "S(1)", "u_places": "S(1)", "u_labels": "S(0)"}


# -- the compiled module ---------------------------------------------------------------------------


def test_a_compiled_model_takes_thirteen_samples_in_batches_of_four(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = SmallGPT(layers=1)
    twin, samples = copy.deepcopy(model), tokens(13)
    first = {name: tensor[:4] for name, tensor in samples.items()}
    plan = hand_made_plan(capture(model, (), first), MeshShape(), num_microbatches=4)
    compiled = autopar.compile(model, 1, first, plan=plan)
    with caplog.at_level(logging.WARNING, logger="autopar"):
        for start in range(0, 13, 4):
            part = {name: tensor[start : start + 4] for name, tensor in samples.items()}
            loss, wanted = compiled(**part)["loss"], twin(**part)["loss"]
            torch.testing.assert_close(loss, wanted)
            loss.backward()
            wanted.backward()
    for found, expected in zip(compiled.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    assert "[1, 16] instead of [4, 16]" in caplog.text
    assert "runs in 1 micro-batches instead of 4" in caplog.text
    assert "memory is not promised" not in caplog.text


def test_programs_of_the_calls_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MAX_VARIANTS", 2)
    captures: list[int] = []
    monkeypatch.setattr(
        session,
        "capture",
        lambda model, args, kwargs, **more: (
            captures.append(args[0].shape[0]) or capture(model, args, kwargs, **more)
        ),
    )
    torch.manual_seed(0)
    model = autopar.compile(nn.Linear(4, 4), 1, torch.randn(1, 4), loss=lambda out, _: out.sum())
    for size in (1, 2, 1, 3, 1, 2):  # two are kept: the third pushes out the second
        assert torch.isfinite(model(torch.randn(size, 4)))
    assert captures == [2, 3, 2]
