"""Conversion of integer arguments to int32, the dtype of positions, lengths and ids in attention.

JAX narrows integers without an error: 64-bit arrays of NumPy if 64-bit types are not enabled, and
any array in `astype`. The functions here never change what an integer means. Concrete values that
fit become int32, whatever their dtype. Of other values, ids are replaced by their ranks, as only
their equality matters, and lengths are clamped. Positions outside int32 raise an error if they are
concrete; if they are traced, a traced flag reports them, and the results of attention are then NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int


LEAST, MOST = -(2**31), 2**31 - 1


def is_known(x: Any) -> bool:
    """Returns whether an array is concrete, so that its values can be read while tracing."""
    if isinstance(x, jax.Array):
        return not isinstance(x, Tracer) and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic)


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer of Python or NumPy; booleans are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def known_range(x: Any) -> tuple[int, int] | None:
    """Returns the least and greatest value of an integer or a concrete array; None if it is empty
    or traced."""
    if not (isinstance(x, int) or is_known(x)) or not np.size(x):
        return None
    values = np.asarray(x)  # jnp's minimum would be traced
    return int(values.min()), int(values.max())


def is_narrow(x: Any) -> bool:
    """Returns whether int32 can represent every value of an array's dtype."""
    limits = jnp.iinfo(x.dtype)
    return limits.min >= LEAST and limits.max <= MOST


def fits(x: Any) -> bool:
    """Returns whether all values certainly fit int32, by the dtype or the concrete values."""
    if is_narrow(x):
        return True
    values = known_range(x)
    return is_known(x) if values is None else LEAST <= values[0] and values[1] <= MOST


def as_int32(x: Any) -> Any:
    """Casts an array whose values fit to int32; an array of NumPy stays one."""
    return x if x.dtype == np.int32 else x.astype(np.int32)


def clamped(x: Any) -> Any:
    """Clamps an integer or an array to the range of int32; arrays become int32."""
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
    """Returns lengths for `is_below`: int32 if they fit, else in a dtype that holds them.

    Raises ValueError for concrete lengths that no enabled dtype can hold.
    """
    if not hasattr(x, "astype"):
        return x
    if fits(x):
        return as_int32(x)
    if isinstance(x, jax.Array) or jax.config.read("jax_enable_x64"):
        return x
    if np.min(x) < 0:
        raise ValueError(
            f"{name}: expected lengths that fit int32 or uint32, {_outside(x)} together with "
            "negative lengths; enable 64-bit types with jax_enable_x64"
        )
    return np.minimum(x, 2**32 - 1).astype(np.uint32)


def is_below(x: Any, length: Any) -> Any:
    """Computes `x < length` for positions x; `length` is a result of `lengths` or an integer."""
    if isinstance(x, int):
        return x < length
    limits = jnp.iinfo(x.dtype)
    if isinstance(length, int):
        length = int(length)  # a subclass of int, such as a static length, has no weak type
        return x <= limits.max if length > limits.max else x < max(length, limits.min)
    if limits.bits > 32:
        return x < length.astype(x.dtype)
    below = x < clamped(length)
    return below if is_narrow(length) else below | (length > MOST)


def positions(name: str, x: Any) -> tuple[Any, Bool[Array, ""] | None]:
    """Returns positions as int32, and a traced boolean that is true if some do not fit; None in its
    place if all certainly fit.

    Raises ValueError for concrete positions that do not fit.
    """
    if not hasattr(x, "astype"):
        return x, None
    if fits(x):
        return as_int32(x), None
    if is_known(x):
        raise ValueError(
            f"{name}: expected positions that fit int32, {_outside(x)}; subtract an offset"
        )
    outside = x > MOST
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        outside = outside | (x < LEAST)
    return clamped(x), jnp.any(outside)


def wide_positions(name: str, x: Any) -> Any:
    """Returns positions as int32, or as int64 if their dtype has more bits and they are traced.

    This is for functions of positions that cannot report traced positions outside int32.

    Raises ValueError for concrete positions that do not fit int32, TypeError for traced positions
    in such a dtype if 64-bit types are not enabled.
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
    """Returns the text "got X", where X is a value outside int32."""
    least, most = known_range(x) or (0, 0)
    return f"got {most if most > MOST else least}"


def ids(name: str, q: Any, kv: Any) -> tuple[Any, Any]:
    """Returns the ids of queries `[*B, T]` and of keys `[*B, S]` as int32. Within a batch row, the
    new ids of a query and a key are equal if and only if the original ids are.

    Raises TypeError for traced ids without a common integer dtype.
    """
    if not (hasattr(q, "astype") and hasattr(kv, "astype")):
        return q, kv
    if fits(q) and fits(kv):
        q_ids = as_int32(q)
        return q_ids, q_ids if kv is q else as_int32(kv)
    if is_known(q) and is_known(kv):
        return _concrete_ranks(np.asarray(q), np.asarray(kv))
    dtype = np.promote_types(q.dtype, kv.dtype)
    if dtype == np.uint32:  # distinct values stay distinct as int32
        return jnp.asarray(q, dtype).astype(jnp.int32), jnp.asarray(kv, dtype).astype(jnp.int32)
    if not jnp.issubdtype(dtype, jnp.integer) or not jax.config.read("jax_enable_x64"):
        raise TypeError(
            f"{name}: expected ids of one integer dtype, got {q.dtype} and {kv.dtype}; convert "
            "them to int32"
        )
    return _ranks_unless_fit(jnp.asarray(q, dtype), jnp.asarray(kv, dtype))


def _ranks_unless_fit(q: Array, kv: Array) -> tuple[Array, Array]:
    """Returns the ids unchanged if they fit 32 bits, so that shards of one sequence stay
    comparable; otherwise their ranks, see `numbered`."""
    as_is = q.astype(jnp.int32), kv.astype(jnp.int32)
    fit = [jnp.all(x.astype(y.dtype) == y) for x, y in zip(as_is, (q, kv), strict=True)]
    q, kv = (jnp.where(fit[0] & fit[1], *x) for x in zip(as_is, numbered(q, kv), strict=True))
    return q, kv


def _concrete_ranks(q: np.ndarray, kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes `numbered` of concrete ids by NumPy, with ranks among the ids of all rows."""
    common = np.promote_types(q.dtype, kv.dtype)
    # NumPy promotes int64 and uint64 to float64, which rounds; Python's integers are exact.
    exact = common if np.issubdtype(common, np.integer) else np.dtype(object)
    all_ids = np.concatenate([x.astype(exact).ravel() for x in (q, kv)])
    ranks = np.unique(all_ids, return_inverse=True)[1].reshape(-1).astype(np.int32)
    return ranks[: q.size].reshape(q.shape), ranks[q.size :].reshape(kv.shape)


def numbered(
    q: Int[Array, "... t"], kv: Int[Array, "... s"]
) -> tuple[Int[Array, "... t"], Int[Array, "... s"]]:
    """Returns the rank of each id among the t + s ids of its row; equal ids have equal ranks."""
    batch = np.broadcast_shapes(q.shape[:-1], kv.shape[:-1])
    rows = jnp.concatenate([jnp.broadcast_to(x, (*batch, x.shape[-1])) for x in (q, kv)], axis=-1)
    rank = jnp.vectorize(lambda row: jnp.searchsorted(jnp.sort(row), row), signature="(n)->(n)")
    ranks = rank(rows).astype(jnp.int32)
    return ranks[..., : q.shape[-1]], ranks[..., q.shape[-1] :]
