"""The zoo: tiny, unmodified models of all kinds, each with a batch.

``python -m tests.zoo_models`` captures, plans and runs every one of them and prints a table;
see :mod:`tests.zoo_models.rows` for what a row proves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from tests.zoo_models.language import LANGUAGE, Built
from tests.zoo_models.perception import PERCEPTION
from tests.zoo_models.plain import PLAIN

ZOO: Mapping[str, Callable[[bool], Built]] = MappingProxyType({**LANGUAGE, **PERCEPTION, **PLAIN})
"""Name -> builder; its argument says whether dropouts stay on."""


def build(name: str, *, dropout: bool = True, seed: int = 0) -> Built:
    """A model of the zoo in training mode with seeded weights, and keyword arguments.

    Args:
        name: A key of :data:`ZOO`.
        dropout: Whether the dropouts that the model has by default stay on.
        seed: Seed of weights and batch.
    """
    torch.manual_seed(seed)
    model, batch = ZOO[name](dropout)
    return model.train(), batch
