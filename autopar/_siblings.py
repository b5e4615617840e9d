"""Check that the packages ``cost_models`` and ``passes`` that Python finds are autopar's own.

The distribution has three top-level packages, two of them with names that other people use too.
Without this check a ``passes.py`` beside the user's script shadows ours and planning dies deep
inside with "No module named 'passes.pipeline'"; another distribution that ships a ``passes`` folder
overwrites ours without a word from pip. Nothing is imported here: the files are only looked up and
read, since ``passes`` needs torch.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

SIBLINGS = ("cost_models", "passes")
SENTINEL = 'DISTRIBUTION = "autopar"'


def check_siblings(names: tuple[str, ...] = SIBLINGS) -> None:
    """Raise if a sibling package is missing, shadowed or overwritten.

    Raises:
        ImportError: Names both files, the one that was found and the one that is needed.
    """
    root = Path(__file__).resolve().parent.parent
    for name in names:
        ours = root / name / "__init__.py"
        found = _found_file(name)
        if found is None or not ours.is_file():
            raise ImportError(
                f"autopar needs its own package {name!r} at {ours}, which is missing; "
                "install autopar again"
            )
        if not ours.samefile(found):
            raise ImportError(
                f"autopar needs its own package {name!r} at {ours}, but Python finds {found} "
                f"first; rename that file, or take {found.parent} off the import path"
            )
        if SENTINEL not in ours.read_text(encoding="utf-8"):
            raise ImportError(
                f"autopar's package {name!r} at {ours} was overwritten by another distribution "
                f"(it lacks the line {SENTINEL!r}); uninstall that one and install autopar again"
            )


def _found_file(name: str) -> Path | None:
    """The file that ``import name`` runs, or has run; None if there is none."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
    else:
        spec = find_spec(name)
        file = None if spec is None else spec.origin
        if spec is not None and file is None and spec.submodule_search_locations:
            # A folder without __init__.py: it can only be found where ours is not.
            file = next(iter(spec.submodule_search_locations), None)
    return None if file is None else Path(file).resolve()
