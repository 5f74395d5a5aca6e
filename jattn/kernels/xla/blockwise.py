"""Exact attention in memory linear in T and S: tile by tile, skipping what the mask empties.

Forward, a block of queries visits its tiles of keys with the online softmax of `jattn.softmax`.
Backward, the tiles are visited again from q, k, v, out and normalizer alone, and the weights of
each are computed again (Rabe and Staats 2021; Dao et al. 2022, FlashAttention; gradients as in Dao
et al., appendix B.2). Which tiles are visited says `tile_schedule`.

Heads run one after another on a CPU, where one head's tile fills the cores and stays in their
caches, and all at once elsewhere. Short sequences go by `single_tile`. Sizes of tiles are those of
`jattn.tuning`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jattn import softmax, tile, tuning
from jattn._pytree import select_head
from jattn._types import Index, Tree, accumulation
from jattn.kernels.common import slicing, tile_schedule
from jattn.kernels.common.branches import unbatched_cond
from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.common.vjp import AttentionVJP, no_weights
from jattn.kernels.protocol import Kernel
from jattn.kernels.xla import single_tile
from jattn.softmax import Normalizer
from jattn.spec import (
    Shapes,
    Spec,
    Tiling,
    has_mask,
    parameter_letters,
    parameters,
    scaled,
)
from jattn.tuning import Sizes


def choose_tiling(spec: Spec, T: int, S: int, sizes: Sizes) -> Tiling:
    """Small tiles follow a narrow band closely; where a block of queries visits many keys, the
    larger products of larger tiles win."""
    least, most = _visited(spec, T, S)
    size = sizes.small if most <= sizes.narrow else sizes.large
    if least >= sizes.wide:
        size = sizes.largest
    return Tiling(tile_schedule.even(T, size), tile_schedule.even(S, size))


def _visited(spec: Spec, T: int, S: int) -> tuple[float, float]:
    """How many keys a block of queries visits on average, at least and at most: what a mask with
    arrays empties is not known yet."""
    block = max(128, max(T, S) // 1024)
    kinds = tile_schedule.kinds(select_head(spec, 0, 0), T, S, Tiling(block, block))
    if not isinstance(kinds, np.ndarray):
        return 0.0, float(S)
    visited = float(np.mean(np.sum(kinds > 0, axis=1)) * block)
    return visited, visited


# ---------------------------------------------------------------------------------------------
# One head
# ---------------------------------------------------------------------------------------------


class BlockLoop(NamedTuple):
    """How the loop over the blocks of a head runs.

    batched: how many blocks run at once, in a `vmap`.
    unrolled: whether the runs of a block may be unrolled: written one after another into the
        program.
    """

    batched: int
    unrolled: bool

    @classmethod
    def for_heads(cls, heads: int, tiling: Tiling) -> "BlockLoop":
        """For so many heads that run at once, on GPUs and TPUs. Nothing is unrolled there: their
        compilers run unrolled tiles side by side, which takes memory for the scores of all keys."""
        scores = heads * tile_schedule.widest(tiling)
        return cls(max(1, tuning.current().scores_together // scores), False)

    def map(self, function: Callable[[Any], Any], indices: Array) -> Tree:
        """As `lax.map`. A single block is not mapped, so that its loops end when it is done."""
        n = len(indices)
        together = max(x for x in range(1, min(self.batched, n) + 1) if n % x == 0)
        if together == n > 1:
            return jax.vmap(function)(indices)
        return lax.map(function, indices, batch_size=together if together > 1 else None)


IN_TURN = BlockLoop(1, unrolled=True)


class Values(NamedTuple):
    """Values by which weights may be multiplied, and what the keys of the others add to scores.

    Without a mask nothing needs telling apart: what is not finite is attended by all.
    """

    finite: Float[Array, "S V"]
    nonfinite: Float[Array, " S"] | None

    @classmethod
    def of(cls, spec: Spec, v: Array) -> "Values":
        wide = v.astype(accumulation(v.dtype))
        return cls(tile.finite(wide), tile.nan_where_nonfinite(wide) if has_mask(spec) else None)

    def at(self, run: tile_schedule.TileRun) -> "Values":
        """Those of a run of keys."""
        finite = slicing.take(self.finite, run.start, run.size)
        nonfinite = (
            None if self.nonfinite is None else slicing.take(self.nonfinite, run.start, run.size)
        )
        return Values(finite, nonfinite)


def products(here: slicing.HeadTile, q: Array, k: Array, values: Values) -> Array:
    """Of a tile, NaN where a value is not finite."""
    found = tile.products(here.spec, q, k)
    return found if values.nonfinite is None else found + values.nonfinite[None, :]


def _scores(here: slicing.HeadTile, q: Array, k: Array, values: Values, masked: bool) -> Tree:
    """Scores of a tile, and their cotangent's way to products and parameters."""
    return here.modified(products(here, q, k, values), masked)


def _forward_head(
    spec: Spec,
    b: Array,
    h: Array,
    q: Array,
    k: Array,
    v: Array,
    tiling: Tiling,
    block_loop: BlockLoop = IN_TURN,
) -> tuple[Float[Array, "T V"], Normalizer]:
    """Output and normalizer of one head; sizes are whole tiles."""
    schedule = tile_schedule.schedule(
        spec, b, h, len(q), len(k), tiling, unrolled=block_loop.unrolled
    )
    rows = tiling.block_q
    values = Values.of(spec, v)
    factor = softmax.headroom(softmax.greatest(values.finite), len(v))
    values = values._replace(finite=values.finite * factor)
    spec, q, _ = scaled(spec, q)

    def block(i: Index) -> tuple[Array, Normalizer]:
        q_i = slicing.take(q, i * rows, rows)

        def step(run: tile_schedule.TileRun, state: softmax.Partial | None) -> softmax.Partial:
            here = slicing.HeadTile.at(spec, b, h, i * rows, rows, run)
            k_j, v_j = slicing.take(k, run.start, run.size), values.at(run)
            score, _ = _scores(here, q_i, k_j, v_j, run.masked)
            part = softmax.of(
                score, lambda w: _dot(here.drop(w), v_j.finite, spec), differentiable=False
            )
            return part if state is None else softmax.combine(state, part)

        first = None if schedule.of(i) else softmax.empty(rows, v.shape[1], values.finite.dtype)
        return softmax.quotient(tile_schedule.visit(schedule, i, step, first))

    found = tile_schedule.map_blocks(schedule, len(q) // rows, block, block_loop.map)
    out, (maximum, log_total) = jax.tree.map(tile_schedule.join, found)
    return tile.reach_all(spec, v, out / factor), Normalizer(
        tile.reach_all(spec, v, maximum), log_total
    )


def _dot(a: Array, b: Array, spec: Spec) -> Array:
    return jnp.dot(a, b, precision=spec.precision)


class _Gradients(NamedTuple):
    """Gradients of one head. Those of keys and values are transposed, see `backward_head`."""

    query: Float[Array, "T H"]
    key: Float[Array, "H S"]
    value: Float[Array, "V S"]
    params: Tree


class _Operands(NamedTuple):
    """What the backward pass of one head reads, in the dtype of sums; sizes are whole tiles.

    What stands along the queries are the fields of `PerQuery`. Sums over queries or keys run over
    `q_finite` and `k_finite`, in which everything is finite: 0 × NaN and 0 × inf are NaN.
    """

    spec: Spec
    b: Index
    h: Index
    q: Float[Array, "T H"]
    q_finite: Float[Array, "T H"]
    d_out: Float[Array, "T V"]
    maximum: Float[Array, " T"]
    log_total: Float[Array, " T"]
    delta: Float[Array, " T"]
    k: Float[Array, "S H"]
    k_finite: Float[Array, "S H"]
    values: Values

    @classmethod
    def of(
        cls, spec: Spec, b: Array, h: Array, per_query: tuple[Array, ...], k: Array, v: Array
    ) -> "_Operands":
        q, d_out, maximum, log_total, delta = per_query
        dtype = accumulation(q.dtype)
        q_finite, k_finite = (tile.finite(x.astype(dtype)) for x in (q, k))
        values = Values.of(spec, v)
        rows = (q, q_finite, d_out, maximum, log_total, delta)
        return cls(spec, b, h, *rows, k, k_finite, values)

    def at(self, row: Index, rows: int, run: tile_schedule.TileRun) -> tuple[Array, Array, Any]:
        """Of a tile: the cotangent of its products, its weights, its parameters' gradients.

        With weights p and dp = d_out vᵀ, the cotangent of the scores is p (dp − delta).
        """
        here = slicing.HeadTile.at(self.spec, self.b, self.h, row, rows, run)
        along = (self.q, self.d_out, self.maximum, self.log_total, self.delta)
        q, d_out, maximum, log_total, delta = (slicing.take(x, row, rows) for x in along)
        k, values = slicing.take(self.k, run.start, run.size), self.values.at(run)
        score, pull = _scores(here, q, k, values, run.masked)
        weights = softmax.weights(score, maximum, log_total, run.masked)
        d_weights = here.drop(_dot(d_out, values.finite.T, self.spec))
        d_products, d_params = pull(weights * (d_weights - delta[:, None]))
        return d_products, here.drop(weights), d_params


def backward_head(
    spec: Spec,
    b: Array,
    h: Array,
    per_query: Any,
    k: Array,
    v: Array,
    tiling: Tiling,
    block_loop: BlockLoop = IN_TURN,
) -> _Gradients:
    """Gradients of one head, block of queries after block; `per_query` is a `PerQuery`.

    Gradients of keys and values are summed as `[H, S]` and `[V, S]`: a product with its left side
    transposed runs at a third of the speed on CPUs.
    """
    q, d_out, *_ = per_query
    schedule = tile_schedule.schedule(
        spec, b, h, len(q), len(k), tiling, unrolled=block_loop.unrolled
    )
    rows = tiling.block_q
    spec, q, scale = scaled(spec, q)
    head = _Operands.of(spec, b, h, (q, *per_query[1:]), k, v)
    q_transposed, d_transposed = head.q_finite.T, d_out.T
    letters = parameter_letters(spec)

    def block(i: Index, total: _Gradients) -> _Gradients:
        qt_i, dt_i = (slicing.take(x, i * rows, rows, 1) for x in (q_transposed, d_transposed))

        def step(run: tile_schedule.TileRun, state: Tree) -> Tree:
            dq_i, dk, dv, d_params = state
            d_products, weights, d_here = head.at(i * rows, rows, run)
            k_j = slicing.take(head.k_finite, run.start, run.size)
            if spec.pair is None:
                dq, dkt = _dot(d_products, k_j, spec), _dot(qt_i, d_products, spec)
            else:
                dq, dk_j, d_here = _of_pairs(spec, qt_i.T, k_j, d_products, d_here)
                dkt = dk_j.T
            dq_i, dk = dq_i + dq, slicing.add_at(dk, dkt, run.start, 1)
            dv = slicing.add_at(dv, _dot(dt_i, weights, spec), run.start, 1)
            starts = {"T": i * rows, "S": run.start}
            d_params = slicing.add_leaves(d_params, d_here, letters, starts)
            return dq_i, dk, dv, d_params

        state = (jnp.zeros_like(head.q_finite[:rows]), total.key, total.value, total.params)
        dq_i, *rest = tile_schedule.visit(schedule, i, step, state)
        return _Gradients(slicing.add_at(total.query, dq_i, i * rows, 0), *rest)

    zeros = (head.q_finite, head.k_finite.T, head.values.finite.T, parameters(spec))
    total = tile_schedule.fold_blocks(
        schedule, len(q) // rows, block, _Gradients(*jax.tree.map(jnp.zeros_like, zeros))
    )
    return total._replace(query=total.query * scale)


def _of_pairs(
    spec: Spec, q: Array, k: Array, d_products: Array, d_params: list[Array]
) -> tuple[Array, Array, list[Array]]:
    """Gradients of the queries and keys of a tile by the spec's pair score, and those of the
    parameters with its own, which are the last."""
    _, pull = jax.vjp(lambda pair, q, k: pair.products(q, k), spec.pair, q, k)
    d_pair, dq, dk = pull(d_products)
    own = jax.tree.leaves(d_pair)
    return dq, dk, [*d_params[: -len(own)], *own]


def _backward_blocks(
    spec: Spec,
    b: Array,
    h: Array,
    per_query: tuple[Array, ...],
    k: Array,
    v: Array,
    tiling: Tiling,
    block_loop: BlockLoop,
) -> _Gradients:
    """As `backward_head`, some blocks at once: those of queries over their keys for the gradients
    of queries and parameters, those of keys over their queries for those of keys and values.

    Weights are computed twice, so that no two blocks add to the same place: sums have one order.
    """
    q, *_ = per_query
    (rows, columns), T, S = tiling, len(q), len(k)
    by_query, by_key = (
        tile_schedule.schedule(spec, b, h, T, S, tiling, by_key=x, unrolled=block_loop.unrolled)
        for x in (False, True)
    )
    spec, q, scale = scaled(spec, q)
    head = _Operands.of(spec, b, h, (q, *per_query[1:]), k, v)
    letters = parameter_letters(spec)

    of_queries = functools.partial(_gradients_of_queries, head, rows, S, by_query)
    of_keys = functools.partial(_gradients_of_keys, head, columns, by_key)
    d_query, d_params = tile_schedule.map_blocks(by_query, T // rows, of_queries, block_loop.map)
    d_key, d_value = tile_schedule.map_blocks(by_key, S // columns, of_keys, block_loop.map)
    d_params = slicing.join_leaves(d_params, parameters(spec), letters)
    d_query, d_key, d_value = map(tile_schedule.join, (d_query, d_key, d_value))
    return _Gradients(d_query * scale, d_key.T, d_value.T, d_params)


def _gradients_of_queries(
    head: _Operands, rows: int, S: int, by_query: tile_schedule.Schedule, i: Index
) -> tuple[Array, list[Array]]:
    """Gradients of a block of queries, and what it adds to those of parameters."""
    spec = head.spec
    letters = parameter_letters(spec)

    def step(run: tile_schedule.TileRun, state: Tree) -> Tree:
        dq_i, d_params = state
        d_products, _, d_here = head.at(i * rows, rows, run)
        k_j = slicing.take(head.k_finite, run.start, run.size)
        if spec.pair is None:
            dq = _dot(d_products, k_j, spec)
        else:
            q_i = slicing.take(head.q_finite, i * rows, rows)
            dq, _, d_here = _of_pairs(spec, q_i, k_j, d_products, d_here)
        starts = {"T": 0, "S": run.start}
        return dq_i + dq, slicing.add_leaves(d_params, d_here, letters, starts)

    own = parameters(slicing.slice_tile(spec, i * rows, rows, 0, S))
    state = jax.tree.map(jnp.zeros_like, (head.q_finite[:rows], own))
    return tile_schedule.visit(by_query, i, step, state)


def _gradients_of_keys(
    head: _Operands, columns: int, by_key: tile_schedule.Schedule, j: Index
) -> tuple[Array, Array]:
    """Gradients of a block of keys and of their values."""
    spec = head.spec

    def step(run: tile_schedule.TileRun, state: tuple[Array, ...]) -> tuple[Array, ...]:
        dk_j, dv_j = state
        keys = tile_schedule.TileRun(j * columns, columns, run.masked)
        d_products, weights, _ = head.at(run.start, run.size, keys)
        q_i, d_i = (slicing.take(x, run.start, run.size) for x in (head.q_finite, head.d_out))
        if spec.pair is None:
            dk = _dot(d_products.T, q_i, spec)
        else:
            k_j = slicing.take(head.k_finite, j * columns, columns)
            _, dk, _ = _of_pairs(spec, q_i, k_j, d_products, parameters(spec))
        return dk_j + dk, dv_j + _dot(weights.T, d_i, spec)

    zeros = (head.k_finite[:columns], head.values.finite[:columns])
    return tile_schedule.visit(by_key, j, step, jax.tree.map(jnp.zeros_like, zeros))


# ---------------------------------------------------------------------------------------------
# All heads
# ---------------------------------------------------------------------------------------------


def take_head(x: Array, b: Array, h: Array, size: int) -> Array:
    """Head (b, h) of `[B, T, N, ...]`, padded to whole tiles."""
    start = (b, np.int32(0), h) + (np.int32(0),) * (x.ndim - 3)
    one = lax.dynamic_slice(x, start, (1, x.shape[1], 1, *x.shape[3:]))
    return slicing.pad_to(one.reshape(x.shape[1], *x.shape[3:]), size)


def write_head(total: Array, x: Array, b: Array, h: Array, row: Any = 0) -> Array:
    """`[B, T, N, ...]` with the rows x `[t, ...]` of head (b, h) written from `row` on."""
    start = (b, jnp.int32(row), h) + (np.int32(0),) * (total.ndim - 3)
    one = x[: total.shape[1], ...]
    return lax.dynamic_update_slice(total, one[None, :, None], start)


class Problem(NamedTuple):
    """The sizes of a call, its tiles, and how heads are run: each a "single tile", all at once; or
    over their tiles, one head after another ("loop") or all at once ("vmap")."""

    shapes: Shapes
    tiling: Tiling
    way: str

    @classmethod
    def of(
        cls, platform: str, spec: Spec, query: Array, value: Array, tiling: Tiling | None
    ) -> "Problem":
        shapes, sizes = Shapes.of(query, value), tuning.sizes(platform)
        T, S = shapes.T, shapes.S
        # A single tile computes its weights without the normalizer.
        if tiling is None and T * S <= sizes.max_untiled and not spec.partial:
            return cls(shapes, Tiling(T, S), "single tile")
        way = "loop" if sizes.in_turn else "vmap"
        return cls(shapes, tiling or choose_tiling(spec, T, S, sizes), way)

    @property
    def padded(self) -> tuple[int, int]:
        """T and S as whole tiles."""
        return slicing.round_up(self.shapes.T, self.shapes.S, self.tiling)

    @property
    def block_loop(self) -> BlockLoop:
        """How the loop over the blocks of a head runs."""
        if self.way == "vmap":
            return BlockLoop.for_heads(self.shapes.B * self.shapes.N, self.tiling)
        return IN_TURN

    def pad(self, spec: Spec) -> Spec:
        """The spec for whole tiles."""
        return slicing.pad_spec(spec, self.shapes.T, self.shapes.S, *self.padded)


def forward_loop(spec: Spec, query: Array, key: Array, value: Array, problem: Problem) -> Tree:
    """`(out [B, T, N, V], normalizer of [B, T, N])`, head after head."""
    shapes, (T, S) = problem.shapes, problem.padded

    def body(n: Array, total: Tree) -> Tree:
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.N))
        q = take_head(query, b, h, T)
        k, v = (take_head(x, b, h // shapes.G, S) for x in (key, value))
        selected = select_head(spec, b, h)
        results = _forward_head(selected, b, h, q, k, v, problem.tiling, problem.block_loop)
        return jax.tree.map(lambda x, y: write_head(x, y, b, h), total, results)

    total = _no_results(shapes, shapes.T, accumulation(query.dtype))
    return tile_schedule.repeat(0, shapes.B * shapes.N, body, total)


def _no_results(shapes: Shapes, T: int, dtype: DTypeLike) -> tuple[Array, Normalizer]:
    """Where the results of T queries of all heads are put."""
    rows = jnp.zeros((shapes.B, T, shapes.N), accumulation(dtype))
    return jnp.zeros((*rows.shape, shapes.V), dtype), Normalizer(rows, rows)


def _band(spec: Spec, problem: Problem) -> tile_schedule.Band | None:
    """The band that the forward pass of a padded spec goes along, if it does. The backward pass of
    a part of the keys is given the normalizer of all, and so needs scores of the same tiles."""
    if problem.way != "loop" or spec.pair is not None or spec.partial:
        return None
    return tile_schedule.band(select_head(spec, 0, 0), *problem.padded, problem.tiling)


def _forward_band(
    spec: Spec, query: Array, key: Array, value: Array, problem: Problem, band: tile_schedule.Band
) -> Any:
    """As `forward_loop` for a mask that leaves a band: a few pieces of one head at once."""
    shapes, (T, S) = problem.shapes, problem.padded
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))
        for x, size in ((query, T), (key, S), (value, S))
    )
    n, starts = len(band.starts), jnp.asarray(band.starts)
    batched = min(n, tuning.current().band_blocks)
    turns = -(-n // batched)

    def piece(
        head: Callable[..., Any], i: Index, spec: Spec, b: Index, h: Index, *qkv: Array
    ) -> Any:
        run = tile_schedule.TileRun(starts[i], band.width, True)
        here = slicing.HeadTile.at(spec, b, h, i * band.rows, band.rows, run)
        return head(here.spec, b, h, (here.rows, here.columns), *qkv)

    def run(head: Callable[..., Any], *operands: Tree, over_batch: Any = jax.vmap) -> Any:
        axes = (0, None, None, None, 0, 0, 0)
        return over_batch(functools.partial(piece, head), axes)(*operands)

    def body(step: Any, total: Any) -> Any:
        head, turn = divmod(step, turns)
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(head, shapes.N))
        # The last turn starts early enough to be as long as the others.
        i = jnp.minimum(turn * batched, n - batched) + jnp.arange(batched, dtype=jnp.int32)
        q = _pieces(query, b, i * band.rows, h, band.rows)
        k, v = (_pieces(x, b, starts[i], h // shapes.G, band.width) for x in (key, value))
        operands = (i, select_head(spec, b, h), b, h, q, k, v)
        results, _ = single_tile.attempt(
            single_tile.FORWARD, run, tuple, operands, spec, optimistic=True
        )

        def put(total: Array, x: Array) -> Array:
            joined = x.reshape(batched * band.rows, *x.shape[2:])
            return write_head(total, joined, b, h, i[0] * band.rows)

        return jax.tree.map(put, total, results)

    total = _no_results(shapes, T, accumulation(query.dtype))
    found = tile_schedule.repeat(0, shapes.B * shapes.N * turns, body, total)
    return jax.tree.map(lambda x: x[:, : shapes.T], found)


def _pieces(x: Array, b: Index, starts: Array, h: Index, size: int) -> Array:
    """`[n, size, H]`: runs of tokens of head (b, h) of `[B, T, N, H]`."""

    def one(start: Index) -> Array:
        return lax.dynamic_slice(x, (b, start, h, np.int32(0)), (1, size, 1, x.shape[3]))

    return jax.vmap(one)(starts).reshape(-1, size, x.shape[3])


def forward_vmap(spec: Spec, query: Array, key: Array, value: Array, problem: Problem) -> Tree:
    """`(out [B, T, N, V], normalizer of [B, T, N])`, all heads at once."""
    shapes, (T, S), block_loop = problem.shapes, problem.padded, problem.block_loop

    def one(spec: Spec, b: Any, h: Any, q: Array, k: Array, v: Array) -> Tree:
        q, k, v = slicing.pad_to(q, T), slicing.pad_to(k, S), slicing.pad_to(v, S)
        results = _forward_head(spec, b, h, q, k, v, problem.tiling, block_loop)
        return jax.tree.map(lambda x: x[: shapes.T], results)

    return tile.over_heads(one, spec, (query,), (key, value), out_axes=1)


def backward_loop(
    spec: Spec, per_head: PerQuery, key: Array, value: Array, problem: Problem
) -> Tree:
    """Gradients of params, query, key and value, head after head; `per_head` is a `PerQuery`."""
    shapes, (T, S) = problem.shapes, problem.padded
    letters, inputs = parameter_letters(spec), (per_head[0], key, value)

    def body(n: Array, total: Tree) -> Tree:
        b, kv = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.K))
        k, v = (take_head(x, b, kv, S) for x in (key, value))
        params, d_query, d_key, d_value = total

        def of_head(g: Array, state: Tree) -> Tree:
            params, d_query, *sums = state
            h = kv * shapes.G + g
            per_query = tuple(take_head(x, b, h, T) for x in per_head)
            selected = select_head(spec, b, h)
            part = backward_head(
                selected, b, h, per_query, k, v, problem.tiling, problem.block_loop
            )
            params = slicing.add_params(params, part.params, letters, b, h)
            sums = [x + y for x, y in zip(sums, (part.key, part.value), strict=True)]
            return params, write_head(d_query, part.query, b, h), *sums

        zeros = (jnp.zeros(x.shape[::-1], accumulation(x.dtype)) for x in (k, v))
        params, d_query, *sums = tile_schedule.repeat(
            0, shapes.G, of_head, (params, d_query, *zeros)
        )
        each = zip((d_key, d_value), sums, strict=True)
        return params, d_query, *(write_head(x, y.T, b, kv) for x, y in each)

    total = (
        [jnp.zeros_like(leaf) for leaf in parameters(spec)],
        *(jnp.zeros(x.shape, accumulation(x.dtype)) for x in inputs),
    )
    return tile_schedule.repeat(0, shapes.B * shapes.K, body, total)


def backward_vmap(
    spec: Spec, per_head: tuple[Array, ...], key: Array, value: Array, problem: Problem
) -> Tree:
    """As `backward_loop`, all heads at once."""
    shapes, (T, S), block_loop = problem.shapes, problem.padded, problem.block_loop

    def one(spec: Spec, b: Array, h: Array, *operands: Array) -> Tree:
        *per_query, k, v = operands
        per_query = tuple(slicing.pad_to(x, T) for x in per_query)
        k, v = (slicing.pad_to(x, S) for x in (k, v))
        part = _backward_blocks(spec, b, h, per_query, k, v, problem.tiling, block_loop)
        return part.query[: shapes.T], part.key.T[: shapes.S], part.value.T[: shapes.S], part.params

    axes = (1, 1, 1, [0] * len(parameters(spec)))
    found = tile.over_heads(one, spec, per_head, (key, value), axes)
    return tile.gather_gradients(spec, key.shape[2], *found)


def parameter_gradients(
    spec: Spec, per_head: tuple[Array, ...], key: Array, value: Array, tiling: Tiling
) -> list[Array]:
    """Returns the gradients of parameters alone, for kernels that cannot scatter.

    Sizes are whole tiles; `per_head` has the fields of `PerQuery`.
    """
    query, *others = per_head
    wide = [x.astype(accumulation(key.dtype)) for x in others]
    problem = Problem(Shapes.of(query, value), tiling, "vmap")
    return backward_vmap(spec, (query, *wide), key, value, problem)[0]


def _forward(
    platform: str,
    tiling: Tiling | None,
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    keep: bool = False,
) -> tuple[Any, ...]:
    problem = Problem.of(platform, spec, query, value, tiling)
    if problem.way == "single tile":
        sizes = tuning.sizes(platform)
        return single_tile.forward(spec, query, key, value, sizes, keep)
    spec, run = problem.pad(spec), forward_loop if problem.way == "loop" else forward_vmap
    if band := _band(spec, problem):
        run = functools.partial(_forward_band, band=band)
    found = run(spec, query, key, value, problem)
    kept = (no_weights(query, key, value),) if keep else ()
    return *found, jnp.zeros((), bool), *kept


_COARSE = 2.0**16  # logits from which on rounding of products is seen in weights


def _normalized_by_tiles(
    spec: Spec, per_query: PerQuery, key: Array, value: Array, problem: Problem
) -> PerQuery:
    """`per_query` with the normalizer of the scores of tiles where logits are large: XLA rounds the
    products of a tile differently from those of a piece of the band."""

    def by_tiles(per_query: PerQuery, key: Array, value: Array) -> Any:
        _, normalizer = forward_loop(spec, per_query.query, key, value, problem)
        return per_query.with_normalizer(normalizer)[2:4]

    fine = jnp.max(jnp.abs(per_query.maximum), initial=0) < _COARSE
    unchanged = lambda per_query, *_: per_query[2:4]  # noqa: E731
    maximum, log_total = unbatched_cond(fine, unchanged, by_tiles, per_query, key, value)
    return per_query._replace(maximum=maximum, log_total=log_total)


def _backward(
    platform: str,
    tiling: Tiling | None,
    spec: Spec,
    per_query: PerQuery,
    key: Array,
    value: Array,
    *kept: Array,
) -> tuple[Any, Array, Array, Array]:
    problem = Problem.of(platform, spec, per_query[0], value, tiling)
    if problem.way == "single tile":
        return single_tile.backward(spec, per_query, key, value, kept, tuning.sizes(platform))
    padded, run = problem.pad(spec), backward_loop if problem.way == "loop" else backward_vmap
    if _band(padded, problem):
        per_query = _normalized_by_tiles(padded, per_query, key, value, problem)
    d_params, *found = run(padded, per_query, key, value, problem)
    return slicing.unpadded_parameters(d_params, spec), *found


def functions(platform: str, tiling: Tiling | None = None) -> AttentionVJP:
    """Forward and backward: tile by tile, short sequences as a single tile unless `tiling` cuts
    them."""
    forward, backward = (functools.partial(f, platform, tiling) for f in (_forward, _backward))
    return AttentionVJP(forward, backward, functools.partial(forward, keep=True))


KERNEL = Kernel(supports=lambda call: None, functions=functions)
