"""Elements of pages in HTML: paragraphs, formulas, code and pictures. All text is escaped."""

import base64
import html
import importlib.resources
import re
import struct
from collections.abc import Sequence

from pygments import lex
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from experiments.walkthrough.formulas import Formula
from experiments.walkthrough.step import Code


_COLOURED = {
    **{Keyword: "k", Operator.Word: "k", String: "s", Comment: "c", Number: "m"},
    **{Name.Function: "f", Name.Class: "f", Name.Decorator: "f"},
}


def document(title: str, body: str, style: str = "") -> str:
    """Returns a page that contains no script and loads nothing; `style` adds rules in CSS."""
    usual = (
        importlib.resources.files("experiments.walkthrough").joinpath("page.css").read_text("utf-8")
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{escape(title)}</title>
<style>
{usual}{style}</style>
</head>
<body>
{body}</body>
</html>
"""


def escape(text: str) -> str:
    """Escapes text for HTML elements and quoted attributes."""
    return html.escape(text, quote=True)


def marked(text: str) -> str:
    """Escapes text and turns backticks into code elements; in other text, the letter after "_" is
    lowered, and what follows "^" is raised."""
    pieces = escape(text).split("`")
    # Every second piece is code.
    lowered = (re.sub(r"_(\w)\b", r"<sub>\1</sub>", piece) for piece in pieces[::2])
    pieces[::2] = [re.sub(r"\^\(?([\w−∞/]+)\)?", r"<sup>\1</sup>", piece) for piece in lowered]
    pieces[1::2] = [f"<code>{piece}</code>" for piece in pieces[1::2]]
    return "".join(pieces)


def paragraphs(blocks: Sequence[str | Formula]) -> str:
    """Returns paragraphs of text, and formulas between them."""
    return "".join(
        f'<div class="formula" tabindex="0">{block.mathml()}</div>\n'
        if isinstance(block, Formula)
        else f"<p>{marked(block)}</p>\n"
        for block in blocks
    )


def fold(summary: str, content: str) -> str:
    """Returns content in HTML that a reader can unfold."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}</details>\n"


def code_block(code: Code) -> str:
    """Returns code with keywords, strings, numbers and comments coloured."""
    parts = []
    for kind, text in lex(code.text, get_lexer_by_name(code.language)):
        classes = [letter for group, letter in _COLOURED.items() if kind in group]
        # A narrow page draws a comment as a box, after which the line must still end.
        visible, end = (text[:-1], "\n") if text.endswith("\n") else (text, "")
        escaped = escape(visible)
        parts.append(f'<span class="{classes[0]}">{escaped}</span>' if classes else escaped)
        parts.append(end)
    kind = f'class="language-{escape(code.language)}"'
    return f'<pre tabindex="0"><code {kind}>{"".join(parts).rstrip()}</code></pre>\n'


def picture(content: bytes, description: str) -> str:
    """Embeds a PNG file, scaled so that its letters are as large as those of the text."""
    width, height = struct.unpack(
        ">II", content[16:24]
    )  # PNG's header block holds width and height
    data = base64.b64encode(content).decode("ascii")
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(description)}"'
        f' class="{"wide" if width > 930 else ""}"'
        f' width="{width * 2 // 3}" height="{height * 2 // 3}"></figure>\n'
    )
