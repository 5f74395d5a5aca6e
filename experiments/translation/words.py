"""What a tokeniser is, and the one that cuts sentences into words and punctuation marks."""

import functools
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What a vocabulary needs to know about text."""

    @property
    def lower(self) -> bool:
        """Whether text is brought to lower case."""
        ...

    @property
    def unit(self) -> str:
        """What a token is that no training text had: words, or characters."""
        ...

    def tokenize(self, sentence: str) -> list[str]:
        """The tokens of a sentence; equal for a sentence in any Unicode normal form."""
        ...

    def detokenize(self, tokens: Iterable[str]) -> str:
        """Tokens put together for display."""
        ...

    def as_words(self, tokens: Iterable[str]) -> list[str]:
        """The words and punctuation marks that tokens stand for."""
        ...

    def settings(self) -> dict[str, Any]:
        """JSON data from which, with the tokens, the same tokeniser is made again."""
        ...


def normal_form(sentence: str, *, lower: bool) -> str:
    """The sentence in Unicode normal form C, and in lower case if asked."""
    text = unicodedata.normalize("NFC", sentence)
    return unicodedata.normalize("NFC", text.lower()) if lower else text


@dataclass(frozen=True)
class WordTokenizer:
    """Words and punctuation marks, for languages that put spaces between words.

    The sentence is brought to Unicode normal form C and, unless told otherwise, to lower case.
    Every punctuation mark or symbol (Unicode categories P and S) is a token of its own, with five
    exceptions:

    1. Letters joined by hyphens are one word (`t-shirt`), also with a hyphen left over at the end
       or the beginning (`obst- und gemüseladen`, `messer und -gabel`).
    2. Numbers keep inner `.`, `,` and `:` (`10,000`, `11:27`), single letters keep their dots
       (`u.s.`, `z.b.`).
    3. A run of dots or of hyphens is one mark (`...`, `--`).
    4. English contractions are cut before the ending: `man's` is `man 's`, `doesn't` is `does n't`.
    5. Any other apostrophe inside a word stays with its left part: `l'homme` is `l' homme`.

    A combining mark belongs to its word. Text without spaces between words needs another tokeniser.

    Attributes:
        lower: bring to lower case.
        split_punctuation: False cuts at white space alone.
    """

    lower: bool = True
    split_punctuation: bool = True

    unit = "words"

    def tokenize(self, sentence: str) -> list[str]:
        """The tokens of a sentence; none for white space."""
        text = normal_form(sentence, lower=self.lower)
        if not self.split_punctuation:
            return text.split()
        tokens = _token_pattern().findall(text)
        if "'" in text or "\u2019" in text:
            return [part for token in tokens for part in _cut_at_apostrophes(token)]
        return tokens

    def detokenize(self, tokens: Iterable[str]) -> str:
        """Tokens with spaces between them, and marks attached to the side they belong to."""
        if not self.split_punctuation:
            return " ".join(tokens)
        pieces: list[str] = []
        open_quotes: set[str] = set()
        attached = True
        for token in tokens:
            to_left, to_right = _attachment(token, open_quotes)
            pieces += [token] if attached or to_left else [" ", token]
            attached = to_right
        return "".join(pieces)

    def as_words(self, tokens: Iterable[str]) -> list[str]:
        """The tokens, which are words."""
        return list(tokens)

    def settings(self) -> dict[str, Any]:
        """JSON data that describe this tokeniser."""
        return {"kind": "words", "lower": self.lower, "split_punctuation": self.split_punctuation}


# A word with an apostrophe inside (the two-letter ending of n't goes before the plain 't of others)
_CONTRACTION = re.compile("(?:n['\u2019]t|['\u2019](?:s|re|ve|ll|m|d|t))$", re.IGNORECASE)
_ELISION = re.compile("[^'\u2019]+['\u2019]?|['\u2019]")

_ATTACH_LEFT = frozenset(".,;:!?)]}%\u2026\u201d'\u2019\u060c\u061b\u061f\u0964")
_ATTACH_RIGHT = frozenset("([{\u201e\u00bf\u00a1#$")
_ATTACH_BOTH = frozenset("/@_\\")
_PAIRED = {'"': '"', "\u00ab": "\u00ab\u00bb", "\u00bb": "\u00ab\u00bb"}


@functools.cache
def _token_pattern() -> re.Pattern[str]:
    # `\w` will not do: it leaves out the combining marks that end many words of Indic scripts.
    marks = "".join(
        re.escape(character)
        for character in map(chr, range(0x10000))
        if unicodedata.category(character)[0] in "PS"
    )
    marks += "\U0001f000-\U0001faff"  # pictographs, as one range: single ones make matching slow
    letter = rf"[^\s{marks}]"
    return re.compile(
        r"(?:[^\W\d_]\.){2,}"
        rf"|(?:(?<!\S)-)?{letter}+"
        rf"(?:(?:[-\u2010'\u2019]|(?<=\d)[.,:](?=\d)){letter}+)*(?:-(?!-))?"
        rf"|\.{{2,}}|-{{2,}}|[{marks}]"
    )


def _cut_at_apostrophes(token: str) -> list[str]:
    if len(token) == 1 or not ("'" in token or "\u2019" in token):
        return [token]
    ending = _CONTRACTION.search(token)
    if ending is None or ending.start() == 0:
        return _ELISION.findall(token)
    return [*_ELISION.findall(token[: ending.start()]), ending[0]]


def _attachment(token: str, open_quotes: set[str]) -> tuple[bool, bool]:
    """Whether a token is written without a space on its left and on its right."""
    if token == "\u201c":  # closes after a German opening mark, opens otherwise
        closes = "\u201e" in open_quotes
        open_quotes.discard("\u201e")
        return closes, not closes
    if token == "\u201e":
        open_quotes.add(token)
    if token in _PAIRED:
        closes = _PAIRED[token] in open_quotes
        (open_quotes.discard if closes else open_quotes.add)(_PAIRED[token])
        return closes, not closes
    if token in _ATTACH_BOTH:
        return True, True
    if len(token) > 1 and not token.startswith("."):
        contraction = _CONTRACTION.fullmatch(token) is not None
        return contraction, token[-1] in "'\u2019"
    return token[0] in _ATTACH_LEFT, token in _ATTACH_RIGHT
