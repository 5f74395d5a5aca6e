"""Batches of a few fixed shapes: padded, with one pair in each row, or packed, with several.

Every distinct shape needs a compilation, so there are at most `max_shapes` of them (4 by default),
whatever the lengths in the text. The widths are chosen to minimize padding.

A pair goes to the narrowest shape that holds both its sides. Pairs that do not fill a batch of that
shape move on to the next wider shape, so that an epoch has at most one batch with empty rows, in
the widest shape. An empty row has length 0 and ids `<pad>`; give it no weight in the loss. Every
pair is in exactly one batch of an epoch.

Packed rows hold as many pairs as fit, one after another. Masks hide the pairs of a row from each
other and positions restart with each pair, so that the model computes the same in both kinds of
batch.

The order depends on (seed, epoch) alone, so that a run can resume from any step.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.translation.text import EncodedPairs, Ragged
from experiments.translation.vocabulary import BOS, PAD


MAX_SHAPES = 4
MULTIPLE = 8
_OPEN_ROWS = 256  # packing searches this many of the newest rows for room


class Batch(NamedTuple):
    """B sentence pairs, padded to S source and T target places. All arrays are int32.

    Attributes:
        source: the source ids with `<eos>`, `[B, S]`.
        source_lengths: the number of source ids that are not padding, `[B]`; 0 in an empty row.
        target_in: the decoder's input, `<bos>` and then the target without `<eos>`, `[B, T]`.
        target_out: the labels, the target with `<eos>`, `[B, T]`.
        target_lengths: the number of target places that are not padding, `[B]`; 0 in an empty row.
    """

    source: np.ndarray
    source_lengths: np.ndarray
    target_in: np.ndarray
    target_out: np.ndarray
    target_lengths: np.ndarray


class Packed(NamedTuple):
    """B rows of S source and T target places, several pairs in each. All arrays are int32.

    Attributes:
        source: the source ids, each sentence with its `<eos>`, `[B, S]`.
        source_segment_ids: the number, in its row, of each place's pair, `[B, S]`; -1 at padding.
        source_positions: the position of each place in its sentence, `[B, S]`.
        target_in: the decoder's input, each sentence after its `<bos>`, `[B, T]`.
        target_out: the labels, `[B, T]`.
        target_segment_ids: the segment ids of the target, `[B, T]`.
        target_positions: the positions of the target, `[B, T]`.
    """

    source: np.ndarray
    source_segment_ids: np.ndarray
    source_positions: np.ndarray
    target_in: np.ndarray
    target_out: np.ndarray
    target_segment_ids: np.ndarray
    target_positions: np.ndarray


AnyBatch = Batch | Packed


def loss_mask(batch: AnyBatch) -> Any:
    """Returns the mask of the target places that are not padding, bool `[B, T]`."""
    if isinstance(batch, Packed):
        return batch.target_segment_ids >= 0
    return np.arange(batch.target_out.shape[1]) < batch.target_lengths[:, None]


def filled_up(batch: AnyBatch, multiple: int, micro_batches: int = 1) -> AnyBatch:
    """Adds empty rows at the end of each of the batch's `micro_batches`, so that `multiple` divides
    the number of rows of each."""

    def fill(name: str, array: np.ndarray) -> np.ndarray:
        parts = array.reshape(micro_batches, -1, *array.shape[1:])
        empty = ((0, 0), (0, -parts.shape[1] % multiple), *((0, 0),) * (parts.ndim - 2))
        parts = np.pad(parts, empty, constant_values=_IN_EMPTY_ROWS.get(name, 0))
        return parts.reshape(-1, *array.shape[1:])

    return type(batch)(*(fill(*field) for field in batch._asdict().items()))


_IN_EMPTY_ROWS = {
    **dict.fromkeys(("source", "target_in", "target_out"), PAD),
    **dict.fromkeys(("source_segment_ids", "target_segment_ids"), -1),
}


class Shape(NamedTuple):
    """The shape of the batches of a bucket: B rows of S source and T target places."""

    rows: int
    source_width: int
    target_width: int


class Epochs:
    """Batches of a set of encoded pairs, shuffled by epoch.

    Attributes:
        pairs: the pairs in the batches.
        shapes: the shapes of the batches, from narrow to wide.
    """

    pairs: EncodedPairs
    shapes: tuple[Shape, ...]
    _seed: int
    _units: int  # the number of units to shuffle: pairs, or packed rows
    _steps: int

    def __len__(self) -> int:
        """Returns the number of batches in an epoch, which is the same for every epoch."""
        return self._steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Returns an iterator over the shuffled batches of an epoch, from the step `start` on.

        Skipped batches are not built, so that resuming inside an epoch costs nothing extra.

        Raises:
            ValueError: `epoch` or `start` is negative, or `start` is beyond the epoch's end.
        """
        if epoch < 0 or not 0 <= start <= len(self):
            raise ValueError(
                f"expected epoch >= 0 and start in 0..{len(self)}, got {epoch} and {start}"
            )
        return (self._gather(shape, rows) for shape, rows in self._plan(epoch)[start:])

    def from_step(self, step: int) -> Iterator[Any]:
        """Returns an endless iterator over the batches of all epochs, from the step `step` on.

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        return self._from_step(step)

    def _from_step(self, step: int) -> Iterator[Any]:
        epoch, start = divmod(step, len(self))
        while True:
            yield from self.epoch(epoch, start)
            epoch, start = epoch + 1, 0

    def _plan(self, epoch: int) -> list[tuple[Shape, np.ndarray]]:
        # Sorts raw bits, because NumPy guarantees these for all versions, but not `permutation`.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        batches = self._assemble(_permutation(bits, self._units))
        return [batches[place] for place in _permutation(bits, len(batches))]

    def _assemble(self, order: np.ndarray) -> list[tuple[Shape, np.ndarray]]:
        """Splits an order of the units into batches, each a shape and its units (-1 for an empty
        row)."""
        raise NotImplementedError

    def _gather(self, shape: Shape, rows: np.ndarray) -> AnyBatch:
        """Builds the batch of these units."""
        raise NotImplementedError


class Batches(Epochs):
    """Padded batches, shuffled by epoch or in order."""

    def __init__(
        self,
        pairs: EncodedPairs,
        *,
        tokens_per_batch: int | None = None,
        rows_per_batch: int | None = None,
        row_multiple: int = 1,
        seed: int = 0,
        max_shapes: int = MAX_SHAPES,
        multiple: int = MULTIPLE,
    ) -> None:
        """Chooses the shapes.

        Args:
            pairs: the pairs to batch; their ids have been checked against the vocabularies.
            tokens_per_batch: the greatest rows x max(S, T) of a batch, unless `row_multiple` rows
                need more.
            rows_per_batch: instead, the number of rows of every batch, a multiple of
                `row_multiple`. In both cases a batch has no more rows than all pairs together
                need.
            row_multiple: the number of rows of a batch is a multiple of this number, so that they
                can be divided equally.
            seed: decides the order, together with the epoch.
            max_shapes: the greatest number of distinct shapes.
            multiple: widths are multiples of this number.

        Raises:
            ValueError: there are no pairs, not exactly one of tokens_per_batch and rows_per_batch
                is given, or a number that must be positive is not.
        """
        _check_numbers(row_multiple=row_multiple, max_shapes=max_shapes, multiple=multiple)
        _check_pairs(pairs, seed)
        self.pairs = pairs
        self._seed, self._units = seed, len(pairs)
        lengths = np.maximum(pairs.source.lengths, pairs.target.lengths)
        widths = _choose_widths(lengths, multiple, max_shapes)
        self._bucket = np.searchsorted(widths, lengths)
        rows = _rows(widths, len(pairs), tokens_per_batch, rows_per_batch, row_multiple)
        self.shapes = tuple(
            Shape(count, *sides)
            for count, sides in zip(rows, self._sides(len(widths), multiple), strict=True)
        )
        self._steps = len(self._assemble(np.arange(len(pairs))))

    def in_order(self) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yields batches of every pair once, unshuffled, for evaluation.

        Yields:
            A batch and, for each row, the index of its pair in the list that was encoded
            (`origin`), int64 `[B]`, -1 for empty rows. Rows are grouped by length; the indices
            restore the order of the list.
        """
        for shape, rows in self._assemble(np.arange(len(self.pairs))):
            indices = np.where(rows >= 0, self.pairs.origin[rows], -1)
            yield self._gather(shape, rows), indices

    def _sides(self, buckets: int, multiple: int) -> list[tuple[int, int]]:
        """Returns S and T of each bucket, at least as wide as all buckets before it, because their
        remaining pairs move on to it."""
        sides = np.zeros((buckets, 2), np.int64)
        np.maximum.at(sides[:, 0], self._bucket, self.pairs.source.lengths)
        np.maximum.at(sides[:, 1], self._bucket, self.pairs.target.lengths)
        sides = -(-np.maximum.accumulate(sides, axis=0) // multiple) * multiple
        return [(int(source), int(target)) for source, target in sides]

    def _assemble(self, order: np.ndarray) -> list[tuple[Shape, np.ndarray]]:
        buckets = self._bucket[order]
        batches: list[tuple[Shape, np.ndarray]] = []
        rest = order[:0]  # pairs that did not fill a batch of a narrower shape
        for number, shape in enumerate(self.shapes):
            rows = np.concatenate([rest, order[buckets == number]])
            full = len(rows) // shape.rows * shape.rows
            batches += [(shape, part) for part in rows[:full].reshape(-1, shape.rows)]
            rest = rows[full:]
        if len(rest):
            batches.append((self.shapes[-1], _filled_up(rest, self.shapes[-1].rows)))
        return batches

    def _gather(self, shape: Shape, rows: np.ndarray) -> Batch:
        source, source_lengths = _padded(self.pairs.source, rows, shape.source_width)
        target, target_lengths = _padded(self.pairs.target, rows, shape.target_width)
        shifted = np.empty_like(target)
        shifted[:, 0] = BOS
        shifted[:, 1:] = target[:, :-1]
        shifted[~_within(target_lengths, shape.target_width)] = PAD
        return Batch(source, source_lengths, shifted, target, target_lengths)


class PackedBatches(Epochs):
    """Batches of packed rows, each of several pairs, shuffled by epoch.

    The rows are packed once for all epochs; pairs do not influence others of their row.
    """

    def __init__(
        self,
        pairs: EncodedPairs,
        *,
        width: int,
        tokens_per_batch: int | None = None,
        rows_per_batch: int | None = None,
        row_multiple: int = 1,
        seed: int = 0,
    ) -> None:
        """Packs the rows.

        Args:
            pairs: the pairs to batch; their ids have been checked against the vocabularies.
            width: S and T, the places of a row on each side.
            tokens_per_batch, rows_per_batch, row_multiple, seed: see `Batches`.

        Raises:
            ValueError: an argument that `Batches` refuses, or a sentence of more than `width`
                tokens.
        """
        _check_numbers(row_multiple=row_multiple, width=width)
        _check_pairs(pairs, seed)
        longest = int(max(pairs.source.lengths.max(), pairs.target.lengths.max()))
        if longest > width:
            raise ValueError(
                f"width: expected at least {longest}, the longest sentence, got {width}"
            )
        self.pairs = pairs
        self._seed = seed
        self._packed = _pack(pairs, width, _permutation(np.random.PCG64(seed), len(pairs)))
        self._units = len(self._packed)
        widths = np.array([width])
        rows = _rows(widths, self._units, tokens_per_batch, rows_per_batch, row_multiple)
        self.shapes = (Shape(rows[0], width, width),)
        self._steps = -(-self._units // rows[0])

    def _assemble(self, order: np.ndarray) -> list[tuple[Shape, np.ndarray]]:
        (shape,) = self.shapes
        filled = _filled_up(order, self._steps * shape.rows)
        return [(shape, rows) for rows in filled.reshape(-1, shape.rows)]

    def _gather(self, shape: Shape, rows: np.ndarray) -> Packed:
        groups = [self._packed[row] if row >= 0 else self._packed[0][:0] for row in rows]
        source, source_segment_ids, source_positions = _joined(
            self.pairs.source, groups, shape.source_width
        )
        target, target_segment_ids, target_positions = _joined(
            self.pairs.target, groups, shape.target_width
        )
        shifted = np.where(target_positions == 0, BOS, np.roll(target, 1, axis=1))
        shifted = np.where(target_segment_ids >= 0, shifted, PAD).astype(np.int32)
        sides = source, source_segment_ids, source_positions
        return Packed(*sides, shifted, target, target_segment_ids, target_positions)


def _check_pairs(pairs: EncodedPairs, seed: int) -> None:
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    if len(pairs) == 0:
        raise ValueError("pairs: expected at least one pair to batch, got none")


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def _choose_widths(lengths: np.ndarray, multiple: int, max_widths: int) -> np.ndarray:
    """Chooses the widths that need the least padding, by dynamic programming: at most
    `max_widths` multiples of `multiple`, the last at least as great as every length."""
    candidates = np.unique(-(-lengths // multiple)) * multiple
    below = np.concatenate([[0], np.searchsorted(np.sort(lengths), candidates, side="right")])
    # cost[i]: the fewest places for all lengths up to candidate i, with the widths allowed so far.
    cost = below[1:] * candidates
    choices: list[np.ndarray] = []
    for _ in range(min(max_widths, len(candidates)) - 1):
        narrower_cost = np.concatenate([[0], cost[:-1]])
        total = narrower_cost + (below[1:, None] - below[:-1]) * candidates[:, None]
        total[np.triu_indices(len(candidates), 1)] = np.iinfo(np.int64).max
        choices.append(total.argmin(axis=1))
        cost = total.min(axis=1)
    widths = [len(candidates) - 1]
    for first in reversed(choices):
        if first[widths[-1]] > 0:
            widths.append(first[widths[-1]] - 1)
    return candidates[widths[::-1]]


def _rows(
    widths: np.ndarray, pairs: int, tokens: int | None, rows: int | None, row_multiple: int
) -> Sequence[int]:
    if (tokens is None) == (rows is None):
        raise ValueError(
            f"expected exactly one of tokens_per_batch and rows_per_batch, got {tokens} and {rows}"
        )
    # Rows beyond the number of pairs would always be empty.
    max_rows = -(-pairs // row_multiple) * row_multiple
    if tokens is None:
        assert rows is not None
        if rows < 1 or rows % row_multiple:
            raise ValueError(
                f"rows_per_batch must be a positive multiple of {row_multiple}, got {rows}"
            )
        return [min(rows, max_rows)] * len(widths)
    _check_numbers(tokens_per_batch=tokens)
    return [
        min(max(tokens // int(width) // row_multiple, 1) * row_multiple, max_rows)
        for width in widths
    ]


def _filled_up(rows: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([rows, np.full(count - len(rows), -1)])


def _pack(pairs: EncodedPairs, width: int, order: np.ndarray) -> list[np.ndarray]:
    """Packs pairs into rows of indices into `pairs`: each pair of `order` goes to the fullest of
    the newest rows that has room for both its sides (best fit)."""
    sides = np.stack([pairs.source.lengths, pairs.target.lengths], axis=1)
    free = np.zeros((len(order), 2), np.int64)
    rows: list[list[int]] = []
    for pair in order:
        first = max(0, len(rows) - _OPEN_ROWS)
        room = (free[first : len(rows)] - sides[pair]).min(axis=1)
        fits = np.flatnonzero(room >= 0)
        if len(fits):
            row = first + int(fits[room[fits].argmin()])
        else:
            row = len(rows)
            rows.append([])
            free[row] = width
        rows[row].append(int(pair))
        free[row] -= sides[pair]
    return [np.array(row) for row in rows]


def _joined(
    ragged: Ragged, groups: Sequence[np.ndarray], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenates the sentences of each group into a row.

    Returns:
        At each place `[B, width]` the id, the number of its sentence in the group, and its
        position in that sentence.
    """
    ids, numbers, positions = (
        np.full((len(groups), width), fill, np.int32) for fill in (PAD, -1, 0)
    )
    for row, group in enumerate(groups):
        end = 0
        for number, pair in enumerate(group):
            sentence = ragged[pair]
            begin, end = end, end + len(sentence)
            ids[row, begin:end] = sentence
            numbers[row, begin:end] = number
            positions[row, begin:end] = np.arange(len(sentence))
    return ids, numbers, positions


def _permutation(bits: np.random.PCG64, count: int) -> np.ndarray:
    return np.argsort(bits.random_raw(count), kind="stable")


def _within(lengths: np.ndarray, width: int) -> np.ndarray:
    return np.arange(width) < lengths[:, None]


def _padded(ragged: Ragged, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows as int32 `[B, width]` and their lengths `[B]`; -1 selects an empty row."""
    begin = np.where(rows >= 0, ragged.offsets[rows], 0)
    lengths = np.where(rows >= 0, ragged.offsets[rows + 1] - begin, 0)
    indices = begin[:, None] + np.arange(width)
    values = ragged.values[np.minimum(indices, len(ragged.values) - 1)]
    return np.where(_within(lengths, width), values, np.int32(PAD)), lengths.astype(np.int32)
