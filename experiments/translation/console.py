"""What a command says: to people in words, to programs in lines of JSON."""

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator
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


def json_line(record: dict[str, Any]) -> str:
    """A record in one line of JSON, with null for numbers that are not finite."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False)


def progress(total: int, *, unit: str, initial: int = 0) -> tqdm:
    """A bar on stderr with what remains, where stderr is a terminal; else nothing."""
    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        dynamic_ncols=True,
        leave=False,
        disable=not sys.stderr.isatty(),
    )
