"""Compute and communication at the same time.

Collectives run on the device's own multiprocessors and memory: while one runs beside matmuls, both
get slower. ``c`` seconds of compute and ``x`` of communication that start together take
``max(c + slowdown * min(c, x), x)``: the compute that runs beside communication loses a share, and
a longer communication sticks out. Source: ours, of the form that interference models of planners
have (Mist, EuroSys 2025).
"""

from __future__ import annotations

from autopar.errors import ConfigError
from cost_models.constants import CONSTANTS


def overlapped_s(compute_s: float, comm_s: float, *, slowdown: float = CONSTANTS.slowdown) -> float:
    """Seconds of both, started together.

    Raises:
        ConfigError: A time is negative, or ``slowdown`` is not in [0, 1].

    >>> overlapped_s(10.0, 4.0, slowdown=0.25), overlapped_s(1.0, 4.0, slowdown=0.25)
    (11.0, 4.0)
    """
    if compute_s < 0 or comm_s < 0 or not 0.0 <= slowdown <= 1.0:
        raise ConfigError(
            f"compute_s is {compute_s}, comm_s {comm_s}, slowdown {slowdown}: times must be at "
            "least 0 and slowdown in [0, 1]"
        )
    return max(compute_s + slowdown * min(compute_s, comm_s), comm_s)
