"""The page's introduction: an opening picture, prerequisites, helpers and conventions."""

import inspect
from collections.abc import Callable
from typing import Any

from experiments.walkthrough.diagrams import one_row
from experiments.walkthrough.documents import DOCUMENTS
from experiments.walkthrough.printed import matches
from experiments.walkthrough.similarity import INPUTS, JOURNEY
from experiments.walkthrough.step import Code, check, draw, panels, same, show


TITLE = "From dot products to a Transformer"

SUMMARY = (
    "Attention lets every word of a sentence attend to every other word. These steps lead from dot "
    "products of vectors to the Transformer of 2017. All code on this page was run and checked "
    "when the page was made."
)

OPENING = one_row(JOURNEY, INPUTS, JOURNEY.index("journey"))

KNOWLEDGE = (
    "You need to know vectors, products of matrices, variance, gradients and a little Python; for "
    "two remarks, the singular value decomposition and eigenvalues. Each step has a text, a "
    "formula, pictures, a few lines of Python that call the library `jattn`, and the output of "
    "these lines. A line with ✓ is a claim that was checked when the page was made. If one check "
    "fails, no page is made. The code says how a claim is checked, and with which tolerance.",
    "The arrays are those of JAX, `jnp`. They work like those of NumPy, `np`: `x @ y` is the "
    "product of two matrices, `x.T` is the transpose, and `x[:, 0]` is the first column. A shape "
    "such as `[4, 5]` means four rows of five numbers. What else a step needs of JAX is said where "
    "it first appears.",
)

COMMANDS = Code(
    "commands",
    "bash",
    "# In the folder of the repository that holds the library, the steps and this page:\n"
    'python3 -m venv .venv\n.venv/bin/pip install -e ".[experiments]"\n'
    ".venv/bin/python -m experiments.walkthrough\n",
)

CODE = (
    "To run a step yourself, paste its code into a file or a notebook, from top to bottom and with "
    "the folded parts, and run it in the folder of the repository. Nothing else is needed: what a "
    "step uses from earlier steps is imported.",
    "`jattn` is the library. Its `masks` say which words a word may attend to, and its `viz` "
    "draws. `nnx` has modules, which hold parameters, and `optax` trains them. `printed` holds the "
    "numbers that the texts print. Six helpers are the page's own:",
)

WORDS = (
    "Some words have one meaning on this page. Training changes parameters. Weights are the "
    "numbers that a softmax gives: how much a word attends to each word. L and R are the matrices "
    "in Y = L X R. A seed is where random numbers start.",
    "`jattn.attention(query, key, value)` takes queries `[*B, T, N, H]`, keys `[*B, S, K, H]` and "
    "values `[*B, S, K, V]`, and gives `[*B, T, N, V]`. Here `*B` stands for any number of axes, "
    "also for none. If no `scale` is given, scores are multiplied by 1/√H. The letters in shapes "
    "always mean the same:",
)

LETTERS = {
    "B": "sentences",
    "T": "words that attend (queries)",
    "S": "words that are attended to (keys)",
    "N": "heads of queries",
    "K": "heads of keys and values, on this page as many as N",
    "H": "numbers in a query or a key",
    "V": "numbers in a value",
    "D": "numbers in the vector of a word",
    "A": "numbers in the hidden layer of additive scores",
}

NUMBERS = (
    "Where a step meets a misprint in one of them, it says so. Two of them print results of code. "
    "The steps reproduce those of “Understanding” to all eight digits, and the output of the first "
    "class of “Coding” to all four. “Coding” does not print what its table of weights is computed "
    "from, so the step on causal masks starts from that table and reproduces what follows from it."
)


def helpers() -> dict[str, str]:
    """Returns the signature and the summary of each of the page's own functions."""
    used = (check, show, same, matches, panels, draw)
    return {_signature(helper): _summary(helper) for helper in used}


def texts() -> list[str]:
    """Returns a sentence for each document, with the short name that the steps use."""
    return [f"{document}. The steps call it {document.short}." for document in DOCUMENTS]


def _signature(helper: Callable[..., Any]) -> str:
    """Returns a function's name and arguments, with defaults."""
    arguments = inspect.signature(helper).parameters.values()
    bare = inspect.Signature(
        [argument.replace(annotation=argument.empty) for argument in arguments]
    )
    return f"{helper.__name__}{bare}"


def _summary(helper: Callable[..., Any]) -> str:
    """Returns the first paragraph of a function's docstring."""
    return " ".join(inspect.cleandoc(helper.__doc__ or "").split("\n\n")[0].split())
