"""What JAX's flags for debugging find in results.

The log-sum-exp of a query without keys is −inf, and so is a masked score. Neither is a mistake in
the program that calls, so `jax_debug_infs` must not stop at them.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax._src.config import debug_infs


_F = TypeVar("_F", bound=Callable[..., Any])


def may_be_minus_infinity(place: int | None) -> Callable[[_F], _F]:
    """A decorator for functions in whose results the array at `place`, counted in the flattened
    tree, may hold −inf, or with None any of them. Other infinities in the results are still found
    by `jax_debug_infs`."""

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
            before = debug_infs.swap_local(False)
            try:
                results = function(*arguments, **named)
            finally:
                debug_infs.set_local(before)
            checked = functools.partial(_without_minus_infinity, place)
            with jax.disable_jit(False):
                as_operation(checked, function.__name__)(*jax.tree.leaves(results))
            return results

        return call  # pyright: ignore[reportReturnType]

    return decorate


def hide_caller(error: BaseException) -> None:
    """Takes the function that handles an error out of its traceback. Decorators call it before
    they raise the error again, so that tracebacks show what the user has called."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def _without_minus_infinity(place: int | None, *arrays: Any) -> list[Any]:
    """The arrays with 0 for −inf in the one at `place`, or with None in all."""

    def replaced(x: Any) -> Any:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.where(x == -jnp.inf, 0, x) if is_float else x

    return [replaced(x) if place in (None, i) else x for i, x in enumerate(arrays)]


def as_operation(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function compiled and marked as one of JAX's own operations.

    Where the results of a compiled function hold NaN, `jax_debug_nans` runs it again step by step,
    down to what is so marked, which it names.
    """

    def run(*operands: Any) -> Any:
        return function(*operands)

    run.__name__ = run.__qualname__ = name
    vars(run)["_apply_primitive"] = True
    return jax.jit(run)
