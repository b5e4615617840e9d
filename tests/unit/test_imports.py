"""What ``import autopar`` loads, and that any module can be the first one imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ortools", "numpy", "rich", "networkx", "transformers")
WITHOUT_TORCH = (
    "autopar.cluster", "autopar.ir", "autopar.sharding", "autopar.plan", "autopar.solver",
    "cost_models",
)  # fmt: skip


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_autopar_is_quick_and_loads_nothing_heavy():
    # The best of several processes, and the time of the import alone: the machine may be busy.
    code = (
        "import sys, time; t = time.process_time(); import autopar; "
        f"print(time.process_time() - t, *[m for m in {HEAVY} if m in sys.modules])"
    )
    outputs = [run(code).split() for _ in range(3)]
    assert [loaded for _, *loaded in outputs] == [[], [], []]
    assert min(float(time_s) for time_s, *_ in outputs) < 0.1


def modules_of(package: str) -> list[str]:
    folder = ROOT.joinpath(*package.split("."))
    names = (p.relative_to(ROOT).with_suffix("") for p in sorted(folder.rglob("*.py")))
    return [".".join(n.parts).removesuffix(".__init__") for n in names]


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_the_deciding_half_does_not_load_torch(package):
    modules = [m for m in modules_of(package) if not m.startswith("cost_models.measure")]
    assert modules
    code = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; "
        "print('torch' in sys.modules)"
    )
    assert run(code).strip() == "False"


@pytest.mark.parametrize("first", ["cost_models", "passes", "autopar.cli", "autopar.plan.io"])
def test_any_floor_can_be_imported_first(first):
    assert run(f"import {first}, autopar; print(autopar.__version__)").strip()


def test_public_names_are_sorted_and_all_exist():
    assert autopar.__all__ == sorted(autopar.__all__)
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
    assert set(autopar.__all__) <= set(dir(autopar))


def test_every_error_is_public():
    from autopar import errors

    names = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AutoparError)
    }
    assert names == {name for name in autopar.__all__ if name.endswith("Error")}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'parallelize'"):
        _ = autopar.parallelize
