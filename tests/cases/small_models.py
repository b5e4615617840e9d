"""Small models in plain torch that the cases share."""

from __future__ import annotations

import torch
from torch import nn

F = nn.functional


class Block(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        b, s, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(o.transpose(1, 2).reshape(b, s, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """A causal language model whose loss is a mean over the labels that count."""

    def __init__(self, vocab: int = 40, width: int = 16, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def tokens(batch: int, length: int = 16, vocab: int = 40) -> dict[str, torch.Tensor]:
    """Ids and labels; samples have unequal numbers of labels that count."""
    ids = torch.randint(0, vocab, (batch, length))
    labels = ids.clone()
    for row in range(batch):
        labels[row, : (5 * row) % length] = -100
    return {"ids": ids, "labels": labels}


class GroupedAttention(nn.Module):
    """Causal attention whose query heads share key heads, and a squared loss."""

    def __init__(self, heads: int = 8, kv_heads: int = 2, head: int = 4) -> None:
        super().__init__()
        width = heads * head
        self.heads, self.kv_heads, self.head = heads, kv_heads, head
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        q, k, v = (
            layer(x).view(b, s, heads, self.head).transpose(1, 2)
            for layer, heads in (
                (self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads),
            )
        )  # fmt: skip
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.mse_loss(x + self.out(o.transpose(1, 2).reshape(b, s, width)), target)
