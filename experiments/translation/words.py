"""Splits text into words and punctuation marks, and joins them; for languages with spaces between
words.

Every punctuation mark or symbol (Unicode categories P and S) is a token of its own, with five
exceptions:

1. Letters joined by hyphens are one word (`t-shirt`), also with a hyphen left over at the end or
   the beginning (`obst- und gemüseladen`, `messer und -gabel`).
2. Numbers keep inner `.`, `,` and `:` (`10,000`, `11:27`), single letters keep their dots (`u.s.`,
   `z.b.`).
3. A run of dots or of hyphens is one mark (`...`, `--`).
4. English contractions are cut before the ending: `man's` is `man 's`, `doesn't` is `does n't`.
5. Any other apostrophe inside a word stays with its left part: `l'homme` is `l' homme`.

A combining mark belongs to its word. Text without spaces between words needs another tokenizer.
"""

import re
from collections.abc import Iterable

from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split


_SPACES = r"\s\x1c-\x1f"
_MARKS = r"\p{P}\p{S}\x{1f000}-\x{1faff}"
_LETTER = rf"[^{_SPACES}{_MARKS}]"
_TOKENS = (
    r"(?:[\p{L}\p{Nl}\p{No}]\.){2,}"
    rf"|(?:(?<![^{_SPACES}])-)?{_LETTER}+"
    rf"(?:(?:[-\u2010'\u2019]|(?<=\p{{Nd}})[.,:](?=\p{{Nd}})){_LETTER}+)*(?:-(?!-))?"
    rf"|\.{{2,}}|-{{2,}}|[{_MARKS}]"
)
# The ending n't comes before the plain 't, which would match its end.
_CONTRACTION = "(?:[nN]['\u2019][tT]|['\u2019](?i:s|re|ve|ll|m|d|t))"
_PARTS = (
    rf"(?!\A){_CONTRACTION}\z"
    rf"|(?!\A{_CONTRACTION}\z)[^'\u2019]+?(?={_CONTRACTION}\z)"
    "|[^'\u2019]+['\u2019]?|['\u2019]"
)

PRE_TOKENIZER = Sequence(
    [Split(Regex(_TOKENS), "removed", invert=True), Split(Regex(_PARTS), "isolated")]
)

_ATTACH_LEFT = frozenset(".,;:!?)]}%\u2026\u201d'\u2019\u060c\u061b\u061f\u0964")
_ATTACH_RIGHT = frozenset("([{\u201e\u00bf\u00a1#$")
_ATTACH_BOTH = frozenset("/@_\\")
_PAIRED = {'"': '"', "\u00ab": "\u00ab\u00bb", "\u00bb": "\u00ab\u00bb"}


def split(text: str) -> list[str]:
    """Splits a text in normal form into tokens; white space gives none."""
    return [token for token, _ in PRE_TOKENIZER.pre_tokenize_str(text)]


def join(tokens: Iterable[str]) -> str:
    """Joins tokens with spaces, and attaches marks to the word on the side where they belong."""
    pieces: list[str] = []
    open_quotes: set[str] = set()
    attached = True
    for token in tokens:
        to_left, to_right = _attachment(token, open_quotes)
        pieces += [token] if attached or to_left else [" ", token]
        attached = to_right
    return "".join(pieces)


def _attachment(token: str, open_quotes: set[str]) -> tuple[bool, bool]:
    """Returns whether a token is written without a space on its left, and on its right."""
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
        return re.fullmatch(_CONTRACTION, token) is not None, token[-1] in "'\u2019"
    return token[0] in _ATTACH_LEFT, token in _ATTACH_RIGHT
