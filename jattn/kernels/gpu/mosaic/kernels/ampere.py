"""Attention on GPUs since Ampere for any mask, by the products of single warps.

FlashAttention-2 (Dao 2023) in Pallas's Mosaic GPU form. A program is one warpgroup, which holds 64
queries, or in the backward pass 64 queries or keys, and computes while the tile that follows is
copied to shared memory, see `streams`.

What is visited, and what needs no mask, comes from index arrays, see `block_mask`; the scores of a
tile from `jattn.tile`, through `mosaic_interpreter`. On a CPU the same kernels run in JAX's
interpreter.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import softmax
from jattn._types import Index, Ref, Tree
from jattn.cache import Cache
from jattn.call import Call
from jattn.kernels.common import tile_schedule
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.gpu.mosaic.kernels import backward, mosaic_call
from jattn.kernels.gpu.mosaic.kernels import decode as gpu_decode
from jattn.kernels.gpu.mosaic.kernels.launch import Order, forward_results, joined, launch
from jattn.kernels.gpu.mosaic.machine import device, matrix_units
from jattn.kernels.gpu.mosaic.machine.registers import ROWS, Products
from jattn.kernels.gpu.mosaic.machine.streams import Stream, heads_first, put
from jattn.kernels.gpu.mosaic.machine.versions import knows_ampere
from jattn.kernels.gpu.mosaic.machine.warpgroups import tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.gradients import Rows, add_gradients, finished
from jattn.kernels.gpu.mosaic.tile.online_softmax import finish, nothing, online
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.protocol import Kernel, Reader
from jattn.softmax import Normalizer
from jattn.spec import Spec, Tiling


LEAST = (8, 0)  # compute capability: others have no products in bfloat16


def supports(call: Call) -> str | None:
    """None or why not."""
    return _other_machine() or mosaic_call.unsupported(_FORWARD, call)


def _other_machine() -> str | None:
    return device.unfit(lambda x: x >= LEAST, "8.0 or more") or old()


def old() -> str | None:
    """Why this version of JAX does not compile for this machine's device."""
    return None if device.device() is None or knows_ampere() else OLD


OLD = "this version of JAX has no products of single warps; expected JAX 0.12 or later"


def _forward(problem: GPUProblem, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
    """Output `[B, T, N, V]` and normalizer `[B, T, N]`; a program for every 64 queries, or for each
    of them and each part of the keys (Dao et al. 2023, "Flash-Decoding")."""
    shapes, (rows, columns), unit = problem.shapes, problem.tiling, problem.unit
    visits, parts = problem.visits(spec), problem.parts()

    def kernel(place: tuple[Array, ...], operands: Ref, results: Ref, scratch: Tree) -> None:
        (query, key, value, leaves, visits_ref), (queries, keys, values) = operands, scratch
        (part, b, h, i), kv = place, lax.div(place[2], np.int32(shapes.G))
        row, first = i * rows, jnp.int32(0)
        own = pl.ds(row, rows)
        queries.fill(first, query.at[b, h, own])
        numbers, (q,) = problem.constants(leaves, b, h), queries.wait(first)

        def fetch(j: Index, turn: Index) -> None:
            keys.fill(turn, key.at[b, kv, pl.ds(j * columns, columns)])

        def step(j: Index, masked: bool, fetch_next: Callable[..., Any], state: Tree) -> Tree:
            turn, before = state
            (k,) = keys.wait(turn)
            values.fill(turn, value.at[b, kv, pl.ds(j * columns, columns)])
            here = problem.tile(leaves, TileIndex(b, h, row, j * columns), numbers)
            (products,) = matrix_units.multiply(unit, [(q, k)], transposed=True)
            weights, found = online(problem, masked, here, products, before)
            (v,) = values.wait(turn)
            fetch_next(turn + 1)
            pair = weights.astype(shapes.dtype), v
            (weighted,) = matrix_units.multiply(unit, [pair], onto=[found.weighted])
            return turn + 1, found._replace(weighted=weighted)

        state = (
            first,
            softmax.Partial(*map(unit.to_layout, nothing(rows, shapes.V), ("t", "t", "ts"))),
        )
        at, share = (b, h, i), (part, parts)
        _, found = visits.fold_ahead(visits_ref, at, fetch, first, step, state, share)
        out, normalizer = mosaic_interpreter.run(functools.partial(finish, problem.factors), found)
        out = out.astype(results[0].dtype)
        for result, x in zip(results, (out, *normalizer), strict=True):
            put(problem.unit, result.at[part, b, h, own], x)

    operands = *heads_first(query, key, value), problem.refs.arrays, visits.arrays
    results = forward_results(shapes, parts, heads_first=True)
    tile = functools.partial(tiles_in_memory, 1, width=shapes.H, dtype=shapes.dtype)
    scratch = [Stream.scratch(unit, 1, tile(rows=x)) for x in (rows, columns, columns)]
    order = Order.of(problem, visits, shapes.N, parts)
    found = launch("jattn_ampere_forward", problem, order, kernel, operands, results, scratch, 1)
    return joined(jnp.swapaxes(found[0], 2, 3), *found[1:])


class _Backward(backward.Program):
    """64 queries or, `by_key`, 64 keys, which the only warpgroup keeps."""

    def run(self, results: Tree, scratch: Tree) -> None:
        """Sums the gradients of what the program keeps, and writes them."""
        (kept, stream), unit, first = scratch, self.problem.unit, jnp.int32(0)
        own = self.part(self.at[2] * ROWS, ROWS, self.at[1])
        kept.fill(first, *[x.at[own] for x in self.kept])
        mine = None if self.problem.by_key else Rows.read(unit, self.rows, *self.at)
        add_head = functools.partial(self.add_head, stream, kept.wait(first), mine)
        zeros = [unit.to_layout(jnp.zeros((ROWS, self.problem.shapes.H), jnp.float32), "ts")] * len(
            results
        )
        _, *totals = tile_schedule.repeat(0, self.problem.heads, add_head, (first, *zeros))
        gradients = finished(self.problem, dict(zip(self.which, totals, strict=True)), mine)
        for result, gradient in zip(results, gradients, strict=True):
            put(unit, result.at[own], gradient.astype(result.dtype))

    def add_head(self, stream: Stream, near: Any, mine: Any, g: Any, state: Tree) -> Any:
        """The state with what all tiles of a head add to it. `near` is what the program keeps, in
        shared memory, and `mine` the rows of the queries that it keeps."""
        problem, (b, _, i) = self.problem, self.at
        h = self.at[1] * problem.heads + g
        numbers = problem.constants(self.leaves, b, h)

        def fetch(x: Any, turn: Any) -> None:
            stream.fill(turn, *self.tiles(h, x))

        def step(x: Any, masked: bool, fetch_next: Any, state: Tree) -> Any:
            turn, *totals = state
            arrays = stream.wait(turn)
            fetch_next(turn + 1)
            place = self.place(h, i * ROWS, x * problem.streamed)
            here = problem.tile(self.leaves, place, numbers)
            read = functools.partial(Rows.read, problem.unit, self.rows, b, h, x)
            rows = read if mine is None else mine
            totals = dict(zip(self.which, totals, strict=True))
            return turn + 1, *add_gradients(problem, masked, rows, near, arrays, totals, here)

        return self.visits.fold_ahead(self.visits_ref, (b, h, i), fetch, state[0], step, state)


def _gradients(
    problem: GPUProblem,
    spec: Spec,
    per_query: Any,
    key: Array,
    value: Array,
    which: tuple[int, ...],
) -> list[Array]:
    """Returns the gradient of queries or, with `problem.by_key`, the gradients of keys and values
    named in `which`; a program for every 64."""
    shapes, size = problem.shapes, problem.streamed
    scratch = [
        Stream.scratch(problem.unit, n, *[tiles_in_memory(n, rows, shapes.H, shapes.dtype)] * 2)
        for n, rows in ((1, ROWS), (2, size))
    ]
    name = "jattn_ampere_d_keys" if problem.by_key else "jattn_ampere_d_queries"
    call = problem, spec, per_query, key, value, which
    rows = size if problem.by_key else ROWS
    return backward.launched(name, _Backward, call, rows, _Backward.run, scratch, 1)


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


READER = Reader(functools.partial(gpu_decode.unreadable, _FORWARD), decode)


def _check_version(platform: str) -> None:
    if platform != "cpu" and not knows_ampere():
        raise NotImplementedError(f"implementation 'ampere': {OLD}")


KERNEL = Kernel(supports, functions, reader=READER)
