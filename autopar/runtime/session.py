"""What stands behind a compiled module on one rank: programs, tensors, and the steps it runs."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.capture.calls import LossFunction, ModelCall
from autopar.capture.structure import TensorLeaf, leaves
from autopar.capture.tracing import Captured, capture
from autopar.errors import CaptureError, ConfigError, InputError, PassError, ShardingError
from autopar.ir.graph import InputKind
from autopar.plan.decisions import decisions_of
from autopar.plan.io import plan_hash
from autopar.plan.types import MeshShape, Plan
from autopar.runtime.agreement import Agreement
from autopar.runtime.batches import (
    CallKey,
    call_key,
    changed_inputs,
    check_batch,
    check_device,
    check_takes_no_gradient,
)
from autopar.runtime.changes import ModelChanges
from autopar.runtime.clipping import GradientNorm, route_clipping
from autopar.runtime.driving import Driver, IdleDriver
from autopar.runtime.failure import FailFast
from autopar.runtime.fitting import how_fitted, larger_blocks
from autopar.runtime.groups import GroupLease
from autopar.runtime.inputs import StepInputs
from autopar.runtime.model_step import ModelStep
from autopar.runtime.optimizer_state import GroupNames
from autopar.runtime.optimizers import OptimizerGuard
from autopar.runtime.parameters import local_part
from autopar.runtime.place import Place
from autopar.runtime.requests import Request
from autopar.runtime.scaling import SharedOverflow
from autopar.runtime.shares import LocalShare, check_origin, stand_in
from autopar.runtime.surgery import Residents
from autopar.runtime.variants import (
    Variant,
    make_variant,
    transfer,
)
from autopar.runtime.writes import draw_whole, take_up_writes
from autopar.sharding.programs import LocalPrograms
from autopar.torch_compat import has_call_hooks

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOSS_BATCH = "loss_batch"
"""Name under which a :class:`ModelCall` holds what a loss function is given."""

_FIRST_SCALE = 65536.0
_KEY_BYTES = 8
_MAX_VARIANTS = 32  # programs of the calls used last; packed inputs have a new length every step
_MASK_63 = (1 << 63) - 1  # an int64 that is not negative


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the user asked for beside the plan.

    Attributes:
        loss: Loss function of the result and the batch, or None.
        outputs: Paths of outputs that training returns whole.
        seed: Seed of dropout and of weights on the meta device.
        rng: ``"counter"``, or ``"torch"``: the model's own forward runs.
        mode: ``"train"`` or ``"inference"``.
    """

    loss: LossFunction | None = None
    outputs: tuple[str, ...] = ()
    seed: int = 0
    rng: str = "counter"
    mode: str = "train"


def step_key(seed: int, step: int) -> int:
    """Key of the random operators in a step: the same on every rank, under every plan."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=_KEY_BYTES).digest()
    return int.from_bytes(digest, "big") & _MASK_63


class Session:
    """Runs calls of one compiled module on this rank.

    Args:
        plan: The plan in force.
        captured: The call that it was made for.
        options: What the user asked for.
        place: This process.
        residents: Parameters and buffers in the module.
        planned: The programs of the planned call.
        driver: Answers what steps ask for.
        lease: The process groups; None in a plain process.
        guard: Keeps optimizers with the parameters.
        changes: Finds what the user changes in the model.
        uncompiled: Gives the module its own class back while something is captured.
        watch: Ends all ranks when one fails; None in a plain process.
    """

    def __init__(  # noqa: PLR0913  # made in one place
        self,
        *,
        plan: Plan,
        captured: Captured,
        options: RunOptions,
        place: Place,
        residents: Residents,
        planned: Variant,
        driver: Driver,
        lease: GroupLease | None,
        guard: OptimizerGuard,
        changes: ModelChanges,
        uncompiled: Callable[[torch.nn.Module], AbstractContextManager[None]],
        watch: FailFast | None,
    ) -> None:
        self.plan = plan
        self.plan_hash = plan_hash(plan)
        self.captured = captured
        self.options = options
        self.place = place
        self.residents = residents
        self.step = 0
        self.norm = GradientNorm(
            residents.store,
            device=place.device,
            distributed=place.is_distributed,
            all_train=_all_train(residents, plan.mesh, place),
        )
        if place.is_distributed:
            route_clipping(self.norm)
            draw_whole(residents.store, in_stages=plan.mesh.pp > 1)
        self.driver = driver
        self._lease = lease
        self._guard = guard  # lives as long as the session: its hooks end with it
        self._changes = changes
        self._uncompiled = uncompiled
        self._watch = watch
        self._planned = planned
        self._variants: OrderedDict[CallKey, Variant] = OrderedDict()
        # the scale that a gradient scaler starts with; another one is found at the first backward
        self._tangent = _FIRST_SCALE if captured.precision == "fp16" else 1.0
        self._overflow = SharedOverflow(guard, place) if place.is_distributed else None
        self._agreement = Agreement(place)

    def close(self) -> None:
        """Give back programs, threads and process groups; every rank calls it, between steps."""
        self._variants.clear()
        self.driver.close()
        self.driver = IdleDriver()  # the other one holds the groups
        if self._lease is not None:
            self._lease.close()

    # ------------------------------------------------------------ calls
    def call(self, model: torch.nn.Module, call: ModelCall, *, with_loss: bool) -> object:
        """The result of one call of the model.

        Args:
            model: The compiled module.
            call: Its arguments, the global batch.
            with_loss: Whether the user's loss function is part of the call.
        """
        if self.options.rng == "torch":
            return self._call_as_it_is(model, call, with_loss=with_loss)
        trains = any(spec.requires_grad for spec in self.residents.store.every.values())
        backward = torch.is_grad_enabled() and trains
        tensors = call.tensors()
        check_device(tensors, self.place.device, rank=self.place.label)
        with self._watched(f"step {self.step + 1}"):
            with self._uncompiled(model):
                marks = self._changes.of(model)
            key = call_key(marks, call, backward=backward)
            program = self._program(key, model, call, with_loss) if marks.changes else ()
            difference = self._agreement.disagreement(
                replace(key, changes=program), tensors, has_news=self._guard.has_news()
            )
            if self._agreement.has_news and not difference:
                self._guard.share_groups()
        if difference:
            raise InputError(f"step {self.step + 1}: {difference}")
        if backward and self.options.mode == "train":
            check_takes_no_gradient(tensors)
        check_origin(tensors, plan=self.plan_hash, rank=self.place.rank)
        variant = self._variant(key, model, call, with_loss=with_loss)
        self._check_values(variant, tensors)
        take_up_writes(self.residents)
        self._check_frozen()
        self.step += 1
        return ModelStep(self, variant, tensors, step_key(self.options.seed, self.step)).run()

    def _call_as_it_is(self, model: torch.nn.Module, call: ModelCall, *, with_loss: bool) -> object:
        """The model's own forward, with torch's own random numbers."""
        self.step += 1
        with self._uncompiled(model):
            # through torch's call only for the model's own hooks: those for all modules ran
            forward = model if has_call_hooks(model) else model.forward
            output = forward(*call.args(), **call.kwargs())
        if with_loss and self.options.loss is not None:
            return self.options.loss(output, call.batch())
        return output

    @property
    def planned_programs(self) -> LocalPrograms:
        """The programs of the call that was planned."""
        return self._planned.local

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer steps parameters of this model."""
        return self._guard.holds(optimizer)

    def optimizer_groups(self, optimizer: torch.optim.Optimizer) -> GroupNames:
        """Names of the parameters of each group over all ranks; every rank must call it."""
        return self._guard.groups(optimizer)

    @property
    def own_names(self) -> Mapping[int, str]:
        """``id`` of each parameter of this rank -> first name."""
        return self._guard.names

    @property
    def counters(self) -> dict[str, int]:
        """What dropout is drawn from: the seed, and the number of calls so far."""
        return {"seed": self.options.seed, "step": self.step}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Draw dropout from here on as after :attr:`counters` were taken."""
        self.options = replace(self.options, seed=int(counters["seed"]))
        self.step = int(counters["step"])

    def names_of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """All names of a parameter of this rank; empty if it is none."""
        name = self._guard.names.get(id(parameter))
        return self.residents.names[name] if name else ()

    def adopt(self, key: CallKey, variant: Variant) -> None:
        """Run calls like ``key`` by ``variant``."""
        self._variants[key] = variant

    def _program(
        self, key: CallKey, model: torch.nn.Module, call: ModelCall, with_loss: bool
    ) -> tuple[tuple[str, str], ...]:
        """What a changed model computes, to be compared with other ranks; () if as before.

        What was changed may differ by rank, such as the time; what comes of it may not.
        """
        captured = self._variant(key, model, call, with_loss=with_loss).captured
        before = self._variants.get(replace(key, changes=()))
        known = self.captured if before is None else before.captured
        return () if captured.is_same(known) else (("program", captured.hash),)

    def _variant(
        self, key: CallKey, model: torch.nn.Module, call: ModelCall, *, with_loss: bool
    ) -> Variant:
        found = self._variants.get(key)
        if found is None:
            found = self._variants[key] = self._new_variant(key, model, call, with_loss)
            if len(self._variants) > _MAX_VARIANTS:
                self._variants.popitem(last=False)
        self._variants.move_to_end(key)
        return found

    def _unchanged(self, key: CallKey, captured: Captured) -> Variant | None:
        """What ran calls like this before the last change of the model, if that changed nothing."""
        kind = replace(key, changes=())
        for other in reversed(self._variants):
            if other != key and replace(other, changes=()) == kind:
                variant = self._variants[other]
                if not variant.captured.is_same(captured):
                    return None
                self._changes.note_harmless(other.changes, key.changes)
                return variant
        return None

    def _new_variant(
        self, key: CallKey, model: torch.nn.Module, call: ModelCall, with_loss: bool
    ) -> Variant:
        backward = key.backward
        tensors = call.tensors()
        metas = self.captured.input_metas
        if set(tensors) == set(metas) or backward:
            check_batch(tensors, metas, self.place.device, rank=self.place.label)
        changed = changed_inputs(tensors, {p: m for p, m in metas.items() if p in tensors})
        loss = self.options.loss if with_loss else None
        try:
            captured = self._recapture(model, call, loss, backward)
            if (unchanged := self._unchanged(key, captured)) is not None:
                return unchanged
            is_planned = captured.hash == self.captured.hash
            decisions = decisions_of(self.plan, self.captured.graph)
            fitted = None
            if not is_planned:
                decisions, fitted = transfer(
                    decisions,
                    self.captured.graph,
                    captured.graph,
                    microbatch_statistics=self.plan.microbatch_statistics,
                )
            decisions = replace(
                decisions, gather_outputs=gathered(captured, self.options, backward)
            )
            variant = make_variant(
                captured, decisions, self.plan, rank=self.place.rank,
                device=self.place.device, backward=backward, planned=self._planned.local,
            )  # fmt: skip
        except (CaptureError, ShardingError, PassError) as error:
            if not changed:
                raise
            raise InputError(
                f"the batch has {'; '.join(changed)}, and the plan can't be used for it "
                f"({error}); pass the global batch that it was compiled for, or compile again"
            ) from error
        told = "; ".join(changed)
        if fitted is not None and (words := how_fitted(fitted, self.plan)):
            logger.warning("the batch has %s: %s", told or "another form", words)
        if changed and (larger := larger_blocks(variant.local, self._planned.local)):
            logger.warning(
                "the batch has %s: a rank's part of %r is larger than planned, memory is not "
                "promised", told, larger,
            )  # fmt: skip
        return variant

    def _recapture(
        self, model: torch.nn.Module, call: ModelCall, loss: LossFunction | None, backward: bool
    ) -> Captured:
        """The program of a call; the planned one's form where only gradients are not wanted."""
        call = call.with_tensors(lambda _path, tensor: stand_in(tensor))
        with self.residents.whole_shapes(), self._uncompiled(model):
            return capture(
                model,
                call.args(),
                call.kwargs(),
                loss=loss,
                batch=call.values.get(LOSS_BATCH),
                # without gradients: the same program, B left out, so that decisions carry over
                train=any(spec.requires_grad for spec in self.residents.store.every.values()),
                precision=self.captured.precision,
            )

    def _check_values(self, variant: Variant, tensors: Mapping[str, torch.Tensor]) -> None:
        problem = next((text for c in variant.checks if (text := c.problem(tensors))), "")
        if not problem:
            return
        error = InputError(f"step {self.step + 1}: {problem}")
        if any(isinstance(t, LocalShare) for t in tensors.values()):  # others have other rows
            with self._watched(f"step {self.step + 1}"):
                raise error
        raise error

    def _check_frozen(self) -> None:
        if self.options.mode == "inference":  # what it returns takes no gradient
            return
        for item in self.residents.store:
            if item.parameter.requires_grad and not item.spec.requires_grad:
                raise ConfigError(
                    f"parameter {item.spec.name!r} was frozen when the model was compiled and "
                    "requires a gradient now; compile the model again"
                )

    # ------------------------------------------------------------ steps
    def drive(self, running: Generator[Request, object, T]) -> T:
        """Run a generator of a step to its end."""
        watched = self._watched(f"step {self.step}")
        with watched, torch.no_grad(), torch.autocast(self.place.device.type, enabled=False):
            return self.driver.run(running)

    def _watched(self, where: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.step(where)

    def inputs(self, variant: Variant, tensors: Mapping[str, torch.Tensor], key: int) -> StepInputs:
        """What a step on this rank reads."""
        device = self.place.device
        constants = variant.captured.constants
        by_name = {i.name: i.target for i in variant.captured.graph.of_kind(InputKind.CONSTANT)}
        return StepInputs(
            params=self.residents.store.storage(),
            buffers=self.residents.buffers,
            users=tensors,
            rng_key=torch.tensor(key, dtype=torch.int64, device=device),
            constants={by_name[name]: value.to(device) for name, value in constants.items()},
        )

    def apply_buffers(self, new: Mapping[str, torch.Tensor]) -> None:
        """Copy the buffers that a step changed into those that the module holds."""
        for name, value in new.items():
            held = self.residents.buffers.get(name)
            if held is not None and value is not held:
                held.copy_(value)

    def share_overflow(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make a gradient that is not finite on one rank visible on all.

        A gradient scaler decides on each rank by that rank's gradients whether to skip a step and
        what to scale by; the ranks must decide alike.
        """
        locals_ = [local_part(g) for g in gradients if g is not None and local_part(g).numel()]
        is_bad = any(not bool(torch.isfinite(g).all()) for g in locals_)
        flag = torch.tensor(float(is_bad), device=self.place.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        overflow = math.inf if flag.item() else 0.0
        if overflow and not is_bad and locals_:
            locals_[0][(0,) * locals_[0].dim()] = overflow
        if self._guard.filler is not None:
            self._guard.filler.grad = torch.full_like(self._guard.filler, overflow)

    @property
    def tangent(self) -> float:
        """The gradient of the loss that the next step assumes."""
        return self._tangent

    def note_tangent(self, value: float) -> None:
        """A backward received ``value``; the next step will assume it."""
        if value and math.isfinite(value):  # others could not be scaled back
            self._tangent = value


def _all_train(residents: Residents, mesh: MeshShape, place: Place) -> bool:
    """Whether every rank owns a parameter that is trained."""
    trained = [spec for spec in residents.store.every.values() if spec.requires_grad]
    owners = {mesh.pipeline_rank(spec.owner) for spec in trained}
    return place.world_size == mesh.num_ranks and len(owners) == mesh.pp


def gathered(captured: Captured, options: RunOptions, backward: bool) -> frozenset[str]:
    """Paths of the outputs that a call returns whole.

    Raises:
        ConfigError: The user names an output that the model does not have.
    """
    found = {leaf.path for leaf in leaves(captured.output_spec) if isinstance(leaf, TensorLeaf)}
    others = found - {captured.loss_path}
    unknown = [path for path in options.outputs if path not in found]
    infers = options.mode == "inference"
    if unknown and (backward or infers):
        raise ConfigError(
            f"outputs={list(options.outputs)!r}: the model has no output "
            f"{', '.join(map(repr, unknown))}; it has {', '.join(map(repr, sorted(found)))}"
        )
    if backward and captured.has_loss:
        return frozenset(path for path in options.outputs if path in others)
    if infers and options.outputs:
        return frozenset(path for path in options.outputs if path in others)
    return frozenset(others)
