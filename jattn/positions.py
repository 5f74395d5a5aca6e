"""Positions: sinusoidal encodings, rotary embeddings and learned tables.

`Linear`, `NTK` and `Yarn` scale rotary frequencies, so that a model trained on L positions can be
used with `factor` · L positions.

Angles are computed in float32 (float64 for float64 inputs) whatever the dtype of the values:
bfloat16 cannot tell position 256 from 257. In float32 an angle's error grows with the position,
to about 1e-2 at 10⁵.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn._explicit import joined, partitioned_by_xla, sharding_of
from jattn._types import AnyArray, accumulation
from jattn.checks import (
    check_array,
    check_choice,
    check_dtype,
    check_flag,
    check_number,
    check_size,
)
from jattn.functions import integers


__all__ = [
    "NTK",
    "Linear",
    "Yarn",
    "aligned_to_end",
    "axial_rotary",
    "learned",
    "rotary",
    "sinusoidal",
]
__dir__ = __all__.copy


def aligned_to_end(T: int, S: Any) -> Int[Array, "*B T"]:
    """Returns the `q_positions` of the last T of S tokens: S − T to S − 1, int32 `[T]`.

    Causal masks and windows are then aligned at the bottom right, as in flash-attention and
    PyTorch's `causal_lower_right`, and distances in score functions fit too. A mask alone cannot
    express this: it gets positions, but not T or S. `S` is an integer; or it is an integer array
    `[*B]`, the number of keys of each batch row, and the result is `[*B, T]`. If T > S, the first
    queries have negative positions, and `Causal` lets them attend to no key.

    Raises TypeError and ValueError for values that are not numbers of tokens.

    >>> ends = jattn.positions.aligned_to_end(2, 4)
    >>> print(masks.Causal().dense(2, 4, q_positions=ends).astype(int))
    [[1 1 1 0]
     [1 1 1 1]]
    """
    check_size("T", T, 0)
    if not hasattr(S, "shape"):
        check_size("S", S, 0)
        return jnp.arange(T, dtype=jnp.int32) + (S - T)
    check_array("S", S, "[*B]", "integer")
    least, most = integers.known_range(S) or (0, 0)
    if least < 0 or most > integers.MOST:
        raise ValueError(f"S: expected 0 <= S < 2^31, got {least if least < 0 else most}")
    ends = jnp.asarray(integers.clamped(S))[..., None]
    return ends + _with_leading_axes(jnp.arange(-T, 0, dtype=jnp.int32), len(S.shape))


def _frequencies(size: int, base: float, dtype: Any) -> Float[Array, " half"]:
    """Returns base^(−2i/size) for each pair i of `size` channels, in radians per position."""
    return jnp.asarray(base, dtype) ** (-jnp.arange(0, size, 2, dtype=dtype) / size)


def sinusoidal(
    positions: Int[AnyArray, "*shape"],
    D: int,
    *,
    base: float = 10000.0,
    style: Literal["half", "interleaved"] = "interleaved",
    dtype: Any = jnp.float32,
) -> Float[Array, "*shape D"]:
    """Encodes positions `[...]` as `[..., D]`: sin(p ω) in even channels, cos(p ω) in odd ones.

    ω of channels 2i and 2i + 1 is base^(−2i/D). Vaswani et al. 2017, section 3.5. With style "half"
    the first half of the channels are the sines and the second half the cosines, as in Marian.

    Raises ValueError for an odd D.

    >>> print(jattn.positions.sinusoidal(jnp.arange(2), 4).round(1))
    [[0.  1.  0.  1. ]
     [0.8 0.5 0.  1. ]]
    """
    check_array("positions", positions, "[...]", "real")
    check_size("D", D, 2)
    if D % 2:
        raise ValueError(f"sinusoidal: expected an even width D >= 2, got {D}")
    check_number("base", base, positive=True)
    check_choice("style", style, ("half", "interleaved"))
    check_dtype("dtype", dtype)
    compute_dtype = accumulation(dtype)
    angle = positions.astype(compute_dtype)[..., None] * _with_leading_axes(
        _frequencies(D, base, compute_dtype), positions.ndim
    )
    pairs = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-2 if style == "half" else -1)
    return pairs.reshape(*positions.shape, D).astype(dtype)


def _with_leading_axes(vector: Any, ndim: int) -> Array:
    """Adds `ndim` axes of size 1, which `jax_numpy_rank_promotion="raise"` requires."""
    return vector.reshape((1,) * ndim + vector.shape)


@dataclasses.dataclass(frozen=True)
class _Scaling:
    """The base class of scalings that have a factor and leave amplitudes unchanged."""

    factor: float

    amplitude = 1.0

    def __post_init__(self):
        _check_positive_number("factor", self.factor)


class Linear(_Scaling):
    """Position interpolation: rotary frequencies divided by `factor` (Chen et al. 2023).

    >>> print(jattn.positions.Linear(4.0).frequencies(4, 10000.0, jnp.float32))
    [0.25   0.0025]
    """

    def frequencies(self, size: int, base: float, dtype: Any) -> Float[Array, " half"]:
        """Returns the frequencies of `size` rotated channels, one for each pair."""
        return _frequencies(size, base, dtype) / self.factor


class NTK(_Scaling):
    """NTK-aware scaling: the base of rotary frequencies times factor^(r/(r−2)), for r rotated
    channels.

    The lowest frequency is divided by `factor` and the highest stays (Peng et al. 2023, section
    3.1, after a proposal of bloc97).

    >>> print(jattn.positions.NTK(4.0).frequencies(4, 10000.0, jnp.float32))
    [1.     0.0025]
    """

    def frequencies(self, size: int, base: float, dtype: Any) -> Float[Array, " half"]:
        """Returns the frequencies of `size` rotated channels, one for each pair."""
        if size == 2:
            raise ValueError("scaling: NTK expects a rotary size of at least 4, got 2")
        return _frequencies(size, base * self.factor ** (size / (size - 2)), dtype)


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN: rotary frequencies scaled by their number of turns (Peng et al. 2023).

    Args:
        factor: the divisor of slow frequencies.
        original_length: the number of positions that the model was trained on. Over these, a pair
            of channels turns `original_length` · frequency / 2π times.
        slow, fast: the frequencies of pairs with at most `slow` turns are divided by `factor`, with
            at least `fast` turns they are unchanged, and in between both are mixed linearly.
        ramp: the variable in which the mixture is linear: the number of "turns", as in the paper's
            section 3.2, or the index of the "pair", as in the paper's code and its models.
        amplitude: a factor by which rotated queries and keys are multiplied; by default the paper's
            0.1 · ln(factor) + 1 (section 3.4).
        truncate: whether the ends of the ramp by "pair" are rounded to whole pairs, as in the
            paper's code.

    Llama 3.1 uses ramp "turns", factor 8, slow 1, fast 4 and amplitude 1.

    Raises ValueError if `slow` is not below `fast`, and for numbers that are not positive.

    >>> yarn = jattn.positions.Yarn(4.0, original_length=1024)
    >>> print(yarn.frequencies(8, 10000.0, jnp.float32))
    [1.000000e+00 6.201000e-02 2.652358e-03 2.500000e-04]
    """

    factor: float
    original_length: int
    slow: float = 1.0
    fast: float = 32.0
    ramp: Literal["turns", "pair"] = "turns"
    amplitude: float | None = None
    truncate: bool = True

    def __post_init__(self):
        check_size("original_length", self.original_length)
        check_flag("truncate", self.truncate)
        for name in ("factor", "slow", "fast"):
            _check_positive_number(name, getattr(self, name))
        if not self.slow < self.fast:
            raise ValueError(f"slow: expected slow < fast = {self.fast}, got {self.slow}")
        check_choice("ramp", self.ramp, ("turns", "pair"))
        if self.amplitude is None:
            object.__setattr__(self, "amplitude", 0.1 * math.log(self.factor) + 1.0)
        _check_positive_number("amplitude", self.amplitude)

    def frequencies(self, size: int, base: float, dtype: Any) -> Float[Array, " half"]:
        """Returns the frequencies of `size` rotated channels, one for each pair."""
        frequencies = _frequencies(size, base, dtype)
        share = self._unscaled_share(frequencies, size, base)
        return frequencies * (share + (1 - share) / self.factor)

    def _unscaled_share(
        self, frequencies: Float[Array, " half"], size: int, base: float
    ) -> Float[Array, " half"]:
        """Returns the weight of the unchanged frequency in each pair's mixture, from 0 to 1."""
        if self.ramp == "turns":
            turns = frequencies * (self.original_length / (2 * math.pi))
            return jnp.clip((turns - self.slow) / (self.fast - self.slow), 0, 1)
        first, last = (self._pair_with_turns(x, size, base) for x in (self.fast, self.slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)  # limits and 1e-3: of the paper's code
        pairs = jnp.arange(len(frequencies), dtype=frequencies.dtype)
        return 1 - jnp.clip((pairs - first) / max(last - first, 1e-3), 0, 1)

    def _pair_with_turns(self, turns: float, size: int, base: float) -> float:
        """Returns the index of the pair that makes this number of turns, not rounded."""
        return size * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(base))


def _check_positive_number(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless the value is a positive Python number."""
    if hasattr(value, "dtype"):
        raise TypeError(f"{name}: expected a Python number > 0, got an array")
    check_number(name, value, positive=True)


def rotary(
    x: Float[Array, "*B T N H"],
    positions: Int[AnyArray, "*P"],
    style: Literal["half", "interleaved"] = "half",
    base: float = 10000.0,
    rotary_dim: int | None = None,
    scaling: Linear | NTK | Yarn | None = None,
) -> Float[Array, "*B T N H"]:
    """Rotates channel pairs of queries or keys by position × frequency (Su et al. 2021, RoFormer).

    `x` is `[*B, T, N, H]`, `positions` `[T]` or `[*B, T]`. Pairs are (i, i + r/2) in style "half"
    (GPT-NeoX, Llama) and (2i, 2i + 1) in style "interleaved" (RoFormer, GPT-J). The first r =
    `rotary_dim` channels (default H) are rotated, the rest is unchanged. The frequency of pair i is
    base^(−2i/r), unless `scaling` changes it. The inner product of two rotated vectors depends only
    on the difference of their positions. The result has the dtype of `x`.

    Raises ValueError for an odd or too large rotary size, an unknown style, or positions that do
    not fit; TypeError for another type of `scaling`.

    >>> jattn.positions.rotary(q, jnp.arange(5)).shape
    (2, 5, 4, 8)
    """
    check_array("x", x, "[*B, T, N, H]", ndim=3)
    check_array("positions", positions, "[*B, T]", "real")
    size = x.shape[-1] if rotary_dim is None else rotary_dim
    check_size("rotary_dim", size)
    if size % 2 or size > x.shape[-1]:
        name = "x" if rotary_dim is None else "rotary_dim"
        raise ValueError(
            f"{name}: the number of rotated channels must be even, > 0 and <= H = {x.shape[-1]}, "
            f"got {size}"
        )
    check_choice("style", style, ("half", "interleaved"))
    check_number("base", base, positive=True)
    if scaling is not None and not isinstance(scaling, Linear | NTK | Yarn):
        raise TypeError(
            f"scaling: expected None, positions.Linear(...), positions.NTK(...) or "
            f"positions.Yarn(...), got {scaling!r}"
        )
    if positions.shape not in (x.shape[-3:-2], x.shape[:-2]):
        raise ValueError(
            f"rotary: expected positions [T] = [{x.shape[-3]}] or [*B, T] = "
            f"{list(x.shape[:-2])}, got shape {list(positions.shape)}"
        )
    x = jnp.asarray(x)
    compute_dtype = accumulation(x.dtype)
    scaled = _frequencies if scaling is None else scaling.frequencies
    frequencies = scaled(size, base, compute_dtype)
    angle = positions.astype(compute_dtype)[..., None] * _with_leading_axes(
        frequencies, positions.ndim
    )
    angle = angle.reshape((1,) * (x.ndim - angle.ndim - 1) + angle.shape)[..., None, :]
    amplitude: Any = 1.0 if scaling is None else scaling.amplitude
    cos, sin = jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude
    rotated = _rotate_pairs(x[..., :size].astype(compute_dtype), cos, sin, style).astype(x.dtype)
    # JAX makes no empty array on a mesh with explicit axes outside of compiled functions.
    return rotated if size == x.shape[-1] else jnp.concatenate([rotated, x[..., size:]], axis=-1)


def axial_rotary(
    x: Float[Array, "*B T N H"],
    positions: Int[AnyArray, "*P A"],
    style: Literal["half", "interleaved"] = "half",
    base: float = 10000.0,
) -> Float[Array, "*B T N H"]:
    """Applies `rotary` with several coordinates, such as the row and column of an image patch.

    `positions` is `[T, A]` or `[*B, T, A]` with A coordinates. The channels are split into A equal
    parts, and part i is rotated by coordinate i (Heo et al. 2024). The inner product of two
    rotated vectors depends only on the differences of their coordinates.

    Raises ValueError if 2 A does not divide H, and the errors of `rotary`.

    >>> rows, columns = jnp.divmod(jnp.arange(5), 3)
    >>> jattn.positions.axial_rotary(q, jnp.stack([rows, columns], axis=-1)).shape
    (2, 5, 4, 8)
    """
    check_array("x", x, "[*B, T, N, H]", ndim=3)
    check_array("positions", positions, "[*B, T, A]", "real", ndim=2)
    A, H = positions.shape[-1], x.shape[-1]
    if A < 1 or H % (2 * A):
        raise ValueError(
            f"x: expected H to be a multiple of 2 A = {2 * A} for A = {A} coordinates, got H = {H}"
        )
    parts = jnp.split(x, A, axis=-1)
    rotated = [rotary(part, positions[..., i], style, base) for i, part in enumerate(parts)]
    return jnp.concatenate(rotated, axis=-1)


def _rotate_pairs(x: Array, cos: Array, sin: Array, style: str) -> Array:
    if style == "half":
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def learned(
    table: Float[Array, "max D"], positions: Int[AnyArray, "*shape"]
) -> Float[Array, "*shape D"]:
    """Returns rows of a learned table `[max, D]`; NaN for positions outside of the table.

    >>> print(jattn.positions.learned(jnp.eye(3), jnp.array([2, 0, 3])))
    [[ 0.  0.  1.]
     [ 1.  0.  0.]
     [nan nan nan]]
    """
    check_array("table", table, "[max, D]", rank=2)
    check_array("positions", positions, "[...]", "integer")
    indices = jnp.asarray(integers.clamped(positions))
    # JAX would count negative indices from the end: they become an index beyond the table.
    indices = jnp.where(indices < 0, table.shape[0], indices)
    return _table_rows(jnp.asarray(table), indices)


@jax.jit
@partitioned_by_xla(lambda table, indices: joined(sharding_of(indices), sharding_of(table)[1:]))
def _table_rows(table: Array, indices: Array) -> Array:
    """Returns the rows of a table at these indices; NaN for indices beyond it."""
    return table.at[indices].get(mode="fill", fill_value=jnp.nan)
