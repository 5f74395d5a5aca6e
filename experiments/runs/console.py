"""Console output: text for people, lines of JSON for programs, and progress bars."""

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm


@dataclass(frozen=True)
class Console:
    """A writer of JSON records for a program that runs the command.

    Attributes:
        machine: the stream of JSON lines, or None if no program reads them.
    """

    machine: TextIO | None = None

    def emit(self, event: str, **fields: Any) -> None:
        """Writes a record, if a program reads them."""
        if self.machine is not None:
            print(json_line({"event": event, **fields}), file=self.machine, flush=True)


@contextlib.contextmanager
def listening(to_program: bool) -> Iterator[Console]:
    """Yields a console; with `to_program`, its records go to stdout, and prints go to stderr."""
    if not to_program:
        yield Console()
        return
    machine = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield Console(machine)


def speak_utf8() -> None:
    """Makes stdout and stderr UTF-8, whatever the platform's default is."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


_WIDE = 80  # the least number of columns for a bar with counts and speeds

# C0 without tab and newline, DEL, C1, line separators, and marks of the direction of text.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (
        *(code for code in range(0x20) if chr(code) not in "\t\n"),
        *range(0x7F, 0xA0),
        *(0x061C, 0x200E, 0x200F, 0x2028, 0x2029),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
    )
}


def visible(text: str) -> str:
    """Returns the text with its control characters spelled out, such as ESC as `\\x1b`."""
    return text.translate(_CONTROLS)


class _Visible(io.TextIOBase):
    """A terminal that shows control characters instead of acting on them."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        self.terminal.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.terminal.flush()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.terminal.fileno()


@contextlib.contextmanager
def visible_controls() -> Iterator[None]:
    """Shows control characters on terminals within the context, so that text from a file or a model
    cannot control the terminal; output to files and pipes is unchanged."""
    with contextlib.ExitStack() as stack:
        for redirect, stream in (
            (contextlib.redirect_stdout, sys.stdout),
            (contextlib.redirect_stderr, sys.stderr),
        ):
            if stream.isatty():
                stack.enter_context(redirect(_Visible(stream)))
        yield


def json_line(record: dict[str, Any]) -> str:
    """Formats a record as one line of JSON, with null for numbers that are not finite."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False)


class _Bar(tqdm):
    """A progress bar that says how much time is left. It shows fewer fields on narrow terminals, so
    that none is cut off."""

    @property
    def format_dict(self) -> dict[str, Any]:
        """The fields and the format of a line."""
        fields = dict(super().format_dict)
        columns = fields["ncols"]
        if columns is not None and columns < _WIDE:
            first, _, _ = (fields["postfix"] or "").partition(", ")
            short = "{percentage:3.0f}%|{bar}| {remaining} left{postfix}"
            return fields | {"bar_format": short, "postfix": first}
        times = "{elapsed}, {remaining} left, {rate_fmt}{postfix}"
        return fields | {"bar_format": "{l_bar}{bar}| {n_fmt}/{total_fmt} [" + times + "]"}


def progress(total: int, *, unit: str, initial: int = 0) -> tqdm:
    """Creates a progress bar on stderr, which is disabled unless stderr is a terminal."""
    stream = sys.stderr
    return _Bar(
        file=stream.terminal if isinstance(stream, _Visible) else stream,  # bars move the cursor
        total=total,
        initial=initial,
        unit=unit,
        dynamic_ncols=True,
        leave=False,
        disable=not stream.isatty(),
    )
