"""The functions of `src/*.cc` in this process: XLA knows them once their library is loaded.

A thread loads each library once, and builds it first if it is not cached. Callers wait for it: a
program keeps the functions with which it was lowered, so a few seconds pay off, and runs of the
same script agree bit for bit. Only if building takes longer than `PATIENCE` are programs lowered
without the library, for good; programs that name the kernel wait until it is built. A process tries
each library once and remembers errors. A forked process loads the libraries that its parent has not
finished loading.
"""

import atexit
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from jattn import tuning
from jattn.kernels.common.errors import CompilationFailed
from jattn.kernels.cpu import compiler


_log = logging.getLogger("jattn")

_SOURCES = {
    "forward": "attention.cc",
    "backward": "attention.cc",
    "statistics": "attention.cc",
    "decode": "decode.cc",
    "linear": "linear.cc",
}

PATIENCE = 60.0
"""The seconds, from when loading begins, that programs wait for a library."""


class _Outcome(NamedTuple):
    """The reason why loading failed, or None; the library's cached file, if any; the library."""

    reason: str | None
    cached_path: Path | None = None
    library: Any = None


class _Library:
    """A library, and the thread that loads it."""

    def __init__(self, *key: str):
        self.began = time.monotonic()
        self.outcome: _Outcome | None = None
        self.settled = threading.Event()  # a `join` that Ctrl-C interrupts would be the last one
        self.thread = threading.Thread(target=_settle, args=(self, *key), daemon=True)

    def wait(self, seconds: float | None = None) -> _Outcome:
        """Waits for the outcome, at most some seconds, and returns it."""
        if self.outcome is None:
            self.settled.wait(seconds)
        return self.outcome or _Outcome(f"its library is still being built, after {PATIENCE:g} s")


_libraries: dict[tuple[str, str, str], _Library] = {}
_lock = threading.RLock()
_rules_lock = threading.Lock()


def unavailable(function: str, dtype: DTypeLike, *, wait: bool = False) -> str | None:
    """Returns why there is no such function for float32 or float64; None if there is, for good.

    With `wait`, a library that is being built is waited for without a limit.
    """
    library = _library(function, dtype)
    remaining = library.began + PATIENCE - time.monotonic()
    return library.wait(None if wait else max(0.0, remaining)).reason


def target(function: str, dtype: DTypeLike) -> str:
    """Returns the name under which XLA finds a function.

    Raises CompilationFailed if its library cannot be built.
    """
    if reason := unavailable(function, dtype, wait=True):
        raise CompilationFailed(reason)
    return _name(function, np.dtype(dtype).name, tuning.current().cpu_tiles)


def cached_path(function: str, dtype: DTypeLike) -> Path | None:
    """Returns the file from which other processes load a function; None if they must build it."""
    return _library(function, dtype).wait().cached_path


MOST_RULES = 2_000
"""The most rules that a process loads; programs that were compiled with them need them for good.

Each takes about five of the memory mappings of a process, which Linux limits to 65,530."""

_rules: dict[tuple[str, str], Any] = {}  # libraries by text and dtype
_failures: dict[tuple[str, str], str] = {}  # reasons by text and dtype


def rule_unavailable(text: str, dtype: DTypeLike) -> str | None:
    """Returns why a rule could not be compiled earlier, or why no more rules can be loaded."""
    key = text, np.dtype(dtype).name
    if key not in _rules and len(_rules) >= MOST_RULES:
        return (
            f"this process has loaded compiled functions {MOST_RULES:,} times, as often as it can:"
            " numbers that change from call to call should be operands"
        )
    return _failures.get(key)


def add_rule(text: str, dtype: DTypeLike, modifies: bool, keeps: bool) -> int:
    """Adds a generated rule to the kernel, and returns its number for the attribute `rule`.

    The rule is compiled if it is not cached, in about a second. Raises CompilationFailed if it
    cannot be compiled; a process tries once.
    """
    name = np.dtype(dtype).name
    number = _number(name, description := f"{modifies} {keeps} {text}")
    with _rules_lock:
        reason = rule_unavailable(text, dtype) or unavailable("forward", dtype, wait=True)
        if reason:
            raise CompilationFailed(reason)
        try:
            rule = _rules.get((text, name)) or compiler.load_rule(text, name)
            functions = [rule.jattn_rule_forward, rule.jattn_rule_backward if modifies else None]
            pointers = [x and ctypes.cast(x, ctypes.c_void_p) for x in functions]
            add = _library("forward", dtype).wait().library.jattn_add_rule
            add.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2]
            add.restype = None
            add(number, *pointers, modifies, keeps)
        except Exception as error:
            _failures[text, name] = _words(error)
            raise CompilationFailed(_failures[text, name]) from error
        if (text, name) not in _rules:
            compiler.cache_text(_name_of_rule(name, number), description)
        _rules[text, name] = rule
    return number


def _number(dtype: str, description: str) -> int:
    digest = hashlib.sha256(f"{dtype} {description}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1 or 1


def _name_of_rule(dtype: str, number: int) -> str:
    return f"rule-{dtype}-{number:016x}.txt"


def _add_by_number(dtype: str, number: int) -> None:
    """Adds the rule of a program that another process has compiled, if the rule is cached.

    The kernel calls this function for a number that it does not know.
    """
    try:
        description = compiler.cached_text(_name_of_rule(dtype, number))
        if description and _number(dtype, description) == number:
            modifies, keeps, text = description.split(" ", 2)
            add_rule(text, dtype, modifies == "True", keeps == "True")
    except Exception as error:  # the kernel then raises an error
        _log.warning("jattn: a rule could not be loaded: %s", _words(error))


def _name(function: str, dtype: str, tiles: str) -> str:
    """Returns the name of a function for XLA, whose errors quote it: it contains advice."""
    name = f"jattn_{function}_{dtype}_{tiles.replace(', ', '_')}"
    return f"{name} (run python -m jattn.build{' --float64' * (dtype == 'float64')})"


def _library(function: str, dtype: DTypeLike) -> _Library:
    """Returns the library of a function; the first call starts loading it."""
    key = (_SOURCES[function], np.dtype(dtype).name, tuning.current().cpu_tiles)
    with _lock:
        if key not in _libraries:
            library = _libraries[key] = _Library(*key)
            try:
                library.thread.start()
            except Exception as error:  # if no more threads are allowed
                library.outcome = _Outcome(_words(error))
                library.settled.set()
        return _libraries[key]


def _settle(target: _Library, source: str, dtype: str, tiles: str, build: bool = True) -> None:
    """Loads a library and registers its functions with XLA. Any error becomes the reason."""
    try:
        library, file = compiler.load(source, dtype, tiles, build=build)
        with _lock:  # a forked process has either loaded it or not
            if source == "attention.cc":
                library.jattn_ask_for_rules(_CALLBACKS[dtype])
            for function in (name for name, of in _SOURCES.items() if of == source):
                capsule = jax.ffi.pycapsule(getattr(library, f"jattn_{function}"))
                jax.ffi.register_ffi_target(_name(function, dtype, tiles), capsule, platform="cpu")
            target.outcome = _Outcome(None, file, library)
    except Exception as error:
        target.outcome = _Outcome(_words(error))
    finally:
        target.settled.set()


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_CALLBACKS = {
    dtype: _Callback(functools.partial(_add_by_number, dtype)) for dtype in ("float32", "float64")
}


def load_cached() -> None:
    """Loads the cached libraries, so that XLA knows the functions of programs that other processes
    have compiled.

    It takes milliseconds. Libraries that are not cached, or fail to load, are left to the first
    call that needs them.
    """
    tiles = tuning.current().cpu_tiles
    for key in itertools.product(sorted({*_SOURCES.values()}), _CALLBACKS, [tiles]):
        library = _Library(*key)
        _settle(library, *key, build=False)
        if library.outcome and library.outcome.reason is None:
            _libraries[key] = library


def _words(error: Exception) -> str:
    return str(error).strip() or repr(error)


@atexit.register
def _stop() -> None:
    """Ends running compilers, and lets the threads that started them clean up."""
    compiler.stop()
    for library in _libraries.values():
        library.wait(2.0)


def _forget_threads() -> None:
    """Forgets unfinished libraries in a forked process, which has none of its parent's threads."""
    global _rules_lock  # noqa: PLW0603
    _rules_lock = threading.Lock()
    for key, library in tuple(_libraries.items()):
        if library.outcome is None:
            del _libraries[key]
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget_threads
    )
