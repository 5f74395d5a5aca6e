"""How a command ends: with its work done, or with one line on stderr and a status that says why."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, TypeVar

from experiments.runs.files import Unwritten


_Item = TypeVar("_Item")

_ENDING_SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_signals_seen: list[int] = []


class UserError(Exception):
    """What the user can put right; its message is shown in one line."""


class Failure(Exception):
    """What went wrong while it ran, and was foreseen; its message is shown in one line."""


@contextlib.contextmanager
def users_part() -> Iterator[None]:
    """Around what can only fail because of what the user gave."""
    try:
        yield
    except (Unwritten, BrokenPipeError):
        raise
    except (ValueError, OSError) as error:
        raise UserError(one_line(error)) from error


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
            raise_if_asked_to_end()
            sys.stdout.flush()
        return 0
    except UserError as error:
        return _ended(2, f"error: {error}")
    except BrokenPipeError:
        return _ended(128 + 13, None)
    except (Failure, OSError) as error:
        return _ended(1, f"error: {error}")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _ended(1, f"error: not enough memory: {str(error) or 'Python has none left'}")
    except KeyboardInterrupt as end:
        number = signal.SIGTERM if isinstance(end, Terminated) else signal.SIGINT
        return _ended(128 + number, interrupted(str(end)))


def interrupted(advice: str) -> str:
    """What a command says when a signal has ended it."""
    return f"interrupted; {advice}" if advice else "interrupted"


def raise_if_asked_to_end() -> None:
    """Raises what the handlers of SIGINT and SIGTERM raise, if one of them has been called.

    Python drops an exception that a handler raises inside of a callback of JAX or a destructor, so
    every loop asks here at each step.
    """
    if _signals_seen:
        raise Terminated if _signals_seen[0] == signal.SIGTERM else KeyboardInterrupt


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


def interruptible(items: Iterable[_Item]) -> Iterator[_Item]:
    """The items, after `raise_if_asked_to_end` before each."""
    for item in items:
        raise_if_asked_to_end()
        yield item


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """While it lasts, SIGINT raises `KeyboardInterrupt` and SIGTERM `Terminated`, unless somebody
    has seen to the signal already."""

    def end(number: int, _: object) -> NoReturn:
        _signals_seen.append(number)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    _signals_seen.clear()
    in_main = threading.current_thread() is threading.main_thread()
    handled = [
        number
        for number, usual in _ENDING_SIGNALS.items()
        if in_main and signal.getsignal(number) is usual
    ]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, _ENDING_SIGNALS[number])
