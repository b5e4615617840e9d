"""What :func:`autopar.compile` is given, checked before anything else is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from autopar.errors import ConfigError, InputError, PlanError
from autopar.ir.precision import check_precision
from autopar.plan.types import Plan
from autopar.runtime.module import is_compiled

_ON_UNKNOWN = ("replicate", "error")
_MODES = ("train", "inference")


def check_arguments(model: torch.nn.Module, on_unknown: str) -> None:
    """Refuse what is no model, or is compiled already, or an unknown word."""
    check_module(model)
    if is_compiled(model):
        raise ConfigError(
            f"this {type(model).__name__} is compiled already; build a new one to compile it again"
        )
    if on_unknown not in _ON_UNKNOWN:
        raise ConfigError(f"on_unknown={on_unknown!r}: must be one of {', '.join(_ON_UNKNOWN)}")


def file_of(name: str, value: object) -> Path | None:
    """The path of a file that is given for ``name``; None if none is.

    Raises:
        ConfigError: It is no path.
    """
    if value is not None and not isinstance(value, str | Path):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; give the path of a file")
    return None if value is None else Path(value)


def check_module(model: object, *, of: str = "") -> None:
    """Refuse what is no model."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"{of}the model is {model!r} of type {type(model).__name__}; give an object of "
            "torch.nn.Module"
        )


def check_kinds(
    loss: object,
    plan: object,
    outputs: object,
    seed: object,
    given: object,
    limits_s: tuple[object, object],
    optimizer: object = "adamw",
) -> None:
    """Refuse arguments of another kind: they would be misread, or fail late and unclearly."""
    for name, value, fits, wanted in (
        ("loss", loss, callable(loss), "a function of (output, batch)"),
        ("plan", plan, isinstance(plan, Plan | str | Path), "a Plan or the path of one"),
        ("outputs", outputs, _are_texts(outputs), "a list of paths, such as ['logits']"),
        ("seed", seed, type(seed) is int, "a whole number"),
        ("state_dict", given, isinstance(given, Mapping), "a dict of tensors, or a path"),
        ("time_limit_s", limits_s[0], _is_positive(limits_s[0]), "seconds above 0"),
        ("timeout_s", limits_s[1], _is_positive(limits_s[1]), "seconds above 0"),
    ):
        if value is not None and not fits and isinstance(value, float) and name.endswith("_s"):
            raise ConfigError(f"{name}={value:g}: give {wanted}")
        if value is not None and not fits:
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; give {wanted}")
    if not isinstance(optimizer, str):
        raise ConfigError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}; give the kind that memory "
            "is kept for, such as 'adamw', or 'none'"
        )
    for key, value in given.items() if isinstance(given, dict) else ():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"state_dict: {key!r} is a {type(value).__name__}; give a dict of tensors"
            )
    if loss is not None and outputs:
        raise ConfigError(
            f"outputs={outputs!r}: with loss= a call returns the loss alone; leave one of the two "
            "out, or let the model return its loss"
        )


def check_word(name: str, value: object, words: Sequence[str]) -> None:
    """Refuse a word that is none of ``words``."""
    if value not in words:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, words))}")


def chosen_mode(mode: str | None, plan: Plan | None) -> str:
    """``mode``, or that of a given plan; training if there is neither.

    Raises:
        ConfigError: There is no such mode.
        PlanError: The plan was made for the other one.
    """
    if mode is None:
        return "train" if plan is None else plan.mode
    check_word("mode", mode, _MODES)
    if plan is not None and plan.mode != mode:
        raise PlanError(
            f"mode={mode!r}: the plan was made for {plan.mode!r}; leave mode out, or plan again"
        )
    return mode


def precision_of(wanted: str | None, plan: Plan | None) -> str | None:
    """The precision that is asked for, else that of the plan.

    Raises:
        ConfigError: There is no such word.
        PlanError: The plan was made for another one.
    """
    if wanted is None:
        return None if plan is None else plan.precision
    check_precision(wanted)
    if plan is not None and plan.precision != wanted:
        made = "the model's own dtypes" if plan.precision is None else f"{plan.precision!r}"
        raise PlanError(
            f"precision={wanted!r}, and the plan was made for {made}; leave precision= out to take "
            "the plan's, or plan again"
        )
    return wanted


def check_names(model: torch.nn.Module, given: Mapping[str, torch.Tensor] | None) -> None:
    """Refuse a state dict of other names than the model's, as a strict load does.

    Tied tensors need one of their names, buffers that are not saved none.
    """
    if given is None:
        return
    own = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    unknown = [name for name in given if name not in own]
    if unknown:
        raise ConfigError(
            f"state_dict: {len(unknown)} of {len(given)} names are unknown to "
            f"{type(model).__name__}, the first is {unknown[0]!r}; the model's are such as "
            f"{', '.join(map(repr, list(own)[:3]))}; leave the others out"
        )
    covered = {id(own[name]) for name in given}
    saved = [name for name in model.state_dict(keep_vars=True) if name in own]
    missing = [name for name in saved if id(own[name]) not in covered]
    if missing:
        raise ConfigError(
            f"state_dict: {len(missing)} of {len(saved)} names of {type(model).__name__} are "
            f"missing, the first is {missing[0]!r}; give the whole state dict of this model, or "
            "load the part into the model before autopar.compile()"
        )


def check_inputs(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a first call without rows: nothing could be split or priced."""
    for path, tensor in tensors.items():
        if tensor.dim() and not tensor.shape[0]:
            raise InputError(
                f"input {path!r} has shape {tuple(tensor.shape)}, which is empty; give one global "
                "batch of the size that is trained"
            )


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
