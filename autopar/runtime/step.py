"""One rank's training step: the interpreter of its action list.

:class:`RankStep` holds what is alive during a step. Its methods that do something are generators:
they yield requests (:mod:`autopar.runtime.requests`) and a driver answers. What lives how long:

* a saved value from F to B of its micro-batch, and inside B until its last use; where B is run in
  two halves, what the second one reads from the end of the first until its last use there;
* a received value until the F or B that reads it, or until B where B reads it too;
* a compute copy of a parameter from UNSHARD to RESHARD;
* a gradient in compute layout from the first B to REDUCE_GRAD, then in storage layout to the end.

Buffers. A mutation whose micro-batch placement is ``V`` takes effect after each F, any other one at
the end of the step. A B sees the buffers that its F saw. New values never overwrite the caller's
tensors: they are in :attr:`RankStep.buffers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.capture.torch_ops import torch_dtype
from autopar.errors import PassError
from autopar.ir.graph import Input, InputKind, OutputKind, TensorMeta
from autopar.plan.actions import Action, ActionKind
from autopar.runtime.executor import Program, execute
from autopar.runtime.gradients import Accumulator, storage_of
from autopar.runtime.inputs import StepInputs, tangent_block, user_block
from autopar.runtime.load import LoadedPrograms
from autopar.runtime.messages import Mailbox, Tensors, receive
from autopar.runtime.requests import Running, Send
from autopar.runtime.shares import in_memory
from autopar.sharding.host_copies import is_host_name
from autopar.sharding.placement import Varying, local_shape


@dataclass(slots=True)
class _Saved:
    """What a stage keeps of one micro-batch between F and B."""

    values: Tensors
    buffers: Mapping[str, torch.Tensor]


class RankStep:
    """The state of one step on one rank.

    Attributes:
        position: The action in progress, for messages.
        buffers: Current buffers by name.
        results: (Kind, path) -> value of each micro-batch, in local layout, by micro-batch.
        losses: Losses, whole on every rank, after :func:`autopar.runtime.finish.finish`.
        gradients: Stage -> gradients in storage layout by parameter.
        peak_saved_bytes: Most bytes held between F and B at once, if measured.
    """

    def __init__(
        self,
        loaded: LoadedPrograms,
        rank: int,
        inputs: StepInputs,
        *,
        measure: bool = False,
        sums: Callable[[], Accumulator] = Accumulator,
    ) -> None:
        self.loaded = loaded
        self.local = loaded.local
        self.rank = rank
        self.pp, self.dp, self.tp = loaded.mesh.coordinate(rank)
        self.inputs = inputs
        self.mailbox = Mailbox(loaded.local, loaded.mesh, rank)
        self.position = "start"
        self.buffers: Tensors = dict(inputs.buffers)
        self.results: dict[tuple[OutputKind, str], dict[int, torch.Tensor]] = {}
        self.losses: Tensors = {}
        self.gradients: dict[int, Accumulator] = {s: Accumulator() for s in loaded.stages}
        self.peak_saved_bytes = 0
        self._measure = measure
        self._borrowed: Tensors = {}
        self._compute: dict[int, Tensors] = {}
        self._prologue: dict[int, Tensors] = {}
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._unreduced: dict[int, Accumulator] = {s: sums() for s in loaded.stages}
        self._varying = {
            r.target
            for r in self.local.results
            if r.kind is OutputKind.MUTATION and isinstance(r.spec.layout[0], Varying)
        }

    @property
    def dp_tp(self) -> tuple[int, int]:
        """Coordinate inside the stage's mesh."""
        return self.dp, self.tp

    # ---------------------------------------------------------------- the interpreter
    def run(self, actions: Iterable[Action]) -> Running:
        """Do the actions in order; may be called again with the rest of a list."""
        for action in actions:
            self.position = str(action)
            try:
                yield from self._perform(action)
            except Exception as error:
                error.add_note(f"rank {self.rank}, stage {action.stage}, at action {action}")
                raise
        self.position = "end of the actions"

    def _perform(self, action: Action) -> Running:
        stage = action.stage
        match action.kind:
            case ActionKind.PROLOGUE:
                yield from self._run_prologue(stage)
            case ActionKind.UNSHARD:
                yield from self._unshard(stage)
            case ActionKind.RESHARD:
                self._compute.pop(stage, None)
            case ActionKind.REDUCE_GRAD:
                yield from self._reduce(stage)
            case ActionKind.FETCH_TIED:
                yield from self._fetch_tied(stage, _number(action.peer, action))
            case ActionKind.SYNC_TIED:
                yield from self._sync_tied(stage, _number(action.peer, action))
            case ActionKind.FORWARD:
                yield from self._forward(stage, _number(action.microbatch, action))
            case ActionKind.BACKWARD:
                program = self.loaded.stages[stage].backward
                yield from self._backward(stage, program, _number(action.microbatch, action))
            case ActionKind.BACKWARD_INPUT:
                program = self.loaded.stages[stage].backward_input
                yield from self._backward(stage, program, _number(action.microbatch, action))
            case ActionKind.BACKWARD_WEIGHT:
                yield from self._backward_weight(stage, _number(action.microbatch, action))
            case ActionKind.SEND_F | ActionKind.SEND_B:
                yield from self.mailbox.send(action)
            case ActionKind.RECV_F | ActionKind.RECV_B:
                yield from self.mailbox.post(action)
            case _:
                raise PassError(f"action {action} is for simulation; no rank can run it")

    # ---------------------------------------------------------------- once per step
    def _run_prologue(self, stage: int) -> Running:
        if stage in self._prologue:
            return
        program = self.loaded.stages[stage].prologue
        values = yield from execute(program, self.gather(program, stage, None, {}))
        self._prologue[stage] = _named(program, values, OutputKind.PROLOGUE)

    def _unshard(self, stage: int) -> Running:
        if stage in self._compute:
            return
        program = self.loaded.stages[stage].unshard
        values = yield from execute(program, self.gather(program, stage, None, {}))
        self._compute[stage] = _named(program, values, OutputKind.PARAM)

    def _reduce(self, stage: int) -> Running:
        program = self.loaded.stages[stage].reduce
        sums = self._unreduced[stage]
        given = {name: sums.pop(name) for name in sums.names()}
        inputs = self.gather(program, stage, None, given)
        given.clear()
        values = yield from execute(program, inputs)
        pairs = zip(program.graph.outputs, values, strict=True)
        self.gradients[stage].add([(o.target, v) for o, v in pairs if v is not None], ())

    def _tied(self, owner: int, borrower: int) -> list[str]:
        """Parameters that ``borrower`` borrows from ``owner``, in order of their names."""
        specs = self.local.params.values()
        return sorted(p.name for p in specs if p.owner == owner and borrower in p.stages)

    def _fetch_tied(self, stage: int, peer: int) -> Running:
        """One end of lending: the owner, the earlier stage, sends its storage blocks."""
        if self.mailbox.is_own(peer):
            return
        rank = self.mailbox.peer(peer)
        for name in self._tied(min(stage, peer), max(stage, peer)):
            label = f"value of {name} for stage {max(stage, peer)}"
            if stage < peer:
                yield Send(self.inputs.params[name].contiguous(), rank, label)
            else:
                shape, dtype = self._stored(self.local.params[name].meta, name)
                self._borrowed[name] = yield from receive(shape, dtype, rank, label)

    def _stored(self, meta: TensorMeta, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Local shape and dtype of a parameter's value or gradient at rest."""
        storage = self.local.params[name].storage
        return local_shape(meta.shape, storage, self.local.axis_sizes), torch_dtype(meta.dtype)

    def _sync_tied(self, stage: int, peer: int) -> Running:
        """One end of returning: the borrower sends its gradient, the owner adds it."""
        owner, borrower = min(stage, peer), max(stage, peer)
        rank, own = self.mailbox.peer(peer), self.mailbox.is_own(peer)
        for name in self._tied(owner, borrower):
            if (borrower, name) not in self.local.grads:
                continue
            label = f"gradient of {name} from stage {borrower}"
            if stage == borrower:
                if not own:
                    yield Send(self.gradients[stage][name], rank, label)
                continue
            if own:
                arrived = self.gradients[borrower][name]
            else:
                shape, dtype = self._stored(self.local.params[name].grad_meta, name)
                arrived = yield from receive(shape, dtype, rank, label)
            self.gradients[stage].add([(name, arrived)], [storage_of(arrived)])

    # ---------------------------------------------------------------- forward and backward
    def _forward(self, stage: int, microbatch: int) -> Running:
        loaded = self.loaded.stages[stage]
        yield from self._unshard(stage)
        yield from self._run_prologue(stage)
        received = yield from self.mailbox.take(stage, ActionKind.FORWARD, microbatch)
        seen = dict(self.buffers)
        kept = _kept_for_backward((loaded.backward, loaded.backward_input), received)
        inputs = self.gather(loaded.forward, stage, microbatch, received)
        received.clear()
        values = yield from execute(loaded.forward, inputs)
        made = _named(loaded.forward, values, OutputKind.SEND)
        self.mailbox.put(stage, ActionKind.FORWARD, microbatch, made)
        for output, value in zip(loaded.forward.graph.outputs, values, strict=True):
            if value is None:
                continue
            if output.kind is OutputKind.MUTATION and output.target in self._varying:
                self.buffers[output.target] = value
            elif output.kind in (OutputKind.LOSS, OutputKind.OUTPUT, OutputKind.MUTATION):
                self.results.setdefault((output.kind, output.target), {})[microbatch] = value
        if not self.loaded.forward_only:
            kept.update(_named(loaded.forward, values, OutputKind.SAVED))
            self._saved[stage, microbatch] = _Saved(kept, seen)
        if self._measure:
            self.peak_saved_bytes = max(self.peak_saved_bytes, self.saved_bytes())

    def _backward(self, stage: int, program: Program, microbatch: int) -> Running:
        """Run a backward, or the half of one that makes the gradients of inputs."""
        yield from self._unshard(stage)
        given = yield from self.mailbox.take(stage, ActionKind.BACKWARD, microbatch)
        saved = self._saved.pop((stage, microbatch))
        given.update(saved.values)
        inputs = self.gather(program, stage, microbatch, given, saved.buffers)
        held = {storage_of(v) for v in inputs if isinstance(v, torch.Tensor)}
        given.clear()
        saved.values.clear()  # boxed: only the executor holds them now
        values = yield from execute(program, inputs)
        made = _named(program, values, OutputKind.SEND)
        self.mailbox.put(stage, ActionKind.BACKWARD, microbatch, made)
        if program is self.loaded.stages[stage].backward_input:
            later = _named(program, values, OutputKind.SAVED)
            self._saved[stage, microbatch] = _Saved(later, saved.buffers)
            if self._measure:
                self.peak_saved_bytes = max(self.peak_saved_bytes, self.saved_bytes())
            return
        held.update(storage_of(v) for v in made.values())
        self._add_gradients(stage, program, values, held)

    def _backward_weight(self, stage: int, microbatch: int) -> Running:
        """Run the half of a backward that makes the gradients of parameters."""
        program = self.loaded.stages[stage].backward_weight
        yield from self._unshard(stage)
        saved = self._saved.pop((stage, microbatch))
        inputs = self.gather(program, stage, microbatch, saved.values, saved.buffers)
        # what is still under way to another rank is among them, if a gradient shares its memory
        held = {storage_of(v) for v in inputs if isinstance(v, torch.Tensor)}
        saved.values.clear()
        values = yield from execute(program, inputs)
        self._add_gradients(stage, program, values, held)

    def _add_gradients(
        self,
        stage: int,
        program: Program,
        values: Sequence[torch.Tensor | None],
        held: Iterable[int],
    ) -> None:
        """Add what a program made for parameters to the sums of its stage."""
        self._unreduced[stage].add(
            [
                (o.target, v)
                for o, v in zip(program.graph.outputs, values, strict=True)
                if v is not None and o.kind is OutputKind.GRAD
            ],
            held,
        )

    def gather(
        self,
        program: Program,
        stage: int,
        microbatch: int | None,
        given: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> list[object]:
        """The inputs of a program, in order; the list is the executor's to empty.

        Args:
            program: One of ``stage``'s.
            stage: Stage that runs.
            microbatch: Micro-batch, or None for a program that runs once per step.
            given: Received and saved values, gradients, losses: by target.
            buffers: Buffers as it shall see them; the current ones if None.
        """
        coordinate = {"mb": microbatch or 0, "dp": self.dp, "tp": self.tp}
        is_unshard = program is self.loaded.stages[stage].unshard

        def value(item: Input) -> object:
            match item.kind:
                case InputKind.PARAM if is_unshard:
                    own = self.inputs.params
                    return own[item.target] if item.target in own else self._borrowed[item.target]
                case InputKind.PARAM:
                    return self._compute[stage][item.target]
                case InputKind.BUFFER:
                    return (self.buffers if buffers is None else buffers)[item.target]
                case InputKind.USER:
                    at = (microbatch, self.dp, self.tp)
                    return user_block(self.inputs, self.local, item.target, at, self.loaded.device)
                case InputKind.TANGENT:
                    where = (microbatch or 0, self.dp, self.tp)
                    return tangent_block(self.inputs, self.local, item, where, self.loaded.device)
                case InputKind.COORD:
                    return coordinate[item.target]
                case InputKind.RNG:
                    return self.inputs.rng_key
                case InputKind.CONSTANT:
                    return self.inputs.constants[item.target]
                case InputKind.PROLOGUE:
                    return self._prologue[stage][item.target]
                case InputKind.RECV | InputKind.SAVED | InputKind.GRAD:
                    return given[item.target]

        try:
            return [value(item) for item in program.graph.inputs]
        except KeyError as error:
            raise PassError(f"{program.name} reads {error}, which nobody gave") from error

    def saved_bytes(self) -> int:
        """Bytes held on the device between F and B now: each storage once.

        Parameters, arguments and copies in host memory are left out.
        """
        users = map(in_memory, self.inputs.users.values())
        other = [*self.inputs.params.values(), *users, *self.buffers.values()]
        for copies in (*self._compute.values(), *self._prologue.values()):
            other.extend(copies.values())
        seen = {storage_of(t) for t in other}
        total = 0
        for saved in self._saved.values():
            for name, tensor in saved.values.items():
                if not is_host_name(name) and storage_of(tensor) not in seen:
                    seen.add(storage_of(tensor))
                    total += tensor.untyped_storage().nbytes()
        return total


def _number(value: int | None, action: Action) -> int:
    if value is None:
        raise PassError(f"action {action} lacks its micro-batch or its peer")
    return value


def _named(program: Program, values: Sequence[torch.Tensor | None], kind: OutputKind) -> Tensors:
    """A program's outputs of one kind by target."""
    pairs = zip(program.graph.outputs, values, strict=True)
    return {o.target: v for o, v in pairs if o.kind is kind and v is not None}


def _kept_for_backward(backwards: Iterable[Program], received: Tensors) -> Tensors:
    """Values received for F that B reads too."""
    inputs = (i for program in backwards for i in program.graph.inputs)
    wanted = {i.target for i in inputs if i.kind is InputKind.RECV}
    return {name: value for name, value in received.items() if name in wanted}
