"""Initial values of parameters and buffers, one tensor at a time.

Three sources, looked at in this order: a mapping of whole tensors that the user gives, the model's
own tensors, and, for tensors on the meta device, the model's own initialisers. A tensor on the
meta device is drawn alone under a seed made of the user's seed and its name, so that it is the
same under every plan and on every rank; nothing larger than it is in memory meanwhile.

Real tensors that differ between ranks (somebody forgot to seed) are taken from rank 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.errors import ConfigError

logger = logging.getLogger(__name__)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 4096  # elements whose order the checksum sees as well
_SEED_BYTES = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the model that holds a tensor: an entry of a module's tables."""

    module: torch.nn.Module
    attribute: str
    is_parameter: bool

    @property
    def table(self) -> dict[str, torch.Tensor | None]:
        """The module's own table."""
        if self.is_parameter:
            return self.module._parameters  # type: ignore[return-value]  # Parameter is a Tensor
        return self.module._buffers

    def put(self, tensor: torch.Tensor | None) -> None:
        """Replace the tensor; None keeps the name without a tensor."""
        self.table[self.attribute] = tensor


@dataclass(frozen=True, slots=True)
class Tied:
    """A tensor of the model with all its names.

    Attributes:
        names: Qualified names in registration order; the first one is its name in plans.
        slots: One per name.
        ancestors: Modules on the path of the first name, innermost first, the owner included.
    """

    names: tuple[str, ...]
    slots: tuple[Slot, ...]
    ancestors: tuple[torch.nn.Module, ...]
    tensor: torch.Tensor


def find_tensors(model: torch.nn.Module, *, parameters: bool) -> dict[str, Tied]:
    """All parameters, or all buffers, of a model by first name."""
    found: dict[int, list[tuple[str, Slot]]] = {}
    tensors: dict[int, torch.Tensor] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix, module in modules.items():
        table = module._parameters if parameters else module._buffers
        for attribute, tensor in table.items():
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                found.setdefault(id(tensor), []).append((name, Slot(module, attribute, parameters)))
                tensors[id(tensor)] = tensor
    result: dict[str, Tied] = {}
    for key, places in found.items():
        names = tuple(name for name, _ in places)
        path = names[0].split(".")[:-1]
        chain = tuple(modules[".".join(path[:i])] for i in range(len(path), -1, -1))
        result[names[0]] = Tied(names, tuple(slot for _, slot in places), chain, tensors[key])
    return result


class InitialValues:
    """Whole tensors by first name.

    Args:
        model: The user's model.
        tensors: Its parameters and buffers.
        seed: Seed of tensors on the meta device.
        given: Whole tensors by name (any alias); may load lazily.
        distributed: Whether several ranks run and real tensors must agree.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: Mapping[str, Tied],
        *,
        seed: int,
        given: Mapping[str, torch.Tensor] | None,
        distributed: bool,
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._seed = seed
        self._given = given or {}
        real = {
            name: tied.tensor
            for name, tied in tensors.items()
            if not tied.tensor.is_meta and not any(alias in self._given for alias in tied.names)
        }
        self._differing = _differing_names(real) if distributed else frozenset()

    def is_collective(self, name: str) -> bool:
        """Whether all ranks must call :meth:`whole` for this tensor, in the model's order."""
        return name in self._differing

    def whole(self, name: str) -> torch.Tensor:
        """The tensor, on any device.

        Raises:
            ConfigError: It is on the meta device and nothing says what it holds, or the mapping
                has another shape.
        """
        tied = self._tensors[name]
        for alias in tied.names:
            if alias in self._given:
                return _checked(name, self._given[alias], tied.tensor)
        if tied.tensor.is_meta:
            return draw(self._model, tied, seed=self._seed)
        if name in self._differing:
            value = tied.tensor.detach().clone().contiguous()
            dist.broadcast(value, src=0)
            return value
        return tied.tensor.detach()


def _checked(name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if value.shape != like.shape:
        raise ConfigError(
            f"state_dict: {name!r} has shape {tuple(value.shape)}, the model has "
            f"{tuple(like.shape)}; give the checkpoint of this model"
        )
    return value.detach().to(like.dtype)


def _differing_names(real: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Names of the tensors that are not the same on all ranks; collective."""
    mine = {name: checksum(tensor) for name, tensor in real.items()}
    every: list[dict[str, tuple[int, int]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    others = [table for table in every if table is not None]
    for rank, table in enumerate(others):
        odd = next((name for name in mine if name not in table), None)
        if odd is not None:
            raise ConfigError(
                f"rank {dist.get_rank()} has a real tensor {odd!r}, rank {rank} does not; build "
                "the same model on all ranks, on the same kind of device"
            )
    differing = frozenset(n for n, v in mine.items() if any(table[n] != v for table in others))
    if differing:
        logger.warning(
            "initial values of %d tensors differ between ranks, rank 0's are taken; "
            "seed before building the model (first: %s)",
            len(differing),
            min(differing),
        )
    return differing


def checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two numbers that differ where the bits of two tensors differ, but for rare accidents."""
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    bits = flat.reshape(-1).view(_BITS[flat.element_size()])
    head = bits[:_SAMPLE].to(torch.int64)
    position = torch.arange(1, head.numel() + 1, device=head.device)
    return int(bits.sum(dtype=torch.int64)), int((head * position).sum())


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for one tensor."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "big") >> 1


def draw(model: torch.nn.Module, tied: Tied, *, seed: int) -> torch.Tensor:
    """Run the model's own initialisers for one tensor that is on the meta device.

    Only this tensor is real while they run; those of its modules from the inside out, as a model
    applies them. An initialiser that computes from a module's other tensors gets all of that
    module's own tensors real.

    Raises:
        ConfigError: No initialiser writes it.
    """
    name = tied.names[0]
    owner = tied.slots[0].module
    try:
        value = _draw_with(model, tied, [tied.slots[0]], seed)
    except (NotImplementedError, RuntimeError):  # it read a tensor that was still on meta
        beside = [
            Slot(owner, attribute, is_parameter)
            for is_parameter, table in ((True, owner._parameters), (False, owner._buffers))
            for attribute, tensor in table.items()
            if tensor is not None and tensor.is_meta
        ]
        value = _draw_with(model, tied, beside, seed)
    if _is_unwritten(value):
        kind = "parameter" if tied.slots[0].is_parameter else "buffer"
        raise ConfigError(
            f"{kind} {name!r} is on the meta device and no initialiser of "
            f"{type(owner).__name__} writes it; give its value in state_dict=, or build the model "
            "on the CPU"
        )
    return value


def _draw_with(model: torch.nn.Module, tied: Tied, slots: list[Slot], seed: int) -> torch.Tensor:
    wanted = tied.slots[0]
    with _real_tensors(slots), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed_of(seed, tied.names[0]))
        for position, module in enumerate(tied.ancestors):
            initialise = _initialiser(module, tied.ancestors[position:])
            if initialise is not None:
                initialise()
        value = wanted.table[wanted.attribute]
        assert value is not None
        return value.detach()


@contextlib.contextmanager
def _real_tensors(slots: list[Slot]) -> Iterator[None]:
    """Give the slots tensors on the CPU, marked as unwritten, while the body runs."""
    before = [slot.table[slot.attribute] for slot in slots]
    for slot, meta in zip(slots, before, strict=True):
        assert meta is not None
        real = torch.full(meta.shape, _mark(meta.dtype), dtype=meta.dtype)
        if slot.is_parameter:
            slot.put(torch.nn.Parameter(real, requires_grad=meta.requires_grad))
        else:
            slot.put(real)
    try:
        yield
    finally:
        for slot, meta in zip(slots, before, strict=True):
            slot.put(meta)


def _mark(dtype: torch.dtype) -> float | int | bool:
    """A value that no initialiser writes."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _is_unwritten(value: torch.Tensor) -> bool:
    if value.dtype is torch.bool or not value.numel():
        return False
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return bool((value == torch.iinfo(value.dtype).max).any())


def _initialiser(
    module: torch.nn.Module, outwards: tuple[torch.nn.Module, ...]
) -> Callable[[], object] | None:
    """The call that initialises ``module``, or None.

    A model library's ``_init_weights(module)`` of the closest enclosing model wins (it handles
    rotary frequencies and position buffers too); else torch's convention ``reset_parameters()``.
    """
    for outer in outwards:
        hook = getattr(outer, "_init_weights", None)
        if callable(hook):
            return lambda: hook(module)
    for method in ("reset_parameters", "_reset_parameters"):
        own = getattr(module, method, None)
        if callable(own):
            return own  # type: ignore[no-any-return]  # attributes of modules are untyped
    return None
