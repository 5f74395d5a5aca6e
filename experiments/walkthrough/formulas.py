"""Typesets formulas: a line such as "e^(s_i) / (Σ_k e^(s_k))" becomes MathML, which browsers draw.

The notation is one that a terminal can show unchanged:

- Spaces separate operands. " / " is a fraction of the operands next to it, "/" a slash in the line.
- "_" and "^" put the next symbol or parenthesis below and above. Below "Σ", "Π" and "max", that is
  under the sign.
- Parentheses that only group, such as those of a numerator or a subscript, are not drawn.
- A word of three letters or more is upright, as in "softmax"; of shorter ones each letter is a
  variable. Text in double quotes stays text.
"""

import html
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass


_TOKEN = re.compile(r'"[^"]*"|\d+(?:[.,]\d+)*|[^\W\d_]+|\S|\s+')
_RAISED = {"ᵀ": "<mi>T</mi>", "′": "<mo>′</mo>", "²": "<mn>2</mn>", "³": "<mn>3</mn>"}
_LARGE = {"Σ": "<mo>∑</mo>", "Π": "<mo>∏</mo>", "max": '<mi mathvariant="normal">max</mi>'}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Formula:
    """Formulas that stand between paragraphs, one a line."""

    lines: tuple[str, ...]

    def plain(self, width: int) -> str:
        """Returns the lines, indented, as a terminal of this width shows them."""
        wrapper = textwrap.TextWrapper(width, 4 * " ", 8 * " ")
        return "\n".join(wrapper.fill(line.replace('"', "")) for line in self.lines)

    def mathml(self) -> str:
        """One MathML element for each line."""
        return "\n".join(
            f'<math display="block">{_Parser(line).whole()}</math>' for line in self.lines
        )


class _Parenthesis(str):
    """The MathML of a round parenthesis; `inside` is its content without the signs."""

    inside: str

    def __new__(cls, inside: str) -> "_Parenthesis":
        parenthesis = super().__new__(cls, f"<mrow><mo>(</mo>{inside}<mo>)</mo></mrow>")
        parenthesis.inside = inside
        return parenthesis


class _Parser:
    """Reads one line from left to right."""

    def __init__(self, line: str) -> None:
        self.tokens = list(_tokens(line))
        self.place = 0

    def whole(self) -> str:
        """Returns the MathML of the whole line.

        Raises:
            ValueError: a parenthesis is closed that was not opened, or the other way round.
        """
        row = self.row("")
        if self.place < len(self.tokens):
            raise ValueError(f"unexpected {self.tokens[self.place]!r} in {''.join(self.tokens)!r}")
        return row

    def row(self, closing: str) -> str:
        """Reads operands up to a closing parenthesis, and makes fractions of those around " / "."""
        operands: list[str] = []
        numerator = ""
        while self.next() not in ("", closing) and self.next() not in _CLOSING.values():
            if self.next().isspace():
                self.place += 1
            elif self.next() == "/" and operands and self.tokens[self.place - 1].isspace():
                self.place += 1
                numerator = operands.pop()
            else:
                operand = self.operand()
                operands.append(_fraction(numerator, operand) if numerator else operand)
                numerator = ""
        return _spaced(operands)

    def operand(self) -> str:
        """Reads symbols up to the next space or closing parenthesis."""
        symbols = []
        while not self.next().isspace() and self.next() not in ("", *_CLOSING.values()):
            symbols.append(self.scripted())
        return _grouped(symbols)

    def scripted(self) -> str:
        """Reads a symbol with what stands below and above it."""
        sign = self.next()
        base = self.symbol()
        scripts = {"_": "", "^": ""}
        while self.next() in scripts or self.next() in _RAISED:
            token = self.tokens[self.place]
            self.place += 1
            if token in _RAISED:
                scripts["^"] += _RAISED[token]
            else:
                scripts[token] += _without_parentheses(self.symbol())
        below, above = (f"<mrow>{content}</mrow>" for content in scripts.values())
        under = sign in _LARGE
        kinds = {
            (True, True): "munderover" if under else "msubsup",
            (True, False): "munder" if under else "msub",
            (False, True): "mover" if under else "msup",
        }
        kind = kinds.get((bool(scripts["_"]), bool(scripts["^"])))
        parts = (below if scripts["_"] else "") + (above if scripts["^"] else "")
        return f"<{kind}>{base}{parts}</{kind}>" if kind else base

    def symbol(self) -> str:
        """Reads a letter, number, word, sign, root or parenthesis."""
        token = self.next()
        self.place += 1
        if token in _CLOSING:
            content = self.row(_CLOSING[token])
            if self.next() != _CLOSING[token]:
                raise ValueError(f"{token!r} is not closed in {''.join(self.tokens)!r}")
            self.place += 1
            if token == "(":
                return _Parenthesis(content)
            return f"<mrow><mo>{token}</mo>{content}<mo>{_CLOSING[token]}</mo></mrow>"
        if token == "√":
            return f"<msqrt>{_without_parentheses(self.symbol())}</msqrt>"
        return _leaf(token)

    def next(self) -> str:
        """Returns the next token, or "" at the end."""
        return self.tokens[self.place] if self.place < len(self.tokens) else ""


def _tokens(line: str) -> Iterator[str]:
    """Yields the tokens of a line; raised letters and short words are split into letters."""
    for token in _TOKEN.findall(line):
        letters = re.findall(r"[ᵀ′²³]|[^ᵀ′²³]+", token)
        yield from [token] if token.startswith('"') else letters


def _leaf(token: str) -> str:
    text = html.escape(token, quote=False)
    if token.startswith('"'):
        return f"<mtext>{text[1:-1]}</mtext>"
    if token in _LARGE:
        return _LARGE[token]
    if token[0].isdigit():
        return f"<mn>{text}</mn>"
    if not token[0].isalpha():
        return f"<mo>{text}</mo>"
    if len(token) > 2:
        return f"<mi>{text}</mi>"
    return _grouped([f"<mi>{letter}</mi>" for letter in token])


def _grouped(symbols: list[str]) -> str:
    return symbols[0] if len(symbols) == 1 else f"<mrow>{''.join(symbols)}</mrow>"


def _fraction(numerator: str, denominator: str) -> str:
    parts = (f"<mrow>{_without_parentheses(part)}</mrow>" for part in (numerator, denominator))
    return f"<mfrac>{''.join(parts)}</mfrac>"


def _without_parentheses(content: str) -> str:
    return content.inside if isinstance(content, _Parenthesis) else content


def _spaced(operands: list[str]) -> str:
    """Joins operands; a thin space separates two that no operator separates."""
    row = operands[:1]
    for left, right in itertools.pairwise(operands):
        operator = left.endswith("</mo>") or right.startswith("<mo>")
        row += [right] if operator else ['<mspace width="0.2em"></mspace>', right]
    return "".join(row)
