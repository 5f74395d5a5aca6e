"""Snapshots of users' functions, for the keys of compiled programs.

A function that is defined again, in a notebook cell or in a loop, is a new object. `frozen` returns
one object for all functions that certainly compute the same, so that they share compiled programs.
A function that reads mutable state, such as a list or an attribute, has no snapshot and is traced
in each call, see `programs.program_of`.
"""

import builtins
import dis
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import jax
import numpy as np

from jattn._explicit import is_bound


MOST_LASTING = 256
"""The most snapshots of the same code whose programs are kept for good: a number that a function
reads may change from call to call."""

_counts: Counter[types.CodeType | None] = Counter()  # the snapshots made so far, by code
_frozen: WeakValueDictionary[Hashable, Callable[..., Any]] = WeakValueDictionary()
_transient: WeakSet[Callable[..., Any]] = WeakSet()


def frozen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of a function in its current state: the same copy for all functions with equal
    code, defaults, closure and globals. Returns the function itself if these cannot be compared.

    Values that can be compared are numbers, strings, None, JAX's arrays (by identity), NumPy's
    arrays (by their bytes), tuples of these, functions that read nothing else, and functions and
    classes of JAX, NumPy and this package. Later assignments to variables that the function reads,
    or to entries of arrays, do not change the copy.
    """
    if is_frozen(function):
        return function
    keys = Key()
    try:
        key = keys.value(function)
    except (Unsure, RecursionError):
        return function
    if (snapshot := known(key)) is not None:
        return snapshot
    copy = _copied(function)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    _counts[code] += 1
    return kept(key, copy, transient=keys.reads_arrays or _counts[code] > MOST_LASTING)


def is_frozen(function: Callable[..., Any]) -> bool:
    """Returns whether a function comes from `frozen`, and so always computes the same."""
    return isinstance(function, types.FunctionType) and function in _lasting


_lasting: WeakSet[Callable[..., Any]] = WeakSet()


def is_transient(function: Any) -> bool:
    """Returns whether a function is a snapshot that holds an array or follows many of the same
    code, or a program traced in one call, so that the next call may need another one."""
    return function in _transient


def known(key: Hashable) -> Any:
    """Returns the function that `kept` stored for a key, or None."""
    return _frozen.get(key)


def kept(key: Hashable, function: Any, transient: bool) -> Any:
    """Stores a function for a key and returns it, or returns the function stored before."""
    function = _frozen.setdefault(key, function)
    _lasting.add(function)
    if transient:
        _transient.add(function)
    return function


class Unsure(Exception):
    """Raised for a value that may change, or whose equality cannot be determined."""


_SCALARS = (int, bool, str, bytes, type(None), type(Ellipsis))
_BUILTINS = frozenset(
    """abs all any bool complex dict divmod enumerate float int isinstance len list map max min pow
    range reversed round sorted sum tuple zip""".split()
)
# Packages whose functions and classes never change.
_PACKAGES = frozenset(("jax", "jaxlib", "numpy", "math", "operator", "jattn"))
# Names in these packages whose results or values are not the same in each call.
_IMPURE = {
    "numpy": frozenset(
        """DataSource empty empty_like fromfile fromregex genfromtxt load loadtxt memmap
        open_memmap random""".split()
    ),
    "jax": frozenset(("config", "fromfile", "load")),
}
# Instructions by which a function may change state outside of itself.
_WRITES = frozenset(
    dis.opmap[x]
    for x in """DELETE_ATTR DELETE_GLOBAL DELETE_SUBSCR IMPORT_NAME STORE_ATTR STORE_GLOBAL
    STORE_SLICE STORE_SUBSCR""".split()
    if x in dis.opmap
)
_WRITES_OF_CLOSURES = _WRITES | {dis.opmap["DELETE_DEREF"], dis.opmap["STORE_DEREF"]}
_MOST_BYTES = 2**24  # the most bytes of an array that is compared by its bytes


def _package(name: Any) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _is_export(value: Any) -> bool:
    """Returns whether a value is a module, function or class of `_PACKAGES` that never changes."""
    if isinstance(value, types.ModuleType):
        return _package(value.__name__) in _PACKAGES and _is_pure(value.__name__)
    kind = _package(type(value).__module__)
    if isinstance(value, types.MethodType) or kind not in ("builtins", "jax", "jaxlib", "numpy"):
        return False
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return False
    # A function that a package returned, as `numpy.vectorize` does, is no attribute of the module.
    is_theirs = getattr(sys.modules.get(module), name, None) is value
    return is_theirs and _package(module) in _PACKAGES and _is_pure(f"{module}.{name}")


def _is_pure(path: str) -> bool:
    return _IMPURE.get(_package(path), frozenset()).isdisjoint(path.split("."))


class Same:
    """A key that is equal only for the same object, whatever `==` means for it."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Same) and self.value is other.value


class Key:
    """Makes keys of values, equal only for equal values; raises `Unsure` if it cannot."""

    def __init__(self) -> None:
        self.reading: list[Any] = []
        self.reads_arrays = False  # whether a value was an array of JAX or NumPy

    def value(self, value: Any) -> Hashable:
        if type(value) in _SCALARS:
            return type(value), value
        if type(value) in (float, complex):
            return type(value), repr(value)  # tells 0.0 from −0.0
        if isinstance(value, np.number | np.bool_):
            return type(value), value.tobytes()
        if type(value) in (tuple, frozenset):
            return type(value), type(value)(map(self.value, value))
        is_array = isinstance(value, jax.Array) and not is_bound(value)
        self.reads_arrays |= is_array
        if is_array or _is_export(value):
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
            self.reads_arrays = True
            return self.memory(value)
        raise Unsure

    def function(self, function: types.FunctionType) -> Hashable:
        if vars(function) or any(function is x for x in self.reading):
            raise Unsure  # attributes may change; a recursive function has no finite key
        self.reading.append(function)
        named = tuple(sorted((function.__kwdefaults__ or {}).items()))
        parts = (function.__code__, function.__defaults__, named, _closed_over(function))
        key = "function", *map(self.value, parts), self.value(tuple(_globals(function).items()))
        self.reading.pop()
        return key

    def code(self, code: types.CodeType) -> Hashable:
        """Returns a key of code that does not depend on the file and line where it stands."""
        sizes = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        instructions, table = code.co_code, code.co_exceptiontable
        writes = _WRITES_OF_CLOSURES if code.co_freevars else _WRITES
        if not writes.isdisjoint(instructions[::2]):  # every other byte is an opcode
            raise Unsure
        return "code", sizes, names, instructions, table, tuple(map(self.value, code.co_consts))


def _closed_over(function: types.FunctionType) -> tuple[Any, ...]:
    """Returns the values that a function closes over. Raises `Unsure` if one is not assigned."""
    try:
        return tuple(x.cell_contents for x in function.__closure__ or ())
    except ValueError:
        raise Unsure from None


def _names(code: types.CodeType) -> set[str]:
    """Returns the names that a function and the functions in it may read."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """Returns the globals that a function may read, by name; raises `Unsure` if one is impure."""
    names = sorted(_names(function.__code__))
    values_by_name = {
        name: function.__globals__[name] for name in names if name in function.__globals__
    }
    if any(hasattr(builtins, x) for x in names if x not in values_by_name and x not in _BUILTINS):
        raise Unsure
    for value in values_by_name.values():
        if isinstance(value, types.ModuleType):
            package = _package(value.__name__)
            if package in _IMPURE and not _IMPURE[package].isdisjoint(names):
                raise Unsure
    return values_by_name


def _copied(value: Any) -> Any:
    """Returns a copy of a value that has a key, with copies of all functions in it."""
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
    globals_of_copy = {name: _copied(x) for name, x in _globals(value).items()}
    globals_of_copy |= {"__builtins__": builtins, "__name__": value.__module__}
    cells = tuple(types.CellType(_copied(x)) for x in _closed_over(value))
    copy = types.FunctionType(value.__code__, globals_of_copy, value.__name__, None, cells)
    copy.__defaults__ = _copied(value.__defaults__)
    named = value.__kwdefaults__
    copy.__kwdefaults__ = named and {name: _copied(x) for name, x in named.items()}
    return copy
