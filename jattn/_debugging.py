"""Compatibility with JAX's debugging flags, which check results for NaN and infinities.

The log-sum-exp of a query without keys is −inf, and so is a masked score. Neither is a mistake in
the calling program, so `jax_debug_infs` must not stop at them.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax._src.config import debug_infs


_F = TypeVar("_F", bound=Callable[..., Any])


def may_be_minus_infinity(place: int | None) -> Callable[[_F], _F]:
    """Returns a decorator for functions whose results may hold −inf.

    `place` is the number of the array that may, counted in the flattened results; None allows any.
    `jax_debug_infs` still finds other infinities in the results.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                if debug_infs.value:
                    return checked(*arguments, **named)
                return function(*arguments, **named)
            except BaseException as error:
                hide_caller(error)
                raise

        def checked(*arguments: Any, **named: Any) -> Any:
            # The context manager `jax.debug_infs` would also drop the check of `jax_debug_nans`
            # when it ends.
            previous = debug_infs.swap_local(False)
            try:
                results = function(*arguments, **named)
            finally:
                debug_infs.set_local(previous)
            checked = functools.partial(_without_minus_infinity, place)
            with jax.disable_jit(False):
                as_operation(checked, function.__name__)(*jax.tree.leaves(results))
            return results

        return call  # pyright: ignore[reportReturnType]

    return decorate


def hide_caller(error: BaseException) -> None:
    """Removes the function that handles an error from the error's traceback.

    Decorators call it before they raise the error again, so that tracebacks show only the user's
    call.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def _without_minus_infinity(place: int | None, *arrays: Any) -> list[Any]:
    """Returns the arrays with 0 for −inf in the one at `place`, or in all if `place` is None."""

    def replaced(x: Any) -> Any:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.where(x == -jnp.inf, 0, x) if is_float else x

    return [replaced(x) if place in (None, i) else x for i, x in enumerate(arrays)]


def as_operation(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Compiles a function and marks it as one of JAX's own operations.

    If the results of a compiled function hold NaN, `jax_debug_nans` runs it again operation by
    operation, and names the operation so marked that gives NaN.
    """

    def run(*operands: Any) -> Any:
        return function(*operands)

    run.__name__ = run.__qualname__ = name
    vars(run)["_apply_primitive"] = True
    return jax.jit(run)
