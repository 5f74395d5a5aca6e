"""Positions: sinusoidal encodings, rotary embeddings and learned tables.

Angles are computed in float32 (float64 for float64 inputs) whatever the dtype of the values:
bfloat16 cannot tell position 256 from 257. In float32 an angle's error grows with the position,
to about 1e-2 at 10⁵.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn import integers
from jattn._types import AnyArray, accumulation
from jattn.checks import check_array, check_choice, check_dtype, check_number, check_size


__all__ = ["learned", "rotary", "sinusoidal"]


def __dir__() -> list[str]:
    return __all__


def _frequencies(size: int, base: float, dtype: Any) -> Float[Array, " half"]:
    return jnp.asarray(base, dtype) ** (-jnp.arange(0, size, 2, dtype=dtype) / size)


def sinusoidal(
    positions: Int[AnyArray, "*shape"],
    D: int,
    *,
    base: float = 10000.0,
    dtype: Any = jnp.float32,
) -> Float[Array, "*shape D"]:
    """Encodings `[..., D]` of positions `[...]`: sin(p ω) in even channels, cos(p ω) in odd ones.

    ω of channels 2i and 2i + 1 is base^(−2i/D). Vaswani et al. 2017, section 3.5.

    Raises ValueError for an odd D.
    """
    check_array("positions", positions, "[...]", "real")
    check_size("D", D, 2)
    if D % 2:
        raise ValueError(f"sinusoidal: expected an even width D >= 2, got {D}")
    check_number("base", base, positive=True)
    check_dtype("dtype", dtype)
    compute = accumulation(dtype)
    angle = positions.astype(compute)[..., None] * _lift(
        _frequencies(D, base, compute), positions.ndim
    )
    pairs = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return pairs.reshape(*positions.shape, D).astype(dtype)


def _lift(vector: Float[Array, " n"], ndim: int) -> Float[Array, "..."]:
    return vector.reshape((1,) * ndim + vector.shape)


def rotary(
    x: Float[Array, "*B T N H"],
    positions: Int[AnyArray, "*P"],
    style: Literal["half", "interleaved"] = "half",
    base: float = 10000.0,
    rotary_dim: int | None = None,
) -> Float[Array, "*B T N H"]:
    """Turns channel pairs of queries or keys by position × frequency (Su et al. 2021, RoFormer).

    `x` is `[*B, T, N, H]`, `positions` `[T]` or `[*B, T]`. Pairs are (i, i + r/2) in style "half"
    (GPT-NeoX, Llama) and (2i, 2i + 1) in style "interleaved" (RoFormer, GPT-J), with r =
    `rotary_dim` (default H) channels rotated and the rest left alone; the frequency of pair i is
    base^(−2i/r). The inner product of two rotated vectors depends on the difference of their
    positions only. Keeps the dtype.

    Raises ValueError for an odd or too large rotary size, an unknown style, or positions that
    do not fit.
    """
    check_array("x", x, "[*B, T, N, H]", ndim=3)
    check_array("positions", positions, "[*B, T]", "real")
    size = x.shape[-1] if rotary_dim is None else rotary_dim
    check_size("rotary_dim", size)
    if size % 2 or size > x.shape[-1]:
        name = "x" if rotary_dim is None else "rotary_dim"
        raise ValueError(
            f"{name}: rotary size must be even, > 0 and <= H = {x.shape[-1]}, got {size}"
        )
    check_choice("style", style, ("half", "interleaved"))
    check_number("base", base, positive=True)
    if positions.shape not in (x.shape[-3:-2], x.shape[:-2]):
        raise ValueError(
            f"rotary: expected positions [T] = [{x.shape[-3]}] or [*B, T] = "
            f"{list(x.shape[:-2])}, got {list(positions.shape)}"
        )
    compute = accumulation(x.dtype)
    angle = positions.astype(compute)[..., None] * _lift(
        _frequencies(size, base, compute), positions.ndim
    )
    angle = angle.reshape((1,) * (x.ndim - angle.ndim - 1) + angle.shape)[..., None, :]
    rotated = _rotate_pairs(x[..., :size].astype(compute), jnp.cos(angle), jnp.sin(angle), style)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., size:]], axis=-1)


def _rotate_pairs(x: Array, cos: Array, sin: Array, style: str) -> Array:
    if style == "half":
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def learned(
    table: Float[Array, "max D"], positions: Int[AnyArray, "*shape"]
) -> Float[Array, "*shape D"]:
    """Rows of a learned table `[max, D]`; a position outside of it gives NaN, never another row."""
    check_array("table", table, "[max, D]")
    if len(table.shape) != 2:
        raise ValueError(f"table: expected [max, D], got {list(table.shape)}")
    check_array("positions", positions, "[...]", "integer")
    rows = jnp.asarray(integers.clamped(positions))
    wrapped = jnp.where(rows < 0, table.shape[0], rows)
    return jnp.asarray(table).at[wrapped].get(mode="fill", fill_value=jnp.nan)
