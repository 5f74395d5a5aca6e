"""One process at a time trains in a run's directory.

It holds an advisory lock of the system on the file `lock` there. The system takes the lock from a
process that ends, however it ends; so the file can stay, and blocks nobody. What stands in it is
which process had the lock last.
"""

import contextlib
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from experiments.runs.files import inside, open_in_place, writing


if sys.platform != "win32":
    import fcntl

NAME = "lock"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """While it lasts, no other process has the lock of this directory, which is made if need be.

    On file systems and platforms that have no such locks there is a warning instead.

    Raises:
        BlockingIOError: another process has it; the message says which.
        ValueError: there is a link, a pipe or a device in the lock's place.
        Unwritten: the system refuses to write it.
    """
    path = inside(directory, NAME)
    with contextlib.ExitStack() as held:
        with writing(path):
            directory.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(
                os.fdopen(open_in_place(path, os.O_RDWR | os.O_APPEND), "a+b")
            )
        _acquire(file, directory)
        with writing(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
        yield


def _acquire(file: BinaryIO, directory: Path) -> None:
    if sys.platform == "win32":
        warnings.warn(f"{directory}: locks are not known on this platform", stacklevel=2)
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
