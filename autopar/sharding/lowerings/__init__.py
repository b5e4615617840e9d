"""Local forms of operators under special splits, by the name that a strategy carries."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.lowerings import batch, moe, positions, softmax, vocabulary
from autopar.sharding.lowerings.context import LowerContext, Lowering

LOWERINGS: Mapping[str, Lowering] = {
    "attention": positions.attention,
    "batch_norm": batch.batch_norm,
    "batch_norm_backward": batch.batch_norm_backward,
    "dropout": positions.dropout,
    "group_norm": batch.group_norm,
    "group_norm_backward": batch.group_norm_backward,
    "grouped_convolution": batch.grouped_convolution,
    "grouped_product": moe.grouped_product,
    "log_softmax": softmax.log_softmax,
    "log_softmax_backward": softmax.log_softmax_backward,
    "moe_combine": moe.moe_combine,
    "moe_dispatch": moe.moe_dispatch,
    "moe_route": moe.moe_route,
    "nll_loss_backward": vocabulary.nll_loss_backward,
    "nll_loss_sum": vocabulary.nll_loss_sum,
    "random": positions.random,
    "softmax": softmax.softmax,
    "softmax_backward": softmax.softmax_backward,
    "vocabulary_embedding": vocabulary.vocabulary_embedding,
    "vocabulary_embedding_backward": vocabulary.vocabulary_embedding_backward,
}
"""Every lowering works when several axes carry it, also together with plain splits on others."""

LOCAL_LOWERINGS = frozenset(
    {
        "attention",
        "dropout",
        "group_norm",
        "group_norm_backward",
        "grouped_convolution",
        "random",
    }
)
"""Those that move nothing between ranks: legal over micro-batches too."""

__all__ = ["LOCAL_LOWERINGS", "LOWERINGS", "LowerContext", "Lowering"]
