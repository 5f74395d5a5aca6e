"""Pytrees whose array fields declare the letters of their axes.

Masks, score functions and the `Spec` are frozen dataclasses registered as pytrees with
`pytree_dataclass`. A field that holds an array declares its axes once, with `array_field`.
Batching, slicing into tiles and gradient accumulation all follow from that declaration. Python
numbers are part of the structure (static, and so known while tracing), arrays are leaves.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol, TypeVar, dataclass_transform, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jattn._explicit import evaluated, without_constants, without_mesh
from jattn._types import AnyArray, Index, Indices, Shape
from jattn.functions.programs import as_new_function


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
    """Returns the plain (weakly typed) Python number of a static one; arrays unchanged."""
    kind = int if isinstance(value, StaticInt) else float
    return kind(value) if isinstance(value, StaticInt | StaticFloat) else value


def in_dtype(value: Any, dtype: Any) -> Any:
    """Casts a float array to the dtype of scores, and returns other arrays unchanged. A Python
    number stays weakly typed."""
    is_float = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
    return value.astype(dtype) if is_float else number(value)


def is_static(value: Any) -> bool:
    """Returns whether a number is known while tracing."""
    return isinstance(value, int | float)


def array_field(letters: str, **kwargs: Any) -> Any:
    """Declares a field whose array has the axes `letters`, in jaxtyping's notation.

    `"*B T"` accepts `[*B, T]` or, shared by the whole batch, `[T]`. A `#` before a letter allows
    size 1 there and, on `*#B`, requires every batch axis: such arrays have full rank.
    """
    return dataclasses.field(metadata={"letters": letters}, **kwargs)


def split_letters(letters: str) -> list[str]:
    """Returns the letters of each axis, such as "*B" or "T", without the marks of size 1."""
    return letters.replace("#", "").split()


def axis_of(letter: str, letters: str, ndim: int) -> int | None:
    """Returns the axis with this letter, or None; the array's batch axes may be missing."""
    named = split_letters(letters)
    return ndim - len(named) + named.index(letter) if letter in named else None


def letters_by_head(value: Any) -> str:
    """Returns the letters of a parameter: a number for all heads, or one for each."""
    return "N" if len(np.shape(value)) == 1 else ""


def static_field(**kwargs: Any) -> Any:
    """Declares a hashable field that is part of the structure."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, array_field, static_field)
)
def pytree_dataclass(cls: type[_T]) -> type[_T]:
    """Makes `cls` a frozen dataclass and a pytree.

    Python numbers in ordinary fields become static. Flattening does not inspect values, so that
    trees of shapes, axes or `None` in place of arrays pass through. Two instances of one structure
    are equal, and hash alike, if their arrays are the very same objects.
    """
    check: Callable[[Any], None] = getattr(cls, "__post_init__", lambda self: None)

    def freeze(self: Any) -> None:
        for name in data:
            object.__setattr__(self, name, _as_static(getattr(self, name)))
        for name in meta:
            value = getattr(self, name)
            if isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))
        check(self)

    setattr(cls, "__post_init__", freeze)  # noqa: B010
    for name, method in _METHODS.items():
        setattr(cls, name, method)
    cls = dataclasses.dataclass(eq=False, repr=False)(cls)
    fields: Any = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    data = tuple(f.name for f in fields if not f.metadata.get("static"))
    meta = tuple(f.name for f in fields if f.metadata.get("static"))

    keys = tuple(map(jax.tree_util.GetAttrKey, data))
    children, aux_data = _values(data), _values(meta)

    def flatten(self: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return children(self), aux_data(self)

    def flatten_with_keys(self: Any) -> tuple[Any, tuple[Any, ...]]:
        return tuple(zip(keys, children(self), strict=True)), aux_data(self)

    def unflatten(aux: tuple[Any, ...], children: Any) -> Any:
        self = object.__new__(cls)
        vars(self).update(zip((*meta, *data), (*aux, *children), strict=True))
        return self

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def _values(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that returns the values of these attributes."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _identity(tree: Any) -> Hashable:
    """Returns a hashable that identifies a tree: its structure and the ids of its arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *(id(x) if isinstance(x, AnyArray) else x for x in leaves)


def node_classes(tree: Any) -> tuple[type, ...]:
    """Returns the classes of a tree's nodes, in depth-first order.

    JAX does not compare them if they are registered with `jax.tree_util.register_dataclass`:
    structures that differ in such a class only are equal.
    """

    def classes(structure: Any) -> Iterator[type]:
        if (node := structure.node_data()) is not None:
            yield node[0]
            for child in structure.children():
                yield from classes(child)

    return tuple(classes(jax.tree.structure(tree)))


def _is_equal(self: Any, other: Any) -> Any:
    if type(self) is not type(other):
        return NotImplemented
    return _identity(self) == _identity(other) and node_classes(self) == node_classes(other)


def _repr(self: Any) -> str:
    named = ((x.name, getattr(self, x.name)) for x in dataclasses.fields(self) if x.repr)
    fields = (f"{name}={_one_line(value)}" for name, value in named)
    return f"{type(self).__qualname__}({', '.join(fields)})"


def _one_line(value: Any) -> str:
    """Returns the repr of a value in one line; of an array with over 8 numbers, dtype and shape."""
    if isinstance(value, AnyArray) and value.size > 8:
        return f"{value.dtype}{list(value.shape)}"
    return " ".join(repr(value).split())


def _set_once(self: Any, name: str, value: Any) -> None:
    if name not in self.__dataclass_fields__ or name in self.__dict__:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _never_deleted(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS: dict[str, Callable[..., Any]] = {
    "__eq__": _is_equal,
    "__hash__": lambda self: hash(_identity(self)),
    "__repr__": _repr,
    "__setattr__": _set_once,
    "__delattr__": _never_deleted,
}
"""Methods of all classes: `dataclass` would compile them for each, a sixth of import time."""


def axis_names(tree: Any) -> Any:
    """Returns the tree with its letters in place of each array (`""`: captured whole).

    A class whose letters depend on the value has a method `axis_names_by_value`.
    """
    if type(tree) is tuple:
        return tuple(axis_names(item) for item in tree)
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return jax.tree.map(lambda _: "", tree)
    copy = object.__new__(type(tree))
    by_value = getattr(tree, "axis_names_by_value", dict)()
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        letters = by_value.get(field.name, field.metadata.get("letters"))
        if field.metadata.get("static"):
            pass
        elif letters is not None:
            value = jax.tree.broadcast(letters, value)
        elif isinstance(value, tuple):
            value = tuple(axis_names(item) for item in value)
        else:
            value = axis_names(value)
        object.__setattr__(copy, field.name, value)
    return copy


def leading(tree: Any) -> tuple[Shape, int]:
    """Returns the batch axes and the number of heads of the arrays of a mask or a spec."""
    batch: Shape = ()
    heads = 0
    for leaf, letters in zip(jax.tree.leaves(tree), jax.tree.leaves(axis_names(tree)), strict=True):
        named, lead = _split(letters, leaf)
        batch = jnp.broadcast_shapes(batch, leaf.shape[:lead])
        if "N" in named and leaf.shape[lead + named.index("N")] > 1:
            heads = leaf.shape[lead + named.index("N")]
    return batch, heads


def _split(letters: str, leaf: Any) -> tuple[list[str], int]:
    """Returns the letters of an array's own axes, and the number of batch axes before them."""
    names = split_letters(letters)
    inner = [x for x in names if x != "*B"]
    return inner, leaf.ndim - len(inner) if "*B" in names else 0


def flatten_batch(tree: Any, batch: Shape) -> Any:
    """Flattens the batch axes of a tree's arrays into one leading axis, of size B or 1."""

    def flattened(letters: str, leaf: Any) -> Any:
        if "B" not in letters:
            return leaf
        _, lead = _split(letters, leaf)
        own_batch, rest = leaf.shape[:lead], leaf.shape[lead:]
        if math.prod(own_batch) == 1:
            return leaf.reshape(1, *rest)
        return jnp.broadcast_to(leaf, (*batch, *rest)).reshape(math.prod(batch), *rest)

    return jax.tree.map(flattened, axis_names(tree), tree)


def select_head(tree: Any, b: Index, h: Index) -> Any:
    """Indexes away the head axis and the one batch axis, if any, of a tree's arrays, for (b, h)."""

    def selected(letters: str, leaf: Any) -> Any:
        named, lead = _split(letters, leaf)
        if lead:
            leaf = leaf[b if leaf.shape[0] != 1 else 0]
        if "N" in named:
            axis = named.index("N")
            leaf = jnp.take(leaf, h if leaf.shape[axis] > 1 else 0, axis=axis)
        return leaf

    return jax.tree.map(selected, axis_names(tree), tree)


def take_tile(tree: Any, rows: Indices, columns: Indices) -> Any:
    """Gathers the arrays along T and S of a tree, selected for one head, at these places."""

    def gathered(letters: str, leaf: Any) -> Any:
        named = [x for x in split_letters(letters) if x not in ("*B", "N")]
        for letter, places in (("T", rows), ("S", columns)):
            if letter in named and leaf.shape[named.index(letter)] > 1:
                leaf = jnp.take(leaf, places, axis=named.index(letter))
        return leaf

    return jax.tree.map(gathered, axis_names(tree), tree)


@runtime_checkable
class HoldsTree(Protocol):
    """A module whose variables are the arrays of a tree, such as the `mask` of a layer."""

    def held_tree(self) -> Any:
        """Returns the tree, with the present values of the variables."""
        ...


def closure_converted(
    function: Callable[..., Any], *arguments: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Returns `(run, arrays)` such that `run(arrays, *arguments)` equals `function(*arguments)`.

    `run` closes over no tracers, so that it may be called after the trace in which `function` was
    defined.
    """
    with without_mesh():  # `run` may be called where the mesh has other types
        program, like = jax.make_jaxpr(as_new_function(function), return_shape=True)(*arguments)
    jaxpr, structure = without_constants(program), jax.tree.structure(like)

    def run(arrays: Any, *arguments: Any) -> Any:
        leaves = evaluated(jaxpr, arrays, jax.tree.leaves(arguments))
        return jax.tree.unflatten(structure, leaves)

    return run, list(program.consts)
