"""Exact attention in memory linear in T and S: tile by tile, skipping what the mask empties.

Forward, a block of queries walks over its tiles of keys with the online softmax of
`jattn.softmax`; backward, the walk is repeated from q, k, v, out and lse alone, and the weights
of each tile are computed again (Rabe and Staats 2021; Dao et al. 2022, FlashAttention; gradients
as in Dao et al., appendix B.2). The tile map decides the walk through loop bounds: empty tiles are
not visited, full ones leave the mask out.

Heads run one after another on a CPU, where one head's tile fills the cores and stays in their
caches, and all at once elsewhere. Short sequences go by `jattn.kernels.whole`.
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
from jattn.kernels import reverse, whole
from jattn.masks import Span
from jattn.spec import (
    Shapes,
    Spec,
    Tiling,
    has_mask,
    parameter_letters,
    parameters,
    scaled,
    with_parameters,
)


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None: everything, but only the first derivative, and that in reverse mode."""
    return None


def choose_tiling(spec: Spec, T: int, S: int) -> Tiling:
    """Tiles near those that measured fastest on CPUs, forward and backward.

    Small tiles follow a narrow band closely; where a block of queries visits many keys, the larger
    products of larger tiles win.
    """
    size = 128 if _visited(spec, T, S) <= 1024 else 512
    return Tiling(_even(T, size), _even(S, size))


def _even(size: int, target: int) -> int:
    """The size of blocks near the target that split an axis evenly; a multiple of 8 if several."""
    blocks = -(-size // target)
    return size if blocks == 1 else -(-size // (8 * blocks)) * 8


def _visited(spec: Spec, T: int, S: int) -> float:
    """How many keys a block of queries visits on average; all, where that is not known yet."""
    block = max(128, max(T, S) // 1024)
    kinds = _kinds(masks.pick(spec, 0, 0), T, S, Tiling(block, block))
    if not isinstance(kinds, np.ndarray):
        return float(S)
    return float(np.mean(np.sum(kinds > 0, axis=1)) * block)


def _kinds(spec: Spec, T: int, S: int, tiling: Tiling) -> Any:
    """The tile map of one head."""
    box = masks.Tile(
        masks.extents(T, tiling.block_q, spec.q_positions),
        masks.extents(S, tiling.block_kv, spec.kv_positions),
    )
    return masks.kinds(spec.mask, box)


class _Run(NamedTuple):
    """Consecutive tiles of keys of one kind, taken together as one wide tile."""

    start: Any
    size: int
    masked: bool


class _Walk(NamedTuple):
    """Which keys each block of queries visits.

    `runs[i]` lists them where the tile map is known while tracing and the program stays short; a
    single list is for all. Otherwise `tiles` holds, by width in tiles and kind, the columns
    `[n, m]` to visit and how many of them each block of queries visits `[n]`.
    """

    runs: list[list[_Run]] | None
    tiles: list[tuple[int, bool, Any, Any]]

    def of(self, i: Any) -> list[_Run]:
        """The runs of query block i; none where they are not known."""
        return [] if self.runs is None else self.runs[0 if len(self.runs) == 1 else i]

    def unrolled(self, blocks: int) -> bool:
        """Whether the program is written out block by block."""
        return blocks == 1 or (self.runs is not None and len(self.runs) > 1)


_WHOLE = 256 * 256  # T × S of a head that is taken in one piece, at most
_RUNS = 8  # longest program written out run by run: side by side, more of them take memory and time
_WIDE = 1024  # keys in a run or a wide tile at most: they bound the memory


def _plan(spec: Spec, T: int, S: int, tiling: Tiling) -> _Walk:
    """The walk of one head; known while tracing if the mask is static."""
    kinds = _kinds(spec, T, S, tiling)
    if isinstance(kinds, np.ndarray):
        runs = [_runs_of(row, tiling.block_kv) for row in kinds]
        if all(row == runs[0] for row in runs):
            runs = runs[:1]
        if sum(map(len, runs)) <= _RUNS:
            return _Walk(runs, [])
    if kinds.shape[1] == 1:
        return _Walk([[_Run(0, S, True)]], [])  # looking is no cheaper than computing
    xp = np if isinstance(kinds, np.ndarray) else jnp
    full = kinds == masks.FULL
    wanted = [(1, True, kinds == masks.MIXED)]
    # Never all columns: what does not depend on the loop is moved out of it, and always computed.
    wide = min(_WIDE // tiling.block_kv, kinds.shape[1] - 1)
    if wide > 1:
        groups = kinds.shape[1] // wide
        grouped = xp.all(full[:, : groups * wide].reshape(-1, groups, wide), axis=2)
        rest = kinds.shape[1] - groups * wide
        full = full & ~xp.pad(xp.repeat(grouped, wide, axis=1), ((0, 0), (0, rest)))
        wanted.append((wide, False, grouped))
    wanted.append((1, False, full))
    return _Walk(None, [(size, masked, *_columns(xp, which)) for size, masked, which in wanted])


def _runs_of(kinds: np.ndarray, block: int) -> list[_Run]:
    """The runs of one block of queries, of at most `_WIDE` keys each."""
    runs: list[_Run] = []
    for j, kind in enumerate(kinds):
        here = _Run(j * block, block, bool(kind == masks.MIXED))
        last = runs[-1] if runs else _Run(-1, 0, False)
        joins = last.start + last.size == here.start and last.masked == here.masked
        if kind != masks.EMPTY and joins and last.size + block <= _WIDE:
            runs[-1] = last._replace(size=last.size + block)
        elif kind != masks.EMPTY:
            runs.append(here)
    return runs


def _columns(xp: Any, which: Any) -> tuple[Any, Any]:
    """Of bool `[n, m]`: the columns that are True, first in each row, and how many they are."""
    order = xp.argsort(~which, axis=1, stable=True).astype(np.int32)
    count = which.sum(axis=1).astype(np.int32)
    return (order if xp is jnp else order[:, : max(1, count.max(initial=0))]), count


def _visit(
    walk: _Walk, tiling: Tiling, i: Any, step: Callable[[_Run, Any], Any], state: Any
) -> Any:
    """Folds `step(run, state)` over the keys of query block i."""
    state = functools.reduce(lambda state, run: step(run, state), walk.of(i), state)
    for width, masked, order, count in walk.tiles:
        if not isinstance(count, np.ndarray) or count.any():
            size = width * tiling.block_kv
            body = functools.partial(_visit_one, step, jnp.asarray(order)[i], size, masked)
            state = _repeat(0, jnp.asarray(count)[i], body, state)
    return state


def _visit_one(step: Any, order: Array, size: int, masked: bool, place: Any, state: Any) -> Any:
    return step(_Run(order[place] * size, size, masked), state)


class _Band(NamedTuple):
    """A walk in which each block of `rows` queries sees one run of `width` keys, at `starts[i]`."""

    rows: int
    width: int
    starts: np.ndarray


_BAND = 256 * 1280  # T × S of a piece of a band at most
_PIECES = 8  # of a band at once: enough for the cores, few enough for their caches


def _band(spec: Spec, T: int, S: int, tiling: Tiling) -> _Band | None:
    """The band, if what the mask leaves is one and fills most of it.

    Then each block of queries is a short sequence: one fused kernel, no online softmax.
    """
    double = 2 * tiling.block_q <= 256 and T % (2 * tiling.block_q) == 0
    rows = tiling.block_q * (1 + double)
    kinds = _kinds(spec, T, S, Tiling(rows, tiling.block_kv))
    if spec.score is not None or spec.dropout_rate or not isinstance(kinds, np.ndarray):
        return None
    visited = kinds != masks.EMPTY
    seen = visited.any(axis=1)
    first = np.where(seen, visited.argmax(axis=1), 0)
    last = np.where(seen, visited.shape[1] - visited[:, ::-1].argmax(axis=1), 0)
    tiles = int(max(1, (last - first).max()))
    width = tiles * tiling.block_kv
    if rows * width > _BAND or visited.sum() <= 0.75 * len(kinds) * tiles:
        return None
    starts = np.minimum(first, visited.shape[1] - tiles) * tiling.block_kv
    return _Band(rows, width, starts.astype(np.int32))


def _map_blocks(
    walk: _Walk, n: int, block: Callable[[Any], Any], over_blocks: Callable[..., Any] = lax.map
) -> tuple[Float[Array, "T V"], Float[Array, " T"]]:
    """`(out, lse)` of all n blocks of queries from those of each."""
    if walk.unrolled(n):
        parts = [block(np.int32(i)) for i in range(n)]
        out, lse = (jnp.concatenate(x) for x in zip(*parts, strict=True))
        return out, lse
    out, lse = over_blocks(block, jnp.arange(n, dtype=jnp.int32))
    return out.reshape(-1, out.shape[-1]), lse.reshape(-1)


def _fold_blocks(walk: _Walk, n: int, block: Callable[[Any, Any], Any], total: Any) -> Any:
    """Folds `block(i, total)` over all n blocks of queries."""
    if walk.unrolled(n):
        return functools.reduce(lambda total, i: block(np.int32(i), total), range(n), total)
    return _repeat(0, n, block, total)


def _repeat(start: Any, stop: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """`lax.fori_loop` whose index is int32, also with 64-bit types enabled."""
    as_int32 = lambda i, state: body(lax.convert_element_type(i, jnp.int32), state)  # noqa: E731
    return lax.fori_loop(jnp.int32(start), jnp.int32(stop), as_int32, state)


def _take(x: Array, start: Any, size: int, axis: int = 0) -> Array:
    """A run of `size` along an axis; the array itself if it is no longer than that."""
    if x.shape[axis] == size:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: Array, value: Array, start: Any, axis: int) -> Array:
    """x with `value` added to a run along an axis."""
    size = value.shape[axis]
    if x.shape[axis] == size:
        return x + value
    old = lax.dynamic_slice_in_dim(x, start, size, axis)
    return lax.dynamic_update_slice_in_dim(x, old + value, start, axis)


def _axes(letters: str, leaf: Any) -> list[tuple[int, str]]:
    """The axes of a picked array along T and S, unless they broadcast."""
    named = [x for x in letters.replace("#", "").split() if x not in ("*B", "N")]
    return [(a, x) for a, x in enumerate(named) if x in ("T", "S") and leaf.shape[a] > 1]


def _cut(spec: Spec, row: Any, rows: int, column: Any, columns: int) -> Spec:
    """The picked spec with its arrays along T and S cut to a tile."""

    def one(letters: str, leaf: Any) -> Any:
        for axis, letter in _axes(letters, leaf):
            start, size = (row, rows) if letter == "T" else (column, columns)
            leaf = _take(leaf, start, size, axis)
        return leaf

    return jax.tree.map(one, declared(spec), spec)


def _span(positions: Any, start: Any, size: int) -> Span:
    places = start + jnp.arange(size, dtype=jnp.int32)
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
    def at(cls, spec: Spec, b: Any, h: Any, row: Any, rows: int, run: _Run) -> "_Tile":
        cut = _cut(spec, row, rows, run.start, run.size)
        span = _span(cut.q_positions, row, rows)
        return cls(cut, b, h, span, _span(cut.kv_positions, run.start, run.size))

    def scores(self, q: Array, k: Array, values: "_Values", masked: bool) -> tuple[Array, Any]:
        """Scores, and the function from their cotangent to those of products and parameters."""
        products = tile.product(q, k, self.spec.precision)
        if values.lost is not None:
            products = products + values.lost[None, :]

        def modify(products: Array, params: Any) -> Array:
            spec = with_parameters(self.spec, params)
            return tile.modify(spec, products, self.b, self.h, self.rows, self.columns, masked)

        return jax.vjp(modify, products, parameters(self.spec))

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

    def at(self, run: _Run) -> "_Values":
        """Those of a run of keys."""
        clean = _take(self.clean, run.start, run.size)
        return _Values(clean, None if self.lost is None else _take(self.lost, run.start, run.size))


def _forward_head(
    spec: Spec,
    b: Any,
    h: Any,
    q: Array,
    k: Array,
    v: Array,
    tiling: Tiling,
    over_blocks: Callable[..., Any] = lax.map,
) -> tuple[Float[Array, "T V"], Float[Array, " T"]]:
    """`(out, lse)` of one head; sizes are whole tiles. `over_blocks` maps over query blocks."""
    walk, rows = _plan(spec, len(q), len(k), tiling), tiling.block_q
    values = _Values.of(spec, v)
    spec, q, _ = scaled(spec, q)

    def block(i: Any) -> tuple[Array, Array]:
        q_i = _take(q, i * rows, rows)

        def step(run: _Run, state: softmax.Partial | None) -> softmax.Partial:
            here = _Tile.at(spec, b, h, i * rows, rows, run)
            v_j = values.at(run)
            score = here.scores(q_i, _take(k, run.start, run.size), v_j, run.masked)[0]
            part = softmax.of(
                score, lambda w: _dot(here.drop(w), v_j.clean, spec), differentiable=False
            )
            return part if state is None else softmax.combine(state, part)

        first = None if walk.of(i) else softmax.empty(rows, v.shape[1], values.clean.dtype)
        return softmax.quotient(_visit(walk, tiling, i, step, first))

    return _map_blocks(walk, len(q) // rows, block, over_blocks)


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
    walk, rows = _plan(spec, len(q), len(k), tiling), tiling.block_q
    dtype = accumulation(q.dtype)
    values = _Values.of(spec, v)
    spec, q, scale = scaled(spec, q)
    q_clean, k_clean = (x.astype(dtype) for x in (q, k))
    if has_mask(spec):
        q_clean, k_clean = tile.finite(q_clean), tile.finite(k_clean)
    q_turned, d_turned = q_clean.T, d_out.T
    letters = parameter_letters(spec)

    def block(i: Any, total: _Gradients) -> _Gradients:
        q_i, d_i, lse_i, delta_i = (_take(x, i * rows, rows) for x in (q, d_out, lse, delta))
        qt_i, dt_i = (_take(x, i * rows, rows, 1) for x in (q_turned, d_turned))
        shift = softmax.shift(lse_i)[:, None]

        def step(run: _Run, state: Any) -> Any:
            dq_i, dk, dv, d_params = state
            here = _Tile.at(spec, b, h, i * rows, rows, run)
            v_j = values.at(run)
            score, pull = here.scores(q_i, _take(k, run.start, run.size), v_j, run.masked)
            weights = jnp.exp(score - shift)
            d_weights = here.drop(_dot(d_i, v_j.clean.T, spec))
            d_products, d_here = pull(weights * (d_weights - delta_i[:, None]))
            dq_i += _dot(d_products, _take(k_clean, run.start, run.size), spec)
            dk = _put(dk, _dot(qt_i, d_products, spec), run.start, 1)
            dv = _put(dv, _dot(dt_i, here.drop(weights), spec), run.start, 1)
            starts = {"T": i * rows, "S": run.start}
            d_params = [
                _put_leaf(total, part, name, starts)
                for total, part, name in zip(d_params, d_here, letters, strict=True)
            ]
            return dq_i, dk, dv, d_params

        state = (jnp.zeros(q_i.shape, dtype), total.key, total.value, total.params)
        dq_i, *rest = _visit(walk, tiling, i, step, state)
        return _Gradients(_put(total.query, dq_i, i * rows, 0), *rest)

    total = _Gradients(
        jnp.zeros(q.shape, dtype),
        jnp.zeros(k.shape[::-1], dtype),
        jnp.zeros(v.shape[::-1], dtype),
        [jnp.zeros(leaf.shape, leaf.dtype) for leaf in parameters(spec)],
    )
    total = _fold_blocks(walk, len(q) // rows, block, total)
    return total._replace(query=total.query * scale)


def _put_leaf(total: Array, part: Array, letters: str, starts: dict[str, Any]) -> Array:
    """The gradient of a parameter with a tile's part of it added where it belongs."""
    start: list[Any] = [np.int32(0)] * total.ndim
    for axis, letter in _axes(letters, part):
        start[axis] = jnp.int32(starts[letter])
    if total.shape == part.shape:
        return total + part
    old = lax.dynamic_slice(total, start, part.shape)
    return lax.dynamic_update_slice(total, old + part, start)


# ---------------------------------------------------------------------------------------------
# All heads
# ---------------------------------------------------------------------------------------------


def _head(x: Array, b: Any, h: Any, size: int) -> Array:
    """Head (b, h) of `[B, T, N, ...]`, padded to whole tiles."""
    start = (b, np.int32(0), h) + (np.int32(0),) * (x.ndim - 3)
    one = lax.dynamic_slice(x, start, (1, x.shape[1], 1, *x.shape[3:]))
    return _pad_to(one.reshape(x.shape[1], *x.shape[3:]), size)


def _put_head(total: Array, x: Array, b: Any, h: Any, row: Any = 0) -> Array:
    """`[B, T, N, ...]` with the rows x `[t, ...]` of head (b, h) written from `row` on."""
    start = (b, jnp.int32(row), h) + (np.int32(0),) * (total.ndim - 3)
    return lax.dynamic_update_slice(total, x[: total.shape[1], ...][None, :, None], start)


class _Problem(NamedTuple):
    """The sizes of a call, and its tiles."""

    shapes: Shapes
    tiling: Tiling

    @property
    def padded(self) -> tuple[int, int]:
        """T and S as whole tiles."""
        T, S = self.shapes.T, self.shapes.S
        block_q, block_kv = self.tiling
        return -(-T // block_q) * block_q, -(-S // block_kv) * block_kv


def _forward_loop(spec: Spec, query: Array, key: Array, value: Array, problem: _Problem) -> Any:
    """`(out [B, T, N, V], lse [B, T, N])`, head after head."""
    shapes, (T, S) = problem.shapes, problem.padded
    dtype = accumulation(query.dtype)
    band = _band(masks.pick(spec, 0, 0), T, S, problem.tiling)
    if band:
        return _forward_band(spec, query, key, value, problem, band)

    def body(n: Any, total: Any) -> Any:
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.N))
        q = _head(query, b, h, T)
        k, v = (_head(x, b, h // shapes.G, S) for x in (key, value))
        picked = masks.pick(spec, b, h)
        results = _forward_head(picked, b, h, q, k, v, problem.tiling)
        return tuple(_put_head(x, y, b, h) for x, y in zip(total, results, strict=True))

    rows = (shapes.B, shapes.T, shapes.N)
    total = (jnp.zeros((*rows, shapes.V), dtype), jnp.zeros(rows, dtype))
    return _repeat(0, shapes.B * shapes.N, body, total)


def _forward_band(
    spec: Spec, query: Array, key: Array, value: Array, problem: _Problem, band: _Band
) -> Any:
    """As `_forward_loop` for a mask that leaves a band: a few pieces of one head at once."""
    shapes, (T, S) = problem.shapes, problem.padded
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))
        for x, size in ((query, T), (key, S), (value, S))
    )
    n, starts = len(band.starts), jnp.asarray(band.starts)
    at_once = min(n, _PIECES)
    turns = -(-n // at_once)

    def piece(head: Callable[..., Any], i: Any, spec: Spec, b: Any, h: Any, *qkv: Array) -> Any:
        run = _Run(starts[i], band.width, True)
        here = _Tile.at(spec, b, h, i * band.rows, band.rows, run)
        return head(here.spec, b, h, (here.rows, here.columns), *qkv)

    def run(head: Callable[..., Any], *operands: Any, over_batch: Any = jax.vmap) -> Any:
        axes = (0, None, None, None, 0, 0, 0)
        return over_batch(functools.partial(piece, head), axes)(*operands)

    def body(step: Any, total: Any) -> Any:
        head, turn = divmod(step, turns)
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(head, shapes.N))
        # The last turn starts early enough to be as long as the others.
        i = jnp.minimum(turn * at_once, n - at_once) + jnp.arange(at_once, dtype=jnp.int32)
        q = _pieces(query, b, i * band.rows, h, band.rows)
        k, v = (_pieces(x, b, starts[i], h // shapes.G, band.width) for x in (key, value))
        operands = (i, masks.pick(spec, b, h), b, h, q, k, v)
        results = whole.attempt(run, operands, spec, optimistic=True)[:2]
        joined = (x.reshape(at_once * band.rows, *x.shape[2:]) for x in results)
        return tuple(
            _put_head(x, y, b, h, i[0] * band.rows) for x, y in zip(total, joined, strict=True)
        )

    rows, dtype = (shapes.B, T, shapes.N), accumulation(query.dtype)
    total = (jnp.zeros((*rows, shapes.V), dtype), jnp.zeros(rows, dtype))
    out, lse = _repeat(0, shapes.B * shapes.N * turns, body, total)
    return out[:, : shapes.T], lse[:, : shapes.T]


def _pieces(x: Array, b: Any, starts: Array, h: Any, size: int) -> Array:
    """`[n, size, H]`: runs of tokens of head (b, h) of `[B, T, N, H]`."""

    def one(start: Any) -> Array:
        return lax.dynamic_slice(x, (b, start, h, np.int32(0)), (1, size, 1, x.shape[3]))

    return jax.vmap(one)(starts).reshape(-1, size, x.shape[3])


def _forward_vmap(spec: Spec, query: Array, key: Array, value: Array, problem: _Problem) -> Any:
    """`(out [B, T, N, V], lse [B, T, N])`, all heads and blocks of queries at once."""
    shapes, (T, S) = problem.shapes, problem.padded

    def one(spec: Spec, b: Any, h: Any, q: Array, k: Array, v: Array) -> Any:
        q, k, v = _pad_to(q, T), _pad_to(k, S), _pad_to(v, S)
        over_blocks = lambda f, i: jax.vmap(f)(i)  # noqa: E731
        results = _forward_head(spec, b, h, q, k, v, problem.tiling, over_blocks)
        return tuple(x[: shapes.T] for x in results)

    return tile.over_heads(one, spec, (query,), (key, value), out_axes=(1, 1))


def _backward_loop(spec: Spec, per_head: Any, key: Array, value: Array, problem: _Problem) -> Any:
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
        part = _backward_head(picked, b, h, q, d_out, lse, delta, k, v, problem.tiling)
        d_key = _put_head(d_key, part.key.T[: shapes.S] + _head(d_key, b, kv, shapes.S), b, kv)
        grown = part.value.T[: shapes.S] + _head(d_value, b, kv, shapes.S)
        d_value = _put_head(d_value, grown, b, kv)
        params = [
            _put_param(x, y, name, b, h)
            for x, y, name in zip(params, part.params, parameter_letters(spec), strict=True)
        ]
        return params, _put_head(d_query, part.query, b, h), d_key, d_value

    total = (
        [jnp.zeros_like(leaf) for leaf in parameters(spec)],
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


def _backward_vmap(spec: Spec, per_head: Any, key: Array, value: Array, problem: _Problem) -> Any:
    """As `_backward_loop`, all heads at once; blocks of queries add to the same keys in turn."""
    shapes, (T, S) = problem.shapes, problem.padded

    def one(spec: Spec, b: Any, h: Any, *operands: Array) -> Any:
        q, d_out, lse, delta = (_pad_to(x, T) for x in operands[:4])
        k, v = (_pad_to(x, S) for x in operands[4:])
        part = _backward_head(spec, b, h, q, d_out, lse, delta, k, v, problem.tiling)
        return part.query[: shapes.T], part.key.T[: shapes.S], part.value.T[: shapes.S], part.params

    axes = (1, 1, 1, [0] * len(parameters(spec)))
    found = tile.over_heads(one, spec, per_head, (key, value), axes)
    return tile.gather_gradients(spec, key.shape[2], *found)


def _way(shapes: Shapes) -> str:
    """How heads are run, by what measured fastest.

    "whole" takes short sequences in one piece, all heads at once; "loop" runs heads one after
    another, where on a CPU one head alone fills the cores and stays in their caches; "vmap" walks
    over tiles with all heads at once.
    """
    if shapes.T * shapes.S <= _WHOLE:
        return "whole"
    return "loop" if jax.default_backend() == "cpu" else "vmap"


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
    if _way(shapes) == "whole":
        tiling = Tiling(T, S)
    problem = _Problem(shapes, tiling or choose_tiling(spec, T, S))
    spec = _padded(spec, T, S, *problem.padded)
    return _differentiable(problem, spec, query, key, value)


def _ways(problem: _Problem) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that run all heads, forward and backward."""
    match _way(problem.shapes):
        case "whole":
            options = {"optimistic": jax.default_backend() == "cpu"}
            ways = whole.forward, whole.backward
        case "loop":
            options, ways = {"problem": problem}, (_forward_loop, _backward_loop)
        case _:
            options, ways = {"problem": problem}, (_forward_vmap, _backward_vmap)
    forward, backward = (functools.partial(f, **options) for f in ways)
    return forward, backward


def _differentiable(
    problem: _Problem, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Output, LogSumExp]:
    """Attention with the derivative rule, in which only float arrays of the score take part."""
    forward, backward = map(reverse.sealed, _ways(problem))

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, *qkv: Array) -> Any:
        return forward(with_parameters(spec, params), *qkv)[:2]

    def run_forward(params: list[Array], spec: Spec, *qkv: Array) -> Any:
        out, lse, *kept = forward(with_parameters(spec, params), *qkv)
        return (out, lse), (params, spec, *qkv, out, lse, kept)

    def run_backward(residuals: Any, cotangents: Any) -> Any:
        params, spec, query, key, value, out, lse, kept = residuals
        d_out, d_lse = cotangents
        delta = jnp.sum(d_out * out, axis=-1) - d_lse
        per_head = (query, d_out, lse, delta)
        found = backward(with_parameters(spec, params), per_head, key, value, *kept)
        d_params, *d_qkv = found
        cast = [x.astype(y.dtype) for x, y in zip(d_qkv, (query, key, value), strict=True)]
        return d_params, None, *cast

    run.defvjp(run_forward, run_backward)
    query, key, value, *params = map(reverse.only, (query, key, value, *parameters(spec)))
    out, lse = run(params, spec, query, key, value)
    return out.astype(query.dtype), jnp.swapaxes(lse, 1, 2)
