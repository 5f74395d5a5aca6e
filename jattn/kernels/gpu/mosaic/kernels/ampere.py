"""Attention on GPUs since Ampere for any mask, by the products of single warps.

FlashAttention-2 (Dao 2023) in Pallas's Mosaic GPU form. A program is one warpgroup, which holds 64
queries, or in the backward pass 64 queries or keys, and computes while the tile that follows is
copied to shared memory, see `streams`.

What is visited, and what needs no mask, comes from index arrays, see `block_mask`; the scores of a
tile from `jattn.tile`, through `mosaic_interpreter`. On a CPU the same kernels run in JAX's
interpreter.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import softmax
from jattn.cache import Cache
from jattn.kernels.common import block_mask, tile_schedule
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.gpu.mosaic.kernels import decode as gpu_decode
from jattn.kernels.gpu.mosaic.kernels import mosaic_call
from jattn.kernels.gpu.mosaic.machine import streams
from jattn.kernels.gpu.mosaic.machine.registers import ROWS, Problem, Products, knows_ampere
from jattn.kernels.gpu.mosaic.machine.streams import Stream, heads_first, put
from jattn.kernels.gpu.mosaic.machine.warpgroups import Order, launch, tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import kernel_refs, mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.tile_weights import (
    Rows,
    add_gradients,
    finish,
    finished,
    nothing,
    online,
)
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling


LEAST = (8, 0)  # compute capability: others have no products in bfloat16


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None or why not."""
    return _other_machine() or mosaic_call.unsupported(_FORWARD.tiling(spec, shapes), spec, shapes)


def _other_machine() -> str | None:
    return streams.unfit(lambda x: x >= LEAST, "8.0 or more") or old()


def old() -> str | None:
    """Why this version of JAX does not compile for this machine's device."""
    return None if streams.device() is None or knows_ampere() else OLD


OLD = "this version of JAX has no products of single warps; expected JAX 0.12 or later"


def _forward(problem: Problem, spec: Spec, query: Array, key: Array, value: Array) -> Any:
    """Output `[B, T, N, V]` and normalizer `[B, T, N]`; a program for every 64 queries, or for each
    of them and each part of the keys (Dao et al. 2023, "Flash-Decoding")."""
    shapes, (rows, columns), unit = problem.shapes, problem.tiling, problem.unit
    visits = problem.visits(spec)
    parts = block_mask.parts(shapes.B * shapes.N * problem.blocks[0], problem.blocks[1])

    def kernel(place: Any, operands: Any, results: Any, scratch: Any) -> None:
        (query, key, value, leaves, visits_ref), (queries, keys, values) = operands, scratch
        (part, b, h, i), kv = place, lax.div(place[2], np.int32(shapes.G))
        row, first = i * rows, jnp.int32(0)
        own = pl.ds(row, rows)
        queries.fill(first, query.at[b, h, own])
        numbers, (q,) = problem.numbers(leaves, b, h), queries.wait(first)

        def fetch(j: Any, turn: Any) -> None:
            keys.fill(turn, key.at[b, kv, pl.ds(j * columns, columns)])

        def step(j: Any, masked: bool, fetch_next: Any, state: Any) -> Any:
            turn, before = state
            (k,) = keys.wait(turn)
            values.fill(turn, value.at[b, kv, pl.ds(j * columns, columns)])
            here = problem.tile(leaves, kernel_refs.TileIndex(b, h, row, j * columns), numbers)
            (products,) = unit.products([(q, k)], transposed=True)
            weights, found = online(problem, masked, here, products, before)
            (v,) = values.wait(turn)
            fetch_next(turn + 1)
            pair = weights.astype(shapes.dtype), v
            (weighted,) = unit.products([pair], onto=[found.weighted])
            return turn + 1, found._replace(weighted=weighted)

        state = first, softmax.Partial(*map(unit.lay, nothing(rows, shapes.V), ("t", "t", "ts")))
        at, share = (b, h, i), (part, parts)
        _, found = visits.fold_ahead(visits_ref, at, fetch, first, step, state, share)
        out, normalizer = mosaic_interpreter.run(functools.partial(finish, problem.factors), found)
        out = out.astype(results[0].dtype)
        for result, x in zip(results, (out, *normalizer), strict=True):
            put(problem, result.at[part, b, h, own], x)

    operands = *heads_first(query, key, value), problem.rules.arrays, visits.arrays
    heads = parts, shapes.B, shapes.N, shapes.T
    out = (*heads, shapes.V), jnp.float32 if parts > 1 else shapes.dtype
    results = [out, (heads, jnp.float32), (heads, jnp.float32)]
    tile = functools.partial(tiles_in_memory, 1, width=shapes.H, dtype=shapes.dtype)
    scratch = [Stream.scratch(unit, 1, tile(rows=x)) for x in (rows, columns, columns)]
    order = Order.of(problem, visits, shapes.N, parts)
    found = launch("jattn_ampere_forward", problem, order, kernel, operands, results, scratch, 1)
    out, *along = (jnp.swapaxes(x, 2, 3) for x in found)
    return softmax.join(out, softmax.Normalizer(*along))


def _gradients(
    problem: Problem, spec: Spec, per_head: Any, key: Array, value: Array, which: tuple[int, ...]
) -> list[Array]:
    """Those of queries, or `which` of keys and values where `problem.by_key`; a program for every
    64."""
    shapes, by_key, unit = problem.shapes, problem.by_key, problem.unit
    visits = problem.visits(spec)
    query, d_out, *rows = per_head
    size = problem.streamed
    rows, far = Rows.stacked(problem.factors, rows, problem.rules.sizes["T"])
    if by_key:
        visits = visits.without_full(far)

    def kernel(place: Any, operands: Any, results: Any, scratch: Any) -> None:
        (_, b, unit_head, i), (kept, stream) = place, scratch
        per_query, per_key, rows, leaves, visits_ref = operands
        mine, others = (per_key, per_query) if by_key else (per_query, per_key)
        start, first, group = i * ROWS, jnp.int32(0), np.int32(shapes.G)
        kept.fill(first, *[x.at[b, unit_head, pl.ds(start, ROWS)] for x in mine])
        own, near = None if by_key else Rows.read(unit, rows, b, unit_head, i), kept.wait(first)

        def of_head(g: Any, state: Any) -> Any:
            h = unit_head * problem.heads + g
            head = h if by_key else lax.div(h, group)
            numbers = problem.numbers(leaves, b, h)

            def fetch(x: Any, turn: Any) -> None:
                stream.fill(turn, *[y.at[b, head, pl.ds(x * size, size)] for y in others])

            def step(x: Any, masked: bool, fetch_next: Any, state: Any) -> Any:
                turn, *totals = state
                arrays = stream.wait(turn)
                fetch_next(turn + 1)
                row, column = (x * size, start) if by_key else (start, x * size)
                at = kernel_refs.TileIndex(b, h, row, column)
                here = problem.tile(leaves, at, numbers)
                read = functools.partial(Rows.read, unit, rows, b, h, x)
                of_rows = read if own is None else own
                totals = dict(zip(which, totals, strict=True))
                found = add_gradients(problem, masked, of_rows, near, arrays, totals, here)
                return turn + 1, *found

            return visits.fold_ahead(visits_ref, (b, h, i), fetch, state[0], step, state)

        zeros = [unit.lay(jnp.zeros((ROWS, shapes.H), jnp.float32), "ts") for _ in results]
        _, *found = tile_schedule.repeat(0, problem.heads, of_head, (first, *zeros))
        found = finished(problem, dict(zip(which, found, strict=True)), own)
        for result, total in zip(results, found, strict=True):
            to = result.at[b, unit_head, pl.ds(start, ROWS)]
            put(problem, to, total.astype(result.dtype))

    tensors = heads_first(query, d_out), heads_first(key, value)
    operands = *tensors, rows, problem.rules.arrays, visits.arrays
    results = [(tensors[by_key][i].shape, shapes.dtype) for i in which]
    scratch = [
        Stream.scratch(unit, n, *[tiles_in_memory(n, rows, shapes.H, shapes.dtype)] * 2)
        for n, rows in ((1, ROWS), (2, size))
    ]
    name = "jattn_ampere_d_keys" if by_key else "jattn_ampere_d_queries"
    order = Order.of(problem, visits, shapes.K if by_key else shapes.N)
    return heads_first(*launch(name, problem, order, kernel, operands, results, scratch, 1))


def _streamed(spec: Spec, width: int) -> tuple[int, int]:
    if width <= 64:
        return 32 if spec.score is not None and spec.dropout_rate else 64, 32
    return 32 if width <= 128 else 16, 16


# As many keys and queries as fit registers, beside what masks and score functions need.
_FORWARD = mosaic_call.Forward(
    tiling=lambda _, x: Tiling(ROWS, 64 if max(x.H, x.V) <= 128 else 16),
    products=Products.WARP,
    run=_forward,
)
BACKWARD = mosaic_call.Backward(
    rows=lambda _: ROWS,
    streamed=_streamed,
    products=Products.WARP,
    run=_gradients,
)


def functions(platform: str) -> AttentionVJP:
    """Forward and backward; interpreted on a CPU."""
    _check_version(platform)
    return mosaic_call.functions(_FORWARD, BACKWARD, platform)


def decode(platform: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    """As `gpu.decode.attend`."""
    _check_version(platform)
    return gpu_decode.attend(_FORWARD, platform, spec, query, cache)


unreadable = functools.partial(gpu_decode.unreadable, _FORWARD)


def _check_version(platform: str) -> None:
    if platform != "cpu" and not knows_ampere():
        raise NotImplementedError(f"implementation 'ampere': {OLD}")
