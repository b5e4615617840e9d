"""Operator rules: from an operator instance to its named dims.

``signature`` looks a node up among the built-in rules and those that the user registered with
``register_op``; ``Registry`` makes tables of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import ShardingError
from autopar.ir.graph import Meta, Node
from autopar.sharding.rules import (
    attention,
    contraction,
    elementwise,
    factories,
    indexing,
    loss,
    moe,
    normalization,
    pooling,
    randomness,
    reduction,
    views,
)
from autopar.sharding.rules.call import Naming, OpCall, Rule
from autopar.sharding.rules.normalization import MICROBATCH_STATISTICS
from autopar.sharding.rules.registry import Memo, Registry
from autopar.sharding.rules.template import Template, template
from autopar.sharding.signature import OpSignature

BUILTIN_RULES: Mapping[str, Rule] = {
    **elementwise.RULES,
    **contraction.RULES,
    **reduction.RULES,
    **normalization.RULES,
    **views.RULES,
    **indexing.RULES,
    **attention.RULES,
    **loss.RULES,
    **moe.RULES,
    **factories.RULES,
    **randomness.RULES,
    **pooling.RULES,
}
"""Every rule that autopar brings, by operator name."""

# The one table that changes after import: operators are registered per process, as torch's are,
# so the rules of a user's own operators are too. `Registry.copy` isolates a test or a tool.
_REGISTRY = Registry(BUILTIN_RULES)


def default_registry() -> Registry:
    """The registry of this process: the built-in rules and the user's."""
    return _REGISTRY


def signature(
    node: Node, operand_metas: Sequence[Meta], *, memo: Memo | None = None
) -> OpSignature | None:
    """Named dims of an operator instance; see :meth:`Registry.signature`."""
    return _REGISTRY.signature(node, operand_metas, memo=memo)


def register_op(
    op: str, text: str, *, linear: Sequence[Sequence[int]] = (), padded: str = ""
) -> None:
    """What stands behind ``autopar.register_op``, without asking torch for the operator.

    Args:
        op: Name, with ``::`` or ``.`` behind the library.
        text: The rule. ``!`` after a name keeps that dim whole, ``+`` says that results without it
            are sums over it, ``a*b`` is a merged dim, ``1`` a broadcast one, ``_`` an operand that
            is no tensor.
        linear: As there.
        padded: As there.

    Raises:
        ShardingError: The rule is malformed, or ``op`` is no name.
    """
    if not isinstance(op, str):
        raise ShardingError(
            f"register_op: {op!r} is no name; write the operator's name, such as 'mylib.scale'"
        )
    _REGISTRY.register(op.replace("::", "."), text, linear=linear, padded=padded)


def register_rule(op: str, rule: Rule) -> None:
    """Register a rule function for a custom operator; see :meth:`Registry.register_rule`."""
    _REGISTRY.register_rule(op, rule)


__all__ = [
    "BUILTIN_RULES",
    "MICROBATCH_STATISTICS",
    "Memo",
    "Naming",
    "OpCall",
    "Registry",
    "Rule",
    "Template",
    "default_registry",
    "register_op",
    "register_rule",
    "signature",
    "template",
]
