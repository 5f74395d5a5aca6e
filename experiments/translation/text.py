"""Sentence pairs as ids: `encode_pairs` makes `EncodedPairs`, the flat arrays from which batches
are gathered. Every sequence of ids ends with `<eos>`, and every length counts it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiments.translation.corpus import Pair
from experiments.translation.vocabulary import UNK, Vocabulary, check_ids, check_max_length


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of unequal length in one array.

    Attributes:
        values: all rows, concatenated, int32 `[sum of lengths]`.
        offsets: the start of each row in `values`, and the end of the last row, `[rows + 1]`.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        """Concatenates rows of integers.

        Raises:
            OverflowError: a value does not fit int32.
        """
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=offsets[1:])
        values = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(offsets[-1]))
        return cls(values, offsets)

    @property
    def lengths(self) -> np.ndarray:
        """The length of each row."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        row = range(len(self))[row]
        return self.values[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True, eq=False)
class EncodedPairs:
    """Sentence pairs as ids, `<eos>` last, checked against the sizes of the vocabularies.

    Attributes:
        source: a row per pair.
        target: a row per pair.
        origin: the index of each pair in the list from which it was encoded, `[pairs]`.
        source_size: tokens in the source vocabulary.
        target_size: tokens in the target vocabulary.

    Raises:
        ValueError: unequal numbers of rows, an empty row, or an id outside its vocabulary.
    """

    source: Ragged
    target: Ragged
    origin: np.ndarray
    source_size: int
    target_size: int

    def __post_init__(self) -> None:
        rows = len(self.source), len(self.target), len(self.origin)
        if len(set(rows)) != 1:
            raise ValueError(f"source, target and origin must have equally many rows, got {rows}")
        check_ids(self.source.values, self.source_size, name="source ids")
        check_ids(self.target.values, self.target_size, name="target ids")
        for name, side in (("source", self.source), ("target", self.target)):
            if not (side.lengths > 0).all():
                row = int((side.lengths > 0).argmin())
                raise ValueError(f"{name} row {row} is empty: every row ends with <eos>")

    def __len__(self) -> int:
        return len(self.origin)


@dataclass(frozen=True)
class EncodeReport:
    """A report on encoding pairs: counts of pairs and of the tokens of returned pairs.

    Attributes:
        pairs: pairs passed in.
        kept: pairs returned.
        dropped: pairs dropped, both sides together, because a side was too long.
        truncated_source: source sides truncated to the maximum.
        truncated_target: target sides truncated to the maximum.
        source_tokens: tokens on the source side, `<eos>` counted.
        target_tokens: tokens on the target side, `<eos>` counted.
        source_unknown: source tokens that are `<unk>`.
        target_unknown: target tokens that are `<unk>`.
    """

    pairs: int
    kept: int
    dropped: int
    truncated_source: int
    truncated_target: int
    source_tokens: int
    target_tokens: int
    source_unknown: int
    target_unknown: int

    def __str__(self) -> str:
        return (
            f"encoded {self.kept} of {self.pairs} pairs: {self.dropped} too long and dropped, "
            f"{self.truncated_source} source and {self.truncated_target} target sides truncated; "
            f"unknown: {self.source_unknown} of {self.source_tokens} source "
            f"and {self.target_unknown} of {self.target_tokens} target tokens"
        )


def encode_pairs(
    pairs: Sequence[Pair],
    source: Vocabulary,
    target: Vocabulary,
    *,
    max_length: int | None = None,
    too_long: Literal["drop", "truncate", "error"] = "drop",
) -> tuple[EncodedPairs, EncodeReport]:
    """Encodes both sides of every pair.

    If a side is longer than `max_length` (counting `<eos>`), `too_long` decides: "drop" drops the
    whole pair, "truncate" keeps the first `max_length - 1` tokens of the side and its `<eos>`, and
    "error" raises. The report counts dropped pairs and truncated sides.

    Raises:
        ValueError: a side is too long, `max_length` is too small, or `too_long` is none of these.
    """
    if too_long not in ("drop", "truncate", "error"):
        raise ValueError(f"too_long must be 'drop', 'truncate' or 'error', got {too_long!r}")
    check_max_length(max_length)
    rows: tuple[list[list[int]], list[list[int]]] = ([], [])
    origin: list[int] = []
    truncated = [0, 0]
    for place, pair in enumerate(pairs):
        ids = [source.encode(pair.source), target.encode(pair.target)]
        too_much = [max_length is not None and len(side) > max_length for side in ids]
        if any(too_much):
            if too_long == "drop":
                continue
            for side, vocabulary in enumerate((source, target)):
                truncated[side] += too_much[side]
                try:
                    ids[side] = vocabulary.encode(
                        pair[side], max_length=max_length, too_long=too_long
                    )
                except ValueError as error:
                    raise ValueError(f"pair {place}: {error}") from None
        origin.append(place)
        rows[0].append(ids[0])
        rows[1].append(ids[1])
    encoded = EncodedPairs(
        Ragged.of(rows[0]), Ragged.of(rows[1]), np.asarray(origin, int), len(source), len(target)
    )
    sides = encoded.source.values, encoded.target.values
    tokens, unknown = map(len, sides), (int((side == UNK).sum()) for side in sides)
    dropped = len(pairs) - len(encoded)
    return encoded, EncodeReport(len(pairs), len(encoded), dropped, *truncated, *tokens, *unknown)
