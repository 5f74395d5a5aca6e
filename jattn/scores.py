"""Score functions: changes to q·kᵀ × scale before mask and softmax.

A score function maps the scores of one head, for any block of queries and keys, to scores of the
same shape. `f >> g` applies f, then g. Python floats are constants; arrays are parameters, and
gradients flow to every float array. Like masks, score functions are frozen pytrees. Their array
fields declare the names of their axes, for example `array_field("N")` for one number per head, so
that each tile gets its own slices of the arrays.
"""

import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn._named_axes import without_named_axes
from jattn._pytree import (
    HoldsTree,
    array_field,
    in_dtype,
    is_static,
    letters_by_head,
    number,
    pytree_dataclass,
    static_field,
)
from jattn._types import Index, Scores
from jattn.checks import (
    check_array,
    check_flag,
    check_not_reduced,
    check_number,
    check_operands,
    check_pytree,
    check_returned,
    check_rule,
    check_size,
    explained,
    function_name,
)
from jattn.functions.integers import is_integer
from jattn.functions.programs import TracedFunction, program_of


__all__ = [
    "Alibi",
    "Bias",
    "RelativeBias",
    "Score",
    "ScoreFunction",
    "SoftCap",
    "Temperature",
    "Then",
    "alibi_slopes",
    "relative_bucket",
]
__dir__ = __all__.copy


class ScoreFunction:
    """The base class of score functions.

    Methods of a subclass may read only its fields: a program compiled for one instance serves all
    instances with equal fields. Only the function of a `Score` may read other variables.

    >>> score = scores.SoftCap(30.0) >> (lambda score, b, h, q, kv: score - abs(q - kv))
    >>> jattn.attention(q, k, v, score=score).shape
    (2, 5, 4, 8)
    """

    def evaluate(self, score: Scores, b: Index, h: Index, rows: Any, columns: Any) -> Scores:
        """Maps scores `[t, s]` to scores `[t, s]`.

        The caller has replaced array fields by their slices for b, h, `rows` and `columns`.
        """
        raise NotImplementedError

    def __rshift__(self, other: Any) -> "ScoreFunction":
        if not (isinstance(other, ScoreFunction) or _is_function(other)):
            return NotImplemented
        return Then(self, as_score(other))

    def __rrshift__(self, other: Any) -> "ScoreFunction":
        return Then(as_score(other), self) if _is_function(other) else NotImplemented

    def __bool__(self) -> bool:
        raise TypeError(
            "a score function is neither true nor false: to apply f, then g, write `f >> g`; to "
            "test whether a score function was passed, write `score is None`"
        )


@pytree_dataclass
class Then(ScoreFunction):
    """The composition of two score functions: `first`, then `second`.

    >>> scores.Temperature(2.0) >> scores.SoftCap(30.0)
    Then(first=Temperature(t=2.0), second=SoftCap(cap=30.0))
    """

    first: ScoreFunction
    second: ScoreFunction

    def evaluate(self, score, b, h, rows, columns):
        score = self.first.evaluate(score, b, h, rows, columns)
        return self.second.evaluate(score, b, h, rows, columns)


def in_order(score: ScoreFunction | None) -> list[ScoreFunction]:
    """Returns the score functions of nested `Then`s as a list, in the order of application."""
    if isinstance(score, Then):
        return in_order(score.first) + in_order(score.second)
    return [] if score is None else [score]


ScoreLike = Callable[[Any, Any, Any, Any, Any], Any] | ScoreFunction | HoldsTree | None
"""Values accepted as `score`; see `as_score`."""


def as_score(value: Any, argument: str = "score") -> Any:
    """Converts the value of an argument to a score function.

    Score functions and None are returned unchanged; a function becomes a `Score`. The attribute
    `layer.score` of a layer of `jattn.nn`, an NNX module that wraps the layer's score function,
    becomes this score function. Raises TypeError for anything else.
    """
    may_be_module = not isinstance(value, ScoreFunction | types.FunctionType | None)
    if may_be_module and isinstance(value, HoldsTree):
        value = value.held_tree()
    if value is None:
        return None
    if isinstance(value, ScoreFunction):
        check_pytree(argument, value)
        return value
    if _is_function(value):
        return Score(value)
    expected = "expected a jattn score function, a function (score, b, h, q_idx, kv_idx) or None"
    raise TypeError(f"{argument}: {expected}, got {_described(value)}")


def _described(value: Any) -> str:
    """Describes a value that is not a score function, and says what to write instead."""
    if isinstance(value, type) and issubclass(value, ScoreFunction):
        return f"the class {value.__name__}; write scores.{value.__name__}(...)"
    kind = "an array" if hasattr(value, "shape") else type(number(value)).__name__
    return f"{kind}; write scores.Bias(array) for an array, scores.Score(function) for a function"


def _is_function(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, functools.partial | types.MethodType)


@pytree_dataclass
class SoftCap(ScoreFunction):
    """A soft cap: cap × tanh(score / cap) lies within ±cap (Gemma 2, 2024).

    `cap` is a scalar, or `[N]` with one cap for each head.

    >>> abs(jattn.attention_scores(1e6 * q, k, score=scores.SoftCap(30.0))).max().item()
    30.0
    """

    cap: Any

    def __post_init__(self):
        check_number("SoftCap: cap", self.cap, positive=True, per_head=True)

    def axis_names_by_value(self) -> dict[str, str]:
        """The axis names of `cap`: none for a scalar, `N` for one cap per head."""
        return {"cap": letters_by_head(self.cap)}

    def evaluate(self, score, b, h, rows, columns):
        cap = in_dtype(self.cap, score.dtype)
        if is_static(cap):
            # Rounding the cap to the dtype of the scores must not make it 0 or infinite.
            dtype_limits = jnp.finfo(score.dtype)
            if cap > float(dtype_limits.max):
                return score
            cap = max(cap, float(dtype_limits.tiny))
        return cap * jnp.tanh(score / cap)


@pytree_dataclass
class Temperature(ScoreFunction):
    """A temperature, score / t: above 1 flattens the softmax, below 1 sharpens it.

    `t` is a scalar, or `[N]` with one temperature for each head.

    >>> print(jattn.attention_weights(q, k, score=scores.Temperature(1e3))[0, 0, 0].round(2))
    [0.14 0.14 0.14 0.14 0.14 0.14 0.14]
    """

    t: Any

    def __post_init__(self):
        check_number("Temperature: t", self.t, positive=True, per_head=True)

    def axis_names_by_value(self) -> dict[str, str]:
        """The axis names of `t`: none for a scalar, `N` for one temperature per head."""
        return {"t": letters_by_head(self.t)}

    def evaluate(self, score, b, h, rows, columns):
        return score / in_dtype(self.t, score.dtype)


def alibi_slopes(num_heads: int) -> Float[Array, " N"]:
    """Returns the slopes of Press et al. 2022: 2^(−8 n / N) for n = 1..N, float32 `[N]`.

    If N is not a power of two, the slopes of the next lower power are followed by every other slope
    of the next higher power, as in the paper's code.

    >>> scores.alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    check_size("num_heads", num_heads)
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    slopes += [2 ** (-4 * n / power) for n in range(1, 2 * (num_heads - power), 2)]
    return jnp.asarray(slopes, jnp.float32)


def distance(rows: Any, columns: Any, dtype: Any) -> Float[Array, "t s"]:
    """Computes |q − kv| for the positions of two spans."""
    q, kv = rows.positions[:, None], columns.positions[None, :]
    if rows.has_default_positions and columns.has_default_positions:
        return jnp.abs((q - kv).astype(dtype))
    difference = jnp.maximum(q, kv) - jnp.minimum(q, kv)
    # A distance of int32 positions may need 33 bits. After an overflow it is 2³² too small.
    correction = jnp.where(difference < 0, jnp.asarray(2.0**32, dtype), 0)
    return difference.astype(dtype) + correction


@pytree_dataclass
class Alibi(ScoreFunction):
    """ALiBi: score − slope[h] × |q − kv|, by position (Press et al. 2022). `slopes` is `[N]`.

    >>> alibi = scores.Alibi(scores.alibi_slopes(4))
    >>> print(jattn.attention_scores(0 * q, k, score=alibi)[0, 0, 2])
    [-0.5  -0.25  0.   -0.25 -0.5  -0.75 -1.  ]
    """

    slopes: Any = array_field("N")

    def __post_init__(self):
        if isinstance(self.slopes, list | tuple):
            for slope in self.slopes:
                check_number("Alibi: slopes", slope)
            object.__setattr__(self, "slopes", jnp.asarray(self.slopes, jnp.float32))
        if is_integer(self.slopes):
            advice = f"scores.Alibi(scores.alibi_slopes({number(self.slopes)}))"
            raise TypeError(
                f"Alibi: slopes: expected a floating-point array [N], got int; write {advice}"
            )
        check_array("Alibi: slopes", self.slopes, "[N]", ndim=1)

    def evaluate(self, score, b, h, rows, columns):
        slope = in_dtype(self.slopes, score.dtype)
        return score - slope * distance(rows, columns, score.dtype)


def relative_bucket(
    distance: Int[Array, "..."], buckets: int, *, bidirectional: bool, max_distance: int
) -> Int[Array, "..."]:
    """Returns the T5 bucket of each distance kv − q.

    Small distances have buckets of their own; the width of the other buckets grows logarithmically
    up to `max_distance`, and the last one holds all greater distances.

    Raffel et al. 2020, section 2.1. If bidirectional, each direction has half of the buckets;
    otherwise all keys after the query share the first bucket.

    Raises ValueError for less than 4 buckets, 2 unless bidirectional, and for a `max_distance` that
    has a bucket of its own.

    >>> distance = jnp.array([-20, -2, -1, 0, 1, 2, 20])
    >>> print(scores.relative_bucket(distance, 8, bidirectional=True, max_distance=16))
    [3 2 1 0 5 6 7]
    """
    check_array("distance", distance, "[...]", "integer")
    check_flag("bidirectional", bidirectional)
    check_size("max_distance", max_distance)
    check_size("buckets", buckets)
    _check_buckets("relative_bucket", buckets, bidirectional, max_distance)
    offset = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = buckets * (distance > 0).astype(distance.dtype)
        distance = jnp.abs(distance)
    else:
        distance = -jnp.minimum(distance, 0)
    n_exact = buckets // 2  # distances with a bucket of their own
    log_ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / n_exact)
    # Rounding must not move the first distance of a bucket to the bucket before it.
    scale = (1 + 2**-21) * (buckets - n_exact) / math.log(max_distance / n_exact)
    steps = log_ratio * scale
    log_bucket = jnp.minimum(n_exact + steps.astype(distance.dtype), buckets - 1)
    return offset + jnp.where(distance < n_exact, distance, log_bucket)


def _check_buckets(name: str, buckets: int, bidirectional: bool, max_distance: int) -> None:
    """Raises ValueError unless distances have buckets of their own, and `max_distance` does not."""
    least = 4 if bidirectional else 2
    if buckets < least or max_distance <= buckets // least:
        raise ValueError(
            f"{name}: expected at least {least} buckets, and max_distance > buckets // {least}, "
            f"got {buckets} buckets and max_distance {max_distance}"
        )


def _difference(kv: Int[Array, "#t #s"], q: Int[Array, "#t #s"]) -> Int[Array, "t s"]:
    """Computes kv − q, clamped to the greatest integer of the dtype and its negative."""
    difference, greatest = kv - q, jnp.iinfo(kv.dtype).max
    # After an overflow the difference has the wrong sign.
    positive = jnp.where(difference > 0, difference, greatest)
    negative = jnp.where(difference < 0, jnp.maximum(difference, -greatest), -greatest)
    return jnp.where(kv == q, 0, jnp.where(kv > q, positive, negative))


@pytree_dataclass
class RelativeBias(ScoreFunction):
    """T5's learned relative bias: score + table[bucket(kv − q), h], by position.

    `table` is `[buckets, N]`; see `relative_bucket` for `bidirectional` and `max_distance`.

    >>> score = scores.RelativeBias(jnp.arange(32.0)[:, None] * jnp.ones(4))
    >>> print(jattn.attention_scores(0 * q, k, score=score)[0, 0, 2])
    [ 2.  1.  0. 17. 18. 19. 20.]
    """

    table: Any = array_field("buckets N")
    bidirectional: bool = static_field(default=True)
    max_distance: int = static_field(default=128)

    def __post_init__(self):
        check_array("RelativeBias: table", self.table, "[buckets, N]", rank=2)
        check_flag("RelativeBias: bidirectional", self.bidirectional)
        check_size("RelativeBias: max_distance", self.max_distance)
        buckets = self.table.shape[0]
        _check_buckets("RelativeBias", buckets, self.bidirectional, self.max_distance)

    def bucket(self, distance: Int[Array, "..."]) -> Int[Array, "..."]:
        """Returns the bucket of each distance kv − q."""
        return relative_bucket(
            distance,
            self.table.shape[0],
            bidirectional=self.bidirectional,
            max_distance=self.max_distance,
        )

    def evaluate(self, score, b, h, rows, columns):
        table = in_dtype(self.table, score.dtype)
        if rows.has_default_positions and columns.has_default_positions and score.size:
            return self._along_diagonals(score, table, rows.positions, columns.positions)
        distance = _difference(columns.positions[None, :], rows.positions[:, None])
        return score + table[self.bucket(distance)]

    def _along_diagonals(self, score: Scores, table: Array, q: Array, kv: Array) -> Scores:
        """Looks up the table once per diagonal, on which kv − q is constant.

        This is faster than one look-up per score. If all distances have one bucket, as in tiles far
        from the diagonal, the value of this bucket is added to all scores.
        """
        distance = kv[0] - q[-1] + jnp.arange(sum(score.shape) - 1, dtype=kv.dtype)
        bucket = self.bucket(distance)
        values = table[bucket]
        # On each side of distance 0 buckets are monotonic: if first and last are equal, all are.
        is_one_bucket = bucket[0] == bucket[-1]
        add_diagonals = lambda score, values: score + _toeplitz(values, *score.shape)  # noqa: E731
        return jax.lax.cond(
            is_one_bucket, lambda score, values: score + values[0], add_diagonals, score, values
        )


def _toeplitz(values: Float[Array, " d"], t: int, s: int) -> Scores:
    """Returns the Toeplitz matrix `[t, s]` with values[j − i + t − 1] at (i, j).

    The d = t + s − 1 values, padded to t + s, are repeated t times and split into rows of
    t + s − 1. As that is one less than the period, each row begins one value earlier than the row
    above. The derivative, too, consists of slices and reshapes; that of a gather would be a slow
    scatter.
    """
    period = jnp.pad(values, (0, 1))
    repeated = jnp.broadcast_to(period, (t, t + s)).reshape(-1)[: t * (t + s - 1)]
    return repeated.reshape(t, t + s - 1)[:, t - 1 :]


@pytree_dataclass
class Bias(ScoreFunction):
    """An array `[*B, N, T, S]` of full rank to add to the scores; axes of size 1 broadcast.

    >>> jattn.attention(q, k, v, score=scores.Bias(jnp.zeros((1, 4, 5, 7)))).shape
    (2, 5, 4, 8)
    """

    array: Any = array_field("*#B #N #T #S")

    def __post_init__(self):
        check_array("Bias: array", self.array, "[*B, N, T, S]")

    def evaluate(self, score, b, h, rows, columns):
        return score + in_dtype(self.array, score.dtype)


@pytree_dataclass
class Score(ScoreFunction):
    """A score function given by a function of scalars, as in FlexAttention.

    `fn(score, b, h, q_idx, kv_idx, *operands)` gets a score, its batch row (row-major over several
    batch axes), head, query position and key position; it returns the new score. Operands are given
    whole and may be indexed; the float ones are differentiable parameters. Each call of attention
    uses the current values of other variables that the function reads, see `masks.Predicate`.
    Each new value compiles a new program: pass a number that changes from call to call, such as an
    annealed temperature, as an operand, `jnp.asarray(number)`.

    `fn` is also evaluated for masked pairs. Its scores there have no influence, but a derivative by
    an operand that is not finite makes the operand's gradient NaN: write
    `jnp.log1p(c * jnp.maximum(q_idx - kv_idx, 0))` rather than `jnp.log1p(c * (q_idx - kv_idx))`.

    Custom derivative rules are used. If the rule of a `custom_vjp` function is not linear in the
    cotangent, such as one that clips gradients, apply the function to a whole operand,
    `clip(table)[h]`, or to the score. Gradients of `clip(table[h])` raise NotImplementedError: the
    rule would get cotangents summed over one tile, not over all pairs.

    >>> nearby = scores.Score(lambda score, b, h, q, kv: score - abs(q - kv) / 2)
    >>> print(jattn.attention_scores(0 * q, k, score=nearby)[0, 0, 2])
    [-1.  -0.5  0.  -0.5 -1.  -1.5 -2. ]
    """

    fn: Callable[..., Any] = static_field()
    operands: tuple[Any, ...] = ()

    owner = "score"  # in errors about the function
    arguments = ("score", "b", "h", "q_idx", "kv_idx")

    def __init__(self, fn: Callable[..., Any], *operands: Any):
        check_rule(self.owner, fn, self.arguments, operands)
        check_operands("Score", operands)
        vars(self).update(fn=fn, operands=operands)

    def traced(self, dtype: Any) -> "Score":
        """Returns this score function with `fn` traced for scores of a dtype.

        The traced function keeps the present values of other variables that `fn` reads.

        Raises:
            TypeError: the function does not return a float scalar, or sums or otherwise reduces
                the score.
        """
        if isinstance(self.fn, TracedFunction):
            return self
        cast = jax.tree.map(lambda x: in_dtype(x, dtype), self.operands)
        examples = self._examples(dtype)
        with explained(self.owner, self.fn):
            axisless_fn = without_named_axes(self.owner, self.fn, *examples, *cast)
        if axisless_fn is not self.fn:  # the function reads a named axis, as in `shard_map`
            return type(self)(axisless_fn, *self.operands).traced(dtype)
        name, n_own = function_name(self.fn), len(cast)
        fn, operands = program_of(name, self.fn, self._scalar, cast, *examples)
        check_not_reduced(self.owner, fn)
        traced = object.__new__(type(self))  # the arguments of the function were already checked
        # After the user's own operands, `program_of` returns those that tracing has added.
        vars(traced).update(fn=fn, operands=(*self.operands, *operands[n_own:]))
        return traced

    def _scalar(self, score: Any, *arguments: Any) -> Any:
        """Calls `fn` with its arguments and its operands, by default those of this instance."""
        if len(arguments) < len(self.arguments):
            arguments = *arguments, *self.operands
        with explained(self.owner, self.fn):
            new_score = self.fn(score, *arguments)
        return check_returned(self.owner, self.fn, new_score, "floating-point").astype(score.dtype)

    def _examples(self, dtype: Any) -> tuple[Any, ...]:
        """Returns abstract arguments: a score, a batch row, a head, a query and a key."""
        return tuple(jax.ShapeDtypeStruct((), x) for x in (dtype, *[jnp.int32] * 4))

    def evaluate(self, score, b, h, rows, columns):
        over_keys = jax.vmap(self._scalar, (0, None, None, None, 0))
        over_pairs = jax.vmap(over_keys, (0, None, None, 0, None))
        b, h = jnp.asarray(b, jnp.int32), jnp.asarray(h, jnp.int32)
        return over_pairs(score, b, h, rows.positions, columns.positions)
