"""Models whose steps are predicted and measured on this machine, and the plans that are forced."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

Batch = dict[str, torch.Tensor]
VOCAB = 512


class Attention(nn.Module):
    """Causal attention with its norm and its residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        split = [
            f(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        ]
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """The two layers of a transformer's MLP with their norm and their residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """A GPT of a few layers."""

    def __init__(self, width: int, layers: int, heads: int, inner: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.places = nn.Parameter(torch.randn(seq, width) * 0.02)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(nn.Sequential(Attention(width, heads), Feed(width, inner)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Perceptron(nn.Module):
    """Wide layers and nothing else: all arithmetic."""

    def __init__(self, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return functional.mse_loss(x, y)


class Convolutions(nn.Module):
    """A small residual network on images."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


def decoder() -> tuple[nn.Module, Batch]:
    """A GPT of width 256, with a batch of 8 x 64 tokens."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (8, 64))
    return Decoder(256, 4, 4, 1024, 64), {"ids": ids, "labels": ids.roll(-1, 1)}


def deep_decoder() -> tuple[nn.Module, Batch]:
    """A narrow GPT: many small operators."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (8, 32))
    return Decoder(64, 8, 4, 256, 32), {"ids": ids, "labels": ids.roll(-1, 1)}


def perceptron() -> tuple[nn.Module, Batch]:
    """Four blocks of 384 x 1536."""
    torch.manual_seed(0)
    x = torch.randn(256, 384)
    return Perceptron(384, 1536, 4), {"x": x, "y": torch.randn(256, 384)}


def convolutions() -> tuple[nn.Module, Batch]:
    """Six convolutions of 32 channels on images of 24 x 24."""
    torch.manual_seed(0)
    x = torch.randn(16, 3, 24, 24)
    return Convolutions(32, 6), {"x": x, "y": torch.randint(0, 10, (16,))}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "decoder": decoder,
    "deep decoder": deep_decoder,
    "perceptron": perceptron,
    "convolutions": convolutions,
}

# Arguments of a forced plan by ranks.
PLANS: Mapping[int, tuple[Mapping[str, object], ...]] = {
    1: ({}, {"num_microbatches": 4}, {"recompute": "full"}),
    2: (
        {"dp": 2}, {"tp": 2}, {"pp": 2, "num_microbatches": 4}, {"dp": 2, "zero": 3},
    ),
    4: (
        {"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "num_microbatches": 4}, {"tp": 4},
    ),
}  # fmt: skip


def words(degrees: Mapping[str, object]) -> str:
    """Such as ``dp=2 zero=3``."""
    return " ".join(f"{k}={v}" for k, v in degrees.items()) or "one device"
