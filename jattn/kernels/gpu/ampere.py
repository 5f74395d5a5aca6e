"""Attention on GPUs since Ampere for any mask, by the products of single warps.

FlashAttention-2 (Dao 2023) in Pallas's Mosaic GPU form. A program is one warpgroup, which holds 64
queries, or in the backward pass 64 queries or keys, and computes while the tile that follows is
copied to shared memory. Before Hopper each thread copies its share and all wait for one another;
since Hopper a unit of its own copies, and a barrier says when a tile is there.

What is visited, and what needs no mask, comes from index arrays, see `block_mask`; the scores of a
tile from `jattn.tile`, through `mosaic_interpreter`. On a CPU the same kernels run in JAX's
interpreter.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import softmax
from jattn.kernels.common import block_mask, tile_schedule
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.gpu import kernel_refs, mosaic_call, mosaic_interpreter
from jattn.kernels.gpu.registers import ROWS, Problem, Unit, mosaic
from jattn.kernels.gpu.tile_weights import Rows, add_gradients, finished, nothing, online
from jattn.kernels.gpu.warpgroups import Order, launch, tiles_in_memory
from jattn.spec import Shapes, Spec


_LEAST = (8, 0)  # compute capability: others have no products in bfloat16
_COPYING_UNIT = (9, 0)  # since this one


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None or why not."""
    return _other_machine() or mosaic_call.unsupported(_KERNELS.tiling(shapes), spec, shapes)


def _other_machine() -> str | None:
    device = _device()
    if device is None:  # and the program is for another machine
        return None
    if _capability_of(device) < _LEAST:
        return f"expected compute capability 8.0 or more, got {device.compute_capability}"
    return None if hasattr(mosaic(), "mma") else _OLD


_OLD = "this version of JAX has no products of single warps; expected JAX 0.12 or later"


def _device() -> Any:
    """One that runs CUDA, or None."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


def _capability_of(device: Any) -> tuple[int, ...]:
    return tuple(map(int, device.compute_capability.split(".")))


def _copies_by_unit(unit: Unit) -> bool:
    """Whether the device that the program is for has a unit that copies. JAX takes one that says
    nothing for a Hopper, and so must this; the interpreter is one."""
    device = jax.sharding.get_abstract_mesh().abstract_device or _device()
    known = hasattr(device, "compute_capability") and not unit.interpreted
    return not known or _capability_of(device) >= _COPYING_UNIT


class _Stream(NamedTuple):
    """Places in shared memory, filled and used in turn; each holds arrays that come and go
    together. `filled` is a barrier for each place, None where threads copy themselves."""

    arrays: tuple[Any, ...]
    filled: Any

    @classmethod
    def scratch(cls, unit: Unit, places: int, *arrays: Any) -> "_Stream":
        """Of arrays in shared memory `[places, ...]`."""
        if not _copies_by_unit(unit):
            return cls(arrays, None)
        barrier = mosaic().Barrier(num_barriers=places, num_arrivals=len(arrays))
        return cls(arrays, barrier)

    def _place(self, turn: Any) -> Any:
        return lax.rem(turn, np.int32(self.arrays[0].shape[0]))

    def fill(self, turn: Any, *sources: Any) -> None:
        """Starts to copy to the place of this turn. All threads must be done with what it held, and
        are: all have waited for another copy since."""
        gpu, place = mosaic(), self._place(turn)
        if self.filled is not None:
            gpu.commit_smem()
        for source, array in zip(sources, self.arrays, strict=True):
            if self.filled is None:
                inside = gpu.OOBFillMode.PROMISE_IN_BOUNDS
                gpu.copy_gmem_to_smem(source, array.at[place], oob_mode=inside)
            else:
                gpu.copy_gmem_to_smem(source, array.at[place], self.filled.at[place])

    def wait(self, turn: Any) -> list[Any]:
        """The arrays of this turn, once they are there and all threads have come here."""
        place = self._place(turn)
        if self.filled is None:
            mosaic().wait_gmem_to_smem(0)
        else:
            mosaic().barrier_wait(self.filled.at[place])
        return [x.at[place] for x in self.arrays]


def _put(problem: Problem, memory: Any, value: Array) -> None:
    """From registers to global memory."""
    if problem.unit.interpreted:
        memory[...] = value
    else:
        mosaic().store(memory, value, optimized=False)


def _heads_first(*arrays: Array) -> list[Array]:
    """Threads copy rows that follow one another in memory."""
    return [jnp.swapaxes(x, 1, 2) for x in arrays]


def _forward(problem: Problem, spec: Spec, query: Array, key: Array, value: Array) -> Any:
    """Output `[B, T, N, V]` and normalizer `[B, T, N]`; a program for every 64 queries, or for each
    of them and each part of the keys (Dao et al. 2023, "Flash-Decoding")."""
    shapes, (rows, columns), unit = problem.shapes, problem.tiling, problem.unit
    visits = block_mask.of(problem.kinds(spec))
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
            soften = functools.partial(online, masked, problem.scale, problem.special)
            weights, found = here.run(soften, products, before)
            (v,) = values.wait(turn)
            fetch_next(turn + 1)
            pair = weights.astype(shapes.dtype), v
            (weighted,) = unit.products([pair], onto=[found.weighted])
            return turn + 1, found._replace(weighted=weighted)

        state = first, softmax.Partial(*map(unit.lay, nothing(shapes.V), ("t", "t", "ts")))
        at, share = (b, h, i), (part, parts)
        _, found = visits.fold_ahead(visits_ref, at, fetch, first, step, state, share)
        out, normalizer = mosaic_interpreter.run(softmax.finish, found)
        out = out.astype(results[0].dtype)
        for result, x in zip(results, (out, *normalizer), strict=True):
            _put(problem, result.at[part, b, h, own], x)

    operands = *_heads_first(query, key, value), problem.rules.arrays, visits.arrays
    heads = parts, shapes.B, shapes.N, shapes.T
    out = (*heads, shapes.V), jnp.float32 if parts > 1 else shapes.dtype
    results = [out, (heads, jnp.float32), (heads, jnp.float32)]
    tile = functools.partial(tiles_in_memory, 1, width=shapes.H, dtype=shapes.dtype)
    scratch = [_Stream.scratch(unit, 1, tile(rows=x)) for x in (rows, columns, columns)]
    order = Order.of(problem, visits, shapes.N, parts)
    found = launch("jattn_ampere_forward", problem, order, kernel, operands, results, scratch, 1)
    out, *along = (jnp.swapaxes(x, 2, 3) for x in found)
    return softmax.join(out, softmax.Normalizer(*along))


def _gradients(
    problem: Problem, spec: Spec, per_head: Any, key: Array, value: Array
) -> list[Array]:
    """Those of queries, or of keys and values where `problem.by_key`; a program for every 64."""
    shapes, by_key, unit = problem.shapes, problem.by_key, problem.unit
    visits = block_mask.of(problem.kinds(spec), by_key=by_key)
    query, d_out, *rows = per_head
    size = problem.rules.sizes["T" if by_key else "S"]  # of what comes by
    rows, far = Rows.stacked(rows, problem.rules.sizes["T"])
    if by_key:
        visits = visits.without_full(far)

    def kernel(place: Any, operands: Any, results: Any, scratch: Any) -> None:
        (_, b, unit_head, i), (kept, stream) = place, scratch
        per_query, per_key, rows, leaves, visits_ref = operands
        mine, others = (per_key, per_query) if by_key else (per_query, per_key)
        start, first, group = i * ROWS, jnp.int32(0), np.int32(shapes.G)
        kept.fill(first, *[x.at[b, unit_head, pl.ds(start, ROWS)] for x in mine])
        own, near = None if by_key else Rows.read(unit, rows, b, unit_head, i), kept.wait(first)
        numbers = {} if problem.heads > 1 else problem.numbers(leaves, b, unit_head)

        def of_head(g: Any, state: Any) -> Any:
            h = unit_head * problem.heads + g
            head = h if by_key else lax.div(h, group)

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
                found = add_gradients(problem, masked, of_rows, near, arrays, totals, here)
                return turn + 1, *found

            return visits.fold_ahead(visits_ref, (b, h, i), fetch, state[0], step, state)

        zeros = [unit.lay(jnp.zeros((ROWS, shapes.H), jnp.float32), "ts") for _ in results]
        _, *found = tile_schedule.repeat(0, problem.heads, of_head, (first, *zeros))
        for result, total in zip(results, finished(problem, found, own), strict=True):
            to = result.at[b, unit_head, pl.ds(start, ROWS)]
            _put(problem, to, total.astype(result.dtype))

    tensors = _heads_first(query, d_out), _heads_first(key, value)
    operands = *tensors, rows, problem.rules.arrays, visits.arrays
    results = [(x.shape, shapes.dtype) for x in (tensors[1] if by_key else tensors[0][:1])]
    scratch = [
        _Stream.scratch(unit, n, *[tiles_in_memory(n, rows, shapes.H, shapes.dtype)] * 2)
        for n, rows in ((1, ROWS), (2, size))
    ]
    name = "jattn_ampere_d_keys" if by_key else "jattn_ampere_d_queries"
    order = Order.of(problem, visits, shapes.K if by_key else shapes.N)
    return _heads_first(*launch(name, problem, order, kernel, operands, results, scratch, 1))


# As many keys and queries as fit registers, beside what masks and score functions need.
_KERNELS = mosaic_call.Kernels(
    rows=ROWS,
    columns=lambda width: 64 if width <= 128 else 16,
    streamed=lambda width: (64, 32) if width <= 64 else (32, 16),
    by_warp=True,
    forward=_forward,
    gradients=_gradients,
)


def functions(platform: str) -> AttentionVJP:
    """Forward and backward; interpreted on a CPU."""
    if platform != "cpu" and not hasattr(mosaic(), "mma"):
        raise NotImplementedError(f"implementation 'ampere': {_OLD}")
    return mosaic_call.functions(_KERNELS, platform)
