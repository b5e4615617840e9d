"""Capture: a module and one call become a joint forward and backward program.

The module's parameters, buffers and inputs are replaced by fake CPU tensors while it is traced,
so that a model on the meta device, on a GPU or on the CPU gives the same program, no memory is
used and the module is left as it was. The program is traced by torch's ahead-of-time export,
lowered to :class:`autopar.ir.graph.Graph` and normalised.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from autopar.capture.calls import LossFunction, ModelCall, bind_call, find_loss
from autopar.capture.checks import (
    check_dtypes,
    check_random,
    check_sparse,
    check_torch_compile,
)
from autopar.capture.errors_in_model import capture_error
from autopar.capture.host_random import refusing_host_random
from autopar.capture.interception import Interception, module_scopes, neutral_attention
from autopar.capture.lower import Roles, lower
from autopar.capture.normalise import normalise, with_stable_names, without_dead
from autopar.capture.row_order import with_batch_outermost
from autopar.capture.structure import DroppedLeaf, Structure, flatten, leaves
from autopar.capture.torch_ops import meta_of
from autopar.capture.untouched import untouched, written_buffers
from autopar.errors import AutoparError, CaptureError, ConfigError
from autopar.garbage import no_collections
from autopar.ir.graph import Graph, InputKind, TensorMeta
from autopar.ir.hashing import graph_hash
from autopar.ir.precision import check_precision, lower_precision, widen_gradients
from autopar.ir.precision_rules import HALVES
from autopar.ir.verify import verify_graph, verify_names
from autopar.torch_compat import fake_mode, no_mkldnn, no_value_checks, state_tables
from autopar.torch_tracing import JointTrace, export_joint

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

logger = logging.getLogger(__name__)

_tracing = threading.RLock()  # torch traces with state of the process: one model at a time
_TRACE_SEED = 0x6175746F  # unlikely to be a seed that a model sets


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A model and the shape of its call as a program.

    Attributes:
        graph: The joint program, normalised.
        hash: Hash of the program's content; equal for equal models, wherever they live.
        training: Whether there is a backward.
        has_loss: Whether the backward starts at one scalar; else every floating-point output has
            a tangent input.
        loss_path: Where the loss stands in the model's result; None if a loss function made it.
        output_spec: Structure of the model's result; its tensors are found by path.
        input_metas: Shape and dtype of the user's inputs by path, in order.
        static_inputs: Arguments that are no tensors, by path; the program holds for these values.
        dropped_outputs: ``"path (class)"`` of entries of the result that can't be taken apart.
        constants: Tensors of the program's constant inputs by name.
        assumptions: What the program takes for granted, for the report.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``; None: in the model's own dtypes.
    """

    graph: Graph
    hash: str
    training: bool
    has_loss: bool
    loss_path: str | None
    output_spec: Structure
    input_metas: Mapping[str, TensorMeta]
    static_inputs: Mapping[str, object]
    dropped_outputs: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    assumptions: tuple[str, ...]
    precision: str | None = None

    @property
    def input_paths(self) -> tuple[str, ...]:
        """Paths of the user's tensors, in the order of the call."""
        return tuple(self.input_metas)

    def is_same(self, other: Captured) -> bool:
        """Whether another program computes the same, baked tensors included."""
        return (
            self.hash == other.hash
            and self.output_spec == other.output_spec
            and self.constants.keys() == other.constants.keys()
            and all(torch.equal(t, other.constants[n]) for n, t in self.constants.items())
        )


@dataclass(slots=True)
class _Result:
    """What the traced call returned, noted while it runs."""

    structure: Structure | None = None
    paths: list[str] = field(default_factory=list)
    loss_path: str | None = None
    has_loss: bool = False


class _TracedCall(torch.nn.Module):
    """The call as a module of flat tensors that returns a flat tuple."""

    def __init__(
        self, model: torch.nn.Module, call: ModelCall, loss: LossFunction | None, training: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._call = call
        self._paths = tuple(call.tensors())
        self._loss = loss
        self._train = training
        self.result = _Result()
        self.changed: set[str] = set()
        self.doing = ""
        self.interception = Interception()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.interception.is_in_model = True
        try:
            with untouched(self.model, self.changed):  # tracing calls more than once
                return self._flat_call(tensors)
        finally:
            self.interception.is_in_model = False

    def _flat_call(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        by_path = dict(zip(self._paths, tensors, strict=True))
        call = self._call.with_tensors(lambda path, _: by_path[path])
        self.doing = f"{type(self.model).__name__}.forward"
        torch.manual_seed(_TRACE_SEED)  # the user's state is kept aside
        with written_buffers(self.model):
            output = refusing_host_random(
                lambda: self.model(*call.args(), **call.kwargs()), self.doing
            )
        if torch.initial_seed() != _TRACE_SEED:
            raise CaptureError(
                f"{self.doing} sets torch's random seed, which a compiled model does not draw "
                "from; draw fixed numbers in __init__ and keep them in a buffer, and set the seed "
                "of the run by seed= of autopar.compile()"
            )
        structure, found = flatten(output, root="output")
        result = _Result(structure)
        traced: list[torch.Tensor] = []
        loss = self._find_loss(output, call, result)
        if loss is not None:
            result.has_loss = True
            traced.append(loss)
            result.paths.append(result.loss_path or "loss")
        for path, tensor in found.items():
            if path != result.loss_path or loss is None:
                # a copy: no output is then a view of another one, which tracing would replay
                traced.append((tensor.detach() if result.has_loss else tensor).clone())
                result.paths.append(path)
        if not traced:
            raise CaptureError(
                f"{type(self.model).__name__}.forward gives no tensor but a "
                f"{type(output).__name__}; return tensors, in a tuple, list, dict "
                "or dataclass if they are several"
            )
        self.result = result
        return tuple(traced)

    def _find_loss(self, output: object, call: ModelCall, result: _Result) -> torch.Tensor | None:
        if self._loss is not None:
            self.doing = "the function given as loss="
            function = self._loss
            loss: object = refusing_host_random(lambda: function(output, call.batch()), self.doing)
            self.doing = "the backward of the model"
            if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
                got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
                raise ConfigError(f"loss= must return a scalar tensor, got {got}; reduce it")
            if self._train and not loss.requires_grad:
                raise ConfigError(
                    "loss= returned a tensor that depends on no trainable parameter; "
                    "compute it from the model's output without detach()"
                )
            return loss
        self.doing = "the backward of the model"
        found = find_loss(output, training=self._train)
        if found is None:
            return None
        result.loss_path = found[0]
        return found[1]


@no_collections(sweep=True)
def capture(
    model: torch.nn.Module,
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: LossFunction | None = None,
    batch: object = None,
    train: bool = True,
    precision: str | None = None,
) -> Captured:
    """The program of one training step of ``model(*args, **kwargs)``.

    Args:
        model: Any module, on any device, also meta; it keeps its train or eval mode.
        args: Positional arguments: tensors (only shape and dtype matter), numbers, nestings.
        kwargs: Keyword arguments.
        loss: ``loss(output, batch)``, a scalar. Without it the loss is looked for in the result:
            its field ``loss``, else the result itself or its first entry that is a scalar.
        batch: What ``loss`` gets as second argument. Without it: the only positional argument,
            the tuple of positional arguments, the dict of keyword arguments, or a pair of both.
        train: False gives the forward alone.
        precision: Compute in it, with float32 masters (:mod:`autopar.ir.precision`); None: in the
            model's own dtypes.

    Raises:
        CaptureError: The model's code fails or decides by values; names the line.
        ConfigError: The inputs do not fit, nothing can be trained, or ``precision`` can't be had.
    """
    _check_precision(precision)
    check_torch_compile(model)
    call = bind_call(model, args, kwargs or {}, batch=batch)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if train and not trained:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameter: there is nothing to "
            "differentiate; set requires_grad=True on a parameter, or capture with train=False"
        )
    lazy = [
        name
        for name, p in model.named_parameters()
        if isinstance(p, torch.nn.UninitializedParameter)
    ]
    if lazy:
        raise ConfigError(
            f"{len(lazy)} parameters of {type(model).__name__} have no shape yet, the first is "
            f"{lazy[0]!r}; call the model once, or write the sizes in place of lazy modules"
        )
    assumptions: list[str] = []
    mode = fake_mode()
    traced = _TracedCall(model, call, loss, train)
    with _tracing, contextlib.ExitStack() as stack:
        stack.enter_context(_fake_state(model, mode, train=train))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_neutral_autocast(assumptions))
        stack.enter_context(torch.set_grad_enabled(train))
        stack.enter_context(_no_fast_paths())
        stack.enter_context(module_scopes(model))
        fakes = [_fake(tensor, mode) for tensor in call.tensors().values()]
        trace = _export(traced, fakes)
        roles = _roles(model, call, traced.result)
        lowered = lower(trace, roles)
    verify_names(lowered.graph, what="the traced program")
    check_sparse(lowered.graph)
    if precision is None:  # else operands are cast
        check_dtypes(lowered.graph)
    if traced.changed:
        names = ", ".join(sorted(traced.changed)[:3])
        assumptions.append(
            f"what forward assigns to attributes is not kept ({len(traced.changed)}, such as "
            f"{names}); values that must last belong in buffers"
        )
    graph = with_batch_outermost(normalise(lowered.graph))
    check_random(graph)
    if precision is not None:
        assumptions += _precision_notes(graph, precision)
        graph = without_dead(lower_precision(graph, precision))
    graph = with_stable_names(without_dead(widen_gradients(graph)))
    verify_graph(graph)
    captured = _captured(call, traced.result, graph, lowered.constants, assumptions, train=train)
    return replace(captured, precision=precision)


def _precision_notes(graph: Graph, precision: str) -> list[str]:
    """What a precision changes in a model that is in a low one already."""
    metas = [i.meta for i in graph.of_kind(InputKind.PARAM)]
    own = sorted({m.dtype for m in metas if m is not None and m.dtype in HALVES})
    return [
        f"the model is in {dtype}: its trained parameters became float32 masters, and its own "
        f"casts to {dtype} are left to the rules of precision={precision!r}"
        for dtype in own
    ]


def _check_precision(precision: str | None) -> None:
    if precision is None:
        return
    check_precision(precision)
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise ConfigError(
                f"precision={precision!r} and torch.autocast({device!r}, "
                f"{torch.get_autocast_dtype(device)}): each says which operator runs in which "
                "precision; leave one of them out"
            )


def _captured(
    call: ModelCall,
    result: _Result,
    graph: Graph,
    constants: Mapping[str, torch.Tensor],
    assumptions: list[str],
    *,
    train: bool,
) -> Captured:
    assert result.structure is not None, "the model was not called"
    dropped = tuple(
        f"{leaf.path} ({leaf.type_name})"
        for leaf in leaves(result.structure)
        if isinstance(leaf, DroppedLeaf)
    )
    used = {i.name for i in graph.of_kind(InputKind.CONSTANT)}
    captured = Captured(
        graph=graph,
        hash=graph_hash(graph),
        training=train,
        has_loss=result.has_loss,
        loss_path=result.loss_path,
        output_spec=result.structure,
        input_metas={path: meta_of(t) for path, t in call.tensors().items()},
        static_inputs=call.statics(),
        dropped_outputs=dropped,
        constants={name: value for name, value in constants.items() if name in used},
        assumptions=tuple(assumptions),
    )
    logger.info(
        "captured: nodes=%d inputs=%d loss=%s hash=%s",
        len(graph.nodes), len(graph.inputs), captured.loss_path, captured.hash,
    )  # fmt: skip
    return captured


def _export(traced: _TracedCall, fakes: list[torch.Tensor]) -> JointTrace:
    try:
        with traced.interception, neutral_attention(), _quiet_torch(), no_value_checks():
            return export_joint(traced, fakes)
    except AutoparError:
        raise
    except Exception as error:  # whatever the user's code raises becomes one clear error
        raise capture_error(
            error, entry_function="forward", what=traced.doing, model=traced.model
        ) from error


def _roles(model: torch.nn.Module, call: ModelCall, result: _Result) -> Roles:
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        aliases.setdefault(id(buffer), []).append(name)
    return Roles(
        prefix="model.",
        user_paths=tuple(call.tensors()),
        output_paths=tuple(result.paths),
        has_loss=result.has_loss,
        tied=tuple(tuple(names) for names in aliases.values() if len(names) > 1),
        trainable=frozenset(
            name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
        ),
    )


def _fake(tensor: torch.Tensor, mode: AbstractContextManager[object]) -> torch.Tensor:
    # dense and on the CPU, whatever the original: a plan may not depend on strides or devices
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


@contextlib.contextmanager
def _fake_state(
    model: torch.nn.Module, mode: AbstractContextManager[object], *, train: bool
) -> Iterator[None]:
    """Replace parameters and buffers of all modules by fakes; put the originals back at the end."""
    fakes: dict[int, torch.Tensor] = {}
    saved: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []
    try:
        for module in model.modules():
            for table in state_tables(module):
                for name, tensor in list(table.items()):
                    if tensor is None:
                        continue
                    fake = fakes.get(id(tensor))
                    if fake is None:
                        fake = _fake(tensor, mode)
                        if isinstance(tensor, torch.nn.Parameter):
                            needs_grad = tensor.requires_grad and train
                            fake = torch.nn.Parameter(fake, requires_grad=needs_grad)
                        fakes[id(tensor)] = fake
                    saved.append((table, name, tensor))
                    table[name] = fake
        yield
    finally:
        for table, name, tensor in saved:
            table[name] = tensor


@contextlib.contextmanager
def _neutral_autocast(assumptions: list[str]) -> Iterator[None]:
    """Autocast that is on for CUDA, applied to the CPU fakes."""
    if not torch.is_autocast_enabled("cuda"):
        yield
        return
    dtype = torch.get_autocast_dtype("cuda")
    assumptions.append(f"autocast to {dtype} follows the CPU's list of operators")
    with torch.autocast("cpu", dtype=dtype):
        yield


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """No traceback printed by torch for an error that becomes one of ours."""
    names = ("torch._subclasses.fake_tensor", "torch._guards")
    loggers = [logging.getLogger(name) for name in names]
    before = [found.disabled for found in loggers]
    for found in loggers:
        found.disabled = True
    try:
        yield
    finally:
        for found, was_disabled in zip(loggers, before, strict=True):
            found.disabled = was_disabled


@contextlib.contextmanager
def _no_fast_paths() -> Iterator[None]:
    """Kernels that only the CPU has, or that swallow whole layers, stay off."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with no_mkldnn():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
