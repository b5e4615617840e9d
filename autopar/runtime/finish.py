"""What follows a rank's action list: losses and outputs on every rank, buffers, the last messages.

Everything here is a cross-stage exchange and therefore waits until all action lists are done.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch

from autopar.capture.torch_ops import torch_dtype
from autopar.errors import PassError
from autopar.ir.graph import OutputKind
from autopar.ir.precision_rules import sum_dtype
from autopar.plan.types import PP_AXIS
from autopar.runtime.collective_math import reduce_in_order
from autopar.runtime.executor import execute
from autopar.runtime.messages import receive
from autopar.runtime.requests import Collective, Request, Running, Send, WaitSends
from autopar.runtime.step import RankStep
from autopar.sharding.placement import Partial, Shard, format_layout, local_shape
from autopar.sharding.programs import ResultSpec, TensorSpec


def finish(step: RankStep) -> Running:
    """Make losses whole on every rank, bring buffers up to date, wait for the last messages.

    Call it after the forwards (when the backwards come later) or after the whole list.
    """
    step.position = "finish"
    for result in step.local.results:
        if result.kind is OutputKind.LOSS:
            step.losses[result.target] = yield from _whole_loss(step, result)
    for result in step.local.results:
        if result.kind is OutputKind.MUTATION:
            yield from _finish_buffer(step, result)
    yield WaitSends()
    step.position = "end"


def share_outputs(step: RankStep) -> Generator[Request, object, dict[str, torch.Tensor]]:
    """Outputs by path on every rank, micro-batches put together, in their dp and tp layout."""
    step.position = "share outputs"
    shared = {}
    for result in step.local.results:
        if result.kind is OutputKind.OUTPUT:
            value = None
            if step.mailbox.is_own(result.stage):
                parts = step.results[OutputKind.OUTPUT, result.target]
                value = join_microbatches(parts, result.spec, step.local.axis_sizes)
            shared[result.target] = yield from _broadcast(step, result, value)
    return shared


def join_microbatches(
    parts: Mapping[int, torch.Tensor], spec: TensorSpec, axis_sizes: tuple[int, int, int]
) -> torch.Tensor:
    """One rank's value for the whole step from its micro-batches' values.

    Args:
        parts: By micro-batch.
        spec: ``layout[0]`` says how: ``S(d)`` concatenates and cuts padding off, ``P(sum)`` adds,
            ``P(max)`` and ``P(min)`` reduce, others take the last.
        axis_sizes: Sizes of (mb, dp, tp).
    """
    ordered = [parts[m] for m in sorted(parts)]
    placement = spec.layout[0]
    if isinstance(placement, Shard):
        if len(ordered) > 1 and placement in spec.layout[1:]:
            raise PassError(
                f"dim {placement.dim} of a value is split over micro-batches and ranks "
                f"({format_layout(spec.layout)}): no rank can put it together; gather it first"
            )
        shape = local_shape(spec.meta.shape, spec.layout[1:], axis_sizes[1:])
        return torch.cat(ordered, placement.dim).narrow(placement.dim, 0, shape[placement.dim])
    if isinstance(placement, Partial):
        return reduce_in_order(ordered, placement.op)
    return ordered[-1]


def _whole_loss(step: RankStep, result: ResultSpec) -> Generator[Request, object, torch.Tensor]:
    value = None
    if step.mailbox.is_own(result.stage):
        wide = torch_dtype(sum_dtype(result.spec.meta.dtype))
        found = step.results[OutputKind.LOSS, result.target]
        parts = {m: value.to(wide) for m, value in found.items()}
        total = join_microbatches(parts, result.spec, step.local.axis_sizes)
        program = step.loaded.stages[result.stage].finish
        given = {result.target: total}
        values = yield from execute(program, step.gather(program, result.stage, None, given))
        targets = [o.target for o in program.graph.outputs]
        value = values[targets.index(result.target)]
    return (yield from _broadcast(step, result, value))


def _broadcast(
    step: RankStep, result: ResultSpec, value: torch.Tensor | None
) -> Generator[Request, object, torch.Tensor]:
    """The stage's value on every pipeline rank, between ranks of equal (dp, tp)."""
    mesh, spec = step.loaded.mesh, result.spec
    if value is None:
        shape = local_shape(spec.meta.shape, spec.layout[1:], step.local.axis_sizes[1:])
        dtype = torch_dtype(spec.meta.dtype)
        value = torch.empty(shape, dtype=dtype, device=step.loaded.device)
    if mesh.pp == 1:
        return value
    root = mesh.pipeline_rank(result.stage)
    node = f"{result.kind.value} {result.target!r}"
    answer = yield Collective("broadcast", value.contiguous(), PP_AXIS, root=root, node=node)
    if not isinstance(answer, torch.Tensor):
        answer = answer.wait()  # type: ignore[attr-defined]  # a Pending
    if not isinstance(answer, torch.Tensor):
        raise PassError(f"the driver answered the broadcast of {node} with {answer!r}")
    return answer


def _finish_buffer(step: RankStep, result: ResultSpec) -> Running:
    """Apply a mutation that waits for the end, and send it to the buffer's other stages."""
    name = result.target
    if step.mailbox.is_own(result.stage):
        parts = step.results.get((OutputKind.MUTATION, name))
        if parts:
            step.buffers[name] = join_microbatches(parts, result.spec, step.local.axis_sizes)
    ranks = {step.loaded.mesh.pipeline_rank(s) for s in step.local.buffer_stages[name]}
    source = step.loaded.mesh.pipeline_rank(result.stage)
    for target in sorted(ranks - {source}):
        label = f"buffer {name}"
        if step.pp == source:
            yield Send(step.buffers[name].contiguous(), step.mailbox.peer(target), label)
        elif step.pp == target:
            shape, dtype = result.spec.meta.shape, torch_dtype(result.spec.meta.dtype)
            step.buffers[name] = yield from receive(shape, dtype, step.mailbox.peer(source), label)
