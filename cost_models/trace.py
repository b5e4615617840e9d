"""A simulated step as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A pipeline rank is a process, a lane a thread of it; a device's bytes are a counter beside them.
Times are microseconds, as the format has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeAlias

from autopar.errors import ConfigError
from autopar.plan.types import MemoryParts
from cost_models.lanes import Lane
from cost_models.memory_timeline import MemoryTimeline
from cost_models.spans import Simulation, Span
from cost_models.whole_step import Remainder

Event: TypeAlias = dict[str, object]

_LANE_WORDS = {
    Lane.COMPUTE: "compute",
    Lane.INTRA: "collectives inside a node",
    Lane.INTER: "collectives between nodes",
    Lane.COPY: "host copies",
}
_MICROSECONDS = 1e6


def trace_events(
    simulation: Simulation,
    memory: Sequence[MemoryTimeline] = (),
    *,
    rank_words: Callable[[int], str] = "pipeline rank {}".format,
    remainders: Sequence[Remainder] = (),
) -> list[Event]:
    """The events of a step.

    Args:
        simulation: The step.
        memory: Memory over time, for counters.
        rank_words: Name of a pipeline rank.
        remainders: What else the step takes, on a thread of its own.

    Returns:
        Names of processes and threads (phase ``M``), one complete event (``X``) for each span that
        takes time and each remainder, and counters (``C``) of bytes by part.
    """
    events: list[Event] = []
    for rank in range(simulation.num_ranks):
        own = [s for s in simulation.by_rank[rank] if s.rank == rank and s.end_s > s.start_s]
        threads = _threads(own)
        events.append(_name("process_name", rank, 0, name=rank_words(rank)))
        events.append(_name("process_sort_index", rank, 0, sort_index=rank))
        for lane, thread in threads.items():
            words = _LANE_WORDS.get(Lane(lane), lane) if lane in tuple(Lane) else lane
            events.append(_name("thread_name", rank, thread, name=words))
            events.append(_name("thread_sort_index", rank, thread, sort_index=thread))
        events += [_complete(span, threads[span.lane]) for span in own]
        rest = [part for part in remainders if part.rank == rank]
        if rest:
            thread = max(threads.values(), default=-1) + 1
            events.append(_name("thread_name", rank, thread, name="outside of the programs"))
            events.append(_name("thread_sort_index", rank, thread, sort_index=thread))
            events += [_remainder(part, thread) for part in rest]
    for timeline in memory:
        events += _counters(timeline)
    return events


def write_trace(path: str | Path, events: Sequence[Event]) -> None:
    """Write events as a trace file.

    Args:
        path: The file; overwritten.
        events: From :func:`trace_events`.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}, allow_nan=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"trace: {path} can't be written ({error.strerror}); choose a file in a folder that "
            "exists"
        ) from error


def _threads(spans: Sequence[Span]) -> dict[str, int]:
    """Thread of each lane of a rank: the device's own lanes first, then queues of messages."""
    lanes = [str(lane) for lane in Lane]
    queues = sorted({s.lane for s in spans if s.lane not in lanes}, key=lambda q: (len(q), q))
    used = {s.lane for s in spans}
    return {lane: n for n, lane in enumerate([*lanes, *queues]) if lane in used}


def _name(kind: str, rank: int, thread: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}


def _complete(span: Span, thread: int) -> Event:
    action = span.action
    args: dict[str, object] = {"stage": action.stage, "action": action.kind.name.lower()}
    if action.microbatch is not None:
        args["micro-batch"] = action.microbatch
    if action.peer is not None:
        args["peer stage"] = action.peer
    if span.overlaps:
        args["overlaps"] = True
    return {
        "ph": "X",
        "name": f"{action} {span.label}".rstrip(),
        "cat": "message" if span.peer is not None else str(span.lane),
        "pid": span.rank,
        "tid": thread,
        "ts": span.start_s * _MICROSECONDS,
        "dur": span.duration_s * _MICROSECONDS,
        "args": args,
    }


def _remainder(part: Remainder, thread: int) -> Event:
    return {
        "ph": "X",
        "name": part.words,
        "cat": "remainder",
        "pid": part.rank,
        "tid": thread,
        "ts": part.start_s * _MICROSECONDS,
        "dur": (part.end_s - part.start_s) * _MICROSECONDS,
        "args": {},
    }


def _counters(timeline: MemoryTimeline) -> Iterator[Event]:
    """One counter whose parts are drawn on top of each other.

    What a backward has freed before its end is taken off the saved values, since a counter's part
    cannot be drawn below 0.
    """
    names = [f.name for f in fields(MemoryParts)]
    for point in timeline.points:
        sizes = {name.removesuffix("_bytes"): getattr(point.parts, name) for name in names}
        if sizes["transient"] < 0:
            sizes["activations"] += sizes["transient"]
            sizes["transient"] = 0
        yield {
            "ph": "C",
            "name": "bytes",
            "pid": timeline.rank,
            "tid": 0,
            "ts": point.second * _MICROSECONDS,
            "args": sizes,
        }
