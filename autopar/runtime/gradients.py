"""Sum gradients over micro-batches in place, into memory that nobody else holds.

A program may yield a gradient that is a view of another value, an expanded scalar, or one of its
own inputs. Adding into such memory would change a saved activation, a message under way or another
gradient. So the first gradient of a step is taken over only if its storage is its own, or if it and
the other gradients fill a storage side by side (a bucket that was taken apart); else it is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor; 0 for an empty one."""
    return tensor.untyped_storage().data_ptr()


def own_storages(tensors: Sequence[torch.Tensor], held: Iterable[int]) -> frozenset[int]:
    """Storages that are filled by ``tensors``, each element once, and used by nobody else.

    Args:
        tensors: All that is known of those storages.
        held: Storages that others use.
    """
    others = set(held)
    parts: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(storage_of(tensor), []).append(tensor)
    return frozenset(
        storage for storage, views in parts.items() if storage not in others and _fill(views)
    )


def _fill(views: Sequence[torch.Tensor]) -> bool:
    """Whether views of one storage are dense, lie one behind the other, and leave no gap."""
    end = 0
    for view in sorted(views, key=lambda v: v.storage_offset() * v.element_size()):
        begin = view.storage_offset() * view.element_size()
        if begin != end or not view.is_contiguous():
            return False
        end += view.numel() * view.element_size()
    return end == views[0].untyped_storage().nbytes()


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
        pairs = list(values)
        own = own_storages([tensor for _, tensor in pairs], held)
        for name, tensor in pairs:
            if name in self._sums:
                self._sums[name].add_(tensor)
            elif storage_of(tensor) in own:
                self._sums[name] = tensor
            else:
                self._sums[name] = tensor.clone(memory_format=torch.contiguous_format)
