"""Freed memory is kept, unless the user says otherwise."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
# blocks of less than 32 MiB are taken and freed again and again; faults are pages mapped anew
SCRIPT = """
import resource
import torch

from autopar.host_memory import keep_freed_memory

print(keep_freed_memory())
faults = []
for _ in range(12):
    blocks = [torch.ones(6_000_000) for _ in range(5)]
    del blocks
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[7])  # once the heap is as large as it gets
"""


def run(**variables: str) -> tuple[bool, int]:
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, sys.path)), **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@GLIBC
def test_memory_that_is_freed_is_not_mapped_again():
    kept, faults = run()
    assert kept
    assert faults < 100


@GLIBC
@pytest.mark.parametrize(
    "variables", [{"AUTOPAR_KEEP_MEMORY": "0"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}]
)
def test_what_the_user_chose_stays(variables):
    kept, _ = run(**variables)
    assert not kept
