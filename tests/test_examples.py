"""The examples in docstrings: every public name has one, and they run as users run them."""

import doctest
import inspect
from typing import Any

import jax
import pytest

import jattn
from jattn import cache, compat, generation, masks, nn, parallel, positions, scores, viz


MODULES = (jattn, cache, compat, generation, masks, nn, parallel, positions, scores, viz)
NO_EXAMPLE = {
    "jattn.compat.Ran": "`report` returns it",
    "jattn.generation.Generated": "`generate` returns it",
    "jattn.generation.Hypotheses": "`beam_search` returns it",
    "jattn.generation.LanguageModel": "a protocol, which `jattn.nn.DecoderOnly` follows",
    "jattn.nn.AttentionWeights": "a type of Flax's variables, which users only name",
    "jattn.nn.LayerCache": "`Decoder.start` returns it",
    "jattn.nn.RecurrentState": "`RecurrentDecoder.start` returns it",
    "jattn.parallel.Exchange": "`exchanges` returns it",
}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
VALUES = {f"{x.__name__}.{name}": getattr(x, name) for x in MODULES for name in x.__all__}
NAMES = [name for name, x in VALUES.items() if callable(x)]  # numbers have no docstrings
pytestmark = [pytest.mark.default_tiles, pytest.mark.usefixtures("quick_compilation")]


def run(name: str, text: str, names: dict[str, Any]) -> int:
    """Runs the examples of a docstring, which add to `names`; returns their number."""
    docstring = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    docstring.globs = names
    failures: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    runner.run(docstring, out=failures.append, clear_globs=False)
    assert not failures, "".join(failures)
    return len(docstring.examples)


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    """The names that the package's docstring makes for all examples."""
    names: dict[str, Any] = {}
    with jax.enable_x64(False):
        assert run("jattn", inspect.getdoc(jattn) or "", names)
    return names


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name, setup, unchecked):
    text = inspect.getdoc(VALUES[name]) or ""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        with jax.numpy_rank_promotion("allow"):
            examples = run(name, text, dict(setup))
    assert (examples == 0) == (name in NO_EXAMPLE)
    assert examples <= 3
    assert not examples or "\n\n>>>" in text  # which starts a block of code on the pages


def test_an_example_that_fails_is_noticed():
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        run("sum", ">>> 1 + 1\n3\n", {})
