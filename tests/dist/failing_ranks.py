"""Fail in the way that the first argument says, on the rank that the second one says."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from autopar.runtime.failure import fail_fast


def main(how: str, failing: int) -> None:
    dist.init_process_group("gloo")
    watch = fail_fast()
    rank = dist.get_rank()
    value = torch.ones(3)
    with watch.step("step 0"):
        dist.all_reduce(value)
    if how == "normal":
        time.sleep(1.5 if rank == failing else 0.0)
        return
    if rank == failing and how == "uncaught":
        raise ValueError("the data loader broke")
    with watch.step("step 1"):
        if rank == failing:
            match how:
                case "raise":
                    raise ValueError("a wrong number")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "exit":
                    sys.exit(0)
        dist.all_reduce(value)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
