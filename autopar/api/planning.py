"""One plan for all ranks: made on rank 0, checked everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist

import autopar.errors
from autopar.capture.tracing import Captured
from autopar.errors import AutoparError, ConfigError, PlanError, RankError
from autopar.plan.io import plan_from_json, plan_hash, plan_to_json
from autopar.plan.types import Plan
from autopar.runtime.place import Place


def agree_on_plan(
    make: Callable[[], Plan],
    captured: Captured,
    place: Place,
    *,
    given: Plan | None = None,
    wishes: Mapping[str, str] | None = None,
) -> Plan:
    """The plan, the same on every rank.

    Args:
        make: Plans; only rank 0 calls it.
        captured: What this rank captured; must be the same everywhere.
        place: This process.
        given: The plan that this rank's user gave, if any; must be the same everywhere.
        wishes: Other arguments of ``compile`` that must be the same everywhere, by name.

    Raises:
        ConfigError: The ranks captured different models, or were given different arguments.
        AutoparError: Planning failed on rank 0; the same error on every rank.
    """
    if not place.is_distributed:
        return make()
    _check_same_model(captured, place)
    plan_text = "None" if given is None else f"the plan {plan_hash(given)[:12]}"
    _check_same_wishes({**(wishes or {}), "plan": plan_text}, place)
    message: tuple[str, str, str] = ("", "", "")
    failure: Exception | None = None
    if place.rank == 0:
        try:
            plan = make()
            message = ("plan", plan_to_json(plan), plan_hash(plan))
        except AutoparError as error:
            failure = error
            message = ("error", type(error).__name__, str(error))
        except Exception as error:
            failure = error
            message = ("error", RankError.__name__, f"rank 0: {type(error).__name__}: {error}")
    box = [message]
    dist.broadcast_object_list(box, src=0)
    kind, first, second = box[0]
    if failure is not None:
        raise failure
    if kind == "error":
        raise _error_like(first, second)
    plan = plan_from_json(first, source="the plan of rank 0")
    if plan_hash(plan) != second:
        raise PlanError(
            f"rank {place.rank} reads the plan of rank 0 as {plan_hash(plan)}, it is {second}; "
            "install the same version of autopar on all machines"
        )
    return plan


def _check_same_model(captured: Captured, place: Place) -> None:
    hashes: list[str | None] = [None] * place.world_size
    dist.all_gather_object(hashes, captured.hash)
    odd = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if odd:
        raise ConfigError(
            f"the model of rank {odd[0]} has hash {hashes[odd[0]]}, that of rank 0 has "
            f"{hashes[0]} ({len(odd)} of {place.world_size} ranks differ); build the same model "
            "and pass the same global batch on every rank"
        )


def _check_same_wishes(wishes: dict[str, str], place: Place) -> None:
    every: list[dict[str, str]] = [{}] * place.world_size
    dist.all_gather_object(every, wishes)
    for rank, other in enumerate(every):
        odd = next((name for name in every[0] if other.get(name) != every[0][name]), None)
        if odd is not None:
            raise ConfigError(
                f"autopar.compile({odd}=) is {other.get(odd)} on rank {rank} and {every[0][odd]} "
                "on rank 0; call it with the same arguments on every rank"
            )


def _error_like(name: str, text: str) -> Exception:
    kind = getattr(autopar.errors, name, RankError)
    return kind(text) if issubclass(kind, AutoparError) else RankError(text)
