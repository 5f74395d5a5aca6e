"""Types of arguments that several modules take."""

from typing import Any, TypedDict

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


class RunOptions(TypedDict, total=False):
    """The options of every call of a module."""

    deterministic: bool | None  # True: no dropout; None leaves it to `train()` and `eval()`
    rngs: RandomSource  # the source of dropout keys, from its stream `dropout`


class SelfOptions(RunOptions, total=False):
    """The options of calls with self-attention: its mask, and the positions of its tokens."""

    mask: MaskLike
    positions: Positions


class CrossOptions(SelfOptions, total=False):
    """The options of calls with self-attention and attention to a memory."""

    cross_mask: MaskLike
    memory_positions: Positions


class StepOptions(RunOptions, total=False):
    """The options of a step with a cache; the keys in the mask are the cache's slots."""

    mask: MaskLike
    valid: Valid
    positions: Positions  # for caches created with positions=True


class CrossStepOptions(StepOptions, total=False):
    """The options of a step with a cache and with attention to a memory."""

    cross_mask: MaskLike


class MemoryOptions(SelfOptions, total=False):
    """The options of `MultiHeadAttention.attend_memory`."""

    score: ScoreLike


class CallOptions(MemoryOptions, KeyPositions, total=False):
    """The options of a call of `MultiHeadAttention`."""


def run_options(call: Any) -> RunOptions:
    """Returns the options among those of a call that are in `RunOptions`."""
    options: Any = {name: call[name] for name in RunOptions.__annotations__ if name in call}
    return options
