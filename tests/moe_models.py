"""Tiny mixtures of experts, with a batch each: of transformers, and in the forms people write.

The plain ones are one layer: ``TopKExperts`` routes, its subclasses differ in how they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import transformers
from torch.nn import functional

Batch = dict[str, torch.Tensor]
BATCH, SEQ, VOCAB, HIDDEN = 8, 6, 51, 16
EXPERTS, TOP_K, INNER = 4, 2, 24

_SHARED = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
_TRANSFORMERS: Mapping[str, tuple[str, str, dict[str, object]]] = MappingProxyType(
    {
        "mixtral": (
            "MixtralForCausalLM", "MixtralConfig",
            {"intermediate_size": INNER, "num_key_value_heads": 1, "num_local_experts": EXPERTS},
        ),
        "qwen3-moe": (
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
            {"head_dim": 8, "num_key_value_heads": 1, "num_experts": EXPERTS,
             "num_experts_per_tok": TOP_K, "moe_intermediate_size": INNER, "norm_topk_prob": True},
        ),
        "deepseek-v3": (
            "DeepseekV3ForCausalLM", "DeepseekV3Config",
            {"intermediate_size": INNER, "num_key_value_heads": 2, "moe_intermediate_size": INNER,
             "n_shared_experts": 1, "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1,
             "num_experts_per_tok": TOP_K, "first_k_dense_replace": 1, "kv_lora_rank": 8,
             "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8},
        ),
        "gpt-oss": (
            "GptOssForCausalLM", "GptOssConfig",
            {"intermediate_size": INNER, "head_dim": 8, "num_key_value_heads": 1,
             "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "pad_token_id": 0},
        ),
    }
)  # fmt: skip


class TopKExperts(torch.nn.Module):
    """A layer of experts with a residual; the loss is against ``y``."""

    def __init__(self, experts: int = EXPERTS, k: int = TOP_K) -> None:
        super().__init__()
        self.experts, self.k = experts, k
        self.inner = torch.nn.Linear(HIDDEN, HIDDEN)
        self.gate = torch.nn.Linear(HIDDEN, experts, bias=False)
        self.up = torch.nn.Parameter(0.2 * torch.randn(experts, HIDDEN, INNER))
        self.down = torch.nn.Parameter(0.2 * torch.randn(experts, INNER, HIDDEN))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        tokens = h.reshape(-1, HIDDEN)
        weights, ids = self.gate(tokens).softmax(-1).topk(self.k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = h + self.mix(tokens, weights, ids).view_as(h)
        return functional.mse_loss(out, y)

    def mix(self, t: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Tokens (t, h), weights (t, k), experts (t, k) -> (t, h)."""
        raise NotImplementedError


class Dense(TopKExperts):
    """Every expert computes every token; one-hot rows pick."""

    def mix(self, t: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        share = (functional.one_hot(ids, self.experts).to(w.dtype) * w[..., None]).sum(1)
        h = torch.einsum("td,edh->teh", t, self.up).relu()
        return torch.einsum("teh,ehd,te->td", h, self.down, share)


class Loop(TopKExperts):
    """Expert after expert, each over all tokens with a mask."""

    def mix(self, t: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(t)
        for expert in range(self.experts):
            share = torch.where(ids == expert, w, 0.0).sum(-1, keepdim=True)
            out = out + share * ((t @ self.up[expert]).relu() @ self.down[expert])
        return out


class Gather(TopKExperts):
    """Each token gathers the matrices of its experts."""

    def mix(self, t: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        h = torch.einsum("td,tkdh->tkh", t, self.up[ids]).relu()
        return (torch.einsum("tkh,tkhd->tkd", h, self.down[ids]) * w[..., None]).sum(1)


class SortedByArgsort(TopKExperts):
    """``histc`` of unsorted ids, ``gather`` and ``scatter_add`` with expanded indices."""

    def mix(self, t: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        counts = torch.histc(ids.view(-1).float(), bins=self.experts, min=0, max=self.experts - 1)
        order = torch.argsort(ids.view(-1), stable=True)
        at = (order // self.k).reshape(-1, 1).expand(-1, HIDDEN)
        ends = counts.cumsum(0, dtype=torch.int32)
        h = functional.grouped_mm(torch.gather(t, 0, at), self.up, offs=ends).relu()
        out = functional.grouped_mm(h, self.down, offs=ends) * w.view(-1)[order][:, None]
        return torch.zeros_like(t).scatter_add(0, at, out)


class SortedByIndexAdd(TopKExperts):
    """Counts as a sum of one-hot rows, ``index_select``, ``index_add`` to what is there."""

    def mix(self, t: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        order = flat.argsort()
        ends = functional.one_hot(flat, self.experts).sum(0).cumsum(0).to(torch.int32)
        x = t.index_select(0, order // self.k)
        h = functional.grouped_mm(x, self.up, offs=ends).relu()
        out = functional.grouped_mm(h, self.down, offs=ends) * w.reshape(-1)[order].unsqueeze(-1)
        return (0.5 * t).index_add(0, order // self.k, out)


class SortedAndBack(TopKExperts):
    """Tokens repeated per slot, counts by additions of ones, the inverse by a second sort."""

    def mix(self, t: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        order = flat.argsort()
        counts = torch.zeros(self.experts, dtype=torch.long)
        ends = counts.scatter_add(0, flat, torch.ones_like(flat)).cumsum(0).to(torch.int32)
        x = t.repeat_interleave(self.k, 0)[order]
        h = functional.grouped_mm(x, self.up, offs=ends).relu()
        out = functional.grouped_mm(h, self.down, offs=ends)[order.argsort()]
        return (out.view(-1, self.k, HIDDEN) * w[..., None]).sum(1)


PLAIN: Mapping[str, type[TopKExperts]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (Dense, Loop, Gather, SortedByArgsort, SortedByIndexAdd, SortedAndBack)
    }
)
SORTED = tuple(name for name in PLAIN if name.startswith("Sorted"))
TRANSFORMERS = tuple(_TRANSFORMERS)


def build_plain(
    name: str, *, experts: int = EXPERTS, k: int = TOP_K, batch: int = BATCH
) -> tuple[TopKExperts, Batch]:
    """A seeded plain model and its keyword arguments."""
    torch.manual_seed(0)
    model = PLAIN[name](experts, k)
    shape = (batch, SEQ, HIDDEN)
    return model, {"x": torch.randn(shape), "y": torch.randn(shape)}


def build_transformer(name: str, **options: object) -> tuple[torch.nn.Module, Batch]:
    """A seeded, tiny model of transformers in training mode, and its keyword arguments."""
    kind, config, special = _TRANSFORMERS[name]
    make: Callable[..., object] = getattr(transformers, config)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(make(**{**_SHARED, **special, **options})).train()
    ids = torch.randint(1, VOCAB, (BATCH, SEQ))
    labels = ids.clone()
    labels[::3, :2] = -100
    return model, {"input_ids": ids, "labels": labels}


def build(name: str) -> tuple[torch.nn.Module, Batch]:
    """A model of either kind."""
    return build_plain(name) if name in PLAIN else build_transformer(name)


def route_all_to(model: TopKExperts, expert: int) -> TopKExperts:
    """Make one expert win every token by far (others are chosen beside it if k > 1)."""
    with torch.no_grad():
        model.inner.bias.fill_(1.0)
        model.inner.weight.mul_(0.01)
        model.gate.weight.zero_()
        model.gate.weight[expert].fill_(1.0)
    return model
