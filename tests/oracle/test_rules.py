"""Sharding rules against the operators themselves, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from autopar.sharding import rules
from autopar.sharding.lowerings import LOWERINGS
from autopar.sharding.placement import R, Shard
from autopar.sharding.signature import AxisStrategy, axis_strategies
from tests.oracle import shard_oracle
from tests.oracle.rule_cases import FAMILIES, attention_for_misses
from tests.oracle.shard_oracle import Case, check_strategies, find_misses, make_case
from tests.oracle.test_routed_splits import ROUTED_LOWERINGS

UNSAFE = ("autopar.batch_norm", "autopar.attention", "aten.native_group_norm")
"""Kernels that corrupt memory when operands' sizes disagree, which the search for misses tries."""

ALLOWED_MISSES = {
    (
        "aten.native_layer_norm.default",
        "R P(sum) P(sum) -> P(sum) R R",
    ): "weights are never pending",
    ("aten.native_layer_norm.default", "R P(sum) -> P(sum) R R"): "weights are never pending",
    ("aten._fused_rms_norm.default", "R P(sum) -> P(sum) R"): "weights are never pending",
    (
        "aten.native_layer_norm_backward.default",
        "R R R R P(sum) R -> P(sum) R R",
    ): "weights are never pending",
    ("aten.avg_pool2d.default", "S(2) -> S(2)"): "legal only where windows end at block borders",
    ("aten.avg_pool2d.default", "S(3) -> S(3)"): "legal only where windows end at block borders",
    ("autopar.attention", "R R P(sum) -> P(sum) R"): "values are never pending",
    ("autopar.attention", "R R P(sum) R -> P(sum) R"): "values are never pending",
    (
        "autopar.attention_backward",
        "R R S(2) S(2) R R -> P(sum) S(2) S(2) R",
    ): "a split of the keys has no forward yet",
    **{
        (
            "transformers.grouped_mm_fallback_backward.default",
            split,
        ): "saved values are never pending"
        for split in (
            "R P(sum) R R -> P(sum) R",
            "P(sum) R R R -> R P(sum)",
            "P(sum) P(sum) R R -> P(sum) P(sum)",
        )
    },
}
"""(operator, split) -> why a legal split is not offered."""


def _cases(family: Callable[[], Iterator[Case]]) -> list[Case]:
    torch.manual_seed(0)
    return list(family())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_offered_splits_equal_the_whole_operator(family: str, sizes: tuple[int, ...]) -> None:
    failures = [f for case in _cases(FAMILIES[family]) for f in check_strategies(case, sizes)]
    assert not failures, "\n".join(failures[:20])


# sorted rows are whole or a rank's own, never blocks: those have tests/oracle/test_routed_splits.py
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"attention", "moe"}))
def test_legal_splits_are_offered(family: str) -> None:
    misses = [
        f"{case.label}: {miss}"
        for case in _cases(FAMILIES[family])
        if not case.node.op.startswith(UNSAFE)
        for miss in find_misses(case)
        if (case.node.op, miss) not in ALLOWED_MISSES
    ]
    assert not misses, "\n".join(misses[:20])


def test_legal_splits_of_attention_are_offered() -> None:
    misses = [
        f"{case.label}: {miss}"
        for case in _cases(attention_for_misses)
        for miss in find_misses(case, limit=7000, pending="backward" not in case.node.op)
        if (case.node.op, miss) not in ALLOWED_MISSES
    ]
    assert not misses, "\n".join(misses)


def test_every_lowering_is_reached_by_a_case() -> None:
    reached = {
        strategy.lowering
        for family in FAMILIES.values()
        for case in _cases(family)
        for strategy in axis_strategies(_signature(case), 2)
    }
    assert reached - {""} == set(LOWERINGS) - ROUTED_LOWERINGS


def _signature(case: Case) -> rules.OpSignature:
    signature = case.signature()
    assert signature is not None
    return signature


def test_oracle_finds_a_rule_that_claims_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("aten.mm.default", *torch.randn(2, 4, 4, dtype=torch.float64))
    wrong = AxisStrategy((Shard(1), R), (Shard(1),), "")
    signature = replace(_signature(case), extra=(wrong,))
    monkeypatch.setattr(Case, "signature", lambda self: signature)
    failures = check_strategies(case, (2,))
    assert len(failures) == 1
    assert "S(1) R -> S(1)" in failures[0]


def test_oracle_finds_padding_that_is_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("aten.amax.default", torch.randn(10, dtype=torch.float64) - 10, [0])
    signature = replace(_signature(case), pad_fill=0.0)  # above every element
    monkeypatch.setattr(Case, "signature", lambda self: signature)
    assert check_strategies(case, (2,)) == []
    assert check_strategies(case, (4,)) != []


def test_oracle_finds_a_missing_split(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("aten.mm.default", *torch.randn(2, 4, 4, dtype=torch.float64))
    signature = replace(_signature(case), whole=frozenset({"m"}))
    monkeypatch.setattr(Case, "signature", lambda self: signature)
    assert find_misses(case) == ["S(0) R -> S(0)"]


def test_oracle_reads_nested_blocks_with_the_first_axis_outermost() -> None:
    x = torch.arange(10.0)
    blocks = shard_oracle.split(x, (Shard(0), Shard(0)), (2, 2), 0)
    # ceil(10 / 2) = 5 elements per outer block, ceil(5 / 2) = 3 per inner one
    assert blocks[(0, 1)][:2].tolist() == [3.0, 4.0]
    assert blocks[(1, 0)].tolist() == [5.0, 6.0, 7.0]
    assert blocks[(0, 1)][2].isnan()


def test_every_rule_names_an_operator_of_torch() -> None:
    missing = []
    for op in rules.BUILTIN_RULES:
        namespace, name, overload = op.split(".")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if namespace != "transformers" and overload not in (packet.overloads() if packet else ()):
            missing.append(op)
    assert not missing
