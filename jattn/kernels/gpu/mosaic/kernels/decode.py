"""A few queries against a cache on GPUs since Ampere: keys and values are read where they lie.

A program is one warpgroup. It holds the queries of all heads that share a key head, see
`grouped_rows`, and goes through the keys of one batch row, or through a part of them (Dao et al.
2023, "Flash-Decoding"), while those that follow are copied to shared memory, see `streams`. Of a
paged cache it finds the pages in the table (Kwon et al. 2023, PagedAttention). Tiles that the mask
empties are not read: rows of the batch take as long as they are.

On a CPU the kernel runs in JAX's interpreter. It compiles for GPUs, and has not run on one.
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
from jattn.cache import Cache
from jattn.call import Call
from jattn.kernels.common import block_mask, few_queries, slicing
from jattn.kernels.gpu.mosaic.kernels import mosaic_call
from jattn.kernels.gpu.mosaic.kernels.launch import Order, forward_results, launch
from jattn.kernels.gpu.mosaic.machine import matrix_units, streams
from jattn.kernels.gpu.mosaic.machine.registers import ROWS, WIDTH, Unit
from jattn.kernels.gpu.mosaic.machine.streams import Stream, put
from jattn.kernels.gpu.mosaic.machine.warpgroups import tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.grouped_rows import GroupedRefs, Grouping
from jattn.kernels.gpu.mosaic.tile.online_softmax import finish, nothing, online
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.xla import decode as xla_decode
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling


_TILES_EACH = 4  # times as many tiles as elsewhere are worth a program: it leaves whole tiles
_NAME = "jattn_mosaic_decode"


class _Sizes(NamedTuple):
    """How a call is cut: heads that are together, keys of a tile, and keys of a run, which follow
    one another in memory. S are the keys that there are."""

    grouping: Grouping
    columns: int
    run: int
    S: Size

    @classmethod
    def of(cls, kernel: mosaic_call.Forward, spec: Spec, shapes: Shapes, page: int) -> "_Sizes":
        columns = min(ROWS, kernel.tiling(spec, shapes).block_kv)
        return cls(Grouping.of(shapes.T, shapes.G), columns, math.gcd(page, columns), shapes.S)

    @property
    def tiling(self) -> Tiling:
        return Tiling(ROWS, self.columns)

    @property
    def capacity(self) -> Size:
        """The keys of whole tiles."""
        return -(-self.S // self.columns) * self.columns


def unreadable(kernel: mosaic_call.Forward, platform: str, call: Call, cache: Cache) -> str | None:
    """Why a cache cannot be read in place, by kernels that support the call; None if it can."""
    spec, shapes = call.spec, call.shapes
    keys, values, _ = jax.eval_shape(lambda cache: cache.pages(), cache)
    if reason := _other_arrays(shapes, keys, values):
        return reason
    sizes = _Sizes.of(kernel, spec, shapes, keys.shape[2])
    least = streams.least_rows(kernel.unit(platform), min(shapes.H, shapes.V))
    if sizes.run < least:
        return f"expected pages of a multiple of {least} tokens, got {keys.shape[2]}"
    if spec.dropout_rate:
        return "dropout is for training"
    return mosaic_call.reason(_one_tile, shapes, sizes, spec=spec)


def _other_arrays(shapes: Shapes, keys: Any, values: Any) -> str | None:
    if not 0 < shapes.T <= ROWS:
        return f"expected 1 to {ROWS} queries, got {shapes.T}"
    if 0 in (shapes.B, shapes.S):
        return "there are no keys"
    if keys.dtype != shapes.dtype or values.dtype != shapes.dtype:
        return f"expected a cache of {shapes.dtype}, got {keys.dtype} and {values.dtype}"
    if shapes.H % WIDTH or shapes.V % WIDTH:
        return f"expected head sizes in multiples of {WIDTH}, got {shapes.H} and {shapes.V}"
    return None


def _one_tile(shapes: Shapes, sizes: _Sizes, spec: Spec) -> Tree:
    """Computes scores of rows of several heads, for one tile of zeros."""
    spec = slicing.pad_spec(spec, shapes.T, shapes.S, shapes.T, sizes.capacity)
    refs = GroupedRefs(sizes.grouping, shapes.N, spec, sizes.tiling)
    return refs.run_example(*refs.example())


def attend(
    kernel: mosaic_call.Forward, platform: str, spec: Spec, query: Array, cache: Cache
) -> tuple[Array, Normalizer]:
    """Output `[B, T, N, V]` and normalizer `[B, T, N]`, in float32, of a prepared spec.

    A program for every key head, group of rows and part of the keys of each batch row. A masked
    value that is not finite makes the output so, as 0 × NaN is NaN: XLA computes it again then.
    """
    call, (keys, values, table) = (spec, query, cache), cache.pages()
    shapes = few_queries.shapes(query, cache)
    sizes = _Sizes.of(kernel, spec, shapes, keys.shape[2])
    spec = slicing.pad_spec(spec, shapes.T, shapes.S, shapes.T, sizes.capacity)
    visits = block_mask.of(_kinds(spec, shapes, sizes)).compact()
    query = sizes.grouping.apart(jnp.swapaxes(query, 1, 2), shapes.N, 1)
    problem = _problem(spec, query, shapes, sizes, kernel.unit(platform))
    parts = _parts(problem)
    pages = _Pages(keys, values, jnp.minimum(table, len(keys) - 1))
    found = _launch(problem, sizes, parts, visits, query, pages)
    out, *along = (sizes.grouping.together(x, 2) for x in found)
    out, normalizer = softmax.join(out, Normalizer(*along))
    found = out.astype(jnp.float32), normalizer
    return xla_decode.or_exact(jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), found), *call)


def _kinds(spec: Spec, shapes: Shapes, sizes: _Sizes) -> Array:
    """The tile maps `[B or 1, N / heads or 1, 1, n]` of all heads that are together."""
    kinds = block_mask.kinds(spec, shapes.T, sizes.capacity, Tiling(shapes.T, sizes.columns))
    B, N, *rest = kinds.shape
    kinds = kinds.reshape(B, max(1, N // sizes.grouping.heads), -1, *rest)
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    least, most = kinds.min(axis=2), kinds.max(axis=2)
    some = xp.where(most == masks.EMPTY, masks.EMPTY, masks.MIXED)
    return xp.where(least == masks.FULL, masks.FULL, some)


def _problem(spec: Spec, query: Array, shapes: Shapes, sizes: _Sizes, unit: Unit) -> GPUProblem:
    """The call as one of so many heads with 64 queries each."""
    grouped = shapes._replace(T=ROWS, S=sizes.capacity, N=query.shape[1])
    refs = functools.partial(GroupedRefs, sizes.grouping, shapes.N)
    return GPUProblem.of(spec, grouped, sizes.tiling, unit, refs)


def _parts(problem: GPUProblem) -> int:
    """Into how many parts the keys of a batch row are split."""
    programs, (_, tiles) = problem.shapes.B * problem.shapes.N, problem.blocks
    return block_mask.parts(programs, tiles // _TILES_EACH)


class _Pages(NamedTuple):
    """Keys `[P, K, page, H]` and values `[P, K, page, V]`, and which pages each row has, `[B, M]`:
    arrays, or references to them."""

    keys: Ref
    values: Ref
    table: Ref

    def runs(self, sizes: _Sizes, b: Index, kv: Array, j: Index) -> tuple[list[Any], list[Any]]:
        """Of tile j the runs of keys and of values. Behind the last key that there is, they are
        those before it, which the mask leaves out."""
        keys, values, page = [], [], np.int32(self.keys.shape[2])
        for start in range(0, sizes.columns, sizes.run):
            place = jnp.minimum(j * sizes.columns + start, sizes.S - sizes.run)
            own = self.table[b, lax.div(place, page)], kv
            run = pl.ds(pl.multiple_of(lax.rem(place, page), sizes.run), sizes.run)
            keys.append(self.keys.at[(*own, run)])
            values.append(self.values.at[(*own, run)])
        return keys, values


def _launch(
    problem: GPUProblem,
    sizes: _Sizes,
    parts: int,
    visits: block_mask.BlockMask,
    query: Array,
    pages: _Pages,
) -> list[Array]:
    """Output `[parts, B, N, 64, V]` and normalizer `[parts, B, N, 64]`, N counting groups of
    rows."""
    shapes, unit, columns = problem.shapes, problem.unit, sizes.columns

    def kernel(place: tuple[Array, ...], operands: Ref, results: Ref, scratch: Tree) -> None:
        (query, pages, leaves, visits_ref), (queries, stream) = operands, scratch
        (part, b, h, _), kv = place, lax.div(place[2], np.int32(shapes.G))
        first = jnp.int32(0)
        queries.fill(first, query.at[b, h])
        numbers, (q,) = problem.constants(leaves, b, h), queries.wait(first)
        at = lambda j: TileIndex(b, h, 0, j * columns)  # noqa: E731

        def fetch(j: Index, turn: Index) -> None:
            runs = pages.runs(sizes, b, kv, j)
            stream.fill(turn, *runs, *problem.streamed_parts(leaves, at(j)))

        def step(j: Index, masked: bool, fetch_next: Callable[..., Any], state: Tree) -> Tree:
            turn, before = state
            k, v, *beside = stream.wait(turn)
            fetch_next(turn + 1)
            here = problem.tile(leaves, at(j), numbers)
            (products,) = matrix_units.multiply(unit, [(q, k)], transposed=True)
            weights, found = online(problem, masked, here.completed(beside), products, before)
            pair = weights.astype(shapes.dtype), v
            (weighted,) = matrix_units.multiply(unit, [pair], onto=[found.weighted])
            return turn + 1, found._replace(weighted=weighted)

        state = (
            first,
            softmax.Partial(*map(unit.to_layout, nothing(ROWS, shapes.V), ("t", "t", "ts"))),
        )
        block, share = (b, h, 0), (part, parts)
        _, found = visits.fold_ahead(visits_ref, block, fetch, first, step, state, share)
        out, normalizer = mosaic_interpreter.run(functools.partial(finish, problem.factors), found)
        for result, x in zip(results, (out.astype(results[0].dtype), *normalizer), strict=True):
            put(problem.unit, result.at[part, b, h], x)

    results = forward_results(shapes, parts, heads_first=True)
    operands = query, pages, problem.refs.arrays, visits.arrays
    order = Order.of(problem, visits, shapes.N, parts)
    return launch(_NAME, problem, order, kernel, operands, results, _scratch(problem, sizes), 1)


def _scratch(problem: GPUProblem, sizes: _Sizes) -> list[Stream]:
    """Shared memory for the queries, and for two tiles of keys and values."""
    shapes, unit, columns = problem.shapes, problem.unit, sizes.columns
    tile = functools.partial(tiles_in_memory, dtype=shapes.dtype)
    tiles = [tile(2, columns, size, least=columns) for size in (shapes.H, shapes.V)]
    beside, queries = problem.streamed_scratch(2), tile(1, ROWS, shapes.H)
    copies = 2 * (columns // sizes.run) + len(beside)
    return [
        Stream.scratch(unit, 1, queries),
        Stream.scratch(unit, 2, *tiles, *beside, copies=copies),
    ]
