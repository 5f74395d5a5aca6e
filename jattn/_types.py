"""The letters of axes in jattn, and the array types that use them.

    B  batch (any number of leading axes, also none)   H  query and key head size
    T  queries                                         V  value head size
    S  keys and values                                 D  model width
    N  query heads                                     L  layers
    K  key/value heads                                 G  group, N / K

Layout is `[*B, T, N, H]` for queries and `[*B, S, K, H]`, `[*B, S, K, V]` for keys and values.
"""

from typing import Any, TypedDict, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


AnyArray = Array | np.ndarray
Tree = Any  # a pytree of arrays
Ref = Any  # memory that a kernel reads and writes: `x[...]`, and `x.at[...]` for a part of it

Queries = Float[Array, "*B T N H"]
Keys = Float[Array, "*B S K H"]
Values = Float[Array, "*B S K V"]
Output = Float[Array, "*B T N V"]
LogSumExp = Float[Array, "*B N T"]
Weights = Float[Array, "*B N T S"]

Scores = Float[Array, "t s"]  # one head, one tile (or everything)
Allowed = Bool[AnyArray, "#t #s"]
Indices = Int[AnyArray, "_"]


class KeyPositions(TypedDict, total=False):
    """The positions of the keys, `[S]` or `[*B, S]`; by default their places."""

    kv_positions: Int[AnyArray, "..."] | None


class Positions(KeyPositions, total=False):
    """The positions of the queries, `[T]` or `[*B, T]`, and of the keys."""

    q_positions: Int[AnyArray, "..."] | None


Size = Any  # an integer, or a dimension of a program that is exported for any
Index = Size | np.integer | Array  # an integer, which the program may compute
Shape = tuple[Size, ...]

_T = TypeVar("_T")


def accumulation(dtype: Any) -> Any:
    """Returns the dtype in which sums over these values run: float32, or float64 for float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32
