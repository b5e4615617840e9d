"""The user's function that returns a model and one global batch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from autopar.errors import ConfigError

if TYPE_CHECKING:
    import torch


def load_model(name: str, batch: int | None) -> tuple[torch.nn.Module, Mapping[str, object]]:
    """Call the user's function that returns a model and a batch.

    Args:
        name: ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``; modules are looked up from the current
            folder first, as Python's ``-m`` does.
        batch: For the function's parameter ``batch``; None leaves its default.

    Raises:
        ConfigError: There is no such module or function, or it returns something else.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name:
        raise ConfigError(f"{name!r} names no function; write MODULE:FUNCTION or FILE.py:FUNCTION")
    function = getattr(_import(module_name), function_name, None)
    if not callable(function):
        raise ConfigError(f"{module_name} has no function {function_name!r}; check the spelling")
    if batch is None:
        result = function()
    elif "batch" in inspect.signature(function).parameters:
        result = function(batch=batch)
    else:
        raise ConfigError(f"{name} has no parameter 'batch'; add one, or leave --batch out")
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"{name} returned {type(result).__name__}, not a pair; return (model, inputs)"
        )
    return cast("tuple[torch.nn.Module, Mapping[str, object]]", result)


def _import(name: str) -> object:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"there is no file {name}; check the path")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{name} can't be imported; name a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        _look_in(path.resolve().parent)  # as for a script: it may import what lies beside it
        spec.loader.exec_module(module)
        return module
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # the user's module is there, something that it imports is not
        raise ConfigError(f"there is no module {name!r}; check the spelling") from None


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
