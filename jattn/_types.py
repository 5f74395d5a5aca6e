"""The letters of jattn, and how a value says along which of them its arrays run.

    B  batch (any number of leading axes, also none)   H  query and key head size
    T  queries                                         V  value head size
    S  keys and values                                 D  model width
    N  query heads                                     L  layers
    K  key/value heads                                 G  group, N / K

Layout is `[*B, T, N, H]` for queries and `[*B, S, K, H]`, `[*B, S, K, V]` for keys and values.

Masks, score functions and the `Spec` are frozen dataclasses registered as pytrees with `node`.
A field that holds an array declares its letters once, with `along`; batching, slicing into
tiles and gradient accumulation all follow from that declaration. Python numbers are part of
the structure (static, and so known while tracing), arrays are leaves.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jaxtyping import Array, Bool, Float, Int


AnyArray = Array | np.ndarray

Queries = Float[Array, "*B T N H"]
Keys = Float[Array, "*B S K H"]
Values = Float[Array, "*B S K V"]
Output = Float[Array, "*B T N V"]
LogSumExp = Float[Array, "*B N T"]
Weights = Float[Array, "*B N T S"]

Scores = Float[Array, "t s"]  # one head, one tile (or everything)
Allowed = Bool[AnyArray, "#t #s"]
Indices = Int[AnyArray, "_"]

Size = Any  # an integer, or a dimension of a program that is exported for any
Shape = tuple[Size, ...]

_T = TypeVar("_T")


@jax.tree_util.register_static
class StaticInt(int):
    """An integer that is part of a pytree's structure rather than one of its leaves."""


@jax.tree_util.register_static
class StaticFloat(float):
    """A float that is part of a pytree's structure rather than one of its leaves."""


def _as_static(value: Any) -> Any:
    if type(value) is int or isinstance(value, np.integer):
        return StaticInt(value)
    if type(value) is float or isinstance(value, np.floating):
        return StaticFloat(value)
    return value


def number(value: Any) -> Any:
    """The plain (weakly typed) Python number behind a static one; arrays as they are."""
    if isinstance(value, StaticInt):
        return int(value)
    if isinstance(value, StaticFloat):
        return float(value)
    return value


def is_static(value: Any) -> bool:
    """Whether a number is known while tracing."""
    return isinstance(value, int | float)


def accumulation(dtype: Any) -> Any:
    """The dtype in which sums over these values run: float32, or float64 for float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def closure_converted(
    function: Callable[..., Any], *arguments: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """`(run, arrays)` with `run(arrays, *arguments)` as `function(*arguments)`.

    `run` closes over nothing traced, so that it may be called after the trace in which `function`
    was written.
    """
    program, like = jax.make_jaxpr(function, return_shape=True)(*arguments)
    jaxpr, structure = program.jaxpr, jax.tree.structure(like)

    def run(arrays: Any, *arguments: Any) -> Any:
        found = eval_jaxpr(jaxpr, arrays, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(structure, found)

    return run, list(program.consts)


def opened(
    function: Callable[..., Any], operands: tuple[Any, ...], *scalars: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`function(*scalars, *operands)` with the traced arrays that it closes over as more operands.

    A function that closes over none stays as it is. What is an operand can be differentiated, and
    outlives the trace in which the function was written.
    """
    run, arrays = closure_converted(function, *scalars, *operands)
    if not any(isinstance(x, Tracer) for x in arrays):
        return function, operands
    given = len(scalars) + len(operands)

    def closed(*arguments: Any) -> Any:
        return run(arguments[given:], *arguments[:given])

    # Not `functools.wraps`, which would keep the function and with it the traced arrays.
    closed.__name__ = getattr(function, "__name__", type(function).__name__)
    return closed, (*operands, *arrays)


def along(letters: str, **kwargs: Any) -> Any:
    """A field whose array runs along `letters`, in jaxtyping's notation.

    `"*B T"` takes `[*B, T]` or, shared by the whole batch, `[T]`. A `#` before a letter allows
    size 1 there and, on `*#B`, asks for every batch axis: such arrays have full rank.
    """
    return dataclasses.field(metadata={"letters": letters}, **kwargs)


def axis_along(letter: str, letters: str, ndim: int) -> int | None:
    """Which axis of an array declared along `letters` runs along one of them, if any does; batch
    axes may be missing."""
    named = letters.replace("#", "").split()
    return ndim - len(named) + named.index(letter) if letter in named else None


def static(**kwargs: Any) -> Any:
    """A hashable field that is part of the structure."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, along, static))
def node(cls: type[_T]) -> type[_T]:
    """Makes `cls` a frozen dataclass and a pytree.

    Python numbers given to ordinary fields become static. Flattening does not look at values,
    so that trees of shapes, axes or `None` in place of arrays pass through. Two of one structure
    are equal, and hash alike, if their arrays are the very same objects.
    """
    own_check: Callable[[Any], None] = getattr(cls, "__post_init__", lambda self: None)

    def freeze(self: Any) -> None:
        for name in data:
            object.__setattr__(self, name, _as_static(getattr(self, name)))
        for name in meta:
            value = getattr(self, name)
            if isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))
        own_check(self)

    setattr(cls, "__post_init__", freeze)  # noqa: B010
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields: Any = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    data = tuple(f.name for f in fields if not f.metadata.get("static"))
    meta = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(self: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in data]
        return children, tuple(getattr(self, name) for name in meta)

    def unflatten(aux: tuple[Any, ...], children: Any) -> Any:
        self = object.__new__(cls)
        for name, value in zip((*meta, *data), (*aux, *children), strict=True):
            object.__setattr__(self, name, value)
        return self

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    setattr(cls, "__eq__", _is_equal)  # noqa: B010
    setattr(cls, "__hash__", lambda self: hash(_identity(self)))  # noqa: B010
    return cls


def _identity(tree: Any) -> Hashable:
    """What tells a tree from others: its structure, and which arrays it holds."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *(id(x) if isinstance(x, AnyArray) else x for x in leaves)


def _is_equal(tree: Any, other: Any) -> Any:
    return _identity(tree) == _identity(other) if type(tree) is type(other) else NotImplemented


def declared(tree: Any) -> Any:
    """The same tree with its letters in place of each array (`""`: captured whole).

    A class whose letters depend on the value has a method `declared_letters`.
    """
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return jax.tree.map(lambda _: "", tree)
    copy = object.__new__(type(tree))
    by_value = getattr(tree, "declared_letters", dict)()
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        letters = by_value.get(field.name, field.metadata.get("letters"))
        if field.metadata.get("static"):
            pass
        elif letters is not None:
            value = jax.tree.map(lambda _, letters=letters: letters, value)
        elif isinstance(value, tuple):
            value = tuple(declared(item) for item in value)
        else:
            value = declared(value)
        object.__setattr__(copy, field.name, value)
    return copy
