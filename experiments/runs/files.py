"""Writes files atomically and durably, and raises one clear line if a file cannot be written: the
disk is full, a quota is used up, a folder is read-only.

A run's folder may come from an untrusted source. `inside` and `check_plain` check that nothing in
it leads outside: no link, no pipe, no device."""

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Unwritten(OSError):
    """The error of a file that cannot be written; the message says in one line which, and why."""


@contextlib.contextmanager
def writing(what: object) -> Iterator[None]:
    """Raises errors of the system within the context as `Unwritten`, whose message names the `what`
    of the outermost context."""
    try:
        yield
    except (OSError, ValueError) as error:  # tensorstore raises errors of the system as ValueError
        raise Unwritten(f"{what} could not be written: {reason(error)}") from error


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file, text in UTF-8, atomically: the file is never incomplete.

    A missing folder is created, links are followed, and the file's mode is preserved.

    Raises:
        Unwritten: the system refuses to write; the old file is unchanged.
    """
    with writing(path):
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
        draft.unlink(missing_ok=True)
        try:
            with draft.open("xb") as file:  # "x" follows no link
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, draft)
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def append(path: Path, line: str) -> None:
    """Appends a line, in UTF-8, to a file.

    Raises:
        Unwritten: the system refuses to write, and part of the line may have been written; or
            `open_in_place` refuses the file.
    """
    with writing(path), os.fdopen(open_in_place(path, os.O_WRONLY | os.O_APPEND), "ab") as file:
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def make_folder(folder: Path) -> None:
    """Creates a folder if it is missing, and checks that files can be created in it.

    Commands call this before they compute results, so that none are lost.

    Raises:
        Unwritten: the folder, or a file in it, cannot be created.
    """
    with writing(folder):
        folder.resolve().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


class ResultsFile:
    """A file of results, one JSON object in a line. An older file stays until the first row.

    Raises:
        Unwritten: the system refuses to create files in the folder.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self.path = path
        self._has_rows = False

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row; the first one replaces an older file.

        Raises:
            Unwritten: the system refuses to write.
        """
        line = json.dumps(row, allow_nan=False)
        if self._has_rows:
            append(self.path, line)
        else:
            replace(self.path, f"{line}\n")
        self._has_rows = True


def open_in_place(path: Path, flags: int) -> int:
    """Opens a file to change its content in place, creating it if missing, and returns its
    descriptor.

    Raises:
        ValueError: it is not a file, or has hard links, so that another file would change too.
    """
    handle = os.open(path, flags | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return handle
    os.close(handle)
    raise ValueError(f"expected a file of one name, got {_kind(status.st_mode)}")


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file or folder in a folder that may come from an untrusted source.

    Raises:
        ValueError: part of the path below the folder is neither file nor folder.
    """
    path = folder
    for part in Path(name).parts:
        path = path / part
        _check_kind(path)
    return path


def check_plain(folder: Path) -> None:
    """Checks that there are only files and folders in a folder.

    Raises:
        ValueError: there is something else; the message names it.
    """
    for path in folder.iterdir():
        _check_kind(path)
        if path.is_dir():
            check_plain(path)


def _check_kind(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"{path}: expected a file or a folder, got {_kind(mode)}")


def _kind(mode: int) -> str:
    """Describes in words the kind of a folder's entry."""
    kinds = {
        stat.S_IFREG: "a file with hard links",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def parsed(text: str) -> Any:
    """Parses a text in JSON.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("expected JSON, but it is nested too deeply") from None


def sync_folder(folder: Path) -> None:
    """Flushes a folder to the disk: everything below it, and its own entry."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        _sync(path)


def _sync(path: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened, nor a file synced by reading it
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: BaseException) -> str:
    """Returns the first sentence of an error's message; the details that tensorstore appends can be
    thousands of characters long."""
    if isinstance(error, Unwritten) and error.__cause__ is not None:
        return reason(error.__cause__)
    code = re.search(r"os_error_code='(\d+)'", str(error))  # in tensorstore's messages
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return re.split(r" \[[\w ]+='|\. (?=[A-Z])", " ".join(str(error).split()), maxsplit=1)[0]
