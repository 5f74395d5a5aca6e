"""What a step is, what it may say, and how it is run.

A step is a function. Its docstring is the text: a line for the title, then paragraphs. Its body is
the code that the page shows, it prints, it checks what it claims, and it returns its figures.
"""

import ast
import contextlib
import inspect
import io
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import jax
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
        code: what it runs, in the order in which it is read; "drawing" comes last.
        body: the function itself.
    """

    name: str
    title: str
    paragraphs: tuple[str, ...]
    follows: tuple[Document, ...]
    code: tuple[Code, ...]
    body: Body


@dataclass(frozen=True)
class Result:
    """What came of a step: its output and its figures as PNG files."""

    step: Step
    output: str
    pictures: tuple[bytes, ...]
    seconds: float


def step(
    *follows: Document, uses: tuple[Callable[..., Any] | type | str, ...] = ()
) -> Callable[[Body], Step]:
    """Makes a step of a function, whose name it takes.

    Args:
        follows: the documents.
        uses: functions, classes and texts in C++ that the page shows before the step's own lines.
    """

    def made(body: Body) -> Step:
        title, *paragraphs = inspect.cleandoc(body.__doc__ or "").split("\n\n")
        return Step(
            body.__name__.replace("_", "-"),
            title.rstrip("."),
            tuple(" ".join(paragraph.split()) for paragraph in paragraphs),
            follows,
            tuple(_code(body, uses)),
            body,
        )

    return made


def _code(body: Body, uses: tuple[Callable[..., Any] | type | str, ...]) -> Iterator[Code]:
    """What stands under a step's text; lines after "# The picture." are those that draw."""
    for used in uses:
        if isinstance(used, str):
            yield Code("loops in C++", "c++", used)
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
    """Prints what the step claims, or raises `ClaimFailed`.

    Args:
        claim: in words.
        holds: a truth, or an array of them of which all must hold.
    """
    if not np.all(np.asarray(holds)):
        raise ClaimFailed(claim)
    print(f"✓ {claim}")


def show(name: str, array: Any, digits: int = 4) -> None:
    """Prints an array under its name and shape."""
    array = np.asarray(array)
    style = {"precision": digits, "suppress_small": True, "max_line_width": 100}
    print(f"{name} {list(array.shape)}\n{np.array2string(array, **style)}")


def same(a: Any, b: Any, tolerance: float = 1e-12) -> bool:
    """Whether two arrays have one shape and, but for rounding, the same numbers."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0, atol=tolerance))


def panels(columns: int, *, width: float = 7.0, height: float = 3.0) -> tuple[Figure, Any]:
    """An empty figure, in inches, and its axes: one, or an array of several."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


# ------------------------------------------------------------------------------------ running one


class _Copy(io.StringIO):
    """Keeps what is printed, and lets somebody read along."""

    def __init__(self, listener: TextIO | None) -> None:
        super().__init__()
        self.listener = listener

    def write(self, text: str) -> int:
        if self.listener is not None:
            self.listener.write(text)
            self.listener.flush()
        return super().write(text)


def run(chosen: Step, listener: TextIO | None = None) -> Result:
    """Runs a step in 64 bits, in which the documents' eight digits are right.

    Args:
        chosen: the step.
        listener: where its output is printed too, as it comes.

    Raises:
        ClaimFailed: something that the step says does not hold.
    """
    start = time.perf_counter()
    copy = _Copy(listener)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(copy))
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        figures = chosen.body()
    pictures = tuple(map(_png, [figures] if isinstance(figures, Figure) else figures or []))
    return Result(chosen, copy.getvalue(), pictures, time.perf_counter() - start)


def run_all(steps: Iterable[Step], listener: TextIO | None = None) -> list[Result]:
    """Runs steps one after the other."""
    return [run(one, listener) for one in steps]


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=144, facecolor="white")
    return content.getvalue()
