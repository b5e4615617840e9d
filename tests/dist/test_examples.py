"""The training loops of the examples, on two processes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.spawn import ROOT, run_ranks

pytestmark = pytest.mark.dist
NUMBERS = re.compile(r"^(?:([a-z_]+) )?([\d.]+), one process ([\d.]+)$", re.MULTILINE)
CLOSE = 2e-5
"""The numbers are printed with six decimals."""


def told(name: str) -> tuple[str, list[tuple[str, float, float]]]:
    """What rank 0 prints, and its (name, compiled, one process) numbers."""
    results = run_ranks(2, ROOT / "examples" / name, timeout_s=150)
    for result in results:
        assert result.code == 0, result.errors[-4000:]
    text = results[0].output
    return text, [(n, float(a), float(b)) for n, a, b in NUMBERS.findall(text)]


def largest(text: str, what: str) -> float:
    return max(float(found) for found in re.findall(rf"max \|{what}\| = (\S+)", text))


def test_accelerate_trains_evaluates_and_gathers_as_one_process_does():
    text, numbers = told("03_accelerate.py")
    assert ": dp2" in text
    assert len(numbers) == 12 + 6 + 1  # losses, norms, accuracy
    assert all(abs(a - b) < CLOSE for _, a, b in numbers)
    assert largest(text, "weight difference") < CLOSE


@pytest.fixture(scope="module")
def trainer():
    return told("02_hf_trainer.py")


def test_the_trainer_trains_clips_evaluates_and_saves_as_one_process_does(trainer):
    text, numbers = trainer
    assert ": dp2" in text
    assert ": pp2" in text
    assert [n for n, _, _ in numbers] == ([*["loss", "grad_norm"] * 5, "eval_loss"]) * 2
    assert all(abs(a - b) < CLOSE for _, a, b in numbers)
    assert largest(text, "weight difference") < CLOSE


def test_the_trainer_counts_the_items_of_a_batch_once_whatever_the_accumulation(trainer):
    """A count that is summed over ranks would halve losses and gradients."""
    single, double = trainer[1][:11], trainer[1][11:]
    assert all(abs(a - b) < CLOSE for (_, a, _), (_, b, _) in zip(single, double, strict=True))
    assert abs(single[0][1] - 4.5) < 0.3, "about log(96): the model knows nothing yet"


@pytest.mark.slow
def test_the_trainer_alone_in_a_process_of_its_own_gives_the_same_numbers(trainer):
    alone = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "02_hf_trainer.py")],
        capture_output=True, text=True, check=True, timeout=150, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    numbers = [float(b) for _, _, b in NUMBERS.findall(alone.stdout)]
    assert len(numbers) == 22
    assert all(abs(a - b) < CLOSE for (_, a, _), b in zip(trainer[1], numbers, strict=True))
