"""A second simulator, slow and of another make, for comparison: exact fractions, no event queue.

All tasks are laid out first, each with the tasks that have to end before it. Then time goes from
one end to the next; at each the rates of all that runs are worked out from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from autopar.plan.actions import ActionKind as K
from cost_models.lanes import Lane, Segment

READS = {K.FORWARD: "F", K.BACKWARD: "B", K.BACKWARD_INPUT: "B"}
SENDS = {K.SEND_F: "F", K.SEND_B: "B"}
RECEIVES = {K.RECV_F: "F", K.RECV_B: "B"}


@dataclass(eq=False)
class Job:
    name: tuple
    seconds: Fraction
    medium: Lane
    devices: set
    sender: int
    after: list
    before_in_lane: Job | None
    start: Fraction | None = None
    end: Fraction | None = None
    left: Fraction = Fraction(0)


def jobs_of(lists, stages, p2p_s, p2p_lane):
    """Every task, with what has to end before it; messages that are read are filled in later."""
    rank_of = {a.stage: r for r, row in enumerate(lists) for a in row}
    jobs, lane_tail, by_message, reads = [], {}, {}, []

    def add(lane, name, seconds, medium, devices, sender, after):
        job = Job(
            name, Fraction(seconds), medium, devices, sender, list(after), lane_tail.get(lane)
        )
        lane_tail[lane] = job
        jobs.append(job)
        return job

    for rank, row in enumerate(lists):
        gates, posted, labelled = [], [], {}
        for action in row:
            if action.kind in RECEIVES:
                key = (action.peer, action.stage, RECEIVES[action.kind], action.microbatch)
                posted.append(key)
                continue
            if action.kind in SENDS:
                to = rank_of[action.peer]
                job = add(
                    ("message", rank, to), (rank, f"send {rank}>{to}", str(action), ""),
                    p2p_s, p2p_lane, {rank, to}, rank, gates,
                )  # fmt: skip
                key = (action.stage, action.peer, SENDS[action.kind], action.microbatch)
                by_message[key] = job
                continue
            mine = [
                key
                for key in posted
                if key[1] == action.stage
                and key[2] == READS.get(action.kind)
                and key[3] == action.microbatch
            ]
            stage = stages[action.stage]
            parts = stage.segments.get(action.kind) or [
                Segment(lane=Lane.COMPUTE, seconds=stage.of(action.kind))
            ]
            waits_for = []
            for part in parts:
                for label in part.joins:
                    with_mb = (action.stage, label, action.microbatch)
                    gates = [*gates, labelled.get(with_mb) or labelled[action.stage, label, None]]
                job = add(
                    (rank, part.lane), (rank, part.lane, str(action), part.label),
                    part.seconds, part.lane, {rank}, rank, gates,
                )  # fmt: skip
                waits_for.append(job)
                if part.overlaps:
                    labelled[action.stage, part.label, action.microbatch] = job
                else:
                    gates = [*gates, job]
            # a part is issued only after the messages have come, and so is all that follows it
            reads += [(job, key) for job in waits_for for key in mine]
            if mine:
                gates = [*gates, _Message(mine)]
    for job, key in reads:
        job.after.append(by_message[key])
    for job in jobs:
        for gate in [g for g in job.after if isinstance(g, _Message)]:
            job.after.remove(gate)
            job.after += [by_message[key] for key in gate.keys]
    return jobs


@dataclass(eq=False)
class _Message:
    keys: list


def brute_force(lists, stages, *, p2p_s=0, p2p_lane=Lane.INTER, factors=None, links=()):
    """(Rank, lane, action, label) -> (start, end) of each time it happens, as fractions."""
    jobs = jobs_of(lists, stages, p2p_s, p2p_lane)
    now, running, waiting = Fraction(0), [], list(jobs)
    while waiting or running:
        ready = [
            job
            for job in waiting
            if all(other.end is not None for other in job.after)
            and (job.before_in_lane is None or job.before_in_lane.end is not None)
        ]
        for job in ready:
            job.start, job.left = now, job.seconds
        waiting = [job for job in waiting if job.start is None]
        running += ready
        assert running, "stuck"
        rates = {job: _rate(job, running, factors or {}, links) for job in running}
        step = min(job.left / rates[job] for job in running)
        now += step
        for job in running:
            job.left -= step * rates[job]
            if job.left == 0:
                job.end = now
        running = [job for job in running if job.end is None]
    times = {}
    for job in jobs:  # those of one rank are in order
        times.setdefault(job.name, []).append((job.start, job.end))
    return times


def _rate(job, running, factors, links):
    rate = Fraction(1)
    for link in links:
        if job.medium is link.lane and job.sender in link.ranks:
            users = [o for o in running if o.medium is link.lane and o.sender in link.ranks]
            rate = min(rate, Fraction(link.full_speed) / len(users))
    slowest = Fraction(1)
    for device in job.devices:
        busy = {o.medium for o in running if device in o.devices} - {job.medium}
        product = Fraction(1)
        for lane in busy:
            product *= Fraction(factors.get((job.medium, lane), 1))
        slowest = max(slowest, product)
    return rate / slowest
