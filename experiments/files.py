"""Files that are whole or not there, on the disk when they are said to be, and one clear line where
they cannot be written: the disk is full, a quota is used up, a folder is read-only."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path


class Unwritten(OSError):
    """Something could not be written; the message says in one line what it is and why."""


@contextlib.contextmanager
def writing(what: object) -> Iterator[None]:
    """Around what writes: an error of the system is raised as `Unwritten`, of the outermost."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError is how tensorstore tells of the system's
        raise Unwritten(f"{what} could not be written: {_reason(error)}") from error


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file, in UTF-8, such that its name never stands for half of it.

    The folder is made where it is missing; a link is followed; the file's mode is kept.

    Raises:
        Unwritten: the system refuses it; what was there is still there.
    """
    with writing(path):
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
        try:
            with draft.open("wb") as file:
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
    """Adds a line, in UTF-8, to a file.

    Raises:
        Unwritten: the system refuses it; the line may be there in part.
    """
    with writing(path), path.open("ab") as file:
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Brings to the disk what was written below a folder, and the folder's own name."""
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


def _reason(error: BaseException) -> str:
    if isinstance(error, Unwritten) and error.__cause__ is not None:
        return _reason(error.__cause__)
    code = re.search(r"os_error_code='(\d+)'", str(error))  # in what tensorstore says
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())
