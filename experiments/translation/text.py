"""Sentence pairs as ids: `encode_pairs` makes `EncodedPairs`, the flat arrays that batches are
gathered from. Every sequence of ids ends with `<eos>`, and every length counts it."""

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
        values: all rows, one after the other, int32 `[sum of lengths]`.
        offsets: where each row begins and, last, where the last one ends: `[rows + 1]`.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        """Puts rows of integers together.

        Raises:
            OverflowError: a value that does not fit int32.
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
        origin: the place of each pair in the list it was encoded from, `[pairs]`.
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
    """What became of the pairs that were encoded. Tokens are those of the pairs kept, with `<eos>`.

    Attributes:
        pairs: pairs given.
        kept: pairs returned.
        dropped: pairs dropped, both sides together, because a side was too long.
        truncated_source: source sides cut to the maximum.
        truncated_target: target sides cut to the maximum.
        source_tokens: tokens on the source side.
        target_tokens: tokens on the target side.
        source_unknown: those of them that are `<unk>`.
        target_unknown: those of them that are `<unk>`.
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

    A side longer than `max_length` (counting `<eos>`) is, by `too_long`, a reason to drop the whole
    pair, cut to its first `max_length - 1` tokens and its `<eos>`, or an error. The report counts
    what happened.

    Raises:
        ValueError: a side is too long, or an argument is not one of those named.
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
