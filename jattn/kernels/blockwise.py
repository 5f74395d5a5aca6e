"""Exact attention in memory linear in T and S: tile by tile, skipping what the mask empties.

Forward, a block of queries walks over its tiles of keys with the online softmax of
`jattn.softmax`; backward, the walk is repeated from q, k, v, out and lse alone, and the weights
of each tile are computed again (Rabe and Staats 2021; Dao et al. 2022, FlashAttention; gradients
as in Dao et al., appendix B.2). The tile map decides the walk through loop bounds: empty tiles are
not visited, full ones leave the mask out.

Heads run one after another on a CPU, where one head's tile fills the cores and stays in their
caches, and all at once elsewhere and for short sequences.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jattn import masks, softmax, tile
from jattn._types import LogSumExp, Output, accumulation, declared, is_static
from jattn.masks import Span
from jattn.spec import Shapes, Spec, Tiling, has_mask


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None: everything, but only the first derivative, and that in reverse mode."""
    return None


def choose_tiling(spec: Spec, T: int, S: int) -> tuple[Tiling, Tiling]:
    """Tiles for the forward and for the backward pass, near those that measured fastest on CPUs.

    Small tiles follow a narrow band closely; where a block of queries visits many keys, the larger
    products of larger tiles win.
    """
    if T <= 256 and S <= 256:
        return Tiling(T, S), Tiling(T, S)
    size = 128 if _visited(spec, T, S) <= 1024 else 512
    forward = Tiling(_even(T, size), _even(S, size))
    return forward, Tiling(*(x // 2 if size > 128 and x % 2 == 0 else x for x in forward))


def _even(size: int, target: int) -> int:
    """The size of blocks near the target that split an axis evenly; a multiple of 8 if several."""
    blocks = -(-size // target)
    return size if blocks == 1 else -(-size // (8 * blocks)) * 8


def _visited(spec: Spec, T: int, S: int) -> float:
    """How many keys a block of queries visits on average; all, where that is not known yet."""
    block = max(128, max(T, S) // 1024)
    kinds = _kinds(masks.pick(spec, 0, 0), T, S, Tiling(block, block))
    return S if not isinstance(kinds, np.ndarray) else np.mean(np.sum(kinds > 0, axis=1)) * block


def _kinds(spec: Spec, T: int, S: int, tiling: Tiling) -> Any:
    """The tile map of one head."""
    box = masks.Tile(
        masks.extents(T, tiling.block_q, spec.q_positions),
        masks.extents(S, tiling.block_kv, spec.kv_positions),
    )
    return masks.kinds(spec.mask, box)


class _Walk(NamedTuple):
    """Which tiles of keys each block of queries visits: mixed ones first, then full ones."""

    tiling: Tiling
    order: Any  # [n, m], tiles by column
    mixed: Any  # [n]
    full: Any  # [n]

    @property
    def single(self) -> bool:
        """Whether there is one tile of keys only: then it is visited, whatever it is."""
        return self.order.shape[1] == 1


def _plan(spec: Spec, T: int, S: int, tiling: Tiling) -> _Walk:
    """The walk of one head; NumPy's, and so known while tracing, if the mask is static."""
    kinds = _kinds(spec, T, S, tiling)
    xp = np if isinstance(kinds, np.ndarray) else jnp
    rank = xp.where(kinds == masks.MIXED, 0, xp.where(kinds == masks.FULL, 1, 2))
    order = xp.argsort(rank, axis=1, stable=True).astype(np.int32)
    mixed, full = ((kinds == kind).sum(axis=1) for kind in (masks.MIXED, masks.FULL))
    return _Walk(tiling, order, mixed.astype(np.int32), full.astype(np.int32))


def _visit(walk: _Walk, i: Any, step: Callable[[Any, Any, bool], Any], state: Any) -> Any:
    """Folds `step(j, state, masked)` over the tiles of query block i."""
    if walk.single:
        return step(np.int32(0), state, True)
    order, mixed, full = (jnp.asarray(x) for x in walk[1:])

    def body(masked: bool, place: Any, state: Any) -> Any:
        return step(order[i, place], state, masked)

    if not (isinstance(walk.mixed, np.ndarray) and not walk.mixed.any()):
        state = _repeat(0, mixed[i], functools.partial(body, True), state)
    if not (isinstance(walk.full, np.ndarray) and not walk.full.any()):
        stop = mixed[i] + full[i]
        state = _repeat(mixed[i], stop, functools.partial(body, False), state)
    return state


def _repeat(start: Any, stop: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """`lax.fori_loop` whose index is int32, also with 64-bit types enabled."""
    as_int32 = lambda i, state: body(lax.convert_element_type(i, jnp.int32), state)  # noqa: E731
    return lax.fori_loop(jnp.int32(start), jnp.int32(stop), as_int32, state)


def _take(x: Array, block: Any, size: int, axis: int = 0) -> Array:
    """The block-th run of `size` along an axis; the array itself if it is no longer than that."""
    if x.shape[axis] == size:
        return x
    return lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _put(x: Array, value: Array, block: Any, axis: int) -> Array:
    """x with `value` added to the block-th run along an axis."""
    size = value.shape[axis]
    if x.shape[axis] == size:
        return x + value
    start = block * size
    old = lax.dynamic_slice_in_dim(x, start, size, axis)
    return lax.dynamic_update_slice_in_dim(x, old + value, start, axis)


def _runs(letters: str, leaf: Any) -> list[tuple[int, str]]:
    """The axes of a picked array along T and S, unless they broadcast."""
    named = [x for x in letters.replace("#", "").split() if x not in ("*B", "N")]
    return [(a, x) for a, x in enumerate(named) if x in ("T", "S") and leaf.shape[a] > 1]


def _cut(spec: Spec, i: Any, j: Any, tiling: Tiling) -> Spec:
    """The picked spec with its arrays along T and S cut to tile (i, j)."""

    def one(letters: str, leaf: Any) -> Any:
        for axis, letter in _runs(letters, leaf):
            block, size = (i, tiling.block_q) if letter == "T" else (j, tiling.block_kv)
            leaf = _take(leaf, block, size, axis)
        return leaf

    return jax.tree.map(one, declared(spec), spec)


def _span(positions: Any, block: Any, size: int) -> Span:
    places = block * size + jnp.arange(size, dtype=jnp.int32)
    return Span(places if positions is None else positions.astype(jnp.int32), places)


def _padded(spec: Spec, T: int, S: int, T_padded: int, S_padded: int) -> Spec:
    """The spec for sizes that are whole tiles; queries past T and keys past S are masked."""

    def one(letters: str, leaf: Any) -> Any:
        named = letters.replace("#", "").split()
        for letter, size in (("T", T_padded), ("S", S_padded)):
            axis = leaf.ndim - len(named) + named.index(letter) if letter in named else None
            if axis is not None and 1 < leaf.shape[axis] < size:
                widths = [(0, 0)] * leaf.ndim
                widths[axis] = (0, size - leaf.shape[axis])
                leaf = jnp.pad(leaf, widths, mode="edge")
        return leaf

    spec = jax.tree.map(one, declared(spec), spec)
    if T_padded > T or S_padded > S:
        exist = masks.Lengths(T if T_padded > T else None, S if S_padded > S else None)
        spec = dataclasses.replace(spec, mask=spec.mask & exist)
    return spec


def _pad_to(x: Array, size: int) -> Array:
    return x if len(x) == size else jnp.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))


# ---------------------------------------------------------------------------------------------
# One head
# ---------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """One tile of one head: the spec cut to it, and where it is."""

    spec: Spec
    b: Any
    h: Any
    rows: Span
    columns: Span

    @classmethod
    def at(cls, spec: Spec, b: Any, h: Any, i: Any, j: Any, tiling: Tiling) -> "_Tile":
        cut = _cut(spec, i, j, tiling)
        rows = _span(cut.q_positions, i, tiling.block_q)
        return cls(cut, b, h, rows, _span(cut.kv_positions, j, tiling.block_kv))

    def scores(self, q: Array, k: Array, values: "_Values", masked: bool) -> tuple[Array, Any]:
        """Scores, and the function from their cotangent to those of products and parameters."""
        products = tile.product(q, k, self.spec.precision)
        if values.lost is not None:
            products = products + values.lost[None, :]

        def modify(products: Array, params: Any) -> Array:
            spec = _with_params(self.spec, params)
            return tile.modify(spec, products, self.b, self.h, self.rows, self.columns, masked)

        return jax.vjp(modify, products, _params(self.spec))

    def drop(self, weights: Array) -> Array:
        return tile.drop(self.spec, weights, self.b, self.h, self.rows, self.columns)


class _Values(NamedTuple):
    """Values by which weights may be multiplied, and what the keys of the others add to scores.

    Without a mask nothing needs telling apart: what is not finite is attended by all.
    """

    clean: Float[Array, "S V"]
    lost: Float[Array, " S"] | None

    @classmethod
    def of(cls, spec: Spec, v: Array) -> "_Values":
        wide = v.astype(accumulation(v.dtype))
        return cls(tile.finite(wide), tile.lost(wide)) if has_mask(spec) else cls(wide, None)

    def at(self, j: Any, tiling: Tiling) -> "_Values":
        """Those of the j-th tile of keys."""
        clean = _take(self.clean, j, tiling.block_kv)
        return _Values(clean, None if self.lost is None else _take(self.lost, j, tiling.block_kv))


def _forward_head(
    spec: Spec, b: Any, h: Any, q: Array, k: Array, v: Array, tiling: Tiling
) -> tuple[Float[Array, "T V"], Float[Array, " T"]]:
    """`(out, lse)` of one head; sizes are whole tiles."""
    walk = _plan(spec, len(q), len(k), tiling)
    values = _Values.of(spec, v)

    def part(i: Any, j: Any, q_i: Array, masked: bool) -> softmax.Partial:
        here = _Tile.at(spec, b, h, i, j, tiling)
        k_j, v_j = _take(k, j, tiling.block_kv), values.at(j, tiling)
        score = here.scores(q_i, k_j, v_j, masked)[0]
        return softmax.of(score, lambda w: _dot(here.drop(w), v_j.clean, spec))

    def block(i: Any) -> tuple[Array, Array]:
        q_i = _take(q, i, tiling.block_q)
        if walk.single:
            return softmax.finish(part(i, np.int32(0), q_i, True))

        def step(j: Any, state: softmax.Partial, masked: bool) -> softmax.Partial:
            return softmax.combine(state, part(i, j, q_i, masked))

        state = softmax.empty(tiling.block_q, v.shape[1], accumulation(q.dtype))
        return softmax.finish(_visit(walk, i, step, state))

    blocks = len(q) // tiling.block_q
    if blocks == 1:
        return block(np.int32(0))
    out, lse = lax.map(block, jnp.arange(blocks, dtype=jnp.int32))
    return out.reshape(len(q), -1), lse.reshape(-1)


def _dot(a: Array, b: Array, spec: Spec) -> Array:
    return jnp.dot(a, b, precision=spec.precision)


class _Gradients(NamedTuple):
    """Of one head. Those of keys and values stand transposed: see `_backward_head`."""

    query: Float[Array, "T H"]
    key: Float[Array, "H S"]
    value: Float[Array, "V S"]
    params: Any


def _backward_head(
    spec: Spec,
    b: Any,
    h: Any,
    q: Array,
    d_out: Array,
    lse: Array,
    delta: Array,
    k: Array,
    v: Array,
    tiling: Tiling,
) -> _Gradients:
    """Gradients of one head, from the cotangent of `out` and delta = rowsum(d_out · out) − d_lse.

    With p = exp(s − lse) and dp = d_out vᵀ, the cotangent of the scores is p (dp − delta).
    Gradients of keys and values are summed as `[H, S]` and `[V, S]`: a product with its left side
    transposed runs at a third of the speed on CPUs.
    """
    walk = _plan(spec, len(q), len(k), tiling)
    dtype = accumulation(q.dtype)
    values = _Values.of(spec, v)
    q_clean, k_clean = (x.astype(dtype) for x in (q, k))
    if has_mask(spec):
        q_clean, k_clean = tile.finite(q_clean), tile.finite(k_clean)
    q_turned, d_turned = q_clean.T, d_out.T
    letters = _param_letters(spec)

    def block(i: Any, total: _Gradients) -> _Gradients:
        q_i, d_i, lse_i, delta_i = (_take(x, i, tiling.block_q) for x in (q, d_out, lse, delta))
        qt_i, dt_i = (_take(x, i, tiling.block_q, 1) for x in (q_turned, d_turned))

        def step(j: Any, state: Any, masked: bool) -> Any:
            dq_i, dk, dv, d_params = state
            here = _Tile.at(spec, b, h, i, j, tiling)
            k_j, v_j = _take(k, j, tiling.block_kv), values.at(j, tiling)
            score, pull = here.scores(q_i, k_j, v_j, masked)
            weights = jnp.where(score == -jnp.inf, 0, jnp.exp(score - lse_i[:, None]))
            d_weights = here.drop(_dot(d_i, v_j.clean.T, spec))
            d_score = jnp.where(score == -jnp.inf, 0, weights * (d_weights - delta_i[:, None]))
            d_products, d_here = pull(d_score)
            dq_i += _dot(d_products, _take(k_clean, j, tiling.block_kv), spec)
            dk = _put(dk, _dot(qt_i, d_products, spec), j, 1)
            dv = _put(dv, _dot(dt_i, here.drop(weights), spec), j, 1)
            d_params = [
                _put_leaf(total, part, name, i, j)
                for total, part, name in zip(d_params, d_here, letters, strict=True)
            ]
            return dq_i, dk, dv, d_params

        state = (jnp.zeros(q_i.shape, dtype), total.key, total.value, total.params)
        dq_i, *rest = _visit(walk, i, step, state)
        return _Gradients(_put(total.query, dq_i, i, 0), *rest)

    total = _Gradients(
        jnp.zeros(q.shape, dtype),
        jnp.zeros(k.shape[::-1], dtype),
        jnp.zeros(v.shape[::-1], dtype),
        [jnp.zeros(leaf.shape, leaf.dtype) for leaf in _params(spec)],
    )
    blocks = len(q) // tiling.block_q
    return block(np.int32(0), total) if blocks == 1 else _repeat(0, blocks, block, total)


def _put_leaf(total: Array, part: Array, letters: str, i: Any, j: Any) -> Array:
    """The gradient of a parameter with a tile's part of it added where it belongs."""
    runs = _runs(letters, part)
    blocks = {"T": i, "S": j}
    start = [np.int32(0)] * total.ndim
    for axis, letter in runs:
        start[axis] = blocks[letter] * part.shape[axis]
    if total.shape == part.shape:
        return total + part
    old = lax.dynamic_slice(total, start, part.shape)
    return lax.dynamic_update_slice(total, old + part, start)


def _is_param(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _params(spec: Spec) -> list[Array]:
    """The differentiable arrays of a spec: the float ones of its score function."""
    return [leaf for leaf in jax.tree.leaves(spec.score) if _is_param(leaf)]


def _param_letters(spec: Spec) -> list[str]:
    pairs = zip(jax.tree.leaves(declared(spec.score)), jax.tree.leaves(spec.score), strict=True)
    return [letters for letters, leaf in pairs if _is_param(leaf)]


def _with_params(spec: Spec, params: list[Any]) -> Spec:
    leaves, treedef = jax.tree.flatten(spec.score)
    new = iter(params)
    score = jax.tree.unflatten(treedef, [next(new) if _is_param(x) else x for x in leaves])
    return dataclasses.replace(spec, score=score)


# ---------------------------------------------------------------------------------------------
# All heads
# ---------------------------------------------------------------------------------------------


def _head(x: Array, b: Any, h: Any, size: int) -> Array:
    """Head (b, h) of `[B, T, N, ...]`, padded to whole tiles."""
    start = (b, np.int32(0), h) + (np.int32(0),) * (x.ndim - 3)
    one = lax.dynamic_slice(x, start, (1, x.shape[1], 1, *x.shape[3:]))
    return _pad_to(one.reshape(x.shape[1], *x.shape[3:]), size)


def _put_head(total: Array, x: Array, b: Any, h: Any) -> Array:
    start = (b, np.int32(0), h) + (np.int32(0),) * (total.ndim - 3)
    return lax.dynamic_update_slice(total, x[: total.shape[1], ...][None, :, None], start)


class _Problem(NamedTuple):
    """The sizes of a call, and its tiles forward and backward."""

    shapes: Shapes
    tiling: Tiling
    tiling_back: Tiling

    @property
    def padded(self) -> tuple[int, int]:
        """T and S as whole tiles."""
        T, S = self.shapes.T, self.shapes.S
        block_q, block_kv = self.tiling
        return -(-T // block_q) * block_q, -(-S // block_kv) * block_kv


def _forward_loop(problem: _Problem, spec: Spec, query: Array, key: Array, value: Array) -> Any:
    """`(out [B, T, N, V], lse [B, T, N])`, head after head."""
    shapes, (T, S) = problem.shapes, problem.padded
    dtype = accumulation(query.dtype)

    def body(n: Any, total: Any) -> Any:
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.N))
        q = _head(query, b, h, T)
        k, v = (_head(x, b, h // shapes.G, S) for x in (key, value))
        results = _forward_head(masks.pick(spec, b, h), b, h, q, k, v, problem.tiling)
        return tuple(_put_head(x, y, b, h) for x, y in zip(total, results, strict=True))

    rows = (shapes.B, shapes.T, shapes.N)
    total = (jnp.zeros((*rows, shapes.V), dtype), jnp.zeros(rows, dtype))
    return _repeat(0, shapes.B * shapes.N, body, total)


def _forward_vmap(problem: _Problem, spec: Spec, query: Array, key: Array, value: Array) -> Any:
    """`(out [B, T, N, V], lse [B, T, N])`, all heads at once."""
    shapes, (T, S) = problem.shapes, problem.padded

    def one(spec: Spec, b: Any, h: Any, q: Array, k: Array, v: Array) -> Any:
        q, k, v = _pad_to(q, T), _pad_to(k, S), _pad_to(v, S)
        results = _forward_head(spec, b, h, q, k, v, problem.tiling)
        return tuple(x[: shapes.T] for x in results)

    return tile.over_heads(one, spec, (query,), (key, value), out_axes=(1, 1))


def _backward_loop(problem: _Problem, spec: Spec, per_head: Any, key: Array, value: Array) -> Any:
    """Gradients of params, query, key and value, head after head; `per_head` is a tuple of query,
    d_out, lse and delta."""
    shapes, (T, S) = problem.shapes, problem.padded
    dtype = accumulation(key.dtype)

    def body(n: Any, total: Any) -> Any:
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.N))
        kv = h // shapes.G
        params, d_query, d_key, d_value = total
        q, d_out, lse, delta = (_head(x, b, h, T) for x in per_head)
        k, v = (_head(x, b, kv, S) for x in (key, value))
        picked = masks.pick(spec, b, h)
        part = _backward_head(picked, b, h, q, d_out, lse, delta, k, v, problem.tiling_back)
        d_key = _put_head(d_key, part.key.T[: shapes.S] + _head(d_key, b, kv, shapes.S), b, kv)
        grown = part.value.T[: shapes.S] + _head(d_value, b, kv, shapes.S)
        d_value = _put_head(d_value, grown, b, kv)
        params = [
            _put_param(x, y, name, b, h)
            for x, y, name in zip(params, part.params, _param_letters(spec), strict=True)
        ]
        return params, _put_head(d_query, part.query, b, h), d_key, d_value

    total = (
        [jnp.zeros_like(leaf) for leaf in _params(spec)],
        *(jnp.zeros(x.shape, dtype) for x in (per_head[0], key, value)),
    )
    return _repeat(0, shapes.B * shapes.N, body, total)


def _put_param(total: Array, part: Array, letters: str, b: Any, h: Any) -> Array:
    """One head's gradient of a parameter added at its batch row and head."""
    named = letters.replace("#", "").split()
    start = [np.int32(0)] * total.ndim
    for name, index in (("*B", b), ("N", h)):
        if name in named:
            axis = named.index(name)
            part = jnp.expand_dims(part, axis)
            start[axis] = index if total.shape[axis] > 1 else np.int32(0)
    old = lax.dynamic_slice(total, start, part.shape)
    return lax.dynamic_update_slice(total, old + part, start)


def _backward_vmap(problem: _Problem, spec: Spec, per_head: Any, key: Array, value: Array) -> Any:
    """As `_backward_loop`, all heads at once."""
    shapes, (T, S) = problem.shapes, problem.padded
    params, letters = _params(spec), _param_letters(spec)

    def one(spec: Spec, b: Any, h: Any, *operands: Array) -> Any:
        q, d_out, lse, delta = (_pad_to(x, T) for x in operands[:4])
        k, v = (_pad_to(x, S) for x in operands[4:])
        part = _backward_head(spec, b, h, q, d_out, lse, delta, k, v, problem.tiling_back)
        return part.query[: shapes.T], part.key.T[: shapes.S], part.value.T[: shapes.S], part.params

    axes = (1, 1, 1, [0] * len(params))
    d_query, d_key, d_value, d_params = tile.over_heads(one, spec, per_head, (key, value), axes)

    def over_group(x: Array) -> Array:
        return x.reshape(*x.shape[:2], shapes.K, shapes.G, -1).sum(axis=3)

    d_params = [
        _sum_param(x, leaf, name) for x, leaf, name in zip(d_params, params, letters, strict=True)
    ]
    return d_params, d_query, over_group(d_key), over_group(d_value)


def _sum_param(parts: Array, leaf: Array, letters: str) -> Array:
    """Gradients `[B, N, ...]` of a parameter summed to its own shape."""
    named = letters.replace("#", "").split()
    if "N" not in named or leaf.shape[named.index("N")] == 1:
        parts = parts.sum(axis=1)
    elif named.index("N") > 1 or "*B" not in named:
        parts = jnp.moveaxis(parts, 1, 1 + [x for x in named if x != "*B"].index("N"))
    if "*B" not in named or leaf.shape[0] == 1:
        parts = parts.sum(axis=0)
    return parts.reshape(leaf.shape)


def _loops(problem: _Problem) -> bool:
    """Whether heads run one after another: on a CPU, where one head alone is work enough."""
    work = problem.shapes.T * problem.shapes.S
    return jax.default_backend() == "cpu" and work >= 128 * 128


def attend(
    spec: Spec, query: Array, key: Array, value: Array, tiling: Tiling | None = None
) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])` for one flat batch axis."""
    (B, T, N, H), (S, K, V) = query.shape, value.shape[1:]
    shapes = Shapes((B,), T, S, N, K, H, V, query.dtype)
    if 0 in (B, T, S):
        lse = jnp.full((B, N, T), -jnp.inf, accumulation(query.dtype))
        return jnp.zeros((B, T, N, V), query.dtype), lse
    if not is_static(spec.scale):
        query = (query.astype(spec.scale.dtype) * spec.scale).astype(query.dtype)
        spec = dataclasses.replace(spec, scale=1.0)
    tilings = (tiling, tiling) if tiling else choose_tiling(spec, T, S)
    problem = _Problem(shapes, *tilings)
    spec = _padded(spec, T, S, *problem.padded)
    return _differentiable(problem, spec, query, key, value)


def _differentiable(
    problem: _Problem, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Output, LogSumExp]:
    """Attention with the derivative rule, in which only float arrays of the score take part."""
    loops = _loops(problem)
    forward = functools.partial(_forward_loop if loops else _forward_vmap, problem)
    backward = functools.partial(_backward_loop if loops else _backward_vmap, problem)

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, query: Array, key: Array, value: Array) -> Any:
        return forward(_with_params(spec, params), query, key, value)

    def run_forward(params: list[Array], spec: Spec, *qkv: Array) -> Any:
        out, lse = run(params, spec, *qkv)
        return (out, lse), (params, spec, *qkv, out, lse)

    def run_backward(residuals: Any, cotangents: Any) -> Any:
        params, spec, query, key, value, out, lse = residuals
        d_out, d_lse = cotangents
        delta = jnp.sum(d_out * out, axis=-1) - d_lse
        per_head = (query, d_out, lse, delta)
        found = backward(_with_params(spec, params), per_head, key, value)
        d_params, *d_qkv = found
        cast = [x.astype(y.dtype) for x, y in zip(d_qkv, (query, key, value), strict=True)]
        return d_params, None, *cast

    run.defvjp(run_forward, run_backward)
    out, lse = run(_params(spec), spec, query, key, value)
    return out.astype(query.dtype), jnp.swapaxes(lse, 1, 2)
