"""What weights look like, tile by tile: sums over the keys of each query and over its queries of
each key.

The tiles are visited twice: the first time for the normalizer of each row.

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
from jattn._explicit import left_again
from jattn._pytree import select_head
from jattn._types import Index, Tree, accumulation
from jattn.kernels.common import lowering, partition, reverse_mode, slicing, tile_schedule
from jattn.kernels.protocol import QueryStatistics, StatisticsRequest, WeightSums
from jattn.kernels.xla import blockwise
from jattn.scores import apart
from jattn.softmax import Normalizer
from jattn.spec import Spec, Tiling, parameter_letters, parameters, scaled, with_parameters


class _Tile(NamedTuple):
    """Weights of a tile, their logs, where it is, and the way of their cotangent."""

    weights: Float[Array, "t s"]
    logs: Float[Array, "t s"]
    at: slicing.HeadTile
    keys: Spec | None
    pull: Any

    def on_keys(self) -> Any:
        """1 where the keys asked for are, else 0."""
        assert self.keys is not None
        allowed = self.keys.mask.evaluate(self.at.b, self.at.h, self.at.rows, self.at.columns)
        return allowed.astype(self.weights.dtype)

    def apart(self) -> Float[Array, "t s"]:
        """The distance of each pair."""
        return apart(self.at.rows, self.at.columns, self.weights.dtype)


class _Head(NamedTuple):
    """One head: sizes are whole tiles. `normalizer` is that of each row, see `normalized`."""

    asked: StatisticsRequest
    b: Any
    h: Any
    q: Float[Array, "T H"]
    k: Float[Array, "S H"]
    tiling: Tiling
    normalizer: Normalizer | None = None

    @property
    def dtype(self) -> Any:
        """The dtype of sums."""
        return accumulation(self.q.dtype)

    def normalized(self) -> "_Head":
        """This head with the normalizer of its rows."""
        rows, schedule = self.tiling.block_q, self.schedule()

        def block(i: Index) -> Normalizer:
            def step(run: tile_schedule.TileRun, state: softmax.Partial) -> softmax.Partial:
                score = self.scores(i, run)[1]
                part = softmax.of(score, lambda weights: weights[:, :0], differentiable=False)
                return softmax.combine(state, part)

            nothing = softmax.empty(rows, 0, self.dtype)
            return softmax.quotient(tile_schedule.visit(schedule, i, step, nothing))[1]

        found = tile_schedule.map_blocks(schedule, len(self.q) // rows, block)
        return self._replace(normalizer=jax.tree.map(tile_schedule.join, found))

    def schedule(self) -> tile_schedule.Schedule:
        """Which tiles are visited."""
        T, S = len(self.q), len(self.k)
        return tile_schedule.schedule(self.asked.spec, self.b, self.h, T, S, self.tiling)

    def scores(self, i: Index, run: tile_schedule.TileRun) -> tuple[slicing.HeadTile, Array, Any]:
        """Where the tile of query block i and a run of keys is, its scores, and the way of their
        cotangent."""
        rows = self.tiling.block_q
        here = slicing.HeadTile.at(self.asked.spec, self.b, self.h, i * rows, rows, run)
        q_i, k_j = slicing.take(self.q, i * rows, rows), slicing.take(self.k, run.start, run.size)
        return here, *here.modified(tile.products(here.spec, q_i, k_j), run.masked)

    def at(self, i: Index, run: tile_schedule.TileRun) -> _Tile:
        """The tile of query block i and a run of keys."""
        assert self.normalizer is not None
        rows, keys = self.tiling.block_q, self.asked.keys
        here, score, pull = self.scores(i, run)
        if keys is not None:
            keys = slicing.slice_tile(keys, i * rows, rows, run.start, run.size)
        maximum, log_total = (slicing.take(x, i * rows, rows)[:, None] for x in self.normalizer)
        logs = (score - jnp.where(maximum == -jnp.inf, 0, maximum)) - log_total
        # Computed once: XLA would compute both again for each sum.
        logs = lax.optimization_barrier(logs)
        return _Tile(lax.optimization_barrier(jnp.exp(logs)), logs, here, keys, pull)


def _sum(x: Float[Array, "t s"], y: Float[Array, "#t s"]) -> Float[Array, " t"]:
    return jnp.sum(x * y, axis=1)


def _entropies(found: _Tile) -> Float[Array, "t s"]:
    """−log w, and 0 for what is masked, which has no weight."""
    return jnp.where(found.logs == -jnp.inf, 0, -found.logs)


def _greatest(found: _Tile, start: Index, state: QueryStatistics) -> tuple[Array, Array]:
    """The greatest log of a weight so far, and its place: the first of several."""
    most = jnp.max(found.logs, axis=1)
    places = start + jnp.arange(found.logs.shape[1], dtype=jnp.int32)
    last = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(found.logs == most[:, None], places[None, :], last), axis=1)
    better = most > state.greatest
    earlier = (most == state.greatest) & (most > -jnp.inf) & (first < state.place)
    place = jnp.where(better | earlier, first, state.place)
    return jnp.maximum(most, state.greatest), place


def _rows_and_columns(head: _Head) -> tuple[QueryStatistics, Float[Array, " S"]]:
    """The statistics `[T]` of each query, and the weight `[S]` that each key receives."""
    head = head.normalized()
    asked, rows, dtype = head.asked, head.tiling.block_q, head.dtype
    schedule = head.schedule()

    def block(i: Index, total: Any) -> Any:
        def step(run: tile_schedule.TileRun, carried: Any) -> Any:
            state, received = carried
            found = head.at(i, run)
            w = found.weights
            greatest, place = _greatest(found, run.start, state)
            on_keys, above = state.on_keys, state.above
            if on_keys is not None:
                on_keys = on_keys + _sum(w, found.on_keys())
            if asked.threshold is not None:
                above = above + jnp.sum(jnp.where(w > asked.threshold, w, 0), axis=1)
            state = QueryStatistics(
                state.entropy + _sum(w, _entropies(found)),
                greatest,
                place,
                state.distance + _sum(w, found.apart()),
                on_keys,
                above,
            )
            return state, slicing.add_at(received, jnp.sum(w, axis=0), run.start, 0)

        zeros = jnp.zeros(rows, dtype)
        state = QueryStatistics(
            zeros,
            jnp.full(rows, -jnp.inf, dtype),
            jnp.full(rows, -1, jnp.int32),
            zeros,
            None if asked.keys is None else zeros,
            None if asked.threshold is None else zeros,
        )
        by_row, received = total
        state, received = tile_schedule.visit(schedule, i, step, (state, received))
        put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, i * rows, 0)  # noqa: E731
        return jax.tree.map(put, by_row, state), received

    T, S = len(head.q), len(head.k)
    zeros = jnp.zeros(T, dtype)
    by_row = QueryStatistics(
        zeros,
        zeros,
        jnp.zeros(T, jnp.int32),
        zeros,
        None if asked.keys is None else zeros,
        None if asked.threshold is None else zeros,
    )
    total = by_row, jnp.zeros(S, dtype)
    found, received = tile_schedule.fold_blocks(schedule, T // rows, block, total)
    return found._replace(greatest=jnp.exp(found.greatest)), received


def _gradients(head: _Head, rows: QueryStatistics, cotangents: QueryStatistics) -> Any:
    """Of queries `[T, H]`, keys `[S, H]` and the spec's parameters, with those of the sums."""
    head = head.normalized()
    assert head.normalizer is not None
    size, dtype, maximum = head.tiling.block_q, head.dtype, head.normalizer.maximum
    q_finite, k_finite = (tile.finite(x.astype(dtype)) for x in (head.q, head.k))
    letters, schedule = parameter_letters(head.asked.spec), head.schedule()
    names = ["entropy", "greatest", "distance"] + ["on_keys"] * (head.asked.keys is not None)
    sums = {x: (getattr(cotangents, x), getattr(rows, x)) for x in names}
    offset = functools.reduce(jnp.add, (g * x for g, x in sums.values()))

    def block(i: Index, total: Any) -> Any:
        at = lambda x: slicing.take(x, i * size, size)  # noqa: E731
        g = {name: at(g)[:, None] for name, (g, _) in sums.items()}

        def step(run: tile_schedule.TileRun, state: Tree) -> Any:
            dq_i, dk, d_params = state
            found = head.at(i, run)
            places = run.start + jnp.arange(run.size, dtype=jnp.int32)
            d_weights = g["entropy"] * _entropies(found) + g["distance"] * found.apart()
            is_greatest = at(rows.place)[:, None] == places[None, :]
            d_weights = d_weights + jnp.where(is_greatest, g["greatest"], 0)
            if "on_keys" in g:
                d_weights = d_weights + g["on_keys"] * found.on_keys()
            d_scores = found.weights * (d_weights - at(offset)[:, None])
            broken = jnp.isnan(at(maximum))[:, None]  # a row of NaN has no gradient
            d_scores = jnp.where(broken | (found.logs == -jnp.inf), 0, d_scores)
            d_products, d_here = found.pull(d_scores)
            k_j = slicing.take(k_finite, run.start, run.size)
            dk_j = jnp.dot(at(q_finite).T, d_products).T
            starts = {"T": i * size, "S": run.start}
            return (
                dq_i + jnp.dot(d_products, k_j),
                slicing.add_at(dk, dk_j, run.start, 0),
                slicing.add_leaves(d_params, d_here, letters, starts),
            )

        dq, *rest = total
        dq_i, *rest = tile_schedule.visit(schedule, i, step, (jnp.zeros_like(at(q_finite)), *rest))
        return slicing.add_at(dq, dq_i, i * size, 0), *rest

    zeros = jax.tree.map(jnp.zeros_like, (q_finite, k_finite, parameters(head.asked.spec)))
    return tile_schedule.fold_blocks(schedule, len(head.q) // size, block, zeros)


def _top(head: _Head, n: int) -> tuple[Float[Array, "T n"], Int[Array, "T n"]]:
    """The n greatest weights of each query, greatest first, and their places."""
    head = head.normalized()
    rows, dtype = head.tiling.block_q, head.dtype
    schedule = head.schedule()

    def block(i: Index) -> Any:
        def step(run: tile_schedule.TileRun, state: Tree) -> Any:
            logs, places = state
            here = run.start + jnp.arange(run.size, dtype=jnp.int32)
            here = jnp.broadcast_to(here, (rows, run.size))
            every = jnp.concatenate([logs, head.at(i, run).logs], axis=1)
            logs, which = lax.top_k(every, n)
            places = jnp.concatenate([places, here], axis=1)
            return logs, jnp.take_along_axis(places, which, axis=1)

        nothing = jnp.full((rows, n), -jnp.inf, dtype), jnp.full((rows, n), -1, jnp.int32)
        logs, places = tile_schedule.visit(schedule, i, step, nothing)
        return jnp.exp(logs), jnp.where(logs == -jnp.inf, -1, places)

    found = tile_schedule.map_blocks(schedule, len(head.q) // rows, block)
    return jax.tree.map(tile_schedule.join, found)


# --- all heads ------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call in sizes that are whole tiles."""

    asked: StatisticsRequest
    tiling: Tiling
    sizes: tuple[int, int]

    @classmethod
    def of(cls, asked: StatisticsRequest, T: int, S: int) -> "_Call":
        found = tuning.sizes(jax.default_backend())
        tiling = Tiling(T, S)
        if T * S > found.max_untiled:
            tiling = blockwise.choose_tiling(asked.spec, T, S, found)
        sizes = slicing.round_up(T, S, tiling)
        spec = slicing.pad_spec(asked.spec, T, S, *sizes)
        keys = asked.keys and slicing.pad_spec(asked.keys, T, S, *sizes)
        return cls(StatisticsRequest(spec, keys, asked.threshold), tiling, sizes)

    def over_heads(
        self, function: Callable[..., Any], query: Array, key: Array, *others: Any
    ) -> Any:
        """`function(head, *others)` for each head, `[B, N, ...]`; `others` are trees of
        `[B, N, T]`. One head after another where one fills the cores, else all at once."""
        (B, _, N, _), K, (T, S) = query.shape, key.shape[2], self.sizes

        def one(n: Any) -> Any:
            b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, N))
            asked = select_head(self.asked, b, h)
            q = slicing.pad_to(query[b, :, h], T)
            k = slicing.pad_to(key[b, :, h // (N // K)], S)
            rows = jax.tree.map(lambda x: slicing.pad_to(x[b, h], T), others)
            spec, q, _ = scaled(asked.spec, q)
            asked = StatisticsRequest(spec, asked.keys, asked.threshold)
            return function(_Head(asked, b, h, q, k, self.tiling), *rows)

        together = None if tuning.sizes(jax.default_backend()).in_turn else B * N
        found = lax.map(one, jnp.arange(B * N, dtype=jnp.int32), batch_size=together)
        return jax.tree.map(lambda x: x.reshape(B, N, *x.shape[1:]), found)


def by_share(
    function: Callable[..., Any], like: Any, dims: Any, asked: Any, *operands: Tree
) -> Any:
    """`function(platform, asked, query, key, ...)` of arrays by batch row and head; where these are
    cut under `jit`, of each device's share. The results run along `dims`."""
    given = (asked, *operands)
    rank = [x[: y.ndim] for x, y in zip(dims, jax.tree.leaves(like), strict=True)]
    cut = partition.partitioned_statistics(function, tuple(rank), given)
    return lowering.platform_dependent(cut, like, *given)


Forward = Callable[[StatisticsRequest, Array, Array], tuple[QueryStatistics, Array]]
"""`(rows, received)` of `(asked, query, key)`, see `statistics`."""


def by_tiles(
    asked: StatisticsRequest, query: Array, key: Array
) -> tuple[QueryStatistics, Float[Array, "B N S"]]:
    """`QueryStatistics` of `[B, N, T]` and the weight `[B, N, S]` that each key receives."""
    T, S = query.shape[1], key.shape[1]
    call = _Call.of(asked, T, S)
    rows, received = call.over_heads(_rows_and_columns, query, key)
    return jax.tree.map(lambda x: x[:, :, :T], rows), received[:, :, :S]


def statistics(
    forward: Forward, asked: StatisticsRequest, query: Array, key: Array
) -> tuple[QueryStatistics, Array]:
    """`forward` of these, differentiable: entropy, greatest weight, distance and weight on keys, by
    queries, keys and the spec's parameters.
    """

    @jax.custom_vjp
    def run(params: list[Array], asked: StatisticsRequest, query: Array, key: Array) -> Any:
        return forward(_with(asked, params), query, key)

    def with_residuals(*operands: Tree) -> Any:
        found = run(*operands)
        return found, (*operands, found[0])

    def backward(residuals: Any, cotangents: Any) -> Any:
        (params, asked, query, key, rows), cotangents = left_again((residuals, cotangents))
        asked = _with(asked, params)
        d_params, d_query, d_key = _pulled_back(asked, query, key, rows, cotangents[0])
        return d_params, None, d_query.astype(query.dtype), d_key.astype(key.dtype)

    run.defvjp(with_residuals, backward)
    query, key, *params = reverse_mode.inputs((query, key, *parameters(asked.spec)), asked)
    rows, received = run(params, asked, query, key)
    constant = {name: lax.stop_gradient(getattr(rows, name)) for name in ("place", "above")}
    return rows._replace(**constant), lax.stop_gradient(received)


def _with(asked: StatisticsRequest, params: list[Array]) -> StatisticsRequest:
    return StatisticsRequest(with_parameters(asked.spec, params), asked.keys, asked.threshold)


def _pulled_back(
    asked: StatisticsRequest,
    query: Array,
    key: Array,
    rows: QueryStatistics,
    cotangents: QueryStatistics,
) -> tuple[list[Array], Array, Array]:
    """Gradients of the spec's parameters, queries and keys. Their own derivatives raise: `rows` are
    constants here."""
    operands = asked, query, key, rows, cotangents._replace(place=None)
    like = jax.eval_shape(functools.partial(_all_gradients, "any"), *operands)
    dims = (*partition.of_parameters(asked.spec), partition.BY_QUERY, partition.by_key(key))
    return by_share(_all_gradients, like, dims, *operands)


def _all_gradients(
    platform: str,
    asked: StatisticsRequest,
    query: Array,
    key: Array,
    rows: QueryStatistics,
    cotangents: QueryStatistics,
) -> tuple[list[Array], Array, Array]:
    """Those of `_pulled_back`, the same way on every platform."""
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    call = _Call.of(asked, T, S)
    spec, _, scale = scaled(asked.spec, query)
    own = cotangents._replace(place=rows.place)  # of integers there are none
    found = call.over_heads(_gradients, query, key, rows, own)
    d_query, d_key, d_params = found
    d_query = jnp.swapaxes(d_query[:, :, :T], 1, 2) * scale
    d_key = d_key[:, :, :S].reshape(B, K, N // K, S, H).sum(axis=2)
    each = zip(d_params, parameters(call.asked.spec), parameter_letters(spec), strict=True)
    summed = [tile.sum_heads(*one) for one in each]
    return slicing.unpadded_parameters(summed, asked.spec), d_query, jnp.swapaxes(d_key, 1, 2)


def top(spec: Spec, query: Array, key: Array, n: int) -> tuple[Array, Array]:
    """The n greatest weights of each query and their places, `[B, N, T, n]`, greatest first."""

    def run(_: str, spec: Spec, query: Array, key: Array) -> Any:
        T, S = query.shape[1], key.shape[1]
        call = _Call.of(StatisticsRequest(spec), T, S)
        logs, places = call.over_heads(functools.partial(_top, n=n), query, key)
        return logs[:, :, :T], places[:, :, :T]

    operands = spec, query, key
    like = jax.eval_shape(functools.partial(run, "any"), *operands)
    return by_share(run, like, (partition.BY_HEAD,) * 2, *operands)


SUMS = WeightSums(lambda asked, shapes: None, by_tiles)
