"""Additive attention of one head: w · tanh(query + key) for all pairs, never T × S × A at once.

Which tiles are visited says `tile_schedule`. Forward goes by the online softmax, backward again
from the inputs, out and normalizer, as in `blockwise`. Inputs of one tile are written as the
formula.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jattn import softmax, tile, tuning
from jattn._pytree import select_head
from jattn._types import accumulation
from jattn.kernels.common import lowering, reverse_mode, slicing, tile_schedule
from jattn.kernels.common.vjp import PerQuery
from jattn.spec import (
    Shapes,
    Spec,
    Tiling,
    parameter_letters,
    parameters,
    prepare,
    with_parameters,
)


def _scores(
    query: Float[Array, "t A"], key: Float[Array, "s A"], w_score: Float[Array, " A"]
) -> Float[Array, "t s"]:
    """w · tanh(query_i + key_j) for all pairs, a block of keys at a time."""
    (t, A), s = query.shape, len(key)
    size = min(s, max(tuning.current().additive_keys, tuning.current().additive_pairs // t))
    blocks = -(-s // size)
    padded = jnp.pad(key, ((0, blocks * size - s), (0, 0)))

    @jax.checkpoint
    def block(keys: Float[Array, "n A"]) -> Float[Array, "t n"]:
        return jnp.einsum("tna,a->tn", jnp.tanh(query[:, None, :] + keys[None, :, :]), w_score)

    by_block = jax.lax.map(block, padded.reshape(blocks, size, A))
    return jnp.moveaxis(by_block, 0, 1).reshape(t, -1)[:, :s]


class _Pieces(NamedTuple):
    """Queries, keys and values of one head or tile, in the dtype of sums.

    What is not finite is 0 here and NaN in what is added to scores: by selection, as 0 × NaN would
    reach the gradients of everything else from keys that are masked.
    """

    query: Float[Array, "t A"]
    lost_query: Float[Array, " t"]
    key: Float[Array, "s A"]
    value: Float[Array, "s V"]
    lost_key: Float[Array, " s"]

    @classmethod
    def of(cls, query: Array, key: Array, value: Array) -> "_Pieces":
        q, k, v = (tile.finite(x.astype(accumulation(x.dtype))) for x in (query, key, value))
        return cls(
            q,
            tile.nan_where_nonfinite(query),
            k,
            v,
            tile.nan_where_nonfinite(key) + tile.nan_where_nonfinite(value),
        )

    def at(self, row: Any, rows: int, run: tile_schedule.Run, carried: Any) -> "_Pieces":
        """Those of a tile; `carried` is something that changes from one step to the next."""
        queries = (slicing.take(x, row, rows) for x in self[:2])
        keys = tuple(slicing.take(x, run.start, run.size) for x in self[2:])
        if carried is not None and run.size == len(self.key):
            # Does not depend on the step of the loop: XLA would take the tile's work out of the
            # loop, and so do it also where the loop visits nothing.
            keys, _ = jax.lax.optimization_barrier((keys, carried))
        return _Pieces(*queries, *keys)

    def scores(
        self, here: slicing.Tile, w_score: Array, masked: bool = True
    ) -> Float[Array, "t s"]:
        """Scores after score functions and mask."""
        products = _scores(self.query, self.key, w_score)
        products = products + (self.lost_query[:, None] + self.lost_key[None, :])
        return tile.modify(here.spec, products, here.b, here.h, here.rows, here.columns, masked)

    def pulled(self, here: slicing.Tile, w_score: Array, masked: bool) -> tuple[Array, Any]:
        """Scores, and the function from their cotangent to those of the query, key and w_score and
        of the score function's parameters."""

        def scores(query: Array, key: Array, w_score: Array, params: Any) -> Array:
            spec = with_parameters(here.spec, params)
            pieces = self._replace(query=query, key=key)
            return pieces.scores(here._replace(spec=spec), w_score, masked)

        return jax.vjp(scores, self.query, self.key, w_score, parameters(here.spec))


def _single_tile(
    spec: Spec, b: Any, h: Any, query: Array, key: Array, value: Array, w_score: Array
) -> Float[Array, "T V"]:
    """One head in one tile, differentiable as it stands."""
    here = slicing.Tile(spec, b, h, *tile.spans(spec, len(query), len(key)))
    pieces = _Pieces.of(query, key, value)
    score = pieces.scores(here, w_score)
    return softmax.finish(softmax.of(score, lambda w: here.drop(w) @ pieces.value))[0]


def _forward_head(
    tiling: Tiling,
    spec: Spec,
    b: Any,
    h: Any,
    query: Array,
    key: Array,
    value: Array,
    w_score: Array,
) -> tuple[Float[Array, "T V"], softmax.Normalizer]:
    """Output and normalizer of one head, tile by tile; sizes are whole tiles."""
    schedule, rows = tile_schedule.schedule(spec, len(query), len(key), tiling), tiling.block_q
    pieces = _Pieces.of(query, key, value)

    def block(i: Any) -> tuple[Array, softmax.Normalizer]:
        def step(run: tile_schedule.Run, state: softmax.Partial | None) -> softmax.Partial:
            here = slicing.Tile.at(spec, b, h, i * rows, rows, run)
            piece = pieces.at(i * rows, rows, run, None if state is None else state.total)
            score = piece.scores(here, w_score, run.masked)
            part = softmax.of(score, lambda w: here.drop(w) @ piece.value, differentiable=False)
            return part if state is None else softmax.combine(state, part)

        first = None if schedule.of(i) else softmax.empty(rows, value.shape[1], pieces.value.dtype)
        return softmax.quotient(tile_schedule.visit(schedule, i, step, first))

    return jax.tree.map(
        tile_schedule.join, tile_schedule.map_blocks(schedule, len(query) // rows, block)
    )


class _Gradients(NamedTuple):
    """Of one head; that of values stands transposed, as the product is faster so."""

    query: Float[Array, "T A"]
    key: Float[Array, "S A"]
    value: Float[Array, "V S"]
    w_score: Float[Array, " A"]
    params: Any


def _backward_head(
    tiling: Tiling,
    spec: Spec,
    b: Any,
    h: Any,
    query: Array,
    d_out: Array,
    maximum: Array,
    log_total: Array,
    delta: Array,
    key: Array,
    value: Array,
    w_score: Array,
) -> _Gradients:
    """Gradients of one head; what stands along the queries are the fields of `PerQuery`."""
    schedule, rows = tile_schedule.schedule(spec, len(query), len(key), tiling), tiling.block_q
    pieces = _Pieces.of(query, key, value)
    letters = parameter_letters(spec)

    def block(i: Any, total: _Gradients) -> _Gradients:
        d_i, maximum_i, log_total_i, delta_i = (
            slicing.take(x, i * rows, rows) for x in (d_out, maximum, log_total, delta)
        )

        def step(run: tile_schedule.Run, total: _Gradients) -> _Gradients:
            here = slicing.Tile.at(spec, b, h, i * rows, rows, run)
            piece = pieces.at(i * rows, rows, run, total.w_score)
            score, pull = piece.pulled(here, w_score, run.masked)
            weights = softmax.weights(score, maximum_i, log_total_i, run.masked)
            d_weights = here.drop(d_i @ piece.value.T)
            d_query, d_key, d_score, d_params = pull(weights * (d_weights - delta_i[:, None]))
            starts = {"T": i * rows, "S": run.start}
            return _Gradients(
                slicing.put(total.query, d_query, starts["T"], 0),
                slicing.put(total.key, d_key, starts["S"], 0),
                slicing.put(total.value, d_i.T @ here.drop(weights), starts["S"], 1),
                total.w_score + d_score,
                slicing.put_leaves(total.params, d_params, letters, starts),
            )

        return tile_schedule.visit(schedule, i, step, total)

    zeros = (pieces.query, pieces.key, pieces.value.T, w_score, parameters(spec))
    total = _Gradients(*jax.tree.map(jnp.zeros_like, zeros))
    return tile_schedule.fold_blocks(schedule, len(query) // rows, block, total)


def _forward_rows(
    tiling: Tiling,
    platform: str,
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    w_score: Array,
) -> tuple[Float[Array, "B T 1 V"], softmax.Normalizer]:
    """Output and normalizer `[B, T, 1]` of all batch rows."""
    one = functools.partial(_forward_head, tiling, w_score=w_score)
    if not tuning.sizes(platform).in_turn:
        return tile.over_heads(one, spec, (query,), (key, value), out_axes=1)

    def row(operands: Any) -> Any:
        b, *arrays = operands
        return one(select_head(spec, b, 0), b, np.int32(0), *arrays)

    B, arrays = query.shape[0], (query, key, value)
    rows = (jnp.arange(B, dtype=jnp.int32), *(x[:, :, 0] for x in arrays))
    return jax.tree.map(lambda x: x[:, :, None], jax.lax.map(row, rows))


def _backward_rows(
    tiling: Tiling,
    platform: str,
    spec: Spec,
    per_query: Any,
    key: Array,
    value: Array,
    w_score: Array,
) -> tuple[Any, Array, Array, Array, Array]:
    """Gradients of params, query, key, value and w_score, summed over batch rows where those are
    shared; `per_query` is a `PerQuery`."""
    one = functools.partial(_backward_head, tiling, w_score=w_score)
    letters = parameter_letters(spec)
    if not tuning.sizes(platform).in_turn:
        axes = _Gradients._make((1, 1, 2, 0, [0] * len(letters)))
        found = tile.over_heads(one, spec, tuple(per_query), (key, value), axes)
        d_value = jnp.moveaxis(found.value, 1, 3)
        summed = tile.gather_gradients(spec, 1, found.query, found.key, d_value, found.params)
        return *summed, found.w_score.sum(axis=(0, 1))

    def row(total: Any, operands: Any) -> tuple[Any, Any]:
        b, *arrays = operands
        part = one(select_head(spec, b, 0), b, np.int32(0), *arrays)
        params = slicing.put_params(total[0], part.params, letters, b, np.int32(0))
        return (params, total[1] + part.w_score), (part.query, part.key, part.value.T)

    total = jax.tree.map(jnp.zeros_like, (parameters(spec), w_score))
    rows = (
        jnp.arange(key.shape[0], dtype=jnp.int32),
        *(x[:, :, 0] for x in (*per_query, key, value)),
    )
    (params, d_score), by_row = jax.lax.scan(row, total, rows)
    return params, *(x[:, :, None] for x in by_row), d_score


def _over_tiles(
    tiling: Tiling, spec: Spec, query: Array, key: Array, value: Array, w_score: Array
) -> Float[Array, "B T 1 V"]:
    """Tile by tile, with the derivative by formula: the backward pass walks as the forward one."""
    (B, T, _, _), (_, S, _, V) = query.shape, value.shape
    padded = tuple(-(-size // block) * block for size, block in zip((T, S), tiling, strict=True))
    dtype = accumulation(query.dtype)

    def forward(params: list[Array], spec: Spec, *arrays: Array) -> Any:
        rows = jax.ShapeDtypeStruct((B, padded[0], 1), dtype)
        like = (
            jax.ShapeDtypeStruct((*rows.shape, V), dtype),
            softmax.Normalizer(rows, rows),  # pyright: ignore[reportArgumentType]
        )
        function = functools.partial(_forward_rows, tiling)
        return lowering.platform_dependent(function, like, with_parameters(spec, params), *arrays)

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, *arrays: Array) -> Array:
        return forward(params, spec, *arrays)[0]

    def run_forward(params: list[Array], spec: Spec, *arrays: Array) -> Any:
        out, normalizer = forward(params, spec, *arrays)
        return out, (params, spec, *arrays, out, normalizer)

    def run_backward(residuals: Any, d_out: Array) -> Any:
        params, spec, query, *arrays, out, normalizer = residuals
        per_query = PerQuery.of(query, d_out, normalizer, jnp.sum(d_out * out, axis=-1))
        like = (params, *(jax.ShapeDtypeStruct(x.shape, dtype) for x in (query, *arrays)))
        function = functools.partial(_backward_rows, tiling)
        d_params, *found = lowering.platform_dependent(
            function, like, with_parameters(spec, params), per_query, *arrays
        )
        cast = [x.astype(y.dtype) for x, y in zip(found, (query, *arrays), strict=True)]
        return d_params, None, *cast

    run.defvjp(run_forward, run_backward)
    spec = slicing.pad_spec(spec, T, S, *padded)
    sizes = (padded[0], padded[1], padded[1])
    arrays = [
        jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))
        for x, size in zip((query, key, value), sizes, strict=True)
    ]
    query, key, value, w_score, *params = reverse_mode.inputs(
        (*arrays, w_score, *parameters(spec)), spec
    )
    return run(params, spec, query, key, value, w_score)[:, :T]


def choose_tiling(T: int, S: int) -> Tiling:
    """Tiles of about the size that measured fastest on CPUs; short inputs are one."""
    about = tuning.current().additive_tile
    return Tiling(*(tile_schedule.even(max(1, size), about) for size in (T, S)))


@functools.partial(jax.jit, static_argnames=("shapes", "tiling"))
def attend(
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    w_score: Array,
    *,
    shapes: Shapes,
    tiling: Tiling,
) -> Array:
    """`[*B, T, V]` from projected `query [*B, T, A]`, `key [*B, S, A]`, `value [*B, S, V]` and
    `w_score [A]`."""
    B, T, S = shapes.B, shapes.T, shapes.S
    if 0 in (B, T, S):
        nothing = jnp.zeros((*shapes.batch, T, shapes.V), query.dtype)
        return reverse_mode.varied_like(nothing, (query, key, value, w_score, spec))
    q, k, v = (x.reshape(B, -1, 1, x.shape[-1]) for x in (query, key, value))
    w_score = w_score.astype(accumulation(query.dtype))
    spec, factor = prepare(spec, shapes), softmax.headroom(softmax.greatest(v), S)
    v = v * factor.astype(v.dtype)
    if tiling == (T, S):
        one = functools.partial(_single_tile, w_score=w_score)
        out = tile.over_heads(one, spec, (q,), (k, v), out_axes=1)
    else:
        out = _over_tiles(tiling, spec, q, k, v, w_score)
    out = out / factor.astype(out.dtype)
    return out.astype(query.dtype).reshape(*shapes.batch, T, shapes.V)
