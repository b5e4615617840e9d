"""Auto-parallelizing graph compiler for PyTorch: ``autopar.compile(model, devices=32)``.

The public names are loaded when they are first used (PEP 562). ``import autopar`` stays under a
tenth of a second, and ``cost_models`` can import ``autopar.ir`` without a cycle through the API.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from autopar._siblings import check_siblings

if TYPE_CHECKING:
    from autopar.api import (
        TrainerMixin,
        as_one_worker,
        close,
        compile,
        load_checkpoint,
        register_op,
        save_checkpoint,
        shard_loader,
        verify,
    )
    from autopar.cluster import Cluster
    from autopar.errors import (
        AutoparError,
        CaptureError,
        ConfigError,
        ConstraintError,
        DeadlockError,
        EquivalenceError,
        InfeasibleError,
        InputError,
        PassError,
        PlanError,
        RankError,
        RowBudgetError,
        ShardingError,
    )
    from autopar.plan.io import load_plan, plan_hash, save_plan
    from autopar.plan.types import Plan

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "CaptureError",
    "Cluster",
    "ConfigError",
    "ConstraintError",
    "DeadlockError",
    "EquivalenceError",
    "InfeasibleError",
    "InputError",
    "PassError",
    "Plan",
    "PlanError",
    "RankError",
    "RowBudgetError",
    "ShardingError",
    "TrainerMixin",
    "__version__",
    "as_one_worker",
    "close",
    "compile",
    "load_checkpoint",
    "load_plan",
    "plan_hash",
    "register_op",
    "save_checkpoint",
    "save_plan",
    "shard_loader",
    "verify",
]

_HOMES = {
    "autopar.api": (
        "TrainerMixin",
        "as_one_worker",
        "close",
        "compile",
        "load_checkpoint",
        "register_op",
        "save_checkpoint",
        "shard_loader",
        "verify",
    ),
    "autopar.cluster": ("Cluster",),
    "autopar.plan.io": ("load_plan", "plan_hash", "save_plan"),
    "autopar.plan.types": ("Plan",),
    "autopar.errors": tuple(name for name in __all__ if name.endswith("Error")),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

check_siblings()


def __getattr__(name: str) -> object:
    """The public name ``name``, imported from the module that defines it."""
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}") from None
    value: object = getattr(import_module(home), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
