"""The page's introduction: prerequisites, imports, helpers and conventions."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from experiments.walkthrough.documents import DOCUMENTS
from experiments.walkthrough.names import imports
from experiments.walkthrough.printed import matches
from experiments.walkthrough.step import Code, Step, check, panels, same, show


TITLE = "From dot products to a Transformer"

KNOWLEDGE = (
    "Attention lets every word of a sentence look at every other word. These steps lead from dot "
    "products of vectors to the Transformer of 2017. Each step has a text, a few lines of Python "
    "that call the library `jattn`, the output of these lines, and pictures.",
    "You need to know vectors, products of matrices, variance, gradients and a little Python; for "
    "two remarks, the singular value decomposition and eigenvalues. The arrays are those of "
    "JAX, `jnp`. They work like those of NumPy, `np`: `x @ y` is the product of two matrices, "
    "`x.T` is the transpose, and `x[:, 0]` is the first column. A shape such as `[4, 5]` means "
    "four rows of five numbers. What else a step needs of JAX is said where it first appears.",
    "The library, the steps and this page come from one repository. In its folder, these lines "
    "install all that the steps need, run them, and make the page:",
)

COMMANDS = Code(
    "commands",
    "bash",
    'python3 -m venv .venv\n.venv/bin/pip install -e ".[experiments]"\n'
    ".venv/bin/python -m experiments.walkthrough\n",
)

BITS = (
    "# JAX computes in 32 bits unless it is told to use 64. One of the texts prints eight digits.\n"
    'jax.config.update("jax_enable_x64", True)\n'
)

CODE = (
    "The code of a step is the body of a function, so its `return` gives the pictures. Functions "
    "and data that it uses stand above it. If it uses functions or data of an earlier step, a line "
    "says which.",
    "`jattn` is the library. Its `masks` say which words may be looked at, and its `viz` draws. "
    "`nnx` has modules, which hold parameters, and `optax` trains them. `printed` holds the "
    "numbers that the texts print. Five helpers are the page's own:",
)

PROMISES = (
    "A line with ✓ is a claim that was checked when the page was made. If one check fails, no page "
    "is made. The code beside it says how it was checked, and with which tolerance.",
    "Some words have one meaning on this page. Training changes parameters. Weights are the "
    "numbers that a softmax gives: how much a word looks at each word. L and R are the matrices in "
    "Y = L X R. A seed is where random numbers start.",
    "`jattn.attention(query, key, value)` takes queries `[*B, T, N, H]`, keys `[*B, S, K, H]` and "
    "values `[*B, S, K, V]`, and gives `[*B, T, N, V]`. Here `*B` stands for any number of axes, "
    "also for none. If no `scale` is given, scores are multiplied by 1/√H. The letters in shapes "
    "always mean the same:",
)

LETTERS = {
    "B": "sentences",
    "T": "words that look (queries)",
    "S": "words that are looked at (keys)",
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


def prelude(steps: Sequence[Step]) -> Code:
    """Returns the lines that precede all code of the page."""
    return Code("before all steps", "python", f"{imports(steps)}\n\n{BITS}")


def helpers() -> dict[str, str]:
    """Returns the signature and the summary of each of the page's own functions."""
    used = (check, show, same, matches, panels)
    return {_called(helper): _said(helper) for helper in used}


def texts() -> list[str]:
    """Returns a sentence for each document, with the short name that the steps use."""
    return [f"{document}. The steps call it {document.short}." for document in DOCUMENTS]


def _called(helper: Callable[..., Any]) -> str:
    """Returns a function's name and arguments, with defaults."""
    arguments = inspect.signature(helper).parameters.values()
    bare = inspect.Signature([one.replace(annotation=one.empty) for one in arguments])
    return f"{helper.__name__}{bare}"


def _said(helper: Callable[..., Any]) -> str:
    """Returns the first paragraph of a function's docstring."""
    return " ".join(inspect.cleandoc(helper.__doc__ or "").split("\n\n")[0].split())
