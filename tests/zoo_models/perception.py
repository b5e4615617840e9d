"""Models of transformers for images, sound, and images with text, with tiny configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import transformers

from tests.zoo_models.language import BATCH, HIDDEN, SEQ, SIZES, VOCAB, Built, ids, with_dropout

CLASSES = 8


def _image(name: str, config: str, size: int, **options: object) -> Callable[[bool], Built]:
    def make(dropout: bool) -> Built:
        kind, settings = getattr(transformers, name), getattr(transformers, config)
        batch: dict[str, object] = {
            "pixel_values": torch.randn(BATCH, 3, size, size),
            "labels": torch.randint(0, CLASSES, (BATCH,)),
        }
        return kind(with_dropout(settings(num_labels=CLASSES, **options), dropout=dropout)), batch

    return make


def _whisper(dropout: bool) -> Built:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_source_positions=16, max_target_positions=32, num_mel_bins=8,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, dropout=0.1,
    )  # fmt: skip
    features = torch.randn(BATCH, 8, 2 * SEQ)
    model = transformers.WhisperForConditionalGeneration(with_dropout(config, dropout=dropout))
    return model, {"input_features": features, "labels": ids()}


def _clip(dropout: bool) -> Built:
    text = {"vocab_size": VOCAB, "max_position_embeddings": 32, "eos_token_id": 2, **SIZES}
    vision = {"image_size": 16, "patch_size": 4, **SIZES}
    config = transformers.CLIPConfig(
        text_config={**text, "projection_dim": 16},
        vision_config={**vision, "projection_dim": 16},
        projection_dim=16,
    )
    pixels = torch.randn(BATCH, 3, 16, 16)
    batch = {"input_ids": ids(), "pixel_values": pixels, "return_loss": True}
    return transformers.CLIPModel(with_dropout(config, dropout=dropout)), batch


def _wav2vec2(dropout: bool, *, mask: bool) -> Built:
    config = transformers.Wav2Vec2Config(
        conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=CLASSES,
        apply_spec_augment=mask, layerdrop=0.0, classifier_proj_size=16,
        mask_time_length=2, **SIZES,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(with_dropout(config, dropout=dropout))
    batch: dict[str, object] = {
        "input_values": torch.randn(BATCH, 200),
        "labels": torch.randint(0, CLASSES, (BATCH,)),
    }
    if mask:
        batch["attention_mask"] = torch.ones(BATCH, 200, dtype=torch.long)
    return model, batch


PERCEPTION: Mapping[str, Callable[[bool], Built]] = MappingProxyType(
    {
        "Whisper": _whisper,
        "CLIP": _clip,
        "ViT": _image(
            "ViTForImageClassification", "ViTConfig", 16, image_size=16, patch_size=4,
            hidden_dropout_prob=0.1, **SIZES,
        ),
        "Swin": _image(
            "SwinForImageClassification", "SwinConfig", 16, image_size=16, patch_size=2,
            embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4,
        ),
        "ConvNeXt": _image(
            "ConvNextForImageClassification", "ConvNextConfig", 32, hidden_sizes=[8, 16],
            depths=[1, 1], num_stages=2,
        ),
        "ResNet": _image(
            "ResNetForImageClassification", "ResNetConfig", 32, embedding_size=8,
            hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        ),
        "wav2vec2 (time mask on)": lambda dropout: _wav2vec2(dropout, mask=True),
        "wav2vec2 (time mask off)": lambda dropout: _wav2vec2(dropout, mask=False),
    }
)  # fmt: skip
"""Name -> builder; its argument says whether dropouts stay on."""
