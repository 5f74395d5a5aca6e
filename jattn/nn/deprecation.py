"""Former names, which still work and say so."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def warn_renamed(former: str, name: str) -> None:
    """A DeprecationWarning at the line that called what calls this."""
    warnings.warn(f"{former} is deprecated, use {name}", DeprecationWarning, stacklevel=3)


def former_name(
    former: str, method: Callable[_Arguments, _Result]
) -> Callable[_Arguments, _Result]:
    """The method under the name that it had before."""
    owner, _, name = method.__qualname__.rpartition(".")

    @functools.wraps(method)
    def renamed(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        warn_renamed(f"{owner}.{former}", name)
        return method(*args, **kwargs)

    renamed.__doc__ = f"Deprecated: the former name of `{name}`."
    return renamed
