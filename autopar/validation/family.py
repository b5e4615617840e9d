"""Which kernels and which framework a record names, as facts that prices may depend on.

A family is read off the record's own words (``parallel.kernel``, ``parallel.compile``, titles and
notes). It never holds a constant of its own: constants belong to (GPU type, op class, family).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cost_models.kernels import AttentionKernel, Backend, Float8, Kernels


class Framework(StrEnum):
    """Who runs the step: fixes what overlaps and what is kept in which precision."""

    MEGATRON = "megatron"
    NANOTRON = "nanotron"
    TORCH = "torch"  # 3-D parallel code that is not Megatron's
    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"
    XLA = "xla"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFamily:
    """Kernels and framework of a run.

    Attributes:
        attention: Kernel of fused attention; None where scores are operators of their own.
        float8: Scaling of 8-bit linear layers; None for the record's own precision.
        fused: Regions of a block that are one kernel each: ``"norm"``, ``"softmax"``,
            ``"activation"``, ``"residual"``, ``"rotary"``, ``"loss"``.
        compiled: Every chain of element-wise operators is fused by a compiler.
        framework: Who runs the step.
        overlaps_data_reduction: Gradients are reduced while backward still runs.
        prefetches_weights: Weights of the next layer are gathered while this one computes.
        splits_loss: The loss is computed on parts of the vocabulary, else on gathered scores.
        scatters_messages: Pipeline messages are cut over tp and gathered again on arrival.
        dropout: Probability of dropping, 0.0 for none.
    """

    attention: AttentionKernel | None
    fused: frozenset[str]
    compiled: bool
    framework: Framework
    overlaps_data_reduction: bool
    prefetches_weights: bool
    splits_loss: bool
    scatters_messages: bool
    dropout: float
    float8: Float8 | None = None

    @property
    def explicit_attention(self) -> bool:
        """Whether scores are operators of their own."""
        return self.attention is None

    @property
    def kernels(self) -> Kernels:
        """The same for :func:`cost_models.kernels.kernel_works`."""
        return Kernels(
            backend=Backend.COMPILED if self.compiled else Backend.EAGER,
            attention=self.attention or AttentionKernel.FLASH_2,
            float8=self.float8,
        )

    def __str__(self) -> str:
        """Such as ``megatron, unfused attention, fused norm softmax``."""
        fused = "compiled" if self.compiled else "fused " + (" ".join(sorted(self.fused)) or "none")
        return f"{self.framework}, {self.attention or 'unfused'} attention, {fused}"


_GPT_RECIPES = (Framework.MEGATRON, Framework.NANOTRON, Framework.DEEPSPEED, Framework.TORCH)
KERNEL_WORDS = ("torch", "fused", "flash...")
ALL_REGIONS = frozenset({"norm", "softmax", "activation", "residual", "rotary"})


def family_of(entry: Mapping[str, object]) -> KernelFamily:
    """The family of a record.

    Rules, first match wins: the words of ``parallel.kernel``; then the framework's usual kernels.

    Sharded weights are gathered ahead by FSDP and by DeepSpeed. Gradients are reduced beside
    backward where every micro-batch reduces them, and by torch's bucketed reducer, which nanotron
    uses without ZeRO; Megatron and DeepSpeed's pipeline engine reduce after the schedule.
    """
    words = _words(entry)
    parallel = entry.get("parallel")
    kernel = str(parallel.get("kernel") or "").lower() if isinstance(parallel, Mapping) else ""
    compiled = isinstance(parallel, Mapping) and parallel.get("compile") is True
    zero = parallel.get("zero_stage") if isinstance(parallel, Mapping) else None
    model = entry.get("model")
    is_gpt = isinstance(model, Mapping) and model.get("arch") == "gpt"
    framework = _framework(words, zero, is_gpt=is_gpt)
    is_lean = "mpt-" in words or not is_gpt
    return KernelFamily(
        attention=_attention(kernel, words, framework, is_lean=is_lean),
        fused=_fused(kernel, words, framework),
        compiled=compiled or framework is Framework.XLA,
        framework=framework,
        overlaps_data_reduction=framework is Framework.FSDP
        or (framework is Framework.DEEPSPEED and zero == 3)
        or (framework is Framework.NANOTRON and zero == 0),
        prefetches_weights=framework in (Framework.FSDP, Framework.DEEPSPEED),
        float8=_float8(parallel),
        splits_loss=framework is not Framework.TORCH,
        scatters_messages=_scatters_messages(words, framework, parallel),
        # GPT recipes of Megatron drop a tenth; MPT and Llama models, and XLA benchmarks, nothing
        dropout=0.1 if framework in _GPT_RECIPES and not is_lean else 0.0,
    )


def _words(entry: Mapping[str, object]) -> str:
    parts = [str(entry.get("notes") or "")]
    for name in ("source", "model"):
        part = entry.get(name)
        if isinstance(part, Mapping):
            parts += [str(v) for v in part.values()]
    return " ".join(parts).lower()


def _framework(words: str, zero: object, *, is_gpt: bool) -> Framework:
    if "parax" in words or "xla" in words:
        return Framework.XLA
    # sharded parameters are torch's FSDP, unless the record names DeepSpeed
    if "fsdp" in words or (zero == 3 and "deepspeed" not in words):
        return Framework.FSDP
    if "deepspeed" in words and ("pipeline engine" in words or zero == 3):
        return Framework.DEEPSPEED
    if "nanotron" in words:
        return Framework.NANOTRON
    if "megatron" in words or is_gpt:  # where tensor parallelism of GPT comes from
        return Framework.MEGATRON
    return Framework.TORCH


def _scatters_messages(words: str, framework: Framework, parallel: object) -> bool:
    """Megatron's own pipeline does; engines built on its layers do not.

    Stages that each have ranks or operators of their own need such an engine.
    """
    if "scatter/gather" in words:
        return True
    names = ("tp", "dp", "gpus_per_stage", "ops_per_stage")
    is_uneven = isinstance(parallel, Mapping) and any(
        isinstance(parallel.get(name), list) for name in names
    )
    return framework is Framework.MEGATRON and "deepspeed" not in words and not is_uneven


def _float8(parallel: object) -> Float8 | None:
    words = str(parallel.get("precision") or "") if isinstance(parallel, Mapping) else ""
    if "float8" not in words:
        return None
    return Float8.ROWWISE if "rowwise" in words else Float8.TENSORWISE


def is_known_kernel(kernel: str) -> bool:
    """Whether ``parallel.kernel`` names kernels of attention that are told apart here."""
    words = kernel.lower()
    return words in ("torch", "fused") or words.startswith("flash")


def _attention(
    kernel: str, words: str, framework: Framework, *, is_lean: bool
) -> AttentionKernel | None:
    if "flash" in kernel:
        return AttentionKernel.FLASH_1 if "v1" in kernel else AttentionKernel.FLASH_2
    if kernel in ("torch", "fused"):
        return None
    if "flashattention (triton)" in words:
        return AttentionKernel.FLASH_TRITON
    if framework is Framework.FSDP or is_lean:
        return AttentionKernel.FLASH_2
    return None


def _fused(kernel: str, words: str, framework: Framework) -> frozenset[str]:
    if kernel == "torch":
        return frozenset()
    if kernel == "fused":
        return frozenset({"softmax"})
    if kernel:
        return frozenset({"norm"}) if "rms" in kernel else frozenset()
    if "mpt-" in words:
        return frozenset({"loss"})  # its reference code takes flash-attn's cross-entropy
    if framework is Framework.NANOTRON:
        return ALL_REGIONS - {"activation"}  # silu(gate) is written, then multiplied
    return ALL_REGIONS if framework in _GPT_RECIPES else frozenset()
