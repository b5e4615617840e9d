"""A user's own passes.py or cost_models.py is named, instead of a failure deep inside."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, code: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a script that lies in ``folder``, with the packages of ``root`` behind it."""
    script = folder / "train.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def installed(tmp_path):
    """A copy of what the guard looks at, as another distribution may have left it."""
    root = tmp_path / "site"
    for name in ("autopar", "cost_models", "passes"):
        (root / name).mkdir(parents=True)
        shutil.copy(ROOT / name / "__init__.py", root / name)
    shutil.copy(ROOT / "autopar" / "_siblings.py", root / "autopar")
    return root


def test_no_clash_no_error(tmp_path):
    done = run(tmp_path, "import autopar; print(autopar.__version__)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["passes", "cost_models"])
def test_a_module_beside_the_script_is_named_with_ours(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    done = run(tmp_path, "import autopar")
    assert done.returncode == 1
    assert f"ImportError: autopar needs its own package {name!r}" in done.stderr
    assert str(ROOT / name / "__init__.py") in done.stderr
    assert f"Python finds {(tmp_path / f'{name}.py').resolve()} first; rename" in done.stderr


def test_a_module_that_was_imported_before_is_named_too(tmp_path):
    (tmp_path / "passes.py").write_text("x = 1\n")
    done = run(tmp_path, "import passes, autopar")
    assert "autopar needs its own package 'passes'" in done.stderr


def test_a_plain_folder_of_that_name_does_no_harm(tmp_path):
    (tmp_path / "passes").mkdir()
    assert run(tmp_path, "import autopar").returncode == 0


def test_an_overwritten_package_is_named(tmp_path, installed):
    (installed / "passes" / "__init__.py").write_text("'''Somebody else's passes.'''\n")
    done = run(tmp_path, "import autopar", installed)
    assert "autopar's package 'passes' at" in done.stderr
    assert "was overwritten by another distribution" in done.stderr


def test_a_missing_package_is_named(tmp_path, installed):
    shutil.rmtree(installed / "cost_models")
    done = run(tmp_path, "import autopar", installed)
    assert "autopar needs its own package 'cost_models'" in done.stderr
    assert "install autopar again" in done.stderr
