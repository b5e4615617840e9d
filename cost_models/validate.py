"""``python -m cost_models.validate``: published runs against predictions.

Only a door: models are captured and split far above this floor (:mod:`autopar.validation`).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from autopar.validation.command import main

    sys.exit(main())
