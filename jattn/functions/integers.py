"""Users' integers in the 32 bits with which everything here counts: kept exactly, or refused.

JAX narrows what does not fit without a word: NumPy's 64 bits where 64-bit types are not enabled,
and everywhere by `astype`. So each integer comes in here once, by its kind. Values that are known
and fit become int32, whatever their dtype. Others become what means the same: ids only need to be
told apart, so they are numbered; lengths end where there is nothing more to count. Positions have
no such form: known ones are refused, and traced ones are reported, for results to be NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int


LEAST, MOST = -(2**31), 2**31 - 1


def is_known(x: Any) -> bool:
    """Whether the values of an array can be looked at while tracing."""
    if isinstance(x, jax.Array):
        return not isinstance(x, Tracer) and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic)


def is_integer(value: Any) -> bool:
    """Whether it is one integer of Python or NumPy; truth values are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def known_range(x: Any) -> tuple[int, int] | None:
    """The least and greatest of an integer or an array; None for none, or where they are traced."""
    if not (isinstance(x, int) or is_known(x)) or not np.size(x):
        return None
    values = np.asarray(x)  # NumPy's, as jnp's minimum would be traced along
    return int(values.min()), int(values.max())


def is_narrow(x: Any) -> bool:
    """Whether every value of its dtype is one of int32."""
    limits = jnp.iinfo(x.dtype)
    return limits.min >= LEAST and limits.max <= MOST


def fits(x: Any) -> bool:
    """Whether all values are known to fit int32, by the dtype or by looking."""
    if is_narrow(x):
        return True
    found = known_range(x)
    return is_known(x) if found is None else LEAST <= found[0] and found[1] <= MOST


def as_int32(x: Any) -> Any:
    """An array of values that fit; NumPy's stay NumPy's."""
    return x if x.dtype == np.int32 else x.astype(np.int32)


def clamped(x: Any) -> Any:
    """The nearest values of int32, for an integer or an array."""
    if isinstance(x, int):
        return min(max(int(x), LEAST), MOST)
    if is_narrow(x):
        return as_int32(x)
    xp = jnp if isinstance(x, jax.Array) else np
    x = xp.minimum(x, MOST)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        x = xp.maximum(x, LEAST)
    return as_int32(x)


def lengths(name: str, x: Any) -> Any:
    """Lengths for `is_below`: int32 where they fit, in a wider dtype where they may not.

    Raises ValueError for known lengths that no dtype at hand can hold.
    """
    if not hasattr(x, "astype"):
        return x
    if fits(x):
        return as_int32(x)
    if isinstance(x, jax.Array) or jax.config.read("jax_enable_x64"):
        return x
    if np.min(x) < 0:
        raise ValueError(f"{name}: {_outside(x)} beside negative lengths, which needs 64 bits")
    return np.minimum(x, 2**32 - 1).astype(np.uint32)


def is_below(x: Any, length: Any) -> Any:
    """`x < length` for positions and any of `lengths`, or any Python integer."""
    if isinstance(x, int):
        return x < length
    limits = jnp.iinfo(x.dtype)
    if isinstance(length, int):
        length = int(length)  # a static one has no weak type
        return x <= limits.max if length > limits.max else x < max(length, limits.min)
    if limits.bits > 32:
        return x < length.astype(x.dtype)
    below = x < clamped(length)
    return below if is_narrow(length) else below | (length > MOST)


def positions(name: str, x: Any) -> tuple[Any, Bool[Array, ""] | None]:
    """Positions as int32, and whether some of them do not fit, where only the program can tell.

    Raises ValueError for known positions that do not fit.
    """
    if not hasattr(x, "astype"):
        return x, None
    if fits(x):
        return as_int32(x), None
    if is_known(x):
        raise ValueError(
            f"{name}: expected positions of 32 bits, {_outside(x)}; subtract an offset"
        )
    outside = x > MOST
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        outside = outside | (x < LEAST)
    return clamped(x), jnp.any(outside)


def of_formula(name: str, x: Any) -> Any:
    """Positions as int32, or, traced in a wider dtype, as int64; for formulas alone, whose results
    cannot be NaN.

    Raises ValueError and TypeError for positions that do not fit.
    """
    x = x if hasattr(x, "astype") else np.asarray(x)
    if fits(x) or is_known(x):
        return positions(name, x)[0]
    if not jax.config.read("jax_enable_x64"):
        raise TypeError(f"{name}: expected int32, got {x.dtype}")
    if x.dtype == np.uint64:
        x = jnp.minimum(x, jnp.asarray(2**63 - 1, x.dtype))
    return x.astype(jnp.int64)


def _outside(x: Any) -> str:
    """The value that does not fit."""
    least, most = known_range(x) or (0, 0)
    return f"got {most if most > MOST else least}"


def ids(name: str, q: Any, kv: Any) -> tuple[Any, Any]:
    """Ids of queries `[*B, T]` and keys `[*B, S]` as int32 that are equal where the given ones are,
    row by row.

    Raises TypeError for traced ids that no integer dtype holds together.
    """
    if not (hasattr(q, "astype") and hasattr(kv, "astype")):
        return q, kv
    if fits(q) and fits(kv):
        new = as_int32(q)
        return new, new if kv is q else as_int32(kv)
    if is_known(q) and is_known(kv):
        return _numbered_now(np.asarray(q), np.asarray(kv))
    dtype = np.promote_types(q.dtype, kv.dtype)
    if dtype == np.uint32:  # of which each has its own int32
        return jnp.asarray(q, dtype).astype(jnp.int32), jnp.asarray(kv, dtype).astype(jnp.int32)
    if not jnp.issubdtype(dtype, jnp.integer) or not jax.config.read("jax_enable_x64"):
        raise TypeError(f"{name}: expected ids of one dtype, got {q.dtype} and {kv.dtype}")
    return _numbered_if_wide(jnp.asarray(q, dtype), jnp.asarray(kv, dtype))


def _numbered_if_wide(q: Array, kv: Array) -> tuple[Array, Array]:
    """Returns the ids unchanged if they fit 32 bits, so that shards of one sequence stay
    comparable; otherwise `numbered`."""
    own = q.astype(jnp.int32), kv.astype(jnp.int32)
    fit = [jnp.all(x.astype(y.dtype) == y) for x, y in zip(own, (q, kv), strict=True)]
    q, kv = (jnp.where(fit[0] & fit[1], *x) for x in zip(own, numbered(q, kv), strict=True))
    return q, kv


def _numbered_now(q: np.ndarray, kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes `numbered` by NumPy, over all rows together."""
    common = np.promote_types(q.dtype, kv.dtype)
    exact = common if np.issubdtype(common, np.integer) else np.dtype(object)
    both = np.concatenate([x.astype(exact).ravel() for x in (q, kv)])
    places = np.unique(both, return_inverse=True)[1].reshape(-1).astype(np.int32)
    return places[: q.size].reshape(q.shape), places[q.size :].reshape(kv.shape)


def numbered(
    q: Int[Array, "... t"], kv: Int[Array, "... s"]
) -> tuple[Int[Array, "... t"], Int[Array, "... s"]]:
    """Returns the rank of each id among the ids of its row: below t + s, and equal where ids are
    equal."""
    batch = np.broadcast_shapes(q.shape[:-1], kv.shape[:-1])
    rows = jnp.concatenate([jnp.broadcast_to(x, (*batch, x.shape[-1])) for x in (q, kv)], axis=-1)
    place = jnp.vectorize(lambda row: jnp.searchsorted(jnp.sort(row), row), signature="(n)->(n)")
    found = place(rows).astype(jnp.int32)
    return found[..., : q.shape[-1]], found[..., q.shape[-1] :]
