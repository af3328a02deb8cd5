"""Options of the C library's memory allocator, where it is glibc's."""

import ctypes
import os
import sys

MAX_ARENAS = 2
"""By default glibc gives 8 arenas per core to threads, and each keeps freed memory: a server would grow."""
_OPTIONS = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_MMAP_MAX_": -4,
    "MALLOC_ARENA_MAX": -8,
}
"""Parameters of mallopt (malloc.h) by the environment variable that sets the same."""


def limit_arenas() -> None:
    """Give all threads `MAX_ARENAS` arenas, so that memory that one has freed serves the others."""
    _set(MALLOC_ARENA_MAX=MAX_ARENAS)


def keep_freed_memory() -> None:
    """Keep freed blocks for the next ones of the process.

    Otherwise glibc returns the large blocks of every training step to the kernel, which clears each page
    again in the next step: 7 % of a step's time in a stage of `configs/dit_pretrain.yaml` on two cores.
    """
    _set(MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_=-1, MALLOC_TOP_PAD_=2**28)  # -1: never


def trim() -> None:
    """Return freed memory to the kernel, where the C library can."""
    if sys.platform.startswith("linux") and (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        malloc_trim(0)


def _set(**options: int) -> None:
    """Set options, except those that the user has set by an environment variable."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl does not
    for name, value in options.items():
        if mallopt is not None and name not in os.environ:
            mallopt(_OPTIONS[name], value)
