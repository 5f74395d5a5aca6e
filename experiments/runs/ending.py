"""Ends commands: turns errors and signals into one line on stderr and an exit status."""

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
    """An error that the user can correct; its message is shown in one line."""


class Failure(Exception):
    """An expected failure of a running command; its message is shown in one line."""


class Diverged(Failure):
    """The error of training whose losses, gradients or parameters are not finite; the message names
    the step."""


@contextlib.contextmanager
def users_part() -> Iterator[None]:
    """Raises ValueError and OSError within the context as `UserError`, because only the user's
    input can cause them there."""
    try:
        yield
    except (Unwritten, BrokenPipeError):
        raise
    except (ValueError, OSError) as error:
        raise UserError(one_line(error)) from error


class Terminated(KeyboardInterrupt):
    """The interrupt of SIGTERM, which ends a command like Ctrl-C but with its own exit status."""


@contextlib.contextmanager
def advising_to_resume(advice: str, last_saved_step: Callable[[], int | None]) -> Iterator[None]:
    """Adds the last checkpoint, and the advice how to resume from it, to errors raised during
    training. If training has diverged, it would do so again: only the checkpoint is added."""
    try:
        yield
    except Diverged as error:
        step = last_saved_step()
        checkpoint = "none" if step is None else f"that after step {step}"
        raise Diverged(f"{error}; the last checkpoint is {checkpoint}") from None
    except BrokenPipeError:
        raise
    except (Failure, OSError) as error:
        step = last_saved_step()
        state = "there is no checkpoint yet" if step is None else f"checkpoint {step} is whole"
        kind = Failure if isinstance(error, Failure) else Unwritten
        raise kind(f"{error}; {state}; {advice}") from error
    except KeyboardInterrupt as end:
        raise type(end)(advice) from None


def exit_status(command: Callable[[], object]) -> int:
    """Runs a command and returns its exit status.

    The status is 0; 2 for a `UserError`; 1 for a `Failure` or an error of the system, such as a
    full disk; and, as in shells, 130 after Ctrl-C, 143 after SIGTERM and 141 for a broken pipe.
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
    """Returns the message of a command that a signal has ended."""
    return f"interrupted; {advice}" if advice else "interrupted"


def raise_if_asked_to_end() -> None:
    """Raises the exception of the SIGINT or SIGTERM handler, if one of them has been called.

    Python drops an exception that a handler raises inside a callback of JAX or a destructor, so
    every loop calls this in each iteration.
    """
    if _signals_seen:
        raise Terminated if _signals_seen[0] == signal.SIGTERM else KeyboardInterrupt


def one_line(error: BaseException) -> str:
    """Returns an error's message without line breaks."""
    return " ".join(str(error).split())


def _ended(status: int, message: str | None) -> int:
    with contextlib.suppress(OSError):
        if message is not None:
            print(" ".join(message.split()), file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # at exit the interpreter would flush again, and print the error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return status


def interruptible(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yields the items, and calls `raise_if_asked_to_end` before each."""
    for item in items:
        raise_if_asked_to_end()
        yield item


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGINT raise `KeyboardInterrupt` and SIGTERM `Terminated` within the context, unless the
    signal has another handler than Python's default."""

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
