"""Early stopping, as a function of the metrics of a run and of nothing else.

So a run that goes on from a checkpoint remembers as much as one that was never interrupted.
"""

from collections.abc import Mapping, Sequence
from typing import Any


Record = Mapping[str, Any]


def best(records: Sequence[Record]) -> Record | None:
    """The record of the lowest validation loss, the first of equals; None if there is none."""
    measured = [record for record in _validations(records) if record["validation_loss"] is not None]
    return min(measured, key=lambda record: record["validation_loss"], default=None)


def waited(records: Sequence[Record]) -> int:
    """How many validations there have been since the best one."""
    found = best(records)
    since = 0 if found is None else found["step"]
    return sum(record["step"] > since for record in _validations(records))


def has_stopped(records: Sequence[Record], patience: int) -> bool:
    """Whether training has waited for a lower validation loss as long as it may; 0 is for ever."""
    return 0 < patience <= waited(records)


def _validations(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if "validation_loss" in record]
