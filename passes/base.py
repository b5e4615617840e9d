"""What every pass takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch.fx import GraphModule

from autopar.ir.graph import Graph

NAME_KEY = "autopar_name"
"""Key in ``fx.Node.meta`` of the name that the value has in the source :class:`Graph`."""

VALUE_KEY = "val"
"""Key in ``fx.Node.meta`` of the fake tensor (or tuple, or integer) that the node yields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What a pass may know beside the module it rewrites.

    Attributes:
        program: Name of the program in messages, such as ``"stage 1 forward"``.
        source: The program as it was decided; the verifier compares with it.
        axis_sizes: Ranks along each mesh axis by name.
        device: Where factories make their tensors.
    """

    program: str
    source: Graph
    axis_sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class PassResult:
    """The module after a pass, and whether the pass changed anything."""

    graph_module: GraphModule
    modified: bool


Pass: TypeAlias = Callable[[GraphModule, PassContext], PassResult]
