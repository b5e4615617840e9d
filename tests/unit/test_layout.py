"""The house rules that a program can check: floors, sizes, names."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("autopar", "cost_models", "passes")
SOURCES = sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))
CODE = [
    *SOURCES,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
# The package itself and the entry points have no floor: everything may import the lazy package,
# and nothing imports the entry points.
WITHOUT_FLOOR = {"autopar", "autopar.__main__"}
ABSOLUTE_PATHS = re.compile(r"(?<![\w.])/(?:work|root|home|tmp)/[a-z]")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floors() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (layers,) = (
        contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )
    return [name.strip() for layer in layers for name in re.split(r"[|:]", layer)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_has_a_floor():
    known = floors()
    homeless = [
        name
        for name in map(module_name, SOURCES)
        if name not in WITHOUT_FLOOR
        and not any(name == floor or name.startswith(f"{floor}.") for floor in known)
    ]
    assert homeless == []


def test_every_floor_exists():
    for floor in floors():
        path = ROOT.joinpath(*floor.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), floor


def test_files_have_at_most_600_lines():
    lengths = {name_of(p): p.read_text(encoding="utf-8").count("\n") for p in CODE}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_have_at_most_80_lines():
    long = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def imported_names(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def test_private_torch_names_stay_in_two_modules():
    found = [
        f"{name_of(path)}: {name}"
        for path in SOURCES
        if path.name not in ("torch_compat.py", "torch_tracing.py")
        for name in imported_names(path)
        if re.match(r"torch\b.*\._[a-z]", name)
    ]
    assert found == []


def test_no_source_names_a_folder_of_one_machine():
    found = [
        f"{name_of(path)}: {match.group()}"
        for path in CODE
        if (match := ABSOLUTE_PATHS.search(path.read_text(encoding="utf-8")))
    ]
    assert found == []
