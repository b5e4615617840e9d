"""The table from operator names to rules, and the signature of an operator instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

from autopar.ir.graph import Meta, Node
from autopar.sharding.rules.call import OpCall, Rule
from autopar.sharding.rules.template import template
from autopar.sharding.signature import OpSignature

Memo = MutableMapping[OpCall, OpSignature | None]
"""Signatures by operator instance; owned by the caller, who decides how long it lives."""


class Registry:
    """Rules by operator name.

    Args:
        rules: The rules to start with.
    """

    def __init__(self, rules: Mapping[str, Rule] | None = None) -> None:
        self._rules: dict[str, Rule] = dict(rules or {})

    def __contains__(self, op: str) -> bool:
        """Whether the operator has a rule."""
        return self._find(op) is not None

    def __iter__(self) -> Iterator[str]:
        """Operator names, sorted."""
        return iter(sorted(self._rules))

    def copy(self) -> Registry:
        """A registry that can be changed on its own."""
        return Registry(self._rules)

    def signature(
        self, node: Node, operand_metas: Sequence[Meta], *, memo: Memo | None = None
    ) -> OpSignature | None:
        """Named dims of an operator instance.

        Args:
            node: The operator.
            operand_metas: Meta of each operand, in the order of ``node.refs()``.
            memo: Signatures found earlier; looked up and extended.

        Returns:
            The signature, or None for an operator (or a form of it) without a rule: the caller
            keeps it replicated and reports it. ``"getitem"`` has none: it takes the placement of
            the result that it picks.

        Raises:
            ShardingError: The rule does not fit the call.
        """
        rule = self._find(node.op)
        if rule is None:
            return None
        call = OpCall.of(node, operand_metas)
        if memo is not None and call in memo:
            return memo[call]
        found = rule(call)
        if memo is not None:
            memo[call] = found
        return found

    def _find(self, op: str) -> Rule | None:
        return self._rules.get(_full_name(op))

    def register(
        self, op: str, text: str, *, linear: Sequence[Sequence[int]] = (), padded: str = ""
    ) -> None:
        """Register a rule in its string form; see :mod:`autopar.sharding.rules.template`.

        Args:
            op: Operator name, ``"namespace.name.overload"``; without an overload, ``"default"``.
            text: The rule.
            linear: Groups of argument positions that pass pending sums.
            padded: Names, separated by spaces, of factors whose blocks may be uneven.

        Raises:
            ShardingError: The rule is malformed.
        """
        self.register_rule(op, template(text, linear=linear, padded=padded))

    def register_rule(self, op: str, rule: Rule) -> None:
        """Register a rule function.

        Args:
            op: Operator name, as in :meth:`register`.
            rule: From a call to its signature, or None if this form of the call has none.
        """
        self._rules[_full_name(op)] = rule

    def rule(self, op: str) -> Callable[[Rule], Rule]:
        """Decorator form of :meth:`register_rule`."""

        def add(function: Rule) -> Rule:
            self.register_rule(op, function)
            return function

        return add


def _full_name(op: str) -> str:
    """Name with the overload: a name with one dot means the overload ``default``."""
    return f"{op}.default" if op.count(".") == 1 else op
