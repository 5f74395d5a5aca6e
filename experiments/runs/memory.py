"""Checks whether a model fits into memory, and makes glibc keep freed memory."""

import ctypes
import os

import jax


# From glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
# From Linux's mman.h
_MADV_HUGEPAGE = 14
_LARGE_PAGE = 2**21
_HEAP = 2**30  # bytes of address space; takes memory only once used


def check_fits(parameters: int) -> None:
    """Checks that a CPU's memory holds a model in training: the parameters, their gradients, and
    two numbers of the optimiser for each, in float32.

    Raises:
        ValueError: the memory is too small.
    """
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 4 * 4 * parameters
    if needed > available:
        raise ValueError(
            f"a model of {parameters:,} parameters takes at least {needed / 1e9:,.0f} GB to train, "
            f"and there are {available / 1e9:,.0f} GB"
        )


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for the next allocation, and returns whether that succeeded.

    A training step allocates hundreds of megabytes and frees them at its end. By default they go
    back to the system, which clears them page by page in the next step: a sixth of its time.
    For a gigabyte of heap, `madvise` requests large pages, where Linux leaves that to programs:
    address translation with small pages takes 4 to 9 % of a step. Without glibc nothing changes.
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
    changed = all([mallopt(name, value) for name, value in settings.items()])
    if changed:
        _request_large_pages(libc)
    return changed


def _request_large_pages(libc: ctypes.CDLL) -> None:
    """Grows the heap and requests large pages for it; afterwards the heap is that large and
    empty."""
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = libc.malloc(_HEAP)
    if address is None:
        return
    first = -(-address // _LARGE_PAGE) * _LARGE_PAGE
    libc.madvise(first, _HEAP - _LARGE_PAGE, _MADV_HUGEPAGE)  # harmless if the system refuses
    libc.free(address)
