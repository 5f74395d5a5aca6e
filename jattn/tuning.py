"""Sizes that measured fastest, by kind of device.

The rows are made by `python -m experiments.benchmark tune`, which measures on the machine it runs
on and prints its row.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Sizes(NamedTuple):
    """How the blockwise implementation cuts a head of T queries and S keys.

    A head of at most `max_untiled` pairs is a single tile. Others are cut into blocks of `small`
    where one block of queries visits at most `narrow` keys on average, of `largest` where it surely
    visits `wide` or more, else of `large`. Heads of a single tile are taken together, as many batch
    rows at a time as hold about `together` numbers.
    """

    max_untiled: int = 256 * 256
    together: int = 2**28
    narrow: int = 1024
    small: int = 128
    large: int = 512
    wide: int = 2048
    largest: int = 512


DEFAULT = Sizes()

TABLE: dict[str, Sizes] = {
    "cpu": Sizes(
        max_untiled=256 * 256,
        together=3_200_000,
        narrow=1024,
        small=128,
        large=512,
        wide=2048,
        largest=1024,
    ),
}
"""By device kind as JAX spells it ("NVIDIA H200", "TPU v5 lite", "cpu"); `DEFAULT` for others."""

# Sizes below are the same for all devices. They are looked up when a program is lowered.

WIDEST = 1024
"""Keys in a run of tiles or in a wide tile at most: they bound the memory."""

WRITTEN_OUT = 8
"""The longest program that is written out run by run. Side by side, more runs take memory and
time."""

BAND = 256 * 1280
"""Scores of a block of queries in a band, at most."""

BAND_BLOCKS = 8
"""Blocks of a band that run together: enough for the cores, few enough for their caches."""

SCORES_TOGETHER = 2**24
"""Scores that are computed together where heads are not run one after another."""

ADDITIVE_TILE = 128
"""Queries and keys of a tile of additive attention, about; shorter inputs are one tile."""

ADDITIVE_KEYS = 16
"""Keys scored at a time in additive attention: t × 16 × A floats live at once."""

ADDITIVE_PAIRS = 512
"""Pairs scored at a time there, if those are fewer because queries are few."""

DECODE_BLOCK = 512
"""Keys of a cache that are read together, at most."""

CPU_TILES = "64, 128, 512"
"""In the C++ of the kernel for CPUs: queries of a tile, keys of a tile, and keys whose gradients
are summed together. Queries come in whole vectors of at most 16 numbers; the last is a multiple of
the second."""

FEW_QUERIES = 8
"""At most so many queries go to the kernel on CPUs that reads each key once for all of them."""

MANY_KEYS = 512
"""At least so many keys, too: the time of that kernel is that of reading the keys."""

SPLASH_BLOCK = 512
"""Queries and keys of a tile of the kernel for TPUs, at most."""

GPU_PROGRAMS = 256
"""Programs that keep a GPU busy."""

GPU_TILES_EACH = 4
"""Tiles of keys that are worth a program of their own on a GPU."""

GPU_LOOKUP_ENTRIES = 512
"""Entries of a parameter that is looked up on a GPU, at most: its gradient's kernel goes over a
tile once for each. XLA sums those of larger ones."""

_tried: list[Sizes] = []


def device_kind(platform: str) -> str:
    """The kind of the devices of a platform; the platform itself where this process has none."""
    try:
        return jax.local_devices(backend=platform)[0].device_kind
    except RuntimeError:
        return platform


def sizes(platform: str) -> Sizes:
    """The row for the devices of a platform that a program is lowered for."""
    return _tried[-1] if _tried else TABLE.get(device_kind(platform), DEFAULT)


@contextlib.contextmanager
def trying(row: Sizes) -> Iterator[None]:
    """A context in which programs are lowered with the sizes of this row; for measuring it."""
    _tried.append(row)
    try:
        yield
    finally:
        _tried.pop()
