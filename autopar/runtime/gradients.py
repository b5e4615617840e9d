"""Sum gradients over micro-batches in place, into memory that nobody else holds.

A program may yield a gradient that is a view of another value, an expanded scalar, or one of its
own inputs. Adding into such memory would change a saved activation, a message under way or another
gradient. So the first gradient of a step is taken over only if its storage is its own; else it is
copied.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor; 0 for an empty one."""
    return tensor.untyped_storage().data_ptr()


def is_own_memory(tensor: torch.Tensor, held: Iterable[int]) -> bool:
    """Whether a tensor fills its storage densely and nobody in ``held`` uses that storage."""
    dense = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return dense and tensor.is_contiguous() and storage_of(tensor) not in set(held)


class Accumulator:
    """Sums by parameter name."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._sums[name]

    def names(self) -> tuple[str, ...]:
        """Parameters that have a sum, in order of their first gradient."""
        return tuple(self._sums)

    def pop(self, name: str) -> torch.Tensor:
        """Take a sum out; it is the caller's from then on."""
        return self._sums.pop(name)

    def add(self, values: Iterable[tuple[str, torch.Tensor]], held: Iterable[int]) -> None:
        """Add gradients.

        Args:
            values: (Parameter, gradient); a name may come twice.
            held: Storages that others hold: what the program was given, what else it yielded.
        """
        busy = set(held)
        pairs = list(values)
        counts: dict[int, int] = {}
        for _, tensor in pairs:
            counts[storage_of(tensor)] = counts.get(storage_of(tensor), 0) + 1
        shared = {storage for storage, count in counts.items() if count > 1}
        for name, tensor in pairs:
            if name in self._sums:
                self._sums[name].add_(tensor)
            elif is_own_memory(tensor, busy | shared):
                self._sums[name] = tensor
            else:
                self._sums[name] = tensor.clone(memory_format=torch.contiguous_format)
