"""Early stopping, as functions of a run's metrics.

There is no other state, so that a resumed run stops at the same step as an uninterrupted one.
"""

from collections.abc import Mapping, Sequence
from typing import Any


Record = Mapping[str, Any]


def best(records: Sequence[Record]) -> Record | None:
    """Returns the first record with the lowest validation loss; None without validations."""
    measured = [record for record in _validations(records) if record["validation_loss"] is not None]
    return min(measured, key=lambda record: record["validation_loss"], default=None)


def waited(records: Sequence[Record]) -> int:
    """Returns the number of validations since the best one."""
    best_record = best(records)
    best_step = 0 if best_record is None else best_record["step"]
    return sum(record["step"] > best_step for record in _validations(records))


def has_stopped(records: Sequence[Record], patience: int) -> bool:
    """Returns whether the last `patience` validations had no lower loss; never for patience 0."""
    return 0 < patience <= waited(records)


def _validations(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if "validation_loss" in record]
