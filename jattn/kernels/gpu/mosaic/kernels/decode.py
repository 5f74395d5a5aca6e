"""Attention of a few queries to a cache on GPUs since Ampere: keys and values are read in place.

A program is one warpgroup. It keeps the queries of all heads that share a key head, see
`grouped_rows`, and attends to the keys of one batch row, or to a part of them (Dao et al. 2023,
"Flash-Decoding"), while the next ones are copied to shared memory, see `streams`. It finds the
pages of a paged cache in its table (Kwon et al. 2023, PagedAttention). Tiles that the mask empties
are not read, so that the time of a batch row depends on its length.

The numbers of quantised caches are converted in shared memory, see `dequantizer`.

On a CPU the kernel runs in JAX's interpreter. On an H100 it has read caches of the query's dtype.
Reading quantised caches compiles for an H100, and has not run on one.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import masks, softmax
from jattn._types import Index, Ref, Size, Tree
from jattn.cache import Cache, Quantized
from jattn.cache.storage import Stored
from jattn.call import Call
from jattn.kernels.common import block_mask, entries, few_queries, slicing
from jattn.kernels.gpu.mosaic.kernels import mosaic_call
from jattn.kernels.gpu.mosaic.kernels.launch import Order, forward_results, launch
from jattn.kernels.gpu.mosaic.machine import matrix_units
from jattn.kernels.gpu.mosaic.machine.registers import ROWS, WIDTH, Products, Unit
from jattn.kernels.gpu.mosaic.machine.streams import Stream, least_rows, put
from jattn.kernels.gpu.mosaic.machine.versions import mosaic
from jattn.kernels.gpu.mosaic.machine.warpgroups import tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.dequantizer import MAX_SIZE, Dequantizer
from jattn.kernels.gpu.mosaic.tile.grouped_rows import GroupedRefs, Grouping
from jattn.kernels.gpu.mosaic.tile.online_softmax import finish, initial, online
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.xla import decode as xla_decode
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling


# The tiles of keys that justify a program, as a multiple of the usual number: each program writes
# results for all 64 rows, also for padding.
_TILES_EACH = 4
_NAME = "jattn_mosaic_decode"


class _DecodeSizes(NamedTuple):
    """The sizes of a call: the heads in one tile, the keys of a tile, the keys of a run, which are
    consecutive in memory, and the number S of keys."""

    grouping: Grouping
    columns: int
    run: int
    S: Size

    @classmethod
    def of(
        cls, kernel: mosaic_call.ForwardKernel, spec: Spec, shapes: Shapes, page: int
    ) -> "_DecodeSizes":
        columns = min(ROWS, kernel.tiling(spec, shapes).block_kv)
        return cls(Grouping.of(shapes.T, shapes.G), columns, math.gcd(page, columns), shapes.S)

    @property
    def tiling(self) -> Tiling:
        return Tiling(ROWS, self.columns)

    @property
    def capacity(self) -> Size:
        """S, rounded up to whole tiles."""
        return -(-self.S // self.columns) * self.columns


def unreadable(
    kernel: mosaic_call.ForwardKernel, platform: str, call: Call, cache: Cache
) -> str | None:
    """Returns why a kernel that supports the call cannot read a cache in place; None if it can."""
    spec, shapes = call.spec, call.shapes
    keys, values, _ = jax.eval_shape(lambda cache: cache.pages(), cache)
    if reason := _other_arrays(kernel, shapes, keys, values):
        return reason
    sizes = _DecodeSizes.of(kernel, spec, shapes, keys.shape[2])
    fewest = least_rows(Unit(platform == "cpu", by=kernel.products), min(shapes.H, shapes.V))
    if sizes.run < fewest:
        return f"expected pages of a multiple of {fewest} tokens, got {keys.shape[2]}"
    if spec.dropout_rate:
        return "dropout is for training"
    return entries.unsupported(_one_tile, shapes, sizes, spec=spec)


def _other_arrays(
    kernel: mosaic_call.ForwardKernel, shapes: Shapes, keys: Stored, values: Stored
) -> str | None:
    if not 0 < shapes.T <= ROWS:
        return f"expected 1 to {ROWS} queries, got {shapes.T}"
    if 0 in (shapes.B, shapes.S):
        return "there are no keys"
    if reason := _other_dtypes(kernel, shapes, keys, values):
        return reason
    if shapes.H % WIDTH or shapes.V % WIDTH:
        return f"expected head sizes in multiples of {WIDTH}, got {shapes.H} and {shapes.V}"
    return None


def _other_dtypes(
    kernel: mosaic_call.ForwardKernel, shapes: Shapes, keys: Stored, values: Stored
) -> str | None:
    if keys.dtype == values.dtype == shapes.dtype:
        return None
    if not isinstance(keys, Quantized) or keys.dtype != values.dtype:
        return f"expected a cache of {shapes.dtype}, got {keys.dtype} and {values.dtype}"
    if kernel.products is not Products.WARPGROUP:
        return f"expected a cache of {shapes.dtype}, as this kernel does not convert {keys.dtype}"
    if shapes.dtype != jnp.bfloat16:  # weights times scales may be below the smallest float16
        return f"expected queries in bfloat16 for a cache of {keys.dtype}, got {shapes.dtype}"
    if (size := max(shapes.H, shapes.V)) > MAX_SIZE:
        return f"expected head sizes up to {MAX_SIZE} for a cache of {keys.dtype}, got {size}"
    return None


def _one_tile(shapes: Shapes, sizes: _DecodeSizes, spec: Spec) -> Tree:
    """Computes scores of rows of several heads, for one tile of zeros."""
    spec = slicing.pad_spec(spec, shapes.T, shapes.S, shapes.T, sizes.capacity)
    refs = GroupedRefs(sizes.grouping, shapes.N, spec, sizes.tiling)
    return refs.run_example(*refs.example())


def attend(
    kernel: mosaic_call.ForwardKernel, platform: str, spec: Spec, query: Array, cache: Cache
) -> tuple[Array, Normalizer]:
    """Computes output `[B, T, N, V]` and normalizer `[B, T, N]`, in float32, of a prepared spec.

    There is a program for every key head, group of rows and part of the keys of each batch row. A
    masked value that is not finite makes the output not finite, as 0 × NaN is NaN: XLA then
    computes it again. For quantised values `Factors.headroom` is 0, as weights times scales
    would otherwise be too small for bfloat16: if a sum overflows, XLA computes it too.
    """
    keys: Any
    call, (keys, *_) = (spec, query, cache), cache.pages()
    shapes = few_queries.shapes(query, cache)
    sizes = _DecodeSizes.of(kernel, spec, shapes, keys.shape[2])
    spec = slicing.pad_spec(spec, shapes.T, shapes.S, shapes.T, sizes.capacity)
    visits = block_mask.of(_kinds(spec, shapes, sizes)).compact()
    query = sizes.grouping.to_rows(jnp.swapaxes(query, 1, 2), shapes.N, 1)
    grouped = shapes._replace(T=ROWS, S=sizes.capacity, N=query.shape[1])
    refs = functools.partial(GroupedRefs, sizes.grouping, shapes.N)
    problem = GPUProblem.of(
        spec, grouped, sizes.tiling, Unit(platform == "cpu", by=kernel.products), refs
    )
    if isinstance(keys, Quantized):
        problem = problem._replace(factors=problem.factors._replace(headroom=0))
    parts = block_mask.parts(grouped.B * grouped.N, problem.blocks[1] // _TILES_EACH)
    pages = _Pages.of(cache, sizes)
    results = _launch(problem, sizes, parts, visits, query, pages)
    out, *rest = (sizes.grouping.from_rows(x, 2) for x in results)
    out, normalizer = softmax.join(out, Normalizer(*rest))
    joined = out.astype(jnp.float32), normalizer
    return xla_decode.or_exact(jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), joined), *call)


def _kinds(spec: Spec, shapes: Shapes, sizes: _DecodeSizes) -> Array:
    """Returns the tile maps `[B or 1, N / heads or 1, 1, n]` of groups of heads."""
    kinds = block_mask.kinds(spec, shapes.T, sizes.capacity, Tiling(shapes.T, sizes.columns))
    B, N, *rest = kinds.shape
    kinds = kinds.reshape(B, max(1, N // sizes.grouping.heads), -1, *rest)
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    least, most = kinds.min(axis=2), kinds.max(axis=2)
    some = xp.where(most == masks.EMPTY, masks.EMPTY, masks.MIXED)
    return xp.where(least == masks.FULL, masks.FULL, some)


class _Pages(NamedTuple):
    """Keys `[P, K, page, H]` and values `[P, K, page, V]`, the pages of each row, `[B, M]`, and, if
    keys and values are quantised, the scales of both, `[B, K, capacity]`: arrays, or references to
    these."""

    keys: Ref
    values: Ref
    table: Ref
    scales: list[Ref]

    @classmethod
    def of(cls, cache: Cache, sizes: _DecodeSizes) -> "_Pages":
        keys, values, table = cache.pages()
        table = jnp.minimum(table, keys.shape[0] - 1)
        keys, values = (x.numbers if isinstance(x, Quantized) else x for x in (keys, values))
        return cls(keys, values, table, few_queries.scales(cache, sizes.capacity))

    def runs(
        self, sizes: _DecodeSizes, b: Index, kv: Array, j: Index
    ) -> tuple[list[Any], list[Any]]:
        """Returns the runs of keys and of values of tile j. In place of runs past the last key it
        returns the last run again, whose keys the mask excludes there."""
        keys, values, page = [], [], np.int32(self.keys.shape[2])
        for start in range(0, sizes.columns, sizes.run):
            place = jnp.minimum(j * sizes.columns + start, sizes.S - sizes.run)
            index = self.table[b, lax.div(place, page)], kv
            run = pl.ds(pl.multiple_of(lax.rem(place, page), sizes.run), sizes.run)
            keys.append(self.keys.at[(*index, run)])
            values.append(self.values.at[(*index, run)])
        return keys, values


def _launch(
    problem: GPUProblem,
    sizes: _DecodeSizes,
    parts: int,
    visits: block_mask.BlockMask,
    query: Array,
    pages: _Pages,
) -> list[Array]:
    """Computes output `[parts, B, N, 64, V]` and normalizer `[parts, B, N, 64]`, where N counts
    groups of rows."""
    shapes, unit, columns = problem.shapes, problem.unit, sizes.columns

    def kernel(read_item: Callable[[], Any], operands: Ref, results: Ref, scratch: Tree) -> None:
        (query, pages, leaves, visits_ref), (queries, stream, converted) = operands, scratch
        part, b, h, _ = read_item()
        kv, first = lax.div(h, np.int32(shapes.G)), jnp.int32(0)
        queries.fill(first, query.at[b, h])
        constants, (q,) = problem.constants(leaves, b, h), queries.wait(first)

        def index(j: Index) -> TileIndex:
            return TileIndex(b, h, 0, j * columns)

        def fetch(j: Index, turn: Index) -> None:
            runs, columns_of_tile = pages.runs(sizes, b, kv, j), pl.ds(j * columns, columns)
            scales = [x.at[b, kv, columns_of_tile] for x in pages.scales]
            stream.fill(turn, *runs, *scales, *problem.streamed_parts(leaves, index(j)))

        def visit(j: Index, masked: bool, turn: Index, fetch_next: Any, sums: Tree) -> Tree:
            k, v, *streamed = stream.wait(turn)
            fetch_next()
            scales, streamed = streamed[: len(converted)], streamed[len(converted) :]
            stored = Dequantizer(unit, [x.at[0] for x in converted], scales)
            tile = problem.tile(leaves, index(j), constants)
            (products,) = matrix_units.multiply(unit, [(q, stored.keys(k))], transposed=True)
            products, tile = stored.products(products), tile.completed(*streamed)
            weights, sums = online(problem, masked, tile, products, sums)
            pair = stored.weights(weights).astype(shapes.dtype), stored.values(v)
            (weighted,) = matrix_units.multiply(unit, [pair], onto=[sums.weighted])
            return sums._replace(weighted=weighted)

        state, share = (first, initial(unit, ROWS, shapes.V)), (part, parts)
        _, sums = visits.fold_ahead(visits_ref, (b, h, 0), fetch, visit, state, share)
        out, normalizer = mosaic_interpreter.run(functools.partial(finish, problem.factors), sums)
        for result, x in zip(results, (out.astype(results[0].dtype), *normalizer), strict=True):
            put(problem.unit, result.at[part, b, h], x)

    results = forward_results(shapes, parts, heads_first=True)
    operands = query, pages, problem.refs.arrays, visits.arrays
    order = Order.of(problem, visits, shapes.N, parts)
    scratch = _scratch(problem, sizes, pages)
    return launch(_NAME, problem, order, kernel, operands, results, scratch, 1)


def _scratch(problem: GPUProblem, sizes: _DecodeSizes, pages: _Pages) -> list[Tree]:
    """Allocates shared memory for the queries, for two tiles of keys and values in the dtype of the
    cache, and for one tile of each in the query's dtype if the cache is quantised."""
    shapes, columns, tiles, converted = problem.shapes, sizes.columns, [], []
    for x, size in ((pages.keys, shapes.H), (pages.values, shapes.V)):
        tile = functools.partial(tiles_in_memory, rows=columns, least=min(columns, x.shape[3]))
        tiles.append(tile(2, width=x.shape[3], dtype=x.dtype))
        converted.append(tile(1, width=size, dtype=shapes.dtype))
    scales = [mosaic().SMEM((2, columns), x.dtype) for x in pages.scales]
    arrays = [*scales, *problem.streamed_scratch(2)]
    # The layout of queries has runs of the same width as the layout of keys.
    queries = tiles_in_memory(1, ROWS, shapes.H, shapes.dtype, pages.keys.shape[3])
    copies = 2 * (columns // sizes.run) + len(arrays)
    streamed = Stream.scratch(problem.unit, *tiles, *arrays, copies=copies)
    resident = Stream.scratch(problem.unit, queries)
    return [resident, streamed, converted if pages.scales else []]
