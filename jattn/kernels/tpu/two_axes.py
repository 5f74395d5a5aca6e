"""Functions of tiles as Mosaic computes them on TPUs: every array has two axes.

A TPU's registers hold blocks of 8 × 128 numbers, and its compiler knows few arrays with one axis.
A function is traced for the shapes it expects, and its operations run on other arrays: of queries
`[t]` on `[t, 1]`, of keys `[s]` on `[1, s]`, and what broadcasts stays as small as it is until it
meets something larger. Arrays that a function looks up stay in memory, see `LookUp`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._types import Tree
from jattn.expressions import called_program, operation


# What is computed entry by entry, and what Mosaic knows of that on TPUs.
_ELEMENTWISE = frozenset(
    """abs add add_any and ceil clamp convert_element_type copy cos div eq erf exp exp2 expm1 floor
    ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not one_minus_square or
    pow rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt
    square stop_gradient sub tan tanh xor""".split()
)
_REDUCTIONS: Any = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
MOST_LOOKED_UP = 64  # entries among which a tile looks up one for each of its pairs


class LookUp:
    """An array `[...]` that numbers are read of: `read(place)` gives one by its row-major place."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, read: Callable[[Any], Any]):
        self.shape, self.dtype, self.read = shape, jnp.dtype(dtype), read

    def astype(self, dtype: DTypeLike) -> "LookUp":
        return LookUp(self.shape, dtype, lambda place: self.read(place).astype(dtype))

    def from_(self, start: int, shape: tuple[int, ...]) -> "LookUp":
        """A part with another shape whose entries follow one another from `start` on."""
        return LookUp(shape, self.dtype, lambda place: self.read(start + place))


def run(function: Callable[..., Any], arguments: Tree, expected: Tree) -> Tree:
    """`function(*arguments)`, traced for the types `expected`, on arrays of two axes.

    Results broadcast to what the function gives, with two axes likewise.

    Raises NotImplementedError for what cannot be computed so.
    """
    values = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, LookUp))
    program, out = jax.make_jaxpr(function, return_shape=True)(*expected)
    found = _evaluate(program.jaxpr, program.consts, values)
    return jax.tree.unflatten(jax.tree.structure(out), found)


def _evaluate(program: Any, consts: list[Array], values: list[Any]) -> list[Any]:
    if any(math.prod(jnp.shape(x)) > 1 for x in consts):
        raise NotImplementedError("a captured array")
    known = dict(zip(program.constvars, (jnp.reshape(x, ()) for x in consts), strict=True))
    known |= dict(zip(program.invars, values, strict=True))

    def read(x: Any) -> Any:
        return x.val if hasattr(x, "val") else known[x]

    for equation in program.eqns:
        found = _apply(equation, [read(x) for x in equation.invars])
        known |= dict(zip(equation.outvars, found, strict=True))
    return [read(x) for x in program.outvars]


def _apply(equation: Any, values: list[Any]) -> list[Any]:
    name, params = operation(equation), equation.params
    shapes = [x.aval.shape for x in equation.invars]
    result = equation.outvars[0].aval
    called = called_program(equation)
    if called is not None:
        return _evaluate(called.jaxpr, called.consts, values)
    if any(isinstance(x, LookUp) for x in values):
        return [_looked_up(name, values, params, result)]
    return [_computed(equation, name, values, shapes)]


def _computed(equation: Any, name: str, values: list[Any], shapes: list[Any]) -> Any:
    params, result = equation.params, equation.outvars[0].aval
    if name == "concatenate":
        return _Coordinates.joined(values)
    if any(isinstance(x, _Coordinates) for x in values):
        raise NotImplementedError(f"{name} of a vector of what differs by pair")
    if name == "broadcast_in_dim":
        return _placed(values[0], shapes[0], params["broadcast_dimensions"], result.shape)
    if name in _REDUCTIONS:
        return _reduced(_REDUCTIONS[name], values[0], shapes[0], params["axes"])
    if name in ("reshape", "squeeze", "expand_dims") and _long(shapes[0]) == _long(result.shape):
        return values[0]
    if name in _ELEMENTWISE:
        return _elementwise(equation, values)
    raise NotImplementedError(name)


def _long(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes that are not 1."""
    return tuple(size for size in shape if size != 1)


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    """x in a larger shape; booleans by way of integers, as masks of registers do not broadcast."""
    if jnp.shape(x) == shape:
        return x
    if jnp.result_type(x) == jnp.bool_:
        return jnp.broadcast_to(jnp.where(x, jnp.int32(1), jnp.int32(0)), shape) != 0
    return jnp.broadcast_to(x, shape)


def _elementwise(equation: JaxprEqn, values: list[Any]) -> Array:
    shape = jnp.broadcast_shapes(*map(jnp.shape, values))
    values = [_spread(x, shape) for x in values]
    match operation(equation):
        case "add_any":
            return functools.reduce(lax.add, values)
        case "copy" | "stop_gradient":
            return values[0]
        case "one_minus_square":
            return 1 - lax.square(values[0])
    return equation.primitive.bind(*values, **equation.params)


def _placed(x: Any, before: tuple[int, ...], axes: Any, after: tuple[int, ...]) -> Any:
    """x, whose axes become these of an array that expects the shape `after`."""
    if not jnp.shape(x) or len(_long(after)) < 2:
        return x
    wide = [axis for axis, size in enumerate(after) if size != 1]
    kept = [axis for axis, size in zip(axes, before, strict=True) if size != 1]
    if len(wide) > 2 or any(x.shape[wide.index(axis)] == 1 for axis in kept if len(kept) == 1):
        raise NotImplementedError("a transposition")
    return x


def _reduced(function: Any, x: Any, before: tuple[int, ...], axes: Any) -> Array:
    wide = [axis for axis, size in enumerate(before) if size != 1]
    if len(wide) > 2 or (len(wide) == 1 and not jnp.shape(x)):
        raise NotImplementedError("a sum over an axis")
    if len(wide) == 2:
        along = tuple(wide.index(axis) for axis in axes if axis in wide)
        return function(_spread(x, _long(before)), axis=along, keepdims=True)
    return function(x, keepdims=True) if set(wide) & set(axes) else x


class _Coordinates(tuple[Any, ...]):
    """Indices along several axes, one beside the other on a last axis."""

    @classmethod
    def joined(cls, values: list[Any]) -> "_Coordinates":
        return cls(x for one in values for x in (one if isinstance(one, cls) else (one,)))


def _looked_up(name: str, values: list[Any], params: Any, result: Any) -> Any:
    """An operation on an array that is looked up."""
    array, *others = values
    if not isinstance(array, LookUp) or any(isinstance(x, LookUp) for x in others):
        raise NotImplementedError(f"{name} of an array that is looked up")
    if name == "convert_element_type":
        return array.astype(params["new_dtype"])
    if name in ("squeeze", "reshape"):
        return array.from_(0, result.shape) if result.shape else array.read(0)
    if name == "dynamic_slice" and result.size == 1 and not any(map(jnp.shape, others)):
        place = _place(array, others)
        return array.from_(place, result.shape) if result.shape else array.read(place)
    if name == "gather":
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        every = tuple(range(len(array.shape)))
        if numbers.start_index_map == every and math.prod(sizes) == 1:
            (found,) = others
            return _gathered(array, found if isinstance(found, _Coordinates) else (found,))
    raise NotImplementedError(f"{name} of an array that is looked up")


def _place(array: LookUp, index: Any) -> Any:
    """The row-major place of an entry, held inside."""
    place = jnp.int32(0)
    for x, size in zip(index, array.shape, strict=True):
        inside = jnp.clip(jnp.asarray(x).astype(jnp.int32), 0, size - 1)
        place = place * size + inside
    return place


def _gathered(array: LookUp, index: Any) -> Any:
    """The entries at an index: read, or picked among all that there may be."""
    wide = [size for x, size in zip(index, array.shape, strict=True) if jnp.shape(x)]
    if not wide:
        return array.read(_place(array, index))
    if math.prod(wide) > MOST_LOOKED_UP:
        raise NotImplementedError(f"one of {math.prod(wide)} entries for each pair")
    flat, stride, strides = jnp.int32(0), 1, {}
    for axis in reversed(range(len(index))):
        if jnp.shape(index[axis]):
            clipped = jnp.clip(index[axis].astype(jnp.int32), 0, array.shape[axis] - 1)
            flat, strides[axis], stride = (
                flat + clipped * stride,
                stride,
                stride * array.shape[axis],
            )

    def pick(entry: Any, found: Array) -> Array:
        here = [
            lax.rem(lax.div(entry, jnp.int32(strides[axis])), jnp.int32(array.shape[axis]))
            if axis in strides
            else x
            for axis, x in enumerate(index)
        ]
        one = array.read(_place(array, here))
        return jnp.where(flat == entry, _spread(one, flat.shape), found)

    if array.dtype == jnp.bool_:  # a loop carries no masks of registers
        whole = LookUp(array.shape, jnp.int32, lambda x: jnp.where(array.read(x), 1, 0))
        return _gathered(whole, index) != 0
    zeros = jnp.zeros(flat.shape, array.dtype)
    return lax.fori_loop(jnp.int32(0), jnp.int32(stride), pick, zeros)
