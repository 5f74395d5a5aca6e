"""Attention as GPU kernels for any mask and score function, in memory linear in T and S.

FlashAttention-2 (Dao 2023): forward, one program for each block of queries folds the tiles of keys
that the mask leaves into an online softmax; backward, weights are computed again from q, k and lse,
once with the keys as inner loop for the gradients of queries, once with the queries for those of
keys and values, so that no two programs add to the same place and sums have one order. Gradients of
score parameters have programs of their own, which cost nothing where nobody asks for them.

Which tiles a program visits, and which of them need no mask, are index arrays made from the tile
map: constants for static masks, computed beforehand in the same program for others. The scores of a
tile are those of `jattn.tile`, so that kernels know nothing of masks and score functions.

Written for Pallas's Triton form, in which memory is indexed at will; on a CPU the same kernels are
interpreted.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jattn import softmax, tile, tuning
from jattn.kernels.common import block_mask, reverse_mode, slicing, tile_schedule
from jattn.kernels.common.vjp import AttentionVJP, cast_cotangent, with_headroom
from jattn.kernels.gpu import kernel_refs
from jattn.kernels.gpu.parameter import Parameter
from jattn.kernels.xla import blockwise
from jattn.spec import (
    Shapes,
    Spec,
    Tiling,
    has_mask,
    parameter_letters,
    parameters,
    with_parameters,
)


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None or why not: what registers cannot hold, and functions that do more than look up."""
    if shapes.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"expected float32, bfloat16 or float16, got {shapes.dtype}"
    too_wide = kernel_refs.too_wide(shapes)
    if too_wide or 0 in (shapes.B, shapes.T, shapes.S):
        return too_wide
    return kernel_refs.unsupported_reason(spec, shapes, choose_tiling(shapes))


def choose_tiling(shapes: Shapes) -> Tiling:
    """Tiles that fit registers and shared memory (160 KiB at most, as on an A100): powers of two of
    at least 16, as matrix units take them. Chosen by what the compiler reports, not by speed."""
    row_bytes = max(shapes.H, shapes.V) * shapes.dtype.itemsize
    fits = 64 if row_bytes <= 256 else 32
    most_q, most_kv = tuning.current().gpu_tile
    return Tiling(min(fits, most_q, _power(shapes.T)), min(fits, most_kv, _power(shapes.S)))


def _power(size: int) -> int:
    return max(16, pl.next_power_of_2(size))


# ---------------------------------------------------------------------------------------------
# What all kernels share
# ---------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Of a block of queries: the fields of `PerQuery`."""

    q: Float[Array, "t H"]
    d_out: Float[Array, "t V"]
    maximum: Float[Array, " t"]
    log_total: Float[Array, " t"]
    delta: Float[Array, " t"]


class _Operands(NamedTuple):
    """What kernels read: arrays outside of them, references to memory inside.

    `rows` are `[B, T, N, ...]`, `keys` and `values` `[B, S, K, ...]`, `leaves` those of the spec.
    The forward pass has no more than queries.
    """

    rows: _Rows
    keys: Any
    values: Any
    leaves: list[Any]


class _Problem(NamedTuple):
    """The sizes of a call in whole tiles, its tiles, its spec as kernels read it, and whether the
    kernels are interpreted."""

    shapes: Shapes
    tiling: Tiling
    rules: kernel_refs.SpecRefs
    interpret: bool

    @property
    def blocks(self) -> tuple[int, int]:
        """How many of queries and of keys."""
        return self.shapes.T // self.tiling.block_q, self.shapes.S // self.tiling.block_kv

    @property
    def warps(self) -> int:
        return 4 if max(self.shapes.H, self.shapes.V) <= 64 else 8

    def tile(self, memory: _Operands, b: Any, h: Any, i: Any, j: Any) -> slicing.Tile:
        """Block i of queries and j of keys."""
        row, column = i * self.tiling.block_q, j * self.tiling.block_kv
        return self.rules.tile(memory.leaves, kernel_refs.TileIndex(b, h, row, column))

    def kinds(self, spec: Spec) -> Any:
        """The tile maps `[B or 1, N or 1, n, m]`."""
        return block_mask.kinds(spec, self.shapes.T, self.shapes.S, self.tiling)

    def rows(self, memory: _Operands, b: Any, h: Any, i: Any) -> _Rows:
        """Block i of queries of head h."""
        run = pl.ds(i * self.tiling.block_q, self.tiling.block_q)
        return jax.tree.map(lambda x: x[(b, run, h, *[slice(None)] * (x.ndim - 3))], memory.rows)

    def keys(self, memory: _Operands, b: Any, h: Any, j: Any) -> tuple[Array, Array]:
        """Block j of the keys and values of query head h."""
        run = pl.ds(j * self.tiling.block_kv, self.tiling.block_kv)
        kv = lax.div(h, np.int32(self.shapes.G))
        return memory.keys[b, run, kv, :], memory.values[b, run, kv, :]


def _coordinates(index: Any, *sizes: int) -> list[Any]:
    """Of a flat index; the last changes fastest."""
    places = []
    for size in reversed(sizes):
        places.append(lax.rem(index, np.int32(size)))
        index = lax.div(index, np.int32(size))
    return places[::-1]


class _Result(NamedTuple):
    """What a kernel writes, in float32: `[programs, *block]`, or an array whose blocks lie where
    `at` says."""

    shape: tuple[int, ...]
    block: tuple[int | None, ...]
    at: Callable[[Any], tuple[Any, ...]]

    @classmethod
    def stacked(cls, programs: int, block: tuple[int, ...]) -> "_Result":
        zeros = (np.int32(0),) * len(block)
        return cls((programs, *block), (None, *block), lambda p: (p, *zeros))


def _run(
    name: str, problem: _Problem, programs: int, kernel: Any, operands: Any, results: list[_Result]
) -> list[Array]:
    """`kernel(operands, *results)` in so many programs, interpreted on a CPU.

    Each program sees all operands and its own blocks of the results.
    """
    operands, over = reverse_mode.varying_alike(jax.tree.map(jnp.asarray, tuple(operands)))
    # Not with the library: this takes longer to import than all of it.
    triton = importlib.import_module("jax.experimental.pallas.triton")
    call = pl.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=jax.tree.map(lambda _: pl.BlockSpec(), operands),
        out_specs=[pl.BlockSpec(result.block, result.at) for result in results],
        out_shape=[
            jax.ShapeDtypeStruct(result.shape, jnp.float32, manual_axis_type=over)
            for result in results
        ],
        compiler_params=triton.CompilerParams(num_warps=problem.warps, num_stages=2),
        name=name,
        interpret=problem.interpret,
    )
    return list(call(*operands))


# ---------------------------------------------------------------------------------------------
# At a tile
# ---------------------------------------------------------------------------------------------


def _finite(spec: Spec, x: Array) -> Array:
    """What sums over queries or keys run over: 0 in place of what is not finite, where there is a
    mask that may hide it."""
    return tile.finite(x) if has_mask(spec) else x


def _products(here: slicing.Tile, q: Array, k: Array, v: Array) -> Float[Array, "t s"]:
    """q kᵀ, NaN for keys whose values are not finite."""
    products = tile.product(q, k, here.spec.precision)
    return products + tile.nan_where_nonfinite(v)[None, :] if has_mask(here.spec) else products


def _dot(a: Array, b: Array, spec: Spec) -> Array:
    """a · b, summed in float32. Weights and cotangents take the dtype of what they weigh."""
    return jnp.dot(
        a.astype(b.dtype), b, precision=spec.precision, preferred_element_type=jnp.float32
    )


def _d_scores(
    here: slicing.Tile, rows: _Rows, score: Array, v: Array, masked: bool
) -> tuple[Array, Array]:
    """The cotangent of the scores, and the weights after dropout.

    With weights p and dp = d_out vᵀ, that is p (dp − delta).
    """
    weights = softmax.weights(score, rows.maximum, rows.log_total, masked)
    d_weights = here.drop(_dot(rows.d_out, _finite(here.spec, v).T, here.spec))
    return weights * (d_weights - rows.delta[:, None]), here.drop(weights)


def _d_products(
    here: slicing.Tile, rows: _Rows, k: Array, v: Array, masked: bool
) -> tuple[Array, Array]:
    """The cotangent of q kᵀ, and the weights after dropout."""
    products = _products(here, rows.q, k, v)
    score, pull = jax.vjp(lambda x: here.modify(x, masked), products)
    d_score, weights = _d_scores(here, rows, score, v, masked)
    return pull(d_score)[0], weights


def _d_leaf(here: slicing.Tile, which: int, rows: _Rows, k: Array, v: Array, masked: bool) -> Array:
    """What a tile adds to the gradient of a parameter, in the shape of its part at the tile; for
    one that is looked up, to all its entries `[E]`."""
    products, values = _products(here, rows.q, k, v), parameters(here.spec)

    def scores(x: Any) -> Array:
        replaced = with_parameters(here.spec, [*values[:which], x, *values[which + 1 :]])
        return here._replace(spec=replaced).modify(products, masked)

    own = values[which]
    if not isinstance(own, kernel_refs.GatherRef):
        score, pull = jax.vjp(scores, own)
        return pull(_d_scores(here, rows, score, v, masked)[0])[0]
    d_score, _ = _d_scores(here, rows, scores(own), v, masked)
    return _d_entries(own, scores, d_score)


def _d_entries(own: kernel_refs.GatherRef, scores: Callable[..., Array], d_score: Array) -> Array:
    """The gradient of all entries of an array that is looked up, one after another: that of a
    number added to it wherever it is read. Scattering to memory would have no fixed order."""
    numbers = jnp.arange(pl.next_power_of_2(own.size), dtype=jnp.int32)

    def one(entry: Any, total: Array) -> Array:
        def nudged(x: Array) -> Array:
            return scores(own.wrapped(lambda value, place: value + jnp.where(place == entry, x, 0)))

        _, pull = jax.vjp(nudged, jnp.zeros((), jnp.float32))
        return total + jnp.where(numbers == entry, pull(d_score)[0], 0)

    return tile_schedule.repeat(0, own.size, one, jnp.zeros(numbers.shape, jnp.float32))


# ---------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------


def _by_block(problem: _Problem, width: int, parts: int = 1, *, keys: bool = False) -> _Result:
    """A result `[parts × B, T, N, width]` (`[B, S, K, width]`), a block for each program."""
    shapes, block = problem.shapes, problem.tiling[keys]
    length, heads = (shapes.S, shapes.K) if keys else (shapes.T, shapes.N)

    def at(program: Any) -> tuple[Any, ...]:
        b, h, i = _coordinates(program, parts * shapes.B, heads, length // block)
        return b, i, h, 0

    shape = (parts * shapes.B, length, heads, width)
    return _Result(shape, (None, block, None, width), at)


def _forward(problem: _Problem, spec: Spec, query: Array, key: Array, value: Array) -> Any:
    """Output `[B, T, N, V]` and normalizer `[B, T, N]`; a program for each block of queries, or for
    each of them and each part of the keys (Dao et al. 2023, "Flash-Decoding")."""
    shapes, (n, m) = problem.shapes, problem.blocks
    parts = block_mask.parts(shapes.B * shapes.N * n, m)
    visits = block_mask.of(problem.kinds(spec))

    def kernel(memory: _Operands, visits_ref: Any, out_ref: Any, *rows_refs: Any) -> None:
        part, b, h, i = _coordinates(pl.program_id(0), parts, shapes.B, shapes.N, n)
        q = problem.rows(memory, b, h, i).q

        def step(j: Any, masked: bool, state: softmax.Partial) -> softmax.Partial:
            here, (k, v) = problem.tile(memory, b, h, i, j), problem.keys(memory, b, h, j)
            score = here.modify(_products(here, q, k, v), masked)
            weigh = lambda w: _dot(here.drop(w), _finite(here.spec, v), here.spec)  # noqa: E731
            return softmax.combine(state, softmax.of(score, weigh, differentiable=False))

        first = softmax.empty(problem.tiling.block_q, shapes.V, jnp.float32)
        found = visits.fold(visits_ref, (b, h, i), step, first, (part, parts))
        out_ref[...], normalizer = softmax.finish(found)
        for rows_ref, x in zip(rows_refs, normalizer, strict=True):
            rows_ref[...] = x[:, None]

    rows: Any = _Rows(query, None, None, None, None)  # pyright: ignore[reportArgumentType]
    memory = _Operands(rows, key, value, problem.rules.arrays)
    programs = parts * shapes.B * shapes.N * n
    results = [_by_block(problem, width, parts) for width in (shapes.V, 1, 1)]
    found = _run("jattn_forward", problem, programs, kernel, (memory, visits.arrays), results)
    out, *normalizer = (x.reshape(parts, shapes.B, *x.shape[1:]) for x in found)
    return softmax.join(out, softmax.Normalizer(*(x[..., 0] for x in normalizer)))


def _d_queries(problem: _Problem, memory: _Operands, kinds: Any) -> Array:
    """The gradient `[B, T, N, H]`; a program for each block of queries."""
    shapes, (n, _), visits = problem.shapes, problem.blocks, block_mask.of(kinds)

    def kernel(memory: _Operands, visits_ref: Any, result: Any) -> None:
        b, h, i = _coordinates(pl.program_id(0), shapes.B, shapes.N, n)
        rows = problem.rows(memory, b, h, i)

        def step(j: Any, masked: bool, total: Array) -> Array:
            here, (k, v) = problem.tile(memory, b, h, i, j), problem.keys(memory, b, h, j)
            d_products, _ = _d_products(here, rows, k, v, masked)
            return total + _dot(d_products, _finite(here.spec, k), here.spec)

        zeros = jnp.zeros((problem.tiling.block_q, shapes.H), jnp.float32)
        result[...] = visits.fold(visits_ref, (b, h, i), step, zeros)

    results = [_by_block(problem, shapes.H)]
    programs = shapes.B * shapes.N * n
    return _run("jattn_d_queries", problem, programs, kernel, (memory, visits.arrays), results)[0]


def _d_keys(problem: _Problem, memory: _Operands, kinds: Any) -> list[Array]:
    """The gradients `[B, S, K, H]` and `[B, S, K, V]`; a program for each block of keys, which goes
    through the heads of its group."""
    shapes, (_, m), visits = problem.shapes, problem.blocks, block_mask.of(kinds, by_key=True)

    def kernel(memory: _Operands, visits_ref: Any, *results: Any) -> None:
        b, kv, j = _coordinates(pl.program_id(0), shapes.B, shapes.K, m)
        k, v = problem.keys(memory, b, kv * shapes.G, j)

        def of_head(g: Any, total: Any) -> Any:
            h = kv * shapes.G + g

            def step(i: Any, masked: bool, total: Any) -> Any:
                here, rows = problem.tile(memory, b, h, i, j), problem.rows(memory, b, h, i)
                d_products, weights = _d_products(here, rows, k, v, masked)
                d_k = _dot(d_products.T, _finite(here.spec, rows.q), here.spec)
                return total[0] + d_k, total[1] + _dot(weights.T, rows.d_out, here.spec)

            return visits.fold(visits_ref, (b, h, j), step, total)

        zeros = [jnp.zeros((problem.tiling.block_kv, x), jnp.float32) for x in (shapes.H, shapes.V)]
        found = tile_schedule.repeat(0, shapes.G, of_head, tuple(zeros))
        for result, total in zip(results, found, strict=True):
            result[...] = total

    results = [_by_block(problem, width, keys=True) for width in (shapes.H, shapes.V)]
    programs = shapes.B * shapes.K * m
    return _run("jattn_d_keys", problem, programs, kernel, (memory, visits.arrays), results)


def _d_parameters(problem: _Problem, spec: Spec, memory: _Operands, kinds: Any) -> list[Array]:
    """The gradients of all parameters, each in its own shape. Where one is looked up and has many
    entries, XLA sums them up tile by tile: it can scatter."""
    found = []
    for which, leaf in enumerate(parameters(spec)):
        parameter = Parameter.of(spec, which)
        if parameter.looked_up and parameter.entries > tuning.current().gpu_gathered_entries:
            rows, keys, values, _ = memory
            every = blockwise.parameter_gradients(spec, rows, keys, values, problem.tiling)
            found.append(every[which])
            continue
        by_tile = parameter.runs_along("T") and parameter.runs_along("S")
        find = _d_by_tile if by_tile and not parameter.looked_up else _d_by_block
        parts = find(problem, parameter, memory, kinds)
        found.append(tile.sum_heads(parts, leaf, parameter_letters(spec)[which]))
    return found


def _d_by_block(problem: _Problem, parameter: Parameter, memory: _Operands, kinds: Any) -> Array:
    """Of a parameter that does not run along both T and S, for each head `[B, N, ...]`; a program
    for each block of queries, or of keys where it runs along S."""
    shapes, by_key = problem.shapes, parameter.runs_along("S") and not parameter.looked_up
    n, visits = problem.blocks[by_key], block_mask.of(kinds, by_key=by_key)
    block = parameter.block(problem.tiling)

    def kernel(memory: _Operands, visits_ref: Any, result: Any) -> None:
        b, h, x = _coordinates(pl.program_id(0), shapes.B, shapes.N, n)

        def step(y: Any, masked: bool, total: Array) -> Array:
            i, j = (y, x) if by_key else (x, y)
            here, rows = problem.tile(memory, b, h, i, j), problem.rows(memory, b, h, i)
            k, v = problem.keys(memory, b, h, j)
            return total + _d_leaf(here, parameter.which, rows, k, v, masked)

        result[...] = visits.fold(visits_ref, (b, h, x), step, jnp.zeros(block, jnp.float32))

    programs = shapes.B * shapes.N * n
    results = [_Result.stacked(programs, block)]
    (parts,) = _run(
        "jattn_d_parameter", problem, programs, kernel, (memory, visits.arrays), results
    )
    return parameter.joined(parts.reshape(shapes.B, shapes.N, n, *block))


def _d_by_tile(problem: _Problem, parameter: Parameter, memory: _Operands, kinds: Any) -> Array:
    """Of a parameter along T and S, `[B or 1, N or 1, T, S]`; a program for each of its tiles,
    which goes through the batch rows and heads that share it: nothing larger is ever held."""
    shapes, (n, m), (rows, columns) = problem.shapes, problem.blocks, problem.tiling
    own, shared = parameter.own, parameter.shared(shapes.B, shapes.N)

    def kernel(memory: _Operands, kinds_ref: Any, result: Any) -> None:
        *first, i, j = _coordinates(pl.program_id(0), *own, n, m)

        def of_head(index: Any, total: Array) -> Array:
            b, h = (x + y for x, y in zip(first, _coordinates(index, *shared), strict=True))

            def add(_: Any, total: Array) -> Array:
                here, rows = problem.tile(memory, b, h, i, j), problem.rows(memory, b, h, i)
                k, v = problem.keys(memory, b, h, j)
                return total + _d_leaf(here, parameter.which, rows, k, v, masked=True)

            kind = kinds_ref[(*block_mask.clamped(kinds_ref, b, h), i, j)]
            # Not by comparing: a bound that is a converted boolean is folded to one bit.
            return tile_schedule.repeat(0, jnp.minimum(kind, np.int32(1)), add, total)

        zeros = jnp.zeros((rows, columns), jnp.float32)
        result[...] = tile_schedule.repeat(0, math.prod(shared), of_head, zeros)

    def at(program: Any) -> tuple[Any, ...]:
        return tuple(_coordinates(program, *own, n, m))

    found = _Result((*own, shapes.T, shapes.S), (None, None, rows, columns), at)
    programs = math.prod((*own, n, m))
    operands = (memory, kinds.astype(np.int32))
    return _run("jattn_d_parameter", problem, programs, kernel, operands, [found])[0]


# ---------------------------------------------------------------------------------------------
# The call
# ---------------------------------------------------------------------------------------------


def _padded(
    platform: str, spec: Spec, rows: tuple[Array, ...], key: Array, value: Array
) -> tuple[slicing.Call, _Problem]:
    """A call with head sizes that are powers of two, interpreted on a CPU."""
    tiling = choose_tiling(Shapes.of(rows[0], value))
    call = slicing.Call.of(tiling, _power, spec, rows, key, value)
    rules = kernel_refs.SpecRefs(call.spec, tiling)
    return call, _Problem(call.shapes, tiling, rules, interpret=platform == "cpu")


def _forward_pass(
    platform: str, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, softmax.Normalizer, Array]:
    call, problem = _padded(platform, spec, (query,), key, value)
    out, normalizer = _forward(problem, call.spec, call.rows[0], call.key, call.value)
    rows = query.shape[:3]
    normalizer = jax.tree.map(lambda x: slicing.unpadded(x, rows), normalizer)
    return slicing.unpadded(out, (*rows, value.shape[3])), normalizer, jnp.zeros((), bool)


def _backward_pass(
    platform: str, spec: Spec, per_query: Any, key: Array, value: Array, _: Array
) -> tuple[list[Array], Array, Array, Array]:
    call, problem = _padded(platform, spec, cast_cotangent(per_query), key, value)
    memory = _Operands(_Rows(*call.rows), call.key, call.value, problem.rules.arrays)
    kinds = problem.kinds(call.spec)
    d_key, d_value = _d_keys(problem, memory, kinds)
    return (
        slicing.unpadded_parameters(_d_parameters(problem, call.spec, memory, kinds), spec),
        slicing.unpadded(_d_queries(problem, memory, kinds), per_query[0].shape),
        slicing.unpadded(d_key, key.shape),
        slicing.unpadded(d_value, value.shape),
    )


def functions(platform: str) -> AttentionVJP:
    """Forward and backward; interpreted on a CPU."""
    forward, backward = (functools.partial(f, platform) for f in (_forward_pass, _backward_pass))
    return AttentionVJP(with_headroom(forward), backward)
