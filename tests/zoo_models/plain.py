"""Models in plain torch, as people write them; every forward returns its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional

from tests.zoo_models.language import BATCH, HIDDEN, SEQ, VOCAB, Built
from tests.zoo_models.operators import ScaledTanh, register_rules, swiglu

HEADS = 4


class Translator(nn.Module):
    """``nn.Transformer`` with embeddings, a causal mask and a padding mask."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCAB, HIDDEN)
        self.target = nn.Embedding(VOCAB, HIDDEN)
        self.core = nn.Transformer(
            HIDDEN, HEADS, 2, 2, dim_feedforward=64, dropout=dropout, batch_first=True
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, source, target, labels):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.core(
            self.source(source), self.target(target), tgt_mask=mask,
            src_key_padding_mask=source == 0, tgt_is_causal=True,
        )  # fmt: skip
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class UNet(nn.Module):
    """Down and up with long skips; batch norm in eval form is left to ResNet: here none."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(32, 8, 2, 2)])
        self.leave = nn.Conv2d(16, 4, 1)

    def forward(self, image, mask):
        skips = [functional.relu(self.enter(image))]
        for layer in self.down:
            skips.append(functional.relu(layer(skips[-1])))
        x = skips.pop()
        for layer in self.up:
            x = torch.cat([functional.relu(layer(x)), skips.pop()], 1)
        return functional.cross_entropy(self.leave(x), mask)


class Recommender(nn.Module):
    """Embedding tables, dense features and the dot products of all pairs, as DLRM has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(n, 16) for n in (40, 24, 96)])
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, sparse, clicked):
        x = self.bottom(dense)
        rows = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([x, *rows], 1)
        products = stacked @ stacked.transpose(1, 2)
        first, second = torch.triu_indices(4, 4, 1)
        features = torch.cat([x, products[:, first, second]], 1)
        return functional.binary_cross_entropy_with_logits(self.top(features).squeeze(1), clicked)


class Diffusion(nn.Module):
    """One residual block of a diffusion UNet: group norm, time embedding, attention, resampling."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(4, 16) for _ in range(3))
        self.conv1, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.qkv, self.out = nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)
        self.down = nn.Conv2d(16, 16, 3, 2, 1)
        self.leave = nn.Conv2d(16, 3, 3, padding=1)
        self.drop = nn.Dropout(dropout)

    def forward(self, image, time, noise):
        x = self.enter(image)
        steps = torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        angles = time[:, None].to(image.dtype) * steps
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        h = self.conv1(functional.silu(self.norm1(x))) + embedded[:, :, None, None]
        x = x + self.conv2(self.drop(functional.silu(self.norm2(h))))
        small = self.down(x)
        b, c, height, width = small.shape
        q, k, v = self.qkv(self.norm3(small)).view(b, 3, 2, c // 2, -1).unbind(1)
        mixed = functional.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT
        small = small + self.out(mixed.reshape(b, c, height, width))
        x = x + functional.interpolate(small, scale_factor=2.0, mode="nearest")
        return functional.mse_loss(self.leave(x), noise)


class Experts(nn.Module):
    """A mixture of experts with top-k routing: every expert runs, a mask of weights picks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.router = nn.Linear(HIDDEN, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, HIDDEN, 64) / 8)
        self.down = nn.Parameter(torch.randn(4, 64, HIDDEN) / 8)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights)
        hidden = functional.silu(torch.einsum("bsh,ehf->bsef", x, self.up))
        y = torch.einsum("bsef,efh,bse->bsh", hidden, self.down, gates)
        return functional.cross_entropy(self.head(x + y).flatten(0, 1), labels.flatten())


class Attention(nn.Module):
    """``nn.MultiheadAttention``, batch second or first."""

    def __init__(self, dropout: float, *, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            HIDDEN, HEADS, dropout=dropout, batch_first=batch_first
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 8)
        self.dim = 1 if batch_first else 0

    def forward(self, x, labels):
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return functional.cross_entropy(self.head(self.norm(x + mixed).mean(self.dim)), labels)


class WeightNorm(nn.Module):
    """Weights that are a direction and a length, of a convolution and of residual layers."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.conv = norm(nn.Conv1d(4, 16, 3, padding=1))
        self.layers = nn.ModuleList(norm(nn.Linear(16, 16)) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x, y):
        hidden = functional.relu(self.conv(x)).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + functional.relu(layer(hidden))
        return functional.mse_loss(self.head(hidden), y)


class CustomGradient(nn.Module):
    """A ``torch.autograd.Function`` between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.scale = nn.Parameter(torch.rand(32) + 0.5)

    def forward(self, x, y):
        return functional.mse_loss(self.second(ScaledTanh.apply(self.first(x), self.scale)), y)


class CustomOperator(nn.Module):
    """An operator of ``torch.library`` with a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 4, bias=False)

    def forward(self, x, y):
        return functional.mse_loss(self.down(swiglu(self.gate(x), self.up(x))), y)


def _transformer(dropout: bool) -> Built:
    source, target = (torch.randint(1, VOCAB, (BATCH, SEQ)) for _ in range(2))
    source[::3, -4:] = 0
    labels = torch.randint(0, VOCAB, (BATCH, SEQ))
    batch = {"source": source, "target": target, "labels": labels}
    return Translator(0.1 if dropout else 0.0), batch


def _unet(dropout: bool) -> Built:
    mask = torch.randint(0, 4, (BATCH, 16, 16))
    return UNet(), {"image": torch.randn(BATCH, 3, 16, 16), "mask": mask}


def _dlrm(dropout: bool) -> Built:
    sparse = torch.randint(0, 24, (BATCH, 3))
    clicked = torch.randint(0, 2, (BATCH,)).float()
    return Recommender(), {"dense": torch.randn(BATCH, 13), "sparse": sparse, "clicked": clicked}


def _diffusion(dropout: bool) -> Built:
    image, noise = torch.randn(2, BATCH, 3, 8, 8)
    batch = {"image": image, "time": torch.randint(0, 1000, (BATCH,)), "noise": noise}
    return Diffusion(0.1 if dropout else 0.0), batch


def _experts(dropout: bool) -> Built:
    ids, labels = torch.randint(0, VOCAB, (2, BATCH, SEQ))
    return Experts(), {"ids": ids, "labels": labels}


def _attention(dropout: bool, *, batch_first: bool) -> Built:
    shape = (BATCH, SEQ, HIDDEN) if batch_first else (SEQ, BATCH, HIDDEN)
    labels = torch.randint(0, 8, (BATCH,))
    model = Attention(0.1 if dropout else 0.0, batch_first=batch_first)
    return model, {"x": torch.randn(shape), "labels": labels}


def _weight_norm(dropout: bool) -> Built:
    return WeightNorm(), {"x": torch.randn(BATCH, 4, 10), "y": torch.randn(BATCH, 10, 4)}


def _vectors(kind: type[nn.Module]) -> Callable[[bool], Built]:
    def make(dropout: bool) -> Built:
        register_rules()
        return kind(), {"x": torch.randn(BATCH, 16), "y": torch.randn(BATCH, 4)}

    return make


PLAIN: Mapping[str, Callable[[bool], Built]] = MappingProxyType(
    {
        "nn.Transformer": _transformer,
        "U-Net": _unet,
        "DLRM": _dlrm,
        "diffusion UNet block": _diffusion,
        "MoE, plain torch": _experts,
        "nn.MultiheadAttention (S, B, E)": lambda d: _attention(d, batch_first=False),
        "nn.MultiheadAttention (B, S, E)": lambda d: _attention(d, batch_first=True),
        "weight norm": _weight_norm,
        "autograd.Function": _vectors(CustomGradient),
        "custom operator with a rule": _vectors(CustomOperator),
    }
)
"""Name -> builder; its argument says whether dropouts stay on."""
