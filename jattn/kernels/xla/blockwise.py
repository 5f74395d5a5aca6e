"""Exact attention in memory linear in T and S, tile by tile, skipping tiles that the mask empties.

Forward, each block of queries visits its tiles of keys with the online softmax of `jattn.softmax`.
Backward, the tiles are visited again, and their weights are computed again from q, k, v, out and
the normalizer (Rabe and Staats 2021; Dao et al. 2022, FlashAttention; gradients as in Dao et al.,
appendix B.2). `tile_schedule` determines which tiles are visited.

On a CPU the heads run one after another: the tile of one head occupies all cores and stays in their
caches. On other platforms all heads run at once. Short sequences use `single_tile`. The sizes of
tiles stand in `jattn.tuning`.
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
    """Returns the tiling of a call.

    Small tiles follow a narrow band closely; if a block of queries visits many keys, the larger
    products of larger tiles are faster.
    """
    block = max(128, max(T, S) // 1024)
    kinds = tile_schedule.kinds(select_head(spec, 0, 0), T, S, Tiling(block, block))
    least, most = 0.0, float(S)  # keys that a block of queries visits on average; arrays are traced
    if isinstance(kinds, np.ndarray):
        least = most = float(np.mean(np.sum(kinds > 0, axis=1)) * block)
    size = sizes.small if most <= sizes.narrow else sizes.large
    if least >= sizes.wide:
        size = sizes.largest
    return Tiling(tile_schedule.even(T, size), tile_schedule.even(S, size))


# ---------------------------------------------------------------------------------------------
# One head
# ---------------------------------------------------------------------------------------------


class BlockwiseCall(NamedTuple):
    """The sizes of a call, its tiles, and the strategy for its heads.

    Each head is a "single tile", all heads at once; or heads are computed over their tiles, one
    after another ("loop") or all at once ("vmap").
    """

    shapes: Shapes
    tiling: Tiling
    strategy: str

    @classmethod
    def of(
        cls, platform: str, spec: Spec, query: Array, value: Array, tiling: Tiling | None
    ) -> "BlockwiseCall":
        shapes, sizes = Shapes.of(query, value), tuning.sizes(platform)
        T, S = shapes.T, shapes.S
        # A single tile computes its weights without the normalizer.
        if tiling is None and T * S <= sizes.max_untiled and not spec.partial:
            return cls(shapes, Tiling(T, S), "single tile")
        strategy = "loop" if sizes.in_turn else "vmap"
        return cls(shapes, tiling or choose_tiling(spec, T, S, sizes), strategy)

    @property
    def padded(self) -> tuple[int, int]:
        """T and S as whole tiles."""
        return slicing.round_up(self.shapes.T, self.shapes.S, self.tiling)

    def pad(self, spec: Spec) -> Spec:
        """Returns the spec for whole tiles."""
        return slicing.pad_spec(spec, self.shapes.T, self.shapes.S, *self.padded)

    def schedule(
        self, spec: Spec, b: Any, h: Any, *, by_key: bool = False
    ) -> tile_schedule.Schedule:
        """Returns the schedule of a head.

        GPUs and TPUs, whose heads run at once, unroll nothing: their compilers would run unrolled
        tiles side by side, in memory for the scores of all keys.
        """
        unrolled = self.strategy != "vmap"
        return tile_schedule.schedule(
            spec, b, h, *self.padded, self.tiling, by_key=by_key, unrolled=unrolled
        )

    def map_blocks(
        self, schedule: tile_schedule.Schedule, n: int, block: Callable[[Any], Any]
    ) -> Tree:
        """Returns `block(i)` of n blocks, stacked; if heads run at once, several blocks do too.

        A lone block is not mapped, so that its loops may end early.
        """
        batched = 1
        if self.strategy == "vmap":
            scores = self.shapes.B * self.shapes.N * tile_schedule.widest(self.tiling)
            most = min(n, max(1, tuning.current().scores_together // scores))
            batched = max(x for x in range(1, most + 1) if n % x == 0)

        def over_blocks(block: Callable[[Any], Any], indices: Array) -> Tree:
            if batched == n > 1:
                return jax.vmap(block)(indices)
            return lax.map(block, indices, batch_size=batched if batched > 1 else None)

        return tile_schedule.map_blocks(schedule, n, block, over_blocks)


class Values(NamedTuple):
    """The finite values, 0 in place of others, and the term that each key adds to its scores.

    The term is NaN for a value that is not finite; without a mask all queries attend to it, and
    there are no terms.
    """

    finite: Float[Array, "S V"]
    nonfinite: Float[Array, " S"] | None

    @classmethod
    def of(cls, spec: Spec, v: Array) -> "Values":
        wide = v.astype(accumulation(v.dtype))
        return cls(tile.finite(wide), tile.nan_where_nonfinite(wide) if has_mask(spec) else None)

    def take(self, run: tile_schedule.TileRun) -> "Values":
        """Returns the values of a run of keys."""
        return jax.tree.map(lambda x: slicing.take(x, run.start, run.size), self)


def products(part: slicing.HeadTile, q: Array, k: Array, values: Values) -> Array:
    """Computes the products of a tile, NaN for keys whose value is not finite."""
    result = tile.products(part.spec, q, k)
    return result if values.nonfinite is None else result + values.nonfinite[None, :]


def _forward_head(
    spec: Spec, b: Array, h: Array, q: Array, k: Array, v: Array, call: BlockwiseCall
) -> tuple[Float[Array, "T V"], Normalizer]:
    """Computes output and normalizer of one head; sizes are whole tiles."""
    schedule, rows = call.schedule(spec, b, h), call.tiling.block_q
    values = Values.of(spec, v)
    factor = softmax.headroom(softmax.greatest(values.finite), len(v))
    values = values._replace(finite=values.finite * factor)
    spec, q, _ = scaled(spec, q)

    def block(i: Index) -> tuple[Array, Normalizer]:
        q_i = slicing.take(q, i * rows, rows)

        def add_run(run: tile_schedule.TileRun, state: softmax.Partial | None) -> softmax.Partial:
            part = slicing.HeadTile.at(spec, b, h, i * rows, rows, run)
            k_j, v_j = slicing.take(k, run.start, run.size), values.take(run)
            score, _ = part.modified(products(part, q_i, k_j, v_j), run.masked)
            partial = softmax.of(
                score, lambda w: dot(part.drop(w), v_j.finite, spec), differentiable=False
            )
            return partial if state is None else softmax.combine(state, partial)

        first = None if schedule.of(i) else softmax.empty(rows, v.shape[1], values.finite.dtype)
        return softmax.quotient(tile_schedule.visit(schedule, i, add_run, first))

    blocks = call.map_blocks(schedule, len(q) // rows, block)
    out, (maximum, log_total) = jax.tree.map(tile_schedule.join, blocks)
    return tile.reach_all(spec, v, out / factor), Normalizer(
        tile.reach_all(spec, v, maximum), log_total
    )


def dot(a: Array, b: Array, spec: Spec) -> Array:
    """Computes the product of two matrices in the spec's precision."""
    return jnp.dot(a, b, precision=spec.precision)


class _Gradients(NamedTuple):
    """The gradients of one head; those of keys and values are transposed, see `backward_head`."""

    query: Float[Array, "T H"]
    key: Float[Array, "H S"]
    value: Float[Array, "V S"]
    params: Tree


class _BackwardHead(NamedTuple):
    """The operands of the backward pass of one head, in the dtype of sums; sizes are whole tiles.

    The arrays along the queries are the fields of `PerQuery`. Sums over queries or keys use
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
    ) -> "_BackwardHead":
        q, d_out, maximum, log_total, delta = per_query
        dtype = accumulation(q.dtype)
        q_finite, k_finite = (tile.finite(x.astype(dtype)) for x in (q, k))
        rows = (q, q_finite, d_out, maximum, log_total, delta)
        return cls(spec, b, h, *rows, k, k_finite, Values.of(spec, v))

    def tile(self, row: Index, rows: int, run: tile_schedule.TileRun) -> tuple[Array, Array, Any]:
        """Computes the cotangent of a tile's products, its weights and the gradients of parameters.

        With weights p and dp = d_out vᵀ, the cotangent of the scores is p (dp − delta).
        """
        part = slicing.HeadTile.at(self.spec, self.b, self.h, row, rows, run)
        arrays = (self.q, self.d_out, self.maximum, self.log_total, self.delta)
        q, d_out, maximum, log_total, delta = (slicing.take(x, row, rows) for x in arrays)
        k, values = slicing.take(self.k, run.start, run.size), self.values.take(run)
        score, pull = part.modified(products(part, q, k, values), run.masked)
        weights = softmax.weights(score, maximum, log_total, run.masked)
        d_weights = part.drop(dot(d_out, values.finite.T, self.spec))
        d_products, d_params = pull(weights * (d_weights - delta[:, None]))
        return d_products, part.drop(weights), d_params


def backward_head(
    spec: Spec, b: Array, h: Array, per_query: Any, k: Array, v: Array, call: BlockwiseCall
) -> _Gradients:
    """Computes the gradients of one head, block after block; `per_query` is a `PerQuery`.

    Gradients of keys and values are summed as `[H, S]` and `[V, S]`: a product with its left side
    transposed runs at a third of the speed on CPUs.
    """
    q, d_out, *_ = per_query
    schedule, rows = call.schedule(spec, b, h), call.tiling.block_q
    spec, q, scale = scaled(spec, q)
    head = _BackwardHead.of(spec, b, h, (q, *per_query[1:]), k, v)
    q_transposed, d_transposed = head.q_finite.T, d_out.T
    letters = parameter_letters(spec)

    def block(i: Index, total: _Gradients) -> _Gradients:
        qt_i, dt_i = (slicing.take(x, i * rows, rows, 1) for x in (q_transposed, d_transposed))

        def add_run(run: tile_schedule.TileRun, state: Tree) -> Tree:
            dq_i, dk, dv, d_params = state
            d_products, weights, d_tile = head.tile(i * rows, rows, run)
            k_j = slicing.take(head.k_finite, run.start, run.size)
            if spec.pair is None:
                dq, dkt = dot(d_products, k_j, spec), dot(qt_i, d_products, spec)
            else:
                dq, dk_j, d_tile = _pair_gradients(spec, qt_i.T, k_j, d_products, d_tile)
                dkt = dk_j.T
            dk = slicing.add_at(dk, dkt, run.start, 1)
            dv = slicing.add_at(dv, dot(dt_i, weights, spec), run.start, 1)
            starts = {"T": i * rows, "S": run.start}
            return dq_i + dq, dk, dv, slicing.add_leaves(d_params, d_tile, letters, starts)

        state = (jnp.zeros_like(head.q_finite[:rows]), total.key, total.value, total.params)
        dq_i, *rest = tile_schedule.visit(schedule, i, add_run, state)
        return _Gradients(slicing.add_at(total.query, dq_i, i * rows, 0), *rest)

    zeros = (head.q_finite, head.k_finite.T, head.values.finite.T, parameters(spec))
    total = tile_schedule.fold_blocks(
        schedule, len(q) // rows, block, _Gradients(*jax.tree.map(jnp.zeros_like, zeros))
    )
    return total._replace(query=total.query * scale)


def _pair_gradients(
    spec: Spec, q: Array, k: Array, d_products: Array, d_params: list[Array]
) -> tuple[Array, Array, list[Array]]:
    """Computes the gradients of a tile's queries and keys by the spec's pair score, and replaces
    those of its parameters, which are the last."""
    _, pull = jax.vjp(lambda pair, q, k: pair.products(q, k), spec.pair, q, k)
    d_pair, dq, dk = pull(d_products)
    d_pair = jax.tree.leaves(d_pair)
    return dq, dk, [*d_params[: -len(d_pair)], *d_pair]


def _backward_blocks(
    spec: Spec, b: Array, h: Array, per_query: Any, k: Array, v: Array, call: BlockwiseCall
) -> _Gradients:
    """Computes the gradients of one head, several blocks at once.

    Blocks of queries sum the gradients of queries and parameters over their keys, blocks of keys
    the gradients of keys and values over their queries. Weights are computed twice, so that no two
    blocks add to the same place: sums have one order.
    """
    q, (rows, columns), S = per_query[0], call.tiling, len(k)
    by_query, by_key = (call.schedule(spec, b, h, by_key=x) for x in (False, True))
    spec, q, scale = scaled(spec, q)
    head = _BackwardHead.of(spec, b, h, (q, *per_query[1:]), k, v)
    letters = parameter_letters(spec)

    def query_block(i: Index) -> tuple[Array, list[Array]]:
        """Computes the gradients of a block of queries, and its part of those of parameters."""

        def add_run(run: tile_schedule.TileRun, state: Tree) -> Tree:
            dq_i, d_params = state
            d_products, _, d_tile = head.tile(i * rows, rows, run)
            k_j = slicing.take(head.k_finite, run.start, run.size)
            if spec.pair is None:
                dq = dot(d_products, k_j, spec)
            else:
                q_i = slicing.take(head.q_finite, i * rows, rows)
                dq, _, d_tile = _pair_gradients(spec, q_i, k_j, d_products, d_tile)
            starts = {"T": 0, "S": run.start}
            return dq_i + dq, slicing.add_leaves(d_params, d_tile, letters, starts)

        params = parameters(slicing.slice_tile(spec, i * rows, rows, 0, S))
        zeros = jax.tree.map(jnp.zeros_like, (head.q_finite[:rows], params))
        return tile_schedule.visit(by_query, i, add_run, zeros)

    def key_block(j: Index) -> tuple[Array, Array]:
        """Computes the gradients of a block of keys and of their values."""

        def add_run(run: tile_schedule.TileRun, state: tuple[Array, ...]) -> tuple[Array, ...]:
            dk_j, dv_j = state
            keys = tile_schedule.TileRun(j * columns, columns, run.masked)
            d_products, weights, _ = head.tile(run.start, run.size, keys)
            q_i, d_i = (slicing.take(x, run.start, run.size) for x in (head.q_finite, head.d_out))
            if spec.pair is None:
                dk = dot(d_products.T, q_i, spec)
            else:
                k_j = slicing.take(head.k_finite, j * columns, columns)
                _, dk, _ = _pair_gradients(spec, q_i, k_j, d_products, parameters(spec))
            return dk_j + dk, dv_j + dot(weights.T, d_i, spec)

        zeros = (head.k_finite[:columns], head.values.finite[:columns])
        return tile_schedule.visit(by_key, j, add_run, jax.tree.map(jnp.zeros_like, zeros))

    d_query, d_params = call.map_blocks(by_query, len(q) // rows, query_block)
    d_key, d_value = call.map_blocks(by_key, S // columns, key_block)
    d_params = slicing.join_leaves(d_params, parameters(spec), letters)
    d_query, d_key, d_value = map(tile_schedule.join, (d_query, d_key, d_value))
    return _Gradients(d_query * scale, d_key.T, d_value.T, d_params)


# ---------------------------------------------------------------------------------------------
# All heads
# ---------------------------------------------------------------------------------------------


def take_head(x: Array, b: Array, h: Array, size: int) -> Array:
    """Returns head (b, h) of `[B, T, N, ...]`, padded to whole tiles."""
    start = (b, np.int32(0), h) + (np.int32(0),) * (x.ndim - 3)
    head = lax.dynamic_slice(x, start, (1, x.shape[1], 1, *x.shape[3:]))
    return slicing.pad_to(head.reshape(x.shape[1], *x.shape[3:]), size)


def write_head(total: Array, x: Array, b: Array, h: Array, row: Any = 0) -> Array:
    """Writes the rows x `[t, ...]` of head (b, h), from `row` on, into `[B, T, N, ...]`."""
    start = (b, jnp.int32(row), h) + (np.int32(0),) * (total.ndim - 3)
    return lax.dynamic_update_slice(total, x[None, : total.shape[1], None], start)


def forward_loop(spec: Spec, query: Array, key: Array, value: Array, call: BlockwiseCall) -> Tree:
    """Computes `(out [B, T, N, V], normalizer of [B, T, N])`, one head after another."""
    shapes, (T, S) = call.shapes, call.padded

    def body(n: Array, total: Tree) -> Tree:
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.N))
        q = take_head(query, b, h, T)
        k, v = (take_head(x, b, h // shapes.G, S) for x in (key, value))
        results = _forward_head(select_head(spec, b, h), b, h, q, k, v, call)
        return jax.tree.map(lambda x, y: write_head(x, y, b, h), total, results)

    total = _no_results(shapes, shapes.T, accumulation(query.dtype))
    return tile_schedule.repeat(0, shapes.B * shapes.N, body, total)


def _no_results(shapes: Shapes, T: int, dtype: DTypeLike) -> tuple[Array, Normalizer]:
    """Returns zeros in the shapes of output and normalizer, for T queries of all heads."""
    rows = jnp.zeros((shapes.B, T, shapes.N), accumulation(dtype))
    return jnp.zeros((*rows.shape, shapes.V), dtype), Normalizer(rows, rows)


def _band(spec: Spec, call: BlockwiseCall) -> tile_schedule.Band | None:
    """Returns the band for the forward pass of a padded spec, if its mask leaves one.

    The backward pass of a part of the keys receives the normalizer of all keys, and so needs the
    scores of the same tiles.
    """
    if call.strategy != "loop" or spec.pair is not None or spec.partial:
        return None
    return tile_schedule.band(select_head(spec, 0, 0), *call.padded, call.tiling)


def _forward_band(
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    call: BlockwiseCall,
    band: tile_schedule.Band,
) -> Any:
    """Computes the results of `forward_loop` along a band, several pieces of one head at once."""
    shapes, (T, S) = call.shapes, call.padded
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))
        for x, size in ((query, T), (key, S), (value, S))
    )
    n, starts = len(band.starts), jnp.asarray(band.starts)
    batched = min(n, tuning.current().band_blocks)
    batches = -(-n // batched)

    def piece(
        head: Callable[..., Any], i: Index, spec: Spec, b: Index, h: Index, *qkv: Array
    ) -> Any:
        run = tile_schedule.TileRun(starts[i], band.width, True)
        return head(slicing.HeadTile.at(spec, b, h, i * band.rows, band.rows, run), *qkv)

    def run(head: Callable[..., Any], *operands: Tree, over_batch: Any = jax.vmap) -> Any:
        axes = (0, None, None, None, 0, 0, 0)
        return over_batch(functools.partial(piece, head), axes)(*operands)

    def body(index: Any, total: Any) -> Any:
        head, batch = divmod(index, batches)
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(head, shapes.N))
        # The last batch starts early enough to have as many pieces as the others.
        i = jnp.minimum(batch * batched, n - batched) + jnp.arange(batched, dtype=jnp.int32)
        q = _pieces(query, b, i * band.rows, h, band.rows)
        k, v = (_pieces(x, b, starts[i], h // shapes.G, band.width) for x in (key, value))
        operands = (i, select_head(spec, b, h), b, h, q, k, v)
        results, _ = single_tile.attempt(
            single_tile.FORWARD, run, tuple, operands, spec, optimistic=True
        )

        def write(total: Array, x: Array) -> Array:
            joined = x.reshape(batched * band.rows, *x.shape[2:])
            return write_head(total, joined, b, h, i[0] * band.rows)

        return jax.tree.map(write, total, results)

    total = _no_results(shapes, T, accumulation(query.dtype))
    results = tile_schedule.repeat(0, shapes.B * shapes.N * batches, body, total)
    return jax.tree.map(lambda x: x[:, : shapes.T], results)


def _pieces(x: Array, b: Index, starts: Array, h: Index, size: int) -> Array:
    """Returns runs of tokens of head (b, h) of `[B, T, N, H]`, as `[n, size, H]`."""

    def piece(start: Index) -> Array:
        return lax.dynamic_slice(x, (b, start, h, np.int32(0)), (1, size, 1, x.shape[3]))

    return jax.vmap(piece)(starts).reshape(-1, size, x.shape[3])


def forward_vmap(spec: Spec, query: Array, key: Array, value: Array, call: BlockwiseCall) -> Tree:
    """Computes `(out [B, T, N, V], normalizer of [B, T, N])`, all heads at once."""
    shapes, (T, S) = call.shapes, call.padded

    def one_head(spec: Spec, b: Any, h: Any, q: Array, k: Array, v: Array) -> Tree:
        q, k, v = slicing.pad_to(q, T), slicing.pad_to(k, S), slicing.pad_to(v, S)
        results = _forward_head(spec, b, h, q, k, v, call)
        return jax.tree.map(lambda x: x[: shapes.T], results)

    return tile.over_heads(one_head, spec, (query,), (key, value), out_axes=1)


def backward_loop(
    spec: Spec, per_head: PerQuery, key: Array, value: Array, call: BlockwiseCall
) -> Tree:
    """Computes the gradients of parameters, query, key and value, one head after another."""
    shapes, (T, S) = call.shapes, call.padded
    letters, inputs = parameter_letters(spec), (per_head[0], key, value)

    def body(n: Array, total: Tree) -> Tree:
        b, kv = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.K))
        k, v = (take_head(x, b, kv, S) for x in (key, value))
        params, d_query, d_key, d_value = total

        def add_head(g: Array, state: Tree) -> Tree:
            params, d_query, *sums = state
            h = kv * shapes.G + g
            per_query = tuple(take_head(x, b, h, T) for x in per_head)
            part = backward_head(select_head(spec, b, h), b, h, per_query, k, v, call)
            params = slicing.add_params(params, part.params, letters, b, h)
            sums = [x + y for x, y in zip(sums, (part.key, part.value), strict=True)]
            return params, write_head(d_query, part.query, b, h), *sums

        zeros = (jnp.zeros(x.shape[::-1], accumulation(x.dtype)) for x in (k, v))
        params, d_query, *sums = tile_schedule.repeat(
            0, shapes.G, add_head, (params, d_query, *zeros)
        )
        each = zip((d_key, d_value), sums, strict=True)
        return params, d_query, *(write_head(x, y.T, b, kv) for x, y in each)

    total = (
        [jnp.zeros_like(leaf) for leaf in parameters(spec)],
        *(jnp.zeros(x.shape, accumulation(x.dtype)) for x in inputs),
    )
    return tile_schedule.repeat(0, shapes.B * shapes.K, body, total)


def backward_vmap(
    spec: Spec,
    per_head: tuple[Array, ...],
    key: Array,
    value: Array,
    call: BlockwiseCall,
    over_batch: Any = jax.vmap,
) -> Tree:
    """Computes the gradients of `backward_loop`, all heads at once."""
    shapes, (T, S) = call.shapes, call.padded
    backward = backward_head if call.strategy == "single tile" else _backward_blocks

    def one_head(spec: Spec, b: Array, h: Array, *operands: Array) -> Tree:
        *per_query, k, v = operands
        per_query = tuple(slicing.pad_to(x, T) for x in per_query)
        k, v = (slicing.pad_to(x, S) for x in (k, v))
        part = backward(spec, b, h, per_query, k, v, call)
        return part.query[: shapes.T], part.key.T[: shapes.S], part.value.T[: shapes.S], part.params

    axes = (1, 1, 1, [0] * len(parameters(spec)))
    gradients = tile.over_heads(one_head, spec, per_head, (key, value), axes, over_batch)
    return tile.gather_gradients(spec, key.shape[2], *gradients)


def parameter_gradients(
    spec: Spec, per_head: tuple[Array, ...], key: Array, value: Array, tiling: Tiling
) -> list[Array]:
    """Returns the gradients of parameters alone, for kernels that cannot scatter.

    Sizes are whole tiles; `per_head` has the fields of `PerQuery`.
    """
    query, *rest = per_head
    wide = [x.astype(accumulation(key.dtype)) for x in rest]
    call = BlockwiseCall(Shapes.of(query, value), tiling, "vmap")
    return backward_vmap(spec, (query, *wide), key, value, call)[0]


def _forward(
    platform: str,
    tiling: Tiling | None,
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    keep: bool = False,
) -> tuple[Any, ...]:
    call = BlockwiseCall.of(platform, spec, query, value, tiling)
    if call.strategy == "single tile":
        sizes = tuning.sizes(platform)
        return single_tile.forward(spec, query, key, value, sizes, keep)
    spec, run = call.pad(spec), forward_loop if call.strategy == "loop" else forward_vmap
    if band := _band(spec, call):
        run = functools.partial(_forward_band, band=band)
    results = run(spec, query, key, value, call)
    weights = (no_weights(query, key, value),) if keep else ()
    return *results, jnp.zeros((), bool), *weights


_COARSE = 2.0**16  # the least logits for which the rounding of products affects weights


def _normalized_by_tiles(
    spec: Spec, per_query: PerQuery, key: Array, value: Array, call: BlockwiseCall
) -> PerQuery:
    """Returns `per_query`, for large logits with the normalizer of the scores of tiles: XLA rounds
    the products of a tile differently from those of a piece of the band."""

    def by_tiles(per_query: PerQuery, key: Array, value: Array) -> Any:
        _, normalizer = forward_loop(spec, per_query.query, key, value, call)
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
    *forward_results: Array,
) -> tuple[Any, Array, Array, Array]:
    call = BlockwiseCall.of(platform, spec, per_query[0], value, tiling)
    if call.strategy == "single tile":
        sizes = tuning.sizes(platform)
        return single_tile.backward(spec, per_query, key, value, forward_results, sizes)
    padded, run = call.pad(spec), backward_loop if call.strategy == "loop" else backward_vmap
    if _band(padded, call):
        per_query = _normalized_by_tiles(padded, per_query, key, value, call)
    d_params, *gradients = run(padded, per_query, key, value, call)
    return slicing.unpadded_parameters(d_params, spec), *gradients


def functions(platform: str, tiling: Tiling | None = None) -> AttentionVJP:
    """Returns the forward and backward functions, with a tiling that is given or chosen.

    Without a given tiling, short sequences are a single tile.
    """
    forward, backward = (functools.partial(f, platform, tiling) for f in (_forward, _backward))
    return AttentionVJP(forward, backward, functools.partial(forward, keep=True))


KERNEL = Kernel(supports=lambda call: None, functions=functions)
