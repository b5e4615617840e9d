"""Captures the parts of a model on meta tensors, each shape once."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import torch

from autopar.capture.tracing import capture
from autopar.ir.graph import Graph
from autopar.validation.convolutions import ConvShape, WideResNet, meta_inputs
from autopar.validation.models import BlockProbe, BlockShape, EmbeddingProbe, HeadProbe


class Part(StrEnum):
    """Parts that a model is made of."""

    BLOCK = "block"
    EMBEDDING = "embedding"
    HEAD = "head"
    NETWORK = "network"  # a convolutional network, whole


@lru_cache(maxsize=16)
def captured_graph(part: Part, shape: BlockShape | ConvShape) -> Graph:
    """Joint program of a part in bfloat16, which stands for both halves: they are equally large.

    Networks are captured in float32.

    Args:
        part: Which.
        shape: Its sizes; nothing of that size is ever allocated.
    """
    with torch.device("meta"):
        if isinstance(shape, ConvShape):
            return capture(WideResNet(shape), meta_inputs(shape)).graph
        rows = (shape.seq, shape.batch)
        tokens = torch.empty(rows, dtype=torch.int64)
        if part is Part.EMBEDDING:
            places = torch.empty((shape.seq, 1), dtype=torch.int64)
            return capture(EmbeddingProbe(shape).bfloat16(), (tokens, places)).graph
        if part is Part.HEAD:
            return capture(HeadProbe(shape).bfloat16(), (tokens,)).graph
        mask = None
        if shape.explicit_attention:
            mask = torch.empty((shape.seq, shape.seq), dtype=torch.bool)
        tables: tuple[torch.Tensor, ...] = ()
        if shape.arch == "llama":
            table = torch.empty((shape.seq, 1, 1, shape.head_dim), dtype=torch.bfloat16)
            tables = (table, table)
        return capture(BlockProbe(shape).bfloat16(), (tables, mask)).graph
