"""Language models of transformers, unmodified, with tiny configurations.

Dropouts are on where the configuration's defaults have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import transformers

Batch = dict[str, object]
Built = tuple[torch.nn.Module, Batch]
BATCH, SEQ, VOCAB, HIDDEN = 8, 16, 96, 32

SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {"num_key_value_heads": 2, **SIZES}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def ids() -> torch.Tensor:
    """Token ids ``(B, S)``, none of them a special one."""
    return torch.randint(3, VOCAB, (BATCH, SEQ))


def labelled_ids() -> Batch:
    """Ids with labels, of which samples have unequal counts."""
    batch = ids()
    labels = batch.clone()
    labels[::2, : SEQ // 4] = -100
    return {"input_ids": batch, "labels": labels}


def with_dropout(config: object, *, dropout: bool) -> object:
    """``config`` itself, or with every dropout probability at zero."""
    if not dropout:
        for name, value in list(vars(config).items()):
            if name.endswith("_config") and hasattr(value, "__dict__"):
                with_dropout(value, dropout=False)
            elif ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
    return config


def _language(name: str, config: str, **options: object) -> Callable[[bool], Built]:
    def make(dropout: bool) -> Built:
        kind, settings = getattr(transformers, name), getattr(transformers, config)
        given = {"vocab_size": VOCAB, **options}
        return kind(with_dropout(settings(**given), dropout=dropout)), labelled_ids()

    return make


LANGUAGE: Mapping[str, Callable[[bool], Built]] = MappingProxyType(
    {
        "GPT-2": _language(
            "GPT2LMHeadModel", "GPT2Config", n_positions=64, n_embd=HIDDEN, n_layer=2, n_head=4,
            **ENDS,
        ),
        "GPT-NeoX": _language(
            "GPTNeoXForCausalLM", "GPTNeoXConfig", max_position_embeddings=64, **ENDS, **SIZES
        ),
        "OPT": _language(
            "OPTForCausalLM", "OPTConfig", hidden_size=HIDDEN, ffn_dim=64, num_hidden_layers=2,
            num_attention_heads=4, word_embed_proj_dim=HIDDEN, max_position_embeddings=64,
        ),
        "BLOOM": _language(
            "BloomForCausalLM", "BloomConfig", hidden_size=HIDDEN, n_layer=2, n_head=4
        ),
        "Falcon": _language(
            "FalconForCausalLM", "FalconConfig", hidden_size=HIDDEN, num_hidden_layers=2,
            num_attention_heads=4, **ENDS,
        ),
        "Llama": _language(
            "LlamaForCausalLM", "LlamaConfig", max_position_embeddings=64, bos_token_id=1,
            eos_token_id=2, **GROUPED,
        ),
        "Qwen3": _language("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **GROUPED),
        "Gemma3": _language("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, **GROUPED),
        "Phi-3": _language("Phi3ForCausalLM", "Phi3Config", pad_token_id=0, **ENDS, **GROUPED),
        "Mixtral": _language(
            "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **GROUPED
        ),
        "Qwen3-MoE": _language(
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=8, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=16, **GROUPED,
        ),
        "DeepSeek-V3": _language(
            "DeepseekV3ForCausalLM", "DeepseekV3Config", n_routed_experts=4,
            num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
            q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=8, moe_intermediate_size=16, num_mtp_layers=0, **SIZES,
        ),
        "Mamba": _language(
            "MambaForCausalLM", "MambaConfig", hidden_size=HIDDEN, num_hidden_layers=2,
            state_size=4,
        ),
        "BERT": _language(
            "BertForMaskedLM", "BertConfig", max_position_embeddings=64, pad_token_id=None, **SIZES
        ),
        "RoBERTa": _language(
            "RobertaForMaskedLM", "RobertaConfig", max_position_embeddings=64, **SIZES
        ),
        "T5": _language(
            "T5ForConditionalGeneration", "T5Config", d_model=HIDDEN, d_kv=8, d_ff=64,
            num_layers=2, num_heads=4, decoder_start_token_id=0,
        ),
    }
)  # fmt: skip
"""Name -> builder; its argument says whether dropouts stay on."""
