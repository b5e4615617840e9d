"""The text of a cluster file, JSON or YAML, as plain values.

Both mean the same: a YAML file is one of plain mappings, lists, texts and numbers. An entry that is
there twice is refused, where parsers of both formats would take the last one without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.errors import ConfigError

YAML_SUFFIXES = (".yaml", ".yml")
SUFFIXES = (".json", *YAML_SUFFIXES)
"""How the name of a cluster file ends."""

# YAML 1.1 takes 3e-6 for a text, since it has no point; people mean what JSON means by it.
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")


def read_values(path: Path) -> object:
    """What a file holds.

    Args:
        path: The file; YAML where its name ends in ``.yaml`` or ``.yml``, else JSON.

    Raises:
        ConfigError: It can't be read, is not what its name says, has an entry twice, or is YAML and
            PyYAML is not installed.
    """
    where = f"cluster file {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is no text: byte {error.start} is not UTF-8; name a JSON or YAML file"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{where} can't be read: {reason}; check the path") from None
    if path.suffix.lower() in YAML_SUFFIXES:
        return _yaml(text, where)
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, where))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; see examples/clusters") from None


def _once(pairs: Sequence[tuple[object, object]], where: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if not isinstance(name, str):
            raise ConfigError(f"{where}: has an entry named {name!r}, which is no text; quote it")
        if name in found:
            raise ConfigError(f"{where}: has entry {name!r} twice; leave one of them out")
        found[name] = value
    return found


def _yaml(text: str, where: str) -> object:
    try:
        yaml: Any = import_module("yaml")
    except ModuleNotFoundError:
        raise ConfigError(
            f"{where} is YAML and PyYAML is not installed; pip install pyyaml, or write it as JSON"
        ) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the module has no types
        """Plain values alone, each entry once, numbers as in JSON."""

        def construct_mapping(
            self,
            node: Any,  # noqa: ANN401
            deep: bool = False,
        ) -> dict[str, object]:
            """A mapping whose entries are there once."""
            self.flatten_mapping(node)
            rows = [
                (self.construct_object(k, deep=True), self.construct_object(v, deep=True))
                for k, v in node.value
            ]
            return _once(rows, where)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{where} is not YAML: {said}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; see examples/clusters") from None
