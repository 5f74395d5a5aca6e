"""Batches in a few fixed shapes: padded, with a pair in each row, or packed, with several.

Every distinct shape is compiled once more, so there are at most `max_shapes` of them (4 unless told
otherwise), whatever the lengths in the text. The widths are chosen to waste the fewest places.

A pair goes to the narrowest shape that holds both its sides. What does not fill a batch there
moves on to the next wider shape, so that an epoch has at most one batch with empty rows, at the
widest. An empty row has length 0 and ids `<pad>`; give it no weight in the loss. No pair is left
out.

Packed rows hold as many pairs as fit, one behind the other; masks keep them apart, and positions
begin anew with each, so that a pair means the same in either kind of batch.

The order is a function of (seed, epoch) alone, so that a run can go on from any step.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.translation.text import EncodedPairs, Ragged
from experiments.translation.vocabulary import BOS, PAD


MAX_SHAPES = 4
MULTIPLE = 8
_OPEN_ROWS = 256  # rows that packing looks at for room


class Batch(NamedTuple):
    """B sentence pairs, padded to S source and T target places. All arrays are int32.

    Attributes:
        source: the source ids with `<eos>`, `[B, S]`.
        source_lengths: how many of them are not padding, `[B]`; 0 in an empty row.
        target_in: what the decoder reads, `<bos>` and then the target without `<eos>`, `[B, T]`.
        target_out: what it has to generate at each place, the target with `<eos>`, `[B, T]`.
        target_lengths: how many places of either are not padding, `[B]`; 0 in an empty row.
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
        source_segment_ids: which of its row's pairs a place belongs to, `[B, S]`; -1 at padding.
        source_positions: where in its sentence a place is, `[B, S]`.
        target_in: what the decoder reads, each sentence behind its `<bos>`, `[B, T]`.
        target_out: what it has to generate at each place, `[B, T]`.
        target_segment_ids: as for the source, `[B, T]`.
        target_positions: as for the source, `[B, T]`.
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
    """Which target places are tokens and not padding, bool `[B, T]`."""
    if isinstance(batch, Packed):
        return batch.target_segment_ids >= 0
    return np.arange(batch.target_out.shape[1]) < batch.target_lengths[:, None]


def filled_up(batch: AnyBatch, multiple: int, micro_batches: int = 1) -> AnyBatch:
    """The batch with empty rows at its end, so that `multiple` divides the number of rows. Where it
    is to be cut into `micro_batches`, empty rows are added at the end of each."""

    def fill(name: str, array: np.ndarray) -> np.ndarray:
        own = array.reshape(micro_batches, -1, *array.shape[1:])
        empty = ((0, 0), (0, -own.shape[1] % multiple), *((0, 0),) * (own.ndim - 2))
        own = np.pad(own, empty, constant_values=_IN_EMPTY_ROWS.get(name, 0))
        return own.reshape(-1, *array.shape[1:])

    return type(batch)(*(fill(*field) for field in batch._asdict().items()))


_IN_EMPTY_ROWS = {
    **dict.fromkeys(("source", "target_in", "target_out"), PAD),
    **dict.fromkeys(("source_segment_ids", "target_segment_ids"), -1),
}


class Shape(NamedTuple):
    """The one shape of a bucket: B rows of S source and T target places."""

    rows: int
    source_width: int
    target_width: int


class Epochs:
    """Batches of a set of encoded pairs, shuffled by epoch.

    Attributes:
        pairs: what is batched.
        shapes: the shapes of the batches, from narrow to wide.
    """

    pairs: EncodedPairs
    shapes: tuple[Shape, ...]
    _seed: int
    _units: int  # what is shuffled: pairs, or rows of them
    _steps: int

    def __len__(self) -> int:
        """Batches in an epoch: the same number in every epoch."""
        return self._steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The shuffled batches of an epoch from the step `start` on.

        Skipped batches are not made: going on inside an epoch costs no more than beginning one.

        Raises:
            ValueError: `epoch` or `start` is negative, or `start` is beyond the epoch's end.
        """
        if epoch < 0 or not 0 <= start <= len(self):
            raise ValueError(
                f"expected epoch >= 0 and start in 0..{len(self)}, got {epoch} and {start}"
            )
        return (self._gather(shape, rows) for shape, rows in self._plan(epoch)[start:])

    def from_step(self, step: int) -> Iterator[Any]:
        """The batches of all epochs, without end, from a step counted over all of them.

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
        # Sorting raw bits, because NumPy keeps those the same for ever, and `permutation` not.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        batches = self._assemble(_permutation(bits, self._units))
        return [batches[place] for place in _permutation(bits, len(batches))]

    def _assemble(self, order: np.ndarray) -> list[tuple[Shape, np.ndarray]]:
        """Cuts an order of the units into batches: their shapes and units, -1 for empty rows."""
        raise NotImplementedError

    def _gather(self, shape: Shape, rows: np.ndarray) -> AnyBatch:
        """The batch of these units."""
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
            pairs: what to batch; its ids have been checked against the vocabularies.
            tokens_per_batch: a batch gets as many rows as keep rows x max(S, T) within this
                number, but at least `row_multiple` of them.
            rows_per_batch: the number of rows of every batch instead; a multiple of `row_multiple`.
                Either way there are no more rows than it takes to hold all pairs at once.
            row_multiple: rows are a multiple of this number, so that they can be dealt out equally.
            seed: with the epoch, decides the order.
            max_shapes: the most distinct shapes.
            multiple: widths are multiples of this number.

        Raises:
            ValueError: no pairs, not exactly one of tokens_per_batch and rows_per_batch, or a
                number that must be positive and is not.
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
        """Every pair once, unshuffled, for evaluation.

        Yields:
            A batch and, per row, the place of its pair in the list that was encoded (`origin`),
            int64 `[B]`, -1 for empty rows. Rows are grouped by length; the places put results
            back into the order of the list.
        """
        for shape, rows in self._assemble(np.arange(len(self.pairs))):
            places = np.where(rows >= 0, self.pairs.origin[rows], -1)
            yield self._gather(shape, rows), places

    def _sides(self, buckets: int, multiple: int) -> list[tuple[int, int]]:
        """S and T of each bucket, never narrower than those before it, whose rest moves on."""
        sides = np.zeros((buckets, 2), np.int64)
        np.maximum.at(sides[:, 0], self._bucket, self.pairs.source.lengths)
        np.maximum.at(sides[:, 1], self._bucket, self.pairs.target.lengths)
        sides = -(-np.maximum.accumulate(sides, axis=0) // multiple) * multiple
        return [(int(source), int(target)) for source, target in sides]

    def _assemble(self, order: np.ndarray) -> list[tuple[Shape, np.ndarray]]:
        buckets = self._bucket[order]
        batches: list[tuple[Shape, np.ndarray]] = []
        rest = order[:0]
        for number, shape in enumerate(self.shapes):
            rows = np.concatenate([rest, order[buckets == number]])
            whole = len(rows) // shape.rows * shape.rows
            batches += [(shape, part) for part in rows[:whole].reshape(-1, shape.rows)]
            rest = rows[whole:]
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
    """Batches of rows that hold several pairs each, shuffled by epoch.

    Which pairs share a row is decided once for all epochs: they do not see each other.
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
            pairs: what to batch; its ids have been checked against the vocabularies.
            width: S and T, the places of a row on either side.
            tokens_per_batch, rows_per_batch, row_multiple, seed: as for `Batches`.

        Raises:
            ValueError: as for `Batches`, or a sentence of more than `width` tokens.
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
        whole = _filled_up(order, self._steps * shape.rows)
        return [(shape, rows) for rows in whole.reshape(-1, shape.rows)]

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


def _choose_widths(lengths: np.ndarray, multiple: int, most: int) -> np.ndarray:
    """At most `most` multiples of `multiple`, the last not below any length, such that rounding
    every length up to the next of them adds the fewest places in all; by dynamic programming."""
    candidates = np.unique(-(-lengths // multiple)) * multiple
    below = np.concatenate([[0], np.searchsorted(np.sort(lengths), candidates, side="right")])
    # cost[i]: the fewest places for all lengths up to candidate i, with as many widths as so far.
    cost = below[1:] * candidates
    choices: list[np.ndarray] = []
    for _ in range(min(most, len(candidates)) - 1):
        before = np.concatenate([[0], cost[:-1]])
        total = before + (below[1:, None] - below[:-1]) * candidates[:, None]
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
    # More rows than there are pairs would always be empty.
    most = -(-pairs // row_multiple) * row_multiple
    if tokens is None:
        assert rows is not None
        if rows < 1 or rows % row_multiple:
            raise ValueError(
                f"rows_per_batch must be a positive multiple of {row_multiple}, got {rows}"
            )
        return [min(rows, most)] * len(widths)
    _check_numbers(tokens_per_batch=tokens)
    return [
        min(max(tokens // int(width) // row_multiple, 1) * row_multiple, most) for width in widths
    ]


def _filled_up(rows: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([rows, np.full(count - len(rows), -1)])


def _pack(pairs: EncodedPairs, width: int, order: np.ndarray) -> list[np.ndarray]:
    """Rows of pairs, as places in `pairs`: each pair in its turn goes to the fullest row that has
    room for both its sides (best fit), among those begun last."""
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
    """Ids, number of the pair and position at each place `[B, width]`, the groups' sentences one
    behind the other."""
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
    """The given rows as int32 `[B, width]` and their lengths `[B]`; -1 stands for an empty row."""
    begin = np.where(rows >= 0, ragged.offsets[rows], 0)
    lengths = np.where(rows >= 0, ragged.offsets[rows + 1] - begin, 0)
    places = begin[:, None] + np.arange(width)
    values = ragged.values[np.minimum(places, len(ragged.values) - 1)]
    return np.where(_within(lengths, width), values, np.int32(PAD)), lengths.astype(np.int32)
