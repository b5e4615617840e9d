"""Wide residual networks of bottleneck blocks, whole: they are small enough to be captured at once.

A block narrows to ``filters``, widens in its 3 x 3 convolution and leaves with four times as many.
Source: Zagoruyko and Komodakis, "Wide residual networks", 2016; sizes as in Zheng et al., Alpa,
OSDI 2022 (1,024 classes; the parameter counts that they print follow).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
CLASSES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """Sizes of a network and its local batch."""

    layers: int
    base_channels: int
    width_factor: int
    image: int
    batch: int

    @property
    def num_blocks(self) -> int:
        """Residual blocks."""
        return sum(BLOCKS[self.layers])


class ConvNorm(nn.Module):
    """Convolution, batch statistics, ReLU."""

    def __init__(self, inner: int, outer: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outer, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        """Before the ReLU, which the block decides."""
        out: Tensor = self.norm(self.conv(x))
        return out


class Bottleneck(nn.Module):
    """One residual block."""

    def __init__(self, inner: int, filters: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * filters
        self.reduce = ConvNorm(inner, filters, 1)
        self.middle = ConvNorm(filters, filters * width, 3, stride)
        self.expand = ConvNorm(filters * width, outer, 1)
        self.shortcut = ConvNorm(inner, outer, 1, stride) if stride > 1 or inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to the same."""
        y = functional.relu(self.reduce(x))
        y = self.expand(functional.relu(self.middle(y)))
        return functional.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class WideResNet(nn.Module):
    """The network with its loss."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        self.stem = ConvNorm(3, shape.base_channels, 7, 2)
        blocks: list[nn.Module] = []
        inner = shape.base_channels
        for level, count in enumerate(BLOCKS[shape.layers]):
            filters = shape.base_channels * 2**level
            for index in range(count):
                stride = 2 if index == 0 and level else 1
                blocks.append(Bottleneck(inner, filters, shape.width_factor, stride))
                inner = 4 * filters
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inner, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Loss of ``images`` ``(n, 3, h, w)``."""
        x = functional.max_pool2d(functional.relu(self.stem(images)), 3, 2, 1)
        out: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return functional.cross_entropy(out, labels)


def meta_inputs(shape: ConvShape) -> tuple[Tensor, Tensor]:
    """Images and labels on the device of the caller's context."""
    images = torch.empty((shape.batch, 3, shape.image, shape.image))
    return images, torch.empty((shape.batch,), dtype=torch.int64)
