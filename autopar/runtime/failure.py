"""One rank's failure ends all ranks, with the first error as the text that people read.

A rank that fails leaves the others inside a collective, where no exception can reach them, for
minutes or for ever. So every rank has a thread that watches a key-value store:

* a rank that raises writes its error under one key; the first writer wins. The others print that
  error and end the process at once (``os._exit``): their main thread may be stuck in a backend;
* every thread counts up its rank's heartbeat. Rank 0 watches all of them, the others watch
  rank 0. A heart that stands still for :data:`SILENCE_S` belongs to a rank that was killed or
  stopped;
* when a rank dies, its peers' collectives raise within milliseconds ("connection closed"). That is
  a consequence, so a rank that sees such an error waits for the cause before it speaks;
* a rank that ends inside a step (``sys.exit``) fails; one that ends between steps while another one
  stays inside a step has left too early, which is found after :data:`ABSENCE_S`, or at once if a
  connection broke;
* a rank whose heart beats but that does not come to a step, or not on in it, stalls. A step that
  lasts longer than the time-out ends all ranks, with where each of them is.

Before a process ends, its thread is stopped. At a normal exit each rank says goodbye. Rank 0 hosts
the store and stays until all others have seen its goodbye, a few seconds at most.

The thread needs the interpreter: a call that holds Python's global lock for longer than
:data:`SILENCE_S` is taken for a death.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from autopar.errors import ConfigError, RankError

POLL_S = 0.4
SILENCE_S = 8.0
SUSPECT_SILENCE_S = 3.0
"""Silence, or absence, that is a failure when a connection has broken as well."""
ABSENCE_S = 60.0
"""How long a rank may be in a step after another one has left; the last stages may end late."""
TIMEOUT_S = 600.0
"""How long a step may last, unless the user says otherwise: others may load data or save."""
TIMEOUT_VARIABLE = "AUTOPAR_TIMEOUT_S"
KNOWN_S = 2.5
GOODBYE_S = 3.0
EXIT_CODE = 1
MAX_TEXT_CHARS = 20_000
_NONE = "-"


class FailFast:
    """The watch of one rank. Start it with :func:`fail_fast`."""

    def __init__(
        self, store: Store, rank: int, world_size: int, *, limit_s: float = TIMEOUT_S
    ) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self.where = "before the first step"
        self.limit_s = limit_s
        self._in_step_since: float | None = None
        self._is_limited = False
        self._reported = threading.Event()
        self._stop = threading.Event()
        self._suspicion = threading.Event()
        self._watched = tuple(r for r in (range(world_size) if rank == 0 else (0,)) if r != rank)
        self._thread = threading.Thread(target=self._watch, name="autopar watch", daemon=True)
        self._previous_hook = sys.excepthook
        self._lock = threading.Lock()
        self._asked_since_s: float | None = None

    def start(self) -> None:
        """Begin to watch."""
        sys.excepthook = self._on_uncaught
        atexit.register(self.close)
        self._thread.start()
        if self.rank != 0:  # rank 0 hosts the store; where that is stopped, no answer comes back
            threading.Thread(target=self._guard, name="autopar guard", daemon=True).start()

    @contextlib.contextmanager
    def step(self, where: str) -> Iterator[None]:
        """Around a step: an exception inside is reported to all ranks.

        Args:
            where: What this rank does, for the message; :attr:`where` may be refined meanwhile.
        """
        self.where, self._is_limited, self._in_step_since = where, True, time.monotonic()
        try:
            yield
        except BaseException as error:  # also sys.exit: the others wait for this rank
            self.report(error)
            raise
        finally:
            self._in_step_since = None
            self.where = f"the time after {where}"

    @contextlib.contextmanager
    def phase(self, where: str) -> Iterator[None]:
        """Around work of any length that needs the others: one that leaves meanwhile is missed.

        An exception inside is the caller's, who may know that every rank raises it.

        Args:
            where: What this rank does, for the message.
        """
        before = self.where
        self.where, self._is_limited, self._in_step_since = where, False, time.monotonic()
        try:
            yield
        except BaseException:
            self._in_step_since = None
            raise
        self._in_step_since, self.where = None, before

    def report(self, error: BaseException) -> None:
        """Tell all ranks; wait until they know, or until it is clear who failed first."""
        if self._reported.is_set() or self._stop.is_set():
            return
        self._reported.set()
        text = "".join(traceback.format_exception(error))[-MAX_TEXT_CHARS:]
        if is_consequence(error):
            # the watch thread ends this process if it learns the cause meanwhile
            self._suspicion.set()
            with contextlib.suppress(RuntimeError), self._lock:
                self._store.set("suspect", str(self.rank))  # rank 0, which watches all, must know
            time.sleep(SILENCE_S + 2 * POLL_S)
        first = self._write(self.rank, f"rank {self.rank} failed at {self.where}:\n{text}")
        if first:
            self._wait_until_known(self.world_size - 1)
        else:
            time.sleep(4 * POLL_S)  # the watch thread prints the first error and exits
        self._stop.set()

    def close(self) -> None:
        """Stop watching, at the end of the process."""
        is_normal = not (self._stop.is_set() or self._reported.is_set())
        self._stop.set()
        sys.excepthook = self._previous_hook
        self._end_thread()
        if not is_normal:
            return
        with contextlib.suppress(RuntimeError), self._lock:
            self._store.set(f"bye/{self.rank}", "1")
            if self.rank != 0:
                self._store.add("farewell", 1)
        if self.rank == 0:
            self._wait_for("farewell", self.world_size - 1, GOODBYE_S)

    def _end_thread(self) -> None:
        """Wait until the thread has ended.

        An interpreter that ends while one of its threads is inside the store aborts the process.
        """
        self._thread.join(timeout=SILENCE_S)
        if self._thread.is_alive():
            sys.stderr.write(
                f"RankError: rank {self.rank} ends while rank 0, which keeps the watch's store, "
                f"has not answered for {SILENCE_S:.0f} s: it was stopped\n"
            )
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(EXIT_CODE)

    # ---------------------------------------------------------------- telling
    def _write(self, origin: int, text: str) -> bool:
        """Write the error of rank ``origin`` unless another rank was first."""
        with self._lock:
            mine = f"{self.rank} {origin}\n{text}"
            try:
                first: bytes = self._store.compare_set("error", _NONE, mine)
                return first == mine.encode()
            except RuntimeError:  # the store is gone, and rank 0 with it
                return False

    def _wait_until_known(self, ranks: int) -> None:
        """Wait until ``ranks`` others have read the error."""
        self._wait_for("known", ranks, KNOWN_S)

    def _wait_for(self, counter: str, least: int, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline_s:
                with self._lock:
                    if self._store.add(counter, 0) >= least:
                        return
                time.sleep(POLL_S / 8)

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._previous_hook(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            self.report(error)

    # ---------------------------------------------------------------- watching
    def _watch(self) -> None:
        beats: dict[int, tuple[bytes, float]] = {}
        left: dict[int, float] = {}
        keys = ["error", "suspect", *(k for r in self._watched for k in (f"beat/{r}", f"bye/{r}"))]
        count = 0
        lost_since_s: float | None = None
        while not self._stop.wait(POLL_S):
            count += 1
            try:
                with self._lock:
                    self._asked_since_s = time.monotonic()
                    self._store.set(f"beat/{self.rank}", f"{count} {self.where}")
                    error, suspect, *signs = self._store.multi_get(keys)
                    self._asked_since_s = None
                lost_since_s = None
            except RuntimeError:
                self._asked_since_s = None
                if 0 in left:  # rank 0 said goodbye; all that can still go wrong is to need it
                    self._judge(0, b"", True, beats, left, time.monotonic())
                    continue
                lost_since_s = lost_since_s or time.monotonic()
                if time.monotonic() - lost_since_s > 2 * POLL_S:
                    self._end(0, "rank 0 is gone: it was killed, or its machine is lost")
                continue
            if error.decode() != _NONE:
                who, _, text = error.decode().partition("\n")
                writer, origin = map(int, who.split())
                if writer == self.rank:
                    continue  # this rank raises it itself
                self._acknowledge()
                self._end(origin, text)
            if suspect.decode() != _NONE:
                self._suspicion.set()
            now_s = time.monotonic()
            self._check_limit(now_s)
            for rank, beat, bye in zip(self._watched, signs[::2], signs[1::2], strict=True):
                self._judge(rank, beat, bye.decode() != _NONE, beats, left, now_s)

    def _judge(
        self, rank: int, beat: bytes, has_left: bool, beats: dict[int, tuple[bytes, float]],
        left: dict[int, float], now_s: float,
    ) -> None:  # fmt: skip
        """Decide whether a rank is dead, or left while this one needs it."""
        if has_left:
            since_s = left.setdefault(rank, now_s)
            begun_s = self._in_step_since
            if self._suspicion.is_set():  # some rank, maybe not this one, needed it
                is_missed = now_s - since_s > SUSPECT_SILENCE_S
            else:
                is_missed = begun_s is not None and now_s - max(since_s, begun_s) > ABSENCE_S
            if is_missed:
                self._declare(rank, f"rank {rank} ended while rank {self.rank} was at {self.where}")
            return
        if rank not in beats or beats[rank][0] != beat:
            beats[rank] = (beat, now_s)
            return
        limit_s = SUSPECT_SILENCE_S if self._suspicion.is_set() else SILENCE_S
        silence_s = now_s - beats[rank][1]
        if silence_s > limit_s:
            self._declare(
                rank, f"rank {rank} has been silent for {silence_s:.0f} s: it was killed or stopped"
            )

    def _check_limit(self, now_s: float) -> None:
        """End all ranks if this one has been in a step for too long."""
        begun_s = self._in_step_since
        limit_s = max(self.limit_s, SILENCE_S + 2 * POLL_S)  # a death has a text of its own
        if begun_s is None or not self._is_limited or now_s - begun_s <= limit_s:
            return
        try:
            with self._lock:
                beats = self._store.multi_get([f"beat/{r}" for r in range(self.world_size)])
                byes = self._store.multi_get([f"bye/{r}" for r in range(self.world_size)])
        except RuntimeError:
            return  # rank 0 is gone, which has its own text
        here = f"is at {self.where}"
        places = [f"is at {b.decode().partition(' ')[2] or 'the start'}" for b in beats]
        places[self.rank] = here
        places = [
            "has ended" if b.decode() != _NONE else p for b, p in zip(byes, places, strict=True)
        ]
        odd = [r for r, place in enumerate(places) if place != here]
        where = "; ".join(f"rank {r} {place}" for r, place in enumerate(places))
        self._declare(
            odd[0] if odd else self.rank,
            f"{self.where} of rank {self.rank} has not ended for {now_s - begun_s:.0f} s: {where}. "
            f"Set timeout_s= of autopar.compile(), or {TIMEOUT_VARIABLE}, if ranks may be that far "
            "apart",
        )

    def _declare(self, rank: int, text: str) -> None:
        if self._write(rank, text):
            self._wait_until_known(self.world_size - 2)  # the dead don't read
            self._end(rank, text)
        elif rank == 0:
            self._end(rank, text)  # rank 0 has the store: nobody else can be told

    def _guard(self) -> None:
        """Notice that the store does not answer."""
        while not self._stop.wait(POLL_S):
            since_s = self._asked_since_s
            if since_s is not None and time.monotonic() - since_s > SILENCE_S:
                self._end(0, f"rank 0 has not answered for {SILENCE_S:.0f} s: it was stopped")

    def _acknowledge(self) -> None:
        with contextlib.suppress(RuntimeError), self._lock:
            self._store.add("known", 1)
        if self.rank == 0:  # the store dies with this process: let the others read first
            self._wait_until_known(self.world_size - 1)
            time.sleep(POLL_S / 2)

    def _end(self, origin: int, text: str) -> None:
        """Print the first error and end this process, whatever its main thread does."""
        if self._stop.is_set():
            return
        message = RankError(f"rank {self.rank} ends because of rank {origin}. {text}")
        sys.stderr.write(f"{type(message).__name__}: {message}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(EXIT_CODE)


def is_consequence(error: BaseException) -> bool:
    """Whether an error is likely the echo of another rank's death: a backend lost its peer."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "broken pipe", "timed out waiting")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def fail_fast(*, timeout_s: float = 60.0) -> FailFast:
    """Start to watch; every rank of the world calls it once, after init_process_group.

    Args:
        timeout_s: How long to wait for the other ranks here.

    Raises:
        ConfigError: The environment's time-out for steps is no number above 0.
    """
    limit_s = _limit_from_environment()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    host = os.environ.get("MASTER_ADDR", "localhost")
    port: list[object] = [0]
    if rank == 0:
        store = _store(host, 0, is_master=True, timeout_s=timeout_s)
        store.set("error", _NONE)
        store.set("suspect", _NONE)
        for other in range(world_size):
            store.set(f"beat/{other}", "0")
            store.set(f"bye/{other}", _NONE)
        port = [store.port]
    dist.broadcast_object_list(port, src=0)
    if rank != 0:
        store = _store(host, int(str(port[0])), is_master=False, timeout_s=timeout_s)
    watch = FailFast(store, rank, world_size, limit_s=limit_s)
    watch.start()
    return watch


def _limit_from_environment() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT_S))
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise ConfigError(f"{TIMEOUT_VARIABLE}={text!r}: give seconds above 0, such as 600")
    return limit_s


def _store(host: str, port: int, *, is_master: bool, timeout_s: float) -> TCPStore:
    """A store of our own: the one of torch.distributed is busy with rendezvous."""
    return TCPStore(
        host,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
