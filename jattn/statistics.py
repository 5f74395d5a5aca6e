"""What the weights of attention look like, in numbers: without the T × S matrix.

`statistics` reduces each row of weights to a few numbers, `top_weights` to its greatest. Both go
over the tiles of the scores twice, the first time for the denominators of the softmax.
"""

import contextlib
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn._advised import advised
from jattn._explicit import Cuts, cuts_of, joined, left_to_xla
from jattn._types import AnyArray, Keys, LogSumExp, Queries, accumulation
from jattn.checks import check_array, check_number, check_size
from jattn.kernels.common import partition, reverse_mode
from jattn.kernels.common.questions import Question, Rows
from jattn.kernels.common.vjp import Unbuilt
from jattn.kernels.xla import statistics as tiles
from jattn.masks import Mask, Padding
from jattn.options import ScoreOptions
from jattn.spec import Shapes, Spec, check_shapes, compiled, make_spec, nan_if_overflowed, prepare


class Statistics(NamedTuple):
    """Numbers about the weights of each query and head, and of each key.

    entropy: −Σ w log w, `[*B, N, T]`, natural; 0 for one key, log S for S equal ones.
    greatest: the greatest weight, `[*B, N, T]`.
    place: where that is, int32 `[*B, N, T]`, the first of several; −1 without keys.
    distance: Σ w |q − kv| by position, `[*B, N, T]`.
    on_keys: the sum of the weights on the `keys` that were asked for, `[*B, N, T]`, or None.
    above: the sum of the weights that are above the `threshold`, `[*B, N, T]`, or None.
    received: the sum over queries of the weights on each key, `[*B, N, S]`.

    In float32 (float64). Entropy, greatest, distance and on_keys are differentiable, once and in
    reverse mode; the others are constants.
    """

    entropy: LogSumExp
    greatest: LogSumExp
    place: Int[Array, "*B N T"]
    distance: LogSumExp
    on_keys: LogSumExp | None
    above: LogSumExp | None
    received: Float[Array, "*B N S"]


@advised(ScoreOptions)
def statistics(
    query: Queries,
    key: Keys,
    *,
    keys: Mask | Bool[AnyArray, "*B S"] | None = None,
    threshold: float | None = None,
    **options: Unpack[ScoreOptions],
) -> Statistics:
    """Entropy, greatest weight, expected distance and more of the weights of attention.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        keys: which keys to add up the weights of: bool `[*B, S]`, such as `jnp.arange(S) == 0` for
            the first token, or a mask, such as `masks.Segments(ids)` for each query's own segment.
        threshold: in [0, 1): weights above it are added up.
        options: as in `attention`.

    Returns:
        `Statistics` of the weights before any dropout. Memory is linear in T and S, forward and
        backward. For a query whose keys are all masked everything is 0.

    Raises what `attention_weights` raises.
    """
    shapes = check_shapes(query, key)
    spec = make_spec(shapes, **options)
    if threshold is not None:
        check_number("threshold", threshold)
        if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
            raise ValueError(f"threshold: expected a number in [0, 1), got {threshold!r}")
        threshold = float(threshold)
    _check_cuttable("statistics", shapes)
    asked = Question(spec, _keys(keys, spec, shapes), threshold)
    return _statistics(asked, query, key, shapes=shapes)


@advised(ScoreOptions)
def top_weights(
    query: Queries, key: Keys, n: int, **options: Unpack[ScoreOptions]
) -> tuple[Float[Array, "*B N T n"], Int[Array, "*B N T n"]]:
    """The n greatest weights of each query and head, and the places of their keys.

    `query [*B, T, N, H]`, `key [*B, S, K, H]`, n at most S; options as in `attention`.

    Returns:
        Weights `[*B, N, T, n]` in float32 (float64), greatest first, and places int32
        `[*B, N, T, n]`; where fewer keys are attended, weights 0 at place −1. Equal weights are in
        no order. Memory grows with T × n, never T × S. Constants: no derivative is taken of them.

    Raises what `attention_weights` raises, TypeError and ValueError for n.
    """
    shapes = check_shapes(query, key)
    spec = make_spec(shapes, **options)
    _check_cuttable("top_weights", shapes)
    check_size("n", n)
    if n > shapes.S:
        raise ValueError(f"n: expected at most S = {shapes.S}, got {n}")
    return _top(spec, query, key, n=int(n), shapes=shapes)


def _check_cuttable(name: str, shapes: Shapes) -> None:
    """Raises NotImplementedError in a program that is exported for any T or S."""
    if not shapes.cuttable:
        raise NotImplementedError(
            f"{name}: it cuts queries and keys into tiles, which needs numbers, and the program is "
            f"exported for any T = {shapes.T}, S = {shapes.S}; attention_weights needs none"
        )


def _keys(keys: Any, spec: Spec, shapes: Shapes) -> Spec | None:
    """The keys that are asked for, as a mask in a spec of its own."""
    if keys is None:
        return None
    if not isinstance(keys, Mask):
        wanted = (*shapes.batch, shapes.S)
        check_array("keys", keys, "[*B, S]", "boolean")
        if keys.shape not in (wanted, wanted[-1:]):
            raise ValueError(f"keys: expected [*B, S] = {list(wanted)}, got {list(keys.shape)}")
        keys = Padding(keys)
    places = {"q_positions": spec.q_positions, "kv_positions": spec.kv_positions}
    return make_spec(shapes, mask=keys, scale=1.0, **places)


def _constant(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if hasattr(x, "dtype") else x


def _cuts(asked: Question, query: Array, key: Array, **_: Any) -> Statistics:
    """How results are cut where that is part of types: as queries are, but `received` as keys."""
    cuts = Cuts.of(query)
    row: Any = cuts.by_head
    received: Any = joined((*cuts.batch, cuts.N), cuts_of(key)[-3:-2])
    found = Statistics(*[row] * 6, received=received)
    on_keys, above = asked.keys and row, None if asked.threshold is None else row
    return found._replace(on_keys=on_keys, above=above)


def _cuts_of_top(_: Spec, query: Array, *__: Any, **___: Any) -> Any:
    return (Cuts.of(query).matrix,) * 2


@compiled("shapes")
@left_to_xla(_cuts)
def _statistics(asked: Question, query: Array, key: Array, *, shapes: Shapes) -> Statistics:
    on = asked.keys and prepare(asked.keys, shapes)
    question = Question(prepare(asked.spec, shapes), on, asked.threshold)
    flat = _flat(query, key, shapes)
    if 0 in (shapes.B, shapes.T, shapes.S):
        rows, received = _of_no_pairs(question, *flat)
    else:
        rows, received = tiles.statistics(_by_platform, question, *flat)
    found = Statistics(**rows._asdict(), received=received)

    def shaped(x: Array) -> Array:
        x = x.reshape(*shapes.batch, *x.shape[1:])
        return nan_if_overflowed(asked.spec, x)[0] if x.dtype != jnp.int32 else x

    return jax.tree.map(shaped, found)


def _of_no_pairs(asked: Question, query: Array, key: Array) -> tuple[Rows, Array]:
    """The statistics where there are no queries or no keys."""
    (B, T, N, _), S, dtype = query.shape, key.shape[1], accumulation(query.dtype)
    row = jnp.zeros((B, N, T), dtype)
    on_keys, above = (None if x is None else row for x in (asked.keys, asked.threshold))
    rows = Rows(row, row, jnp.full((B, N, T), -1, jnp.int32), row, on_keys, above)
    return reverse_mode.varied_like((rows, jnp.zeros((B, N, S), dtype)), (asked, query, key))


def _by_platform(asked: Question, query: Array, key: Array) -> Any:
    """What is asked, by what the platform has that the program is lowered for."""
    like = jax.eval_shape(tiles.by_tiles, asked, query, key)
    dims = (*[partition.BY_HEAD] * len(jax.tree.leaves(like[0])), partition.RECEIVED)
    return tiles.by_share(_on_platform, like, dims, asked, query, key)


def _on_platform(platform: str, asked: Question, query: Array, key: Array) -> Any:
    if platform == "cpu":
        from jattn.kernels.cpu import statistics as native  # noqa: PLC0415  as in `registry`

        with contextlib.suppress(Unbuilt):
            if not native.unsupported(asked, Shapes.of(query, key)):
                return native.statistics(asked, query, key)
    return tiles.by_tiles(asked, query, key)


@compiled("n", "shapes")
@left_to_xla(_cuts_of_top)
def _top(spec: Spec, query: Array, key: Array, *, n: int, shapes: Shapes) -> tuple[Array, Array]:
    query, key = _flat(*jax.lax.stop_gradient((query, key)), shapes)
    params = jax.tree.map(_constant, prepare(spec, shapes))
    if 0 in (shapes.B, shapes.T):
        size = (shapes.B, shapes.N, shapes.T, n)
        top = jnp.zeros(size, accumulation(query.dtype)), jnp.zeros(size, jnp.int32)
    else:
        top = tiles.top(params, query, key, n)
    found, places = (x.reshape(*shapes.batch, *x.shape[1:]) for x in top)
    return nan_if_overflowed(spec, found)[0], places


def _flat(query: Array, key: Array, shapes: Shapes) -> tuple[Array, Array]:
    """With one batch axis."""
    return query.reshape(shapes.B, *query.shape[-3:]), key.reshape(shapes.B, *key.shape[-3:])
