"""Snapshots of users' functions, as keys of compiled programs.

A function that is written again, in a notebook's cell or in a loop, is another object. `frozen`
gives the same object for all that are sure to compute the same, so that they share what is
compiled. A function that reads what may change, a list or an attribute, is traced in each call, see
`programs.traced`.
"""

import builtins
import contextlib
import dis
import functools
import sys
import types
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import jax
import numpy as np

from jattn._explicit import is_bound


_frozen: WeakValueDictionary[Hashable, Callable[..., Any]] = WeakValueDictionary()
_transient: WeakSet[Callable[..., Any]] = WeakSet()


def frozen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function as it is now, one for all functions of the same code with equal
    defaults, equal values closed over and equal globals; the function itself where that is unsure.

    Sure are numbers, strings, None, JAX's arrays (the very same ones), NumPy's arrays (their
    bytes), tuples of these, functions of which all this is known, and what JAX, NumPy and this
    package export. The copy does not change when a variable that the function reads is assigned to
    or an array is written to.
    """
    if is_frozen(function):
        return function
    keys = Key()
    try:
        key = keys.value(function)
    except (Unsure, RecursionError):
        return function
    return known(key) or kept(key, _copied(function), transient=keys.reads_memory)


def is_frozen(function: Callable[..., Any]) -> bool:
    """Whether a function comes from `frozen`, and so always computes the same."""
    return isinstance(function, types.FunctionType) and function in _lasting


_lasting: WeakSet[Callable[..., Any]] = WeakSet()


def is_transient(function: Any) -> bool:
    """Whether a function is a snapshot of what may be written to, so that the next call may have
    another one."""
    return function in _transient


def known(key: Hashable) -> Any:
    """The function that has been `kept` for a key, or None."""
    return _frozen.get(key)


def kept(key: Hashable, function: Any, transient: bool) -> Any:
    """A function that is kept from now on for a key, or the one that has been."""
    function = _frozen.setdefault(key, function)
    _lasting.add(function)
    if transient:
        _transient.add(function)
    return function


class Unsure(Exception):
    """Something that may change without another name, or of which nothing is known."""


_SCALARS = (int, bool, str, bytes, type(None), type(Ellipsis))
_BUILTINS = frozenset(
    """abs all any bool complex dict divmod enumerate float int isinstance len list map max min pow
    range reversed round sorted sum tuple zip""".split()
)
# Packages whose functions and classes never change.
_PACKAGES = frozenset(("jax", "jaxlib", "numpy", "math", "operator", "jattn"))
# What of them may be something else in each call.
_IMPURE = {
    "numpy": frozenset(
        """DataSource empty empty_like fromfile fromregex genfromtxt load loadtxt memmap
        open_memmap random""".split()
    ),
    "jax": frozenset(("config",)),
}
# Instructions after which something outside a function, or a copy of it, may be another.
_WRITES = frozenset(
    dis.opmap[x]
    for x in """DELETE_ATTR DELETE_GLOBAL DELETE_SUBSCR IMPORT_NAME STORE_ATTR STORE_GLOBAL
    STORE_SLICE STORE_SUBSCR""".split()
    if x in dis.opmap
)
_WRITES_OF_CLOSURES = _WRITES | {dis.opmap["DELETE_DEREF"], dis.opmap["STORE_DEREF"]}
_MOST_BYTES = 2**24  # of an array that is compared by its bytes


def _package(name: Any) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _is_export(value: Any) -> bool:
    """Whether a value is a module of these packages, or a function or class of theirs."""
    if isinstance(value, types.ModuleType):
        return _package(value.__name__) in _PACKAGES and _is_pure(value.__name__)
    kind = _package(type(value).__module__)
    if isinstance(value, types.MethodType) or kind not in ("builtins", "jax", "jaxlib", "numpy"):
        return False
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return False
    # What these packages make of a user's function, as `numpy.vectorize` does, has no such name.
    is_theirs = getattr(sys.modules.get(module), name, None) is value
    return is_theirs and _package(module) in _PACKAGES and _is_pure(f"{module}.{name}")


def _is_pure(path: str) -> bool:
    return _IMPURE.get(_package(path), frozenset()).isdisjoint(path.split("."))


class Same:
    """Equal to itself alone, whatever `==` means for the value."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Same) and self.value is other.value


class Key:
    """Makes keys of values: equal only where the values are the same. Raises `Unsure`."""

    def __init__(self) -> None:
        self.reading: list[Any] = []
        self.reads_memory = False  # that can be written to

    def value(self, value: Any) -> Hashable:
        if type(value) in _SCALARS:
            return type(value), value
        if type(value) in (float, complex):
            return type(value), repr(value)  # tells 0.0 from −0.0
        if isinstance(value, np.number | np.bool_):
            return type(value), value.tobytes()
        if type(value) in (tuple, frozenset):
            return type(value), type(value)(map(self.value, value))
        if _is_export(value) or (isinstance(value, jax.Array) and not is_bound(value)):
            return Same(value)
        return self.program(value)

    def memory(self, array: np.ndarray) -> Hashable:
        """Returns a key of an array: its bytes. Raises `Unsure` if these are too many."""
        if array.dtype.hasobject or array.nbytes > _MOST_BYTES:
            raise Unsure
        return array.dtype, array.shape, array.tobytes()

    def program(self, value: Any) -> Hashable:
        """Returns a key of a value that can be called, or written to."""
        if isinstance(value, types.CodeType):
            return self.code(value)
        if type(value) is types.FunctionType:
            return self.function(value)
        if type(value) is functools.partial:
            named = tuple(sorted(value.keywords.items()))
            return "partial", *map(self.value, (value.func, value.args, named))
        if type(value) in (np.ndarray, np.memmap):
            self.reads_memory = True
            return self.memory(value)
        raise Unsure

    def function(self, function: types.FunctionType) -> Hashable:
        if vars(function) or any(function is x for x in self.reading):
            raise Unsure  # attributes may change; one that reads itself has no end
        self.reading.append(function)
        named = tuple(sorted((function.__kwdefaults__ or {}).items()))
        held = (function.__code__, function.__defaults__, named, _closed_over(function))
        key = "function", *map(self.value, held), self.value(tuple(_globals(function).items()))
        self.reading.pop()
        return key

    def code(self, code: types.CodeType) -> Hashable:
        """Returns a key of code: what is executed, wherever it is written."""
        sizes = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        run, table = code.co_code, code.co_exceptiontable
        if not (_WRITES_OF_CLOSURES if code.co_freevars else _WRITES).isdisjoint(run[::2]):
            raise Unsure
        return "code", sizes, names, run, table, tuple(map(self.value, code.co_consts))


def _contents(function: types.FunctionType) -> list[Any]:
    """Returns the values that a function closes over, without those not assigned yet."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _closed_over(function: types.FunctionType) -> tuple[Any, ...]:
    found = tuple(_contents(function))
    if len(found) < len(function.__closure__ or ()):
        raise Unsure
    return found


def _names(code: types.CodeType) -> set[str]:
    """Returns the names that a function and the functions in it may read."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function may read; what it calls by name must be pure."""
    names = sorted(_names(function.__code__))
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    if any(hasattr(builtins, x) for x in names if x not in found and x not in _BUILTINS):
        raise Unsure
    for value in found.values():
        if isinstance(value, types.ModuleType):
            package = _package(value.__name__)
            if package in _IMPURE and not _IMPURE[package].isdisjoint(names):
                raise Unsure
    return found


def _copied(value: Any) -> Any:
    """A copy of a value that has a key, with snapshots of all functions in it."""
    if type(value) in (tuple, frozenset):
        return type(value)(map(_copied, value))
    if isinstance(value, np.ndarray):
        copy = np.array(value)
        copy.flags.writeable = False
        return copy
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
