"""What a step is, and what its code calls.

A step is a function. Its docstring is the text: a line for the title, then paragraphs. Its body is
the code that the page shows, it prints, it checks what it claims, and it returns its figures.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.walkthrough.documents import Document


class ClaimFailed(AssertionError):
    """What a step says did not hold when it was run."""


Body = Callable[[], Figure | list[Figure] | None]


@dataclass(frozen=True)
class Code:
    """Some lines of code: what they are called, their language, and the lines."""

    label: str
    language: str
    text: str


@dataclass(frozen=True)
class Step:
    """A step before it is run.

    Attributes:
        name: by which the command line knows it.
        title: a line.
        paragraphs: the text.
        follows: the documents whose lines of thought and numbers it follows.
        relation: "Follows", or what else it does with these documents.
        code: what it runs, in the order in which it is read; "drawing" comes last.
        body: the function itself.
    """

    name: str
    title: str
    paragraphs: tuple[str, ...]
    follows: tuple[Document, ...]
    relation: str
    code: tuple[Code, ...]
    body: Body


Used = Callable[..., Any] | type | Code


def constants(file: str, *names: str) -> Code:
    """The lines of a file that give these names their values."""
    source = Path(file).read_text(encoding="utf-8")
    found = [
        ast.get_source_segment(source, line) or ""
        for line in ast.parse(source).body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) in names
    ]
    return Code("data", "python", "\n".join(found))


def step(
    *follows: Document, uses: tuple[Used, ...] = (), relation: str = "Follows"
) -> Callable[[Body], Step]:
    """Makes a step of a function, whose name it takes.

    Args:
        follows: the documents.
        relation: what the step does with them.
        uses: functions, classes and code that the page shows before the step's own lines.
    """

    def made(body: Body) -> Step:
        title, *paragraphs = inspect.cleandoc(body.__doc__ or "").split("\n\n")
        return Step(
            body.__name__.replace("_", "-"),
            title.rstrip("."),
            tuple(" ".join(paragraph.split()) for paragraph in paragraphs),
            follows,
            relation,
            tuple(_code(body, uses)),
            body,
        )

    return made


def _code(body: Body, uses: tuple[Used, ...]) -> Iterator[Code]:
    """What stands under a step's text; lines after "# The picture." are those that draw."""
    for used in uses:
        if isinstance(used, Code):
            yield used
        else:
            yield Code(used.__name__, "python", textwrap.dedent(inspect.getsource(used)))
    own, *drawing = re.split(r"^# The pictures?\.\n", _own_lines(body), flags=re.MULTILINE)
    yield Code("the step", "python", own)
    yield from (Code("drawing", "python", lines) for lines in drawing)


def _own_lines(function: Callable[..., Any]) -> str:
    """The source of a function's body, after its docstring."""
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
        ClaimFailed: it does not hold.
    """
    if not np.all(np.asarray(holds)):
        raise ClaimFailed(claim)
    print(f"✓ {claim}")


def show(name: str, array: Any, digits: int = 4) -> None:
    """Prints an array under its name and shape, with so many digits after the point."""
    array = np.asarray(array)
    style = {"precision": digits, "suppress_small": True, "max_line_width": 100}
    print(f"{name} {list(array.shape)}\n{np.array2string(array, **style)}")


def same(a: Any, b: Any, tolerance: float = 1e-12) -> bool:
    """True if two arrays have the same shape, and no two numbers at the same place differ by more
    than the tolerance."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0, atol=tolerance))


def panels(columns: int, *, width: float = 7.0, height: float = 3.0) -> tuple[Figure, Any]:
    """Makes an empty figure of a width and height in inches, and its axes: one, or an array of
    several side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)
