"""Compiled models in the loops of ``transformers.Trainer`` and ``accelerate``.

Both take every process for a data-parallel worker of its own: they wrap the model, cut the data,
sum counts and gather results over the processes. The ranks of a compiled model are *one* worker:
each is given the global batch, has the whole loss and whole outputs. :func:`as_one_worker` says so
to accelerate, and both libraries then do what they do in a single process, but for what only the
main process does. Nothing of either library is replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.errors import ConfigError
from autopar.runtime.module import CompiledModule, is_compiled

T = TypeVar("T")

_RECOMPUTE = "pass recompute= to autopar.compile()"
_SAVING = "save it by torch.distributed.checkpoint, which also loads under another plan"
_REFUSED: tuple[tuple[str, str, str], ...] = (
    ("fsdp", "it would shard the model once more", "leave it out: the plan shards"),
    ("deepspeed", "it would shard the model once more", "leave it out: the plan shards"),
    ("parallelism_config", "it would cut the data once more", "leave it out: the plan cuts"),
    ("torch_compile", "it would capture the compiled call", "leave it out"),
    ("fp16", "accelerate's wrapper around forward is not part of the captured program",
     "convert the model before autopar.compile()"),
    ("bf16", "accelerate's wrapper around forward is not part of the captured program",
     "convert the model before autopar.compile()"),
    ("fp16_full_eval", "it would convert the shards", "leave it out"),
    ("bf16_full_eval", "it would convert the shards", "leave it out"),
    ("gradient_checkpointing", "the plan decides what is recomputed", _RECOMPUTE),
    ("activation_checkpointing", "the plan decides what is recomputed", _RECOMPUTE),
    ("auto_find_batch_size", "one rank alone would change the batch", "pass memory_limit="),
    ("neftune_noise_alpha", "its hook is not part of the captured program", "leave it out"),
    ("use_liger_kernel", "it replaces modules that are captured already",
     "apply it before autopar.compile()"),
    ("load_best_model_at_end", "the Trainer's checkpoints lack the optimizer's shards",
     "load the best one by model.load_state_dict()"),
    ("enable_jit_checkpoint", "it would save this rank's part alone", _SAVING),
)  # fmt: skip


def as_one_worker(owner: T) -> T:
    """Tell accelerate that all ranks together are one data-parallel worker.

    From then on, for the whole process: no model is wrapped, no loader is cut, counts and gathered
    values are those of one process, a scheduler steps once a step. The batch size of the loop is
    the global one. Main-process checks (printing, saving) still mean rank 0; nobody waits in
    ``wait_for_everyone()`` any more, ``torch.distributed.barrier()`` is for that.

    Args:
        owner: An ``accelerate.Accelerator``, or ``transformers.TrainingArguments`` before the
            Trainer is built; it comes back.

    Raises:
        ConfigError: It has a setting that can't work with a compiled model.
    """
    _refuse_settings(owner)
    module = importlib.import_module("accelerate.state")
    partial = getattr(owner, "distributed_state", None) or module.PartialState()
    states = [state for state in (partial, getattr(owner, "state", None)) if state is not None]
    for state in states:
        state.distributed_type = module.DistributedType.NO
        state.num_processes = 1
    return owner


def _refuse_settings(owner: object) -> None:
    kind = type(owner).__name__
    for name, why, remedy in _REFUSED:
        if getattr(owner, name, None):
            raise ConfigError(
                f"{kind}({name}={getattr(owner, name)!r}) can't work with a compiled model: {why}; "
                f"{remedy}"
            )
    precision = getattr(owner, "mixed_precision", "no")
    if precision not in ("no", None):
        raise ConfigError(
            f"{kind}(mixed_precision={precision!r}) can't work with a compiled model: accelerate's "
            "wrapper around forward is not part of the captured program; convert the model before "
            "autopar.compile()"
        )
    state = getattr(owner, "state", None)
    for name in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin"):
        if getattr(state, name, None) is not None:
            raise ConfigError(
                f"{kind} has a {name}, which would shard the compiled model once more; "
                "leave it out: the plan shards"
            )


class TrainerMixin:
    """Makes a ``transformers.Trainer`` train a compiled model, over all its ranks.

    ``class Trainer(autopar.TrainerMixin, transformers.Trainer): pass`` takes a compiled model and
    the arguments that one process would be given: ``per_device_train_batch_size`` is the global
    batch of a call. ``save_model`` writes whole weights from rank 0; checkpoints hold the model
    alone.

    Raises:
        ConfigError: The model is not compiled, or a setting can't work with it.
    """

    def __init__(self, model: object, args: object, *others: object, **named: object) -> None:
        if not isinstance(model, torch.nn.Module) or not is_compiled(model):
            raise ConfigError(
                f"the Trainer's model is a {type(model).__name__} that is not compiled; give it "
                "the result of autopar.compile()"
            )
        if named.get("model_init") is not None:
            raise ConfigError(
                "Trainer(model_init=...) builds models that are not compiled; pass model="
            )
        _check_saving(args)
        as_one_worker(args)
        super().__init__(model, args, *others, **named)  # type: ignore[call-arg]
        as_one_worker(self.accelerator)  # type: ignore[attr-defined]  # the Trainer's

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *others: object, **named: object
    ) -> object:
        """As the Trainer's; it begins anew.

        Raises:
            ConfigError: A checkpoint is given.
        """
        if resume_from_checkpoint:
            raise ConfigError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: the Trainer's checkpoints "
                f"lack the optimizer's shards; {_SAVING}"
            )
        run: Callable[..., object] = super().train  # type: ignore[misc]
        return run(None, *others, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write whole weights from rank 0. Every rank must call it.

        Args:
            output_dir: Folder; that of the arguments if None.
            _internal_call: As the Trainer's.
        """
        model, args = self.model, self.args  # type: ignore[attr-defined]  # the Trainer's
        assert isinstance(model, CompiledModule)
        whole = model.full_state_dict()
        if args.should_save:
            self._save(output_dir, state_dict=whole)  # type: ignore[attr-defined]  # the Trainer's
        if dist.is_initialized():
            dist.barrier()  # whoever reads it next finds it


def _check_saving(args: object) -> None:
    strategy = getattr(args, "save_strategy", "no")
    if str(getattr(strategy, "value", strategy)) != "no" and not getattr(
        args, "save_only_model", False
    ):
        raise ConfigError(
            f"TrainingArguments(save_strategy={str(getattr(strategy, 'value', strategy))!r}): the "
            "Trainer would write rank 0's part of the optimizer as if it were all; pass "
            f"save_only_model=True or save_strategy='no', and {_SAVING}"
        )
