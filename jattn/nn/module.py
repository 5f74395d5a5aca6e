"""The base of the modules, and the checks of arguments that several of them make.

A module is a Flax module whose class has a signature: Flax's metaclass answers `inspect.signature`,
and so `help`, with `(*args, **kwargs)`.
"""

import inspect
from typing import Any

import jax.numpy as jnp
import yaml
from flax import nnx
from jaxtyping import Array

from jattn.checks import check_array, check_dtype, check_function, check_sizes
from jattn.masks import Mask
from jattn.normalizers import NormalizerFunction
from jattn.scores import ScoreFunction


# `nnx.tabulate` writes the arguments of all calls as YAML, which has no form for objects without
# arrays.
for _kind in (Mask, ScoreFunction, NormalizerFunction):
    yaml.SafeDumper.add_multi_representer(
        _kind, lambda dumper, value: dumper.represent_str(repr(value))
    )


class ConstructorSignature:
    """A descriptor for `__signature__`: the signature of the class's `__init__`.

    `options` is the dataclass or function whose keyword arguments `__init__` takes as `**options`;
    the signature lists them one by one, with their defaults, except for those in `hidden`.
    """

    def __init__(self, options: Any = None, hidden: tuple[str, ...] = ()):
        self.options, self.hidden = options, hidden

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")  # an instance has the signature of `__call__`
        if owner.__init__ is object.__init__:
            return inspect.Signature()
        _, *shown = inspect.signature(owner.__init__).parameters.values()
        if self.options is not None and shown and shown[-1].kind is inspect.Parameter.VAR_KEYWORD:
            del shown[-1]
            named = {parameter.name for parameter in shown}.union(self.hidden)
            options = inspect.signature(self.options).parameters.values()
            shown += [x for x in options if x.kind is x.KEYWORD_ONLY and x.name not in named]
        return inspect.Signature(shown)


class Module(nnx.Module):
    """A Flax module with a signature."""

    __signature__: Any = ConstructorSignature()


def check_module(
    rngs: Any,
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    functions: dict[str, Any] | None = None,
    **sizes: Any,
) -> None:
    """Checks the random streams, dtypes, functions and sizes with which a module is constructed."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs: expected an nnx.Rngs, got {type(rngs).__name__}")
    if dtype is not None:
        check_dtype("dtype", dtype)
    check_dtype("param_dtype", param_dtype)
    for name, function in (functions or {}).items():
        check_function(name, function)
    check_sizes(**sizes)


def check_integers(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is an integer array."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {dtype or type(x).__name__}")


def check_features(name: str, x: Array, axes: str, features: str, size: int) -> None:
    """Checks for a float array `[*B, {axes}]` whose last axis has the size of `features`."""
    if isinstance(x, Mask):
        raise TypeError(f"{name}: expected an array [*B, {axes}], got {x}; write mask={x}")
    check_array(name, x, f"[*B, {axes}]")
    if len(x.shape) < 2 or x.shape[-1] != size:
        raise ValueError(f"{name}: expected [*B, {axes}] with {features}={size}, got {x.shape}")
