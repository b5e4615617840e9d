"""The zoo: rows that pass, refusals by name, and the table that the README shows."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.zoo_models import ZOO
from tests.zoo_models.rows import PROGRAM, REFUSALS, Cell, Row, make_row
from tests.zoo_models.table import BEGIN, END, README, models_in_readme, write

QUICK = ("nn.MultiheadAttention (S, B, E)", "DLRM", "custom operator with a rule")


def _row(name: str) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries about their tiny configurations
        return make_row(name)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ZOO]
)
def test_zoo_model_equals_one_device_or_is_refused_by_name(name: str) -> None:
    row = _row(name)
    failures = [f"{h}: {c.text} {c.detail}" for h, c in row.cells.items() if not c.passed]
    assert not failures, "\n".join(failures)
    assert not row.replicated
    refused = [h for h, c in row.cells.items() if c.detail]
    assert not refused or name in REFUSALS


def test_a_mask_by_values_is_refused_with_its_line() -> None:
    cell = _row("wav2vec2 (time mask on)").cells[PROGRAM]
    assert cell.text == "refused"
    assert "modeling_wav2vec2.py" in cell.detail
    assert "`attention_mask.detach().sum(-1).tolist()`" in cell.detail


def test_the_readme_lists_exactly_the_models_of_the_zoo() -> None:
    assert models_in_readme(README.read_text(encoding="utf-8")) == list(ZOO)


def test_rows_that_pass_replace_their_models_rows_in_the_readme(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{BEGIN}\n{END}\nbelow\n", encoding="utf-8")
    refusal = "constraint: x (model.py:3) mixes samples (operands a, b); use one"
    passed = Row("Net", {PROGRAM: Cell("ok"), "dp 4": Cell("ok with 1", refusal)})
    broken = Row("Other", {PROGRAM: Cell("FAILED", "boom", passed=False)})
    assert passed.passed
    assert not broken.passed
    write([passed, broken, Row("BERT", {PROGRAM: Cell("ok")})], readme)
    write([Row("BERT", {PROGRAM: Cell("refused", "boom\n  at /folder/model.py:3 in f")})], readme)
    text = readme.read_text(encoding="utf-8")
    assert models_in_readme(text) == ["BERT", "Net"]
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert (
        "* BERT: boom at model.py:3 in f\n* Net: constraint: x (model.py:3) mixes samples" in text
    )
