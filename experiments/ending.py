"""How a command ends: with its work done, or with one line on stderr and a status that says why."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn


class UserError(Exception):
    """What the user can put right; its message is shown in one line."""


class Failure(Exception):
    """What went wrong while it ran, and was foreseen; its message is shown in one line."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came: the end is that of Ctrl-C, with a status of its own."""


def exit_status(command: Callable[[], object]) -> int:
    """Runs a command and returns its exit status.

    0; 2 for a `UserError`; 1 for a `Failure` or an error of the system, such as a full disk; and as
    shells count signals 130 after Ctrl-C, 143 after SIGTERM and 141 where nobody reads the output.
    """
    try:
        with _terminable():
            command()
            sys.stdout.flush()
        return 0
    except UserError as error:
        return _ended(2, f"error: {error}")
    except BrokenPipeError:
        return _ended(128 + 13, None)
    except (Failure, OSError) as error:
        return _ended(1, f"error: {error}")
    except KeyboardInterrupt as end:
        number = signal.SIGTERM if isinstance(end, Terminated) else signal.SIGINT
        return _ended(128 + number, f"interrupted; {end}" if str(end) else "interrupted")


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(error).split())


def _ended(status: int, message: str | None) -> int:
    with contextlib.suppress(OSError):
        if message is not None:
            print(" ".join(message.split()), file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the interpreter would try once more at its end, and complain
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return status


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """While it lasts, SIGTERM raises `Terminated`, unless somebody has seen to it already."""

    def terminate(*_: object) -> NoReturn:
        raise Terminated

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
