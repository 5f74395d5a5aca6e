"""The page: what each step says, its code, its output and its pictures, in one HTML file.

It holds no program and loads nothing. Everything that comes from a step is escaped.
"""

import base64
import html
import importlib.resources
import re
import struct
from collections.abc import Sequence

from pygments import lex
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from experiments.walkthrough.documents import DOCUMENTS
from experiments.walkthrough.running import Result
from experiments.walkthrough.step import Code


_TITLE = "From dot products to a Transformer"

_ABOUT = (
    "Attention lets every word of a sentence look at every other word. These steps lead from plain "
    "products of vectors to the Transformer of 2017. Each is a few lines of Python that call the "
    "library `jattn`; below them stands what they printed, and the picture that they drew.",
    "You need to know vectors, products of matrices and a little Python. The arrays are those of "
    "JAX, `jnp`, which work like NumPy's: `x @ y` is a product of matrices, `x.T` the transpose, "
    "`x[:, 0]` the first column, and a shape such as `[4, 5]` says four rows of five numbers. "
    "JAX can also compile a function (`jax.jit`) and differentiate it (`jax.grad`). Its arrays "
    "never change: `x.at[i].set(v)` is a copy of `x` with `v` at `i`. Its random numbers come from "
    "a seed that is passed: `jax.random.key(0)` is a seed, `split` makes several of one, and "
    "`normal(seed, shape)` draws the same numbers whenever the seed is the same. The steps compute "
    "in 64 bits, which JAX must be told to do; modules and some arrays are made in 32.",
    "All code follows these lines: `import jax, jax.numpy as jnp, numpy as np, optax`, `from flax "
    "import nnx`, `import jattn`, `from jattn import masks, viz`. `masks` says which words may be "
    "looked at, `viz` draws, `nnx` has modules that hold parameters, `optax` trains them. Five "
    "helpers are the page's own: `check(claim, holds)` prints a claim or stops, `show(name, "
    "array)` prints an array with its shape, `same(a, b)` says whether two arrays are equal but "
    "for rounding, `matches(a, printed.X)` whether one rounds to the digits that a text prints, "
    "and `panels(n)` makes an empty figure.",
    "A line with ✓ is a claim that was checked when the page was made: had it not held, there "
    "would be no page. Letters in shapes are always the same: B sentences, T words that look "
    "(queries), S words that are looked at (keys), N heads of queries, K heads of keys and values "
    "(here as many), H numbers in a query or key, V in a value, D in a word, A in the hidden layer "
    "of additive scores. `jattn.attention(query, key, value)` takes `[*B, T, N, H]`, "
    "`[*B, S, K, H]` and `[*B, S, K, V]`, where `*B` may also be no axis at all, and gives "
    "`[*B, T, N, V]`; if no `scale` is given, it multiplies scores by 1/√H. In Y = L X R the "
    "letters are matrices: L mixes words, R changes each.",
)

_COLOURED = {
    **{Keyword: "k", Operator.Word: "k", String: "s", Comment: "c", Number: "m"},
    **{Name.Function: "f", Name.Class: "f", Name.Decorator: "f"},
}


def written(results: Sequence[Result]) -> str:
    """The whole page.

    Args:
        results: of the steps, in order.
    """
    style = (
        importlib.resources.files("experiments.walkthrough").joinpath("page.css").read_text("utf-8")
    )
    contents = "".join(
        f'<li><a href="#{_text(result.step.name)}">{_text(result.step.title)}</a></li>\n'
        for result in results
    )
    about = "".join(f"<p>{_paragraph(text)}</p>\n" for text in _ABOUT)
    titles = "; ".join(map(str, DOCUMENTS))
    sections = "".join(_section(number, result) for number, result in enumerate(results, 1))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{_TITLE}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{_TITLE}</h1>
{about}<p>The steps follow five texts and reproduce the numbers that these print: {_text(titles)}.
Where a text is misprinted, the step says so.</p>
</header>
<nav aria-label="steps">
<ol>
{contents}</ol>
</nav>
<main>
{sections}</main>
<section>
<h2>What comes next</h2>
<p>Train a translator and look at every head of it: <code>python -m experiments.translation</code>.
Run one of these steps alone: <code>python -m experiments.walkthrough {_text(results[-1].step.name)}
</code>.</p>
</section>
</body>
</html>
"""


def _section(number: int, result: Result) -> str:
    """A step: text, code, output, pictures."""
    step = result.step
    name, title = _text(step.name), _text(step.title)
    text = "".join(f"<p>{_paragraph(paragraph)}</p>\n" for paragraph in step.paragraphs)
    code = "".join(map(_code, step.code))
    pictures = "".join(
        _picture(content, f"{step.title}: {_ordinal(place, len(result.pictures))}")
        for place, content in enumerate(result.pictures, 1)
    )
    return f"""<section id="{name}">
<h2><a href="#{name}">{number}. {title}</a></h2>
{text}<p class="follows">Follows {_text("; ".join(map(str, step.follows)))}.</p>
{code}<p class="label">output, in {result.seconds:.1f} s</p>
<pre class="output" tabindex="0"><samp>{_output(result.output)}</samp></pre>
{pictures}</section>
"""


def _ordinal(place: int, count: int) -> str:
    return "picture" if count == 1 else f"picture {place} of {count}"


def _text(text: str) -> str:
    """Text as HTML, in elements and in quoted attributes."""
    return html.escape(text, quote=True)


def _paragraph(text: str) -> str:
    """Text in which backticks stand around code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", _text(text))


def _output(text: str) -> str:
    """What was printed, with the claims that were checked in a colour."""
    lines = (_text(line) for line in text.rstrip("\n").split("\n"))
    return "\n".join(
        f'<span class="good">{line}</span>' if line.startswith("✓") else line for line in lines
    )


def _code(code: Code) -> str:
    """Lines of code under their label; those that draw are folded."""
    lines = f'<pre tabindex="0"><code>{_highlighted(code)}</code></pre>\n'
    if code.label == "drawing":
        return f"<details><summary>{_text(code.label)}</summary>\n{lines}</details>\n"
    return f'<p class="label">{_text(code.label)}</p>\n{lines}'


def _highlighted(code: Code) -> str:
    """Code with a colour for keywords, strings, numbers and comments."""
    parts = []
    for kind, text in lex(code.text, get_lexer_by_name(code.language)):
        found = [letter for group, letter in _COLOURED.items() if kind in group]
        escaped = _text(text)
        parts.append(f'<span class="{found[0]}">{escaped}</span>' if found else escaped)
    return "".join(parts).rstrip("\n")


def _picture(content: bytes, description: str) -> str:
    """A PNG file in the page, at the size in which its letters are those of the text."""
    width, height = struct.unpack(">II", content[16:24])  # of the file's first block
    data = base64.b64encode(content).decode("ascii")
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{_text(description)}"'
        f' class="{"wide" if width > 930 else ""}"'
        f' width="{width * 2 // 3}" height="{height * 2 // 3}"></figure>\n'
    )
