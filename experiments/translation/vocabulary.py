"""A vocabulary: from text to ids and back, by one `tokenizers.Tokenizer`.

That tokenizer brings text to Unicode normal form C and, unless told otherwise, to lower case, cuts
it, numbers the tokens and puts `<eos>` behind them. There are two kinds:

- words and punctuation marks (`words`);
- byte-pair encoding (Sennrich et al. 2016): pieces of words. A token is a piece of text as it
  stands, the space before a word included: ` hund`, `e`, `,`. So a sentence is its tokens put
  together, with one space at the beginning taken away, and nothing is lost. Pairs are merged inside
  words, numbers, marks and white space and never across.

Either way no text can spell a special token. A vocabulary is saved as the library's JSON.

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
# Every character is in one of these kinds: letters with their marks, numbers, marks, white space.
_RUNS = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their ids: the four specials, then the others from id 4 on.

    Attributes:
        words: the tokens without the specials, in the order of their ids.
        merges: of byte-pair encoding, pairs of tokens that are put together, in this order; None
            for words.
        lower: whether text is brought to lower case.

    Raises:
        ValueError: something that cannot be a token, one twice, or tokens that are not those that
            the merges make.
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
            known = dict.fromkeys(characters)
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
        """The words that occur at least `minimum_count` times, by falling count, then spelling; no
        more of them than make `size` tokens with the specials.

        Give it training sentences and no others.

        Raises:
            ValueError: `minimum_count` below 1.
        """
        if minimum_count < 1:
            raise ValueError(f"minimum_count must be at least 1, got {minimum_count}")
        most = 2**31 if size is None else max(size - len(SPECIALS), 0)
        trainer = trainers.WordLevelTrainer(
            vocab_size=most, min_frequency=minimum_count, show_progress=False
        )
        learner = _tokenizer((), None, lower)
        learner.train_from_iterator(sentences, trainer)
        return cls(_by_id(learner.get_vocab()), None, lower)

    @classmethod
    def learn_bpe(
        cls, sentences: Iterable[str], *, size: int, minimum_count: int = 1, lower: bool = True
    ) -> "Vocabulary":
        """Byte-pair encoding: merges the most frequent pair of tokens until there are `size`
        tokens, or none occurs `minimum_count` times.

        All characters of the sentences are in it, also those that stand only inside of tokens.
        Give it training sentences and no others.

        Raises:
            ValueError: there are more characters than that.
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
        """What a token is that no training text had: words, or characters."""
        return "words" if self.merges is None else "characters"

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
        """The tokens of a sentence, known or not; equal for it in any Unicode normal form."""
        text = self._tokenizer.normalizer.normalize_str(sentence)
        # By place, because all unknown tokens have one name in the library.
        offsets = self._without_normalizer.encode(text, add_special_tokens=False).offsets
        return [text[begin:end] for begin, end in offsets]

    def join(self, tokens: Sequence[str]) -> str:
        """Tokens put together for display."""
        return words.join(tokens) if self.merges is None else "".join(tokens).removeprefix(" ")

    def normalize(self, sentence: str) -> str:
        """The sentence as `decode` would print it, were all its tokens known: what to compare with
        for an exact match."""
        return self.join(self.split(sentence))

    def split_words(self, sentence: str) -> list[str]:
        """The words and punctuation marks of a sentence, known or not."""
        return self._as_words(self.split(sentence))

    def unknown(self, sentence: str) -> list[str]:
        """The tokens of a sentence that are not in the vocabulary, in their order."""
        known = self._tokenizer.token_to_id
        return [token for token in self.split(sentence) if known(token) is None]

    def tokens(self, ids: Any) -> list[str]:
        """The token of each id `[T]`, specials included: labels for pictures.

        Raises:
            ValueError: an id outside the vocabulary, or not a row of integers.
        """
        row = check_ids(ids, len(self), name="ids")
        if row.ndim != 1:
            raise ValueError(f"ids must have the shape [T], got {list(row.shape)}")
        specials = len(SPECIALS)
        return [SPECIALS[n] if n < specials else self.words[n - specials] for n in row.tolist()]

    def decode(self, ids: Any) -> str:
        """The sentence that ids `[T]` stand for: up to the first `<eos>`, without `<pad>`, `<bos>`.

        Raises:
            ValueError: an id outside the vocabulary, or not a row of integers.
        """
        return self.join(self._without_specials(ids))

    def decode_words(self, ids: Any) -> list[str]:
        """The words and punctuation marks of that sentence.

        Raises:
            ValueError: an id outside the vocabulary, or not a row of integers.
        """
        return self._as_words(self._without_specials(ids))

    def to_json(self) -> str:
        """This vocabulary as JSON of the library, in ASCII."""
        return json.dumps(json.loads(self._tokenizer.to_str()))

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Reads what `to_json` wrote. The text is data: whatever else than tokens, merges and case
        it says must be what `to_json` says.

        Raises:
            ValueError: anything else than what `to_json` writes.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"vocabulary: expected JSON, but {error}") from None
        match data:
            case {"model": {"vocab": {**vocab}, **model}, "normalizer": {"normalizers": [*steps]}}:
                merges: Any = model.get("merges")
                are_pairs = isinstance(merges, list) and all(isinstance(x, list) for x in merges)
                pairs: Any = tuple(map(tuple, merges)) if are_pairs else None
                found = cls(tuple(vocab)[len(SPECIALS) :], pairs, {"type": "Lowercase"} in steps)
                if _same(found.to_json(), text):
                    return found
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
    """The vocabularies of source and target, learned from training pairs.

    Raises:
        ValueError: the configuration asks for fewer tokens than the text needs.
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
    """Raises ValueError for a maximum that leaves no room for a token and `<eos>`."""
    if max_length is not None and max_length < _SHORTEST:
        raise ValueError(f"max_length must be at least {_SHORTEST}, got {max_length}")


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


def _tokenizer(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]] | None, lower: bool
) -> Tokenizer:
    ids = {token: number for number, token in enumerate(tokens)}
    steps: list[Any] = [normalizers.NFC()]
    steps += [normalizers.Lowercase(), normalizers.NFC()] if lower else []
    unknown = SPECIALS[UNK]
    if merges is None:
        made = Tokenizer(models.WordLevel(ids, unk_token=unknown))
        made.pre_tokenizer = words.PRE_TOKENIZER
    else:
        made = Tokenizer(models.BPE(ids, list(merges), unk_token=unknown))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(_RUNS), "isolated")
        steps.append(normalizers.Prepend(" "))  # before the first word as before the others
    made.normalizer = normalizers.Sequence(steps)
    end = SPECIALS[EOS]
    made.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, EOS)])
    return made


def _by_id(vocab: dict[str, int]) -> tuple[str, ...]:
    return tuple(sorted(vocab, key=vocab.__getitem__))


def _same(one: str, other: str) -> bool:
    """Whether the library reads the same in two texts."""
    try:
        return Tokenizer.from_str(one).to_str() == Tokenizer.from_str(other).to_str()
    except Exception:  # the only class that the library has for what is wrong with a file
        return False
