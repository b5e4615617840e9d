"""Published formulas of saved bytes per layer, compared with what captured blocks save."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from math import isfinite

from autopar.validation.blocks import PieceKey, piece_of
from autopar.validation.errors import SkipRecord
from autopar.validation.family import ALL_REGIONS
from autopar.validation.models import BlockShape
from autopar.validation.probes import Part

# The layer on which formulas are evaluated: Korthikanti et al.'s 22B model over 8 ranks.
REFERENCE = BlockShape(
    arch="gpt", hidden=6144, heads=64, kv_heads=64, ffn=24576, vocab=1, seq=2048, batch=4,
    explicit_attention=True, dropout=0.1,
)  # fmt: skip
REFERENCE_TP = 8
# Name of a table row -> (tp, sequence parallel, recompute)
ROWS: Mapping[str, tuple[int, bool, str]] = {
    "no_parallelism": (1, False, "none"),
    "tp": (REFERENCE_TP, False, "none"),
    "tp_sp": (REFERENCE_TP, True, "none"),
    "tp_selective": (REFERENCE_TP, False, "selective"),
    "tp_sp_selective": (REFERENCE_TP, True, "selective"),
    "full_recompute": (1, False, "full"),
}
_OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def evaluate(formula: str, values: Mapping[str, float]) -> float:
    """Value of a formula of ``+ - * /``, numbers and names.

    Raises:
        SkipRecord: It holds something else, or a name without a value.

    >>> evaluate("s*b*(10+24/t)", {"s": 2, "b": 3, "t": 8})
    78.0
    """
    try:
        return _value(ast.parse(formula, mode="eval").body, values)
    # null bytes, nesting too deep for the parser, 1/0
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise SkipRecord(f"formula {formula[:60]!r} can't be read ({error})") from error


def _value(node: ast.AST, values: Mapping[str, float]) -> float:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id in values:
        return float(values[node.id])
    raise SkipRecord(f"formula has {ast.dump(node)}, which has no value here")


def compare(formulas: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """(predicted, published) saved bytes of the reference layer by table row.

    Raises:
        SkipRecord: No row is known.
    """
    shape = REFERENCE
    values = {
        "s": shape.seq, "b": shape.batch, "h": shape.hidden, "a": shape.heads, "t": REFERENCE_TP,
    }  # fmt: skip
    found: dict[str, tuple[float, float]] = {}
    for name, formula in formulas.items():
        if name not in ROWS:
            continue
        tp, sequence_parallel, recompute = ROWS[name]
        piece = piece_of(
            PieceKey(
                part=Part.BLOCK,
                shape=shape,
                tp=tp,
                sequence_parallel=sequence_parallel,
                fused=ALL_REGIONS,
                recompute="none" if recompute == "full" else recompute,
            )
        )
        saved = piece.input_bytes if recompute == "full" else piece.saved_bytes
        published = evaluate(formula, values)
        if not (isfinite(published) and published > 0):
            raise SkipRecord(f"measured.bytes_per_layer {name} is {published}, must be above 0")
        found[name] = (saved, published)
    if not found:
        raise SkipRecord(f"measured.bytes_per_layer has no row of {', '.join(ROWS)}")
    return found
