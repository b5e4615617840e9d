"""Private names of torch that autopar uses, behind functions of our own.

Those behind the tracing of a model are in :mod:`autopar.torch_tracing`.

Checked with torch 2.11 to 2.14. torch is imported inside the functions: importing this module
costs nothing, so the torch-free layers may sit beside it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SchemaArgument:
    """One argument of an operator's schema."""

    name: str
    keyword_only: bool
    default: object


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """Name and arguments of a torch operator.

    Attributes:
        namespace: Such as ``"aten"``.
        name: Such as ``"mm"``.
        overload: Such as ``"default"``.
        arguments: In schema order.
        random: Whether torch tags it as drawing random numbers.
    """

    namespace: str
    name: str
    overload: str
    arguments: tuple[SchemaArgument, ...]
    random: bool


@functools.cache
def operator_schema(target: object) -> OperatorSchema | None:
    """Schema of what an fx node calls, or None if that is no torch operator."""
    import torch

    overload: Any = target
    if not isinstance(overload, torch._ops.OpOverload):
        return None
    return OperatorSchema(
        overload.namespace,
        overload._opname,
        overload._overloadname,
        tuple(
            SchemaArgument(a.name, a.kwarg_only, a.default_value if a.has_default_value() else None)
            for a in overload._schema.arguments
        ),
        torch.Tag.nondeterministic_seeded in overload.tags,
    )


def state_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps its own parameters and buffers."""
    return module._parameters, module._buffers


def fake_mode() -> Any:
    """A new fake-tensor mode; plain tensors hidden in attributes of a model are tolerated."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """Exceptions by which tracing reports a value that only a real run would know."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )


@contextlib.contextmanager
def no_mkldnn() -> Iterator[None]:
    """Keep operators that exist only in the CPU's oneDNN library (whole LSTMs) out of a trace."""
    import torch

    # torch.backends.mkldnn.flags sets TF32 as well, which warns on every use
    binding: Any = torch._C
    before = binding._get_mkldnn_enabled()
    binding._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        binding._set_mkldnn_enabled(before)


def is_torch_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to the module."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or bool(module.__dict__.get("_compiled_call_impl"))


def grouped_mm_builtin() -> Any:
    """The function that ``torch.nn.functional.grouped_mm`` calls; None where there is none."""
    import torch

    return getattr(torch, "_grouped_mm", None)


def wrapper_tensor(
    kind: type[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of the subclass ``kind`` that has a shape but no memory of its own."""
    import torch

    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def assert_later(condition: torch.Tensor, message: str) -> None:
    """Fail on the device, when it comes to it, unless a bool scalar is true; nobody waits."""
    import torch

    torch._assert_async(condition, message)


HOOKS_OF_CALLS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Tables of a module's hooks that run when it is called, as entries of its ``__dict__``."""


def take_call_hooks(module: torch.nn.Module) -> dict[str, Any]:
    """Take the hooks of calls off a module; handles of them stay good.

    The tables themselves are taken, which the handles point to, and empty ones put in their place.
    """
    state = module.__dict__
    taken = {name: state[name] for name in (*HOOKS_OF_CALLS, "_is_full_backward_hook")}
    state.update({name: OrderedDict() for name in HOOKS_OF_CALLS}, _is_full_backward_hook=None)
    return taken


def has_call_hooks(module: torch.nn.Module) -> bool:
    """Whether a hook runs when the module is called."""
    return any(module.__dict__[name] for name in HOOKS_OF_CALLS)


FIRST_ATTRIBUTE_OF_DDP = "_ddp_params_and_buffers_to_ignore"  # which DDP looks up before all else


def clipping_functions() -> dict[str, Any]:
    """The functions of ``torch.nn.utils`` that clip gradients, as they are now, by their names."""
    from torch.nn.utils import clip_grad

    names = ("_get_total_norm", "_clip_grads_with_norm_", "clip_grad_norm_", "clip_grad_value_")
    return {name: getattr(clip_grad, name).__closure__[0].cell_contents for name in names}


def replace_clipping_functions(functions: dict[str, Any]) -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` and its like run ``functions`` instead.

    Each of them is a wrapper that holds what it runs in a closure. What is held is replaced, and
    not the name: whoever imported one earlier, under whatever name, gets the new one too.
    """
    from torch.nn.utils import clip_grad

    for name, function in functions.items():
        getattr(clip_grad, name).__closure__[0].cell_contents = function


def replace_adafactor_updates(make: Any) -> None:
    """Replace the two functions that compute Adafactor's update by ``make(original)``, once."""
    from torch.optim import _adafactor as module

    for name in ("_single_tensor_adafactor", "_multi_tensor_adafactor"):
        original = getattr(module, name)
        if not hasattr(original, "autopar_original"):
            replacement = make(original)
            replacement.autopar_original = original
            setattr(module, name, replacement)


@dataclass(frozen=True, slots=True)
class StateDictApi:
    """What stands behind ``torch.distributed.checkpoint.state_dict``.

    Attributes:
        start_optimizer: Gives an optimizer zero state by a step with learning rate 0.
        flatten_optimizer: Nested state dict of an optimizer -> keys joined by dots.
        offload: State dict -> the same with whole or local tensors on the CPU, by its options.
    """

    start_optimizer: Any
    flatten_optimizer: Any
    offload: Any


def route_state_dict_api(is_ours: Any, routes: dict[str, Any]) -> StateDictApi:
    """Answer torch's calls to get and set state dicts ourselves for some models.

    Args:
        is_ours: ``is_ours(model)``: whether to answer for this model.
        routes: ``"get_model"``, ``"set_model"``, ``"get_optimizer"``, ``"set_optimizer"`` ->
            function with the arguments of torch's own and that one before them.
    """
    from torch.distributed.checkpoint import state_dict as module

    api: Any = module
    names = {
        "get_model": "_get_model_state_dict",
        "set_model": "_load_model_state_dict",
        "get_optimizer": "_get_optim_state_dict",
        "set_optimizer": "_load_optim_state_dict",
    }
    if not hasattr(api._verify_options, "autopar_original"):
        for key, name in names.items():
            setattr(api, name, _routed(getattr(api, name), is_ours, routes[key]))
        options, check = api._verify_options, api._verify_state_dict

        @functools.wraps(options)
        def verify_options(model: Any, *args: Any, **kwargs: Any) -> Any:
            info = options(model, *args, **kwargs)
            info.autopar_model = is_ours(model)
            return info

        @functools.wraps(check)
        def verify_state_dict(model_state: Any, optimizer_state: Any, info: Any) -> None:
            if not info.autopar_model:  # a rank of ours may have nothing to save
                check(model_state, optimizer_state, info)

        verify_options.autopar_original = options  # type: ignore[attr-defined]
        api._verify_options, api._verify_state_dict = verify_options, verify_state_dict
    return StateDictApi(
        api._init_optim_state, api._flatten_optim_state_dict, api._maybe_full_or_cpu_state_dict
    )


def _routed(original: Any, is_ours: Any, route: Any) -> Any:
    @functools.wraps(original)
    def routed(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(model):
            return route(original, model, *args, **kwargs)
        return original(model, *args, **kwargs)

    return routed


_RANDOM_WRITES = (
    "normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_",
    "random_",
)  # fmt: skip


def intercept_random_writes(write: Any) -> None:
    """Ask ``write(target, draw)`` before random numbers are written into a ``DTensor``, once.

    ``draw(tensor)`` fills a plain tensor by the same operator. Where ``write`` gives false, torch
    goes on as ever.
    """
    import torch
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers

    def handle(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            if write(args[0], lambda plain: operator(plain, *args[1:], **kwargs)):
                return args[0]
            handler = handlers.pop(operator)
            try:
                return operator(*args, **kwargs)
            finally:
                handlers[operator] = handler

    for name in _RANDOM_WRITES:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            handlers.setdefault(getattr(packet, overload), handle)


def _place_of_filler(params: list[Any]) -> list[Any] | None:
    """The list that an optimizer without parameters would need one in; None if it has some."""
    for group in params:
        if not isinstance(group, dict):
            return None
        held = group["params"]
        if hasattr(held, "__next__"):
            group["params"] = held = list(held)
        if not isinstance(held, list) or held:
            return None
    found: list[Any] = params[0]["params"] if params else params
    return found


def watch_optimizers(observer: Any, fill: Any) -> Any:
    """Call ``observer(optimizer)`` after an optimizer was given a parameter group.

    torch has no hook for the birth of an optimizer, and refuses an empty list of parameters: such
    an optimizer is given what ``fill()`` returns, if that is not None. Gives the function that
    ends the watch.
    """
    from torch.optim.optimizer import Optimizer

    methods: Any = Optimizer
    watchers = getattr(methods, "autopar_watchers", None)
    if watchers is None:
        watchers = methods.autopar_watchers = []
        add_param_group, init = methods.add_param_group, methods.__init__

        @functools.wraps(add_param_group)
        def watched_add(self: Any, param_group: dict[str, Any]) -> None:
            add_param_group(self, param_group)
            for watch, _ in tuple(watchers):
                watch(self)

        @functools.wraps(init)
        def watched_init(self: Any, params: Any, defaults: dict[str, Any]) -> None:
            if hasattr(params, "__iter__") and not hasattr(params, "shape"):
                params = list(params)
                place = _place_of_filler(params)
                if place is not None:
                    fillers = [filler() for _, filler in watchers]
                    place.extend([found for found in fillers if found is not None][-1:])
            init(self, params, defaults)

        methods.add_param_group, methods.__init__ = watched_add, watched_init
    entry = (observer, fill)
    watchers.append(entry)
    return lambda: watchers.remove(entry)


@contextlib.contextmanager
def no_value_checks() -> Iterator[None]:
    """Distributions made in the body do not check the values of their arguments."""
    import torch

    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


def operator_names() -> frozenset[str]:
    """Names of all operators that are defined by now, ``"aten::add.Tensor"``."""
    import torch

    return frozenset(torch._C._dispatch_get_all_op_names())


def watch_unscaling(observer: Any) -> Any:
    """Call ``observer(optimizer, found)`` after a scaler looked at an optimizer's gradients.

    ``found`` is what the scaler will act on: device -> tensor that is not 0 where a gradient was
    not finite. The observer may change it in place. Gives the function that ends the watch.
    """
    from torch.amp.grad_scaler import GradScaler

    scaler: Any = GradScaler
    watchers = getattr(scaler, "autopar_watchers", None)
    if watchers is None:
        watchers = scaler.autopar_watchers = []
        unscale = scaler._unscale_grads_

        @functools.wraps(unscale)
        def watched(self: Any, optimizer: Any, *args: Any) -> Any:
            found = unscale(self, optimizer, *args)
            for watch in tuple(watchers):
                watch(optimizer, found)
            return found

        scaler._unscale_grads_ = watched
    watchers.append(observer)
    return lambda: watchers.remove(observer)


def forget_groups(device_mesh: Any) -> None:
    """Drop a mesh's references to groups that were destroyed: torch's caches keep the mesh."""
    getattr(device_mesh, "_pg_registry", {}).clear()  # before torch 2.11 it held names alone
