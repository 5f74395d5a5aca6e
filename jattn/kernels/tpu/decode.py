"""A few queries against a cache on TPUs: pages are read where they lie, nothing is gathered.

One program goes through a list of blocks of keys. The list is fetched before the program begins,
and holds of each batch row the blocks that the mask leaves, so that a short row takes few steps.
While one block is computed, the pages of the next are copied into the core's memory. A page's key
heads lie side by side, and are copied together. The ideas are those of PagedAttention (Kwon et al.
2023), Flash-Decoding (Dao et al. 2023) and the ragged paged attention of vLLM's backend for TPUs.

The queries of a group's heads are the rows of one product with the key head that they share; the
scores of each head are those of `jattn.tile`.

What is masked does not exist: a block whose weighted values are not all finite is computed again,
with 0 in place of what is not finite.

On a CPU the same kernel is interpreted. It compiles for TPUs, and has not run on one.
"""

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from jattn import masks, tuning
from jattn._types import Ref, Tree
from jattn.cache import Cache
from jattn.call import Call
from jattn.kernels.common import block_mask, few_queries, reverse_mode, slicing, tile_schedule
from jattn.kernels.protocol import Reader
from jattn.kernels.tpu import operands, programs
from jattn.kernels.tpu.operands import LANES, TileIndex
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling


_SUBLANES = 8  # rows of a register of 32-bit numbers
_MOST_SCALARS = 3 * 2**16  # numbers in the memory of the scalar core, three quarters of it
_BLOCK_BYTES = 2**21  # of keys and values, if so few are a register's lanes of keys
_MOST_BYTES = 14 * 2**20  # of a core's memory


class Layout(NamedTuple):
    """How a cache of S slots is read: `block` slots at a time, of which `piece` lie side by side,
    in pages of `page`. S is rounded up to whole blocks.

    `axes` are those of the slots in a block of keys `[slots, H]`, and in one of values. Where H
    leaves lanes of registers empty and a page does not, XLA lays slots along the lanes, and blocks
    are `[H, slots]`.
    """

    S: int
    block: int
    piece: int
    page: int
    axes: tuple[int, int]
    block_bytes: int

    @classmethod
    def of(cls, shapes: Shapes, page: int) -> "Layout | None":
        """None where pages are not whole registers."""
        item, heads = jnp.dtype(shapes.dtype).itemsize, (shapes.H, shapes.V)
        rows = 4 * _SUBLANES // item  # of a register
        of_keys, of_values = (int(size % LANES > 0 and page % LANES == 0) for size in heads)
        axes = of_keys, of_values
        wide = sum(
            _round_up(size, (LANES, rows)[axis]) for size, axis in zip(heads, axes, strict=True)
        )
        least = max((rows, LANES)[axis] for axis in axes)
        each = shapes.K * wide * item
        most = min(tuning.current().tpu_decode_block, max(_BLOCK_BYTES // each, LANES))
        sizes = [
            size
            for size in range(least, min(page, most) + 1, least)
            if page % size == 0 and math.lcm(size, LANES) <= most
        ]
        if not sizes or page % least:
            return None
        whole = math.lcm(sizes[-1], LANES)
        block = min(most // whole * whole, _round_up(shapes.S, whole))
        return cls(_round_up(shapes.S, block), block, sizes[-1], page, axes, block * each)

    @property
    def pieces(self) -> int:
        """Of a row."""
        return self.S // self.piece

    @property
    def in_block(self) -> int:
        """Pieces of a block."""
        return self.block // self.piece

    @property
    def in_page(self) -> int:
        """Pieces of a page."""
        return self.page // self.piece


# ---------------------------------------------------------------------------------------------
# What it can do
# ---------------------------------------------------------------------------------------------


def unreadable(platform: str, call: Call, cache: Cache) -> str | None:
    """Why a cache cannot be read where it lies, for a call that `tiled` supports, or None."""
    spec, shapes = call.spec, call.shapes
    if reason := few_queries.unsupported(spec, shapes):
        return reason
    if 0 in (shapes.B, shapes.T):
        return "there are no queries"
    for x in (cache.keys, cache.values):
        if x.dtype != shapes.dtype:
            return f"expected a cache of {shapes.dtype} as the query, got {x.dtype}"
    layout = Layout.of(shapes, cache.keys.shape[2])
    if layout is None:
        return f"pages of {cache.keys.shape[2]} keys of {shapes.dtype} are no whole registers"
    return _memory_reason(spec, shapes, layout)


def _memory_reason(spec: Spec, shapes: Shapes, layout: Layout) -> str | None:
    """Whether all that a step needs fits into a core's memories."""
    spec, tiling = _padded_spec(spec, shapes, layout), _tiling(shapes, layout)
    rules = operands.SpecOperands(spec, tiling, every_head=True)
    lists = shapes.B * (layout.pieces + 3 * (layout.S // layout.block))
    if lists + rules.scalar_entries > _MOST_SCALARS:
        return f"lists of {lists} pages and blocks do not fit into scalar memory"
    # What comes and goes is there twice, for this step and the next; so are the sums.
    sizes = sum(_round_up(size, LANES) for size in (shapes.H, 2 * shapes.V, LANES, LANES))
    each = shapes.N * tiling.block_q * sizes + rules.block_entries
    if 2 * (4 * each + layout.block_bytes) > _MOST_BYTES:
        return f"{shapes.T} queries of {shapes.N} heads do not fit into a core's memory"
    return None


def _padded(T: int) -> int:
    """T in whole registers."""
    return _round_up(T, _SUBLANES)


def _round_up(size: int, by: int) -> int:
    return -(-size // by) * by


def _tiling(shapes: Shapes, layout: Layout) -> Tiling:
    return Tiling(_padded(shapes.T), layout.block)


def _padded_spec(spec: Spec, shapes: Shapes, layout: Layout) -> Spec:
    """The spec with arrays of whole tiles; what the queries that are none see does not matter."""
    return slicing.pad_arrays(spec, _padded(shapes.T), layout.S)


# ---------------------------------------------------------------------------------------------
# What is read
# ---------------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """What a program does in turn: of each step the batch row, the block and its kind; where in
    the pool each piece of a row lies, −1 where it is not read; and `[1]` how many steps there are.
    In a kernel these lie in scalar memory. A row that sees nothing has one empty step."""

    rows: Tree
    blocks: Tree
    kinds: Any
    places: Any
    count: Any

    @classmethod
    def of(
        cls, spec: Spec, shapes: Shapes, layout: Layout, table: Int[Array, "B M"], pages: int
    ) -> "Steps":
        """`pages` are those of the pool; the table has that number where there is none."""
        B, blocks = shapes.B, layout.S // layout.block
        tiles = block_mask.kinds(spec, shapes.T, layout.S, Tiling(shapes.T, layout.piece))
        tiles = jnp.asarray(tiles)[:, :, 0]
        some, every = jnp.any(tiles, axis=1), jnp.all(tiles == masks.FULL, axis=1)
        places = _places(layout, table, pages)
        places = jnp.where(some, places, -1)

        def by_block(x: Array) -> Array:
            return x.reshape(-1, blocks, layout.in_block)

        kinds = jnp.any(by_block(some), axis=2).astype(jnp.int32)
        kinds += jnp.all(by_block(every), axis=2).astype(jnp.int32)
        kinds = jnp.broadcast_to(kinds, (B, blocks))
        first = jnp.arange(blocks, dtype=jnp.int32)[None, :] == 0
        wanted = (kinds != masks.EMPTY) | first & ~jnp.any(kinds, axis=1, keepdims=True)
        (order,), count = tile_schedule.where_true(jnp, wanted.reshape(1, -1))
        number = jnp.int32(blocks)
        rows, own = lax.div(order, number), lax.rem(order, number)
        return cls(rows, own, kinds.reshape(-1)[order], places.reshape(-1), count)


def _places(layout: Layout, table: Array, pages: int) -> Int[Array, "B n"]:
    """Where in the pool, in pieces, each piece of a row lies."""
    inside = jnp.arange(layout.in_page, dtype=jnp.int32)[None, None, :]
    table = table.astype(jnp.int32)[:, :, None]
    places = jnp.where(table < pages, table * layout.in_page + inside, -1)
    places = places.reshape(table.shape[0], -1)
    behind = layout.pieces - places.shape[1]
    return jnp.pad(places, ((0, 0), (0, behind)), constant_values=-1)


# ---------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------


class _Buffers(NamedTuple):
    """What lies in the core's memory: of two steps in turn the keys `[2, K, block, H]`, or as the
    layout has them, the values, and what rows have summed after a step, `[2, K, R, ·]` as in
    `programs.no_keys`."""

    keys: Any
    values: Any
    arrived: Any  # semaphores
    maximum: Ref
    total: Ref
    weighted: Ref

    @classmethod
    def shapes(cls, shapes: Shapes, layout: Layout) -> "_Buffers":
        pltpu = importlib.import_module("jax.experimental.pallas.tpu")
        K, R = shapes.K, shapes.G * _padded(shapes.T)

        def block(size: int, axis: int) -> Any:
            sizes = (size, layout.block) if axis else (layout.block, size)
            return pltpu.VMEM((2, K, *sizes), shapes.dtype)

        def sums(size: int) -> Any:
            return pltpu.VMEM((2, K, R, size), jnp.float32)

        copies = pltpu.SemaphoreType.DMA((2, 2))
        keys, values = map(block, (shapes.H, shapes.V), layout.axes)
        return cls(keys, values, copies, sums(1), sums(1), sums(shapes.V))

    @property
    def sums(self) -> tuple[Any, Any, Any]:
        return self.maximum, self.total, self.weighted


class _Kernel(NamedTuple):
    """The kernel of a call, with a spec whose arrays are padded."""

    spec: Spec
    shapes: Shapes
    layout: Layout
    rules: operands.SpecOperands

    @property
    def rows(self) -> int:
        """Those of a product: the queries of a group's heads."""
        return self.shapes.G * _padded(self.shapes.T)

    def __call__(
        self, steps: Steps, leaves: Ref, arrays: Ref, results: Ref, memory: _Buffers
    ) -> None:
        query, *pools = arrays
        step, last = pl.program_id(0), steps.count[0] - 1
        slot, b = lax.rem(step, jnp.int32(2)), steps.rows[step]
        copies = _Copies(self.layout, steps, pools, memory)

        @pl.when(step == 0)
        def _first() -> None:
            # What no copy reaches is masked. It should be finite, or blocks are computed twice.
            memory.values[...] = jnp.zeros_like(memory.values)
            copies.start(step, slot)

        @pl.when(step < last)
        def _ahead() -> None:
            copies.start(step + 1, 1 - slot)

        @pl.when((step == 0) | (steps.rows[jnp.maximum(step - 1, 0)] != b))
        def _begin() -> None:
            nothing = programs.no_keys(self.rows, self.shapes.V)
            for sums, value in zip(memory.sums, nothing, strict=True):
                sums[...] = jnp.broadcast_to(value, sums.shape)

        copies.wait(step, slot)
        for kind in (masks.MIXED, masks.FULL):

            @pl.when(steps.kinds[step] == kind)
            def _visit(masked: bool = kind == masks.MIXED) -> None:
                at = TileIndex(b, 0, 0, steps.blocks[step])
                finite = self._visit(leaves, query, memory, slot, at, masked, exact=False)

                @pl.when(jnp.logical_not(finite))
                def _again() -> None:
                    self._visit(leaves, query, memory, slot, at, True, exact=True)

        @pl.when((step == last) | (steps.rows[jnp.minimum(step + 1, last)] != b))
        def _end() -> None:
            self._finish(memory, slot, results)

    def _visit(
        self,
        leaves: Ref,
        query: Ref,
        memory: _Buffers,
        slot: Array,
        at: TileIndex,
        masked: bool,
        exact: bool,
    ) -> Array:
        """Adds a block to what rows have summed; whether its weighted values are all finite."""
        headroom, (of_keys, of_values) = programs.headroom(self.layout.S), self.layout.axes

        def one(kv: Array, marks: Array) -> Array:
            q, k, v = query[kv], memory.keys[slot, kv], memory.values[slot, kv]
            products = programs.dot(q, k, (1, 1 - of_keys), self.spec)
            if exact:  # NaN where a value is not finite
                wide = v.astype(jnp.float32)
                ones = jnp.ones((self.rows, self.shapes.V), v.dtype)
                odd = (wide - wide).astype(v.dtype)
                products += programs.dot(ones, odd, (1, 1 - of_values), self.spec)
                v = programs.finite(self.spec, v)
            score = self._modified(leaves, kv, at, products, masked)
            maximum, total, weighted = (x[1 - slot, kv] for x in memory.sums)
            weights, factor, *new = programs.more_keys(score, maximum, total)
            part = programs.dot(weights * headroom, v, (1, of_values), self.spec)
            new.append(weighted * factor + part)
            for sums, value in zip(memory.sums, new, strict=True):
                sums[slot, kv] = value
            return marks + (part - part)  # NaN where it is not finite

        marks = jnp.zeros((self.rows, self.shapes.V), jnp.float32)
        return jnp.sum(tile_schedule.repeat(0, self.shapes.K, one, marks)) == 0

    def _modified(
        self, leaves: Ref, kv: Array, at: TileIndex, products: Array, masked: bool
    ) -> Array:
        """Scores `[R, block]` of a group, whose heads may have masks and scores of their own."""
        T, found = _padded(self.shapes.T), []
        for g in range(self.shapes.G):
            own = at._replace(h=kv * self.shapes.G + g)
            part = products[g * T : (g + 1) * T]
            score = self.rules.run(lambda here, x: here.modify(x, masked), leaves, own, part)
            found.append(jnp.broadcast_to(score, part.shape))
        return jnp.concatenate(found, axis=0)

    def _finish(self, memory: _Buffers, slot: Array, results: Ref) -> None:
        def one(kv: Array, _: Array) -> int:
            maximum, total, weighted = (x[slot, kv] for x in memory.sums)
            headroom = programs.headroom(self.layout.S)
            out, *both = programs.all_keys(maximum, total, weighted, headroom)
            results[0][kv] = out
            for result, column in zip(results[1:], both, strict=True):
                result[kv] = operands.row(column)
            return 0

        tile_schedule.repeat(0, self.shapes.K, one, 0)


class _Copies(NamedTuple):
    """The copies of a step's keys and values from the pools into one of two slots."""

    layout: Layout
    steps: Steps
    pools: Tree
    memory: _Buffers

    def start(self, step: Array, slot: Array) -> None:
        self._each(step, slot, lambda copy: copy.start())

    def wait(self, step: Array, slot: Array) -> None:
        self._each(step, slot, lambda copy: copy.wait())

    def _each(self, step: Array, slot: Array, do: Callable[[Any], None]) -> None:
        pltpu = importlib.import_module("jax.experimental.pallas.tpu")
        in_block, in_page, size = self.layout.in_block, self.layout.in_page, self.layout.piece
        first = self.steps.rows[step] * self.layout.pieces + self.steps.blocks[step] * in_block

        def one(piece: Array, _: Array) -> int:
            place = self.steps.places[first + piece]

            @pl.when(place >= 0)
            def _copy() -> None:
                each = jnp.int32(in_page)
                page, inside = lax.div(place, each), lax.rem(place, each)
                source, target = (
                    pl.ds(pl.multiple_of(x * size, size), size) for x in (inside, piece)
                )
                buffers = self.memory.keys, self.memory.values
                both = zip(self.pools, buffers, self.layout.axes, strict=True)
                for which, (pool, buffer, axis) in enumerate(both):
                    every = (slice(None),) * (1 + axis)
                    do(
                        pltpu.make_async_copy(
                            pool.at[(page, *every, source)],
                            buffer.at[(slot, *every, target)],
                            self.memory.arrived.at[slot, which],
                        )
                    )

            return 0

        tile_schedule.repeat(0, in_block, one, 0)


# ---------------------------------------------------------------------------------------------
# The call
# ---------------------------------------------------------------------------------------------


def decode(platform: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    """`out [B, T, N, V]` in float32 and the normalizers `[B, T, N]` of a prepared spec and a call
    that it supports; interpreted on a CPU."""
    keys, values, table = cache.pages()
    shapes = few_queries.shapes(query, cache)
    (B,), T, _, N, K, H, V, _ = shapes
    layout = Layout.of(shapes, keys.shape[2])
    assert layout is not None, "it is asked whether it supports a call"
    spec = slicing.pad_spec(spec, T, shapes.S, T, layout.S)
    steps = Steps.of(spec, shapes, layout, table, keys.shape[0])
    spec = _padded_spec(spec, shapes, layout)
    rules = operands.SpecOperands(spec, _tiling(shapes, layout), every_head=True)
    kernel = _Kernel(spec, shapes, layout, rules)
    query = jnp.pad(query, ((0, 0), (0, _padded(T) - T), (0, 0), (0, 0)))
    rows = jnp.swapaxes(query, 1, 2).reshape(B, K, kernel.rows, H)
    pools = [
        jnp.swapaxes(x, 2, 3) if axis else x
        for x, axis in zip((keys, values), layout.axes, strict=True)
    ]
    out, *both = _launch(kernel, steps, rows, pools, platform == "cpu")
    out, *both = (
        jnp.moveaxis(x.reshape(B, N, _padded(T), *x.shape[4:])[:, :, :T], 1, 2)
        for x in (out.reshape(B, K, 1, kernel.rows, V), *both)
    )
    return out, Normalizer(*both)


def _launch(
    kernel: _Kernel, steps: Steps, rows: Array, pools: list[Array], interpret: bool
) -> list[Array]:
    """`[B, K, R, V]`, and maximum and log of the sum `[B, K, 1, R]`."""
    pltpu = importlib.import_module("jax.experimental.pallas.tpu")
    B, K, R, _ = rows.shape
    flat, over = reverse_mode.varying_alike([*steps, *kernel.rules.arrays, rows, *pools])
    leaves, memory = len(kernel.rules.arrays), _Buffers.shapes(kernel.shapes, kernel.layout)
    results = [(B, K, R, kernel.shapes.V), (B, K, 1, R), (B, K, 1, R)]

    def place(step: Array, *lists: Ref) -> TileIndex:
        own = Steps(*lists)
        return TileIndex(own.rows[step], 0, 0, own.blocks[step])

    def of_row(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape[1:]), lambda *at: (place(*at).b, 0, 0, 0))

    def body(*refs: Ref) -> None:
        own, refs = Steps(*refs[: len(steps)]), refs[len(steps) :]
        first, second = leaves + 3, leaves + 3 + len(results)
        parts = refs[:leaves], refs[leaves:first], refs[first:second]
        kernel(own, *parts, _Buffers(*refs[second:]))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps),
            grid=(steps.count[0],),
            in_specs=[*kernel.rules.blocks(place), of_row(rows.shape), anywhere, anywhere],
            out_specs=list(map(of_row, results)),
            scratch_shapes=list(memory),
        ),
        out_shape=[jax.ShapeDtypeStruct(x, jnp.float32, manual_axis_type=over) for x in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="jattn_decode",
        interpret=interpret,
    )
    return list(call(*flat))


READER = Reader(unreadable, decode)
