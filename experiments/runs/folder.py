"""A run's folder, with the metrics that training reports.

The folder may come from somebody else, so nothing in it is a link, a pipe or a device, which would
lead elsewhere.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs.console import json_line
from experiments.runs.files import append, inside, parsed, replace


@dataclass(frozen=True)
class Folder:
    """The folder of a run; `metrics.jsonl` in it has a line for each report while training."""

    directory: Path

    def path(self, name: str) -> Path:
        """The path of a file or folder of the run.

        Raises:
            ValueError: it leads elsewhere, as a link does.
        """
        return inside(self.directory, name)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run.

        Raises:
            Unwritten: the system refuses it.
        """
        replace(self.path(name), text)

    def report(self, record: dict[str, Any]) -> None:
        """Appends a line to the metrics; a number that JSON has not got becomes null.

        Raises:
            Unwritten: the system refuses it.
        """
        append(self.path("metrics.jsonl"), json_line(record))

    def metrics(self) -> list[dict[str, Any]]:
        """The records reported so far, without a last line cut short."""
        path = self.path("metrics.jsonl")
        lines = path.read_text("utf-8").split("\n") if path.exists() else [""]
        return [_record(line, f"{path}:{at}") for at, line in enumerate(lines[:-1], start=1)]

    def forget_metrics_after(self, step: int) -> None:
        """Drops the records of steps that will be made again, and a last line cut short."""
        kept = [record for record in self.metrics() if record["step"] <= step]
        self.write("metrics.jsonl", "".join(json_line(record) + "\n" for record in kept))


def free_directory(directory: Path) -> Path:
    """The first of DIRECTORY, DIRECTORY-2, DIRECTORY-3, ... that does not exist."""
    number, free = 1, directory
    while free.exists():
        number += 1
        free = directory.with_name(f"{directory.name}-{number}")
    return free


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        record = parsed(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(f"{place}: expected a record of metrics, got {line[:40]!r}")
    return record
