"""Statistics of weights, tile by tile: sums over the keys of each query and over the queries of
each key.

The tiles are visited twice, the first time for the normalizer of each row.

Every statistic that has a derivative is a sum Σ w x over a row of weights w. With the cotangents g
of the sums X, that of the scores is w (Σ g x − Σ g X); for the entropy, x = −log w.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jattn import softmax, tile, tuning
from jattn._explicit import in_context_mesh
from jattn._pytree import select_head
from jattn._types import Index, Tree, accumulation
from jattn.kernels.common import lowering, partition, reverse_mode, slicing, tile_schedule
from jattn.kernels.protocol import QueryStatistics, StatisticsRequest, WeightSums
from jattn.kernels.xla import blockwise, normalized_statistics
from jattn.kernels.xla.blockwise import BlockwiseCall
from jattn.scores import distance
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling, parameter_letters, parameters, scaled, with_parameters


class _WeightTile(NamedTuple):
    """The weights of a tile, their logs and their place, and if asked for the pullback of their
    scores."""

    weights: Float[Array, "t s"]
    logs: Float[Array, "t s"]
    place: slicing.HeadTile
    keys: Spec | None
    pull: Any

    def on_keys(self) -> Any:
        """Returns 1 for the pairs with the question's keys, else 0."""
        assert self.keys is not None
        place = self.place
        allowed = self.keys.mask.evaluate(place.b, place.h, place.rows, place.columns)
        return allowed.astype(self.weights.dtype)

    def distances(self) -> Float[Array, "t s"]:
        """Returns the distance of each pair."""
        return distance(self.place.rows, self.place.columns, self.weights.dtype)

    def entropies(self) -> Float[Array, "t s"]:
        """Returns −log w, and 0 for masked pairs, which have no weight."""
        return jnp.where(self.logs == -jnp.inf, 0, -self.logs)


class _WeightHead:
    """The weights of one head, and their visits; sizes are whole tiles."""

    def __init__(
        self,
        question: StatisticsRequest,
        b: Index,
        h: Index,
        q: Array,
        k: Array,
        call: BlockwiseCall,
    ):
        self.question, self.b, self.h, self.q, self.k = question, b, h, q, k
        self.rows, self.dtype = call.tiling.block_q, accumulation(q.dtype)
        self.blocks, self.schedule = len(q) // self.rows, call.schedule(question.spec, b, h)
        self.normalizer = self.map(self._block_normalizer)

    def map(self, block: Callable[[Index], Any]) -> Any:
        """Returns `block(i)` of all blocks of queries, joined along the queries."""
        stacked = tile_schedule.map_blocks(self.schedule, self.blocks, block)
        return jax.tree.map(tile_schedule.concatenate_blocks, stacked)

    def fold(self, block: Callable[[Index, Any], Any], total: Any) -> Any:
        """Folds `block(i, total)` over all blocks of queries."""
        return tile_schedule.fold_blocks(self.schedule, self.blocks, block, total)

    def visit(self, i: Index, add_run: Callable[..., Any], state: Any) -> Any:
        """Folds `add_run(run, state)` over the runs of keys that block i visits."""
        return tile_schedule.visit(self.schedule, i, add_run, state)

    def take(self, x: Array, i: Index) -> Array:
        """Returns the rows of block i."""
        return slicing.take(x, i * self.rows, self.rows)

    def _block_normalizer(self, i: Index) -> Normalizer:
        def add_run(run: tile_schedule.TileRun, state: softmax.Partial) -> softmax.Partial:
            place, products = self._products(i, run)
            score = place.modify(products, run.masked)
            part = softmax.contribution(score, lambda weights: weights[:, :0], differentiable=False)
            return softmax.combine(state, part)

        return softmax.finish_without_gradient(
            self.visit(i, add_run, softmax.empty(self.rows, 0, self.dtype))
        )[1]

    def _products(self, i: Index, run: tile_schedule.TileRun) -> tuple[slicing.HeadTile, Array]:
        """Computes the products of query block i and a run of keys; returns them after their
        place."""
        place = slicing.HeadTile.at(
            self.question.spec, self.b, self.h, i * self.rows, self.rows, run
        )
        q_i, k_j = self.take(self.q, i), slicing.take(self.k, run.start, run.size)
        return place, tile.pair_products(place.spec, q_i, k_j)

    def tile(
        self, i: Index, run: tile_schedule.TileRun, differentiable: bool = False
    ) -> _WeightTile:
        """Computes the tile of query block i and a run of keys; with `differentiable` also the
        pullback of its scores."""
        keys = self.question.keys
        place, products = self._products(i, run)
        if differentiable:
            score, pull = place.modified(products, run.masked)
        else:
            score, pull = place.modify(products, run.masked), None
        if keys is not None:
            keys = slicing.slice_tile(keys, i * self.rows, self.rows, run.start, run.size)
        maximum, log_total = (self.take(x, i)[:, None] for x in self.normalizer)
        logs = (score - jnp.where(maximum == -jnp.inf, 0, maximum)) - log_total
        # Computed once: XLA would compute both again for each sum.
        logs = lax.optimization_barrier(logs)
        return _WeightTile(lax.optimization_barrier(jnp.exp(logs)), logs, place, keys, pull)


def _sum(x: Float[Array, "t s"], y: Float[Array, "#t s"]) -> Float[Array, " t"]:
    return jnp.sum(x * y, axis=1)


def _greatest(weights: _WeightTile, start: Index, state: QueryStatistics) -> tuple[Array, Array]:
    """Returns the greatest log of a weight so far, and its place: the first of several."""
    most = jnp.max(weights.logs, axis=1)
    places = start + jnp.arange(weights.logs.shape[1], dtype=jnp.int32)
    last = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(weights.logs == most[:, None], places[None, :], last), axis=1)
    better = most > state.greatest
    earlier = (most == state.greatest) & (most > -jnp.inf) & (first < state.place)
    place = jnp.where(better | earlier, first, state.place)
    return jnp.maximum(most, state.greatest), place


def _no_statistics(question: StatisticsRequest, rows: int, dtype: Any) -> QueryStatistics:
    """Returns the statistics of rows before any key is visited."""
    zeros, lowest = jnp.zeros(rows, dtype), jnp.full(rows, -jnp.inf, dtype)
    on_keys, above = (None if x is None else zeros for x in (question.keys, question.threshold))
    return QueryStatistics(zeros, lowest, jnp.full(rows, -1, jnp.int32), zeros, on_keys, above)


def _rows_and_columns(head: _WeightHead) -> tuple[QueryStatistics, Float[Array, " S"]]:
    """Computes the statistics `[T]` of each query, and the weight `[S]` that each key receives."""
    question, rows, dtype = head.question, head.rows, head.dtype

    def block(i: Index, total: Any) -> Any:
        def add_run(run: tile_schedule.TileRun, carried: Any) -> Any:
            state, received = carried
            tile = head.tile(i, run)
            w = tile.weights
            on_keys, above = state.on_keys, state.above
            if on_keys is not None:
                on_keys = on_keys + _sum(w, tile.on_keys())
            if question.threshold is not None:
                above = above + jnp.sum(jnp.where(w > question.threshold, w, 0), axis=1)
            state = QueryStatistics(
                state.entropy + _sum(w, tile.entropies()),
                *_greatest(tile, run.start, state),
                state.distance + _sum(w, tile.distances()),
                on_keys,
                above,
            )
            return state, slicing.add_at(received, jnp.sum(w, axis=0), run.start, 0)

        by_row, received = total
        start = _no_statistics(question, rows, dtype), received
        state, received = head.visit(i, add_run, start)
        put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, i * rows, 0)  # noqa: E731
        return jax.tree.map(put, by_row, state), received

    total = _no_statistics(question, len(head.q), dtype), jnp.zeros(len(head.k), dtype)
    by_row, received = head.fold(block, total)
    return by_row._replace(greatest=jnp.exp(by_row.greatest)), received


def _gradients(head: _WeightHead, rows: QueryStatistics, cotangents: QueryStatistics) -> Any:
    """Computes the gradients of queries `[T, H]`, keys `[S, H]` and the spec's parameters."""
    question, maximum = head.question, head.normalizer.maximum
    q_finite, k_finite = (tile.finite(x.astype(head.dtype)) for x in (head.q, head.k))
    letters = parameter_letters(question.spec)
    names = ["entropy", "greatest", "distance"] + ["on_keys"] * (question.keys is not None)
    sums = {x: (getattr(cotangents, x), getattr(rows, x)) for x in names}
    offset = functools.reduce(jnp.add, (g * x for g, x in sums.values()))

    def block(i: Index, total: Any) -> Any:
        take = functools.partial(head.take, i=i)
        g = {name: take(g)[:, None] for name, (g, _) in sums.items()}

        def add_run(run: tile_schedule.TileRun, state: Tree) -> Any:
            dq_i, dk, d_params = state
            weights = head.tile(i, run, differentiable=True)
            places = run.start + jnp.arange(run.size, dtype=jnp.int32)
            d_weights = g["entropy"] * weights.entropies() + g["distance"] * weights.distances()
            is_greatest = take(rows.place)[:, None] == places[None, :]
            d_weights = d_weights + jnp.where(is_greatest, g["greatest"], 0)
            if "on_keys" in g:
                d_weights = d_weights + g["on_keys"] * weights.on_keys()
            d_scores = weights.weights * (d_weights - take(offset)[:, None])
            is_nan = jnp.isnan(take(maximum))[:, None]  # a row of NaN has no gradient
            d_scores = jnp.where(is_nan | (weights.logs == -jnp.inf), 0, d_scores)
            d_products, d_tile = weights.pull(d_scores)
            k_j = slicing.take(k_finite, run.start, run.size)
            dk_j = jnp.dot(take(q_finite).T, d_products).T
            starts = {"T": i * head.rows, "S": run.start}
            return (
                dq_i + jnp.dot(d_products, k_j),
                slicing.add_at(dk, dk_j, run.start, 0),
                slicing.add_leaves(d_params, d_tile, letters, starts),
            )

        dq, *rest = total
        dq_i, *rest = head.visit(i, add_run, (jnp.zeros_like(take(q_finite)), *rest))
        return slicing.add_at(dq, dq_i, i * head.rows, 0), *rest

    zeros = jax.tree.map(jnp.zeros_like, (q_finite, k_finite, parameters(question.spec)))
    return head.fold(block, zeros)


def _top(head: _WeightHead, n: int) -> tuple[Float[Array, "T n"], Int[Array, "T n"]]:
    """Returns the n greatest weights of each query, greatest first, and their places."""

    def block(i: Index) -> Any:
        def add_run(run: tile_schedule.TileRun, state: Tree) -> Any:
            logs, places = state
            new = run.start + jnp.arange(run.size, dtype=jnp.int32)
            new = jnp.broadcast_to(new, (head.rows, run.size))
            candidates = jnp.concatenate([logs, head.tile(i, run).logs], axis=1)
            logs, which = lax.top_k(candidates, n)
            places = jnp.concatenate([places, new], axis=1)
            return logs, jnp.take_along_axis(places, which, axis=1)

        shape = (head.rows, n)
        nothing = jnp.full(shape, -jnp.inf, head.dtype), jnp.full(shape, -1, jnp.int32)
        logs, places = head.visit(i, add_run, nothing)
        return jnp.exp(logs), jnp.where(logs == -jnp.inf, -1, places)

    return head.map(block)


# --- all heads ------------------------------------------------------------------------------------


class _PaddedQuestion(NamedTuple):
    """A question about a call whose sizes are whole tiles."""

    question: StatisticsRequest
    call: BlockwiseCall

    @classmethod
    def of(cls, question: StatisticsRequest, query: Array, key: Array) -> "_PaddedQuestion":
        shapes, sizes = Shapes.of(query, key), tuning.sizes(jax.default_backend())
        T, S = shapes.T, shapes.S
        is_large = T * S > sizes.max_untiled
        tiling = blockwise.choose_tiling(question.spec, T, S, sizes) if is_large else Tiling(T, S)
        call = BlockwiseCall(shapes, tiling, "loop")
        spec, keys = call.pad(question.spec), question.keys and call.pad(question.keys)
        return cls(StatisticsRequest(spec, keys, question.threshold), call)

    def over_heads(
        self, function: Callable[..., Any], query: Array, key: Array, *by_query: Any
    ) -> Any:
        """Returns `function(head, *by_query)` for each head, `[B, N, ...]`; `by_query` are trees of
        `[B, N, T]`.

        Heads run one after another if one head occupies all cores, else all at once.
        """
        shapes, (T, S) = self.call.shapes, self.call.padded
        B, N = shapes.B, shapes.N

        def one_head(n: Any) -> Any:
            b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, N))
            question = select_head(self.question, b, h)
            q = slicing.pad_to(query[b, :, h], T)
            k = slicing.pad_to(key[b, :, h // shapes.G], S)
            rows = jax.tree.map(lambda x: slicing.pad_to(x[b, h], T), by_query)
            spec, q, _ = scaled(question.spec, q)
            question = StatisticsRequest(spec, question.keys, question.threshold)
            return function(_WeightHead(question, b, h, q, k, self.call), *rows)

        batch = None if tuning.sizes(jax.default_backend()).in_turn else B * N
        results = lax.map(one_head, jnp.arange(B * N, dtype=jnp.int32), batch_size=batch)
        return jax.tree.map(lambda x: x.reshape(B, N, *x.shape[1:]), results)


def by_share(
    function: Callable[..., Any], like: Any, dims: Any, question: Any, *operands: Tree
) -> Any:
    """Computes `function(platform, question, query, key, ...)` for each device's share of the batch
    rows and heads, if these are sharded under `jit`. The results have the axes `dims`."""
    inputs = (question, *operands)
    rank = [x[: y.ndim] for x, y in zip(dims, jax.tree.leaves(like), strict=True)]
    sharded = partition.partitioned_statistics(function, tuple(rank), inputs)
    return lowering.platform_dependent(sharded, like, *inputs)


StatisticsForward = Callable[[StatisticsRequest, Array, Array], tuple[QueryStatistics, Array]]
"""A function from `(question, query, key)` to the statistics and the weight that keys receive."""


def by_tiles(
    question: StatisticsRequest, query: Array, key: Array
) -> tuple[QueryStatistics, Float[Array, "B N S"]]:
    """Computes the statistics of `[B, N, T]` and the weight `[B, N, S]` that each key receives."""
    if question.spec.normalizer is not None:
        return normalized_statistics.by_rows(question, query, key)
    T, S = query.shape[1], key.shape[1]
    padded = _PaddedQuestion.of(question, query, key)
    rows, received = padded.over_heads(_rows_and_columns, query, key)
    return jax.tree.map(lambda x: x[:, :, :T], rows), received[:, :, :S]


def statistics(
    forward: StatisticsForward, question: StatisticsRequest, query: Array, key: Array
) -> tuple[QueryStatistics, Array]:
    """Computes `forward`, differentiable: entropy, greatest weight, distance and weight on keys, by
    queries, keys and the spec's parameters."""

    @jax.custom_vjp
    def run(params: list[Array], question: StatisticsRequest, query: Array, key: Array) -> Any:
        return forward(_with(question, params), query, key)

    def with_residuals(*operands: Tree) -> Any:
        results = run(*operands)
        return results, (*operands, results[0])

    def backward(residuals: Any, cotangents: Any) -> Any:
        (params, question, query, key, rows), cotangents = in_context_mesh((residuals, cotangents))
        question = _with(question, params)
        d_params, d_query, d_key = _pulled_back(question, query, key, rows, cotangents[0])
        return d_params, None, d_query.astype(query.dtype), d_key.astype(key.dtype)

    run.defvjp(with_residuals, backward)
    query, key, *params = reverse_mode.inputs((query, key, *parameters(question.spec)), question)
    rows, received = run(params, question, query, key)
    constant = {name: lax.stop_gradient(getattr(rows, name)) for name in ("place", "above")}
    return rows._replace(**constant), lax.stop_gradient(received)


def _with(question: StatisticsRequest, params: list[Array]) -> StatisticsRequest:
    return StatisticsRequest(
        with_parameters(question.spec, params), question.keys, question.threshold
    )


def _pulled_back(
    question: StatisticsRequest,
    query: Array,
    key: Array,
    rows: QueryStatistics,
    cotangents: QueryStatistics,
) -> tuple[list[Array], Array, Array]:
    """Computes the gradients of the spec's parameters, queries and keys.

    Their own derivatives raise: `rows` are constants here.
    """
    operands = question, query, key, rows, cotangents._replace(place=None)
    like = jax.eval_shape(functools.partial(_all_gradients, "any"), *operands)
    dims = (*partition.of_parameters(question.spec), partition.BY_QUERY, partition.by_key(key))
    return by_share(_all_gradients, like, dims, *operands)


def _all_gradients(
    platform: str,
    question: StatisticsRequest,
    query: Array,
    key: Array,
    rows: QueryStatistics,
    cotangents: QueryStatistics,
) -> tuple[list[Array], Array, Array]:
    """Computes the results of `_pulled_back`, in the same way on every platform."""
    if question.spec.normalizer is not None:
        return normalized_statistics.gradients(question, query, key, cotangents)
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    padded = _PaddedQuestion.of(question, query, key)
    spec, _, scale = scaled(question.spec, query)
    cotangents = cotangents._replace(place=rows.place)  # integers have no cotangent
    gradients = padded.over_heads(_gradients, query, key, rows, cotangents)
    d_query, d_key, d_params = gradients
    d_query = jnp.swapaxes(d_query[:, :, :T], 1, 2) * scale
    d_key = d_key[:, :, :S].reshape(B, K, N // K, S, H).sum(axis=2)
    padded_params = parameters(padded.question.spec)
    parts = zip(d_params, padded_params, parameter_letters(spec), strict=True)
    summed = [tile.sum_heads(*x) for x in parts]
    return slicing.unpadded_parameters(summed, question.spec), d_query, jnp.swapaxes(d_key, 1, 2)


def top(spec: Spec, query: Array, key: Array, n: int) -> tuple[Array, Array]:
    """Returns the n greatest weights of each query and their places, `[B, N, T, n]`, greatest
    first."""

    def run(_: str, spec: Spec, query: Array, key: Array) -> Any:
        if spec.normalizer is not None:
            return normalized_statistics.top(n, spec, query, key)
        T, padded = query.shape[1], _PaddedQuestion.of(StatisticsRequest(spec), query, key)
        logs, places = padded.over_heads(functools.partial(_top, n=n), query, key)
        return logs[:, :, :T], places[:, :, :T]

    operands = spec, query, key
    like = jax.eval_shape(functools.partial(run, "any"), *operands)
    return by_share(run, like, (partition.BY_HEAD,) * 2, *operands)


SUMS = WeightSums(lambda question, shapes: None, by_tiles)
