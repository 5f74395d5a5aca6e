"""Vocabularies: `Vocabulary` converts text to ids and back with a `tokenizers.Tokenizer`.

The tokenizer converts text to Unicode normal form C and, by default, to lower case, splits it into
tokens, maps these to ids and appends `<eos>`. There are two kinds:

- words and punctuation marks (`words`);
- byte-pair encoding (Sennrich et al. 2016): pieces of words. A token is a literal piece of text,
  with the space before a word: ` hund`, `e`, `,`. So a sentence is the concatenation of its tokens
  without the first space, and nothing is lost. Pairs are merged inside words, numbers, marks and
  white space, but never across their boundaries.

In both kinds no text can spell a special token. A vocabulary is saved as JSON of `tokenizers`.

Every sequence of ids ends with `<eos>`, and every length counts it.
"""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from experiments.translation import words
from experiments.translation.corpus import Pair
from experiments.translation.presets import Config


SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>")
PAD, UNK, BOS, EOS = range(4)

_LONGEST = 64  # characters in a token of byte-pair encoding
_SHORTEST = 2  # one token and <eos>
# Each character belongs to one run: of letters and their marks, numbers, marks, or white space.
_RUNS = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary: tokens and their ids, first the four specials, then the others from id 4 on.

    Attributes:
        words: the tokens without the specials, in the order of their ids.
        merges: the pairs of tokens that byte-pair encoding merges, in order; None for words.
        lower: whether text is lower-cased.

    Raises:
        ValueError: a token is not a valid one or occurs twice, or the tokens are not those that
            the merges produce.
    """

    words: tuple[str, ...]
    merges: tuple[tuple[str, str], ...] | None = None
    lower: bool = True

    def __post_init__(self) -> None:
        for word in self.words:
            if not isinstance(word, str) or not word or word in SPECIALS:
                raise ValueError(f"vocabulary: {word!r} cannot be a word")
            if any("\ud800" <= character <= "\udfff" for character in word):
                raise ValueError("vocabulary: words must be Unicode text, got half a surrogate")
        if len(set(self.words)) < len(self.words):
            [(twice, _)] = Counter(self.words).most_common(1)
            raise ValueError(f"vocabulary: expected different words, got {twice!r} twice")
        if self.merges is not None:
            characters = [word for word in self.words if len(word) == 1]
            if " " not in characters:
                raise ValueError("vocabulary: expected a space among the characters")
            known = dict.fromkeys(characters)  # an ordered set
            for number, pair in enumerate(self.merges, start=1):
                if len(pair) != 2 or not all(isinstance(x, str) and x in known for x in pair):
                    raise ValueError(
                        f"vocabulary: merge {number}: expected two tokens known before it, "
                        f"got {list(pair)!r:.80}"
                    )
                known["".join(pair)] = None
            if self.words != tuple(known):
                raise ValueError("vocabulary: expected the words that its merges make, in order")

    @classmethod
    def build(
        cls,
        sentences: Iterable[str],
        *,
        minimum_count: int = 1,
        size: int | None = None,
        lower: bool = True,
    ) -> "Vocabulary":
        """Builds a vocabulary of the words that occur at least `minimum_count` times.

        The words are sorted by falling count, then by spelling. With the specials, the vocabulary
        has at most `size` tokens. Pass training sentences only.

        Raises:
            ValueError: `minimum_count` is below 1.
        """
        if minimum_count < 1:
            raise ValueError(f"minimum_count must be at least 1, got {minimum_count}")
        max_words = 2**31 if size is None else max(size - len(SPECIALS), 0)
        trainer = trainers.WordLevelTrainer(
            vocab_size=max_words, min_frequency=minimum_count, show_progress=False
        )
        learner = _tokenizer((), None, lower)
        learner.train_from_iterator(sentences, trainer)
        return cls(_by_id(learner.get_vocab()), None, lower)

    @classmethod
    def learn_bpe(
        cls, sentences: Iterable[str], *, size: int, minimum_count: int = 1, lower: bool = True
    ) -> "Vocabulary":
        """Learns byte-pair encoding: merges the most frequent pair of tokens until there are `size`
        tokens, or no pair occurs `minimum_count` times.

        The vocabulary has all characters of the sentences, also those that occur only inside longer
        tokens. Pass training sentences only.

        Raises:
            ValueError: the sentences have more different characters than `size` allows.
        """
        trainer = trainers.BpeTrainer(
            vocab_size=max(size - len(SPECIALS), 0),
            min_frequency=minimum_count,
            initial_alphabet=[" "],
            max_token_length=_LONGEST,
            show_progress=False,
        )
        learner = _tokenizer((), (), lower)
        learner.train_from_iterator(sentences, trainer)
        model = json.loads(learner.to_str())["model"]
        characters = sum(len(token) == 1 for token in model["vocab"])
        least = len(SPECIALS) + characters
        if size < least:
            raise ValueError(
                f"vocabulary_size: expected at least {least}, for {characters} "
                f"different characters in the text, got {size}"
            )
        return cls(_by_id(model["vocab"]), tuple(map(tuple, model["merges"])), lower)

    def __len__(self) -> int:
        return len(SPECIALS) + len(self.words)

    @property
    def unit(self) -> str:
        """The plural noun for unknown tokens in messages: words, or characters."""
        return "words" if self.merges is None else "characters"

    def encode(
        self,
        sentence: str,
        *,
        max_length: int | None = None,
        too_long: Literal["error", "truncate"] = "error",
    ) -> list[int]:
        """Returns the ids of a sentence, `<eos>` last, with `<unk>` for unknown tokens.

        `max_length` counts `<eos>`. A longer sentence is an error, or with `too_long="truncate"`
        keeps its first `max_length - 1` tokens and its `<eos>`.

        Raises:
            ValueError: the sentence is too long, or an argument is invalid.
        """
        check_max_length(max_length)
        if too_long not in ("error", "truncate"):
            raise ValueError(f"too_long must be 'error' or 'truncate', got {too_long!r}")
        ids = self._tokenizer.encode(sentence).ids
        if max_length is None or len(ids) <= max_length:
            return ids
        if too_long == "truncate":
            return [*ids[: max_length - 1], EOS]
        start = sentence if len(sentence) <= 40 else sentence[:37] + "..."
        raise ValueError(
            f"expected at most {max_length} tokens (max_length, counting <eos>), "
            f"got {len(ids)} in {start!r}"
        )

    def split(self, sentence: str) -> list[str]:
        """Returns the tokens of a sentence, known or not; they do not depend on its Unicode normal
        form."""
        text = self._tokenizer.normalizer.normalize_str(sentence)
        # By offset, because the library gives all unknown tokens the same name.
        offsets = self._without_normalizer.encode(text, add_special_tokens=False).offsets
        return [text[begin:end] for begin, end in offsets]

    def join(self, tokens: Sequence[str]) -> str:
        """Joins tokens into text for display."""
        return words.join(tokens) if self.merges is None else "".join(tokens).removeprefix(" ")

    def normalize(self, sentence: str) -> str:
        """Returns the sentence as `decode` would return it if all its tokens were known, for
        comparisons by exact match."""
        return self.join(self.split(sentence))

    def split_words(self, sentence: str) -> list[str]:
        """Returns the words and punctuation marks of a sentence, known or not."""
        return self._as_words(self.split(sentence))

    def unknown(self, sentence: str) -> list[str]:
        """Returns the tokens of a sentence that are not in the vocabulary, in order."""
        known = self._tokenizer.token_to_id
        return [token for token in self.split(sentence) if known(token) is None]

    def tokens(self, ids: Any) -> list[str]:
        """Returns the token of each id `[T]`, including specials, as labels for pictures.

        Raises:
            TypeError: the ids are not integers.
            ValueError: an id is outside the vocabulary, or the shape is not `[T]`.
        """
        row = check_ids(ids, len(self), name="ids")
        if row.ndim != 1:
            raise ValueError(f"ids must have the shape [T], got {list(row.shape)}")
        specials = len(SPECIALS)
        return [SPECIALS[n] if n < specials else self.words[n - specials] for n in row.tolist()]

    def decode(self, ids: Any) -> str:
        """Decodes ids `[T]` up to the first `<eos>` to a sentence, without `<pad>` and `<bos>`.

        Raises TypeError and ValueError for the same reasons as `tokens`.
        """
        return self.join(self._without_specials(ids))

    def decode_words(self, ids: Any) -> list[str]:
        """Decodes ids `[T]` as `decode` does, and returns the words and punctuation marks.

        Raises TypeError and ValueError for the same reasons as `tokens`.
        """
        return self._as_words(self._without_specials(ids))

    def to_json(self) -> str:
        """Returns this vocabulary as JSON of the library `tokenizers`, in ASCII."""
        return json.dumps(json.loads(self._tokenizer.to_str()))

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Reads a vocabulary that `to_json` wrote. The text is not trusted: except for tokens,
        merges and case it must equal the output of `to_json`.

        Raises:
            ValueError: `to_json` would not write this text.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"vocabulary: expected JSON, but {error}") from None
        match data:
            case {"model": {"vocab": {**vocab}, **model}, "normalizer": {"normalizers": [*norms]}}:
                merges: Any = model.get("merges")
                are_pairs = isinstance(merges, list) and all(isinstance(x, list) for x in merges)
                pairs: Any = tuple(map(tuple, merges)) if are_pairs else None
                result = cls(tuple(vocab)[len(SPECIALS) :], pairs, {"type": "Lowercase"} in norms)
                if _same(result.to_json(), text):
                    return result
        raise ValueError("vocabulary: expected what training writes")

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return _tokenizer((*SPECIALS, *self.words), self.merges, self.lower)

    @functools.cached_property
    def _without_normalizer(self) -> Tokenizer:
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.normalizer = normalizers.Sequence([])
        return copy

    def _as_words(self, tokens: list[str]) -> list[str]:
        return tokens if self.merges is None else words.split(self.join(tokens))

    def _without_specials(self, ids: Any) -> list[str]:
        tokens = itertools.takewhile(lambda token: token != SPECIALS[EOS], self.tokens(ids))
        return [token for token in tokens if token not in (SPECIALS[PAD], SPECIALS[BOS])]


def learn_vocabularies(config: Config, pairs: Sequence[Pair]) -> tuple[Vocabulary, Vocabulary]:
    """Learns the vocabularies of source and target from training pairs.

    Raises:
        ValueError: `config.vocabulary_size` is less than the text needs.
    """
    learn = functools.partial(
        Vocabulary.build if config.tokenizer == "words" else Vocabulary.learn_bpe,
        size=config.vocabulary_size,
        minimum_count=config.minimum_count,
        lower=config.lower,
    )
    source, target = ([pair[side] for pair in pairs] for side in (0, 1))
    if config.joint_vocabulary:
        both = learn(source + target)
        return both, both
    return learn(source), learn(target)


def check_max_length(max_length: int | None) -> None:
    """Raises ValueError if the maximum has no room for a token and `<eos>`."""
    if max_length is not None and max_length < _SHORTEST:
        raise ValueError(f"max_length must be at least {_SHORTEST}, got {max_length}")


def check_ids(ids: Any, size: int, *, name: str) -> np.ndarray:
    """Checks that an embedding of `size` rows has all ids, and returns them as a NumPy array.

    On a device an id out of range silently reads NaN or another row.

    Raises:
        TypeError: the ids are not integers.
        ValueError: an id is negative or at least `size`.
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


def _tokenizer(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]] | None, lower: bool
) -> Tokenizer:
    ids = {token: number for number, token in enumerate(tokens)}
    norms: list[Any] = [normalizers.NFC()]
    norms += [normalizers.Lowercase(), normalizers.NFC()] if lower else []
    unknown = SPECIALS[UNK]
    if merges is None:
        result = Tokenizer(models.WordLevel(ids, unk_token=unknown))
        result.pre_tokenizer = words.PRE_TOKENIZER
    else:
        result = Tokenizer(models.BPE(ids, list(merges), unk_token=unknown))
        result.pre_tokenizer = pre_tokenizers.Split(Regex(_RUNS), "isolated")
        norms.append(normalizers.Prepend(" "))  # so that the first word too begins with a space
    result.normalizer = normalizers.Sequence(norms)
    end = SPECIALS[EOS]
    result.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, EOS)])
    return result


def _by_id(vocab: dict[str, int]) -> tuple[str, ...]:
    return tuple(sorted(vocab, key=vocab.__getitem__))


def _same(first: str, second: str) -> bool:
    """Returns whether the library reads equal tokenizers from two texts."""
    try:
        return Tokenizer.from_str(first).to_str() == Tokenizer.from_str(second).to_str()
    except Exception:  # the library raises no more specific class for a damaged file
        return False
