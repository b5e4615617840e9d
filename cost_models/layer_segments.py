"""Forwards and backwards of a stage as segments, from the seconds of its layers.

A layer computes, with collectives inside that it waits for (tensor parallelism). Beside that,
parameters that are sharded at rest (ZeRO-3, FSDP) are gathered some layers ahead, and gradients are
reduced while the layers before compute their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import ConfigError
from cost_models.lanes import Lane, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer on one micro-batch, and of what goes on beside it.

    Attributes:
        forward_s: Compute of its forward.
        backward_s: Compute of its backward, recomputed operators included.
        forward_comm_s: Collectives inside the forward, which it waits for.
        backward_comm_s: Those inside the backward.
        gather_s: Gathering its parameters; 0 if they are whole.
        reduce_s: Reducing its gradients; 0 if they are not reduced with it.
        name: Of the layer, for labels.
    """

    forward_s: float
    backward_s: float
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    name: str = ""


def forward_segments(
    layers: Sequence[LayerSeconds],
    *,
    comm_lane: Lane = Lane.INTRA,
    gather_lane: Lane = Lane.INTER,
    gathers_ahead: int = 1,
) -> list[Segment]:
    """The forward of a stage on one micro-batch.

    Args:
        layers: In order.
        comm_lane: Of the collectives inside layers.
        gather_lane: Of gathering.
        gathers_ahead: Layers whose parameters may be gathered while one computes; 0 gathers each
            when the layer before it has ended, and hides nothing.
    """
    return _passed(
        [(f"{n} {layer.name}".rstrip(), layer) for n, layer in enumerate(layers)],
        comm_lane, gather_lane, gathers_ahead, is_backward=False,
    )  # fmt: skip


def backward_segments(
    layers: Sequence[LayerSeconds],
    *,
    comm_lane: Lane = Lane.INTRA,
    gather_lane: Lane = Lane.INTER,
    reduce_lane: Lane = Lane.INTER,
    gathers_ahead: int = 1,
    reduces: bool = True,
    regathers: bool = True,
) -> list[Segment]:
    """The backward of a stage on one micro-batch; the last layer comes first.

    Args:
        layers: In the order of the forward.
        comm_lane: Of the collectives inside layers.
        gather_lane: Of gathering.
        reduce_lane: Of reducing gradients: each layer's enters it when its backward has ended, and
            overlaps with what follows.
        gathers_ahead: As of :func:`forward_segments`.
        reduces: Whether this micro-batch's backward reduces: with gradients that are summed over
            micro-batches first only the last one's does.
        regathers: Whether parameters were freed after the forward.
    """
    turned = [(f"{n} {layer.name}".rstrip(), layer) for n, layer in enumerate(layers)][::-1]
    return _passed(
        turned, comm_lane, gather_lane, gathers_ahead,
        is_backward=True, reduce_lane=reduce_lane if reduces else None, regathers=regathers,
    )  # fmt: skip


def _passed(
    layers: Sequence[tuple[str, LayerSeconds]],
    comm_lane: Lane,
    gather_lane: Lane,
    gathers_ahead: int,
    *,
    is_backward: bool,
    reduce_lane: Lane | None = None,
    regathers: bool = True,
) -> list[Segment]:
    if gathers_ahead < 0:
        raise ConfigError(f"gathers_ahead is {gathers_ahead}, must be at least 0")
    gathers = [
        Segment(lane=gather_lane, seconds=layer.gather_s, label=f"gather {name}", overlaps=True)
        if layer.gather_s > 0 and regathers
        else None
        for name, layer in layers
    ]
    found: list[Segment] = [g for g in gathers[:gathers_ahead] if g is not None]
    for position, (name, layer) in enumerate(layers):
        ahead = gathers[position + gathers_ahead : position + gathers_ahead + 1]
        found += [g for g in ahead if g is not None]
        gather = gathers[position]
        seconds = layer.backward_s if is_backward else layer.forward_s
        joins = (gather.label,) if gather is not None else ()
        found.append(Segment(lane=Lane.COMPUTE, seconds=seconds, label=name, joins=joins))
        comm_s = layer.backward_comm_s if is_backward else layer.forward_comm_s
        if comm_s > 0:
            found.append(Segment(lane=comm_lane, seconds=comm_s, label=f"collectives {name}"))
        if reduce_lane is not None and layer.reduce_s > 0:
            found.append(
                Segment(
                    lane=reduce_lane, seconds=layer.reduce_s, label=f"reduce {name}", overlaps=True
                )
            )
    return found
