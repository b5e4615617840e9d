"""One call of a compiled module, from the batch to the model's result and its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autopar.capture.torch_ops import torch_dtype
from autopar.errors import ConfigError
from autopar.ir.graph import OutputKind, TensorMeta
from autopar.plan.actions import Action, ActionKind
from autopar.runtime.finish import finish, share_outputs
from autopar.runtime.handover import Gradients, as_functions, close
from autopar.runtime.outputs import build_result
from autopar.runtime.step import RankStep
from autopar.runtime.tangents import differentiable_outputs, reached_parameters
from autopar.runtime.variants import Variant

if TYPE_CHECKING:
    from autopar.runtime.session import Session

_BACKWARD = (ActionKind.BACKWARD, ActionKind.RECV_B)


class ModelStep:
    """A step and what is left of it until its backward.

    Args:
        session: The compiled module's.
        variant: The call's programs.
        tensors: The global batch by path.
        key: Key of the random operators.
    """

    def __init__(
        self, session: Session, variant: Variant, tensors: Mapping[str, torch.Tensor], key: int
    ) -> None:
        self._session = session
        self._variant = variant
        self._tensors: Mapping[str, torch.Tensor] | None = tensors
        self._key = key
        self._used_tangent = session.tangent
        self._trained = session.residents.store.trained()
        self._running: RankStep | None = None
        self._later: tuple[Action, ...] = ()
        self._gradients: dict[str, torch.Tensor] | None = None
        self._buffers_before: dict[str, torch.Tensor] = {}
        self._differentiable: tuple[str, ...] = ()

    def run(self) -> object:
        """Run the call; gives the model's result."""
        variant, captured = self._variant, self._variant.captured
        if variant.backward and captured.has_loss and self._variant.is_half:
            changed = {r.target for r in variant.local.results if r.kind is OutputKind.MUTATION}
            held = self._session.residents.buffers
            self._buffers_before = {n: held[n].clone() for n in changed if n in held}
        losses, outputs = self._compute()
        if not variant.backward:
            found = {**outputs, **losses}
            if self._session.options.mode == "inference" and torch.is_grad_enabled():
                found = {path: close(v, path, inference=True) for path, v in found.items()}
            return self._result(found)
        parameters = [item.parameter for item in self._trained]
        if captured.has_loss:
            paths = tuple(losses)
            results = as_functions(self, tuple(losses.values()), parameters)
            closed = {path: close(value, path) for path, value in outputs.items()}
            self._release()
            return self._result({**closed, **dict(zip(paths, results, strict=True))})
        takes = set(differentiable_outputs(captured.graph))
        self._differentiable = tuple(path for path in outputs if path in takes)
        values = tuple(outputs[path] for path in self._differentiable)
        results = as_functions(self, values, parameters)
        return self._result({**outputs, **dict(zip(self._differentiable, results, strict=True))})

    def _result(self, values: Mapping[str, torch.Tensor]) -> object:
        captured = self._variant.captured
        if captured.has_loss and captured.loss_path is None:  # a loss function made it
            return next(v for p, v in values.items() if self._is_loss(p))
        return build_result(captured.output_spec, values)

    def _is_loss(self, path: str) -> bool:
        results = self._variant.local.results
        return any(r.kind is OutputKind.LOSS and r.target == path for r in results)

    # ------------------------------------------------------------ computing
    def _compute(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Run the schedule (its forwards, if gradients come later); losses and outputs by path."""
        session, variant = self._session, self._variant
        losses: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        if variant.loaded is not None:
            assert self._tensors is not None
            inputs = session.inputs(variant, self._tensors, self._key)
            inputs.loss_tangent = self._used_tangent
            step = RankStep(variant.loaded, session.place.rank, inputs)
            now, self._later = variant.actions, ()
            if variant.backward and not variant.captured.has_loss:
                cut = next(i for i, a in enumerate(now) if a.kind in _BACKWARD)
                now, self._later = now[:cut], now[cut:]
            session.drive(step.run(now))
            session.drive(finish(step))
            losses = dict(step.losses)
            outputs = session.drive(share_outputs(step))
            session.apply_buffers(step.buffers)
            self._running = step
            if variant.backward and not self._later:
                self._gradients = _own_gradients(step)
                self._running = None
        self._tell_idle_ranks(losses, outputs)
        return losses, outputs

    def _tell_idle_ranks(
        self, losses: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]
    ) -> None:
        """Losses and outputs for the ranks beyond the mesh, from rank 0."""
        session = self._session
        if session.place.world_size == session.plan.mesh.num_ranks:
            return
        for result in self._variant.local.results:
            table = {OutputKind.LOSS: losses, OutputKind.OUTPUT: outputs}.get(result.kind)
            if table is not None:
                value = table.get(result.target)
                if value is None:
                    value = _empty(result.spec.meta, session.place.device)
                value = value.contiguous()
                dist.broadcast(value, src=0)
                table[result.target] = value

    def _release(self) -> None:
        if not self._buffers_before and not self._variant.is_half:
            self._tensors = None

    # ------------------------------------------------------------ gradients
    def hand_over(self, tangents: Sequence[torch.Tensor | None]) -> Gradients:
        """Gradients of the trained parameters, once; None for those that nothing reaches.

        Raises:
            ConfigError: They were handed over before.
        """
        if self._variant.loaded is not None and self._gradients is None and not self._later:
            raise ConfigError(
                "backward() was already called for this step; call the model again for new "
                "gradients (retain_graph has no effect on a compiled model)"
            )
        if self._variant.captured.has_loss:
            (tangent,) = tangents
            assert tangent is not None, "the only result was differentiated"
            found = self._scaled(tangent)
        else:
            found = self._run_backward(tangents)
        self._gradients = None
        joined = tuple([item.join(found) for item in self._trained])
        if self._variant.is_half and self._session.place.is_distributed:
            self._session.share_overflow(joined)
        return joined

    def _scaled(self, tangent: torch.Tensor) -> dict[str, torch.Tensor]:
        value, used = float(tangent), self._used_tangent
        self._session.note_tangent(value)
        if value != used and self._variant.is_half:
            self._run_again(value)
        found = self._gradients or {}
        if value != used and not self._variant.is_half:
            for gradient in found.values():
                gradient.mul_(value / used)
        return found

    def _run_again(self, tangent: float) -> None:
        """Half precision: what another scale has lost can't be scaled back."""
        self._session.apply_buffers(self._buffers_before)
        self._gradients = None
        self._used_tangent = tangent
        self._compute()

    def _run_backward(self, tangents: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        step = self._running
        if step is None:
            return {}
        pairs = zip(self._differentiable, tangents, strict=True)
        given = {path: tangent for path, tangent in pairs if tangent is not None}
        step.inputs.tangents = given
        self._session.drive(step.run(self._later))
        self._session.drive(finish(step))
        self._running, self._later = None, ()
        reached = reached_parameters(self._variant.captured.graph, given)
        return {name: g for name, g in _own_gradients(step).items() if name in reached}


def _own_gradients(step: RankStep) -> dict[str, torch.Tensor]:
    """Gradients of this rank's own parameters in storage layout and dtype, out of the step."""
    return {
        name: step.gradients[spec.owner].pop(name).to(torch_dtype(spec.meta.dtype))
        for name, spec in step.local.params.items()
        if spec.owner in step.gradients and name in step.gradients[spec.owner]
    }


def _empty(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=torch_dtype(meta.dtype), device=device)
