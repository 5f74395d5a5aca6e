"""What a command says: to people in words, to programs in lines of JSON."""

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
    """Where records for programs go.

    Attributes:
        machine: a stream of JSON lines, or None where no program listens.
    """

    machine: TextIO | None = None

    def emit(self, event: str, **fields: Any) -> None:
        """Writes a record, if a program listens."""
        if self.machine is not None:
            print(json_line({"event": event, **fields}), file=self.machine, flush=True)


@contextlib.contextmanager
def listening(to_program: bool) -> Iterator[Console]:
    """While it lasts, a program has stdout to itself, and what is printed goes to stderr."""
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


_WIDE = 80  # columns from which on a bar has room for counts and speeds

# C0 without tab and newline, DEL, C1, separators of lines, and what turns the direction of text.
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
    """The text with its control characters spelled out, such as ESC as `\\x1b`."""
    return text.translate(_CONTROLS)


class _Visible(io.TextIOBase):
    """A terminal that shows control characters instead of obeying them."""

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
    """While it lasts, no text from a file or a model can command a terminal; what goes into files
    and pipes stays as it is."""
    with contextlib.ExitStack() as stack:
        for redirect, stream in (
            (contextlib.redirect_stdout, sys.stdout),
            (contextlib.redirect_stderr, sys.stderr),
        ):
            if stream.isatty():
                stack.enter_context(redirect(_Visible(stream)))
        yield


def json_line(record: dict[str, Any]) -> str:
    """A record in one line of JSON, with null for numbers that are not finite."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False)


class _Bar(tqdm):
    """A bar that says less where the terminal is narrow, so that what it says is whole."""

    @property
    def format_dict(self) -> dict[str, Any]:
        """What a line is made of."""
        given = dict(super().format_dict)
        columns = given["ncols"]
        if columns is not None and columns < _WIDE:
            first, _, _ = (given["postfix"] or "").partition(", ")
            short = "{percentage:3.0f}%|{bar}| {remaining}{postfix}"
            given |= {"bar_format": short, "postfix": first}
        return given


def progress(total: int, *, unit: str, initial: int = 0) -> tqdm:
    """A bar on stderr with what remains, where stderr is a terminal; else nothing."""
    stream = sys.stderr
    return _Bar(
        file=stream.terminal if isinstance(stream, _Visible) else stream,  # it moves the cursor
        total=total,
        initial=initial,
        unit=unit,
        dynamic_ncols=True,
        leave=False,
        disable=not stream.isatty(),
    )
