"""Checks of arguments that more than one file needs.

Each check raises TypeError for a wrong type or dtype and ValueError for a wrong value or shape. The
message names the argument, what was expected, and what was passed.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax._src.core import ShardingTypeError

from jattn._pytree import number
from jattn._torch_names import advice_for
from jattn._types import Shape
from jattn.functions.integers import MOST, is_integer, is_known, known_range


KINDS = {
    "floating-point": (jnp.floating,),
    "integer": (jnp.integer,),
    "integer or boolean": (jnp.integer, jnp.bool_),
    "boolean": (jnp.bool_,),
    "real": (jnp.floating, jnp.integer),
}


def check_array(
    name: str,
    value: Any,
    letters: str,
    kind: str = "floating-point",
    *,
    ndim: int | None = None,
    rank: int | None = None,
    shape: Shape | None = None,
) -> None:
    """Checks for an array whose dtype is of a kind of `KINDS`.

    `letters` are its axis names for messages. It needs at least `ndim` axes, exactly `rank` axes,
    or exactly the shape `shape`, if these are passed.
    """
    is_array = getattr(value, "dtype", None) is not None and hasattr(value, "shape")
    if not is_array or not any(jnp.issubdtype(value.dtype, x) for x in KINDS[kind]):
        article = "an" if kind.startswith("integer") else "a"
        raise TypeError(f"{name}: expected {article} {kind} array {letters}, got {_type(value)}")
    if isinstance(value, jax.Array) and value.dtype == jnp.float64 != canonical(value.dtype):
        raise TypeError(
            f"{name}: expected at most 32 bits while jax_enable_x64 is off, got {value.dtype}"
        )
    if shape is not None and tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected {letters} = {list(shape)}, got {list(value.shape)}")
    if rank is not None and len(value.shape) != rank:
        raise ValueError(f"{name}: expected {letters}, got {list(value.shape)}")
    if ndim is not None and len(value.shape) < ndim:
        raise ValueError(f"{name}: expected {letters}, got shape {list(value.shape)}")


def check_like(name: str, value: Any, other: Any) -> None:
    """Checks that an array has the dtype of `other`, which the message calls the query."""
    dtype, expected = canonical(value.dtype), canonical(other.dtype)
    if dtype != expected:
        raise TypeError(f"{name}: expected the query's dtype {expected}, got {dtype}; cast first")


def canonical(dtype: Any) -> Any:
    """Returns the dtype that JAX gives to a NumPy array: of 32 bits for 64 unless these are on."""
    return jax.dtypes.canonicalize_dtype(dtype)


def check_sizes(**sizes: Any) -> None:
    """Checks several sizes, see `check_size`."""
    for name, size in sizes.items():
        check_size(name, size)


def check_size(name: str, value: Any, least: int = 1) -> None:
    """Checks for an integer from `least` to the largest size of an axis, or a symbolic size."""
    if jax.export.is_symbolic_dim(value):
        return
    if not is_integer(value):
        raise TypeError(f"{name}: expected an integer >= {least}, got {_type(value)}")
    if not least <= value <= MOST:
        limit = f">= {least}" if value < least else "< 2^31"
        raise ValueError(f"{name}: expected {name} {limit}, got {shown(value)}")


def check_number(name: str, value: Any, *, positive: bool = False, per_head: bool = False) -> None:
    """Checks for a finite number or float scalar, or `[N]` if `per_head`; not traced values."""
    real = isinstance(value, int | float | np.integer) and not isinstance(value, bool)
    dtype = _dtype_of(value)
    if not real and not jnp.issubdtype(dtype, jnp.floating):
        got = shown(value) if dtype is object else dtype
        raise TypeError(f"{name}: expected a number or a float scalar, got {got}")
    if len(np.shape(value)) > per_head or 0 in np.shape(value):
        shape, wanted = list(np.shape(value)), " or [N]" if per_head else ""
        raise ValueError(f"{name}: expected a number or a scalar{wanted}, got shape {shape}")
    if not (isinstance(value, int | float) or is_known(value)):
        return
    if np.shape(value):
        for element in np.asarray(value):
            check_number(name, float(element), positive=positive)
        return
    try:
        is_finite = math.isfinite(float(value))
    except OverflowError:  # an integer beyond all floats
        is_finite = False
    if not is_finite or (positive and not float(value) > 0):
        wanted = "finite number > 0" if positive else "finite number"
        raise ValueError(f"{name}: expected a {wanted}, got {shown(number(value))}")


def check_operands(owner: str, operands: Any) -> None:
    """Checks the operands of a user's function: numbers and arrays that JAX can represent, without
    integers that it would wrap around to its default width."""
    for path, x in jax.tree_util.tree_leaves_with_path(operands):
        name = f"{owner}: operand {jax.tree_util.keystr(path)}"
        dtype = getattr(x, "dtype", None)
        if not isinstance(x, bool | int | float | complex) and (
            dtype is None or not _is_known_to_jax(dtype)
        ):
            raise TypeError(f"{name}: expected numbers or arrays, got {shown(x)}")
        if not (isinstance(x, int) or (isinstance(x, np.ndarray) and x.dtype.kind in "iu")):
            continue
        least, most = known_range(x) or (0, 0)
        bits = 64 if jax.config.read("jax_enable_x64") else 32
        if least < -(2 ** (bits - 1)) or most >= 2 ** (bits - (dtype is None or dtype.kind == "i")):
            raise ValueError(f"{name}: expected integers that fit {bits} bits, got {shown(x)}")


def _is_known_to_jax(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.extended) or any(
        jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_)
    )


def check_function(name: str, value: Any) -> None:
    """Checks for a callable."""
    if not callable(value):
        raise TypeError(f"{name}: expected a function, got {_type(value)}")


def check_pytree(name: str, value: Any) -> None:
    """Checks that the class of a mask, a score function or a normalizer is a registered pytree."""
    if jax.tree_util.all_leaves([value]):
        cls = type(value).__name__
        raise TypeError(
            f"{name}: expected a registered pytree, got {shown(value)}; decorate {cls} with "
            "jax.tree_util.register_static or, if it has arrays, jax.tree_util.register_dataclass"
        )


def check_rule(owner: str, fn: Any, wanted: tuple[str, ...], operands: tuple[Any, ...]) -> None:
    """Checks that a function, if it has a signature, takes the arguments `wanted` and operands."""
    check_function(owner, fn)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*wanted, *operands)
    except TypeError:
        and_operands = f" and {len(operands)} operands" if operands else ""
        raise TypeError(
            f"{owner}: expected a function of ({', '.join(wanted)}){and_operands}, got "
            f"{function_name(fn)}({', '.join(signature.parameters)})"
        ) from None


def function_name(fn: Any) -> str:
    """Returns the name of a function for messages."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    return getattr(fn, "__name__", type(fn).__name__)


@contextlib.contextmanager
def explained(owner: str, fn: Any) -> Iterator[None]:
    """Returns a context for calls of a user's function with traced arguments.

    JAX's errors about traced values become TypeErrors that say what to write instead. Other errors
    are raised unchanged, with a note if there is advice about them.
    """
    try:
        yield
    except jax.errors.TracerBoolConversionError:
        reason = (
            "asks whether a traced value is true, as `and`, `or`, `not`, `if` and `a < b < c` do; "
            "write &, |, ~, jnp.where and (a < b) & (b < c)"
        )
    except (jax.errors.TracerIntegerConversionError, jax.errors.TracerArrayConversionError):
        reason = (
            "uses a traced value as an index of a list or of a NumPy array, or in a function of "
            "NumPy; write jnp.asarray(table)[index] and the functions of jax.numpy"
        )
    except jax.errors.ConcretizationTypeError:
        reason = (
            "makes a Python number of a traced value, as int(), float(), .item() and functions of "
            "math do; write x.astype(dtype) and the functions of jax.numpy"
        )
    except Exception as error:
        advice = advice_for(error) or _SCALAR_ADVICE.get(owner)
        if isinstance(error, ShardingTypeError):
            advice = (
                "an array that the function reads is sharded over explicit axes of a mesh; pass it "
                "as an operand, as in scores.Score(fn, array) and masks.Predicate(fn, array)"
            )
        note = f"{owner}: in {function_name(fn)}, {advice}"
        if advice and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
    else:
        return
    raise TypeError(f"{owner}: {function_name(fn)} {reason}")


def check_returned(owner: str, fn: Any, value: Any, kind: str) -> Any:
    """Returns the result of a user's function as a scalar "boolean" or "floating-point" array."""
    got, advice = type(value).__name__, ""
    if value is None:
        got, advice = "None", "; end the function with `return`"
    elif isinstance(value, bool | int | float | complex) or _is_known_to_jax(
        getattr(value, "dtype", object)
    ):
        value = jnp.asarray(value)
        is_of_kind = any(jnp.issubdtype(value.dtype, x) for x in KINDS[kind])
        if is_of_kind and not value.shape:
            return value
        got = f"{value.dtype} {list(value.shape)}"
        advice = _RESULT_ADVICE.get((kind, value.dtype.kind), "")
        if value.shape:
            advice = f"; {_SCALAR_ADVICE.get(owner, 'index arrays with b, h, q_idx and kv_idx')}"
    article = {"boolean": "a boolean", "floating-point": "a float"}[kind]
    raise TypeError(f"{owner}: {function_name(fn)} must return {article} scalar, got {got}{advice}")


def check_not_reduced(owner: str, fn: Any) -> None:
    """Checks that a traced function of scalars does not reduce its first argument, the score."""
    if fn.useless_reduction:
        advice = _SCALAR_ADVICE.get(owner, "the function gets one score, a scalar")
        raise TypeError(
            f"{owner}: {fn.__name__} reduces the score ({fn.useless_reduction}), but {advice}"
        )


_SCALAR_ADVICE = {
    "normalizer": "the function gets one score, a scalar; for a function of all scores of a query "
    "write a subclass of jattn.normalizers.NormalizerFunction, as its docstring shows"
}
"""Advice for functions of one score, by the argument that takes them."""

_RESULT_ADVICE = {
    ("boolean", "f"): "; pass a function that changes scores as score=",
    ("boolean", "i"): "; return x != 0",
    ("floating-point", "b"): "; pass a function that allows pairs as mask=",
    ("floating-point", "i"): "; return x.astype(score.dtype)",
}
"""Advice by the expected kind and the kind of the returned dtype, see `numpy.dtype.kind`."""


def check_dtype(name: str, value: Any) -> None:
    """Checks for a floating-point dtype."""
    try:
        is_dtype = value is not None and not isinstance(value, np.generic | np.ndarray | jax.Array)
        is_float = is_dtype and jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except (TypeError, ValueError):
        is_float = False
    if not is_float:
        raise TypeError(f"{name}: expected a floating-point dtype, got {shown(value)}")


def check_rate(name: str, value: Any) -> None:
    """Checks for a dropout rate in [0, 1)."""
    if not isinstance(value, int | float | np.floating) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a Python float, got {_type(value)}")
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected 0 <= rate < 1, got {shown(value)}")


def check_flag(name: str, value: Any, *, or_none: bool = False) -> None:
    """Checks for True or False, or None with `or_none`; a traced boolean raises TypeError."""
    if not isinstance(value, bool | np.bool_) and not (or_none and value is None):
        raise TypeError(f"{name}: expected True or False, got {_type(value)}")


def check_key(name: str, value: Any) -> None:
    """Checks for one JAX random key: a typed key, or the uint32 words of a raw key of the default
    implementation."""
    dtype = getattr(value, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and dtype != jnp.uint32:
        got = dtype or type_name(value)
        raise TypeError(f"{name}: expected a JAX random key, got {got}")
    if typed and value.ndim:
        raise ValueError(f"{name}: expected one key, got keys of shape {list(value.shape)}")
    words = _raw_key_shape(jax.config.jax_default_prng_impl)  # pyright: ignore[reportAttributeAccessIssue]
    if not typed and value.shape != words:
        got = f"uint32 {list(value.shape)}"
        raise ValueError(f"{name}: expected one key, uint32 {list(words)}, got {got}")


@functools.cache
def _raw_key_shape(implementation: str) -> Shape:
    """Returns the shape of the words of one key of a random number generator."""
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation)))
    return words.shape


def check_choice(name: str, value: Any, choices: tuple[Any, ...], advice: str = "") -> None:
    """Checks for one of the choices, which are strings, booleans or None."""
    if not isinstance(value, str | bool | None) or value not in choices:
        *others, last = map(repr, choices)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}{advice}")


def check_precision(name: str, value: Any) -> None:
    """Checks for a precision of matrix products that JAX accepts."""
    try:
        is_precision = value is None or _is_accepted_by_dot(value)
    except TypeError:  # not hashable, which the cache below needs
        is_precision = False
    if not is_precision:
        raise ValueError(
            f"{name}: expected None, a jax.lax.Precision or one of its names, got {shown(value)}"
        )


@functools.lru_cache(maxsize=64)
def _is_accepted_by_dot(precision: Any) -> bool:
    vector = jax.ShapeDtypeStruct((1,), jnp.float32)
    try:
        jax.eval_shape(lambda x: jnp.dot(x, x, precision=precision), vector)
    except (TypeError, ValueError):
        return False
    return True


def _dtype_of(value: Any) -> Any:
    """Returns an array's dtype, and `object` for all else: a class such as `jnp.float32`, which has
    a dtype, is no array."""
    return object if isinstance(value, type) else getattr(value, "dtype", object)


def type_name(value: Any) -> str:
    """Returns the name of a value's class for messages; a static number is a Python number."""
    return type(number(value)).__name__


def _type(value: Any) -> str:
    return str(getattr(value, "dtype", type_name(value)))


def shown(value: Any) -> str:
    """Returns the text of a value for messages: its repr, in one line and shortened."""
    if isinstance(value, int) and abs(value) > 10**20:
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
