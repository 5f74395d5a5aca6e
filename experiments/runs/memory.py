"""Whether a model fits into memory, and what the process does with memory that it has freed."""

import ctypes
import os

import jax


# Of glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
# Of Linux's mman.h
_MADV_HUGEPAGE = 14
_LARGE_PAGE = 2**21
_HEAP = 2**30  # bytes; addresses only, until they are used


def check_fits(parameters: int) -> None:
    """Makes sure that the machine's memory holds a model that is trained on it: its parameters,
    their gradients, and two numbers of the optimiser's for each.

    Raises:
        ValueError: it does not.
    """
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 4 * 4 * parameters
    if needed > there:
        raise ValueError(
            f"a model of {parameters:,} parameters takes at least {needed / 1e9:,.0f} GB to train, "
            f"and there are {there / 1e9:,.0f} GB"
        )


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory for the next allocation, and returns whether it did.

    A training step works in hundreds of megabytes that are freed at its end. By default they go
    back to the system, which clears them page by page in the next step: a sixth of its time.
    A gigabyte of them is asked for in large pages, where Linux leaves that to programs: looking up
    small ones takes 4 to 9 % of a step. Elsewhere than on glibc nothing is changed.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = {
        _ARENA_MAX: 1,  # other arenas cannot hold large blocks
        _MMAP_MAX: 0,
        _TRIM_THRESHOLD: 2**31 - 1,
        _TOP_PAD: 2**26,
    }
    kept = all([mallopt(name, value) for name, value in settings.items()])
    if kept:
        _ask_for_large_pages(libc)
    return kept


def _ask_for_large_pages(libc: ctypes.CDLL) -> None:
    """Grows the heap and names its pages; the heap is as large afterwards, and empty."""
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    place = libc.malloc(_HEAP)
    if place is None:
        return
    first = -(-place // _LARGE_PAGE) * _LARGE_PAGE
    libc.madvise(first, _HEAP - _LARGE_PAGE, _MADV_HUGEPAGE)  # a wish: refused, nothing changes
    libc.free(place)
