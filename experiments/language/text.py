"""Text as tokens: a vocabulary of characters, and batches of rows from random places of a text."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.translation import corpus


_SENTENCES = 20_000
_HELD_OUT = 0.05


@dataclass(frozen=True)
class Characters:
    """A vocabulary: the sorted characters of a text; a token is the index of a character."""

    alphabet: str

    @classmethod
    def of(cls, text: str) -> "Characters":
        """Returns the vocabulary of a text."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, int32 `[n]`.

        Raises:
            ValueError: a character is not in the vocabulary.
        """
        indices = {character: index for index, character in enumerate(self.alphabet)}
        if unknown := sorted(set(text) - indices.keys()):
            known = self.alphabet if len(self.alphabet) <= 100 else f"{self.alphabet[:100]}…"
            raise ValueError(
                f"characters that the model does not know: {' '.join(unknown)!r}, it knows only "
                f"{known!r}"
            )
        return np.array([indices[character] for character in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of tokens `[n]`.

        Raises:
            ValueError: a token is not an index of the alphabet.
        """
        if np.any((np.asarray(tokens) < 0) | (np.asarray(tokens) >= len(self.alphabet))):
            raise ValueError(f"tokens: expected 0..{len(self.alphabet) - 1}, got {tokens}")
        return "".join(self.alphabet[token] for token in tokens)


@dataclass(frozen=True)
class LanguageTexts:
    """Tokens for training and for validation."""

    train: np.ndarray
    validation: np.ndarray


def read(path: Path | None) -> str:
    """Reads a file in UTF-8; if `path` is None, generates English sentences, one per line, from
    the grammar of `experiments.translation`.

    Raises:
        ValueError: the file is not UTF-8, or is empty.
    """
    if path is None:
        pairs = corpus.generate(_SENTENCES, seed=0)
        return "".join(pair.target + "\n" for pair in pairs)
    try:
        content = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8: {error}") from None
    if not content:
        raise ValueError(f"{path}: expected text, got an empty file")
    return content


def fingerprint(text: str) -> str:
    """Returns a digest of a text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def split(tokens: np.ndarray, length: int) -> LanguageTexts:
    """Splits off the end of a text for validation; each part has at least `length` + 1 tokens.

    Raises:
        ValueError: the text is too short.
    """
    held_out = max(round(len(tokens) * _HELD_OUT), length + 1)
    if len(tokens) - held_out <= length:
        raise ValueError(
            f"text: expected at least {2 * (length + 1)} characters, got {len(tokens)}; "
            "a smaller --set length=… needs fewer"
        )
    return LanguageTexts(tokens[:-held_out], tokens[-held_out:])


def batch(tokens: np.ndarray, rows: int, length: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draws rows `[rows, length + 1]` from random places of a text."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length, rows)
    return tokens[starts[:, None] + np.arange(length + 1)]


def in_order(tokens: np.ndarray, length: int, most: int) -> np.ndarray:
    """Returns the first rows `[rows, length + 1]` of a text, at most `most`. The last token of a
    row, its last label, is the first input of the next row."""
    rows = min((len(tokens) - 1) // length, most)
    return tokens[length * np.arange(rows)[:, None] + np.arange(length + 1)]
