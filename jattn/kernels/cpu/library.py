"""The functions of `src/*.cc` in this process: XLA knows them once their library is loaded.

Each library is loaded once, and built before if it is not there, by a thread of its own. Whoever
needs it waits: a program keeps what it was lowered with, so a wait of seconds is soon earned, and
runs of the same script agree to the bit. Only where building takes longer than `PATIENCE` do
programs that are lowered meanwhile go without; they keep that. Those that name the kernel wait to
the end. What went wrong is remembered: a process asks for each library once.
"""

import atexit
import ctypes
import hashlib
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn import tuning
from jattn.kernels.common.vjp import Unbuilt
from jattn.kernels.cpu import compiler


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


class _Library(NamedTuple):
    """One that is being loaded, and since when; one that is loaded."""

    outcome: Future[_Outcome]
    began: float


_libraries: dict[tuple[str, str, str], _Library] = {}
_lock = threading.Lock()
_lock_of_rules = threading.Lock()


def unavailable(function: str, dtype: Any, *, wait: bool = False) -> str | None:
    """Why there is no such function for float32 or float64; None where there is, then for good.

    With `wait` it waits until that is known.
    """
    library = _library(function, dtype)
    left = library.began + PATIENCE - time.monotonic()
    try:
        return library.outcome.result(None if wait else max(0.0, left)).reason
    except TimeoutError:
        return f"its library is still being built, after {PATIENCE:g} s"


def target(function: str, dtype: Any) -> str:
    """The name under which XLA finds a function; Unbuilt where its library cannot be built."""
    if reason := unavailable(function, dtype, wait=True):
        raise Unbuilt(reason)
    return _name(function, np.dtype(dtype).name, tuning.current().cpu_tiles)


def kept(function: str, dtype: Any) -> Path | None:
    """The file from which other processes will load it; None if they must build it again."""
    return _library(function, dtype).outcome.result().kept


_rules: dict[tuple[str, str], Any] = {}  # their libraries, or why not, by text and dtype


def rule_unavailable(text: str, dtype: Any) -> str | None:
    """Why a rule could not be compiled, if that was tried."""
    found = _rules.get((text, np.dtype(dtype).name))
    return found if isinstance(found, str) else None


def add_rule(text: str, dtype: Any, modifies: bool, keeps: bool) -> int:
    """The number of a rule that was generated, for the kernel's attribute `rule`. It is compiled
    where this machine has not done so yet, in about a second.

    Raises:
        Unbuilt: it cannot be; a process tries once.
    """
    name = np.dtype(dtype).name
    with _lock_of_rules:
        if (text, name) not in _rules:
            try:
                _rules[text, name] = compiler.load_rule(text, name)
            except Exception as error:
                _rules[text, name] = _words(error)
        own = _rules[text, name]
    if isinstance(own, str):
        raise Unbuilt(own)
    digest = hashlib.sha256(f"{name} {modifies} {keeps} {text}".encode()).digest()
    number = int.from_bytes(digest[:8]) >> 1 or 1
    functions = [getattr(own, f"jattn_rule_{x}", None) for x in ("forward", "backward")]
    places = [x and ctypes.cast(x, ctypes.c_void_p) for x in functions]
    add = _library("forward", dtype).outcome.result().library.jattn_add_rule
    add.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    add.restype = None
    add(number, *places, modifies, keeps)
    return number


def _name(function: str, dtype: str, tiles: str) -> str:
    return f"jattn_{function}_{dtype}_{tiles.replace(', ', '_')}"


def _library(function: str, dtype: Any) -> _Library:
    """The library of a function, whose loading begins with the first call that asks."""
    key = (_SOURCES[function], np.dtype(dtype).name, tuning.current().cpu_tiles)
    with _lock:
        if key not in _libraries:
            library = _libraries[key] = _Library(Future(), time.monotonic())
            thread = threading.Thread(target=_settle, args=(library.outcome, *key), daemon=True)
            try:
                thread.start()
            except Exception as error:  # where there may be no more threads
                library.outcome.set_result(_Outcome(_words(error)))
        return _libraries[key]


def _settle(outcome: Future[_Outcome], source: str, dtype: str, tiles: str) -> None:
    """Loads a library and tells XLA of its functions. Whatever goes wrong is a reason."""
    try:
        library, file = compiler.load(source, dtype, tiles)
        for function in (name for name, of in _SOURCES.items() if of == source):
            capsule = jax.ffi.pycapsule(getattr(library, f"jattn_{function}"))
            jax.ffi.register_ffi_target(_name(function, dtype, tiles), capsule, platform="cpu")
        outcome.set_result(_Outcome(None, file, library))
    except Exception as error:
        outcome.set_result(_Outcome(_words(error)))


def _words(error: Exception) -> str:
    return str(error).strip() or repr(error)


@atexit.register
def _stop() -> None:
    """Ends compilers that nobody waits for, and lets their callers clean up."""
    compiler.stop()
    for library in _libraries.values():
        try:
            library.outcome.result(2)
        except TimeoutError:
            pass
