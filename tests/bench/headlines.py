"""Headline claims of papers, predicted: ``python -m tests.bench.headlines``.

Plans are those of the papers, forced; prices are the cost models' for A100s. Prints claim beside
prediction; nothing is asserted. Sources: Narayanan et al., "Efficient large-scale language model
training on GPU clusters using Megatron-LM", SC 2021 (tables 1 and 2, figure 12); Korthikanti et
al., "Reducing activation recomputation in large transformer models", 2022 (tables 4 and 5).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.validation.memory import predict_memory
from autopar.validation.predict import predict_time
from autopar.validation.records import parse_record
from autopar.validation.works import layer_of, works_of

A100: Mapping[str, object] = {
    "gpu": "A100-SXM4-80GB", "gpus_per_node": 8, "mem_gb": 80, "hbm_gbs": 2039,
    "intra_node_bw_gbs": 300, "inter_node_gbs_per_gpu": 25.0,
    "inter_node": "8x HDR InfiniBand 200 Gb/s per node",
}  # fmt: skip
PEAK_FLOPS = 312e12
VOCAB, SEQ = 51_200, 2048
PTDP = "Megatron-LM with scatter/gather of messages"
ZERO = "DeepSpeed ZeRO-3"


@dataclass(frozen=True)
class Model:
    """A GPT: layers, width, heads, parameters in billions."""

    layers: int
    hidden: int
    heads: int
    billions: float

    def flops(self, batch: int, *, recompute: bool) -> float:
        """Of one iteration; the papers' formulas, with full recompute or of the model alone."""
        h, rows = self.hidden, batch * SEQ
        rest = 1 + SEQ / (6 * h) + VOCAB / ((16 if recompute else 12) * self.layers * h)
        return (96 if recompute else 72) * rows * self.layers * h**2 * rest


M22B, M175B = Model(48, 6144, 64, 22), Model(96, 12288, 96, 175)
M530B, M1T = Model(105, 20480, 128, 530), Model(128, 25600, 160, 1008)


@dataclass(frozen=True)
class Run:
    """A forced plan on A100s."""

    model: Model
    gpus: int
    batch: int
    tp: int = 8
    pp: int = 1
    mbs: int = 1
    virtual: int = 1
    zero: int = 0
    recompute: str = "full"
    sequence: bool = False
    software: str = PTDP
    kind: str = "e2e_train"

    def record(self) -> object:
        """As the validation reads it."""
        model, dp = self.model, self.gpus // (self.tp * self.pp)
        return parse_record(
            {
                "id": "headline", "source_id": "headline", "kind": self.kind, "status": "ok",
                "source": {"paper": self.software},
                "hardware": {**A100, "n_gpus": self.gpus},
                "model": {
                    "name": "GPT", "arch": "gpt", "layers": model.layers, "hidden": model.hidden,
                    "heads": model.heads, "vocab": VOCAB, "seq": SEQ, "params_b": model.billions,
                },
                "parallel": {
                    "tp": self.tp, "pp": self.pp, "dp": dp, "virtual_stages": self.virtual,
                    "seq_parallel": self.sequence, "zero_stage": self.zero,
                    "recompute": self.recompute, "mbs": self.mbs, "gbs": self.batch,
                    "microbatches": self.batch // (dp * self.mbs), "precision": "fp16-mixed",
                },
                "measured": {"iter_s": 1.0, "layer_fwd_ms": 1.0, "layer_bwd_ms": 1.0},
            }
        )  # fmt: skip

    def seconds(self) -> float:
        """Predicted iteration."""
        return predict_time(works_of(self.record())).total_s

    def flops_per_gpu(self) -> float:
        """Predicted FLOP/s of a GPU, recomputed ones counted."""
        return self.model.flops(self.batch, recompute=True) / self.seconds() / self.gpus

    def activation_bytes(self) -> float:
        """Predicted bytes of saved activations on the fullest device."""
        return predict_memory(works_of(self.record())).parts_bytes["activations"]

    def layer_seconds(self) -> float:
        """Predicted forward and backward of one layer."""
        time = predict_time(layer_of(self.record()))
        return time.forward_s[0] + time.backward_s[0]


def say(text: str = "") -> None:
    """One line."""
    sys.stdout.write(text + "\n")


def trillion() -> None:
    """SC 2021, table 1, last row."""
    per_gpu = Run(M1T, 3072, 3072, pp=64).flops_per_gpu()
    say("1T parameters on 3,072 A100 (tp 8, pp 64, dp 6, batch 3,072)")
    say("  published: 163 TFLOP/s per GPU, 52 % of peak, 502 PFLOP/s")
    say(
        f"  predicted: {per_gpu / 1e12:.0f} TFLOP/s per GPU, {per_gpu / PEAK_FLOPS:.1%} of peak, "
        f"{per_gpu * 3072 / 1e15:.0f} PFLOP/s"
    )


def selective_recompute() -> None:
    """Korthikanti et al., section 6."""
    say("selective recompute and sequence parallelism (published: memory about 5x, over 90 %)")
    rows = [
        ("22B", Run(M22B, 8, 4, mbs=4)),
        ("175B", Run(M175B, 64, 64, pp=8, virtual=3)),
        ("530B", Run(M530B, 280, 280, pp=35, virtual=3)),
        ("1T", Run(M1T, 512, 512, pp=64)),
    ]
    for name, full in rows:
        both = {**vars(full), "recompute": "selective", "sequence": True}
        lean, kept = Run(**both), Run(**{**vars(full), "recompute": "none"})
        ratio = kept.activation_bytes() / lean.activation_bytes()
        alone = {"kind": "layer_time", "pp": 1, "virtual": 1, "gpus": 8}
        layer = {
            key: Run(**{**vars(run), **alone}).layer_seconds()
            for key, run in (("full", full), ("lean", lean), ("none", kept))
        }
        over_full, over_lean = (layer[k] / layer["none"] - 1 for k in ("full", "lean"))
        gain = full.seconds() / lean.seconds() - 1
        say(
            f"  {name:<5} activations {ratio:.2f}x smaller; a layer's overhead {over_full:.1%} to "
            f"{over_lean:.1%}: {1 - over_lean / over_full:.0%} of it removed; "
            f"throughput {gain:+.1%}"
        )
    say("  published throughput: +29.0 %, +31.8 %, +29.7 %, +32.1 %")


def zero_three() -> None:
    """SC 2021, table 2."""
    say("PTD-P against ZeRO-3 without model parallelism (TFLOP/s per GPU)")
    rows = [
        ("175B", M175B, 1536, 12, [(384, 4, 144, 153), (768, 2, 88, 149), (1536, 1, 44, 141)]),
        ("530B", M530B, 2240, 35, [(1120, 2, 98, 167), (2240, 1, 48, 159)]),
    ]
    for name, model, batch, pp, points in rows:
        for gpus, mbs, published_zero, published in points:
            sharded = Run(model, gpus, batch, tp=1, mbs=mbs, zero=3, software=ZERO)
            ours, theirs = Run(model, gpus, batch, pp=pp).flops_per_gpu(), sharded.flops_per_gpu()
            say(
                f"  {name} on {gpus:>5}: published {published} against {published_zero} "
                f"({published / published_zero - 1:+.0%}), predicted {ours / 1e12:.0f} against "
                f"{theirs / 1e12:.0f} ({ours / theirs - 1:+.0%})"
            )


def interleaving() -> None:
    """SC 2021, figure 12."""
    say("interleaving, two stages per rank, 175B on 96 A100 (published: 10 % and more when small)")
    for batch in (12, 24, 36, 48, 60):
        plain = Run(M175B, 96, batch, pp=12)
        woven = Run(M175B, 96, batch, pp=12, virtual=2)
        say(f"  batch {batch}: {plain.seconds() / woven.seconds() - 1:+.1%}")


def main() -> None:
    """All of them."""
    for each in (trillion, selective_recompute, zero_three, interleaving):
        each()
        say()


if __name__ == "__main__":
    main()
