"""Byte-pair encoding (Sennrich et al. 2016) by the library `tokenizers`.

A token is a piece of text as it stands, the space before a word included: ` hund`, `e`, `,`. So a
sentence is its tokens put together, with one space at the beginning taken away, and nothing is
lost. Pairs are merged inside words, numbers, marks and white space and never across, which is why
no token can come to be spelled `<eos>`.

What was learned is saved as the merges alone, and read back as data.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from experiments.translation.words import WordTokenizer, normal_form


_LONGEST = 64  # characters in a token
_UNKNOWN = "<unk>"
# Every character is in one of these kinds: letters with their marks, numbers, marks, white space.
_RUNS = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PairTokenizer:
    """Pieces of words, of which frequent words have one and rare words several.

    The sentence is brought to Unicode normal form C and, unless told otherwise, to lower case. Of a
    character that is not in the alphabet the token is that character.

    Attributes:
        alphabet: the characters that were seen, each a token.
        merges: pairs of tokens that are put together, in this order.
        lower: bring to lower case.

    Raises:
        ValueError: a merge of something that is no token before it, or of more than 64 characters.
    """

    alphabet: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    lower: bool = True

    unit = "characters"

    def __post_init__(self) -> None:
        known = set(self.alphabet)
        if " " not in known:
            raise ValueError("vocabulary: tokenizer: expected a space among the characters")
        for number, pair in enumerate(self.merges, start=1):
            if not _is_pair_of(known, pair):
                raise ValueError(
                    f"vocabulary: tokenizer: merge {number}: "
                    f"expected two tokens known before it, got {_shown(pair)}"
                )
            merged = "".join(pair)
            if len(merged) > _LONGEST:
                raise ValueError(
                    f"vocabulary: tokenizer: merge {number}: "
                    f"expected a token of at most {_LONGEST} characters, got {len(merged)}"
                )
            known.add(merged)

    @classmethod
    def learn(
        cls, sentences: Iterable[str], *, size: int, minimum_count: int = 1, lower: bool = True
    ) -> "PairTokenizer":
        """Merges the most frequent pair of tokens until there are `size` tokens, or none occurs
        `minimum_count` times. Each character of the sentences is a token, however many there are.

        Give it training sentences and no others.
        """
        learner = _encoder(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=minimum_count,
            initial_alphabet=[" "],
            max_token_length=_LONGEST,
            show_progress=False,
        )
        learner.train_from_iterator((_spaced(text, lower) for text in sentences), trainer)
        model = json.loads(learner.to_str())["model"]
        alphabet = tuple(sorted(token for token in model["vocab"] if len(token) == 1))
        return cls(alphabet, tuple((left, right) for left, right in model["merges"]), lower)

    @functools.cached_property
    def tokens(self) -> tuple[str, ...]:
        """All tokens: characters, then what merging them makes."""
        return tuple(dict.fromkeys([*self.alphabet, *map("".join, self.merges)]))

    def tokenize(self, sentence: str) -> list[str]:
        """The tokens of a sentence, and any character beside them as it stands."""
        if not sentence:
            return []
        text = _spaced(sentence, self.lower)
        # By place, because all unknown characters have one name in the library.
        return [text[begin:end] for begin, end in self._encoder.encode(text).offsets]

    def detokenize(self, tokens: Iterable[str]) -> str:
        """Tokens put together."""
        return "".join(tokens).removeprefix(" ")

    def as_words(self, tokens: Iterable[str]) -> list[str]:
        """The words and marks in what the tokens say."""
        return WordTokenizer(self.lower).tokenize(self.detokenize(tokens))

    def settings(self) -> dict[str, Any]:
        """JSON data that describe this tokeniser, together with its tokens."""
        return {"kind": "bpe", "lower": self.lower, "merges": self.merges}

    @functools.cached_property
    def _encoder(self) -> tokenizers.Tokenizer:
        numbered = {token: number for number, token in enumerate((_UNKNOWN, *self.tokens))}
        return _encoder(models.BPE(numbered, list(self.merges), unk_token=_UNKNOWN))


def tokenizer_of(tokens: Sequence[str], merges: Any, *, lower: bool) -> PairTokenizer:
    """The tokeniser that has these tokens and merges, from data that nobody has checked.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(merges, list):
        raise ValueError("vocabulary: tokenizer: merges must be a list")
    alphabet = tuple(token for token in tokens if len(token) == 1)
    pairs: Any = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in merges)
    found = PairTokenizer(alphabet, pairs, lower)
    if found.tokens != tuple(tokens):
        raise ValueError("vocabulary: tokenizer: expected the words that its merges make, in order")
    return found


def _spaced(sentence: str, lower: bool) -> str:
    """The sentence with a space before its first word as before the others."""
    return " " + normal_form(sentence, lower=lower)


def _encoder(model: models.Model) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_RUNS), "isolated")
    return made


def _shown(pair: Any) -> str:
    text = repr(list(pair) if isinstance(pair, tuple) else pair)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_pair_of(known: set[str], pair: Any) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and all(isinstance(token, str) and token in known for token in pair)
    )
