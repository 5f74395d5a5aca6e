"""The libraries that `src/*.cc` become: built by the machine's compiler, kept, and loaded.

A compiler on the spot knows the processor's own vectors, which a wheel for all could not use. What
it builds is kept in the user's cache folder, under a name that changes with everything that went
into it, together with a digest. A file that is damaged is built again, and one that others could
have written is not looked at. What is loaded is a copy of the contents that were checked, in a
folder of this process alone, deleted as soon as it is loaded. Every folder that the environment
names is used only where nobody but this user and root can put another in its place.
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
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import jax


if os.name == "posix":  # elsewhere nothing is built
    import fcntl

LIMIT = 300.0
"""Seconds that a compiler may take; one that takes longer hangs."""

_HERE = Path(__file__).parent / "src"
_SINGLE = {"float32": 1, "float64": 0}
_log = logging.getLogger("jattn")
_X = TypeVar("_X")


class BuildError(Exception):
    """The reason why a library could not be built."""


def load(
    source: str, dtype: str, tiles: str, *, build: bool = True
) -> tuple[ctypes.CDLL, Path | None]:
    """A library and the file where it is kept, built if it is not there; None: it cannot be kept.
    Without `build` no compiler is started.

    Raises BuildError and OSError, and whatever else goes wrong in a strange environment.
    """
    texts = [(_HERE / name).read_text(encoding="utf-8") for name in (*_headers(), source)]
    stem = f"{Path(source).stem}-{dtype}"
    notice = f"jattn: building {source} for {dtype}"
    flags = [*_flags(dtype, tiles), "-isystem", jax.ffi.include_dir()]

    def compiled(command: list[str], path: Path) -> bytes:
        return _compiled([*command, str(_HERE / source)], path, texts[-1])

    return _load(stem, texts, flags, compiled, notice, build)


def load_rule(text: str, dtype: str) -> ctypes.CDLL:
    """The library of a rule that was generated, see `generator`; raises as `load`."""
    texts = [(_HERE / name).read_text(encoding="utf-8") for name in ("vector.h", "rule.h")]
    # Integers wrap around in users' functions, as they do in JAX.
    flags = [*_flags(dtype, ""), "-O3", "-fwrapv", "-fno-math-errno", f"-I{_HERE}"]

    def compiled(command: list[str], path: Path) -> bytes:
        source = path.with_suffix(".cc")
        source.write_text(f'#include "rule.h"\n{text}', encoding="utf-8")
        return _compiled([*command, str(source)], path, text)

    library, _ = _load(f"rule-{dtype}", [*texts, text], flags, compiled, None)
    return library


def _headers() -> list[str]:
    """The names of all headers: a change of any of them builds the libraries again."""
    return sorted(path.name for path in _HERE.glob("*.h"))


def _load(
    stem: str,
    texts: list[str],
    flags: list[str],
    compiled: Callable[[list[str], Path], bytes],
    notice: str | None,
    build: bool = True,
) -> tuple[ctypes.CDLL, Path | None]:
    """A library of these texts, and where it is kept: there already, or `compiled` by a command to
    a path. `notice` is told to users beforehand."""
    if os.name != "posix":
        raise BuildError(f"it is not built on {platform.system()}")
    command = [*compiler(tell=build), *flags]
    folder = _folder()
    name = f"{stem}-{_digest(command, texts, build)}.so"
    kept = folder / name if folder else None
    contents = _read(kept)
    if contents is None:
        if not build:
            raise BuildError("it is not built yet")
        with _one_at_a_time(kept):
            contents = _read(kept)  # another process may have built it meanwhile
            if contents is None:
                own = "for this process: no cache folder is its own"
                if notice:
                    _tell(f"{notice}, {'once for this machine' if kept else own}; some seconds")
                contents = _in_private_folder(lambda path: compiled(command, path), folder)
                kept = kept if kept and _keep(kept, contents) else None

    if kept:
        keep_text(_name_of_macros(command), _macros(tuple(command), build))

    def from_copy(path: Path) -> ctypes.CDLL:
        path.write_bytes(contents)
        return ctypes.CDLL(str(path))

    return _in_private_folder(from_copy, folder), kept


# --- forks --------------------------------------------------------------------------------------


_running: set[subprocess.Popen] = set()
_locks: set[int] = set()  # handles of files
_no_fork = threading.RLock()
"""Held while files are opened that a forked process must not keep open."""


def _leave_to_parent() -> None:
    """Forgets compilers and locks in a forked process: they belong to its parent."""
    _running.clear()
    for handle in _locks:
        os.close(handle)
    _locks.clear()
    _no_fork.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_no_fork.acquire,
        after_in_parent=_no_fork.release,
        after_in_child=_leave_to_parent,
    )


# --- the compiler -------------------------------------------------------------------------------


def compiler(tell: bool = True) -> list[str]:
    """Returns the words that start the compiler: those of `CXX`, or the system's compiler, or else
    that of the package `ziglang`.

    Raises BuildError where there is none, and tells the user once.
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
    own = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    macros = [f"-DJATTN_SINGLE={_SINGLE[dtype]}", f"-DJATTN_TILES={tiles}"]
    return ["-std=c++17", "-O2", own, "-ffp-contract=fast", "-fPIC", "-shared", *macros]


def _digest(command: list[str], texts: list[str], build: bool = True) -> str:
    """Returns a digest of everything that a library depends on."""
    parts = [*texts, shlex.join(command), _macros(tuple(command), build), version("jaxlib")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _macros(command: tuple[str, ...], build: bool) -> str:
    """The compiler's own macros, which tell its version and the processor; from the cache folder
    where the same compiler was asked on the same processor."""
    if macros := kept_text(_name_of_macros(command)):
        return macros
    if not build:
        raise BuildError("its compiler was not asked yet")
    return _run([*command, "-dM", "-E", "-x", "c++", os.devnull])


def _name_of_macros(command: Iterable[str]) -> str:
    asked = "\0".join((*command, _file_of(next(iter(command))), _processor()))
    return f"macros-{hashlib.sha256(asked.encode()).hexdigest()[:32]}.txt"


def _file_of(program: str) -> str:
    """Returns a text that changes when the file of a program does."""
    path = Path(program).resolve()
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _processor() -> str:
    """Returns a text that identifies the kind of processor."""
    names = ("model", "cpu family", "flags", "Features", "CPU implementer", "CPU part")
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            first, _, _ = file.read(2**14).partition("\n\n")
    except OSError:  # where there is one kind of processor to a kind of machine
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


def _compiled(command: list[str], path: Path, text: str) -> bytes:
    """Returns the library that the compiler writes, after another process has loaded it and found
    the functions that the source exports."""
    _run([*command, "-o", str(path)])
    if not path.exists() or not path.stat().st_size:
        raise BuildError(f"{command[0]} wrote no library")
    if "python" in Path(sys.executable or "").name:  # not a program that Python is embedded in
        token, names = secrets.token_hex(), _EXPORTED.findall(text)
        loader = [sys.executable, "-I", "-S", "-c", _LOAD, str(path), token, *names]
        try:
            if token not in _run(loader):
                raise BuildError("it ended the process")
        except BuildError as reason:
            # Elsewhere it may be loaded: a file system may forbid to execute what lies on it.
            raise OSError(f"what {command[0]} wrote cannot be loaded: {reason}") from reason
    return path.read_bytes()


def _run(command: list[str]) -> str:
    """Runs a command and returns its output.

    Raises BuildError with its messages if it fails, or after `LIMIT`.
    """
    return _in_private_folder(lambda path: _run_in(path.parent, command), _folder())


def _run_in(folder: Path, command: list[str]) -> str:
    """Runs a command whose output and temporary files are put into a folder. Nobody waits for a
    process that the command leaves behind, as the end of a pipe would."""
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
        said = complaints.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        status = f"exit status {process.returncode}"
        raise BuildError(f"{command[0]} failed: {(errors or lines[-1:] or [status])[0]}")
    return printed.read_text(encoding="utf-8", errors="replace")


def _kill(process: subprocess.Popen) -> None:
    """Ends a command and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass


def stop() -> None:
    """Ends all compilers, so that whoever waits for them is released."""
    for process in tuple(_running):
        _kill(process)


def _tell(line: str, level: int = logging.INFO) -> None:
    """Tells users a line by `logging`, and on a terminal where no logger shows it."""
    _log.log(level, line)
    shown = _log.isEnabledFor(level) and (_log.hasHandlers() or level >= logging.WARNING)
    if not shown and sys.stderr and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


# --- files --------------------------------------------------------------------------------------


def _folder() -> Path | None:
    """The cache folder; None where there is none that only this user, or root, may write."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = _trusted(Path(home) / "jattn")
        return folder if _is_safe(folder.stat()) else None
    except (OSError, RuntimeError) as reason:  # the latter where there is no home
        _log.info("jattn: no cache folder: %s", reason)
        return None


def _trusted(path: Path) -> Path:
    """A folder, by its path without links; it is made, with those above it, where it is missing.

    Raises PermissionError where others than this user and root own a part of the path, or a link on
    the way, or may write there: they could put another folder in its place. Folders in which only
    the owners of entries may rename them, such as /tmp, are no such parts. Each part is looked at
    after those above it, so that what was found stays true.
    """
    place, left, links = Path("/"), [*reversed(path.absolute().parts)], 0
    while left:
        name = left.pop()
        entry = place.parent if name == ".." else place / name
        if not os.path.lexists(entry):
            with contextlib.suppress(FileExistsError):  # another process makes it too
                entry.mkdir(0o755)
        status = entry.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        if not is_link and not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{entry} is not a folder")
        is_kept = is_link or status.st_mode & stat.S_ISVTX
        if not (_is_safe(status) or (_is_ours(status) and is_kept)):
            raise PermissionError(f"others may replace {entry}, or what is in it")
        if not is_link:
            place = entry
        elif (links := links + 1) > _MOST_LINKS:
            raise OSError(f"{path} has too many links")
        else:
            left += reversed(entry.readlink().parts)
    return place


_MOST_LINKS = 40


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def _is_safe(status: os.stat_result) -> bool:
    """Whether nobody but this user and root can have written it."""
    return _is_ours(status) and not status.st_mode & 0o022


def _checksum(name: str, contents: bytes) -> bytes:
    """The checksum of a file's name and contents, which is written behind the contents."""
    return hashlib.sha256(name.encode() + contents).digest()


@contextlib.contextmanager
def _one_at_a_time(path: Path | None) -> Iterator[None]:
    """A context in which no other process of this machine builds what will be kept there. Who has
    waited as long as a compiler may take, or cannot tell, builds too: it is the same."""
    if path is None:
        yield
        return
    lock = path.with_suffix(".lock")
    try:
        with _no_fork:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            _locks.add(handle)
    except OSError:
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
    """Whether a lock could be had, within `LIMIT`."""
    last = time.monotonic() + LIMIT
    while time.monotonic() < last:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return False
    return False


def _read(path: Path | None) -> bytes | None:
    """The contents of a file; None where there is none that is safe and whole."""
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
    """Writes a file for later; whether it could."""
    unfinished = None
    try:
        # Whoever builds at the same time writes the same; a reader sees all of it or nothing.
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


def keep_text(name: str, text: str) -> None:
    """Writes a text for later, under a name that no other text has, where there is a folder."""
    folder = _folder()
    if folder and not (folder / name).exists():
        _keep(folder / name, text.encode())


def kept_text(name: str) -> str | None:
    """A text that was written; None where there is none that is safe and whole."""
    folder = _folder()
    contents = _read(folder / name) if folder else None
    return None if contents is None else contents.decode()


def _in_private_folder(work: Callable[[Path], _X], also: Path | None) -> _X:
    """`work(path)` for a file in a folder of this process alone, which is deleted afterwards.

    It lies with temporary files, or else, as where these cannot be written or executed, in `also`.
    """
    try:
        return _in_new_folder(_temporary(), work)
    except OSError:
        if also is None:
            raise
        return _in_new_folder(also, work)


def _in_new_folder(place: Path, work: Callable[[Path], _X]) -> _X:
    # A `TemporaryDirectory` would be deleted by a forked process too, when that ends.
    folder = Path(tempfile.mkdtemp(prefix="jattn-", dir=place))
    try:
        return work(folder / "library.so")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _temporary() -> Path:
    """The folder of temporary files, where others cannot put a file in place of ours."""
    try:
        return _trusted(Path(tempfile.gettempdir()))
    except OSError as reason:
        words = f"there is no folder for temporary files that is safe: {reason}"
        raise FileNotFoundError(words) from reason
