"""From sentences to ids and back: vocabulary, encoded pairs.

A `Tokenizer` cuts a sentence into tokens and puts tokens together for display: words (`words`) or
pieces of them (`bpe`). A `Vocabulary` owns one and numbers its tokens, so that saving the
vocabulary saves how text was cut. `learn_vocabularies` makes those of a training text, and
`encode_pairs` turns sentence pairs into `EncodedPairs`, the flat arrays that batches are gathered
from.

Every sequence of ids ends with `<eos>`, and every length counts it.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from experiments.translation import bpe
from experiments.translation.corpus import Pair
from experiments.translation.presets import Config
from experiments.translation.words import Tokenizer, WordTokenizer


SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>")
PAD, UNK, BOS, EOS = range(4)

_FORMAT = "jattn-vocabulary"
_SHORTEST = 2  # one token and <eos>


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their ids: the four specials, then `words` from id 4 on.

    A special's spelling is never a word: a text with `<eos>` in it cannot end a sequence.

    Attributes:
        words: the tokens without the specials, in the order of their ids.
        tokenizer: how text is cut into them.
    """

    words: tuple[str, ...]
    tokenizer: Tokenizer = field(default_factory=WordTokenizer)
    _ids: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: place for place, word in enumerate(self.words, start=len(SPECIALS))}
        if len(ids) != len(self.words):
            twice = next(word for word, count in Counter(self.words).items() if count > 1)
            raise ValueError(f"vocabulary: expected different words, got {twice!r} twice")
        for word in self.words:
            if not isinstance(word, str) or not word or word in SPECIALS:
                raise ValueError(f"vocabulary: {word!r} cannot be a word")
        object.__setattr__(self, "_ids", ids)

    @classmethod
    def build(
        cls,
        sentences: Iterable[str],
        *,
        minimum_count: int = 1,
        size: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> "Vocabulary":
        """The tokens that occur at least `minimum_count` times, by falling count, then spelling; no
        more of them than make `size` tokens with the specials.

        Give it training sentences and no others.

        Raises:
            ValueError: `minimum_count` below 1.
        """
        if minimum_count < 1:
            raise ValueError(f"minimum_count must be at least 1, got {minimum_count}")
        tokenizer = WordTokenizer() if tokenizer is None else tokenizer
        counts = Counter(itertools.chain.from_iterable(map(tokenizer.tokenize, sentences)))
        frequent = (
            (-count, word)
            for word, count in counts.items()
            if count >= minimum_count and word not in SPECIALS
        )
        most = None if size is None else max(size - len(SPECIALS), 0)
        return cls(tuple(word for _, word in sorted(frequent)[:most]), tokenizer)

    @classmethod
    def learn_pairs(
        cls, sentences: Iterable[str], *, size: int, minimum_count: int = 1, lower: bool = True
    ) -> "Vocabulary":
        """Byte-pair encoding learned from these sentences, with at most `size` tokens.

        All characters of the sentences are in it, also those that stand only inside of tokens.

        Raises:
            ValueError: there are more characters than that.
        """
        learned = bpe.PairTokenizer.learn(
            sentences, size=size - len(SPECIALS), minimum_count=minimum_count, lower=lower
        )
        least = len(SPECIALS) + len(learned.alphabet)
        if size < least:
            raise ValueError(
                f"vocabulary_size: expected at least {least}, for {len(learned.alphabet)} "
                f"different characters in the text, got {size}"
            )
        return cls(learned.tokens, learned)

    def __len__(self) -> int:
        return len(SPECIALS) + len(self.words)

    def encode(
        self,
        sentence: str,
        *,
        max_length: int | None = None,
        too_long: Literal["error", "truncate"] = "error",
    ) -> list[int]:
        """The ids of a sentence, `<eos>` last, `<unk>` for tokens that are not in the vocabulary.

        `max_length` counts `<eos>`. A longer sentence raises, or with `too_long="truncate"` keeps
        its first `max_length - 1` tokens and its `<eos>`.

        Raises:
            ValueError: the sentence is too long, or an argument is not one of those named.
        """
        _check_limit(max_length)
        if too_long not in ("error", "truncate"):
            raise ValueError(f"too_long must be 'error' or 'truncate', got {too_long!r}")
        ids = self._encode(sentence)
        if max_length is None or len(ids) <= max_length:
            return ids
        if too_long == "truncate":
            return _truncated(ids, max_length)
        raise ValueError(_too_long_message(sentence, len(ids), max_length))

    def normalize(self, sentence: str) -> str:
        """The sentence as `decode` would print it, were all its tokens known: what to compare with
        for an exact match."""
        return self.tokenizer.detokenize(self.tokenizer.tokenize(sentence))

    def split_words(self, sentence: str) -> list[str]:
        """The words and punctuation marks of a sentence, known or not."""
        return self.tokenizer.as_words(self.tokenizer.tokenize(sentence))

    def unknown(self, sentence: str) -> list[str]:
        """The tokens of a sentence that are not in the vocabulary, in their order."""
        return [token for token in self.tokenizer.tokenize(sentence) if token not in self._ids]

    def tokens(self, ids: Any) -> list[str]:
        """The token of each id `[T]`, specials included: labels for pictures.

        Raises:
            ValueError: an id outside the vocabulary, or not a row of integers.
        """
        row = check_ids(ids, len(self), name="ids")
        if row.ndim != 1:
            raise ValueError(f"ids must have the shape [T], got {list(row.shape)}")
        return [self._token(int(place)) for place in row]

    def decode(self, ids: Any) -> str:
        """The sentence that ids `[T]` stand for: up to the first `<eos>`, without `<pad>`, `<bos>`.

        Raises:
            ValueError: an id outside the vocabulary, or not a row of integers.
        """
        return self.tokenizer.detokenize(self._said(ids))

    def decode_words(self, ids: Any) -> list[str]:
        """The words and punctuation marks of that sentence.

        Raises:
            ValueError: an id outside the vocabulary, or not a row of integers.
        """
        return self.tokenizer.as_words(self._said(ids))

    def to_json(self) -> str:
        """This vocabulary as JSON, in ASCII."""
        settings = self.tokenizer.settings()
        return json.dumps({"format": _FORMAT, "tokenizer": settings, "words": list(self.words)})

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Reads what `to_json` wrote. The text is data: it names a tokeniser out of a fixed list.

        Raises:
            ValueError: anything else than what `to_json` writes.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"vocabulary: expected JSON, but {error}") from None
        _check_keys("vocabulary", data, {"format", "tokenizer", "words"})
        if data["format"] != _FORMAT:
            raise ValueError(f"vocabulary: expected the format {_FORMAT!r}, got {data['format']!r}")
        words = data["words"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError("vocabulary: words must be a list of strings")
        if any("\ud800" <= character <= "\udfff" for word in words for character in word):
            raise ValueError("vocabulary: words must be Unicode text, got half a surrogate pair")
        return cls(tuple(words), _tokenizer_from(data["tokenizer"], words))

    def _encode(self, sentence: str) -> list[int]:
        lookup = self._ids.get
        ids = [lookup(token, UNK) for token in self.tokenizer.tokenize(sentence)]
        ids.append(EOS)
        return ids

    def _said(self, ids: Any) -> list[str]:
        tokens = itertools.takewhile(lambda token: token != SPECIALS[EOS], self.tokens(ids))
        return [token for token in tokens if token not in (SPECIALS[PAD], SPECIALS[BOS])]

    def _token(self, place: int) -> str:
        return SPECIALS[place] if place < len(SPECIALS) else self.words[place - len(SPECIALS)]


def learn_vocabularies(config: Config, pairs: Sequence[Pair]) -> tuple[Vocabulary, Vocabulary]:
    """The vocabularies of source and target, learned from training pairs.

    Raises:
        ValueError: the configuration asks for fewer tokens than the text needs.
    """
    learn = _LEARNERS[config.tokenizer]
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    if config.joint_vocabulary:
        both = learn(config, sides[0] + sides[1])
        return both, both
    return learn(config, sides[0]), learn(config, sides[1])


def _words(config: Config, sentences: Sequence[str]) -> Vocabulary:
    return Vocabulary.build(
        sentences,
        minimum_count=config.minimum_count,
        size=config.vocabulary_size,
        tokenizer=WordTokenizer(config.lower),
    )


def _pairs(config: Config, sentences: Sequence[str]) -> Vocabulary:
    return Vocabulary.learn_pairs(
        sentences,
        size=config.vocabulary_size,
        minimum_count=config.minimum_count,
        lower=config.lower,
    )


_LEARNERS = {"words": _words, "bpe": _pairs}


def check_ids(ids: Any, size: int, *, name: str) -> np.ndarray:
    """The ids as a NumPy array, after making sure that an embedding of `size` rows has them all.

    On a device an id out of range reads NaN or another row, and nobody is told.

    Raises:
        TypeError: not integers.
        ValueError: an id below 0 or not below `size`.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return array.astype(np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(f"{name} must be in 0..{size - 1}, got {wrong}")
    return array


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
    _check_limit(max_length)
    if too_long not in ("drop", "truncate", "error"):
        raise ValueError(f"too_long must be 'drop', 'truncate' or 'error', got {too_long!r}")
    limit = np.inf if max_length is None else max_length
    rows: tuple[list[list[int]], list[list[int]]] = ([], [])
    origin: list[int] = []
    truncated = [0, 0]
    for place, pair in enumerate(pairs):
        ids = [source._encode(pair.source), target._encode(pair.target)]
        if max_length is not None and max(map(len, ids)) > limit:
            if too_long == "drop":
                continue
            if too_long == "error":
                raise ValueError(f"pair {place}: {_first_too_long(pair, ids, max_length)}")
            for side in range(2):
                truncated[side] += len(ids[side]) > limit
                ids[side] = _truncated(ids[side], max_length)
        origin.append(place)
        rows[0].append(ids[0])
        rows[1].append(ids[1])
    encoded = EncodedPairs(
        Ragged.of(rows[0]), Ragged.of(rows[1]), np.asarray(origin, int), len(source), len(target)
    )
    return encoded, _report(len(pairs), encoded, truncated)


def _report(pairs: int, encoded: EncodedPairs, truncated: Sequence[int]) -> EncodeReport:
    return EncodeReport(
        pairs=pairs,
        kept=len(encoded),
        dropped=pairs - len(encoded),
        truncated_source=truncated[0],
        truncated_target=truncated[1],
        source_tokens=len(encoded.source.values),
        target_tokens=len(encoded.target.values),
        source_unknown=int((encoded.source.values == UNK).sum()),
        target_unknown=int((encoded.target.values == UNK).sum()),
    )


def _check_limit(max_length: int | None) -> None:
    if max_length is not None and max_length < _SHORTEST:
        raise ValueError(f"max_length must be at least {_SHORTEST}, got {max_length}")


def _truncated(ids: list[int], max_length: int) -> list[int]:
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], EOS]


def _too_long_message(sentence: str, length: int, max_length: int) -> str:
    start = sentence if len(sentence) <= 40 else sentence[:37] + "..."
    return (
        f"expected at most {max_length} tokens (max_length, counting <eos>), "
        f"got {length} in {start!r}"
    )


def _first_too_long(pair: Pair, ids: Sequence[Sequence[int]], max_length: int) -> str:
    side = 0 if len(ids[0]) > max_length else 1
    return _too_long_message((pair.source, pair.target)[side], len(ids[side]), max_length)


def _check_keys(name: str, data: Any, expected: set[str]) -> None:
    if not isinstance(data, dict) or set(data) != expected:
        got = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{name}: expected an object with the keys {sorted(expected)}, got {got}")


def _words_from(settings: dict[str, Any], words: Sequence[str]) -> WordTokenizer:
    _check_keys("vocabulary: tokenizer", settings, {"kind", "lower", "split_punctuation"})
    lower, split = settings["lower"], settings["split_punctuation"]
    if not isinstance(lower, bool) or not isinstance(split, bool):
        raise ValueError("vocabulary: tokenizer: lower and split_punctuation must be true or false")
    return WordTokenizer(lower, split)


def _pairs_from(settings: dict[str, Any], words: Sequence[str]) -> bpe.PairTokenizer:
    _check_keys("vocabulary: tokenizer", settings, {"kind", "lower", "merges"})
    if not isinstance(settings["lower"], bool):
        raise ValueError("vocabulary: tokenizer: lower must be true or false")
    return bpe.tokenizer_of(words, settings["merges"], lower=settings["lower"])


_TOKENIZERS: dict[str, Callable[[dict[str, Any], Sequence[str]], Tokenizer]] = {
    "words": _words_from,
    "bpe": _pairs_from,
}


def _tokenizer_from(settings: Any, words: Sequence[str]) -> Tokenizer:
    kind = settings.get("kind") if isinstance(settings, dict) else None
    if not isinstance(kind, str) or kind not in _TOKENIZERS:
        raise ValueError(
            f"vocabulary: expected a tokenizer of kind {' or '.join(_TOKENIZERS)}, got {kind!r}"
        )
    return _TOKENIZERS[kind](settings, words)
