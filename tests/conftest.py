"""What every test shares."""

from __future__ import annotations

import os
import tempfile

import pytest

# a profile that the developer measured on this machine must not change what tests plan
os.environ["HOME"] = tempfile.mkdtemp(prefix="autopar-tests-")

# a package: pytest would import it once more under another name, and define its operators twice
collect_ignore = ["zoo_models"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What may run beside what, where pytest has several workers.

    Tests that start processes of their own go one after the other: several at once are more ranks
    than cores, and theirs are the tests that speak of time. They begin first, since they take
    longest. Else a file stays on one worker, so that its fixtures are made once.
    """
    for item in items:
        starts_processes = item.get_closest_marker("dist") is not None
        group = "processes" if starts_processes else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("dist") is None)
