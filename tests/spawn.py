"""Start several processes that talk over gloo, with a time-out, and leave none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class RankResult:
    """How one process ended.

    Attributes:
        code: Exit code; negative for a signal; None if it was killed at the end.
        output: What it wrote to standard output.
        errors: What it wrote to standard error.
        time_s: When it ended, in seconds after the start of all.
        left_behind: Whether a child of it lives on after ``settle_s``.
    """

    code: int | None
    output: str
    errors: str
    time_s: float
    left_behind: bool = False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    world_size: int,
    script: str | Path,
    *,
    timeout_s: float = 60.0,
    args: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    wait_for: int | None = None,
    settle_s: float = 0.0,
) -> list[RankResult]:
    """Run a script in ``world_size`` processes and wait for all of them.

    Every process has the variables that torchrun would set, one thread, and the repository on its
    path. After the time-out all that still run are killed, with their children.

    Args:
        world_size: Processes.
        script: A file, or the text of a program.
        timeout_s: For all of them together.
        args: Command-line arguments.
        env: More environment variables.
        wait_for: Kill the rest once this many have ended; all must end if None.
        settle_s: How long children of ranks that have ended may take to end too.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = script if isinstance(script, Path) else Path(folder) / "script.py"
        if not isinstance(script, Path):
            file.write_text(script)
        port = free_port()
        started_s = time.monotonic()
        outs = [(Path(folder) / f"{r}.out", Path(folder) / f"{r}.err") for r in range(world_size)]
        processes = []
        for rank, (out, err) in enumerate(outs):
            variables = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "PYTHONUNBUFFERED": "1", **(env or {}),
            }  # fmt: skip
            with out.open("w") as out_file, err.open("w") as err_file:
                command = [sys.executable, str(file), *args]
                processes.append(
                    subprocess.Popen(command, stdout=out_file, stderr=err_file, env=variables,
                                     cwd=ROOT, start_new_session=True)
                )  # fmt: skip
        try:
            ended = _wait(processes, started_s, timeout_s, wait_for or world_size)
            behind = _left_behind(processes, ended, settle_s)
        finally:
            for process in processes:
                _kill(process)
        return [
            RankResult(code, out.read_text(), err.read_text(), at_s, left)
            for (code, at_s), (out, err), left in zip(ended, outs, behind, strict=True)
        ]


def _wait(
    processes: list[subprocess.Popen[bytes]], started_s: float, timeout_s: float, wait_for: int
) -> list[tuple[int | None, float]]:
    ended: dict[int, tuple[int | None, float]] = {}
    while len(ended) < wait_for:
        now_s = time.monotonic() - started_s
        for index, process in enumerate(processes):
            if index not in ended and process.poll() is not None:
                ended[index] = (process.returncode, now_s)
        if now_s > timeout_s:
            break
        time.sleep(0.02)
    return [ended.get(i, (None, timeout_s)) for i in range(len(processes))]


def _left_behind(
    processes: list[subprocess.Popen[bytes]],
    ended: list[tuple[int | None, float]],
    settle_s: float,
) -> list[bool]:
    """Whether the session of a process that has ended still has members."""

    def lives(process: subprocess.Popen[bytes]) -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    deadline_s = time.monotonic() + settle_s
    while True:
        found = [
            code is not None and lives(p) for p, (code, _) in zip(processes, ended, strict=True)
        ]
        if not any(found) or time.monotonic() >= deadline_s:
            return found
        time.sleep(0.05)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything in its session; those that it left behind too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
