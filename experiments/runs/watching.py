"""A watcher process, which reports in one line that another process of a run was lost.

When one of several processes is lost, JAX's C++ code ends the remaining ones at once with a long
message on stderr, and Python cannot intervene. So the training process writes its C++ output to
this watcher, which shortens that message and passes on everything else unchanged. The watcher
imports nothing but the standard library, and ends with the process that it watches.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO


ADVICE = b"\0"  # begins a line that is shown only with the message that a process was lost
# Gloo's messages on its connections. Its threads write at once, so that parts of lines may mix.
_GLOO = re.compile(
    rb"(\d*(\[Gloo\] Rank | is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : )\d*)+\n?"
)
_REST_OF_GLOO = re.compile(rb"\d*\n")
_OF_LOSSES = b"coordination_service"
_JOINING = b"RegisterTask"
_LOST = b"Terminating process because the JAX distributed service detected fatal errors"


def start_watching() -> BinaryIO:
    """Starts the watcher process, and returns the pipe that it reads."""
    command = [sys.executable, str(Path(__file__).resolve())]
    # In a session of its own, so that Ctrl-C does not end it before the watched process.
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    assert watcher.stdin is not None
    return watcher.stdin  # pyright: ignore[reportReturnType]


def watch(lines: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Passes lines on, except Gloo's and those that may report a lost process: these are written or
    replaced by one line at the end."""
    advice, pending, gloo = b"", list[bytes](), False
    for line in lines:
        gloo = bool(_GLOO.fullmatch(line) or (gloo and _REST_OF_GLOO.fullmatch(line)))
        if line.startswith(ADVICE):
            advice = b"; " + line.removeprefix(ADVICE).strip()
        elif _OF_LOSSES in line or _LOST in line or pending:
            pending.append(line)
        elif not gloo:
            write(line)
    text = b"".join(pending)
    if _LOST not in text:
        write(text)
    elif _JOINING in text:
        write(b"error: the processes did not find each other in time\n")
    else:
        write(b"error: another process of the run was lost" + advice + b"\n")


def _write(line: bytes) -> None:
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


if __name__ == "__main__":
    watch(sys.stdin.buffer, _write)
