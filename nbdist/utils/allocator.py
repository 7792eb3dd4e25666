"""The C allocator of a worker: keep freed memory during a cell, return it at the cell's end.

XLA and TensorFlow allocate the temporary arrays of a step anew in each step. By default, glibc
returns large blocks to Linux as soon as they are freed. The next step then takes a page fault for
every 4 kB, a quarter of the time of some steps on CPUs (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import os

# glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8

_PAD_BYTES = 64 << 20
"""Size by which the heap grows."""

_MOST_KEPT_BYTES = 256 << 20
"""Free memory that stays in the process between cells."""

_USERS_CHOICE = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Prefixes of the environment variables by which a user selects or configures an allocator."""


class _Usage(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory, in this process and in those forked from it.

    Call it before other threads start: it limits the process to one heap, since only the main heap
    can keep blocks above 64 MB. It does nothing with another C library, or if the user has
    configured an allocator by environment variables.
    """
    library = _library()
    if library is None or any(name.startswith(_USERS_CHOICE) for name in os.environ):
        return
    library.mallopt(_ARENA_MAX, 1)
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    library.mallopt(_TOP_PAD, _PAD_BYTES)


def return_freed_memory() -> None:
    """Return free memory to Linux if there is more than 256 MB of it."""
    library = _library()
    if library is not None and library.mallinfo2().fordblks > _MOST_KEPT_BYTES:
        library.malloc_trim(ctypes.c_size_t(0))


def _library() -> ctypes.CDLL | None:
    """Return the C library if it is glibc 2.33 or later."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _Usage
    return library
