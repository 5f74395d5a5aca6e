"""A run's folder, with the metrics that training reports.

The folder may come from an untrusted source, so links, pipes and devices in it are refused: they
would lead to files outside the folder.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs.console import json_line
from experiments.runs.files import append, inside, parsed, replace


@dataclass(frozen=True)
class Folder:
    """The folder of a run; its `metrics.jsonl` has one line for each report during training."""

    directory: Path

    def path(self, name: str) -> Path:
        """Returns the path of a file or folder of the run.

        Raises:
            ValueError: part of the path is a link, a pipe or a device.
        """
        return inside(self.directory, name)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run.

        Raises:
            Unwritten: the system refuses to write.
        """
        replace(self.path(name), text)

    def report(self, record: dict[str, Any]) -> None:
        """Appends a line to the metrics; numbers that are not finite become null.

        Raises:
            Unwritten: the system refuses to write.
        """
        append(self.path("metrics.jsonl"), json_line(record))

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the records reported so far, without an incomplete last line."""
        path = self.path("metrics.jsonl")
        lines = path.read_text("utf-8").split("\n") if path.exists() else [""]
        numbered = enumerate(lines[:-1], start=1)
        return [_record(line, f"{path}:{number}") for number, line in numbered]

    def forget_metrics_after(self, step: int) -> None:
        """Deletes the records of later steps, and an incomplete last line."""
        records = [record for record in self.metrics() if record["step"] <= step]
        self.write("metrics.jsonl", "".join(json_line(record) + "\n" for record in records))


def free_directory(directory: Path) -> Path:
    """Returns the first of DIRECTORY, DIRECTORY-2, DIRECTORY-3, ... that does not exist."""
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
