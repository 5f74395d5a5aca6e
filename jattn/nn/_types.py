"""Types of arguments that several modules take."""

from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from jattn.masks import Mask


MaskLike = Mask | Bool[Array, "..."] | Callable[..., Any] | None
Ids = Int[Array | np.ndarray, "..."]  # tokens or positions
Positions = Int[Array, "..."] | None  # [*B, T] or, for the whole batch, [T]
RowLengths = Int[Array | np.ndarray, "*B"] | None  # None: no row has padding
Valid = Bool[Array | np.ndarray, "B T"] | None
RandomSource = nnx.Rngs | nnx.RngStream | None


class CacheOptions(TypedDict, total=False):
    """What the classes of `jattn.cache` are created with, each with its own."""

    chunk: int | None  # of a RollingCache
    page_size: int  # of a PagedCache
    num_pages: int | None  # of a PagedCache
