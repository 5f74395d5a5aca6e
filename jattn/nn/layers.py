"""Normalisation, dropout, the feed-forward network, and the products and logical axes of layers.

Every parameter carries the logical names of its axes, from `LOGICAL_AXES`, in its `out_sharding`
metadata; `nnx.get_partition_spec` translates them to mesh axes under `nnx.logical_axis_rules`.
Parameters are not placed on a mesh when they are created, so that no mesh is needed then.

Dropout draws from the stream `dropout` of the `rngs` passed to a call. If the `rngs` passed to the
constructor have a stream of exactly this name, the module keeps a fork of it for calls without
`rngs`; it keeps no stream of another name, so that a model has random state only on request. In a
function that is differentiated, make the streams from a key: `rngs=nnx.Rngs(dropout=key)`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, Initializer
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jattn import dropout
from jattn._explicit import joined, sharding_of
from jattn._types import accumulation
from jattn.checks import check_array, check_flag, check_rate
from jattn.nn._types import RandomSource
from jattn.nn.module import ConstructorSignature, Module, check_features, check_module


LOGICAL_AXES = (
    "embed",
    "heads",
    "kv_heads",
    "head_size",
    "mlp",
    "vocabulary",
    "positions",
    "alignment",
    "state",
)

LECUN = nnx.initializers.lecun_normal()
GLOROT = nnx.initializers.xavier_uniform()
ZEROS = nnx.initializers.zeros_init()

_Arrays = TypeVar("_Arrays", bound=tuple)
_Linear = TypeVar("_Linear", bound=nnx.Module)


def sharded(*names: str | None) -> dict[str, Any]:
    """Returns the metadata of a parameter by its logical names; axes named None are not sharded."""
    return {"out_sharding": names, "eager_sharding": False}


def promote(args: _Arrays, /, *, dtype: Dtype | None = None, inexact: bool = True) -> _Arrays:
    """Converts arrays to `dtype`, by default to their common dtype by JAX's promotion; None stays
    None.

    Flax's own function obeys `jax_numpy_dtype_promotion="strict"`, which rejects bfloat16 inputs
    with float32 parameters.
    """
    if dtype is None:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(*(array for array in args if array is not None))
    cast: Any = tuple(None if array is None else jnp.asarray(array, dtype) for array in args)
    return cast


def product(
    inputs: Array,
    kernel: Array,
    dimension_numbers: Any,
    *,
    out_sharding: Any = None,
    **options: Any,
) -> Array:
    """`lax.dot_general` of the last axes of `inputs` with the first ones of `kernel`.

    On a CPU the axes of rows are merged into one: the kernel's gradient sums over them, and for
    several axes XLA would transpose an operand first, which takes longer than the product. Axes
    that are explicitly sharded over devices are not merged.
    """
    (contracted, _), (batch, _) = dimension_numbers
    inner = len(contracted)
    rows, columns = inputs.shape[: inputs.ndim - inner], kernel.shape[inner:]
    keep_axes = jax.default_backend() != "cpu" or out_sharding is not None or batch or not rows
    if keep_axes or _is_sharded(inputs) or _is_sharded(kernel):
        mesh = jax.typeof(inputs).sharding.mesh
        if out_sharding is None and not batch and mesh.explicit_axes:
            spec = joined(sharding_of(inputs)[: len(rows)], sharding_of(kernel)[inner:])
            out_sharding = NamedSharding(mesh, spec)
        options["out_sharding"] = out_sharding
        return lax.dot_general(inputs, kernel, dimension_numbers, **options)
    size = math.prod(kernel.shape[:inner])
    left = inputs.reshape(math.prod(rows), size)
    right = kernel.reshape(size, math.prod(columns))
    out = lax.dot_general(left, right, (((1,), (0,)), ((), ())), **options)
    return out.reshape(*rows, *columns)


def _is_sharded(x: Array) -> bool:
    """Returns whether the type of an array says that it is sharded over devices."""
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def linear(
    kind: Callable[..., _Linear], inputs: Any, outputs: Any, axes: tuple[Any, ...], **options: Any
) -> _Linear:
    """Makes a linear map of a class of Flax; `axes` are the logical names of its kernel's axes."""
    return kind(
        inputs,
        outputs,
        promote_dtype=promote,
        dot_general=product,
        kernel_metadata=sharded(*axes),
        bias_metadata=sharded(*axes[-np.size(outputs) :]),
        **options,
    )


# Arguments of Flax's constructors that the classes below pass themselves.
_OWN_ARGUMENTS = ("promote_dtype", "bias_metadata", "scale_metadata")


class _RMSNormOptions(TypedDict, total=False):
    """The options of `flax.nnx.RMSNorm`, except for `_OWN_ARGUMENTS`."""

    epsilon: float
    dtype: Dtype | None
    param_dtype: Dtype
    use_scale: bool
    scale_init: Initializer
    reduction_axes: int | Sequence[int]
    feature_axes: int | Sequence[int]
    axis_name: str | None
    axis_index_groups: Any
    use_fast_variance: bool


class _LayerNormOptions(_RMSNormOptions, total=False):
    """The options of `flax.nnx.LayerNorm`, except for `_OWN_ARGUMENTS`."""

    use_bias: bool
    bias_init: Initializer


class LayerNorm(nnx.LayerNorm):
    """Flax's layer normalisation over the last axis, also under strict dtype promotion.

    `axis` is the logical name of the axis; the other arguments are those of `flax.nnx.LayerNorm`.

    >>> print(nn.LayerNorm(4, rngs=nnx.Rngs(0))(jnp.array([1.0, 1.0, 3.0, 3.0])).round(2))
    [-1. -1.  1.  1.]
    """

    __signature__: Any = ConstructorSignature(nnx.LayerNorm.__init__, _OWN_ARGUMENTS)

    def __init__(
        self,
        num_features: int,
        *,
        axis: str = "embed",
        rngs: nnx.Rngs,
        **options: Unpack[_LayerNormOptions],
    ):
        check_module(rngs, num_features=num_features)
        arguments = {"promote_dtype": promote, "bias_metadata": sharded(axis), "rngs": rngs}
        super().__init__(num_features, scale_metadata=sharded(axis), **arguments, **options)

    def __call__(
        self, x: Float[Array, "... D"], *, mask: Array | None = None
    ) -> Float[Array, "... D"]:
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask)


def _promote_and_add_one(
    args: _Arrays, /, *, dtype: Dtype | None = None, inexact: bool = True
) -> _Arrays:
    """`promote` of an input and a scale; returns 1 + scale, in no less than float32."""
    x, scale = promote(args, dtype=dtype)
    one_more: Any = (x, None if scale is None else 1 + scale.astype(accumulation(scale.dtype)))
    return one_more


class RMSNorm(nnx.RMSNorm):
    """Flax's root mean square normalisation over the last axis, also under strict promotion.

    `axis` is the logical name of the axis. With `zero_centered=True` the scale is 1 + the parameter
    `scale`, which is initially 0, as in Gemma. The other arguments are those of
    `flax.nnx.RMSNorm`.

    >>> print(nn.RMSNorm(4, rngs=nnx.Rngs(0))(jnp.array([0.0, 0.0, 0.0, 4.0])).round(2))
    [0. 0. 0. 2.]
    """

    __signature__: Any = ConstructorSignature(nnx.RMSNorm.__init__, _OWN_ARGUMENTS)

    def __init__(
        self,
        num_features: int,
        *,
        axis: str | None = "embed",
        zero_centered: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[_RMSNormOptions],
    ):
        check_module(rngs, num_features=num_features)
        check_flag("zero_centered", zero_centered)
        self.zero_centered = zero_centered
        if zero_centered:
            options = {"scale_init": ZEROS, **options}
        promotion = _promote_and_add_one if zero_centered else promote
        arguments = {"promote_dtype": promotion, "scale_metadata": sharded(axis), "rngs": rngs}
        super().__init__(num_features, **arguments, **options)

    def __call__(
        self, x: Float[Array, "... D"], mask: Array | None = None
    ) -> Float[Array, "... D"]:
        scale = None if self.scale is None else self.scale[...]
        dtype = promote((x, scale), dtype=self.dtype)[0].dtype
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask).astype(dtype)


class Dropout(nnx.Dropout):
    """Flax's dropout with the hash of `jattn.dropout.keep` in place of JAX's random bits.

    JAX's random bits would take as long to compute as the layers themselves. `key` draws the keys
    of attention's dropout.

    Raises ValueError for a rate outside [0, 1), and in a call that needs random numbers and has no
    stream of them.

    >>> print(nn.Dropout(0.5, rngs=nnx.Rngs(dropout=0))(jnp.ones(8)))
    [2. 0. 2. 2. 0. 0. 0. 2.]
    """

    __signature__: Any = ConstructorSignature()

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        check_rate("dropout_rate", rate)
        check_module(rngs)
        super().__init__(rate, rngs=rngs["dropout"] if rate > 0 and "dropout" in rngs else None)

    def key(self, deterministic: bool | None, rngs: RandomSource) -> Any:
        """Returns the next key of the stream, or None if nothing is dropped."""
        check_flag("deterministic", deterministic, or_none=True)
        if rngs is not None and not isinstance(rngs, nnx.Rngs | nnx.RngStream):
            raise TypeError(f"rngs: expected an nnx.Rngs or None, got {type(rngs).__name__}")
        if self.rate == 0.0 or (self.deterministic if deterministic is None else deterministic):
            return None
        source = self.rngs if rngs is None else rngs
        got = "none (at construction, nnx.Rngs(0) has no stream `dropout`)"
        if isinstance(source, nnx.Rngs):
            got = f"streams {list(source)}"
            source = source["dropout"] if {"dropout", "default"} & set(source) else None
        if source is None:
            raise ValueError(
                f"rngs: dropout at rate {self.rate} needs random numbers; expected "
                "rngs=nnx.Rngs(dropout=...) in the call or at construction, or "
                f"deterministic=True, got {got}"
            )
        return source()

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs: Float[Array, "*shape"],
        *,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*shape"]:
        check_array("inputs", inputs, "[...]", ndim=1)
        key = self.key(deterministic, rngs)
        if key is None:
            return inputs
        rows, columns = math.prod(inputs.shape[:-1]), inputs.shape[-1]
        indices = jnp.arange(rows, dtype=jnp.int32), jnp.arange(columns, dtype=jnp.int32)
        is_kept = dropout.keep(key, self.rate, 0, 0, *indices).reshape(inputs.shape)
        return jnp.where(is_kept, inputs / (1 - self.rate), 0).astype(inputs.dtype)


def relu(x: Array) -> Array:
    """Returns `nnx.relu(x)`; a module that has this function can be pickled."""
    return nnx.relu(x)


class FeedForward(Module):
    """Two linear layers with an activation in between, applied to each position alone.

    Computes `out(activation(hidden(x)))` of `x [*B, T, D]`, of the same shape. With `gated=True` it
    computes `out(activation(gate(x)) * hidden(x))` (Shazeer 2020), which is SwiGLU with `nnx.silu`
    and GeGLU with `nnx.gelu`. The argument `hidden` is the width of the layer `hidden`; dropout
    acts on the input of `out`.

    >>> swiglu = nn.FeedForward(8, 16, activation=nnx.silu, gated=True, rngs=nnx.Rngs(0))
    >>> swiglu(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: Callable[[Array], Array] = relu,
        gated: bool = False,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        kernel_init: Initializer = GLOROT,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        functions = {"activation": activation, "kernel_init": kernel_init}
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        check_module(rngs, functions=functions, features=features, hidden=hidden, **dtypes)
        check_flag("gated", gated)
        check_flag("use_bias", use_bias)
        self.features = features
        options = {"use_bias": use_bias, "kernel_init": kernel_init, "rngs": rngs, **dtypes}
        make = functools.partial(linear, nnx.Linear, **options)
        self.hidden = make(features, hidden, ("embed", "mlp"))
        self.out = make(hidden, features, ("mlp", "embed"))
        self.gate = make(features, hidden, ("embed", "mlp")) if gated else None
        self.activation = activation
        self.dropout = Dropout(dropout_rate, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        deterministic: bool | None = None,
        rngs: RandomSource = None,
    ) -> Float[Array, "*B T D"]:
        check_features("x", x, "T, D", "features", self.features)
        hidden = self.hidden(x)
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(self.gate(x)) * hidden
        return self.out(self.dropout(hidden, deterministic=deterministic, rngs=rngs))
