"""Runs a step, and records its output and figures."""

import contextlib
import io
import time
from dataclasses import dataclass
from typing import TextIO

import jax
from matplotlib.figure import Figure

from experiments.walkthrough.step import Step, collected_figures


@dataclass(frozen=True)
class Result:
    """The result of a step: its output, its figures as PNG files with a sentence on what each
    shows, and its running time."""

    step: Step
    output: str
    pictures: tuple[bytes, ...]
    descriptions: tuple[str, ...]
    seconds: float


class _Copy(io.StringIO):
    """A stream that records text and also writes it to a listener."""

    def __init__(self, listener: TextIO | None) -> None:
        super().__init__()
        self.listener = listener

    def write(self, text: str) -> int:
        if self.listener is not None:
            self.listener.write(text)
            self.listener.flush()
        return super().write(text)


def run(chosen: Step, listener: TextIO | None = None) -> Result:
    """Runs a step in 64 bits, so that the documents' eight digits can be reproduced.

    Args:
        chosen: the step.
        listener: a stream to which the step's output is also written, as it is printed.

    Raises:
        ClaimFailed: a claim of the step does not hold.
    """
    start = time.perf_counter()
    copy = _Copy(listener)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(copy))
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        figures = stack.enter_context(collected_figures())
        chosen.body()
    pictures, descriptions = tuple(map(_png, figures)), tuple(map(_description, figures))
    return Result(chosen, copy.getvalue(), pictures, descriptions, time.perf_counter() - start)


def _description(figure: Figure) -> str:
    """Says what a figure shows: the titles of its panels and the names of their axes."""
    panels = []
    for axes in figure.axes:
        names = " and ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))
        title = axes.get_title() or axes.get_title(loc="left")
        panels.append(" by ".join(filter(None, (title, names))))
    return "; ".join(dict.fromkeys(filter(None, (figure.get_suptitle(), *panels))))


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(
        content, format="png", dpi=144, facecolor="white", bbox_inches="tight", pad_inches=0.1
    )
    return content.getvalue()
