"""Sizes that were measured: how programs are cut, never what they give.

`current()` is what programs are traced and lowered with, and a part of JAX's keys of what it has
compiled. `using` changes it within a context, to measure other sizes or to test small ones. Rows by
device are made by `python -m experiments.benchmark tune`, which prints that of the machine.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


__all__ = ["DEFAULT", "TABLE", "Sizes", "Tuning", "current", "device_kind", "sizes", "using"]


class Sizes(NamedTuple):
    """How the implementations in pure JAX cut a head of T queries and S keys on a kind of device.

    A head of at most `max_untiled` pairs is a single tile. Others are cut into blocks of `small`
    where one block of queries visits at most `narrow` keys on average, of `largest` where it surely
    visits `wide` or more, else of `large`. Heads of a single tile are taken together, as many batch
    rows at a time as hold about `together` numbers; with `add_masks` their masks are first added,
    where XLA cannot fuse selections with products. With `in_turn` heads of several tiles run one
    after another, where one alone fills the cores and stays in their caches.

    At least `ring_queries` queries, in all heads together, and `ring_keys` keys keep the device
    busy: a round of a ring over several devices has as many.
    """

    max_untiled: int = 256 * 256
    together: int = 2**28
    narrow: int = 1024
    small: int = 128
    large: int = 512
    wide: int = 2048
    largest: int = 512
    add_masks: bool = False
    in_turn: bool = False
    ring_queries: int = 2**14
    ring_keys: int = 2**13


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
        add_masks=True,
        in_turn=True,
        ring_queries=2**12,
        ring_keys=2**12,
    ),
}
"""By device kind as JAX spells it ("NVIDIA H200", "TPU v5 lite", "cpu"); `DEFAULT` for others."""


class Tuning(NamedTuple):
    """The sizes of all devices, and a row for all devices in place of the table's.

    row: in place of `TABLE`.
    max_width: keys in a run of tiles or in a wide tile, at most: they bound the memory.
    max_written_out: the longest schedule that is unrolled run by run, in runs. Side by side, more
        of them take memory and time.
    max_band: scores of a block of queries in a band, at most.
    band_blocks: blocks of a band that run together: enough for the cores, few enough for their
        caches.
    scores_together: scores that are computed together where heads are not run in turn.
    additive_tile: queries and keys of a tile of additive attention, about; shorter inputs are one.
    additive_keys: keys scored at a time in additive attention: t × 16 × A floats live at once.
    additive_pairs: pairs scored at a time there, if those are fewer because queries are few.
    decode_block: keys of a cache that are read together, at most.
    cpu_tiles: in the C++ of the kernel for CPUs, the queries of a tile, the keys of a tile, and the
        keys whose gradients are summed together. Queries come in whole vectors of at most 16
        numbers; the last is a multiple of the second.
    generated_pairs: so many pairs of queries and keys, in all heads, are worth compiling a mask or
        a score function for the kernel for CPUs.
    looked_at: pairs of a head from which on tiles that bounds leave undecided are looked at, and
        the most pairs that are.
    few_queries: at most so many queries go to the kernel on CPUs that reads each key once for all.
    many_keys: at least so many keys, too: the time of that kernel is that of reading the keys.
    ring_rounds: rounds in which heads go round a ring of devices, if not in one; fewer than these
        save no memory.
    ring_chunks: chunks of a shard's keys that go round one after another, at most; a power of two.
    tpu_tile: queries and keys of a tile of the kernel for TPUs, at most.
    tpu_decode_block: keys of a cache that the kernel for TPUs reads together, at most.
    gpu_programs: programs that keep a GPU busy.
    gpu_tiles_each: tiles of keys that are worth a program of their own on a GPU.
    gpu_cached_bytes: keys and values that the second cache of a GPU keeps beside everything else.
    gpu_gathered_entries: entries of a parameter that functions index on a GPU, at most: its
        gradient's kernel goes over a tile once for each. XLA sums those of larger ones.
    """

    row: Sizes | None = None
    max_width: int = 1024
    max_written_out: int = 8
    max_band: int = 256 * 1280
    band_blocks: int = 8
    scores_together: int = 2**24
    additive_tile: int = 128
    additive_keys: int = 16
    additive_pairs: int = 512
    decode_block: int = 512
    cpu_tiles: str = "64, 128, 1024"
    generated_pairs: int = 2**20
    looked_at: tuple[int, int] = (2**20, 2**26)
    few_queries: int = 8
    many_keys: int = 512
    ring_rounds: int = 4
    ring_chunks: int = 4
    tpu_tile: tuple[int, int] = (512, 512)
    tpu_decode_block: int = 1024
    gpu_programs: int = 256
    gpu_tiles_each: int = 4
    gpu_cached_bytes: int = 2**24
    gpu_gathered_entries: int = 512


_current = jax.make_user_context(Tuning())


def current() -> Tuning:
    """What programs are traced and lowered with now."""
    return _current.value


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """A context in which programs are traced and lowered with other sizes: fields of `Tuning`."""
    with _current(current()._replace(**changes)):
        yield


def device_kind(platform: str) -> str:
    """The kind of the devices of a platform; the platform itself where this process has none."""
    try:
        return jax.local_devices(backend=platform)[0].device_kind
    except RuntimeError:
        return platform


def sizes(platform: str) -> Sizes:
    """The row for the devices of a platform that a program is lowered for."""
    return current().row or TABLE.get(device_kind(platform), DEFAULT)
