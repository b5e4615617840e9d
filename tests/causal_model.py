"""A tiny causal language model that is called by keywords and returns a class of its own."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

VOCAB, SEQ = 24, 6


class CausalOutput(OrderedDict):
    """Entries are attributes too, as in ``transformers.utils.ModelOutput``."""

    def __getattr__(self, name: str) -> object:
        return self.get(name)


class ToyCausalLM(nn.Module):
    """A language model that is called by keywords only and returns a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids=None, *, attention_mask=None, labels=None, use_cache=False):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalOutput(loss=loss, logits=logits, past=() if use_cache else None)


def toy() -> tuple[ToyCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (4, SEQ))
    return ToyCausalLM(), {"input_ids": ids, "labels": ids}
