"""The mechanisms that led to scaled dot-product attention, each by its formula.

From mixing tokens with a fixed matrix (`interaction`) over similarity without weights
(`simple_self_attention`) to query, key and value (`self_attention`), and the two ways in which
attention was first scored: additive (Bahdanau et al. 2015) and multiplicative (Luong et al. 2015).
Here E is the size of the inputs, H1 that of values, H2 that of queries and keys, A that of the
additive score's hidden layer. All take any number of leading batch axes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jattn import masks, softmax, tile
from jattn._types import AnyArray, accumulation
from jattn.attention import attention
from jattn.kernels import reverse
from jattn.kernels.blockwise import (
    _even,
    _fold_blocks,
    _map_blocks,
    _padded,
    _plan,
    _put,
    _put_leaf,
    _put_param,
    _Run,
    _take,
    _Tile,
    _visit,
)
from jattn.masks import Causal, Mask
from jattn.spec import (
    Shapes,
    Spec,
    Tiling,
    make_spec,
    parameter_letters,
    parameters,
    prepare,
    with_parameters,
)


def _single_head(
    query: Float[Array, "*B T H"],
    key: Float[Array, "*B S H"],
    value: Float[Array, "*B S V"],
    **arguments: Any,
) -> Float[Array, "*B T V"]:
    """Attention with one head, without a head axis."""
    out = attention(query[..., None, :], key[..., None, :], value[..., None, :], **arguments)
    return out[..., 0, :]


def _check_inner(name: str, shape: str, got: tuple[int, ...], ok: bool) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {shape}, got {list(got)}")


def simple_self_attention(
    x: Float[Array, "*B T E"], *, mask: Mask | AnyArray | None = None
) -> Float[Array, "*B T E"]:
    """Self-attention without weights: softmax(x xᵀ) x.

    Each token becomes a mean of all tokens `x [*B, T, E]`, weighted by similarity. Nothing is
    learned and nothing is scaled: the step before queries, keys and values are told apart.
    """
    return _single_head(x, x, x, mask=mask, scale=1.0)


def self_attention(
    x: Float[Array, "*B T E"],
    w_query: Float[Array, "E H2"],
    w_key: Float[Array, "E H2"],
    w_value: Float[Array, "E H1"],
    *,
    mask: Mask | AnyArray | None = None,
    scale: float | Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Float[Array, "*B T H1"]:
    """Self-attention with three weight matrices: softmax(Q Kᵀ / √H2) V.

    Q = x w_query, K = x w_key, V = x w_value with `x [*B, T, E]`. Sizes E, H1 and H2 may all
    differ. `scale=1` leaves the scaling out. `mask=masks.Causal()` makes it causal.
    Vaswani et al. 2017, section 3.2.1, with one head.

    Raises ValueError for matrices that do not fit x, and what `attention` raises.
    """
    for name, w in (("w_query", w_query), ("w_key", w_key), ("w_value", w_value)):
        _check_inner(name, f"[E = {x.shape[-1]}, ...]", w.shape, w.shape[:1] == x.shape[-1:])
    _check_inner(
        "w_key", f"[E, H2] = {list(w_query.shape)}", w_key.shape, w_key.shape == w_query.shape
    )
    return _single_head(
        x @ w_query,
        x @ w_key,
        x @ w_value,
        mask=mask,
        scale=scale,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )


def renormalised_causal(weights: Float[Array, "*B T S"]) -> Float[Array, "*B T S"]:
    """Causal weights by multiplying with zeros and dividing by what is left of each row.

    The first derivation of causal attention: take the softmax over all keys, set the weights of
    later keys to zero, and normalise again. With w = exp(s) / Σ exp(s), the full denominator
    cancels in w_j / Σ_{k ≤ i} w_k = exp(s_j) / Σ_{k ≤ i} exp(s_k): exactly the softmax of scores
    in which later keys are −inf, without a trace of what they held. Masking by −inf is preferred,
    as here a row whose weight lies all on later keys divides 0 by 0 (it is given 0).

    `weights` are `[*B, T, S]`, after the softmax, at positions arange(T) and arange(S).
    """
    T, S = weights.shape[-2:]
    allowed = Causal().dense(T, S).astype(weights.dtype)
    kept = weights * allowed.reshape((1,) * (weights.ndim - 2) + (T, S))
    total = jnp.sum(kept, axis=-1, keepdims=True)
    return kept / jnp.where(total == 0, 1, total)


def interaction(
    x: Float[Array, "*B S E"],
    left: Float[Array, "T S"] | Float[Array, "*B T S"] | None = None,
    right: Float[Array, "E H1"] | None = None,
) -> Float[Array, "*B T _"]:
    """Y = L X R: tokens mix through L, channels through R.

    Row i of `left` says how much of each token goes into token i; `right` maps every token alike.
    Attention is the case in which L = softmax(Q Kᵀ) depends on the tokens themselves and R is the
    value matrix. The identity for `left` keeps tokens apart, ones sum them all,
    `causal_interaction` sums what came before, `normalised_interaction` makes each row a mean.

    `x` is `[*B, S, E]`, `left` `[T, S]` or `[*B, T, S]`, `right` `[E, H1]`; None is the identity.

    Raises ValueError for sizes that do not fit.
    """
    y = x
    if right is not None:
        _check_inner(
            "right", f"[E = {x.shape[-1]}, H1]", right.shape, right.shape[0] == x.shape[-1]
        )
        y = y @ right
    if left is not None:
        batched = left.ndim == 2 or left.shape[:-2] == x.shape[:-2]
        fits = batched and left.shape[-1] == x.shape[-2]
        _check_inner("left", f"[T, S = {x.shape[-2]}], or [*B, T, S]", left.shape, fits)
        y = jnp.einsum("ts,...sh->...th" if left.ndim == 2 else "...ts,...sh->...th", left, y)
    return y


def causal_interaction(T: int, dtype: Any = jnp.float32) -> Float[Array, "T T"]:
    """The lower-triangular L of ones: each token gets the sum of itself and all before it."""
    return Causal().dense(T, T).astype(dtype)


def normalised_interaction(
    left: Float[Array, "*B T S"], mask: Mask | None = None
) -> Float[Array, "*B T S"]:
    """L with each row a softmax: positive weights that sum to 1, whatever the entries were.

    Entries that `mask` forbids (a mask of positions, such as `Causal()`) get weight 0.
    """
    T, S = left.shape[-2:]
    allowed = (mask or Causal() | ~Causal()).dense(T, S)
    rows = jnp.where(allowed.reshape((1,) * (left.ndim - 2) + (T, S)), left, -jnp.inf)
    flat = rows.reshape(-1, S)
    weights, _ = softmax.finish(softmax.of(flat, lambda weights: weights))
    return weights.reshape(left.shape)


def multiplicative(
    query: Float[Array, "*B T Dq"], weight: Float[Array, "Dq Dk"]
) -> Float[Array, "*B T Dk"]:
    """Queries with which a plain product gives Luong's "general" score qᵀ W k: W folded in."""
    return query @ weight


def multiplicative_attention(
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"],
    value: Float[Array, "*B S V"],
    weight: Float[Array, "Dq Dk"],
    **arguments: Any,
) -> Float[Array, "*B T V"]:
    """Luong et al. 2015, section 3.1, "general": softmax(query W keyᵀ) value.

    `query [*B, T, Dq]`, `key [*B, S, Dk]`, `value [*B, S, V]`, `weight [Dq, Dk]`. Not scaled, as in
    the paper, unless `scale` is given; other arguments as in `attention`.

    Raises ValueError if the weight does not fit, and what `attention` raises.
    """
    wanted = (query.shape[-1], key.shape[-1])
    _check_inner("weight", f"[Dq, Dk] = {list(wanted)}", weight.shape, weight.shape == wanted)
    folded = multiplicative(query, weight)
    return _single_head(folded, key, value, **{"scale": 1.0, **arguments})


def additive_keys(
    key: Float[Array, "*B S Dk"], w_key: Float[Array, "Dk A"]
) -> Float[Array, "*B S A"]:
    """The projected keys of `additive_attention`, to be computed once and reused in decoding."""
    return _project(key, w_key)


def _project(x: Float[Array, "*B T D"], w: Float[Array, "D A"]) -> Float[Array, "*B T A"]:
    """x w, with a derivative in which rows of x that are not finite (masked ones) have no part."""
    flat = tile.product(x.reshape(-1, x.shape[-1]), w.T)
    return flat.reshape(*x.shape[:-1], w.shape[-1]).astype(x.dtype)


_ADDITIVE_TILE = 128  # queries and keys of a tile, about; inputs no longer than that are one tile
_ADDITIVE_KEYS = 16  # keys scored at a time; t × 16 × A floats live at once
_ADDITIVE_PAIRS = 512  # pairs scored at a time, where those are fewer for few queries


def _additive_scores(
    query: Float[Array, "t A"], key: Float[Array, "s A"], w_score: Float[Array, " A"]
) -> Float[Array, "t s"]:
    """w · tanh(query_i + key_j) for all pairs, a block of keys at a time."""
    (t, A), s = query.shape, len(key)
    size = min(s, max(_ADDITIVE_KEYS, _ADDITIVE_PAIRS // t))
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
        return cls(q, tile.lost(query), k, v, tile.lost(key) + tile.lost(value))

    def at(self, row: Any, rows: int, run: _Run, carried: Any) -> "_Pieces":
        """Those of a tile; `carried` is something that changes from one step to the next."""
        queries = (_take(x, row, rows) for x in self[:2])
        keys = tuple(_take(x, run.start, run.size) for x in self[2:])
        if carried is not None and run.size == len(self.key):
            # Does not depend on the step of the walk: XLA would take the tile's work out of the
            # loop, and so do it also where the loop visits nothing.
            keys, _ = jax.lax.optimization_barrier((keys, carried))
        return _Pieces(*queries, *keys)

    def scores(self, here: _Tile, w_score: Array, masked: bool = True) -> Float[Array, "t s"]:
        """Scores after score functions and mask."""
        products = _additive_scores(self.query, self.key, w_score)
        products = products + (self.lost_query[:, None] + self.lost_key[None, :])
        return tile.modify(here.spec, products, here.b, here.h, here.rows, here.columns, masked)

    def pulled(self, here: _Tile, w_score: Array, masked: bool) -> tuple[Array, Any]:
        """Scores, and the function from their cotangent to those of the query, key and w_score and
        of the score function's parameters."""

        def scores(query: Array, key: Array, w_score: Array, params: Any) -> Array:
            spec = with_parameters(here.spec, params)
            pieces = self._replace(query=query, key=key)
            return pieces.scores(here._replace(spec=spec), w_score, masked)

        return jax.vjp(scores, self.query, self.key, w_score, parameters(here.spec))


def _additive_whole(
    spec: Spec, b: Any, h: Any, query: Array, key: Array, value: Array, w_score: Array
) -> Float[Array, "T V"]:
    """One head in one tile, differentiable as it stands."""
    here = _Tile(spec, b, h, *tile.spans(spec, len(query), len(key)))
    pieces = _Pieces.of(query, key, value)
    score = pieces.scores(here, w_score)
    return softmax.finish(softmax.of(score, lambda w: here.drop(w) @ pieces.value))[0]


def _additive_forward(
    tiling: Tiling,
    spec: Spec,
    b: Any,
    h: Any,
    query: Array,
    key: Array,
    value: Array,
    w_score: Array,
) -> tuple[Float[Array, "T V"], Float[Array, " T"]]:
    """`(out, lse)` of one head, tile by tile; sizes are whole tiles."""
    walk, rows = _plan(spec, len(query), len(key), tiling), tiling.block_q
    pieces = _Pieces.of(query, key, value)

    def block(i: Any) -> tuple[Array, Array]:
        def step(run: _Run, state: softmax.Partial | None) -> softmax.Partial:
            here = _Tile.at(spec, b, h, i * rows, rows, run)
            piece = pieces.at(i * rows, rows, run, None if state is None else state.total)
            score = piece.scores(here, w_score, run.masked)
            part = softmax.of(score, lambda w: here.drop(w) @ piece.value, differentiable=False)
            return part if state is None else softmax.combine(state, part)

        first = None if walk.of(i) else softmax.empty(rows, value.shape[1], pieces.value.dtype)
        return softmax.quotient(_visit(walk, tiling, i, step, first))

    return _map_blocks(walk, len(query) // rows, block)


class _AdditiveGradients(NamedTuple):
    """Of one head; that of values stands transposed, as the product is faster so."""

    query: Float[Array, "T A"]
    key: Float[Array, "S A"]
    value: Float[Array, "V S"]
    w_score: Float[Array, " A"]
    params: Any


def _additive_backward(
    tiling: Tiling,
    spec: Spec,
    b: Any,
    h: Any,
    query: Array,
    d_out: Array,
    lse: Array,
    delta: Array,
    key: Array,
    value: Array,
    w_score: Array,
) -> _AdditiveGradients:
    """Gradients of one head, from the cotangent of `out` and delta = rowsum(d_out · out).

    With p = exp(s − lse), the cotangent of the scores is p (d_out vᵀ − delta).
    """
    walk, rows = _plan(spec, len(query), len(key), tiling), tiling.block_q
    pieces = _Pieces.of(query, key, value)
    letters = parameter_letters(spec)

    def block(i: Any, total: _AdditiveGradients) -> _AdditiveGradients:
        d_i, lse_i, delta_i = (_take(x, i * rows, rows) for x in (d_out, lse, delta))

        def step(run: _Run, total: _AdditiveGradients) -> _AdditiveGradients:
            here = _Tile.at(spec, b, h, i * rows, rows, run)
            piece = pieces.at(i * rows, rows, run, total.w_score)
            score, pull = piece.pulled(here, w_score, run.masked)
            weights = jnp.exp(score - softmax.shift(lse_i)[:, None])
            d_weights = here.drop(d_i @ piece.value.T)
            d_query, d_key, d_score, d_params = pull(weights * (d_weights - delta_i[:, None]))
            starts = {"T": i * rows, "S": run.start}
            return _AdditiveGradients(
                _put(total.query, d_query, starts["T"], 0),
                _put(total.key, d_key, starts["S"], 0),
                _put(total.value, d_i.T @ here.drop(weights), starts["S"], 1),
                total.w_score + d_score,
                [_put_leaf(*x, starts) for x in zip(total.params, d_params, letters, strict=True)],
            )

        return _visit(walk, tiling, i, step, total)

    zeros = (pieces.query, pieces.key, pieces.value.T, w_score, parameters(spec))
    total = _AdditiveGradients(*jax.tree.map(jnp.zeros_like, zeros))
    return _fold_blocks(walk, len(query) // rows, block, total)


def _in_turn() -> bool:
    """Whether batch rows go one after another: on a CPU one row's tile fills the cores, and each
    row's mask decides alone which tiles are visited."""
    return jax.default_backend() == "cpu"


def _forward_rows(
    tiling: Tiling, spec: Spec, query: Array, key: Array, value: Array, w_score: Array
) -> tuple[Float[Array, "B T 1 V"], Float[Array, "B T 1"]]:
    """`(out, lse)` of all batch rows."""
    one = functools.partial(_additive_forward, tiling, w_score=w_score)
    if not _in_turn():
        return tile.over_heads(one, spec, (query,), (key, value), out_axes=(1, 1))

    def row(operands: Any) -> tuple[Array, Array]:
        b, *arrays = operands
        return one(masks.pick(spec, b, 0), b, np.int32(0), *arrays)

    rows = (jnp.arange(len(query), dtype=jnp.int32), *(x[:, :, 0] for x in (query, key, value)))
    out, lse = jax.lax.map(row, rows)
    return out[:, :, None], lse[:, :, None]


def _backward_rows(
    tiling: Tiling, spec: Spec, per_query: Any, key: Array, value: Array, w_score: Array
) -> tuple[Any, Array, Array, Array, Array]:
    """Gradients of params, query, key, value and w_score, summed over batch rows where those are
    shared; `per_query` is a tuple of query, d_out, lse and delta."""
    one = functools.partial(_additive_backward, tiling, w_score=w_score)
    letters = parameter_letters(spec)
    if not _in_turn():
        axes = _AdditiveGradients._make((1, 1, 2, 0, [0] * len(letters)))
        found = tile.over_heads(one, spec, per_query, (key, value), axes)
        d_value = jnp.moveaxis(found.value, 1, 3)
        summed = tile.gather_gradients(spec, 1, found.query, found.key, d_value, found.params)
        return *summed, found.w_score.sum(axis=(0, 1))

    def row(total: Any, operands: Any) -> tuple[Any, Any]:
        b, *arrays = operands
        part = one(masks.pick(spec, b, 0), b, np.int32(0), *arrays)
        params = [
            _put_param(*x, b, np.int32(0)) for x in zip(total[0], part.params, letters, strict=True)
        ]
        return (params, total[1] + part.w_score), (part.query, part.key, part.value.T)

    total = jax.tree.map(jnp.zeros_like, (parameters(spec), w_score))
    rows = (jnp.arange(len(key), dtype=jnp.int32), *(x[:, :, 0] for x in (*per_query, key, value)))
    (params, d_score), by_row = jax.lax.scan(row, total, rows)
    return params, *(x[:, :, None] for x in by_row), d_score


def _additive_tiles(
    tiling: Tiling, spec: Spec, query: Array, key: Array, value: Array, w_score: Array
) -> Float[Array, "B T 1 V"]:
    """Tile by tile, with the derivative by formula: the backward pass walks as the forward one."""
    T, S = query.shape[1], key.shape[1]
    padded = tuple(-(-size // block) * block for size, block in zip((T, S), tiling, strict=True))
    forward, backward = (
        reverse.sealed(functools.partial(f, tiling)) for f in (_forward_rows, _backward_rows)
    )

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, *arrays: Array) -> Array:
        return forward(with_parameters(spec, params), *arrays)[0]

    def run_forward(params: list[Array], spec: Spec, *arrays: Array) -> Any:
        out, lse = forward(with_parameters(spec, params), *arrays)
        return out, (params, spec, *arrays, out, lse)

    def run_backward(residuals: Any, d_out: Array) -> Any:
        params, spec, query, *arrays, out, lse = residuals
        per_query = (query, d_out, lse, jnp.sum(d_out * out, axis=-1))
        d_params, *found = backward(with_parameters(spec, params), per_query, *arrays)
        cast = [x.astype(y.dtype) for x, y in zip(found, (query, *arrays), strict=True)]
        return d_params, None, *cast

    run.defvjp(run_forward, run_backward)
    spec = _padded(spec, T, S, *padded)
    sizes = (padded[0], padded[1], padded[1])
    arrays = [
        jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))
        for x, size in zip((query, key, value), sizes, strict=True)
    ]
    *arrays, w_score = map(reverse.only, (*arrays, w_score))
    params = [reverse.only(x) for x in parameters(spec)]
    return run(params, spec, *arrays, w_score)[:, :T]


def additive_attention(
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"],
    value: Float[Array, "*B S V"],
    w_query: Float[Array, "Dq A"],
    w_key: Float[Array, "Dk A"] | None,
    w_score: Float[Array, " A"],
    *,
    mask: Mask | AnyArray | None = None,
    score: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Float[Array, "*B T V"]:
    """softmax(w_score · tanh(query w_query + key w_key)) value.

    Bahdanau, Cho and Bengio 2015, section 3.1 and appendix A.1.2: the score is a small network, so
    queries and keys may differ in size. `query [*B, T, Dq]`, `key [*B, S, Dk]`,
    `value [*B, S, V]`, `w_query [Dq, A]`, `w_key [Dk, A]`, `w_score [A]`; a mask array has one
    head, `[*B, 1, T, S]`. With `w_key=None`, `key` is the result of `additive_keys`, `[*B, S, A]`.
    The hidden layer T × S × A never exists at once, neither forward nor backward.

    Raises ValueError for sizes that do not fit, and what `attention` raises.
    """
    arrays = {"key": key, "value": value, "w_query": w_query, "w_key": w_key, "w_score": w_score}
    for name, array in arrays.items():
        if array is not None and array.dtype != query.dtype:
            raise TypeError(
                f"{name}: expected the query's dtype {query.dtype}, got {array.dtype}; cast first"
            )
    A = w_score.shape[0]
    wanted = (query.shape[-1], A)
    _check_inner("w_query", f"[Dq, A] = {list(wanted)}", w_query.shape, w_query.shape == wanted)
    if w_key is not None:
        wanted = (key.shape[-1], A)
        _check_inner("w_key", f"[Dk, A] = {list(wanted)}", w_key.shape, w_key.shape == wanted)
        key = additive_keys(key, w_key)
    same = key.shape[:-1] == value.shape[:-1] and key.shape[:-2] == query.shape[:-2]
    _check_inner("key", f"[*B, S, A = {A}]", key.shape, same and key.shape[-1] == A)
    batch, T, S = query.shape[:-2], query.shape[-2], key.shape[-2]
    shapes = Shapes(batch, T, S, 1, 1, A, value.shape[-1], query.dtype)
    spec = make_spec(
        shapes,
        mask=mask,
        score=score,
        scale=1.0,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )
    tiling = Tiling(*(_even(max(1, size), _ADDITIVE_TILE) for size in (T, S)))
    query = _project(query, w_query)
    return _additive(spec, query, key, value, w_score, shapes=shapes, tiling=tiling)


@functools.partial(jax.jit, static_argnames=("shapes", "tiling"))
def _additive(
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    w_score: Array,
    *,
    shapes: Shapes,
    tiling: Tiling,
) -> Array:
    B, T, S = shapes.B, shapes.T, shapes.S
    if 0 in (B, T, S):
        return jnp.zeros((*shapes.batch, T, shapes.V), query.dtype)
    q, k, v = (x.reshape(B, -1, 1, x.shape[-1]) for x in (query, key, value))
    w_score = w_score.astype(accumulation(query.dtype))
    spec = prepare(spec, shapes)
    if tiling == (T, S):
        one = functools.partial(_additive_whole, w_score=w_score)
        out = tile.over_heads(one, spec, (q,), (k, v), out_axes=1)
    else:
        out = _additive_tiles(tiling, spec, q, k, v, w_score)
    return out.astype(query.dtype).reshape(*shapes.batch, T, shapes.V)
