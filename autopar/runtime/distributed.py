"""Answer a rank's requests with ``torch.distributed``.

Collectives are issued asynchronously and waited for at their first use (the executor does that).
Gathers and scatters along a dim other than the first move that dim to the front, since the backends
move contiguous blocks. Operands are not overwritten but for those that are given: an all_reduce
works on a copy of others.

Messages are sent asynchronously; the tensor is held until it has left. NCCL can tell when, gloo
can't but by waiting, so that with gloo a thread waits.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import PassError
from autopar.runtime.collective_math import filled_up, pad, resolve
from autopar.runtime.driving import drive
from autopar.runtime.groups import ProcessGroups
from autopar.runtime.requests import Collective, PostRecv, Request, Send, WaitRecv, WaitSends

T = TypeVar("T")
CLOSING_S = 5.0
"""How long the end of a process waits for sends that are on their way."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _Work(Protocol):
    """What asynchronous operations of torch.distributed return."""

    def wait(self) -> bool: ...
    def is_completed(self) -> bool: ...


@dataclass(slots=True)
class _Pending:
    """A collective on its way; its operand is held until it is done."""

    work: _Work | None
    operand: torch.Tensor | None
    finish: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        """Block until it is done and give the result, once: nothing of it is kept alive here.

        The backend's handle holds operand and result, and this object lives until the next request
        (the interpreter keeps what it sends into a generator).
        """
        if self.work is None:
            raise PassError("a collective was waited for twice")
        self.work.wait()
        self.work = self.operand = None
        result, self.finish = self.finish(), _handed_out
        return result


def _handed_out() -> torch.Tensor:
    raise PassError("a collective was waited for twice")


@dataclass(slots=True)
class _Receive:
    """A message on its way; it is handed out once, as a collective's result is."""

    work: _Work | None
    tensor: torch.Tensor | None

    def wait(self) -> torch.Tensor:
        """Block until it has arrived and give it."""
        work, tensor = self.work, self.tensor
        if work is None or tensor is None:
            raise PassError("a receive was waited for twice")
        work.wait()
        self.work = self.tensor = None
        return tensor


class Driver:
    """Runs generators of requests on this rank's process groups."""

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._sends = _WaitingThread() if groups.backend == "gloo" else _Polling()

    def run(self, running: Generator[Request, object, T]) -> T:
        """Run a generator to its end and give what it returns."""
        return drive(running, self._answer)

    def close(self) -> None:
        """Stop the helper thread, if there is one."""
        self._sends.close()

    def _answer(self, request: Request) -> object:
        match request:
            case Collective():
                return self._collective(request)
            case Send():
                work = dist.isend(
                    request.tensor, request.peer, group=self._pair(request.peer, sends=True)
                )
                self._sends.hold(_started(work), request.tensor)
                return None
            case PostRecv():
                tensor = torch.empty(request.shape, dtype=request.dtype, device=self._device)
                work = dist.irecv(tensor, request.peer, group=self._pair(request.peer, sends=False))
                return _Receive(_started(work), tensor)
            case WaitRecv(ticket=_Receive() as receive):
                return receive
            case WaitSends():
                self._sends.wait_all()
                return None
        raise PassError(f"unknown request {request!r}")

    def _pair(self, peer: int, *, sends: bool) -> dist.ProcessGroup | None:
        if not self._groups.pairs:
            return None
        rank = self._groups.rank
        return self._groups.pairs[(rank, peer) if sends else (peer, rank)]

    # ---------------------------------------------------------------- collectives
    def _collective(self, request: Collective) -> torch.Tensor | _Pending:
        group = self._groups.axes[request.axis]
        count = group.size()
        if count == 1:
            return resolve([request])[0]
        match request.kind:
            case "all_reduce":
                return _all_reduce(request, group)
            case "all_gather":
                return _all_gather(request, group, count)
            case "reduce_scatter":
                if self._groups.backend == "gloo" and request.is_given:
                    return _reduce_and_keep_own(request, group, count)
                return _reduce_scatter(request, group, count)
            case "all_to_all":
                return _all_to_all(request, group, count)
            case "all_to_all_rows":
                return _all_to_all_rows(request, group, count)
            case "broadcast":
                root = dist.get_global_rank(group, request.root)
                value = request.tensor
                work = dist.broadcast(value, root, group=group, async_op=True)
                return _Pending(_started(work), value, lambda: value)
        raise PassError(f"collective of unknown kind {request.kind!r} at {request.node}")


def _all_reduce(request: Collective, group: dist.ProcessGroup) -> _Pending:
    result = request.tensor
    if not (request.is_given and result.is_contiguous()):
        result = result.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(result, _OPS[request.op], group=group, async_op=True)
    return _Pending(_started(work), result, lambda: result)


def _all_gather(request: Collective, group: dist.ProcessGroup, count: int) -> _Pending:
    dim, size = request.dim, request.out_size
    block = request.tensor.movedim(dim, 0).contiguous()
    gathered = block.new_empty((count * block.shape[0], *block.shape[1:]))
    gather = _newest("all_gather_single", "all_gather_into_tensor")
    work = gather(gathered, block, group=group, async_op=True)
    return _Pending(
        _started(work), block, lambda: gathered.narrow(0, 0, size).movedim(0, dim).contiguous()
    )


def _reduce_scatter(request: Collective, group: dist.ProcessGroup, count: int) -> _Pending:
    dim = request.dim
    whole = pad(request.tensor, dim, count).movedim(dim, 0).contiguous()
    block = whole.new_empty((whole.shape[0] // count, *whole.shape[1:]))
    scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
    work = scatter(block, whole, _OPS[request.op], group=group, async_op=True)
    return _Pending(_started(work), whole, lambda: block.movedim(0, dim).contiguous())


def _reduce_and_keep_own(request: Collective, group: dist.ProcessGroup, count: int) -> _Pending:
    """A reduce-scatter as gloo does it (torch 2.13), by an all-reduce; here of the operand."""
    dim = request.dim
    whole = pad(request.tensor, dim, count).movedim(dim, 0).contiguous()
    work = dist.all_reduce(whole, _OPS[request.op], group=group, async_op=True)
    own = whole.chunk(count)[dist.get_rank(group)]
    return _Pending(
        _started(work),
        whole,
        lambda: own.movedim(0, dim).clone(memory_format=torch.contiguous_format),
    )


def _all_to_all(request: Collective, group: dist.ProcessGroup, count: int) -> _Pending:
    gather, scatter, size = request.dim, request.scatter_dim, request.out_size
    out = pad(request.tensor, scatter, count).movedim(scatter, 0).contiguous()
    arrived = torch.empty_like(out)
    work = dist.all_to_all_single(arrived, out, group=group, async_op=True)

    def finish() -> torch.Tensor:
        blocks = [b.movedim(0, scatter) for b in arrived.chunk(count, 0)]
        return torch.cat(blocks, gather).narrow(gather, 0, size)

    return _Pending(_started(work), out, finish)


def _all_to_all_rows(request: Collective, group: dist.ProcessGroup, count: int) -> _Pending:
    go, come = request.row_counts(count)
    out = request.tensor[: sum(go)].contiguous()
    arrived = out.new_empty((sum(come), *out.shape[1:]))
    work = dist.all_to_all_single(arrived, out, come, go, group=group, async_op=True)
    return _Pending(_started(work), out, lambda: filled_up(arrived, request.out_size))


def _newest(name: str, older: str) -> Callable[..., _Work | None]:
    """A function of torch.distributed under its new name, or its old one before torch 2.13."""
    found: Callable[..., _Work | None] = getattr(dist, name, None) or getattr(dist, older)
    return found


def _started(work: _Work | None) -> _Work:
    if work is None:
        raise PassError("this rank is not in the group that it was asked to talk to")
    return work


class _Polling:
    """Holds tensors until their sends are done, asking the backend."""

    def __init__(self) -> None:
        self._held: deque[tuple[_Work, torch.Tensor]] = deque()

    def hold(self, work: _Work, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` until ``work`` is done."""
        while self._held and self._held[0][0].is_completed():
            self._held.popleft()
        self._held.append((work, tensor))

    def wait_all(self) -> None:
        """Wait for all of them."""
        while self._held:
            self._held.popleft()[0].wait()

    def close(self) -> None:
        """Nothing to stop."""


class _WaitingThread:
    """Holds tensors until their sends are done, with a thread that waits for each in turn."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[_Work, torch.Tensor] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open = 0
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def hold(self, work: _Work, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` until ``work`` is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="autopar sends", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        with self._changed:
            self._open += 1
        self._queue.put((work, tensor))

    def wait_all(self) -> None:
        """Wait for all of them, and raise what went wrong."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0 or self._error is not None)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """End the thread.

        An interpreter that ends while a thread is inside a backend aborts the process. A send that
        nobody receives ends when its peer does, which a failing rank has waited for.
        """
        if self._thread is None:
            return
        atexit.unregister(self.close)
        self._queue.put(None)
        self._thread.join(timeout=CLOSING_S)
        self._thread = None

    def _wait(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                item[0].wait()
            except RuntimeError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            item = None  # the tensor is free now, not when the next send comes
            with self._changed:
                self._open -= 1
                self._changed.notify_all()
