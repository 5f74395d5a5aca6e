"""Sizes that were measured: they decide how programs are cut into tiles, never what they compute.

`current()` returns the sizes with which programs are traced and lowered; they are part of JAX's
cache keys. `using` changes them within a context, to measure other sizes or to test small ones.
`python -m experiments.benchmark tune` measures the row of the machine's device and prints it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


__all__ = ["DEFAULT", "TABLE", "Sizes", "Tuning", "current", "device_kind", "sizes", "using"]


class Sizes(NamedTuple):
    """Tile sizes of the pure-JAX implementations, for T queries and S keys on a kind of device.

    A head of at most `max_untiled` pairs is a single tile. Other heads are cut into blocks of
    `small` if one block of queries visits at most `narrow` keys on average, of `largest` if it
    surely visits `wide` or more, else of `large`. Heads of a single tile are computed together, as
    many batch rows at a time as hold about `together` numbers; with `add_masks` their masks are
    added as a bias first, where XLA cannot fuse selections with products; with `widen` their arrays
    are converted to float32 first, where products of narrower numbers are no faster. With `in_turn`
    heads of several tiles run sequentially, where one head alone fills the cores and stays in their
    caches.

    At least `ring_queries` queries, over all heads, and `ring_keys` keys keep the device busy: each
    round of a ring over several devices has at least these.
    """

    max_untiled: int = 256 * 256
    together: int = 2**28
    narrow: int = 1024
    small: int = 128
    large: int = 512
    wide: int = 2048
    largest: int = 512
    add_masks: bool = False
    widen: bool = False
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
        widen=True,
        in_turn=True,
        ring_queries=2**12,
        ring_keys=2**12,
    ),
}
"""The sizes by JAX's name of a device kind ("NVIDIA H200", "TPU v5 lite", "cpu").

Other devices use `DEFAULT`."""


class Tuning(NamedTuple):
    """The sizes of all devices, and a row for all devices in place of the table's."""

    row: Sizes | None = None  # replaces the row of `TABLE`
    max_width: int = 1024  # the most keys in a run of tiles or a wide tile: bounds the memory
    # The longest schedule that is unrolled, in runs; longer ones take memory and time if they run
    # side by side.
    max_unrolled_runs: int = 8
    max_band: int = 256 * 1280  # the most scores of a block of queries in a band
    # The blocks of a band that run together: enough for the cores, few enough for their caches.
    band_blocks: int = 8
    # About the number of scores that are computed together with a normalizer other than softmax.
    row_scores: int = 2**21
    scores_together: int = 2**24  # computed together where heads do not run sequentially
    # About the number of queries and of keys in a tile of additive attention; shorter inputs are
    # one tile.
    additive_tile: int = 128
    # The keys scored at a time in additive attention: t × 16 × A floats live at once.
    additive_keys: int = 16
    additive_pairs: int = 512  # the pairs scored at a time there, if less as queries are few
    # The tokens of a chunk of linear attention: within a third of the fastest at 1,024 tokens on a
    # CPU, for all kinds of decays, forward and backward. Longer sequences have to be measured.
    linear_chunk: int = 64
    linear_tokens: int = 4  # the fewest tokens for the kernel of linear attention on CPUs
    decode_block: int = 512  # the most keys of a cache that are read together
    # In the C++ of the kernel for CPUs: the queries of a tile, the keys of a tile, and the keys
    # whose gradients are summed together. Queries come in whole vectors of at most 16 numbers; the
    # last is a multiple of the second.
    cpu_tiles: str = "64, 128, 1024"
    # The smallest call, in query-key pairs over all heads, for which the kernel for CPUs compiles a
    # mask or a score function.
    generated_pairs: int = 2**20
    # The smallest head, in query-key pairs, for which tiles that bounds leave undecided are
    # evaluated exactly, and the most pairs that are evaluated for that.
    min_exact_pairs: int = 2**20
    max_exact_pairs: int = 2**26
    # The most queries, and the fewest keys, for the CPU kernel that reads each key once for all
    # queries: its time is the time of reading the keys.
    few_queries: int = 8
    many_keys: int = 512
    # The rounds in which heads go around a ring of devices, if not in one; fewer save no memory.
    ring_rounds: int = 4
    ring_chunks: int = 4  # the most chunks in which a shard's keys go around; a power of two
    tpu_tile: tuple[int, int] = (512, 512)  # the most queries and keys of a tile on TPUs
    tpu_decode_block: int = 1024  # the most keys of a cache that the kernel for TPUs reads together
    gpu_pairs: int = 2**20  # the fewest query-key pairs for which the kernels in Pallas are faster
    gpu_programs: int = 256  # the number of programs that keep a GPU busy
    gpu_tiles_each: int = 4  # the tiles of keys that justify a program of their own on a GPU
    # The bytes of keys and values that stay in a GPU's L2 cache beside everything else.
    gpu_cached_bytes: int = 2**24
    # The most entries of a parameter that functions index on a GPU: its gradient's kernel goes over
    # a tile once for each entry. XLA sums the gradients of larger parameters.
    gpu_gathered_entries: int = 512


_current = jax.make_user_context(Tuning())


def current() -> Tuning:
    """Returns the sizes with which programs are traced and lowered."""
    return _current.value


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """A context in which programs are traced and lowered with other sizes: fields of `Tuning`."""
    with _current(current()._replace(**changes)):
        yield


def device_kind(platform: str) -> str:
    """Returns the kind of a platform's devices; the platform itself if this process has none."""
    try:
        return jax.local_devices(backend=platform)[0].device_kind
    except RuntimeError:
        return platform


def sizes(platform: str) -> Sizes:
    """Returns the row for the devices of the platform that a program is lowered for."""
    return current().row or TABLE.get(device_kind(platform), DEFAULT)
