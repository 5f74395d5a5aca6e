"""Text as numbers: a vocabulary of characters, and batches of rows cut from anywhere in a text."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.translation import corpus


_SENTENCES = 20_000
_HELD_OUT = 0.05


@dataclass(frozen=True)
class Characters:
    """A vocabulary: the characters of a text, in order; a token is a character's place."""

    alphabet: str

    @classmethod
    def of(cls, text: str) -> "Characters":
        """Those of a text."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, int32 `[n]`.

        Raises:
            ValueError: a character that is not in the vocabulary.
        """
        places = {character: place for place, character in enumerate(self.alphabet)}
        if unknown := sorted(set(text) - places.keys()):
            raise ValueError(f"characters that the model does not know: {' '.join(unknown)!r}")
        return np.array([places[character] for character in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens `[n]`.

        Raises:
            ValueError: a token that is no place in the alphabet.
        """
        if np.any((np.asarray(tokens) < 0) | (np.asarray(tokens) >= len(self.alphabet))):
            raise ValueError(f"tokens: expected 0..{len(self.alphabet) - 1}, got {tokens}")
        return "".join(self.alphabet[token] for token in tokens)


@dataclass(frozen=True)
class Texts:
    """Tokens to train on, and tokens to watch."""

    train: np.ndarray
    validation: np.ndarray


def read(path: Path | None) -> str:
    """The text of a file in UTF-8, or where `path` is None English sentences from the grammar of
    `experiments.translation`, one a line.

    Raises:
        ValueError: it is not text.
    """
    if path is None:
        pairs = corpus.generate(_SENTENCES, seed=0)
        return "".join(pair.target + "\n" for pair in pairs)
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8: {error}") from None


def split(tokens: np.ndarray, length: int) -> Texts:
    """The end of a text is held out; each part has at least a row of `length` and what follows.

    Raises:
        ValueError: the text is too short.
    """
    held_out = max(round(len(tokens) * _HELD_OUT), length + 1)
    if len(tokens) - held_out <= length:
        raise ValueError(
            f"text: expected at least {2 * (length + 1)} characters, got {len(tokens)}; "
            "a smaller --set length=… needs fewer"
        )
    return Texts(tokens[:-held_out], tokens[-held_out:])


def batch(tokens: np.ndarray, rows: int, length: int, seed: tuple[int, ...]) -> np.ndarray:
    """Rows `[rows, length + 1]` from places that the seed decides."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length, rows)
    return tokens[starts[:, None] + np.arange(length + 1)]


def in_order(tokens: np.ndarray, length: int, most: int) -> np.ndarray:
    """The first rows `[rows, length + 1]` of a text, at most so many, each predicting the next
    `length` characters."""
    rows = min((len(tokens) - 1) // length, most)
    return tokens[length * np.arange(rows)[:, None] + np.arange(length + 1)]
