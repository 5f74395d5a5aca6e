"""Writes the page: the text, diagrams, pictures, code and output of each step, in one HTML file.

The page contains no script and loads nothing. All text from the steps is escaped.
"""

import base64
import html
import importlib.resources
import re
import struct
from collections.abc import Mapping, Sequence

from pygments import lex
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from experiments.walkthrough import introduction
from experiments.walkthrough.diagrams import Diagram
from experiments.walkthrough.formulas import Formula
from experiments.walkthrough.introduction import TITLE
from experiments.walkthrough.names import borrowed, preparation
from experiments.walkthrough.running import Result
from experiments.walkthrough.step import Code, Step


_COLOURED = {
    **{Keyword: "k", Operator.Word: "k", String: "s", Comment: "c", Number: "m"},
    **{Name.Function: "f", Name.Class: "f", Name.Decorator: "f"},
}


def written(results: Sequence[Result]) -> str:
    """Returns the whole page as HTML.

    Args:
        results: the results of the steps, in order.
    """
    style = (
        importlib.resources.files("experiments.walkthrough").joinpath("page.css").read_text("utf-8")
    )
    steps = [result.step for result in results]
    contents = "".join(
        f'<li><a href="#{_text(step.name)}">{_text(step.title)}</a></li>\n' for step in steps
    )
    sections = "".join(_section(steps, place, result) for place, result in enumerate(results))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{TITLE}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{TITLE}</h1>
{_paragraphs([introduction.SUMMARY])}{_diagram(introduction.OPENING)}</header>
<nav aria-label="steps">
<ol>
{contents}</ol>
</nav>
<main>
{_reading()}{sections}</main>
<section>
<h2>What comes next</h2>
{_ending(steps)}</section>
</body>
</html>
"""


def _reading() -> str:
    """Returns the section above the first step; what a reader may skip is folded."""
    documents = "".join(f"<li>{_text(text)}</li>\n" for text in introduction.texts())
    folded = {
        "install and run the steps": _code(introduction.COMMANDS),
        "paste the code of a step": _paragraphs(introduction.CODE)
        + _list(introduction.helpers(), "long"),
        "words and letters": _paragraphs(introduction.WORDS) + _list(introduction.LETTERS, "short"),
        "the five texts that the steps follow": f"<ul>\n{documents}</ul>\n"
        + _paragraphs([introduction.NUMBERS]),
    }
    folds = "".join(_fold(summary, content) for summary, content in folded.items())
    return f"""<section>
<h2>Before the first step</h2>
{_paragraphs(introduction.KNOWLEDGE)}{folds}</section>
"""


def _ending(steps: Sequence[Step]) -> str:
    """Returns the HTML below the last step."""
    names = ", ".join(f"`{step.name}`" for step in steps)
    return _paragraphs(
        (
            "`python -m experiments.translation` trains a translator, and shows all of its heads.",
            "`python -m experiments.walkthrough` runs single steps if it is given their names, for "
            f"example `python -m experiments.walkthrough {steps[-1].name}`. The names are {names}.",
        )
    )


def _section(steps: Sequence[Step], place: int, result: Result) -> str:
    """Returns a step's HTML: text, diagram, pictures, code and output."""
    step = steps[place]
    name, title = _text(step.name), _text(step.title)
    diagram = _diagram(step.diagram) if step.diagram else ""
    pictures = "".join(
        _picture(content, f"{step.title}: {description}")
        for content, description in zip(result.pictures, result.descriptions, strict=True)
    )
    misprints = (
        _fold("misprints in the texts", _paragraphs(step.misprints)) if step.misprints else ""
    )
    return f"""<section id="{name}">
<h2><a href="#{name}">{place + 1}. {title}</a></h2>
{_paragraphs(step.paragraphs)}{diagram}{pictures}{_step_code(step)}
<p class="label">output, in {result.seconds:.1f} s</p>
<pre class="output" tabindex="0"><samp>{_output(result.output)}</samp></pre>
{misprints}<p class="follows">{_sources(steps, place)}</p>
</section>
"""


def _step_code(step: Step) -> str:
    """Returns the code of a step in the order of pasting; only its own lines are not folded."""
    prepared = preparation(step)
    others = [code for code in step.helpers if code.language != "python"]
    folded = "".join(_fold(code.label, _code(code)) for code in (*others, prepared))
    drawing = _fold(step.drawing.label, _code(step.drawing)) if step.drawing.text else ""
    return f'{folded}<p class="label">{_text(step.lines.label)}</p>\n{_code(step.lines)}{drawing}'


def _sources(steps: Sequence[Step], place: int) -> str:
    """Lists the documents that a step follows, and the names that it uses from earlier steps."""
    step = steps[place]
    sentences = [f"{step.relation} {_text('; '.join(map(str, step.follows)))}."]
    for earlier, names in borrowed(steps, place).items():
        link = f'<a href="#{_text(steps[earlier].name)}">step {earlier + 1}</a>'
        listed = ", ".join(f"<code>{_text(name)}</code>" for name in names)
        sentences.append(f"From {link}: {listed}.")
    return "<br>\n".join(sentences)


def _text(text: str) -> str:
    """Escapes text for HTML elements and quoted attributes."""
    return html.escape(text, quote=True)


def _marked(text: str) -> str:
    """Escapes text and turns backticks into code elements; in other text, the letter after "_" is
    lowered, and what follows "^" is raised."""
    pieces = _text(text).split("`")
    # Every second piece is code.
    lowered = (re.sub(r"_(\w)\b", r"<sub>\1</sub>", piece) for piece in pieces[::2])
    pieces[::2] = [re.sub(r"\^\(?([\w−∞/]+)\)?", r"<sup>\1</sup>", piece) for piece in lowered]
    pieces[1::2] = [f"<code>{piece}</code>" for piece in pieces[1::2]]
    return "".join(pieces)


def _paragraphs(blocks: Sequence[str | Formula]) -> str:
    return "".join(
        f'<div class="formula" tabindex="0">{block.mathml()}</div>\n'
        if isinstance(block, Formula)
        else f"<p>{_marked(block)}</p>\n"
        for block in blocks
    )


def _fold(summary: str, content: str) -> str:
    return f"<details><summary>{_text(summary)}</summary>\n{content}</details>\n"


def _list(meanings: Mapping[str, str], style: str) -> str:
    """Returns a list of code and meanings; on narrow screens, the "long" style puts each meaning on
    a line of its own."""
    pairs = (
        f"<dt><code>{_text(code)}</code></dt><dd>{_marked(meaning)}</dd>\n"
        for code, meaning in meanings.items()
    )
    return f'<dl class="{style}">\n{"".join(pairs)}</dl>'


def _output(text: str) -> str:
    """Returns a step's output as HTML, with the checked claims coloured."""
    lines = (_text(line) for line in text.rstrip("\n").split("\n"))
    return "\n".join(
        f'<span class="good">{line}</span>' if line.startswith("✓") else line for line in lines
    )


def _code(code: Code) -> str:
    """Returns code with keywords, strings, numbers and comments coloured."""
    parts = []
    for kind, text in lex(code.text, get_lexer_by_name(code.language)):
        classes = [letter for group, letter in _COLOURED.items() if kind in group]
        # A narrow page draws a comment as a box, after which the line must still end.
        visible, end = (text[:-1], "\n") if text.endswith("\n") else (text, "")
        escaped = _text(visible)
        parts.append(f'<span class="{classes[0]}">{escaped}</span>' if classes else escaped)
        parts.append(end)
    kind = f'class="language-{_text(code.language)}"'
    return f'<pre tabindex="0"><code {kind}>{"".join(parts).rstrip()}</code></pre>\n'


def _diagram(diagram: Diagram) -> str:
    caption = f"<figcaption>{_marked(diagram.caption)}</figcaption>"
    return f'<figure class="diagram">{diagram.svg}\n{caption}</figure>\n'


def _picture(content: bytes, description: str) -> str:
    """Embeds a PNG file, scaled so that its letters are as large as those of the text."""
    width, height = struct.unpack(
        ">II", content[16:24]
    )  # PNG's header block holds width and height
    data = base64.b64encode(content).decode("ascii")
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{_text(description)}"'
        f' class="{"wide" if width > 930 else ""}"'
        f' width="{width * 2 // 3}" height="{height * 2 // 3}"></figure>\n'
    )
