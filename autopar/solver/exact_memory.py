"""The bytes of a stage from the programs that its devices will run."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import InputKind, OutputKind, TensorMeta
from autopar.plan.actions import ActionKind
from autopar.sharding.placement import Layout, R, local_shape
from autopar.sharding.programs import AXES, LocalPrograms, ParamSpec, StagePrograms
from autopar.sharding.split_backward import BackwardHalves
from cost_models.memory import host_bytes, optimizer_state_bytes, saved_bytes, saved_storages
from cost_models.memory_timeline import ProgramMemory, StageMemory, program_memory
from cost_models.storage import storages


def local_bytes(meta: TensorMeta, layout: Layout, programs: LocalPrograms) -> int:
    """Bytes of a rank's block of a tensor."""
    space = (R, *layout[1:]) if len(layout) == len(AXES) else layout
    return TensorMeta(local_shape(meta.shape, space, programs.axis_sizes), meta.dtype).bytes


def stage_memory(  # noqa: PLR0913  all that bytes depend on
    programs: LocalPrograms,
    stage: StagePrograms,
    own: Sequence[ParamSpec],
    *,
    zero_level: int,
    num_microbatches: int,
    optimizer: str,
    pp: int,
    halves: BackwardHalves | None = None,
    receives_ahead: int = 0,
    is_cpu: bool = False,
) -> StageMemory:
    """What a stage takes on one of its devices.

    Args:
        programs: The localized plan.
        stage: The stage.
        own: Parameters that it uses.
        zero_level: Of its parameters.
        num_microbatches: Per step.
        optimizer: For the bytes of its state.
        pp: Pipeline ranks.
        halves: The backward in two, if it is run so.
        receives_ahead: Micro-batches that are received before their turn.
        is_cpu: Whether the devices are CPUs, whose libraries hold more than a GPU's do.
    """
    resting = gathered = grads = unreduced = state = 0
    for param in own:
        stored = local_bytes(param.meta, param.storage, programs)
        compute = local_bytes(param.compute_meta, param.compute, programs)
        summed = local_bytes(param.grad_meta, param.compute, programs)
        if param.parts:
            compute = sum(local_bytes(p.meta, p.compute, programs) for p in param.parts)
            dtype = param.grad_meta.dtype
            metas = [(TensorMeta(p.meta.shape, dtype), p.compute) for p in param.parts]
            summed = sum(local_bytes(meta, layout, programs) for meta, layout in metas)
        is_copied = bool(param.parts) or (param.storage, param.meta) != (
            param.compute,
            param.compute_meta,
        )
        resting += stored
        gathered += compute if is_copied else 0
        if param.requires_grad:
            at_rest = local_bytes(param.grad_meta, param.storage, programs)
            grads += at_rest if zero_level >= 2 else summed
            unreduced += summed if zero_level >= 2 else 0
            if param.owner == stage.index:
                shape = local_shape(param.meta.shape, param.storage, programs.axis_sizes)
                meta = TensorMeta(shape, param.meta.dtype)
                state += optimizer_state_bytes(optimizer, meta)
    programs_memory, kept_bytes = _programs(stage, halves, is_cpu=is_cpu)
    # the host's memory is that of the device
    beside = host_bytes(stage.forward) if is_cpu else 0
    return StageMemory(
        params_bytes=resting,
        gathered_bytes=gathered,
        grads_bytes=grads,
        unreduced_bytes=unreduced,
        optimizer_bytes=state,
        buffers_bytes=_buffers_bytes(programs, stage, num_microbatches, pp, receives_ahead),
        sent_bytes=_sent_bytes(programs, stage) if pp > 1 else 0,
        saved_bytes=saved_bytes(stage.forward) + beside,
        weight_saved_bytes=kept_bytes + (beside if halves is not None else 0),
        gathers_again=zero_level >= 3 and len(programs.stages) > pp,
        programs=programs_memory,
    )


def _programs(
    stage: StagePrograms, halves: BackwardHalves | None, *, is_cpu: bool
) -> tuple[dict[ActionKind, ProgramMemory], int]:
    """Transients of a stage's programs, and the bytes kept between the halves of a backward."""
    groups = {name: keys[0] for name, keys in saved_storages(stage.forward).items() if keys}
    found = {
        ActionKind.UNSHARD: program_memory(stage.unshard, is_cpu=is_cpu),
        ActionKind.FORWARD: program_memory(stage.forward, is_cpu=is_cpu),
        ActionKind.REDUCE_GRAD: program_memory(
            stage.reduce, freed_inputs=(InputKind.GRAD,), is_cpu=is_cpu
        ),
    }
    freed = (InputKind.SAVED,)
    if halves is None:
        found[ActionKind.BACKWARD] = program_memory(
            stage.backward, freed_inputs=freed, input_groups=groups, is_cpu=is_cpu
        )
        return found, 0
    kept, later = _kept(stage, halves)
    # what the first half makes for the second counts while it runs, then as kept
    found[ActionKind.BACKWARD_INPUT] = program_memory(
        halves.inputs,
        held_outputs=(),
        freed_inputs=freed,
        input_groups=groups,
        is_cpu=is_cpu,
    )
    found[ActionKind.BACKWARD_WEIGHT] = program_memory(
        halves.weights, freed_inputs=freed, input_groups=later, is_cpu=is_cpu
    )
    return found, sum(kept.values())


def _kept(stage: StagePrograms, halves: BackwardHalves) -> tuple[dict[str, int], dict[str, str]]:
    """Storages kept between the halves with their bytes, and the storage of each kept value."""
    saved, sizes = saved_storages(stage.forward), storages(stage.forward).bytes
    own, inputs = storages(halves.inputs).bytes, halves.inputs.input_map()
    kept: dict[str, int] = {}
    behind: dict[str, str] = {}
    for name, keys in saved_storages(halves.inputs).items():
        for key in keys:
            item = inputs.get(key)
            if item is not None and item.kind is InputKind.SAVED:
                # views of one storage were saved: all of it stays while one of them does
                named = {f"forward:{k}": sizes[k] for k in saved.get(item.target, ())}
            else:
                named = {key: own[key]}
            kept.update(named)
            if named:
                behind.setdefault(name, next(iter(named)))
    return kept, behind


def _buffers_bytes(
    programs: LocalPrograms,
    stage: StagePrograms,
    num_microbatches: int,
    pp: int,
    receives_ahead: int,
) -> int:
    """Received messages, module buffers, arguments of the whole step, outputs."""
    received = sum(
        (1 + receives_ahead) * i.meta.bytes
        for graph in (stage.forward, stage.backward)
        for i in graph.inputs
        if i.kind is InputKind.RECV and i.meta is not None
    )
    held = sum(
        i.meta.bytes
        for i in stage.forward.inputs
        if i.kind in (InputKind.BUFFER, InputKind.CONSTANT, InputKind.PROLOGUE)
        and i.meta is not None
    )
    users = sum(
        i.meta.bytes * num_microbatches
        for i in stage.forward.inputs
        if i.kind is InputKind.USER and i.meta is not None
    )
    return received + held + users + _output_bytes(programs, stage.index, pp)


def _sent_bytes(programs: LocalPrograms, stage: StagePrograms) -> int:
    """Messages of one micro-batch to stages of other ranks, each once."""
    sent = {
        output.value.name: programs.edge_metas[output.target].bytes
        for graph in (stage.forward, stage.backward)
        for output in graph.outputs_of(OutputKind.SEND)
        if output.value is not None
    }
    return sum(sent.values())


def _output_bytes(programs: LocalPrograms, stage: int, pp: int) -> int:
    """Bytes of the outputs that a call returns whole, once per rank.

    Where they are made, the micro-batches' parts are alive beside what they are joined to.
    """
    found = 0
    for result in programs.results:
        if result.kind is OutputKind.OUTPUT:
            found += result.spec.meta.bytes * (result.stage == stage)
            found += result.spec.meta.bytes * (stage < pp)
    return found
