"""Attention on Ampere and later GPUs for any mask, by tensor core products of single warps (mma).

FlashAttention-2 (Dao 2023) in Pallas's Mosaic GPU. A program is one warpgroup. It keeps 64 queries
or, for the gradients of keys and values, 64 keys. It computes one tile while the next one is copied
to shared memory, see `streams`.

Index arrays list the tiles to visit, and tell which of them need no mask, see `block_mask`. The
scores of a tile are computed by `jattn.tile`, which `mosaic_interpreter` runs on arrays in
registers. On a CPU the same kernels run in JAX's interpreter.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

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
from jattn.kernels.gpu.mosaic.machine.streams import Stream, copied_order, put
from jattn.kernels.gpu.mosaic.machine.versions import knows_ampere
from jattn.kernels.gpu.mosaic.machine.warpgroups import tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.gradients import RowStatistics, add_gradients, finished
from jattn.kernels.gpu.mosaic.tile.online_softmax import finish, initial, online
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.protocol import Kernel, Reader
from jattn.softmax import Normalizer
from jattn.spec import Spec, Tiling


LEAST = (8, 0)  # GPUs of lower compute capabilities cannot multiply bfloat16


def supports(call: Call) -> str | None:
    """Returns why the kernel cannot compute a call; None if it can."""
    reason = device.unfit(lambda x: x >= LEAST, "8.0 or more") or old()
    return reason or mosaic_call.unsupported(_FORWARD, call)


def old() -> str | None:
    """Returns why this version of JAX cannot compile for this machine's GPU; None if it can, or if
    there is no GPU, because the program is for another machine."""
    return None if device.device() is None or knows_ampere() else OLD


OLD = "this version of JAX cannot multiply by single warps; expected JAX 0.11 or later"


def _forward(problem: GPUProblem, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
    """Computes output `[B, T, N, V]` and normalizer `[B, T, N]`.

    There is a program for each block of 64 queries and each part of its keys (Dao et al. 2023,
    "Flash-Decoding").
    """
    shapes, (rows, columns), unit = problem.shapes, problem.tiling, problem.unit
    visits, parts = problem.visits(spec), problem.parts()

    def kernel(read_item: Callable[[], Any], operands: Ref, results: Ref, scratch: Tree) -> None:
        (query, key, value, leaves, visits_ref), (queries, keys, values) = operands, scratch
        part, b, h, i = read_item()
        kv, row, first_turn = lax.div(h, np.int32(shapes.G)), i * rows, jnp.int32(0)
        block = pl.ds(row, rows)
        queries.fill(first_turn, query.at[b, h, block])
        constants, (q,) = problem.constants(leaves, b, h), queries.wait(first_turn)

        def fetch(j: Index, turn: Index) -> None:
            keys.fill(turn, key.at[b, kv, pl.ds(j * columns, columns)])

        def visit(j: Index, masked: bool, turn: Index, fetch_next: Any, sums: Tree) -> Tree:
            (k,) = keys.wait(turn)
            values.fill(turn, value.at[b, kv, pl.ds(j * columns, columns)])
            tile = problem.tile(leaves, TileIndex(b, h, row, j * columns), constants)
            (products,) = matrix_units.multiply(unit, [(q, k)], transposed=True)
            weights, sums = online(problem, masked, tile, products, sums)
            (v,) = values.wait(turn)
            fetch_next()
            pair = weights.astype(shapes.dtype), v
            (weighted,) = matrix_units.multiply(unit, [pair], onto=[sums.weighted])
            return sums._replace(weighted=weighted)

        state, share = (first_turn, initial(unit, rows, shapes.V)), (part, parts)
        _, sums = visits.fold_ahead(visits_ref, (b, h, i), fetch, visit, state, share)
        out, normalizer = mosaic_interpreter.run(functools.partial(finish, problem.factors), sums)
        out = out.astype(results[0].dtype)
        for result, x in zip(results, (out, *normalizer), strict=True):
            put(problem.unit, result.at[part, b, h, block], x)

    operands = *copied_order(unit, query, key, value), problem.refs.arrays, visits.arrays
    results = forward_results(shapes, parts, heads_first=True)
    tile = functools.partial(tiles_in_memory, 1, width=shapes.H, dtype=shapes.dtype)
    scratch = [Stream.scratch(unit, tile(rows=x)) for x in (rows, columns, columns)]
    order = Order.of(problem, visits, shapes.N, parts)
    out, *rest = launch(
        "jattn_ampere_forward", problem, order, kernel, operands, results, scratch, 1
    )
    return joined(jnp.swapaxes(out, 2, 3), *rest)


class _AmpereGradients(backward.GradientProgram):
    """A program whose only warpgroup keeps 64 queries or, with `by_key`, 64 keys."""

    def run(self) -> None:
        (resident, _), unit, first_turn = self.memory, self.problem.unit, jnp.int32(0)
        kept = self.part(self.place[2] * ROWS, ROWS, self.place[1])
        resident.fill(first_turn, *[x.at[kept] for x in self.resident])
        statistics = self.kept_statistics(unit, *self.place)
        add_head = functools.partial(self.add_head, resident.wait(first_turn), statistics)
        zeros = dict.fromkeys(self.which, unit.zeros(ROWS, self.problem.shapes.H))
        _, totals = tile_schedule.repeat(0, self.problem.heads, add_head, (first_turn, zeros))
        gradients = finished(self.problem, totals, statistics)
        for result, gradient in zip(self.results, gradients, strict=True):
            put(unit, result.at[kept], gradient.astype(result.dtype))

    def add_head(self, resident: Any, kept_statistics: Any, g: Any, state: Tree) -> Any:
        """Adds all streamed tiles of query head g of the group to the state.

        `resident` are the kept arrays in shared memory. `kept_statistics` are those of kept
        queries, or None if keys are kept.
        """
        problem, (b, key_head, i), (_, stream) = self.problem, self.place, self.memory
        h = key_head * problem.heads + g
        constants = problem.constants(self.leaves, b, h)

        def fetch(x: Any, turn: Any) -> None:
            stream.fill(turn, *self.tiles(h, x))

        def visit(x: Any, masked: bool, turn: Any, fetch_next: Any, totals: Tree) -> Any:
            arrays = stream.wait(turn)
            fetch_next()
            index = self.tile_index(h, i * ROWS, x * problem.streamed)
            tile = problem.tile(self.leaves, index, constants)
            block = problem.unit, self.statistics, b, h, x
            statistics = kept_statistics or functools.partial(RowStatistics.read, *block)
            operands = {"masked": masked, "statistics": statistics, "resident": resident}
            return add_gradients(problem, totals, arrays, tile=tile, **operands)

        return self.visits.fold_ahead(self.visits_ref, (b, h, i), fetch, visit, state)


def _gradients(problem: GPUProblem, *call: Any) -> list[Array]:
    """Computes gradients, see `mosaic_call.GradientKernels.run`."""
    shapes, size = problem.shapes, problem.streamed
    scratch = [
        Stream.scratch(problem.unit, *[tiles_in_memory(n, rows, shapes.H, shapes.dtype)] * 2)
        for n, rows in ((1, ROWS), (2, size))
    ]
    name = "jattn_ampere_d_keys" if problem.by_key else "jattn_ampere_d_queries"
    rows = size if problem.by_key else ROWS
    return backward.launched(name, _AmpereGradients, (problem, *call), rows, scratch, 1)


def _streamed(spec: Spec, width: int) -> tuple[int, int]:
    """Returns the sizes of streamed tiles, the most that fit the registers."""
    if width <= 64:
        return 32 if spec.score is not None and spec.dropout_rate else 64, 32
    return 32 if width <= 128 else 16, 16


# A tile has the most keys for which registers are left for masks and score functions.
_FORWARD = mosaic_call.ForwardKernel(
    tiling=lambda _, x: Tiling(ROWS, 64 if max(x.H, x.V) <= 128 else 16),
    products=Products.WARP,
    run=_forward,
)
BACKWARD = mosaic_call.GradientKernels(
    rows=lambda _: ROWS, streamed=_streamed, products=Products.WARP, run=_gradients
)


def functions(platform: str) -> AttentionVJP:
    """Returns the forward and backward functions; they are interpreted on a CPU."""
    check_version("ampere", platform)
    return mosaic_call.functions(_FORWARD, BACKWARD, platform)


def decode(platform: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    """Computes the attention to a cache, see `gpu_decode.attend`."""
    check_version("ampere", platform)
    return gpu_decode.attend(_FORWARD, platform, spec, query, cache)


READER = Reader(functools.partial(gpu_decode.unreadable, _FORWARD), decode)


def check_version(name: str, platform: str) -> None:
    """Raises NotImplementedError if this version of JAX cannot compile the implementation."""
    if platform != "cpu" and not knows_ampere():
        raise NotImplementedError(f"implementation '{name}': {OLD}")


KERNEL = Kernel(supports, functions, reader=READER)
