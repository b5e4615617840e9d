"""Plan Llama-3-8B for 32 H100s on any machine: no weights, no GPU, no launch.

python examples/01_plan_llama.py
"""

from __future__ import annotations

import logging
import resource
import time

import torch
import transformers

import autopar

BATCH, LENGTH = 64, 8192
KIB_PER_GIB = 1 << 20


def main() -> None:
    """Build on the meta device, plan, and say what it took."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    started_s = time.perf_counter()
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        rope_theta=500_000.0, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    built_s = time.perf_counter()
    model = autopar.compile(model, devices="4x8:h100-sxm", inputs={"input_ids": ids, "labels": ids})
    planned_s = time.perf_counter()
    print(model.report())
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_GIB
    print(f"model built in {built_s - started_s:.1f} s")
    for phase, seconds in model.planning_s.items():
        print(f"  {phase}: {seconds:.1f} s")
    print(f"captured and planned in {planned_s - built_s:.1f} s")
    print(f"peak memory of this process {peak_gib:.2f} GiB")


if __name__ == "__main__":
    main()
