"""What every test shares."""

from __future__ import annotations

import os
import tempfile

# a profile that the developer measured on this machine must not change what tests plan
os.environ["HOME"] = tempfile.mkdtemp(prefix="autopar-tests-")

# a package: pytest would import it once more under another name, and define its operators twice
collect_ignore = ["zoo_models"]
