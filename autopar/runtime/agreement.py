"""Whether all ranks are given the same call: the same batch, the same mode.

A call takes the global batch on every rank and each rank takes its part. Ranks that are given
different batches, as by a loader with a ``DistributedSampler``, would train on a mixture without a
word. So shapes and modes are compared before every step, and the content of the batch at the first
step of each kind: one tiny reduction, and texts only where it finds a difference. Where ranks
compute on CPUs, the first part of each input is compared before every step: loaders that shuffle by
themselves may part in a later epoch.

Shares of a batch differ by rank on purpose. They say of which batch they are, which is compared
before every step; at the first step of each kind ranks that hold the same rows compare them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch
import torch.distributed as dist

from autopar.runtime.batches import CallKey
from autopar.runtime.materialise import checksum
from autopar.runtime.place import Place
from autopar.runtime.shares import LocalShare

_DIGEST_BYTES = 7  # fits into an int64 that is not negative
_HEAD = 1 << 15
"""Elements of each input that are compared before every step."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Agreement:
    """Compares the calls of all ranks; every rank must make every call.

    Args:
        place: This process.

    Attributes:
        has_news: Whether any rank had something to tell at the last comparison.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._seen: set[CallKey] = set()
        self.has_news = False

    def disagreement(
        self, key: CallKey, tensors: Mapping[str, torch.Tensor], *, has_news: bool = False
    ) -> str:
        """In what the ranks' calls differ, the same text on every rank; "" if in nothing.

        It is returned and not raised, since every rank knows it: no rank has to be told.

        Args:
            key: Shapes, modes and other facts of this rank's call.
            tensors: Its tensors by path.
            has_news: Whether this rank has something to tell; :attr:`has_news` says afterwards
                whether any rank has.
        """
        if not self._place.is_distributed:
            return ""
        facts = _facts(key) | _origins(tensors, self._place.rank)
        is_new = key not in self._seen
        wholes = {p: t for p, t in tensors.items() if not isinstance(t, LocalShare)}
        if is_new:
            facts |= {f"the content of input {p!r}": _sum(t) for p, t in wholes.items()}
        elif self._place.device.type == "cpu":  # elsewhere a device would have to be waited for
            heads = {p: t.detach().flatten()[:_HEAD] for p, t in wholes.items()}
            facts |= {f"the content of input {p!r}": _sum(t) for p, t in heads.items()}
        text = repr(sorted(facts.items())).encode()
        digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
        mine = int.from_bytes(digest, "big")
        both = torch.tensor([mine, -mine, has_news], dtype=torch.int64, device=self._device())
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        self.has_news = bool(both[2])
        if int(both[0]) != -int(both[1]):
            return self._difference(facts)
        self._seen.add(key)  # only now: after a refusal all ranks must still agree on what is new
        shares = {p: t for p, t in tensors.items() if isinstance(t, LocalShare)}
        return self._different_rows(shares) if is_new and shares else ""

    def _different_rows(self, shares: Mapping[str, LocalShare]) -> str:
        """In what the rows differ that several ranks hold."""
        mine = {p: (t.rows, _sum(t.local_rows())) for p, t in shares.items() if t.rows}
        every: list[dict[str, tuple[tuple[int, ...], str]]] = [{}] * self._place.world_size
        dist.all_gather_object(every, mine)
        first: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
        for rank, held in enumerate(every):
            for path, (rows, found) in held.items():
                other, wanted = first.setdefault((path, rows), (rank, found))
                if found != wanted:
                    return (
                        f"ranks {other} and {rank} hold the same {len(rows)} rows of input "
                        f"{path!r} with different content; let the dataset give the same sample "
                        "for the same index on every rank"
                    )
        return ""

    def _device(self) -> torch.device:
        """The CPU if a backend reduces there: a GPU would have to be waited for."""
        has_cpu = "cpu" in str(dist.get_backend_config())
        return torch.device("cpu") if has_cpu else self._place.device

    def _difference(self, facts: dict[str, str]) -> str:
        every: list[dict[str, str]] = [{}] * self._place.world_size
        dist.all_gather_object(every, facts)
        first = every[0]
        rank = next(r for r, other in enumerate(every) if other != first)
        names = [*first, *(n for n in every[rank] if n not in first)]
        name = next(n for n in names if every[rank].get(n) != first.get(n))
        return (
            f"the ranks are given different calls: {name} is {every[rank].get(name, 'missing')} on "
            f"rank {rank}, {first.get(name, 'missing')} on rank 0; call the model on every rank, "
            "with the same global batch: the plan cuts it"
        )


def _facts(key: CallKey) -> dict[str, str]:
    facts = {f"input {path!r}": f"{dtype}{list(shape)}" for path, shape, dtype in key.tensors}
    facts |= {f"argument {path!r}": _ADDRESS.sub("", text) for path, text in key.statics}
    facts["the mode"] = ", ".join(key.modes)
    facts["autocast"] = ", ".join(key.autocast) or "off"
    facts["the program of the model"] = ", ".join(text for _, text in key.changes) or "as compiled"
    facts["the wish for gradients"] = "on" if key.backward else "off"
    return facts


def _origins(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, str]:
    facts = {}
    for path, tensor in tensors.items():
        if isinstance(tensor, LocalShare):
            origin = tensor.origin
            facts[f"the form of input {path!r}"] = "a share"
            facts[f"the plan of the share in input {path!r}"] = origin.plan
            facts[f"the rank of the share in input {path!r}"] = (
                "its own" if origin.rank == rank else f"{origin.rank}"
            )
            facts[f"the batch of the share in input {path!r}"] = origin.batch
        else:
            facts[f"the form of input {path!r}"] = "a global batch"
            wish = "on" if tensor.requires_grad and torch.is_grad_enabled() else "off"
            facts[f"the wish for a gradient of input {path!r}"] = wish
    return facts


def _sum(tensor: torch.Tensor) -> str:
    bits, order = checksum(tensor)
    return f"{bits:x}/{order:x}"
