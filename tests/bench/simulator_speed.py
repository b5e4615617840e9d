"""CPU seconds of simulations: ``python -m tests.bench.simulator_speed``.

A step of 1,000 pipeline ranks and 64 micro-batches, with and without what makes ranks slow each
other, and its memory over time. Prints a table; nothing is asserted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from autopar.plan.actions import ActionKind
from autopar.plan.schedule import ActionLists, Order, action_lists, compute_order
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.plan.zero_bubble import zero_bubble_h1_order, zero_bubble_v_order
from autopar.units import format_time
from cost_models.lanes import Interference, Lane, links_of_nodes
from cost_models.layer_segments import LayerSeconds, backward_segments, forward_segments
from cost_models.memory_timeline import ProgramMemory, StageMemory, memory_timelines
from cost_models.simulate import StageSeconds, simulate

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
PLAIN = StageSeconds(forward_s=1.0, backward_s=2.0, weight_s=1.0)
COUNT = 64


def lists_of(order: Order, num_stages: int) -> ActionLists:
    """Action lists with messages between neighbours."""
    edges = [(s, s + 1) for s in range(num_stages - 1)]
    return action_lists(
        order,
        MeshShape(pp=num_stages),
        forward_edges=edges,
        backward_edges=[(t, s) for s, t in edges],
    )


def layered() -> StageSeconds:
    """A stage of two layers with collectives inside, gathered and reduced beside compute."""
    layer = LayerSeconds(
        forward_s=0.5, backward_s=1.0, forward_comm_s=0.1, backward_comm_s=0.2,
        gather_s=0.2, reduce_s=0.2,
    )  # fmt: skip
    forward, backward = forward_segments([layer] * 2), backward_segments([layer] * 2)
    return StageSeconds(segments={F: forward, B: backward})


def row(name: str, order: Order, stages: Sequence[StageSeconds], **options: object) -> None:
    """Build, simulate, and print one line."""
    begun = time.process_time()
    lists = lists_of(order, len(stages))
    built = time.process_time()
    result = simulate(lists, stages, p2p_s=0.1, **options)  # type: ignore[arg-type]
    done = time.process_time()
    stage = StageMemory(
        params_bytes=10, saved_bytes=5,
        programs={F: ProgramMemory((1, 9, 2)), B: ProgramMemory((1, 7, -5))},
    )  # fmt: skip
    peak = max(t.peak_bytes for t in memory_timelines(result, [stage] * len(stages)))
    ended = time.process_time()
    sys.stdout.write(
        f"{name:<46} {len(order):>5} {len(result.spans):>9,} {format_time(built - begun):>9} "
        f"{format_time(done - built):>9} {format_time(ended - done):>9} "
        f"{100 * result.bubble_fraction:>7.1f} % {peak:>6}\n"
    )


def main() -> None:
    """The table."""
    head = ("simulation", "ranks", "spans", "lists", "simulate", "memory", "bubbles", "peak")
    line = "{:<46} {:>5} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6}\n"
    sys.stdout.write(line.format(*head))
    one = compute_order(ScheduleKind.ONE_F_ONE_B, 1000, 1, COUNT)
    row("1F1B", one, [PLAIN] * 1000)
    row("GPipe", compute_order(ScheduleKind.GPIPE, 1000, 1, COUNT), [PLAIN] * 1000)
    row("ZB-H1", zero_bubble_h1_order(1000, COUNT), [PLAIN] * 1000)
    row("1F1B, layers, nothing slows", one, [layered()] * 1000)
    slow = Interference.between(compute=1.1, communication=1.3)
    row("1F1B, interference", one, [PLAIN] * 1000, interference=slow)
    nodes = links_of_nodes([rank // 8 for rank in range(1000)], full_speed=1.0)
    row("1F1B, layers, interference, links of 8 ranks", one, [layered()] * 1000,
        interference=slow, links=nodes, p2p_lane=Lane.INTER)  # fmt: skip
    many = compute_order(ScheduleKind.INTERLEAVED, 128, 4, COUNT * 2)
    row("interleaved, 4 stages per rank", many, [PLAIN] * 512)
    row("ZB-V", zero_bubble_v_order(128, 2 * COUNT * 2), [PLAIN] * 256)


if __name__ == "__main__":
    main()
