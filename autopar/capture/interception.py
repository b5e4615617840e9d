"""What capture does to torch calls of the model while it is traced.

:class:`Interception` is a function mode: it puts the neutral attention operator in the place of
``scaled_dot_product_attention``, which otherwise becomes another operator on every device, and the
neutral grouped product in the place of torch's, which can't be traced in every dtype. It notes the
user's source line for the nodes that a call makes. :func:`module_scopes` notes the path of the
module that is being called.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import FrameType

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar.capture import neutral  # noqa: F401  registers the operators
from autopar.capture.rewrites.builder import broadcast
from autopar.errors import CaptureError
from autopar.torch_compat import grouped_mm_builtin
from autopar.torch_tracing import annotate_next_nodes

_TORCH_ATTENTION = functional.scaled_dot_product_attention
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_OWN_PACKAGES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent.parent),
)


def is_user_file(filename: str) -> bool:
    """Whether a source file is neither torch's, autopar's nor generated."""
    return not filename.startswith(_OWN_PACKAGES) and not filename.startswith("<")


class Interception(TorchFunctionMode):
    """Puts in neutral attention and records source lines; active while a model is traced.

    A mode does not see calls that functions of torch make themselves, such as those of
    ``multi_head_attention_forward``: for these there is :func:`neutral_attention`.

    Attributes:
        is_in_model: Whether the model's forward runs. Around it torch reads dozens of attributes
            of every parameter, which are let through at once; what a forward calls that is run
            again in the backward is seen like its first run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._user_files: dict[str, str] = {}  # the last part of the name, "" where it isn't one
        self._grouped_mm = grouped_mm_builtin()
        self.is_in_model = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call ``func``, or the neutral operator that stands for it."""
        if not self.is_in_model and getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        source = self._source_line(sys._getframe(1))
        annotate_next_nodes(source=source)
        _refuse_own_generator(source, args, kwargs or {})
        if func is torch.Tensor.random_:
            raise CaptureError(f"Tensor.random_ at {source} can't be traced; use torch.randint")
        if func is _TORCH_ATTENTION:
            return scaled_dot_product_attention(*args, **(kwargs or {}))  # type: ignore[arg-type]
        if func in _RECURRENT:
            return recurrent(func, args, kwargs or {})
        if func is self._grouped_mm:
            product = grouped_mm(*args, **(kwargs or {}))  # type: ignore[arg-type]
            if product is not None:
                return product
        return func(*args, **(kwargs or {}))

    def _source_line(self, frame: FrameType | None) -> str:
        while frame is not None:
            filename = frame.f_code.co_filename
            name = self._user_files.get(filename)
            if name is None:
                name = Path(filename).name if is_user_file(filename) else ""
                self._user_files[filename] = name
            if name:
                return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return ""


@contextlib.contextmanager
def neutral_attention() -> Iterator[None]:
    """``torch.nn.functional`` has the neutral attention while the body runs."""
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _refuse_own_generator(
    source: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    # by their types: isinstance of a generator is a function of torch in Python
    if any(issubclass(type(value), torch.Generator) for value in (*args, *kwargs.values())):
        raise CaptureError(
            f"a random generator of the model's own is used at {source or 'an unknown line'}: its "
            "numbers would depend on the plan; leave generator= out (seed= of autopar.compile() "
            "seeds the run), or draw the numbers outside the model and pass them in"
        )


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` by the neutral operator.

    Leading dims other than (batch, heads) are folded into the batch. ``enable_gqa`` needs nothing:
    the neutral operator reads fewer key heads by itself. Under autocast all operands are cast, as
    torch does on every device.
    """
    query, key, value = (_as_autocast(x) for x in (query, key, value))
    attn_mask = None if attn_mask is None else _as_autocast(attn_mask)
    lead = _shared_shape(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    shared_heads = query.dim() >= 3 and (enable_gqa or query.shape[-3] == key.shape[-3])
    if not shared_heads:  # heads broadcast, or there are none
        lead = _shared_shape(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
        query, key, value = (x.unsqueeze(-3) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = attn_mask.unsqueeze(-3)
    batch = prod(lead)
    q, k, v = (_folded(x, lead, batch) for x in (query, key, value))
    if attn_mask is not None and attn_mask.dim() > 2 and len(lead) != 1:
        if prod(attn_mask.shape[:-3]) > 1:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:])
            attn_mask = attn_mask.reshape(batch, *attn_mask.shape[-3:])
        else:
            attn_mask = attn_mask.reshape(attn_mask.shape[-3:])
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    sizes = [batch, q.shape[1], q.shape[2], k.shape[2]]
    # the random key and the operator's id are put in after tracing
    out: torch.Tensor
    out, _ = torch.ops.autopar.attention(
        q, k, v, attn_mask, None, is_causal, 0, factor, dropout_p, 0, sizes, [0, 0, 0, 0]
    )
    if len(lead) != 1:
        out = out.reshape(*lead, *out.shape[1:])
    return out if shared_heads else out.squeeze(-3)


def _folded(x: torch.Tensor, lead: tuple[int, ...], batch: int) -> torch.Tensor:
    """``x`` with ``lead`` for its leading dims, folded into one; itself where that is what it has.

    What changes nothing would be traced, differentiated and then removed.
    """
    shape = (batch, *x.shape[-3:])
    return x if x.shape == shape else x.expand(*lead, *shape[1:]).reshape(shape)


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """``torch.nn.functional.grouped_mm`` of rows and one matrix per group; None for other forms.

    Autocast on the CPU leaves its operands as they are, so that two dtypes are torch's error.
    """
    is_plain = bias is None and out_dtype in (None, mat_a.dtype) and mat_a.dtype == mat_b.dtype
    if offs is None or not is_plain or (mat_a.dim(), mat_b.dim()) != (2, 3):
        return None
    product: torch.Tensor = torch.ops.autopar.grouped_mm_ends(mat_a, mat_b, offs)
    return product


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype of autocast where it is on; it leaves float64 and what is no float."""
    device = x.device.type
    if not (torch.is_autocast_enabled(device) and x.is_floating_point()):
        return x
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device))


def recurrent(
    func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``, layer by layer if there is dropout.

    Traced as a whole, the dropout between the layers is left out.

    Args:
        func: One of the four.
        args: Tensor, states, weights, then the numbers from ``has_biases`` on.
        kwargs: Those of the numbers that are named.
    """
    names = ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
    numbers = dict(zip(names, args[3:], strict=False)) | dict(kwargs)
    layers, dropout = numbers.get("num_layers"), numbers.get("dropout")
    if isinstance(numbers["has_biases"], Sequence):  # packed: tracing refuses its sizes by itself
        return func(*args, **kwargs)
    assert isinstance(layers, int)
    assert isinstance(dropout, int | float)
    if layers < 2 or not dropout or not numbers["train"]:
        return func(*args, **kwargs)
    numbers.update(num_layers=1, dropout=0.0)
    data, states, weights = args[:3]
    assert isinstance(data, torch.Tensor)
    assert isinstance(weights, Sequence)
    is_pair = isinstance(states, Sequence)
    every: Sequence[torch.Tensor] = states if is_pair else (states,)  # type: ignore[assignment]
    pieces = [state.chunk(layers) for state in every]
    ends: list[Sequence[torch.Tensor]] = []
    size = len(weights) // layers
    for layer in range(layers):
        own = [piece[layer] for piece in pieces]
        part = weights[layer * size : (layer + 1) * size]
        given = data if layer == 0 else functional.dropout(data, dropout)
        found = func(given, own if is_pair else own[0], part, *numbers.values())
        assert isinstance(found, tuple)
        data = found[0]
        ends.append(found[1:])
    return data, *(torch.cat(tensors) for tensors in zip(*ends, strict=True))


def _shared_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    return functools.reduce(broadcast, map(tuple, shapes), ())


@contextlib.contextmanager
def module_scopes(root: torch.nn.Module) -> Iterator[None]:
    """Annotate new fx nodes with the path of the innermost module of ``root`` being called."""
    names = {id(module): name for name, module in reversed(list(root.named_modules()))}
    stack: list[str] = []

    def enter(module: torch.nn.Module, _: object) -> None:
        stack.append(names.get(id(module), stack[-1] if stack else ""))
        annotate_next_nodes(scope=stack[-1])

    def leave(module: torch.nn.Module, _: object, __: object) -> None:
        stack.pop()
        annotate_next_nodes(scope=stack[-1] if stack else "")

    hooks = torch.nn.modules.module
    before = hooks.register_module_forward_pre_hook(enter)
    after = hooks.register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
