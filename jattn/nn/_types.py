"""Types of arguments that several modules take."""

from typing import TypedDict

import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from jattn._types import KeyPositions
from jattn.masks import MaskLike
from jattn.scores import ScoreLike


Ids = Int[Array | np.ndarray, "..."]  # tokens or positions
Positions = Int[Array | np.ndarray, "..."] | None  # [*B, T] or, for the whole batch, [T]
RowLengths = Int[Array | np.ndarray, "*B"] | None  # None: no row has padding
Valid = Bool[Array | np.ndarray, "B T"] | None
RandomSource = nnx.Rngs | nnx.RngStream | None


class Run(TypedDict, total=False):
    """How a module is run."""

    deterministic: bool | None
    rngs: RandomSource


class MemoryOptions(Run, total=False):
    """The options of `MultiHeadAttention.attend_memory`."""

    mask: MaskLike
    score: ScoreLike
    positions: Positions


class CallOptions(MemoryOptions, KeyPositions, total=False):
    """The options of a call of `MultiHeadAttention`."""


class CacheOptions(TypedDict, total=False):
    """What the classes of `jattn.cache` are created with, each with its own."""

    chunk: int | None  # of a RollingCache
    page_size: int  # of a PagedCache
    num_pages: int | None  # of a PagedCache
