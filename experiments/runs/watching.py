"""The process that tells in one line why another ended that trained together with others.

When one of several processes is lost, JAX ends those that are left: at once, with a long message of
its C++ part on the process's own stderr, and past all that Python could do about it. So that goes
to this process instead, which passes on everything else as it comes. It needs nothing but Python,
and ends when the process that it watches has ended.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO


ADVICE = b"\0"  # begins a line that is not to be shown, but to be added where a process is lost
# What Gloo tells of its connections. Its threads write at once, so that parts of lines may mix.
_GLOO = re.compile(
    rb"(\d*(\[Gloo\] Rank | is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : )\d*)+\n?"
)
_REST_OF_GLOO = re.compile(rb"\d*\n")
_OF_LOSSES = b"coordination_service"
_JOINING = b"RegisterTask"
_LOST = b"Terminating process because the JAX distributed service detected fatal errors"


def start_watching() -> BinaryIO:
    """Starts the process, and returns where it reads."""
    command = [sys.executable, str(Path(__file__).resolve())]
    # In a session of its own, Ctrl-C does not end it before its time.
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    assert watcher.stdin is not None
    return watcher.stdin  # pyright: ignore[reportReturnType]


def watch(lines: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Passes lines on, but for what can only be judged at the end: whether a process was lost."""
    advice, held, gloo = b"", list[bytes](), False
    for line in lines:
        gloo = bool(_GLOO.fullmatch(line) or (gloo and _REST_OF_GLOO.fullmatch(line)))
        if line.startswith(ADVICE):
            advice = b"; " + line.removeprefix(ADVICE).strip()
        elif _OF_LOSSES in line or _LOST in line or held:
            held.append(line)
        elif not gloo:
            write(line)
    told = b"".join(held)
    if _LOST not in told:
        write(told)
    elif _JOINING in told:
        write(b"error: the processes did not find each other in time\n")
    else:
        write(b"error: another process of the run was lost" + advice + b"\n")


def _write(line: bytes) -> None:
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


if __name__ == "__main__":
    watch(sys.stdin.buffer, _write)
