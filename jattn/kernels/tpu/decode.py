"""Attention of a few queries to a cache on TPUs: pages are read in place, without a gather.

One program visits a list of blocks of keys. The list is copied into scalar memory before the
program begins; it holds, for each batch row, the blocks that the mask does not empty, so that a
short row takes few steps. While one block is computed, the pages of the next are copied into the
core's memory. The key heads of a page are contiguous, and are copied together. The ideas are those
of PagedAttention (Kwon et al. 2023), Flash-Decoding (Dao et al. 2023) and the ragged paged
attention of vLLM's backend for TPUs.

The queries of a group's heads are the rows of one product with their key head; the scores of each
head come from `jattn.tile`.

Masked values must not change results: a block whose weighted values are not all finite is computed
again, with 0 in place of NaN and infinities.

The numbers of quantised caches are copied unchanged, and converted to the query's dtype one head of
a block at a time. Their scales multiply products and weights.

On a CPU the same kernel is interpreted. It compiles for TPUs, and has not run on one.
"""

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from jattn import masks, tuning
from jattn._types import Ref, Tree
from jattn.cache import Cache, Quantized
from jattn.cache.quantized import LARGEST
from jattn.call import Call
from jattn.kernels.common import block_mask, few_queries, slicing, tile_schedule
from jattn.kernels.protocol import Reader
from jattn.kernels.tpu import operands, programs
from jattn.kernels.tpu.operands import LANES, TileIndex, round_up
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling


_SUBLANES = 8  # rows of a register of 32-bit numbers
_MOST_SCALARS = 3 * 2**16  # numbers in scalar memory: three quarters of it
_BLOCK_BYTES = 2**21  # the most bytes of keys and values in a block of more than 128 keys
_MOST_BYTES = 14 * 2**20  # of a core's memory


class Layout(NamedTuple):
    """The sizes with which a call is computed.

    T, S: the numbers of queries, in whole registers, and of slots of the cache, in whole blocks.
    block: the slots of a step.
    piece: the slots of a copy, contiguous in a page.
    page: the slots of a page.
    axes: the axes of the slots in a block of keys and in a block of values: 0 for `[slots, H]`, 1
        for `[H, slots]`. If H leaves lanes of registers empty and a page does not, XLA lays out
        slots along the lanes.
    block_bytes: the bytes of a block of keys and values and their scales.
    """

    T: int
    S: int
    block: int
    piece: int
    page: int
    axes: tuple[int, ...]
    block_bytes: int

    @classmethod
    def of(cls, shapes: Shapes, pools: Sequence[Array]) -> "Layout | None":
        """Returns the layout for pages of numbers; None if they are not whole registers."""
        page, item, sizes = pools[0].shape[2], pools[0].dtype.itemsize, [x.shape[3] for x in pools]
        sublanes = 4 * _SUBLANES // item
        axes = tuple(int(x % LANES > 0 and page % LANES == 0) for x in sizes)
        widths = (round_up(x, (LANES, sublanes)[axis]) for x, axis in zip(sizes, axes, strict=True))
        slot_bytes = shapes.K * sum(widths) * item
        least = max((sublanes, LANES)[axis] for axis in axes)
        most = min(tuning.current().tpu_decode_block, max(_BLOCK_BYTES // slot_bytes, LANES))
        lengths = range(least, min(page, most) + 1, least)
        pieces = [x for x in lengths if page % x == 0 and math.lcm(x, LANES) <= most]
        if not pieces or page % least:
            return None
        whole = math.lcm(pieces[-1], LANES)
        block = min(most // whole * whole, round_up(shapes.S, whole))
        T, S = round_up(shapes.T, _SUBLANES), round_up(shapes.S, block)
        slot_bytes += 8 * round_up(shapes.K, _SUBLANES)
        return cls(T, S, block, pieces[-1], page, axes, block * slot_bytes)

    @property
    def pieces(self) -> int:
        """The number of pieces of a batch row."""
        return self.S // self.piece

    @property
    def pieces_of_block(self) -> int:
        return self.block // self.piece

    @property
    def pieces_of_page(self) -> int:
        return self.page // self.piece

    def operands(self, spec: Spec) -> operands.SpecOperands:
        """Returns the operands of a spec, whose arrays are padded to whole tiles. The padded
        queries are not used."""
        padded = slicing.pad_arrays(spec, self.T, self.S)
        return operands.SpecOperands(padded, Tiling(self.T, self.block), every_head=True)


def unreadable(platform: str, call: Call, cache: Cache) -> str | None:
    """Returns why a cache cannot be read in place for a call that `tiled` supports; None if it
    can."""
    spec, shapes = call.spec, call.shapes
    if reason := few_queries.unsupported(spec, shapes):
        return reason
    if 0 in (shapes.B, shapes.T):
        return "there are no queries"
    key, value = cache.keys.dtype, cache.values.dtype
    if key != value or key not in (shapes.dtype, *LARGEST):
        return f"expected a cache of {shapes.dtype} or a quantised one, got {key} and {value}"
    layout = Layout.of(shapes, _numbers(cache))
    if layout is None:
        return f"pages of {cache.keys.shape[2]} keys of {key} are no whole registers"
    return _memory_reason(spec, shapes, layout)


def _numbers(cache: Cache) -> list[Array]:
    """Returns the pages of keys and of values, without scales."""
    return [x.numbers if isinstance(x, Quantized) else x for x in (cache.keys, cache.values)]


def _converted(stored: Array, axis: int, dtype: Any) -> Array:
    """Converts numbers of a cache to a dtype that represents all of them; `axis` is that of slots.

    Bytes of dtype uint8 hold two numbers of int4.
    """
    if stored.dtype == dtype:
        return stored
    if stored.dtype == jnp.uint8:
        wide = stored.astype(jnp.int32)
        stored = jnp.concatenate([wide << 28 >> 28, wide << 24 >> 28], axis=1 - axis)
    return stored.astype(jnp.float32).astype(dtype)


def _memory_reason(spec: Spec, shapes: Shapes, layout: Layout) -> str | None:
    """Returns which memory of a core a step does not fit into; None if it fits."""
    spec_operands = layout.operands(spec)
    lists = shapes.B * (layout.pieces + 3 * (layout.S // layout.block))
    if lists + spec_operands.scalar_entries > _MOST_SCALARS:
        return f"lists of {lists} pages and blocks do not fit into scalar memory"
    # Operands, results and sums are there twice, for a step and the next.
    widths = sum(round_up(x, LANES) for x in (shapes.H, 2 * shapes.V, LANES, LANES))
    entries = shapes.N * layout.T * widths + spec_operands.block_entries
    if 2 * (4 * entries + layout.block_bytes) > _MOST_BYTES:
        return f"{shapes.T} queries of {shapes.N} heads do not fit into a core's memory"
    return None


class Steps(NamedTuple):
    """The steps of the program, in scalar memory within a kernel.

    rows, blocks, kinds: the batch row, the block and its kind of tile, for each step. A batch row
        without keys has one empty step.
    places: the place in the pool of each piece of each batch row; −1 if it is not read.
    count: the number of steps `[1]`.
    """

    rows: Tree
    blocks: Tree
    kinds: Any
    places: Any
    count: Any

    @classmethod
    def of(
        cls, spec: Spec, shapes: Shapes, layout: Layout, table: Int[Array, "B M"], pages: int
    ) -> "Steps":
        """Returns the steps for a pool of `pages` pages; entries of the table that are not smaller
        stand for no page."""
        B, blocks = shapes.B, layout.S // layout.block
        tiles = block_mask.kinds(spec, shapes.T, layout.S, Tiling(shapes.T, layout.piece))
        tiles = jnp.asarray(tiles)[:, :, 0]
        some, every = jnp.any(tiles, axis=1), jnp.all(tiles == masks.FULL, axis=1)
        places = jnp.where(some, _places(layout, table, pages), -1)

        def by_block(x: Array) -> Array:
            return x.reshape(-1, blocks, layout.pieces_of_block)

        kinds = jnp.any(by_block(some), axis=2).astype(jnp.int32)
        kinds += jnp.all(by_block(every), axis=2).astype(jnp.int32)
        kinds = jnp.broadcast_to(kinds, (B, blocks))
        first = jnp.arange(blocks, dtype=jnp.int32)[None, :] == 0
        wanted = (kinds != masks.EMPTY) | first & ~jnp.any(kinds, axis=1, keepdims=True)
        (order,), count = tile_schedule.where_true(jnp, wanted.reshape(1, -1))
        number = jnp.int32(blocks)
        rows, own_blocks = lax.div(order, number), lax.rem(order, number)
        return cls(rows, own_blocks, kinds.reshape(-1)[order], places.reshape(-1), count)


def _places(layout: Layout, table: Array, pages: int) -> Int[Array, "B n"]:
    """Returns the place in the pool, counted in pieces, of each piece of a batch row."""
    inside = jnp.arange(layout.pieces_of_page, dtype=jnp.int32)[None, None, :]
    table = table.astype(jnp.int32)[:, :, None]
    places = jnp.where(table < pages, table * layout.pieces_of_page + inside, -1)
    places = places.reshape(table.shape[0], -1)
    missing = layout.pieces - places.shape[1]
    return jnp.pad(places, ((0, 0), (0, missing)), constant_values=-1)


class _Buffers(NamedTuple):
    """The buffers in the core's memory, for the current and the next step.

    blocks: keys `[2, K, block, H]`, or in the layout's order, and values.
    sums: the sums of each row after a step, `[2, K, R, ·]` as in `programs.no_keys`.
    """

    blocks: Ref
    semaphores: Ref
    sums: Ref

    @classmethod
    def shapes(cls, kernel: "_Kernel", pools: Sequence[Array]) -> list[Any]:
        pltpu = importlib.import_module("jax.experimental.pallas.tpu")
        K, V, block = kernel.shapes.K, kernel.shapes.V, kernel.layout.block
        sizes = [
            (x.shape[2], block) if axis else (block, x.shape[3])
            for x, axis in zip(pools, kernel.layout.axes, strict=True)
        ]
        blocks = (pltpu.VMEM((2, K, *x), pools[0].dtype) for x in sizes)
        sums = (pltpu.VMEM((2, K, kernel.rows, x), jnp.float32) for x in (1, 1, V))
        return [*blocks, pltpu.SemaphoreType.DMA((2, 2)), *sums]


class _Kernel(NamedTuple):
    """The kernel of a call."""

    spec: Spec
    shapes: Shapes
    layout: Layout
    spec_operands: operands.SpecOperands

    @property
    def rows(self) -> int:
        """The number of rows of a product: the queries of all heads of a group."""
        return self.shapes.G * self.layout.T

    def __call__(
        self, steps: Steps, leaves: Ref, arrays: Ref, results: Ref, buffers: _Buffers
    ) -> None:
        step, last = pl.program_id(0), steps.count[0] - 1
        slot, b = lax.rem(step, jnp.int32(2)), steps.rows[step]
        copy = functools.partial(self._copy, steps, arrays[1:3], buffers)

        def finish_head(kv: Array, _: Array) -> int:
            safe_factor = programs.overflow_safe_factor(self.layout.S)
            maximum, total, weighted = (x[slot, kv] for x in buffers.sums)
            out, *columns = programs.all_keys(maximum, total, weighted, safe_factor)
            results[0][kv] = out
            for result, column in zip(results[1:], columns, strict=True):
                result[kv] = operands.row(column)
            return 0

        @pl.when(step == 0)
        def _first() -> None:
            # Slots that no copy reaches are masked. They should be finite, or their blocks are
            # computed twice.
            values = buffers.blocks[1]
            values[...] = jnp.zeros_like(values)
            copy("start", step, slot)

        @pl.when(step < last)
        def _ahead() -> None:
            copy("start", step + 1, 1 - slot)

        @pl.when((step == 0) | (steps.rows[jnp.maximum(step - 1, 0)] != b))
        def _begin() -> None:
            no_keys = programs.no_keys(self.rows, self.shapes.V)
            for sums, (_, value) in zip(buffers.sums, no_keys, strict=True):
                sums[...] = jnp.full(sums.shape, value, jnp.float32)

        copy("wait", step, slot)
        for kind in (masks.MIXED, masks.FULL):

            @pl.when(steps.kinds[step] == kind)
            def _visit(masked: bool = kind == masks.MIXED) -> None:
                at = TileIndex(b, 0, 0, steps.blocks[step])
                refs = leaves, arrays, buffers
                is_finite = self._visit(refs, slot, at, masked, exact=False)

                @pl.when(jnp.logical_not(is_finite))
                def _again() -> None:
                    self._visit(refs, slot, at, True, exact=True)

        @pl.when((step == last) | (steps.rows[jnp.minimum(step + 1, last)] != b))
        def _end() -> None:
            tile_schedule.repeat(0, self.shapes.K, finish_head, 0)

    def _visit(self, refs: Tree, slot: Array, at: TileIndex, masked: bool, exact: bool) -> Array:
        """Adds a block to the sums; returns whether all its weighted values are finite."""
        leaves, (query, _, _, *scales), buffers = refs
        of_keys, of_values = self.layout.axes
        blocks = [*zip(buffers.blocks, self.layout.axes, strict=True)]

        def add_head(kv: Array, marks: Array) -> Array:
            k, v = (_converted(x[slot, kv], axis, query.dtype) for x, axis in blocks)
            products = programs.dot(query[kv], k, (1, 1 - of_keys), self.spec)
            factors = programs.overflow_safe_factor(self.layout.S)
            if scales:  # products are NaN if the scale of a value is not finite
                key_scales, value_scales = (x[pl.ds(kv, 1)] for x in scales)
                products *= key_scales + (value_scales - value_scales)
                factors *= programs.finite(self.spec, value_scales)
            if exact:  # NaN for keys whose values are not finite
                wide = v.astype(jnp.float32)
                ones = jnp.ones((self.rows, self.shapes.V), v.dtype)
                zero_or_nan = (wide - wide).astype(v.dtype)
                products += programs.dot(ones, zero_or_nan, (1, 1 - of_values), self.spec)
                v = programs.finite(self.spec, v)
            score = self._modified(leaves, kv, at, products, masked)
            maximum, total, weighted = (x[1 - slot, kv] for x in buffers.sums)
            weights, factor, maximum, total = programs.more_keys(score, maximum, total)
            part = programs.dot(weights * factors, v, (1, of_values), self.spec)
            values = maximum, total, weighted * factor + part
            for sums, value in zip(buffers.sums, values, strict=True):
                sums[slot, kv] = value
            return marks + (part - part)  # NaN if the part is not finite

        marks = jnp.zeros((self.rows, self.shapes.V), jnp.float32)
        return jnp.sum(tile_schedule.repeat(0, self.shapes.K, add_head, marks)) == 0

    def _modified(
        self, leaves: Ref, kv: Array, at: TileIndex, products: Array, masked: bool
    ) -> Array:
        """Computes the scores `[R, block]` of a group, whose heads may differ in mask and score."""
        scores = []
        for g in range(self.shapes.G):
            head = at._replace(h=kv * self.shapes.G + g)
            part = products[g * self.layout.T : (g + 1) * self.layout.T]
            modify = lambda tile, x: tile.modify(x, masked)  # noqa: E731
            score = self.spec_operands.run(leaves, head, modify, part)
            scores.append(jnp.broadcast_to(score, part.shape))
        return jnp.concatenate(scores, axis=0)

    def _copy(
        self, steps: Steps, pools: Tree, buffers: _Buffers, action: str, step: Array, slot: Array
    ) -> None:
        """Starts the copies of a step's keys and values into a slot, or waits for them: `action`
        is "start" or "wait"."""
        pltpu = importlib.import_module("jax.experimental.pallas.tpu")
        layout, size = self.layout, self.layout.piece
        first = steps.rows[step] * layout.pieces + steps.blocks[step] * layout.pieces_of_block

        def copy_piece(piece: Array, _: Array) -> int:
            place = steps.places[first + piece]

            @pl.when(place >= 0)
            def _copy() -> None:
                per_page = jnp.int32(layout.pieces_of_page)
                page, inside = lax.div(place, per_page), lax.rem(place, per_page)
                source, target = (
                    pl.ds(pl.multiple_of(x * size, size), size) for x in (inside, piece)
                )
                copies = zip(pools, buffers.blocks, layout.axes, strict=True)
                for which, (pool, buffer, axis) in enumerate(copies):
                    all_heads = (slice(None),) * (1 + axis)
                    copy = pltpu.make_async_copy(
                        pool.at[(page, *all_heads, source)],
                        buffer.at[(slot, *all_heads, target)],
                        buffers.semaphores.at[slot, which],
                    )
                    getattr(copy, action)()

            return 0

        tile_schedule.repeat(0, layout.pieces_of_block, copy_piece, 0)


def decode(platform: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    """Computes `out [B, T, N, V]` in float32 and the normalizers `[B, T, N]` of a prepared spec,
    for a call that the kernel supports; interpreted on a CPU."""
    pools, shapes = _numbers(cache), few_queries.shapes(query, cache)
    (B,), T, _, N, K, H, V, _ = shapes
    layout = Layout.of(shapes, pools)
    assert layout is not None, "the caller checks that the kernel supports the call"
    spec = slicing.pad_spec(spec, T, shapes.S, T, layout.S)
    steps = Steps.of(spec, shapes, layout, cache.pages()[2], pools[0].shape[0])
    kernel = _Kernel(spec, shapes, layout, layout.operands(spec))
    query = jnp.pad(query, ((0, 0), (0, layout.T - T), (0, 0), (0, 0)))
    rows = jnp.swapaxes(query, 1, 2).reshape(B, K, kernel.rows, H)
    pools = [
        jnp.swapaxes(x, 2, 3) if axis else x for x, axis in zip(pools, layout.axes, strict=True)
    ]
    arrays = [rows, *pools, *few_queries.scales(cache, layout.S)]
    out, *statistics = _launch(kernel, steps, arrays, platform == "cpu")
    out, *statistics = (
        jnp.moveaxis(x.reshape(B, N, layout.T, *x.shape[4:])[:, :, :T], 1, 2)
        for x in (out.reshape(B, K, 1, kernel.rows, V), *statistics)
    )
    return out, Normalizer(*statistics)


def _launch(kernel: _Kernel, steps: Steps, arrays: list[Array], interpret: bool) -> list[Array]:
    """Returns the output `[B, K, R, V]`, and maximum and log of the sum `[B, K, 1, R]`.

    `arrays` are the queries `[B, K, R, H]`, the pages of keys and of values, and their scales.
    """
    B, K, R, _ = arrays[0].shape
    shapes = (B, K, R, kernel.shapes.V), (B, K, 1, R), (B, K, 1, R)
    results = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]

    def tile_at(step: Array, *lists: Ref) -> TileIndex:
        listed = Steps(*lists)
        return TileIndex(listed.rows[step], 0, 0, listed.blocks[step])

    def of_row(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda *at: (tile_at(*at).b, 0, 0, 0))

    def run_step(lists: Ref, leaves: Ref, arrays: Ref, results: Ref, scratch: Ref) -> None:
        buffers = _Buffers(scratch[:2], scratch[2], scratch[3:])
        kernel(Steps(*lists), leaves, arrays, results, buffers)

    pages, scales = pl.BlockSpec(memory_space=pl.ANY), (None, K, kernel.layout.block)
    of_scales = pl.BlockSpec(scales, lambda *at: (tile_at(*at).b, 0, tile_at(*at).j))
    blocks = of_row(arrays[0]), pages, pages, of_scales, of_scales
    return programs.launch_steps(
        "jattn_decode",
        run_step,
        (steps.count[0],),
        ("arbitrary",),
        steps,
        (kernel.spec_operands, tile_at),
        list(zip(arrays, blocks, strict=False)),  # there may be no scales
        [(x, of_row(x)) for x in results],
        _Buffers.shapes(kernel, arrays[1:3]),
        interpret,
    )


READER = Reader(unreadable, decode)
