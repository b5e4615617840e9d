"""Tiny models of six architectures, with batches, shared by the tests.

``build(name)`` gives the model in training mode with seeded weights and its keyword arguments.
Every model has hidden size 32 and 4 heads; language models have sequences of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import transformers

Batch = dict[str, torch.Tensor]
HIDDEN = 32
HEADS = 4
CLASSES = 8


def _ids(batch: int, seq: int, vocab: int) -> Batch:
    ids = torch.randint(0, vocab, (batch, seq))
    labels = ids.clone()
    labels[:: max(2, batch // 2), : seq // 4] = -100  # uneven counts of valid labels per sample
    return {"input_ids": ids, "labels": labels}


def _pixels(batch: int, size: int) -> Batch:
    return {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(0, CLASSES, (batch,)),
    }


def _gpt2(layers: int, vocab: int, dropout: float) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=vocab, n_positions=64, n_embd=HIDDEN, n_layer=layers, n_head=HEADS,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama(layers: int, vocab: int, dropout: float, kv_heads: int = 2) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, max_position_embeddings=64,
        attention_dropout=dropout, pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert(layers: int, vocab: int, dropout: float) -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=vocab, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        intermediate_size=64, max_position_embeddings=64, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, pad_token_id=None,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _t5(layers: int, vocab: int, dropout: float) -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=vocab, d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=64, num_layers=layers,
        num_heads=HEADS, decoder_start_token_id=0, dropout_rate=dropout,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _vit(layers: int, vocab: int, dropout: float) -> torch.nn.Module:
    del vocab  # an image model
    config = transformers.ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        intermediate_size=64, image_size=16, patch_size=4, num_labels=CLASSES,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _resnet(layers: int, vocab: int, dropout: float) -> torch.nn.Module:
    del vocab, dropout  # neither exists in a ResNet
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8 * 2**i for i in range(layers)], depths=[1] * layers,
        layer_type="basic", num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config)


_MODELS: Mapping[str, Callable[..., torch.nn.Module]] = MappingProxyType(
    {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5, "vit": _vit, "resnet": _resnet}
)


def tiny_models() -> tuple[str, ...]:
    """Names that :func:`build` knows."""
    return tuple(_MODELS)


def build(
    name: str,
    *,
    layers: int = 2,
    batch: int = 8,
    seq: int = 16,
    vocab: int = 96,
    dropout: float = 0.0,
    seed: int = 0,
    device: str = "cpu",
    **options: int,
) -> tuple[torch.nn.Module, Batch]:
    """A seeded tiny model in training mode and the keyword arguments of one call.

    Args:
        name: One of :func:`tiny_models`.
        layers: Blocks (ResNet: stages of one block).
        batch: Samples of the batch.
        seq: Tokens per sample (language models).
        vocab: Vocabulary (language models).
        dropout: Probability of every dropout in the model.
        seed: Seed of weights and batch.
        device: ``"meta"`` makes the weights, not the batch, without memory.
        options: Further options of the architecture (``llama``: ``kv_heads``).
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = _MODELS[name](layers, vocab, dropout, **options)
    torch.manual_seed(seed + 1)
    if name in ("vit", "resnet"):
        inputs = _pixels(batch, 16 if name == "vit" else 32)
    else:
        inputs = _ids(batch, seq, vocab)
    return model.train(), inputs
