"""The libraries that `native*.cc` become: built where they are first needed, then kept.

A compiler on the spot knows the processor's own vectors, which a wheel for all could not use. What
it builds is kept in the user's cache folder, under a name that changes with everything that went
into it.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np


_HERE = Path(__file__).parent
_SINGLE = {"float32": 1, "float64": 0}
_SOURCES = {"forward": "native.cc", "backward": "native.cc", "decode": "native_decode.cc"}

TILES = "64, 128, 512"
"""Queries and keys of a tile, and of how many keys gradients are summed at once; queries come in
whole vectors, at most 16 numbers each, and the last is a multiple of the second."""


def unavailable(function: str, dtype: Any) -> str | None:
    """Why there is no such function for float32 or float64; None where there is."""
    try:
        target(function, dtype)
    except OSError as reason:
        return str(reason)
    return None


def target(function: str, dtype: Any) -> str:
    """The name under which XLA finds a function; OSError where its library cannot be built."""
    return _registered(function, np.dtype(dtype).name, TILES)


@functools.cache
def _registered(function: str, dtype: str, tiles: str) -> str:
    library = _loaded(_SOURCES[function], dtype, tiles)
    name = f"jattn_{function}_{dtype}_{tiles.replace(', ', '_')}"
    capsule = jax.ffi.pycapsule(getattr(library, f"jattn_{function}"))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return name


@functools.cache
def _loaded(source: str, dtype: str, tiles: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(_built(_HERE / source, dtype, tiles)))


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise OSError(f"there is no C++ compiler: {' and '.join(names)} not found")
    return found


def _flags(dtype: str, tiles: str) -> list[str]:
    own = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    macros = [f"-DJATTN_SINGLE={_SINGLE[dtype]}", f"-DJATTN_TILES={tiles}"]
    return ["-std=c++17", "-O2", own, "-ffp-contract=fast", "-fPIC", "-shared", *macros]


def _built(source: Path, dtype: str, tiles: str) -> Path:
    """A library's file, built if it is not there yet."""
    compiler, flags = _compiler(), _flags(dtype, tiles)
    # The compiler's own macros tell its version and the processor.
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    texts = [path.read_text(encoding="utf-8") for path in (_HERE / "native.h", source)]
    parts = [*texts, " ".join(flags), macros, version("jaxlib")]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    path = _folder() / f"{source.stem}-{dtype}-{digest}.so"
    if not path.exists():
        # Whoever builds at the same time writes the same; a reader sees all of it or nothing.
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
        try:
            headers = ["-isystem", jax.ffi.include_dir()]
            _run([compiler, *flags, *headers, str(source), "-o", unfinished])
            Path(unfinished).replace(path)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    return path


def _folder() -> Path:
    """Where libraries are kept: the user's cache folder, or one for this process alone."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "jattn"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return _own_folder()


@functools.cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="jattn-"))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise OSError(f"{command[0]} failed: {(errors or [done.stderr.strip()])[0]}")
    return done.stdout
