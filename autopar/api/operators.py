"""``autopar.register_op``: a rule for an operator of the user's, which torch must know."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from autopar.errors import ConfigError
from autopar.sharding import rules
from autopar.torch_compat import operator_names

_PLAIN = ".default"


def register_op(
    op: str, text: str, *, linear: Sequence[Sequence[int]] = (), padded: str = ""
) -> None:
    """Say how a custom operator may be split, in every process and before compiling.

    Such as ``register_op("mylib.scale", "(b, h), (h) -> (b, h)", linear=[(0,), (1,)])``: one list
    of dim names per operand and result. A backward operator needs a rule of its own.

    Args:
        op: Name, ``"mylib.scale"`` or ``"mylib::scale"`` for ``torch.ops.mylib.scale``;
            ``".default"`` or another overload may follow. It must be defined by now.
        text: The rule; its signs are in :func:`autopar.sharding.rules.register_op`.
        linear: Groups of argument positions that the operator is linear in, so that sums still to
            be completed may pass it.
        padded: Names, separated by spaces, of dims whose blocks may be uneven.

    Raises:
        ConfigError: torch knows no such operator.
        ShardingError: The rule is malformed, or ``op`` is no name.
    """
    if "." in str(op).replace("::", "."):  # what is no name at all is refused below
        _check_known(str(op))
    rules.register_op(op, text, linear=linear, padded=padded)


def _check_known(op: str) -> None:
    namespace, _, rest = op.replace("::", ".").partition(".")
    name = f"{namespace}::{rest.removesuffix(_PLAIN)}"
    known = operator_names()
    if name in known:
        return
    mine = [other for other in known if other.startswith(f"{namespace}::")]
    close = difflib.get_close_matches(name, mine or known, n=1, cutoff=0.0 if mine else 0.6)
    hint = f"did you mean {close[0].replace('::', '.')!r}? " if close else ""
    raise ConfigError(
        f"register_op: torch knows no operator {op!r}; {hint}Import the library that "
        "defines it before its rule is registered"
    )
