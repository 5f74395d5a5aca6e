"""Exact attention tile by tile, in memory linear in T and S.

In the forward pass, each block of queries visits its tiles of keys and combines their results by
the online softmax of `jattn.softmax`. The backward pass visits the tiles again and recomputes their
weights from the queries, the keys and the normalizer (Rabe and Staats 2021; Dao et al. 2022,
FlashAttention; gradients as in Dao et al., appendix B.2). `tile_schedule` determines which tiles
are visited, and skips tiles in which the mask allows no pair. Consecutive tiles that are computed
together are a *run*.

On a CPU the heads are computed one after another: one tile of one head occupies all cores and stays
in their caches. On other platforms all heads are computed at once. Short sequences use
`single_tile`. Tile sizes are defined in `jattn.tuning`.
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
from jattn.kernels.xla import normalized, single_tile
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling, has_mask, parameter_letters, parameters, scaled
from jattn.tuning import Sizes


def choose_tiling(spec: Spec, T: int, S: int, sizes: Sizes) -> Tiling:
    """Chooses the tiling of a call.

    Small tiles fit a narrow band of unmasked pairs closely. If a block of queries visits many keys,
    larger tiles are faster.
    """
    block = max(128, max(T, S) // 1024)  # coarse, so that the tile map of a long sequence is small
    tile_kinds = tile_schedule.kinds(select_head(spec, 0, 0), T, S, Tiling(block, block))
    # Bounds of the number of keys that a block of queries visits on average. With a traced mask the
    # number is not known: the bounds stay 0 and S.
    min_keys, max_keys = 0.0, float(S)
    if isinstance(tile_kinds, np.ndarray):
        min_keys = max_keys = float(np.mean(np.sum(tile_kinds > 0, axis=1)) * block)
    size = sizes.small if max_keys <= sizes.narrow else sizes.large
    if min_keys >= sizes.wide:
        size = sizes.largest
    return Tiling(tile_schedule.even(T, size), tile_schedule.even(S, size))


# ---------------------------------------------------------------------------------------------
# One head
# ---------------------------------------------------------------------------------------------


class BlockwiseCall(NamedTuple):
    """The sizes of a call, its tiling, and the strategy by which its heads are computed.

    The strategies are:

    - "single tile": each head is one tile, and many heads are computed at once;
    - "loop": heads are computed one after another, each tile by tile;
    - "vmap": all heads are computed at once, each tile by tile.
    """

    shapes: Shapes
    tiling: Tiling
    strategy: str

    @classmethod
    def of(
        cls, platform: str, spec: Spec, query: Array, value: Array, tiling: Tiling | None
    ) -> "BlockwiseCall":
        """Chooses the strategy of a call, and its tiling if `tiling` is None."""
        shapes, sizes = Shapes.of(query, value), tuning.sizes(platform)
        T, S = shapes.T, shapes.S
        # With the strategy "single tile" the backward pass recomputes the normalizer from the keys
        # of the call. A call with a part of the keys (`spec.partial`) needs the normalizer of all.
        if tiling is None and T * S <= sizes.max_untiled and not spec.partial:
            return cls(shapes, Tiling(T, S), "single tile")
        strategy = "loop" if sizes.in_turn else "vmap"
        return cls(shapes, tiling or choose_tiling(spec, T, S, sizes), strategy)

    @property
    def padded(self) -> tuple[int, int]:
        """T and S, rounded up to whole tiles."""
        return slicing.round_up(self.shapes.T, self.shapes.S, self.tiling)

    def pad(self, spec: Spec) -> Spec:
        """Returns the spec, padded to whole tiles."""
        return slicing.pad_spec(spec, self.shapes.T, self.shapes.S, *self.padded)

    def schedule(
        self, spec: Spec, b: Index, h: Index, *, by_key: bool = False
    ) -> tile_schedule.Schedule:
        """Returns the schedule of head (b, h), see `tile_schedule.schedule`.

        With the strategy "vmap", which GPUs and TPUs use, loops are not unrolled: the compilers for
        GPUs and TPUs would run unrolled tiles concurrently, and keep the scores of all in memory.
        """
        unrolled = self.strategy != "vmap"
        return tile_schedule.schedule(
            spec, b, h, *self.padded, self.tiling, by_key=by_key, unrolled=unrolled
        )

    def map_blocks(
        self, schedule: tile_schedule.Schedule, n: int, block: Callable[[Any], Any]
    ) -> Tree:
        """Returns the results of `block(i)` for each i < n, stacked.

        With the strategy "vmap", several blocks are computed at once. Their number is the
        largest divisor of n for which they have at most `tuning.scores_together` scores in all.
        Blocks that are computed at once, by `jax.vmap`, all run as many iterations as the one with
        the most tiles. A block that is computed alone loops over its own tiles only.
        """
        batch_size = 1
        if self.strategy == "vmap":
            scores_of_block = self.shapes.B * self.shapes.N * tile_schedule.widest(self.tiling)
            max_batch = min(n, max(1, tuning.current().scores_together // scores_of_block))
            batch_size = max(x for x in range(1, max_batch + 1) if n % x == 0)

        def over_blocks(block: Callable[[Any], Any], indices: Array) -> Tree:
            if batch_size == n > 1:
                return jax.vmap(block)(indices)
            return lax.map(block, indices, batch_size=batch_size if batch_size > 1 else None)

        return tile_schedule.map_blocks(schedule, n, block, over_blocks)


class Values(NamedTuple):
    """The values of one head, separated into finite numbers and markers of non-finite rows.

    `finite` has 0 in place of NaN and infinities. `nonfinite` is added to the scores of each key:
    NaN if its value is not finite, else 0, so that only queries that attend to the key become NaN.
    Without a mask every query attends to every key. Then `nonfinite` is None, and
    `tile.add_nan_of_values` makes all results NaN if any value is not finite.
    """

    finite: Float[Array, "S V"]
    nonfinite: Float[Array, " S"] | None

    @classmethod
    def of(cls, spec: Spec, v: Array) -> "Values":
        v = v.astype(accumulation(v.dtype))
        return cls(tile.finite(v), tile.nan_where_nonfinite(v) if has_mask(spec) else None)

    def slice_keys(self, run: tile_schedule.TileRun) -> "Values":
        """Returns the values of the keys of a run."""
        return jax.tree.map(lambda x: slicing.take(x, run.start, run.size), self)


def tile_products(head_tile: slicing.HeadTile, q: Array, k: Array, values: Values) -> Array:
    """Computes the products `[t, s]` of a tile: NaN for keys marked in `values.nonfinite`."""
    result = tile.pair_products(head_tile.spec, q, k)
    return result if values.nonfinite is None else result + values.nonfinite[None, :]


def _forward_head(
    spec: Spec, b: Index, h: Index, q: Array, k: Array, v: Array, call: BlockwiseCall
) -> tuple[Float[Array, "T V"], Normalizer]:
    """Computes the output and the normalizer of one head, padded to whole tiles."""
    schedule, block_q = call.schedule(spec, b, h), call.tiling.block_q
    values = Values.of(spec, v)
    # Large values are scaled down, so that their weighted sum cannot overflow.
    factor = softmax.overflow_safe_factor(softmax.greatest(values.finite), len(v))
    values = values._replace(finite=values.finite * factor)
    spec, q, _ = scaled(spec, q)

    def block(i: Index) -> tuple[Array, Normalizer]:
        q_i = slicing.take(q, i * block_q, block_q)

        def add_run(run: tile_schedule.TileRun, state: softmax.Partial | None) -> softmax.Partial:
            head_tile = slicing.HeadTile.at(spec, b, h, i * block_q, block_q, run)
            k_j, v_j = slicing.take(k, run.start, run.size), values.slice_keys(run)
            score = head_tile.modify(tile_products(head_tile, q_i, k_j, v_j), run.masked)
            partial = softmax.contribution(
                score, lambda w: dot(head_tile.drop(w), v_j.finite, spec), differentiable=False
            )
            return partial if state is None else softmax.combine(state, partial)

        # In an unrolled schedule the first run makes the state; a loop needs an initial state.
        runs = schedule.unrolled_runs(i)
        initial = None if runs else softmax.empty(block_q, v.shape[1], values.finite.dtype)
        return softmax.finish_without_gradient(tile_schedule.visit(schedule, i, add_run, initial))

    blocks = call.map_blocks(schedule, len(q) // block_q, block)
    out, (maximum, log_total) = jax.tree.map(tile_schedule.concatenate_blocks, blocks)
    # Without a mask, a value that is not finite makes the results of all queries NaN.
    return tile.add_nan_of_values(spec, v, out / factor), Normalizer(
        tile.add_nan_of_values(spec, v, maximum), log_total
    )


def dot(a: Array, b: Array, spec: Spec) -> Array:
    """Computes the product of two matrices in the spec's precision."""
    return jnp.dot(a, b, precision=spec.precision)


class _Gradients(NamedTuple):
    """The gradients of one head. `key` and `value` are transposed, see `backward_head`."""

    query: Float[Array, "T H"]
    key: Float[Array, "H S"]
    value: Float[Array, "V S"]
    params: Tree


class _BackwardHead(NamedTuple):
    """The operands of the backward pass of one head, padded to whole tiles.

    d_out, maximum, log_total and delta are fields of `PerQuery`. Scores are computed from q and k,
    where q may include the scale. Sums over queries or keys use `q_finite` and `k_finite`, which
    have 0 in place of NaN and infinities: the weight 0 of a masked pair times NaN or infinity would
    be NaN.
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
        cls, spec: Spec, b: Index, h: Index, per_query: tuple[Array, ...], k: Array, v: Array
    ) -> "_BackwardHead":
        q, d_out, maximum, log_total, delta = per_query
        dtype = accumulation(q.dtype)
        q_finite, k_finite = (tile.finite(x.astype(dtype)) for x in (q, k))
        per_query = (q, q_finite, d_out, maximum, log_total, delta)
        return cls(spec, b, h, *per_query, k, k_finite, Values.of(spec, v))

    def tile_gradients(
        self, start: Index, size: int, run: tile_schedule.TileRun
    ) -> tuple[Array, Array, Any]:
        """Returns the cotangent of a tile's products, its weights after dropout, and the gradients
        of parameters; the tile has `size` queries from `start` on, and the keys of `run`.

        The cotangent of the scores is p (dp − delta), where p are the weights and dp is
        drop(d_out vᵀ).
        """
        head_tile = slicing.HeadTile.at(self.spec, self.b, self.h, start, size, run)
        arrays = (self.q, self.d_out, self.maximum, self.log_total, self.delta)
        q, d_out, maximum, log_total, delta = (slicing.take(x, start, size) for x in arrays)
        k, values = slicing.take(self.k, run.start, run.size), self.values.slice_keys(run)
        score, pull = head_tile.modified(tile_products(head_tile, q, k, values), run.masked)
        weights = softmax.weights(score, maximum, log_total, run.masked)
        d_weights = head_tile.drop(dot(d_out, values.finite.T, self.spec))
        d_products, d_params = pull(weights * (d_weights - delta[:, None]))
        return d_products, head_tile.drop(weights), d_params


def backward_head(
    spec: Spec, b: Index, h: Index, per_query: Any, k: Array, v: Array, call: BlockwiseCall
) -> _Gradients:
    """Computes the gradients of one head, one block of queries after another.

    `per_query` has the fields of `PerQuery`. Queries and d_out are transposed once for each
    head, and the gradients of keys and values are summed as `[H, S]` and `[V, S]`. If these sums
    were `[S, H]` and `[S, V]`, each product would have to transpose a tile's matrix `[t, s]`, and
    run at a third of the speed on CPUs.
    """
    q, d_out, *_ = per_query
    schedule, block_q = call.schedule(spec, b, h), call.tiling.block_q
    spec, q, scale = scaled(spec, q)
    head = _BackwardHead.of(spec, b, h, (q, *per_query[1:]), k, v)
    q_transposed, d_out_transposed = head.q_finite.T, d_out.T
    letters = parameter_letters(spec)

    def block(i: Index, total: _Gradients) -> _Gradients:
        q_i_transposed, d_out_i_transposed = (
            slicing.take(x, i * block_q, block_q, 1) for x in (q_transposed, d_out_transposed)
        )

        def add_run(run: tile_schedule.TileRun, state: Tree) -> Tree:
            dq_i, dk, dv, d_params = state
            d_products, weights, d_tile_params = head.tile_gradients(i * block_q, block_q, run)
            k_j = slicing.take(head.k_finite, run.start, run.size)
            if spec.pair is None:
                dq = dot(d_products, k_j, spec)
                dk_j_transposed = dot(q_i_transposed, d_products, spec)
            else:
                dq, dk_j, d_tile_params = _pair_gradients(
                    spec, q_i_transposed.T, k_j, d_products, d_tile_params
                )
                dk_j_transposed = dk_j.T
            dk = slicing.add_at(dk, dk_j_transposed, run.start, 1)
            dv_j_transposed = dot(d_out_i_transposed, weights, spec)
            dv = slicing.add_at(dv, dv_j_transposed, run.start, 1)
            starts = {"T": i * block_q, "S": run.start}
            d_params = slicing.add_leaves(d_params, d_tile_params, letters, starts)
            return dq_i + dq, dk, dv, d_params

        state = (jnp.zeros_like(head.q_finite[:block_q]), total.key, total.value, total.params)
        dq_i, *rest = tile_schedule.visit(schedule, i, add_run, state)
        return _Gradients(slicing.add_at(total.query, dq_i, i * block_q, 0), *rest)

    zeros = (head.q_finite, head.k_finite.T, head.values.finite.T, parameters(spec))
    total = tile_schedule.fold_blocks(
        schedule, len(q) // block_q, block, _Gradients(*jax.tree.map(jnp.zeros_like, zeros))
    )
    return total._replace(query=total.query * scale)


def _pair_gradients(
    spec: Spec, q: Array, k: Array, d_products: Array, d_params: list[Array]
) -> tuple[Array, Array, list[Array]]:
    """Returns the gradients of a tile's queries, keys and parameters if the spec has a pair score,
    which replaces the product of query and key.

    The parameters of the pair score are the last of the spec's parameters: their gradients replace
    the last of `d_params`.
    """
    _, pull = jax.vjp(lambda pair, q, k: pair.products(q, k), spec.pair, q, k)
    d_pair, dq, dk = pull(d_products)
    d_pair = jax.tree.leaves(d_pair)
    return dq, dk, [*d_params[: -len(d_pair)], *d_pair]


def _backward_blocks(
    spec: Spec, b: Index, h: Index, per_query: Any, k: Array, v: Array, call: BlockwiseCall
) -> _Gradients:
    """Computes the gradients of one head, several blocks at once.

    A first pass over blocks of queries computes the gradients of queries and parameters. A second
    pass over blocks of keys computes those of keys and values. Both passes compute the weights.
    Every block returns results of its own, so the order of every sum is fixed.
    """
    q, (block_q, block_kv), S = per_query[0], call.tiling, len(k)
    by_query, by_key = (call.schedule(spec, b, h, by_key=x) for x in (False, True))
    spec, q, scale = scaled(spec, q)
    head = _BackwardHead.of(spec, b, h, (q, *per_query[1:]), k, v)
    letters = parameter_letters(spec)

    def query_block(i: Index) -> tuple[Array, list[Array]]:
        """Computes the gradients of a block of queries and its share of parameter gradients."""

        def add_run(run: tile_schedule.TileRun, state: Tree) -> Tree:
            dq_i, d_params = state
            d_products, _, d_tile_params = head.tile_gradients(i * block_q, block_q, run)
            k_j = slicing.take(head.k_finite, run.start, run.size)
            if spec.pair is None:
                dq = dot(d_products, k_j, spec)
            else:
                q_i = slicing.take(head.q_finite, i * block_q, block_q)
                dq, _, d_tile_params = _pair_gradients(spec, q_i, k_j, d_products, d_tile_params)
            starts = {"T": 0, "S": run.start}  # along T, `d_params` has only this block of queries
            return dq_i + dq, slicing.add_leaves(d_params, d_tile_params, letters, starts)

        params = parameters(slicing.slice_tile(spec, i * block_q, block_q, 0, S))
        zeros = jax.tree.map(jnp.zeros_like, (head.q_finite[:block_q], params))
        return tile_schedule.visit(by_query, i, add_run, zeros)

    def key_block(j: Index) -> tuple[Array, Array]:
        """Computes the gradients of a block of keys and of its values."""

        def add_run(queries: tile_schedule.TileRun, state: tuple[Array, ...]) -> tuple[Array, ...]:
            dk_j, dv_j = state
            start, size, masked = queries
            keys = tile_schedule.TileRun(j * block_kv, block_kv, masked)
            d_products, weights, _ = head.tile_gradients(start, size, keys)
            q_i, d_out_i = (slicing.take(x, start, size) for x in (head.q_finite, head.d_out))
            if spec.pair is None:
                dk = dot(d_products.T, q_i, spec)
            else:
                k_j = slicing.take(head.k_finite, j * block_kv, block_kv)
                _, dk, _ = _pair_gradients(spec, q_i, k_j, d_products, parameters(spec))
            return dk_j + dk, dv_j + dot(weights.T, d_out_i, spec)

        zeros = (head.k_finite[:block_kv], head.values.finite[:block_kv])
        return tile_schedule.visit(by_key, j, add_run, jax.tree.map(jnp.zeros_like, zeros))

    d_query, d_params = call.map_blocks(by_query, len(q) // block_q, query_block)
    d_key, d_value = call.map_blocks(by_key, S // block_kv, key_block)
    d_params = slicing.join_leaves(d_params, parameters(spec), letters)
    d_query, d_key, d_value = map(tile_schedule.concatenate_blocks, (d_query, d_key, d_value))
    return _Gradients(d_query * scale, d_key.T, d_value.T, d_params)


# ---------------------------------------------------------------------------------------------
# All heads
# ---------------------------------------------------------------------------------------------


def take_head(x: Array, b: Index, h: Index, size: int) -> Array:
    """Returns head (b, h) of `x [B, T, N, ...]`, padded to `[size, ...]`."""
    start = (b, np.int32(0), h) + (np.int32(0),) * (x.ndim - 3)
    head = lax.dynamic_slice(x, start, (1, x.shape[1], 1, *x.shape[3:]))
    return slicing.pad_to(head.reshape(x.shape[1], *x.shape[3:]), size)


def write_head(total: Array, x: Array, b: Index, h: Index, first_query: Any = 0) -> Array:
    """Writes `x [t, ...]` to head (b, h) of `total [B, T, N, ...]`, from `first_query` on."""
    start = (b, jnp.int32(first_query), h) + (np.int32(0),) * (total.ndim - 3)
    return lax.dynamic_update_slice(total, x[None, : total.shape[1], None], start)


def forward_loop(spec: Spec, query: Array, key: Array, value: Array, call: BlockwiseCall) -> Tree:
    """Computes `out [B, T, N, V]` and the normalizer `[B, T, N]`, one head after another."""
    shapes, (T, S) = call.shapes, call.padded

    def body(n: Array, total: Tree) -> Tree:
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.N))
        q = take_head(query, b, h, T)
        k, v = (take_head(x, b, h // shapes.G, S) for x in (key, value))
        results = _forward_head(select_head(spec, b, h), b, h, q, k, v, call)
        return jax.tree.map(lambda x, y: write_head(x, y, b, h), total, results)

    total = _zero_results(shapes, shapes.T, accumulation(query.dtype))
    return tile_schedule.repeat(0, shapes.B * shapes.N, body, total)


def _zero_results(shapes: Shapes, T: int, dtype: DTypeLike) -> tuple[Array, Normalizer]:
    """Returns an output and a normalizer of zeros, for T queries of all heads."""
    zeros = jnp.zeros((shapes.B, T, shapes.N), accumulation(dtype))
    return jnp.zeros((*zeros.shape, shapes.V), dtype), Normalizer(zeros, zeros)


def _band(spec: Spec, call: BlockwiseCall) -> tile_schedule.Band | None:
    """Returns the `Band` of a padded spec: the same number of consecutive keys for each block of
    queries. Returns None if the forward pass cannot use a band.

    After a forward pass along a band, the backward pass may have to recompute the normalizer, see
    `_with_recomputed_normalizer`. A call with a part of the keys (`spec.partial`) cannot do
    that, as its backward pass is given the normalizer of all keys; so it uses no band.
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
    """Computes the results of `forward_loop` along a band, several blocks of one head at once.

    A block has `band.rows` queries and the `band.width` keys that they visit. It is a single tile.
    """
    shapes, (T, S) = call.shapes, call.padded
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))
        for x, size in ((query, T), (key, S), (value, S))
    )
    n_blocks, starts = len(band.starts), jnp.asarray(band.starts)
    batch_size = min(n_blocks, tuning.current().band_blocks)
    n_batches = -(-n_blocks // batch_size)

    def compute_block(
        compute_tile: Callable[..., Any], i: Index, spec: Spec, b: Index, h: Index, *qkv: Array
    ) -> Any:
        keys = tile_schedule.TileRun(starts[i], band.width, True)
        head_tile = slicing.HeadTile.at(spec, b, h, i * band.rows, band.rows, keys)
        return compute_tile(head_tile, *qkv)

    def map_blocks(
        compute_tile: Callable[..., Any], *operands: Tree, over_batch: Any = jax.vmap
    ) -> Any:
        """Maps `compute_tile` over a batch of blocks, all at once (`jax.vmap`) or one after
        another (`tile.map_in_sequence`)."""
        axes = (0, None, None, None, 0, 0, 0)  # of i, spec, b, h, q, k and v
        return over_batch(functools.partial(compute_block, compute_tile), axes)(*operands)

    def body(index: Any, total: Any) -> Any:
        head, batch = divmod(index, n_batches)
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(head, shapes.N))
        # The last batch is as large as the others: it may compute some blocks a second time.
        first_block = jnp.minimum(batch * batch_size, n_blocks - batch_size)
        i = first_block + jnp.arange(batch_size, dtype=jnp.int32)
        q = _slices(query, b, i * band.rows, h, band.rows)
        k, v = (_slices(x, b, starts[i], h // shapes.G, band.width) for x in (key, value))
        operands = (i, select_head(spec, b, h), b, h, q, k, v)
        results, _ = single_tile.attempt(
            single_tile.FORWARD, map_blocks, tuple, operands, spec, optimistic=True
        )

        def write(total: Array, x: Array) -> Array:
            joined = x.reshape(batch_size * band.rows, *x.shape[2:])
            return write_head(total, joined, b, h, i[0] * band.rows)

        return jax.tree.map(write, total, results)

    total = _zero_results(shapes, T, accumulation(query.dtype))
    results = tile_schedule.repeat(0, shapes.B * shapes.N * n_batches, body, total)
    return jax.tree.map(lambda x: x[:, : shapes.T], results)


def _slices(x: Array, b: Index, starts: Array, h: Index, size: int) -> Array:
    """Returns the slices of head (b, h) of `x [B, T, N, H]` at `starts [n]`, as `[n, size, H]`."""

    def slice_at(start: Index) -> Array:
        return lax.dynamic_slice(x, (b, start, h, np.int32(0)), (1, size, 1, x.shape[3]))

    return jax.vmap(slice_at)(starts).reshape(-1, size, x.shape[3])


def forward_vmap(spec: Spec, query: Array, key: Array, value: Array, call: BlockwiseCall) -> Tree:
    """Computes `out [B, T, N, V]` and the normalizer `[B, T, N]`, all heads at once."""
    shapes, (T, S) = call.shapes, call.padded

    def compute_head(spec: Spec, b: Index, h: Index, q: Array, k: Array, v: Array) -> Tree:
        q, k, v = slicing.pad_to(q, T), slicing.pad_to(k, S), slicing.pad_to(v, S)
        results = _forward_head(spec, b, h, q, k, v, call)
        return jax.tree.map(lambda x: x[: shapes.T], results)

    return tile.over_heads(compute_head, spec, (query,), (key, value), out_axes=1)


def backward_loop(
    spec: Spec, per_query: PerQuery, key: Array, value: Array, call: BlockwiseCall
) -> Tree:
    """Computes the gradients of parameters, query, key and value, one head after another.

    `per_query` is a `PerQuery` of all heads, each array `[B, T, N, ...]`.
    """
    shapes, (T, S) = call.shapes, call.padded
    letters, inputs = parameter_letters(spec), (per_query[0], key, value)

    def body(n: Array, total: Tree) -> Tree:
        b, key_head = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.K))
        k, v = (take_head(x, b, key_head, S) for x in (key, value))
        params, d_query, d_key, d_value = total

        def add_head(g: Array, state: Tree) -> Tree:
            params, d_query, *d_kv = state
            h = key_head * shapes.G + g
            head_per_query = tuple(take_head(x, b, h, T) for x in per_query)
            head = backward_head(select_head(spec, b, h), b, h, head_per_query, k, v, call)
            params = slicing.add_params(params, head.params, letters, b, h)
            d_kv = [x + y for x, y in zip(d_kv, (head.key, head.value), strict=True)]
            return params, write_head(d_query, head.query, b, h), *d_kv

        zeros = (jnp.zeros(x.shape[::-1], accumulation(x.dtype)) for x in (k, v))
        params, d_query, *d_kv = tile_schedule.repeat(
            0, shapes.G, add_head, (params, d_query, *zeros)
        )
        pairs = zip((d_key, d_value), d_kv, strict=True)
        return params, d_query, *(write_head(x, y.T, b, key_head) for x, y in pairs)

    total = (
        [jnp.zeros_like(leaf) for leaf in parameters(spec)],
        *(jnp.zeros(x.shape, accumulation(x.dtype)) for x in inputs),
    )
    return tile_schedule.repeat(0, shapes.B * shapes.K, body, total)


def backward_vmap(
    spec: Spec,
    per_query: tuple[Array, ...],
    key: Array,
    value: Array,
    call: BlockwiseCall,
    over_batch: Any = jax.vmap,
) -> Tree:
    """Computes the gradients of parameters, query, key and value, by `vmap` over heads.

    `per_query` is a `PerQuery` of all heads, each array `[B, T, N, ...]`. `over_batch` maps over
    batch rows: `jax.vmap` or `tile.map_in_sequence`.
    """
    shapes, (T, S) = call.shapes, call.padded
    backward = backward_head if call.strategy == "single tile" else _backward_blocks

    def compute_head(spec: Spec, b: Index, h: Index, *operands: Array) -> Tree:
        *head_per_query, k, v = operands
        head_per_query = tuple(slicing.pad_to(x, T) for x in head_per_query)
        k, v = (slicing.pad_to(x, S) for x in (k, v))
        head = backward(spec, b, h, head_per_query, k, v, call)
        return head.query[: shapes.T], head.key.T[: shapes.S], head.value.T[: shapes.S], head.params

    out_axes = (1, 1, 1, [0] * len(parameters(spec)))
    gradients = tile.over_heads(compute_head, spec, per_query, (key, value), out_axes, over_batch)
    return tile.sum_shared_gradients(spec, key.shape[2], *gradients)


def parameter_gradients(
    spec: Spec, per_query: tuple[Array, ...], key: Array, value: Array, tiling: Tiling
) -> list[Array]:
    """Computes only the gradients of parameters, for kernels that cannot scatter.

    T and S are multiples of the tiling; `per_query` has the fields of `PerQuery`.
    """
    query, *rest = per_query
    rest = [x.astype(accumulation(key.dtype)) for x in rest]
    call = BlockwiseCall(Shapes.of(query, value), tiling, "vmap")
    return backward_vmap(spec, (query, *rest), key, value, call)[0]


def _forward(
    platform: str,
    tiling: Tiling | None,
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    keep_weights: bool = False,
) -> tuple[Any, ...]:
    if spec.normalizer is not None:
        weights = (no_weights(query, key, value),) if keep_weights else ()
        return *normalized.forward(platform, spec, query, key, value), *weights
    call = BlockwiseCall.of(platform, spec, query, value, tiling)
    if call.strategy == "single tile":
        sizes = tuning.sizes(platform)
        return single_tile.forward(spec, query, key, value, sizes, keep_weights)
    spec, compute = call.pad(spec), forward_loop if call.strategy == "loop" else forward_vmap
    if band := _band(spec, call):
        compute = functools.partial(_forward_band, band=band)
    results = compute(spec, query, key, value, call)
    weights = (no_weights(query, key, value),) if keep_weights else ()
    # `all_finite` is not computed: only the backward pass of a single tile uses it.
    return *results, jnp.zeros((), bool), *weights


_LARGE_LOGITS = 2.0**16  # from this size on, rounding a logit may change weights noticeably


def _with_recomputed_normalizer(
    spec: Spec, per_query: PerQuery, key: Array, value: Array, call: BlockwiseCall
) -> PerQuery:
    """Returns `per_query`, with a recomputed normalizer if logits are large.

    The forward pass computed the normalizer along a band, the backward pass computes scores tile by
    tile, and XLA rounds the products of the two differently. If logits are large, this function
    computes the normalizer again, from scores that are computed tile by tile.
    """

    def normalizer_of(per_query: PerQuery, *_: Array) -> Any:
        return per_query.maximum, per_query.log_total

    def new_normalizer(per_query: PerQuery, key: Array, value: Array) -> Any:
        _, normalizer = forward_loop(spec, per_query.query, key, value, call)
        return normalizer_of(per_query.with_normalizer(normalizer))

    is_small = jnp.max(jnp.abs(per_query.maximum), initial=0) < _LARGE_LOGITS
    maximum, log_total = unbatched_cond(
        is_small, normalizer_of, new_normalizer, per_query, key, value
    )
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
    if spec.normalizer is not None:
        return normalized.backward(platform, spec, per_query, key, value)
    call = BlockwiseCall.of(platform, spec, per_query[0], value, tiling)
    if call.strategy == "single tile":
        sizes = tuning.sizes(platform)
        return single_tile.backward(spec, per_query, key, value, forward_results, sizes)
    padded, compute = call.pad(spec), backward_loop if call.strategy == "loop" else backward_vmap
    if _band(padded, call):
        per_query = _with_recomputed_normalizer(padded, per_query, key, value, call)
    d_params, *gradients = compute(padded, per_query, key, value, call)
    return slicing.unpadded_parameters(d_params, spec), *gradients


def functions(platform: str, tiling: Tiling | None = None) -> AttentionVJP:
    """Returns the forward and backward functions.

    If `tiling` is None, a short sequence is a single tile, and `choose_tiling` chooses the tiling
    of longer ones.
    """
    forward, backward = (functools.partial(f, platform, tiling) for f in (_forward, _backward))
    return AttentionVJP(forward, backward, functools.partial(forward, keep_weights=True))


# This kernel computes every call, so `supports` always returns None: no reason to refuse the call.
KERNEL = Kernel(supports=lambda call: None, functions=functions, normalizers=lambda call: None)
