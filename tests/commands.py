"""Other processes: Python with this checkout on its path, and what they print. A full disk."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent


def environment(**changes: str) -> dict[str, str]:
    """The variables of this process, with this checkout on Python's path, and some changes."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **changes}


def clean_environment(**changes: str) -> dict[str, str]:
    """The variables of this process without what the tests add for JAX, and some changes."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    return {**inherited, "JAX_PLATFORMS": "cpu", **changes}


def run(*command: Any, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and captures what it prints as text."""
    words = list(map(str, command))
    return subprocess.run(words, capture_output=True, text=True, check=check, **options)


def run_python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs this Python to its end, with this checkout on its path, and captures what it prints."""
    options.setdefault("env", environment())
    return run(sys.executable, *arguments, **options)


def start_python(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """Starts this Python with this checkout on its path; its output is text in pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()}
    words = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(words, text=True, **(pipes | options))


def script(path: Path, text: str) -> str:
    """Writes a script of the shell, and returns its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@contextlib.contextmanager
def full_after(size: int) -> Iterator[None]:
    """A context in which no file can be longer than this, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
