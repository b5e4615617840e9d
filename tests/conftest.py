"""What every test shares."""

from __future__ import annotations

import os
import tempfile

# a profile that the developer measured on this machine must not change what tests plan
os.environ["HOME"] = tempfile.mkdtemp(prefix="autopar-tests-")
