"""Defines steps, and the helpers that their code calls.

A step is a function. Its docstring is the text: a line for the title, then paragraphs and indented
formulas. Its body is the code that the page shows. The body prints results, checks its claims and
draws its figures.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.walkthrough.diagrams import Diagram
from experiments.walkthrough.documents import Document
from experiments.walkthrough.formulas import Formula


class ClaimFailed(AssertionError):
    """Raised if a claim of a step does not hold."""


Body = Callable[[], None]


@dataclass(frozen=True)
class Code:
    """Lines of code with their label and language."""

    label: str
    language: str
    text: str


@dataclass(frozen=True)
class Step:
    """A step before it is run.

    Attributes:
        name: its name on the command line.
        title: its title, one line.
        paragraphs: its text and formulas.
        misprints: paragraphs on errors in the documents that it follows.
        diagram: a diagram that belongs to the text, or None.
        follows: the documents whose ideas and numbers it follows.
        relation: its relation to these documents, such as "Follows".
        helpers: the functions, classes and data that its lines use.
        lines: its lines.
        drawing: the lines that draw its figures.
        body: the function itself.
    """

    name: str
    title: str
    paragraphs: tuple[str | Formula, ...]
    misprints: tuple[str, ...]
    diagram: Diagram | None
    follows: tuple[Document, ...]
    relation: str
    helpers: tuple[Code, ...]
    lines: Code
    drawing: Code
    body: Body


Used = Callable[..., Any] | type | Code


def constants(file: str, *names: str) -> Code:
    """Returns the assignments of a file to these names."""
    source = Path(file).read_text(encoding="utf-8")
    found = [
        ast.get_source_segment(source, line) or ""
        for line in ast.parse(source).body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) in names
    ]
    return Code("data", "python", "\n".join(found))


def step(
    *follows: Document,
    uses: tuple[Used, ...] = (),
    relation: str = "Follows",
    misprints: tuple[str, ...] = (),
    diagram: Diagram | None = None,
) -> Callable[[Body], Step]:
    """Decorator: turns a function into a step with the function's name.

    Args:
        follows: the documents that the step follows.
        relation: the step's relation to them.
        uses: functions, classes and code that the page shows before the step's own lines.
        misprints: paragraphs on errors in these documents.
        diagram: a diagram for the text.
    """

    def build(body: Body) -> Step:
        title, *blocks = inspect.cleandoc(body.__doc__ or "").split("\n\n")
        lines, drawing = _split_lines(body)
        return Step(
            body.__name__.replace("_", "-"),
            title.rstrip("."),
            tuple(map(_paragraph, blocks)),
            misprints,
            diagram,
            follows,
            relation,
            tuple(map(_helper, uses)),
            Code("the step", "python", lines),
            Code("drawing", "python", drawing),
            body,
        )

    return build


def _paragraph(block: str) -> str | Formula:
    """Returns an indented block as a formula for each line, and any other block as one line."""
    if block.startswith("    "):
        return Formula(tuple(line.strip() for line in block.split("\n")))
    return " ".join(block.split())


def _helper(used: Used) -> Code:
    if isinstance(used, Code):
        return used
    return Code(used.__name__, "python", textwrap.dedent(inspect.getsource(used)))


def _split_lines(body: Body) -> tuple[str, str]:
    """Returns the lines of a body without its docstring, and those after "# The picture."."""
    lines, *drawing = re.split(r"^# The pictures?\.\n", _own_lines(body), flags=re.MULTILINE)
    return lines, "".join(drawing)


def _own_lines(function: Callable[..., Any]) -> str:
    """Returns the source of a function's body without its docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    end = definition.body[0].end_lineno
    return textwrap.dedent("\n".join(source.split("\n")[end:])).strip("\n") + "\n"


# ------------------------------------------------------------------------ what a step's code calls


def check(claim: str, holds: Any) -> None:
    """Prints a claim if it holds, and otherwise stops the run. `holds` is True or False, or an
    array of them, which must all be True.

    Raises:
        ClaimFailed: the claim does not hold.
    """
    if not np.all(np.asarray(holds)):
        raise ClaimFailed(claim)
    print(f"✓ {claim}")


def show(name: str, array: Any, digits: int = 4) -> None:
    """Prints an array under its name and shape, with `digits` digits after the point."""
    array = np.asarray(array)
    style = {"precision": digits, "suppress_small": True, "max_line_width": 100}
    print(f"{name} {list(array.shape)}\n{np.array2string(array, **style)}")


def same(a: Any, b: Any, tolerance: float = 1e-12) -> bool:
    """Returns True if two arrays have the same shape, and no two numbers at the same place differ
    by more than the tolerance."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0, atol=tolerance))


def panels(columns: int, *, width: float = 7.0, height: float = 3.0) -> tuple[Figure, Any]:
    """Makes an empty figure of a width and height in inches, and its axes: one, or an array of
    several side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


_figures: ContextVar[list[Figure] | None] = ContextVar("figures", default=None)


@contextmanager
def collected_figures() -> Iterator[list[Figure]]:
    """Yields a list to which `draw` adds figures, as long as the context is entered."""
    figures: list[Figure] = []
    token = _figures.set(figures)
    try:
        yield figures
    finally:
        _figures.reset(token)


def draw(*figures: Figure) -> None:
    """Puts figures on this page. In your own session it saves them as picture-1.png, picture-2.png
    and so on, in the current folder."""
    collected = _figures.get()
    if collected is not None:
        collected.extend(figures)
        return
    for number, figure in enumerate(figures, 1):
        figure.savefig(f"picture-{number}.png", dpi=144)
        print(f"saved picture-{number}.png")
