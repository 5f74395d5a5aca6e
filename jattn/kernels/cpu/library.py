"""The functions of `src/*.cc` in this process: XLA knows them once their library is loaded.

Each library is loaded once, and built before if it is not there, by a thread of its own. Whoever
needs it waits: a program keeps what it was lowered with, so a wait of seconds is soon earned, and
runs of the same script agree to the bit. Only where building takes longer than `PATIENCE` do
programs that are lowered meanwhile go without; they keep that. Those that name the kernel wait to
the end. What went wrong is remembered: a process asks for each library once. A process that is
forked meanwhile loads what its parent has not loaded yet.
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
}

PATIENCE = 60.0
"""Seconds from its beginning that programs wait for a library."""


class _Outcome(NamedTuple):
    """Of loading: why it failed, or None; where the library is kept, if anywhere; and itself."""

    reason: str | None
    kept: Path | None = None
    library: Any = None


class _Library:
    """A library that a thread loads, which ends when there is an outcome."""

    def __init__(self, *key: str):
        self.began = time.monotonic()
        self.outcome: _Outcome | None = None
        self.thread = threading.Thread(target=_settle, args=(self, *key), daemon=True)

    def wait(self, seconds: float | None = None) -> _Outcome:
        """The outcome, if there is one within some seconds."""
        if self.outcome is None:
            self.thread.join(seconds)
        return self.outcome or _Outcome(f"its library is still being built, after {PATIENCE:g} s")


_libraries: dict[tuple[str, str, str], _Library] = {}
_lock = threading.RLock()
_lock_of_rules = threading.Lock()


def unavailable(function: str, dtype: DTypeLike, *, wait: bool = False) -> str | None:
    """Why there is no such function for float32 or float64; None where there is, then for good.

    With `wait` it waits until that is known.
    """
    library = _library(function, dtype)
    left = library.began + PATIENCE - time.monotonic()
    return library.wait(None if wait else max(0.0, left)).reason


def target(function: str, dtype: DTypeLike) -> str:
    """Returns the name under which XLA finds a function.

    Raises CompilationFailed if its library cannot be built.
    """
    if reason := unavailable(function, dtype, wait=True):
        raise CompilationFailed(reason)
    return _name(function, np.dtype(dtype).name, tuning.current().cpu_tiles)


def kept(function: str, dtype: DTypeLike) -> Path | None:
    """The file from which other processes will load it; None if they must build it again."""
    return _library(function, dtype).wait().kept


MOST_RULES = 2_000
"""Rules that a process loads, and keeps for the programs that were compiled with them. Each takes
about five of the mappings of memory that a process may have, by default 65,530 on Linux."""

_rules: dict[tuple[str, str], Any] = {}  # their libraries by text and dtype
_failures: dict[tuple[str, str], str] = {}  # or why there is none


def rule_unavailable(text: str, dtype: DTypeLike) -> str | None:
    """Why a rule could not be compiled, if that was tried, or cannot be loaded any more."""
    key = text, np.dtype(dtype).name
    if key not in _rules and len(_rules) >= MOST_RULES:
        return (
            f"this process has loaded compiled functions {MOST_RULES:,} times, as often as it can:"
            " numbers that change from call to call should be operands"
        )
    return _failures.get(key)


def add_rule(text: str, dtype: DTypeLike, modifies: bool, keeps: bool) -> int:
    """The number of a rule that was generated, for the kernel's attribute `rule`. It is compiled
    where this machine has not done so yet, in about a second.

    Raises:
        CompilationFailed: it cannot be; a process tries once.
    """
    name = np.dtype(dtype).name
    number = _number(name, description := f"{modifies} {keeps} {text}")
    with _lock_of_rules:
        reason = rule_unavailable(text, dtype) or unavailable("forward", dtype, wait=True)
        if reason:
            raise CompilationFailed(reason)
        try:
            rule = _rules.get((text, name)) or compiler.load_rule(text, name)
            functions = [rule.jattn_rule_forward, rule.jattn_rule_backward if modifies else None]
            places = [x and ctypes.cast(x, ctypes.c_void_p) for x in functions]
            add = _library("forward", dtype).wait().library.jattn_add_rule
            add.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2]
            add.restype = None
            add(number, *places, modifies, keeps)
        except Exception as error:
            _failures[text, name] = _words(error)
            raise CompilationFailed(_failures[text, name]) from error
        if (text, name) not in _rules:
            compiler.keep_text(_name_of_rule(name, number), description)
        _rules[text, name] = rule
    return number


def _number(dtype: str, description: str) -> int:
    digest = hashlib.sha256(f"{dtype} {description}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1 or 1


def _name_of_rule(dtype: str, number: int) -> str:
    return f"rule-{dtype}-{number:016x}.txt"


def _add_by_number(dtype: str, number: int) -> None:
    """Adds the rule of a program that another process has compiled, if this machine has kept it.
    The kernel asks when it meets the number."""
    try:
        description = compiler.kept_text(_name_of_rule(dtype, number))
        if description and _number(dtype, description) == number:
            modifies, keeps, text = description.split(" ", 2)
            add_rule(text, dtype, modifies == "True", keeps == "True")
    except Exception as error:  # the kernel says that it has no such rule
        _log.warning("jattn: a rule could not be loaded: %s", _words(error))


def _name(function: str, dtype: str, tiles: str) -> str:
    """What XLA's error says that it does not find: with it, what to do."""
    name = f"jattn_{function}_{dtype}_{tiles.replace(', ', '_')}"
    return f"{name} (run python -m jattn.build{' --float64' * (dtype == 'float64')})"


def _library(function: str, dtype: DTypeLike) -> _Library:
    """The library of a function, whose loading begins with the first call that asks."""
    key = (_SOURCES[function], np.dtype(dtype).name, tuning.current().cpu_tiles)
    with _lock:
        if key not in _libraries:
            library = _libraries[key] = _Library(*key)
            try:
                library.thread.start()
            except Exception as error:  # where there may be no more threads
                library.outcome = _Outcome(_words(error))
        return _libraries[key]


def _settle(asked: _Library, source: str, dtype: str, tiles: str, build: bool = True) -> None:
    """Loads a library and tells XLA of its functions. Whatever goes wrong is a reason."""
    try:
        library, file = compiler.load(source, dtype, tiles, build=build)
        with _lock:  # a forked process has either loaded it or not
            if source == "attention.cc":
                library.jattn_ask_for_rules(_asks[dtype])
            for function in (name for name, of in _SOURCES.items() if of == source):
                capsule = jax.ffi.pycapsule(getattr(library, f"jattn_{function}"))
                jax.ffi.register_ffi_target(_name(function, dtype, tiles), capsule, platform="cpu")
            asked.outcome = _Outcome(None, file, library)
    except Exception as error:
        asked.outcome = _Outcome(_words(error))


_Ask = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_asks = {dtype: _Ask(functools.partial(_add_by_number, dtype)) for dtype in ("float32", "float64")}


def load_kept() -> None:
    """Loads the libraries that are kept on this machine, so that XLA knows the functions of
    programs that other processes have compiled. It takes milliseconds; what is not there, or fails,
    is left to the first call that asks for it."""
    tiles = tuning.current().cpu_tiles
    for key in itertools.product(sorted({*_SOURCES.values()}), _asks, [tiles]):
        library = _Library(*key)
        _settle(library, *key, build=False)
        if library.outcome and library.outcome.reason is None:
            _libraries[key] = library


def _words(error: Exception) -> str:
    return str(error).strip() or repr(error)


@atexit.register
def _stop() -> None:
    """Ends compilers that nobody waits for, and lets their callers clean up."""
    compiler.stop()
    for library in _libraries.values():
        library.wait(2.0)


def _begin_anew() -> None:
    """In a forked process, which has none of its parent's threads."""
    global _lock_of_rules  # noqa: PLW0603
    _lock_of_rules = threading.Lock()
    for key, library in tuple(_libraries.items()):
        if library.outcome is None:
            del _libraries[key]
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_anew
    )
