"""Builds the libraries of `src/*.cc` with the machine's compiler, caches them, and loads them.

A compiler on the user's machine can use all instructions of its processor, which a wheel for all
machines cannot. A library is cached in the user's cache folder, with a digest, under a name that
changes with everything that went into it. A damaged file is built again, and a file that other
users could have written is not read. The process loads a copy of the checked contents, from a
private folder that it deletes right after. A folder that the environment names is used only if
nobody but this user and root can put another folder in its place.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import jax


if os.name == "posix":  # elsewhere nothing is built
    import fcntl

LIMIT = 300.0
"""The seconds after which a compiler counts as hanging, and is stopped."""

_SOURCES = Path(__file__).parent / "src"
_SINGLE = {"float32": 1, "float64": 0}
_log = logging.getLogger("jattn")
_X = TypeVar("_X")


class BuildError(Exception):
    """The reason why a library could not be built."""


def load(
    source: str, dtype: str, tiles: str, *, build: bool = True
) -> tuple[ctypes.CDLL, Path | None]:
    """Loads a library, building it if it is not cached, and returns it with its cached file; None
    if it cannot be cached. Without `build` no compiler is started.

    Raises BuildError and OSError, and whatever else goes wrong in a strange environment.
    """
    headers = sorted(path.name for path in _SOURCES.glob("*.h"))  # any change builds it again
    texts = [(_SOURCES / name).read_text(encoding="utf-8") for name in (*headers, source)]
    stem = f"{Path(source).stem}-{dtype}"
    notice = f"jattn: building {source} for {dtype}"
    flags = [*_flags(dtype, tiles), "-isystem", jax.ffi.include_dir(), f"-I{_SOURCES}"]
    compiled = functools.partial(_compiled, source, texts[-1])
    return _load(stem, texts, flags, compiled, notice, build)


def load_rule(text: str, dtype: str) -> ctypes.CDLL:
    """Loads the library of a rule that `generator` wrote; raises the errors of `load`."""
    texts = [(_SOURCES / name).read_text(encoding="utf-8") for name in ("vector.h", "rule.h")]
    # Integers wrap around in users' functions, as they do in JAX.
    flags = [*_flags(dtype, ""), "-O3", "-fwrapv", "-fno-math-errno", f"-I{_SOURCES}"]
    includes = '#include "rule.h"\n' + "#include <vector>\n" * ("std::vector" in text)
    compiled = functools.partial(_compiled, "rule.cc", includes + text)
    library, _ = _load(f"rule-{dtype}", [*texts, text], flags, compiled, None)
    return library


def _load(
    stem: str,
    texts: list[str],
    flags: list[str],
    compiled: Callable[[list[str], Path], bytes],
    notice: str | None,
    build: bool = True,
) -> tuple[ctypes.CDLL, Path | None]:
    """Loads the library of these texts, and returns it with its cached file.

    If it is not cached, `compiled(command, path)` returns its contents; users see `notice` first.
    """
    if os.name != "posix":
        raise BuildError(f"it is not built on {platform.system()}")
    command = [*compiler(tell=build), *flags]
    folder = _folder()
    cached_path = folder and folder / f"{stem}-{_digest(command, texts, build)}.so"
    contents = _read(cached_path)
    if contents is None:
        if not build:
            raise BuildError("it is not built yet")
        with _one_at_a_time(cached_path):
            contents = _read(cached_path)  # another process may have built it meanwhile
            if contents is None:
                unsafe = "for this process: no cache folder is its own"
                if notice:
                    scope = "once for this machine" if cached_path else unsafe
                    _tell(f"{notice}, {scope}; some seconds")
                contents = _in_private_folder(lambda path: compiled(command, path), folder)
                if cached_path and not _keep(cached_path, contents):
                    cached_path = None
    if cached_path:
        cache_text(_name_of_macros(command), _macros(tuple(command), build))

    def from_copy(path: Path) -> ctypes.CDLL:
        path.write_bytes(contents)
        return ctypes.CDLL(str(path))

    return _in_private_folder(from_copy, folder), cached_path


# --- forks --------------------------------------------------------------------------------------


_running: set[subprocess.Popen] = set()
_locks: set[int] = set()  # file descriptors
_no_fork = threading.RLock()
"""The lock for opening files that a forked process must not inherit."""


def _leave_to_parent() -> None:
    """Forgets compilers and locks in a forked process: they belong to its parent."""
    _running.clear()
    for handle in _locks:
        os.close(handle)
    _locks.clear()
    _no_fork.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_leave_to_parent
    )


# --- the compiler -------------------------------------------------------------------------------


def compiler(tell: bool = True) -> list[str]:
    """Returns the command that starts the compiler: `CXX`, or the system's compiler, or else the
    compiler of the package `ziglang`.

    Raises BuildError if there is none, and warns the user once.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    candidates = [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]
    for first, *rest in candidates:
        if path := shutil.which(first):
            return [path, *rest]
    if not wanted and (package := importlib.util.find_spec("ziglang")) and package.origin:
        return [str(Path(package.origin).parent / "zig"), "c++"]
    names = " and ".join(first for first, *_ in candidates)
    reason = f"there is no C++ compiler: {names} not found"
    if tell:
        _tell_once(
            f"jattn: {reason}. Attention without its kernel takes about 1.7 times as long here. "
            'Any C++ compiler will do; `pip install "jattn[compiler]"` brings one'
        )
    raise BuildError(reason)


@functools.cache
def _tell_once(line: str) -> None:
    _tell(line, logging.WARNING)


def _flags(dtype: str, tiles: str) -> list[str]:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    processor = "-march=native" if is_x86 else "-mcpu=native"
    macros = [f"-DJATTN_SINGLE={_SINGLE[dtype]}", f"-DJATTN_TILES={tiles}"]
    return ["-std=c++17", "-O2", processor, "-ffp-contract=fast", "-fPIC", "-shared", *macros]


def _digest(command: list[str], texts: list[str], build: bool = True) -> str:
    """Returns a digest of everything that a library depends on."""
    parts = [*texts, shlex.join(command), _macros(tuple(command), build), version("jaxlib")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _macros(command: tuple[str, ...], build: bool) -> str:
    """Returns the compiler's predefined macros, cached for each compiler and kind of processor."""
    if macros := cached_text(_name_of_macros(command)):
        return macros
    if not build:
        raise BuildError("its compiler was not asked yet")
    return _run([*command, "-dM", "-E", "-x", "c++", os.devnull])


def _name_of_macros(command: Sequence[str]) -> str:
    path = Path(command[0]).resolve()
    status = path.stat()
    program = f"{path} {status.st_size} {status.st_mtime_ns}"  # changes when the file does
    key = "\0".join((*command, program, _processor()))
    return f"macros-{hashlib.sha256(key.encode()).hexdigest()[:32]}.txt"


def _processor() -> str:
    """Returns a text that identifies the kind of processor."""
    names = ("model", "cpu family", "flags", "Features", "CPU implementer", "CPU part")
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            first, _, _ = file.read(2**14).partition("\n\n")
    except OSError:  # on systems other than Linux
        return f"{platform.platform()} {platform.processor()}"
    return "\n".join(line for line in first.splitlines() if line.startswith(names))


_EXPORTED = re.compile(r'(?:extern "C" void |XLA_FFI_DEFINE_HANDLER_SYMBOL\()(\w+)')

_LOAD = """
import ctypes, sys
_, path, token, *names = sys.argv
library = ctypes.CDLL(path)
for name in names:
    getattr(library, name)
print(token)
"""


def _compiled(name: str, text: str, command: list[str], path: Path) -> bytes:
    """Returns the library that the compiler writes, after another process has loaded it and found
    the functions that the source exports."""
    source = path.with_name(name)
    source.write_text(text, encoding="utf-8")
    _run([*command, str(source), "-o", str(path)])
    if not path.exists() or not path.stat().st_size:
        raise BuildError(f"{command[0]} wrote no library")
    if "python" in Path(sys.executable or "").name:  # not in a program that embeds Python
        token, names = secrets.token_hex(), _EXPORTED.findall(text)
        loader = [sys.executable, "-I", "-S", "-c", _LOAD, str(path), token, *names]
        try:
            if token not in _run(loader):
                raise BuildError("it ended the process")
        except BuildError as reason:
            # It may load from another folder: a file system may forbid to execute its files.
            raise OSError(f"what {command[0]} wrote cannot be loaded: {reason}") from reason
    return path.read_bytes()


def _run(command: list[str]) -> str:
    """Runs a command and returns its output; raises BuildError if it fails, or after `LIMIT`."""
    return _in_private_folder(lambda path: _run_in(path.parent, command), _folder())


def _run_in(folder: Path, command: list[str]) -> str:
    """Runs a command whose output goes into files of a folder: a pipe would stay open until the
    processes that the command leaves behind end."""
    printed, complaints = folder / "printed", folder / "complaints"
    with printed.open("wb") as stdout, complaints.open("wb") as stderr, _no_fork:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
            start_new_session=True,
        )
        _running.add(process)
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired as reason:
        raise BuildError(f"{command[0]} did not end within {LIMIT:g} s") from reason
    finally:
        _running.discard(process)
        _kill(process)
        process.wait()
    if process.returncode:
        messages = complaints.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in messages.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        status = f"exit status {process.returncode}"
        raise BuildError(f"{command[0]} failed: {(errors or lines[-1:] or [status])[0]}")
    return printed.read_text(encoding="utf-8", errors="replace")


def _kill(process: subprocess.Popen) -> None:
    """Ends a command and the processes that it has started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def stop() -> None:
    """Ends all compilers, so that threads that wait for them go on."""
    for process in tuple(_running):
        _kill(process)


def _tell(line: str, level: int = logging.INFO) -> None:
    """Logs a line, and prints it on a terminal if no logger shows it."""
    _log.log(level, line)
    shown = _log.isEnabledFor(level) and (_log.hasHandlers() or level >= logging.WARNING)
    if not shown and sys.stderr and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


# --- files --------------------------------------------------------------------------------------


def _folder() -> Path | None:
    """Returns the cache folder; None if users other than this one and root may write there."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = _trusted(Path(home) / "jattn")
        return folder if _is_safe(folder.stat()) else None
    except (OSError, RuntimeError) as reason:  # RuntimeError if there is no home
        _log.info("jattn: no cache folder: %s", reason)
        return None


def _trusted(path: Path) -> Path:
    """Returns the path of a folder without links, making the folder and its parents if necessary.

    Raises PermissionError if users other than this one and root own a part of the path, or a link
    on the way, or may write there: they could put another folder in its place. A folder with a
    sticky bit, such as /tmp, is allowed: there only the owner of an entry may rename it. Each part
    is checked after its parents, so that earlier checks remain true.
    """
    folder, parts, links = Path("/"), [*reversed(path.absolute().parts)], 0
    while parts:
        name = parts.pop()
        entry = folder.parent if name == ".." else folder / name
        if not os.path.lexists(entry):
            with contextlib.suppress(FileExistsError):  # another process makes it too
                entry.mkdir(0o755)
        status = entry.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        if not is_link and not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{entry} is not a folder")
        is_fixed = is_link or status.st_mode & stat.S_ISVTX
        if not (_is_safe(status) or (_is_ours(status) and is_fixed)):
            raise PermissionError(f"others may replace {entry}, or what is in it")
        if not is_link:
            folder = entry
        elif (links := links + 1) > _MOST_LINKS:
            raise OSError(f"{path} has too many links")
        else:
            parts += reversed(entry.readlink().parts)
    return folder


_MOST_LINKS = 40


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def _is_safe(status: os.stat_result) -> bool:
    """Returns whether nobody but this user and root can have written a file or folder."""
    return _is_ours(status) and not status.st_mode & 0o022


def _checksum(name: str, contents: bytes) -> bytes:
    """Returns the checksum that follows the contents of a cached file."""
    return hashlib.sha256(name.encode() + contents).digest()


@contextlib.contextmanager
def _one_at_a_time(path: Path | None) -> Iterator[None]:
    """Returns a context in which no other process of this machine builds the same file.

    A process that has waited as long as a compiler may take, or cannot lock, builds too: the file
    will have the same contents.
    """
    flags, lock, handle = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, Path(), None
    if path is not None:
        lock = path.with_suffix(".lock")
        with contextlib.suppress(OSError), _no_fork:
            handle = os.open(lock, flags, 0o600)
            _locks.add(handle)
    if handle is None:
        yield
        return
    is_locked = _locked(handle)
    try:
        yield
    finally:
        if is_locked:
            with contextlib.suppress(OSError):
                lock.unlink()
        with _no_fork:
            _locks.discard(handle)
            os.close(handle)


def _locked(handle: int) -> bool:
    """Waits for a lock, at most `LIMIT` seconds; returns whether it is acquired."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return False
    return False


def _read(path: Path | None) -> bytes | None:
    """Returns the contents of a cached file; None if there is no safe and undamaged one."""
    if path is None:
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _is_safe(status):
                return None
            data = file.read()
    except OSError:
        return None
    contents, checksum = data[:-32], data[-32:]
    return contents if contents and checksum == _checksum(path.name, contents) else None


def _keep(path: Path, contents: bytes) -> bool:
    """Writes a file to the cache; returns whether that succeeded."""
    unfinished = None
    try:
        # Processes that build at the same time write the same; readers see all of it or nothing.
        handle, unfinished = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(contents + _checksum(path.name, contents))
            file.flush()
            os.fchmod(handle, 0o644)  # an image may be built by root and run by others
            os.fsync(handle)
        Path(unfinished).replace(path)
        return True
    except OSError:
        if unfinished:
            Path(unfinished).unlink(missing_ok=True)
        return False


def cache_text(name: str, text: str) -> None:
    """Writes a text to the cache folder, if there is one, under a name that is its own."""
    if cached_text(name) is None and (folder := _folder()):
        _keep(folder / name, text.encode())


def cached_text(name: str) -> str | None:
    """Returns a text of the cache folder; None if there is no safe and undamaged one."""
    folder = _folder()
    contents = _read(folder / name) if folder else None
    return None if contents is None else contents.decode()


def _in_private_folder(work: Callable[[Path], _X], fallback: Path | None) -> _X:
    """Returns `work(path)` for a file in a private folder, which is deleted afterwards.

    The folder is among the temporary files or, if these cannot be written or executed, in
    `fallback`.
    """
    try:
        return _in_new_folder(_temporary(), work)
    except OSError:
        if fallback is None:
            raise
        return _in_new_folder(fallback, work)


def _in_new_folder(parent: Path, work: Callable[[Path], _X]) -> _X:
    # A `TemporaryDirectory` would be deleted by a forked process too, when that ends.
    folder = Path(tempfile.mkdtemp(prefix="jattn-", dir=parent))
    try:
        return work(folder / "library.so")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _temporary() -> Path:
    """Returns the folder of temporary files; raises FileNotFoundError if it is not safe."""
    try:
        return _trusted(Path(tempfile.gettempdir()))
    except OSError as reason:
        words = f"there is no folder for temporary files that is safe: {reason}"
        raise FileNotFoundError(words) from reason
