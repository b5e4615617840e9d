"""Memory of the host that a step frees is kept for the next one.

The C library gives large blocks, and what is free at the end of its heap, back to the system. A
training step frees all its activations and takes as much again a moment later; every page of it
then has to be mapped and cleared anew, which takes longer than much of the arithmetic. Allocators
of accelerators keep what is freed for the same reason.

Source: glibc's manual, "Malloc Tunable Parameters" (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD); PyTorch's
tuning guide, "Switch memory allocator".
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

from autopar.units import MIB

KEEP_VARIABLE = "AUTOPAR_KEEP_MEMORY"
"""``0`` leaves the C library's allocator as it is."""
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "LD_PRELOAD")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt
_MOST_KEPT_BYTES = 2**31 - 1  # mallopt takes an int
_MOST_MMAP_BYTES = 32 * MIB  # glibc refuses more


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep what this process frees; once, and for the whole process.

    Blocks of more than 32 MiB are given back all the same.

    Returns:
        Whether it does now. It is left as it is where it is not glibc's, where the user has set
        the same things (or preloads another allocator), and under ``AUTOPAR_KEEP_MEMORY=0``.
    """
    if platform.libc_ver()[0] != "glibc" or os.environ.get(KEEP_VARIABLE) == "0":
        return False
    if any(os.environ.get(name) for name in _USERS) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    wanted = ((_MMAP_THRESHOLD, _MOST_MMAP_BYTES), (_TRIM_THRESHOLD, _MOST_KEPT_BYTES))
    return all(mallopt(name, value) == 1 for name, value in wanted)
