"""What collectives are for, in few words, from their kind, axis and place in the step."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.plan.types import DP_AXIS, TP_AXIS

_ONCE = "once per step"
_BY_PLACE: Mapping[tuple[str, str, str], str] = {
    ("all_reduce", DP_AXIS, _ONCE): "sums gradients, loss",
    ("reduce_scatter", DP_AXIS, _ONCE): "sums gradients to shards",
    ("all_gather", DP_AXIS, _ONCE): "shards to parameters",
    ("all_reduce", TP_AXIS, _ONCE): "sums whole gradients",
    ("all_gather", TP_AXIS, _ONCE): "changes stored layout",
}
_BY_AXIS: Mapping[tuple[str, str], str] = {
    ("all_reduce", TP_AXIS): "completes sums",
    ("reduce_scatter", TP_AXIS): "completes sums in blocks",
    ("all_gather", TP_AXIS): "makes activations whole",
    ("all_to_all", TP_AXIS): "splits another dim",
    ("all_to_all_rows", TP_AXIS): "rows to their experts",
    ("all_to_all_rows", DP_AXIS): "rows to their experts",
    ("all_to_all", DP_AXIS): "counts rows of experts",
    ("all_reduce", DP_AXIS): "sums over the batch",
    ("all_gather", DP_AXIS): "values of the whole batch",
}


def purpose_of(kind: str, axis: str, where: str) -> str:
    """What a collective does for the step; a dash where that can't be told.

    Args:
        kind: Such as ``"all_reduce"``.
        axis: Mesh axis.
        where: ``"forward"``, ``"backward"`` or ``"once per step"``.
    """
    return _BY_PLACE.get((kind, axis, where), _BY_AXIS.get((kind, axis), "-"))
