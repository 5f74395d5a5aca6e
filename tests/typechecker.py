"""beartype for jaxtyping's import hook, once for all functions of the same name and types.

The hook also wraps inner functions, which are created anew in each call of the outer function:
wrapping took a tenth of the suite's time. It passes a stand-in for the function's signature rather
than the function, so that one wrapper serves all functions with the same signature.
"""

from collections.abc import Callable, Hashable
from typing import Any

from beartype import beartype


_wrapped: dict[Hashable, Any] = {}


def check(function: Callable[..., Any]) -> Any:
    """Wraps jaxtyping's stand-in of a function by `beartype.beartype`."""
    # Python 3.11 cannot hash `P.args` of a ParamSpec.
    types = (
        (name, kind if isinstance(kind, Hashable) else repr(kind))
        for name, kind in function.__annotations__.items()
    )
    key = (function.__module__, function.__qualname__, function.__code__, *types)
    if key not in _wrapped:
        _wrapped[key] = beartype(function)
    return _wrapped[key]
