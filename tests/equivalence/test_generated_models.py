"""Random small models under random legal plans equal one device.

Twenty pairs are part of the fast tests; ``make fuzz`` runs the others and prints what they covered.
Both are the same on every run; ``FUZZ_SEED=1 make fuzz`` draws others.
"""

from __future__ import annotations

import os
import sys

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.equivalence.fuzzing import Drawn, Tally, check_pair
from tests.equivalence.model_generator import models, plans

PLANS_PER_MODEL = 3
FEW_MODELS = 10
MANY_MODELS = int(os.environ.get("FUZZ_MODELS", "200"))
SEED = os.environ.get("FUZZ_SEED")


def _profile(examples: int) -> settings:
    """No data base and no clock: a run depends on nothing but the code."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=SEED is None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )


def _check(data: st.DataObject, count: int, tally: Tally) -> None:
    model = data.draw(models())
    drawn = Drawn.of(model)
    for _ in range(count):
        check_pair(drawn, data.draw(plans(model.batch)), tally)


def test_generated_models_under_random_plans_equal_one_device() -> None:
    tally = Tally()

    @_profile(FEW_MODELS)
    @hypothesis.given(st.data())
    def run(data: st.DataObject) -> None:
        _check(data, 2, tally)

    run()
    assert tally.pairs >= 2 * FEW_MODELS
    assert sum(tally.split.values()) > 0


@pytest.mark.fuzz
def test_many_generated_models_under_random_plans_equal_one_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally = Tally()

    @_profile(MANY_MODELS)
    @hypothesis.given(st.data())
    def run(data: st.DataObject) -> None:
        _check(data, PLANS_PER_MODEL, tally)

    if SEED is not None:
        run = hypothesis.seed(int(SEED))(run)
    run()
    with capsys.disabled():
        sys.stdout.write(f"\n{tally.text()}\n")
    assert tally.pairs >= 500 or MANY_MODELS < 200
    # the drawn plans do split: what is compared is not one device with itself
    assert 2 * sum(tally.split.values()) > sum(tally.ops.values())
