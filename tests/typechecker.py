"""beartype for jaxtyping's import hook, once for all functions of the same name and types.

The hook also wraps functions within functions, which are made anew each time the function around
them runs: a tenth of the suite's time went into wrapping. What it hands over is not the function
but a stand-in for its signature, so that one wrapper serves all that have the same.
"""

from collections.abc import Callable, Hashable
from typing import Any

from beartype import beartype


_wrapped: dict[Hashable, Any] = {}


def check(function: Callable[..., Any]) -> Any:
    """As `beartype.beartype`, for a stand-in of jaxtyping's."""
    # Python 3.11 cannot hash `P.args` of a ParamSpec.
    types = (
        (name, kind if isinstance(kind, Hashable) else repr(kind))
        for name, kind in function.__annotations__.items()
    )
    key = (function.__module__, function.__qualname__, function.__code__, *types)
    if key not in _wrapped:
        _wrapped[key] = beartype(function)
    return _wrapped[key]
