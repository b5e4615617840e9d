"""Low precision with float32 masters, and models that are in a low precision already."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers

import autopar
from autopar.api.compiling import plan
from autopar.capture.reference import bind_inputs, gradients, run_graph
from autopar.capture.tracing import Captured, capture
from autopar.ir.graph import Graph, InputKind, OutputKind, Phase, Ref, TensorMeta
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.programs import LocalPrograms
from autopar.solver.force import forced_plan
from cost_models.memory import saved_bytes
from tests.equivalence.harness import problem_of, simulate
from tests.precision_models import (
    WIDTH,
    Batch,
    Blocks,
    Mlp,
    Rotary,
    check_plan,
    distance,
    in_parameters,
    mlp_batch,
    one_step,
)
from tests.zoo import build, tiny_models


def localized(captured: Captured, **degrees: object) -> tuple[Plan, LocalPrograms]:
    graph = captured.graph
    plan = forced_plan(graph, captured.hash, **degrees)  # type: ignore[arg-type]
    return plan, localize(graph, decisions_of(plan, graph), signatures_of(graph))


def depends_only_on(graph: Graph, kinds: set[InputKind]) -> set[str]:
    """Values that depend on inputs of these kinds alone."""
    found = {i.name for i in graph.inputs if i.kind in kinds}
    for node in graph.nodes:
        if all(ref in found for ref in node.refs()):
            found.add(node.name)
    return found


# -- the program ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", tiny_models())
def test_the_program_in_bf16_is_as_near_to_float32_as_autocast_is(name: str) -> None:
    model, batch = build(name, layers=1)
    captured = capture(model, (), batch, precision="bf16")
    wrong = []

    def check(node: object, value: object) -> None:
        values = value if isinstance(value, tuple | list) else (value,)
        for meta, one in zip(node.metas(), values, strict=False):  # type: ignore[attr-defined]
            if meta is not None and str(one.dtype) != f"torch.{meta.dtype}":
                wrong.append((node, one.dtype))

    results = run_graph(captured.graph, bind_inputs(captured, model, (), batch), observe=check)
    assert not wrong, "the program says of every value which dtype it has"
    exact, wanted = one_step(copy.deepcopy(model), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, autocast = one_step(copy.deepcopy(model), batch)
    assert results["loss:loss"].dtype == torch.float32
    assert abs(float(results["loss:loss"]) - exact) <= 4 * abs(rounded - exact) + 2e-3 * abs(exact)
    assert distance(gradients(results), wanted) <= 2 * distance(autocast, wanted) + 0.01


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"dp": 2, "tp": 2, "num_microbatches": 2}, id="dp2-tp2"),
        pytest.param({"pp": 2, "dp": 2, "zero": 3, "num_microbatches": 2}, id="pp2-dp2-zero3"),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_plans_in_bf16_equal_one_device(name: str, degrees: dict[str, int]) -> None:
    problem = problem_of(*build(name, layers=1), precision="bf16")
    check_plan(problem, **degrees)


def test_softmax_norms_sums_and_losses_are_in_float32_and_products_in_bf16() -> None:
    captured = capture(*_args(build("gpt2", layers=1)), precision="bf16")
    dtypes: dict[str, set[str]] = {}
    for node in captured.graph.nodes:
        for meta in node.metas():
            if meta is not None and meta.is_float:
                dtypes.setdefault(node.op, set()).add(meta.dtype)
    for op in ("aten.mm.default", "aten.embedding.default"):
        assert dtypes[op] == {"bfloat16"}
    for op in ("aten.native_layer_norm.default", "aten._log_softmax.default",
               "autopar.nll_loss_sum", "aten.sum.dim_IntList"):  # fmt: skip
        assert dtypes[op] == {"float32"}


def _args(built: tuple[torch.nn.Module, Batch]) -> tuple[torch.nn.Module, tuple[()], Batch]:
    return built[0], (), built[1]


def test_a_number_that_float16_cannot_hold_keeps_its_operator_in_float32() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = self.linear(x).masked_fill(mask, torch.finfo(torch.float32).min)
            return scores.softmax(-1).square().sum()

    torch.manual_seed(0)
    model = Masked()
    batch = {"x": torch.randn(4, 4), "mask": torch.eye(4, dtype=torch.bool)}
    wanted = one_step(copy.deepcopy(model), batch)
    found = one_step(autopar.compile(model, 1, batch, precision="fp16"), batch)
    assert found[0] == pytest.approx(wanted[0], rel=1e-2)
    assert distance(found[1], wanted[1]) < 1e-2


def test_what_depends_on_buffers_alone_is_never_cast() -> None:
    batch = {"x": torch.randn(2, 2048, WIDTH), "positions": torch.arange(2048).expand(2, -1)}
    graph = capture(Rotary(), (), batch, precision="bf16").graph
    alone = depends_only_on(graph, {InputKind.BUFFER, InputKind.CONSTANT, InputKind.USER})
    alone -= depends_only_on(graph, {InputKind.USER})
    users = {i.name for i in graph.of_kind(InputKind.USER) if i.meta and i.meta.is_float}
    reached = set(users)
    for node in graph.nodes:
        if reached & set(node.refs()):
            reached.add(node.name)
    angles = [n for n in graph.nodes if n.name in alone - reached]
    assert {"aten.cos.default", "aten.sin.default"} <= {n.op for n in angles}
    assert {m.dtype for n in angles for m in n.metas() if m and m.is_float} == {"float32"}
    assert {n.meta.dtype for n in graph.nodes if n.op == "aten.mm.default"
            and n.phase is Phase.FORWARD and n.name not in alone} == {"bfloat16"}  # fmt: skip


def test_a_bf16_model_with_a_float32_position_buffer_equals_eager_bit_for_bit() -> None:
    torch.manual_seed(1)
    batch = {"x": torch.randn(2, 2048, WIDTH).bfloat16(),
             "positions": torch.arange(2048).expand(2, -1)}  # fmt: skip
    model = in_parameters(Rotary(), torch.bfloat16)
    wanted = copy.deepcopy(model)(**batch)
    model = autopar.compile(model, 1, batch)
    assert torch.equal(model(**batch).detach(), wanted.detach())
    assert model.inv_freq.dtype == torch.float32
    assert model.linear.weight.dtype == torch.bfloat16


# -- memory and traffic --------------------------------------------------------------------------
def test_activations_in_bf16_take_about_half() -> None:
    batch = {"x": torch.randn(64, WIDTH)}
    kept = {}
    for precision in (None, "bf16"):
        captured = capture(Blocks(), (), batch, precision=precision)
        kept[precision] = saved_bytes(localized(captured)[1].stages[0].forward)
    assert 0.45 * kept[None] < kept["bf16"] < 0.6 * kept[None]


def test_predicted_activations_are_those_that_a_step_holds() -> None:
    model, batch = Blocks(), {"x": torch.randn(64, WIDTH)}
    captured = capture(model, (), batch, precision="bf16")
    graph = captured.graph
    problem = replace(
        problem_of(model, batch, precision="bf16"),
        graph=graph,
        values=bind_inputs(captured, model, (), batch),
    )
    made, programs = localized(captured, num_microbatches=2)
    _, step = simulate(problem, decisions_of(made, graph), made.mesh)
    assert 0 < step.peak_saved_bytes[0] <= 1.02 * saved_bytes(programs.stages[0].forward)
    assert step.peak_saved_bytes[0] > 0.8 * saved_bytes(programs.stages[0].forward)


def test_parameters_are_cast_before_they_are_gathered_and_gradients_summed_in_float32() -> None:
    batch = {"x": torch.randn(64, WIDTH)}
    captured = capture(Blocks(), (), batch, precision="bf16")
    made, programs = localized(captured, dp=2, zero=3)
    assert made.objective_s == pytest.approx(made.time_s, rel=1e-9), "the solver prices the casts"
    stage = programs.stages[0]
    gathered = [n.meta for n in stage.unshard.nodes if n.op == "comm.all_gather"]
    assert any(isinstance(m, TensorMeta) and m.dtype == "bfloat16" for m in gathered)
    whole = {i.target: i.meta for i in stage.forward.of_kind(InputKind.PARAM)}
    read = {m.dtype for m in whole.values() if m is not None and len(m.shape) == 2}
    assert read == {"bfloat16"}
    elements = {m.dtype: m.numel for m in gathered if isinstance(m, TensorMeta)}
    assert elements["bfloat16"] == sum(
        m.numel for m in whole.values() if m is not None and m.dtype == "bfloat16"
    )
    summed = [n.meta for n in stage.reduce.nodes if n.op == "comm.reduce_scatter"]
    assert {m.dtype for m in summed if isinstance(m, TensorMeta)} == {"float32"}
    single = forced_plan(
        capture(Blocks(), (), batch).graph, "hash", dp=2, zero=3
    )  # fmt: skip
    parts, whole = made.stages[0].memory, single.stages[0].memory
    assert parts.optimizer_bytes == whole.optimizer_bytes, "states belong to the masters"
    assert parts.grads_bytes == whole.grads_bytes
    assert parts.params_bytes < whole.params_bytes, "copies to compute with are bf16"


def test_a_plan_of_a_model_on_the_meta_device_has_the_prices_of_the_low_precision() -> None:
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=2048, intermediate_size=8192, num_hidden_layers=1,
        num_attention_heads=16, num_key_value_heads=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        batch = {name: torch.zeros(8, 2048, dtype=torch.long) for name in ("input_ids", "labels")}
    single, low = (
        plan(model, "1:h100-sxm", batch, precision=word, num_microbatches=1).stages[0]
        for word in (None, "bf16")
    )
    assert low.time.forward_s < 0.5 * single.time.forward_s
    assert low.time.backward_s < 0.5 * single.time.backward_s
    assert low.memory.optimizer_bytes == single.memory.optimizer_bytes
    assert low.memory.activations_bytes < 0.7 * single.memory.activations_bytes


# -- masters and checkpoints ---------------------------------------------------------------------
def test_masters_are_float32_and_state_dicts_keep_the_dtype_of_the_users_model() -> None:
    batch = mlp_batch()
    model = in_parameters(Mlp(), torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model = autopar.compile(model, 1, batch, precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loss, _ = one_step(model, batch)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    for state in (model.state_dict(), model.full_state_dict()):
        assert list(state) == list(before)
        assert all(torch.equal(state[name], before[name]) for name in before)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert any("became float32 masters" in line for line in model.plan.assumptions)
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, masters[n])]
    assert len(changed) == len(masters), "a master takes a step that bfloat16 would round away"
    for given in (before, {name: value.float() for name, value in before.items()}):
        model.load_state_dict(given)
        assert float(model(**batch)["loss"].detach()) == loss
    kept = model.state_dict(keep_vars=True)
    assert all(kept[n] is p for n, p in model.named_parameters())


def test_a_bf16_model_can_be_computed_in_float32() -> None:
    batch, model = mlp_batch(), in_parameters(Mlp(), torch.bfloat16)
    loss, wanted = one_step(copy.deepcopy(model).float(), batch)
    model = autopar.compile(model, 1, batch, precision="fp32")
    found = one_step(model, batch)
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert distance(found[1], wanted) < 1e-6
    assert {v.dtype for v in model.state_dict().values()} == {torch.bfloat16}


def test_an_optimizer_built_before_compile_steps_the_masters() -> None:
    batch = mlp_batch()
    model = in_parameters(Mlp(), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = autopar.compile(model, 1, batch, precision="bf16")
    losses = []
    for _ in range(3):
        losses.append(one_step(model, batch)[0])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[1] < losses[0]
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}


def test_evaluation_and_another_batch_size_run_in_the_same_precision() -> None:
    model = autopar.compile(Mlp(), 1, mlp_batch(), precision="bf16")
    small = {name: value[:4] for name, value in mlp_batch().items()}
    assert model(**small)["loss"].dtype == torch.float32
    model.eval()
    with torch.no_grad():
        found = model(**mlp_batch())
    assert found["out"].dtype == torch.bfloat16
    wanted = Mlp()(**mlp_batch())["out"]
    assert torch.allclose(found["out"].float(), wanted, atol=0.05)


def test_frozen_parameters_have_no_masters() -> None:
    model = in_parameters(Mlp(), torch.bfloat16)
    model.first.weight.requires_grad_(False)
    model = autopar.compile(model, 1, mlp_batch(), precision="bf16")
    one_step(model, mlp_batch())
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["first.weight"] == torch.bfloat16
    assert dtypes["last.weight"] == torch.float32


# -- models that are in a low precision already --------------------------------------------------
def test_gradients_of_a_bf16_model_are_summed_over_microbatches_in_float32() -> None:
    model = in_parameters(Mlp(), torch.bfloat16)
    batch = {"x": torch.randn(256, WIDTH).bfloat16(), "y": torch.randn(256, WIDTH).bfloat16()}
    _, exact = one_step(copy.deepcopy(model).double(), {k: v.double() for k, v in batch.items()})
    _, eager = one_step(copy.deepcopy(model), batch)
    naive = copy.deepcopy(model)
    for rows in range(0, 256, 8):
        loss = naive(**{k: v[rows : rows + 8] for k, v in batch.items()})["loss"] / 32
        loss.backward()
    added = {n: p.grad.double() for n, p in naive.named_parameters() if p.grad is not None}
    _, found = one_step(autopar.compile(model, 1, batch, num_microbatches=32), batch)
    assert distance(found, exact) < 1.5 * distance(eager, exact)
    assert distance(added, exact) > 1.5 * distance(found, exact), "adding in bfloat16 loses bits"


def test_without_precision_a_bf16_model_stays_as_it_is() -> None:
    model = in_parameters(Mlp(), torch.bfloat16)
    batch = {name: value.bfloat16() for name, value in mlp_batch().items()}
    model = autopar.compile(model, 1, batch)
    one_step(model, batch)
    assert model.plan.precision is None
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}


def test_memory_of_a_bf16_model_counts_float32_sums_of_gradients() -> None:
    model = in_parameters(Blocks(), torch.bfloat16)
    captured = capture(model, (), {"x": torch.randn(64, WIDTH).bfloat16()})
    memory = localized(captured, num_microbatches=2)[0].stages[0].memory
    assert memory.grads_bytes == 2 * memory.params_bytes


# -- loss scaling --------------------------------------------------------------------------------
def scaled_step(
    model: torch.nn.Module, batch: Batch, scaler: torch.amp.GradScaler
) -> dict[str, torch.Tensor]:
    """Unscaled gradients of one call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.zero_grad()
    scaler.scale(model(**batch)["loss"]).backward()
    scaler.unscale_(optimizer)
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    scaler.step(optimizer)
    scaler.update()
    return grads


def test_scaling_inside_the_backward_keeps_gradients_that_scaling_afterwards_loses() -> None:
    batch, small = mlp_batch(), 1e-5
    _, wanted = one_step(Mlp(small), batch)
    _, after = one_step(autopar.compile(Mlp(small), 1, batch, precision="fp16"), batch)
    inside = scaled_step(
        autopar.compile(Mlp(small), 1, batch, precision="fp16"), batch, torch.amp.GradScaler("cpu")
    )
    assert distance(inside, wanted) < 5e-3
    assert distance(after, wanted) > 10 * distance(inside, wanted)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**20])
def test_the_first_step_is_right_whatever_scale_it_is_given(scale: float) -> None:
    batch = mlp_batch()
    model = autopar.compile(Mlp(1e-5), 1, batch, precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    first = scaled_step(model, batch, scaler)
    again = scaled_step(model, batch, scaler)  # the scale is known by now
    assert all(torch.equal(first[name], again[name]) for name in again)


def test_an_overflow_skips_the_step_and_lowers_the_scale() -> None:
    batch = mlp_batch()
    model = autopar.compile(Mlp(), 1, batch, precision="fp16", optimizer="sgd")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scaler.scale(model(**batch)["loss"]).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**39
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_outputs_of_the_program_name_what_the_model_returns() -> None:
    graph = capture(Mlp(), (), mlp_batch(), precision="bf16").graph
    metas = graph.metas()
    grads = [o for o in graph.outputs if o.kind is OutputKind.GRAD]
    assert len(grads) == 6
    for output in grads:
        assert isinstance(output.value, Ref)
        meta = metas[output.value.name]
        assert isinstance(meta, TensorMeta)
        assert meta.dtype == "float32"
