"""Plain torch modules of the published models, and probes that make one part of them trainable.

Activations are ``(sequence, batch, hidden)``, as in Megatron: a split of the sequence then is a
split of the rows of every matmul. Module names mark what some kernels fuse (``norm``, ``core``,
``activation``, ``residual``, ``rotary``); see :mod:`autopar.validation.chains`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Sizes and kind of one transformer layer.

    Attributes:
        arch: ``"gpt"``, ``"llama"`` or ``"mpt"``.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        ffn: Inner width of the MLP.
        vocab: Rows of the embedding, padded.
        seq: Tokens of a sequence.
        batch: Sequences of a micro-batch.
        explicit_attention: Scores are made, masked and normalised by operators of their own;
            False for one attention operator.
        wide_softmax: Explicit scores are normalised in float32, as plain torch code does.
        dropout: Probability of dropping attention weights and residual updates.
        tied: Whether the head is the embedding.
    """

    arch: str
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int
    explicit_attention: bool = False
    wide_softmax: bool = False
    dropout: float = 0.0
    tied: bool = True

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """``x / rms(x) * weight`` over the last dim."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


def _norm(shape: BlockShape) -> nn.Module:
    if shape.arch == "llama":
        return RMSNorm(shape.hidden)
    return nn.LayerNorm(shape.hidden, bias=shape.arch == "gpt")


class Rotary(nn.Module):
    """Rotates pairs of the two halves of each head; tables are given in float32."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``(s, b, heads, head_dim)`` to the same."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * cos + turned * sin


class Core(nn.Module):
    """Causal attention over ``(b, heads, s, d)``; over ``(heads, b, s, d)`` if explicit."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        self.scale = 1.0 / math.sqrt(shape.head_dim)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention output; ``mask`` is added to (or, boolean, hides) the scores if given."""
        if not self.shape.explicit_attention:
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        if q.shape[0] != k.shape[0]:
            k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
            v = v.repeat_interleave(q.shape[0] // v.shape[0], dim=0)
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask, -10000.0)
        if self.shape.wide_softmax:
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        else:
            weights = torch.softmax(scores, dim=-1)
        return torch.matmul(self.drop(weights), v)


class Attention(nn.Module):
    """Self-attention; one projection for query, key and value where heads are equally many."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        bias = shape.arch == "gpt"
        self.packed = shape.arch != "llama"
        width = shape.kv_heads * shape.head_dim
        if self.packed:
            self.query_key_value = nn.Linear(shape.hidden, 3 * shape.hidden, bias=bias)
        else:
            self.query = nn.Linear(shape.hidden, shape.hidden, bias=bias)
            self.key = nn.Linear(shape.hidden, width, bias=bias)
            self.value = nn.Linear(shape.hidden, width, bias=bias)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=bias)
        self.rotary = Rotary()
        self.core = Core(shape)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        s, b, _ = x.shape
        rows = x.flatten(0, 1)
        if self.packed:
            # rows of one head stand together, so that heads can be split
            made = self.query_key_value(rows).view(s, b, self.shape.heads, -1)
            return tuple(made.chunk(3, dim=-1))
        return tuple(
            layer(rows).view(s, b, -1, self.shape.head_dim)
            for layer in (self.query, self.key, self.value)
        )

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        """``(s, b, h)`` to the same."""
        s, b, _ = x.shape
        q, k, v = self._project(x)
        if tables:
            q, k = self.rotary(q, *tables), self.rotary(k, *tables)
        # heads stand outside of the batch where both are merged, so that they can be split
        order = (2, 1, 0, 3) if self.shape.explicit_attention else (1, 2, 0, 3)
        q, k, v = (t.permute(order) for t in (q, k, v))
        made = self.core(q, k, v, mask)
        back = (2, 1, 0, 3) if self.shape.explicit_attention else (2, 0, 1, 3)
        out: Tensor = self.out(made.permute(back).reshape(s * b, -1))
        return out.view(s, b, -1)


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)
        self.activation = Gate()

    def forward(self, x: Tensor) -> Tensor:
        """``(s, b, h)`` to the same."""
        rows = x.flatten(0, 1)
        out: Tensor = self.down(self.activation(self.gate(rows), self.up(rows)))
        return out.view(x.shape)


class Gate(nn.Module):
    """``silu(a) * b``."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Element by element."""
        return functional.silu(a) * b


class MLP(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        bias = shape.arch == "gpt"
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.activation = nn.GELU(approximate="tanh" if bias else "none")
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """``(s, b, h)`` to the same."""
        out: Tensor = self.down(self.activation(self.up(x.flatten(0, 1))))
        return out.view(x.shape)


class Residual(nn.Module):
    """``x + dropout(update)``."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """Element by element."""
        dropped: Tensor = self.drop(update)
        return x + dropped


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = _norm(shape), _norm(shape)
        self.attention = Attention(shape)
        self.mlp = GatedMLP(shape) if shape.arch == "llama" else MLP(shape)
        self.residual_1, self.residual_2 = Residual(shape.dropout), Residual(shape.dropout)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        """``(s, b, h)`` to the same."""
        x = self.residual_1(x, self.attention(self.norm_1(x), tables, mask))
        out: Tensor = self.residual_2(x, self.mlp(self.norm_2(x)))
        return out


class BlockProbe(nn.Module):
    """A block whose input is trainable, so that its gradient is part of the captured program."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(shape.seq, shape.batch, shape.hidden))
        self.block = Block(shape)

    def forward(self, tables: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        """Sum of the block's outputs."""
        out: Tensor = self.block(self.x, tables, mask)
        return out.sum()


class EmbeddingProbe(nn.Module):
    """Token embedding, learned positions where the architecture has them, dropout."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden) if shape.arch == "gpt" else None
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Sum of the embeddings of ``tokens`` ``(s, b)`` at ``places`` ``(s, 1)``."""
        made = self.embedding(tokens)
        if self.positions is not None:
            made = made + self.positions(places)
        dropped: Tensor = self.drop(made)
        return dropped.sum()


class Loss(nn.Module):
    """Cross-entropy in float32."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean over rows."""
        return functional.cross_entropy(logits.float(), labels)


class HeadProbe(nn.Module):
    """Last norm, projection on the vocabulary, cross-entropy in float32."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(shape.seq, shape.batch, shape.hidden))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.loss = Loss()

    def forward(self, labels: Tensor) -> Tensor:
        """Loss for ``labels`` ``(s, b)``."""
        out: Tensor = self.loss(self.head(self.norm(self.x).flatten(0, 1)), labels.flatten())
        return out
