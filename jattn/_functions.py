"""Users' functions as keys of compiled programs, and the traced arrays that they hold.

A function that is written again, in a notebook's cell or in a loop, is another object. `frozen`
gives the same object for all that are sure to compute the same, so that they share what is
compiled.
"""

import builtins
import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np
from jax.core import Tracer

from jattn._explicit import is_bound


_frozen: WeakValueDictionary[Hashable, Callable[..., Any]] = WeakValueDictionary()


def frozen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function as it is now, one for all functions of the same code with equal
    defaults, equal values closed over and equal globals; the function itself where that is unsure.

    Sure are numbers, strings, None, JAX's arrays (the very same ones), tuples of these, functions
    of which all this is known, and what JAX, NumPy and this package export. The copy does not
    change when a variable that the function reads is assigned to.
    """
    try:
        key = _Key().value(function)
    except (_Unsure, RecursionError):
        return function
    known = _frozen.get(key)
    return _frozen.setdefault(key, _copied(function)) if known is None else known


class _Unsure(Exception):
    """Something that may change without another name, or of which nothing is known."""


_SCALARS = (int, bool, str, bytes, type(None), type(Ellipsis))
_BUILTINS = frozenset(
    """abs all any bool complex dict divmod enumerate float int isinstance len list map max min pow
    range reversed round sorted sum tuple zip""".split()
)
# Packages whose functions and classes stay as they are.
_PACKAGES = frozenset(("jax", "jaxlib", "numpy", "math", "operator", "jattn"))


def _package(name: Any) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _is_export(value: Any) -> bool:
    """Whether a value is a module of these packages, or a function or class of theirs."""
    if isinstance(value, types.ModuleType):
        return _package(value.__name__) in _PACKAGES
    if isinstance(value, types.MethodType | functools.partial) or not callable(value):
        return False
    own = _package(type(value).__module__) in ("builtins", "jax", "jaxlib", "numpy")
    return own and _package(getattr(value, "__module__", None)) in _PACKAGES


class _Same:
    """Equal to itself alone, whatever `==` means for the value."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.value is other.value


class _Key:
    """Makes keys of values: equal only where the values are the same. Raises `_Unsure`."""

    def __init__(self) -> None:
        self.reading: list[Any] = []

    def value(self, value: Any) -> Hashable:
        if type(value) in _SCALARS:
            return type(value), value
        if type(value) in (float, complex):
            return type(value), repr(value)  # tells 0.0 from −0.0
        if isinstance(value, np.number | np.bool_):
            return type(value), value.tobytes()
        if type(value) in (tuple, frozenset):
            return type(value), type(value)(map(self.value, value))
        if _is_export(value) or (isinstance(value, jax.Array) and not isinstance(value, Tracer)):
            return _Same(value)
        return self.program(value)

    def program(self, value: Any) -> Hashable:
        """Of what can be called."""
        if isinstance(value, types.CodeType):
            return self.code(value)
        if type(value) is types.FunctionType:
            return self.function(value)
        if type(value) is functools.partial:
            named = tuple(sorted(value.keywords.items()))
            return "partial", *map(self.value, (value.func, value.args, named))
        raise _Unsure

    def function(self, function: types.FunctionType) -> Hashable:
        if vars(function) or any(function is x for x in self.reading):
            raise _Unsure  # attributes may change; one that reads itself has no end
        self.reading.append(function)
        named = tuple(sorted((function.__kwdefaults__ or {}).items()))
        held = (function.__code__, function.__defaults__, named, _closed_over(function))
        key = "function", *map(self.value, held), self.value(tuple(_globals(function).items()))
        self.reading.pop()
        return key

    def code(self, code: types.CodeType) -> Hashable:
        """What is executed, wherever it is written."""
        sizes = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        run = code.co_code, code.co_exceptiontable
        return "code", sizes, names, run, tuple(map(self.value, code.co_consts))


def _contents(function: types.FunctionType) -> list[Any]:
    """What a function closes over, as far as it is assigned yet."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _closed_over(function: types.FunctionType) -> tuple[Any, ...]:
    found = tuple(_contents(function))
    if len(found) < len(function.__closure__ or ()):
        raise _Unsure
    return found


def _names(code: types.CodeType) -> set[str]:
    """What a function may read by name, with the functions in it."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function may read; those of Python itself must be pure."""
    names = sorted(_names(function.__code__))
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    if any(hasattr(builtins, x) for x in names if x not in found and x not in _BUILTINS):
        raise _Unsure
    return found


def _copied(value: Any) -> Any:
    """A value that has a key, with all functions in it as they are now."""
    if type(value) is tuple:
        return tuple(map(_copied, value))
    if type(value) is functools.partial:
        named = {name: _copied(x) for name, x in value.keywords.items()}
        return functools.partial(_copied(value.func), *map(_copied, value.args), **named)
    if type(value) is not types.FunctionType or _is_export(value):
        return value
    own = {name: _copied(x) for name, x in _globals(value).items()}
    own |= {"__builtins__": builtins, "__name__": value.__module__}
    cells = tuple(types.CellType(_copied(x)) for x in _closed_over(value))
    copy = types.FunctionType(value.__code__, own, value.__name__, None, cells)
    copy.__defaults__ = _copied(value.__defaults__)
    named = value.__kwdefaults__
    copy.__kwdefaults__ = named and {name: _copied(x) for name, x in named.items()}
    return copy


def holds_tracers(function: Any) -> bool:
    """Whether a function closes over arrays that are bound to a trace or to the types of a mesh, as
    far as that can be seen."""
    visited: dict[int, Any] = {}
    left = [function]
    while left:
        value = left.pop()
        if is_bound(value):
            return True
        if id(value) not in visited and not isinstance(value, _WITHOUT_PARTS):
            visited[id(value)] = value
            left.extend(_parts(value))
    return False


_WITHOUT_PARTS = (type, types.ModuleType, jax.Array, np.ndarray, *_SCALARS)


def _parts(value: Any) -> Iterable[Any]:
    """What a function, or an object that it holds, is made of."""
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*defaults, *_contents(value)]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set):
        return value
    wrapped = getattr(value, "__wrapped__", None)
    return [*getattr(value, "__dict__", {}).values(), wrapped]
