"""Locks a run's directory, so that only one process at a time trains in it.

The process holds an advisory lock of the system on the file `lock` in the directory. The system
releases the lock when the process ends, however it ends, so that a file left behind blocks nobody.
The file names the process that held the lock last.
"""

import contextlib
import os
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from experiments.runs.files import inside, open_in_place, writing


if sys.platform != "win32":
    import fcntl

NAME = "lock"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of this directory within the context, and creates the directory if needed.

    On file systems and platforms without such locks it warns instead.

    Raises:
        BlockingIOError: another process holds the lock; the message names it.
        ValueError: the lock file is a link, a pipe or a device.
        Unwritten: the system refuses to write the lock file.
    """
    path = inside(directory, NAME)
    with contextlib.ExitStack() as stack:
        with writing(path):
            directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(
                os.fdopen(open_in_place(path, os.O_RDWR | os.O_APPEND), "a+b")
            )
        _acquire(file, directory)
        with writing(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
        yield


def is_vacant(directory: Path, written_first: Iterable[str] = ()) -> bool:
    """Returns whether a new run can use this directory: it does not exist, is empty, or holds only
    the first files of a run whose creation was interrupted. Such files come with a lock, which is
    only ever created in vacant directories and in runs."""
    if not directory.is_dir():
        return not directory.exists()
    names = {path.name for path in directory.iterdir()}
    ours = {name for name in names if name.endswith(".draft")} | {NAME, *written_first}
    return not names or (NAME in names and names <= ours)


def _acquire(file: BinaryIO, directory: Path) -> None:
    if sys.platform == "win32":
        warnings.warn(f"{directory}: no file locks on this platform", stacklevel=2)
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).decode("utf-8", "replace") or "another process"
        raise BlockingIOError(
            f"{directory} is in use: {holder} trains there; expected another --run, or to wait"
        ) from None
    except OSError as error:
        warnings.warn(f"{directory}: no lock against other processes: {error}", stacklevel=2)
