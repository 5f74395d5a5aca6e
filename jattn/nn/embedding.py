"""Embeddings of tokens and positions, and the projection of vectors to logits."""

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float

from jattn.checks import (
    check_array,
    check_choice,
    check_dtype,
    check_flag,
    check_number,
    check_size,
)
from jattn.functions.integers import known_range
from jattn.nn._types import Ids, Positions
from jattn.nn.layers import promote, sharded
from jattn.nn.module import Module, check_features, check_integers, check_module
from jattn.positions import NTK, Linear, Yarn, axial_rotary, learned, rotary, sinusoidal


# The entries of a table `[rows, D]` have variance 1/D.
DEFAULT_INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)


def _table(
    axis: str,
    init: dict[str, Initializer],
    sizes: dict[str, int],
    dtype: Dtype | None,
    param_dtype: Dtype,
    rngs: nnx.Rngs,
) -> nnx.Param[Array]:
    """Makes a table `[rows, D]` of a module that computes in `dtype`.

    `init` and `sizes` map the names of the caller's arguments, for messages, to the initializer and
    to the two sizes; `axis` is the logical name of the table's first axis.
    """
    check_module(rngs, dtype=dtype, param_dtype=param_dtype, functions=init, **sizes)
    (initializer,) = init.values()
    value = initializer(rngs.params(), tuple(sizes.values()), param_dtype)
    return nnx.Param(value, **sharded(axis, "embed"))


def _check_range(name: str, indices: Ids, letters: str, size: int) -> None:
    """Raises ValueError if concrete indices are out of range; traced ones give vectors of NaN."""
    check_integers(name, indices)
    least, greatest = known_range(indices) or (0, 0)
    if least < 0 or greatest >= size:
        raise ValueError(
            f"{name}: expected 0 <= {name} < {letters}={size}, got {least} to {greatest}"
        )


def _rows(table: nnx.Param[Array], indices: Ids, dtype: Dtype | None) -> Float[Array, "... D"]:
    """Returns the rows of a table at these indices, in a dtype, by default that of the table."""
    (array,) = promote((table[...],), dtype=dtype)
    return learned(array, jnp.asarray(indices))


class TokenEmbedding(Module):
    """A table of vectors `[vocabulary, D]`, indexed by token and multiplied by √D.

    The factor (Vaswani et al. 2017, section 3.4) lets one table serve both as embedding, with
    entries of variance 1, and through `attend` as output projection, with entries of variance 1/D.
    With `scale_embeddings=False` vectors are not multiplied, as in GPT-2 and Llama. With
    `use_bias=True` the output projection has a bias `[vocabulary]`.

    >>> nn.TokenEmbedding(9, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 5), int)).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        vocabulary: int,
        features: int,
        *,
        scale_embeddings: bool = True,
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        embedding_init: Initializer = DEFAULT_INIT,
        rngs: nnx.Rngs,
    ):
        init = {"embedding_init": embedding_init}
        sizes = {"vocabulary": vocabulary, "features": features}
        check_flag("scale_embeddings", scale_embeddings)
        check_flag("use_bias", use_bias)
        self.vocabulary = vocabulary
        self.features = features
        self.scale_embeddings = scale_embeddings
        self.dtype = dtype
        self.embedding = _table("vocabulary", init, sizes, dtype, param_dtype, rngs)
        self.bias = _bias(use_bias, vocabulary, param_dtype)

    @property
    def arrays(self) -> tuple[Float[Array, "vocabulary D"], Float[Array, " vocabulary"] | None]:
        """The table, and the bias or None."""
        return self.embedding[...], None if self.bias is None else self.bias[...]

    def __call__(self, ids: Ids) -> Float[Array, "... D"]:
        """Maps ids `[*B, T]` to vectors `[*B, T, D]`.

        Raises ValueError for concrete ids outside the vocabulary; traced ones give vectors of NaN.
        """
        _check_range("ids", ids, "vocabulary", self.vocabulary)
        rows = _rows(self.embedding, ids, self.dtype)
        if not self.scale_embeddings:
            return rows
        return rows * jnp.asarray(math.sqrt(self.features), rows.dtype)

    def attend(self, x: Float[Array, "... D"]) -> Float[Array, "... vocabulary"]:
        """Returns logits `[*B, T, vocabulary]`: x times the unscaled vectors, plus the bias."""
        check_features("x", x, "T, D", "features", self.features)
        return _logits(x, *self.arrays, self.dtype)


class OutputProjection(Module):
    """A map of vectors `[*B, T, D]` to logits `[*B, T, vocabulary]`.

    The kernel is stored as `[vocabulary, D]`, like embeddings.

    >>> nn.OutputProjection(8, 9, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 9)
    """

    def __init__(
        self,
        features: int,
        vocabulary: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = DEFAULT_INIT,
        rngs: nnx.Rngs,
    ):
        sizes = {"vocabulary": vocabulary, "features": features}
        init = {"kernel_init": kernel_init}
        check_flag("use_bias", use_bias)
        self.features = features
        self.dtype = dtype
        self.kernel = _table("vocabulary", init, sizes, dtype, param_dtype, rngs)
        self.bias = _bias(use_bias, vocabulary, param_dtype)

    @property
    def arrays(self) -> tuple[Float[Array, "vocabulary D"], Float[Array, " vocabulary"] | None]:
        """The kernel, and the bias or None."""
        return self.kernel[...], None if self.bias is None else self.bias[...]

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... vocabulary"]:
        check_features("x", x, "T, D", "features", self.features)
        return _logits(x, *self.arrays, self.dtype)


def _bias(use_bias: bool, vocabulary: int, param_dtype: Dtype) -> nnx.Param[Array] | None:
    """Makes the bias of logits; None without `use_bias`."""
    if not use_bias:
        return None
    return nnx.Param(jnp.zeros((vocabulary,), param_dtype), **sharded("vocabulary"))


def _logits(
    x: Float[Array, "... D"],
    table: Float[Array, "vocabulary D"],
    bias: Float[Array, " vocabulary"] | None,
    dtype: Dtype | None,
) -> Float[Array, "... vocabulary"]:
    x, table, bias = promote((x, table, bias), dtype=dtype)
    logits = jnp.einsum("...d,vd->...v", x, table)
    return logits if bias is None else logits + bias.reshape((1,) * (logits.ndim - 1) + bias.shape)


class LearnedPositions(Module):
    """A trained vector for each of the positions 0 .. max_length - 1 (Gehring et al. 2017).

    >>> nn.LearnedPositions(16, 8, rngs=nnx.Rngs(0))(jnp.arange(5)).shape
    (5, 8)
    """

    def __init__(
        self,
        max_length: int,
        features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        embedding_init: Initializer = DEFAULT_INIT,
        rngs: nnx.Rngs,
    ):
        init = {"embedding_init": embedding_init}
        sizes = {"max_length": max_length, "features": features}
        self.max_length = max_length
        self.dtype = dtype
        self.embedding = _table("positions", init, sizes, dtype, param_dtype, rngs)

    def __call__(self, positions: Ids) -> Float[Array, "... D"]:
        """Maps positions `[*B, T]` or `[T]` to vectors, on a further axis D at the end.

        Raises ValueError for concrete positions outside 0..max_length − 1; traced ones give NaN.
        """
        _check_range("positions", positions, "max_length", self.max_length)
        return _rows(self.embedding, positions, self.dtype)


class SinusoidalPositions(Module):
    """The sines and cosines of Vaswani et al. 2017, section 3.5: no parameters, any length.

    `style` is that of `jattn.positions.sinusoidal`. `dtype` is by default that of the vectors of
    tokens to which a model adds them, and float32 without a model.

    >>> nn.SinusoidalPositions(8)(jnp.arange(5)).shape
    (5, 8)
    """

    def __init__(
        self,
        features: int,
        *,
        base: float = 10000.0,
        style: Literal["half", "interleaved"] = "interleaved",
        dtype: Dtype | None = None,
    ):
        check_size("features", features)
        check_number("base", base, positive=True)
        check_choice("style", style, ("half", "interleaved"))
        if dtype is not None:
            check_dtype("dtype", dtype)
        self.features = features
        self.base = base
        self.style: Literal["half", "interleaved"] = style
        self.dtype = dtype

    def __call__(self, positions: Ids, dtype: Dtype = jnp.float32) -> Float[Array, "... D"]:
        """Maps positions `[*B, T]` or `[T]` to vectors, on a further axis D at the end.

        `dtype` is their dtype if the module has none."""
        dtype = dtype if self.dtype is None else self.dtype
        return sinusoidal(positions, self.features, base=self.base, style=self.style, dtype=dtype)


def position_vectors(
    kind: str | SinusoidalPositions | None, max_length: int, features: int, tables: dict[str, Any]
) -> LearnedPositions | SinusoidalPositions | None:
    """Makes the module of the position vectors; `tables` are the options of `TokenEmbedding`."""
    if kind is None:
        return None
    if isinstance(kind, SinusoidalPositions):  # in a module of its own, as trees share none
        if kind.features != features:
            raise ValueError(
                f"positions: expected SinusoidalPositions({features}), got ({kind.features})"
            )
        return SinusoidalPositions(features, base=kind.base, style=kind.style, dtype=kind.dtype)
    if kind == "learned":
        return LearnedPositions(max_length, features, **tables)
    return SinusoidalPositions(features, dtype=tables["dtype"])


def embedded(
    ids: Ids,
    tokens: TokenEmbedding,
    encoding: LearnedPositions | SinusoidalPositions | None,
    positions: Positions,
) -> Float[Array, "*B T D"]:
    """Returns the vectors of ids `[*B, T]`, plus those of positions unless `encoding` is None."""
    x = tokens(ids)
    if encoding is None:
        return x
    if positions is None:
        # NumPy's arange is concrete under jit, so that a length past max_length raises.
        positions = np.arange(ids.shape[-1], dtype=np.int32)
    check_array("positions", positions, "[*B, T]", "integer")
    if positions.shape not in (ids.shape, ids.shape[-1:]):
        got = list(positions.shape)
        raise ValueError(f"positions: expected [*B, T] = {list(ids.shape)} or [T], got {got}")
    of_tokens = (x.dtype,) if isinstance(encoding, SinusoidalPositions) else ()
    return x + jnp.broadcast_to(encoding(positions, *of_tokens), x.shape)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first `size` channels of queries and keys (Su et al. 2021).

    `style` pairs channel i with i + size/2 ("half") or 2i with 2i + 1 ("interleaved"). `scaling`
    is for sequences longer than those in training.

    >>> rotary = nn.Rotary(base=500000.0)
    >>> layer = nn.MultiHeadAttention(2, 8, rotary=rotary, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    style: Literal["half", "interleaved"] = "half"
    base: float = 10000.0
    size: int | None = None
    scaling: Linear | NTK | Yarn | None = None

    def __call__(self, x: Float[Array, "*B T N H"], positions: Ids) -> Float[Array, "*B T N H"]:
        return rotary(x, positions, self.style, self.base, self.size, self.scaling)


@dataclasses.dataclass(frozen=True)
class AxialRotary:
    """Rotary position embedding by row and column, for images read line by line (Heo et al. 2024).

    Position p means row p // width and column p % width. The row rotates half of the channels, the
    column the other half.

    >>> layer = nn.MultiHeadAttention(2, 8, rotary=nn.AxialRotary(width=3), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    width: int
    style: Literal["half", "interleaved"] = "half"
    base: float = 10000.0

    def __post_init__(self):
        check_size("width", self.width)

    def __call__(self, x: Float[Array, "*B T N H"], positions: Ids) -> Float[Array, "*B T N H"]:
        check_integers("positions", positions)
        coordinates = jnp.stack([positions // self.width, positions % self.width], axis=-1)
        return axial_rotary(x, coordinates, self.style, self.base)
