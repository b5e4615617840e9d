"""Further architectures of transformers, unmodified and tiny, with a batch each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import transformers

Built = tuple[torch.nn.Module, dict[str, object]]
BATCH, SEQ, VOCAB, HIDDEN, CLASSES = 8, 16, 101, 32, 8
SHARED = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, SEQ))


def _language(name: str, config: str, **options: object) -> Callable[[], Built]:
    def make() -> Built:
        kind, settings = getattr(transformers, name), getattr(transformers, config)
        ids = _ids()
        return kind(settings(vocab_size=VOCAB, **options)), {"input_ids": ids, "labels": ids}

    return make


def _image(name: str, config: str, size: int, **options: object) -> Callable[[], Built]:
    def make() -> Built:
        kind, settings = getattr(transformers, name), getattr(transformers, config)
        batch = {
            "pixel_values": torch.randn(BATCH, 3, size, size),
            "labels": torch.randint(0, CLASSES, (BATCH,)),
        }
        return kind(settings(num_labels=CLASSES, **options)), batch

    return make


def _whisper() -> Built:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_source_positions=16, max_target_positions=32, num_mel_bins=8,
        dropout=0.0, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    features = torch.randn(BATCH, 8, 2 * SEQ)
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": features, "labels": _ids()}


def _clip() -> Built:
    text = {"vocab_size": VOCAB, "max_position_embeddings": 32, "eos_token_id": 2, **SHARED}
    vision = {"image_size": 16, "patch_size": 4, **SHARED}
    config = transformers.CLIPConfig(
        text_config={**text, "projection_dim": 16},
        vision_config={**vision, "projection_dim": 16},
        projection_dim=16,
    )
    pixels = torch.randn(BATCH, 3, 16, 16)
    batch = {"input_ids": _ids(), "pixel_values": pixels, "return_loss": True}
    return transformers.CLIPModel(config), batch


_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
_GROUPED = {"num_key_value_heads": 2, **SHARED}
MODELS: Mapping[str, Callable[[], Built]] = MappingProxyType(
    {
        "gpt-neox": _language(
            "GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_dropout=0.0, attention_dropout=0.0,
            max_position_embeddings=64, **_ENDS, **SHARED,
        ),
        "opt": _language(
            "OPTForCausalLM", "OPTConfig", hidden_size=HIDDEN, ffn_dim=64, num_hidden_layers=2,
            num_attention_heads=4, word_embed_proj_dim=HIDDEN, max_position_embeddings=64,
            dropout=0.0,
        ),
        "bloom": _language(
            "BloomForCausalLM", "BloomConfig", hidden_size=HIDDEN, n_layer=2, n_head=4
        ),
        "falcon": _language(
            "FalconForCausalLM", "FalconConfig", hidden_size=HIDDEN, num_hidden_layers=2,
            num_attention_heads=4, **_ENDS,
        ),
        "qwen3": _language("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **_GROUPED),
        "gemma3": _language("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, **_GROUPED),
        "phi3": _language("Phi3ForCausalLM", "Phi3Config", pad_token_id=0, **_ENDS, **_GROUPED),
        "mixtral": _language(
            "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **_GROUPED
        ),
        "roberta": _language(
            "RobertaForMaskedLM", "RobertaConfig", max_position_embeddings=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SHARED,
        ),
        "mamba": _language(
            "MambaForCausalLM", "MambaConfig", hidden_size=HIDDEN, num_hidden_layers=2, state_size=4
        ),
        "whisper": _whisper,
        "clip": _clip,
        "convnext": _image(
            "ConvNextForImageClassification", "ConvNextConfig", 32, hidden_sizes=[8, 16],
            depths=[1, 1], num_stages=2,
        ),
        "swin": _image(
            "SwinForImageClassification", "SwinConfig", 16, image_size=16, patch_size=2,
            embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0,
        ),
    }
)  # fmt: skip
