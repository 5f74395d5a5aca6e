"""The README and the other pages: examples run; commands, tables and links are right."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from jattn import masks, scores
from tests import commands
from tests.commands import ROOT
from tests.test_contract import public_rules


FOLDERS = (".github", "experiments", "jattn", "tests")
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in [*ROOT.glob("*.md"), *(x for name in FOLDERS for x in (ROOT / name).rglob("*.md"))]
}
TEXT = PAGES["README.md"]


class Example(NamedTuple):
    """A fenced block of Python and the line of its first statement."""

    code: str
    line: int


def blocks(text: str) -> list[Example]:
    """All ```python blocks, in order."""
    matches = re.finditer(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [Example(match[1], text[: match.start(1)].count("\n") + 1) for match in matches]


def test_the_readme_is_short_and_its_examples_too():
    assert TEXT.count("\n") <= 110
    assert len(blocks(TEXT)) == TEXT.count("\n```python") >= 4
    for block in blocks(TEXT):
        lines = [line for line in block.code.split("\n") if line.strip()]
        assert 1 <= len(lines) <= 6, f"README.md, line {block.line}"


DRIVER = """
import json, sys
for page, source in json.load(open(sys.argv[1], encoding="utf-8")).items():
    exec(compile(source, page, "exec"), {"__name__": "readme"})
"""


def run(
    pages: dict[str, str], folder: Path, python: str = sys.executable, installed: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs all blocks of pages in order in a new process, with a namespace for each page, with the
    library of this checkout or the one installed there. Errors name the lines of the pages."""
    sources = {}
    for page, text in pages.items():
        lines = [""] * text.count("\n")
        for block in blocks(text):
            body = block.code.split("\n")[:-1]
            lines[block.line - 1 : block.line - 1 + len(body)] = body
        sources[page] = "\n".join(lines)
    file = folder / "sources.json"
    file.write_text(json.dumps(sources), encoding="utf-8")
    environment = commands.clean_environment(
        PYTHONPATH="" if installed else str(ROOT),
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",  # most of the time is compilation
        MPLBACKEND="Agg",
    )
    command = (python, "-W", "error::FutureWarning", "-c", DRIVER, file)
    return commands.run(*command, cwd=folder, env=environment)


TRAINS = "experiments/translation/README.md"


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_examples_run_in_order(trains, tmp_path):
    pages = {page: text for page, text in PAGES.items() if (page == TRAINS) == trains}
    result = run(pages, tmp_path)
    assert result.returncode == 0, result.stderr


def test_examples_that_fail_are_noticed(tmp_path):
    broken = "first\n```python\nx = 1\n```\n```sh\nls\n```\n```python\nassert x == 1\n"
    broken += "assert x == 2\n```\n"
    assert blocks(broken) == [("x = 1\n", 3), ("assert x == 1\nassert x == 2\n", 9)]
    result = run({"README.md": broken}, tmp_path)
    assert result.returncode != 0
    assert 'File "README.md", line 10' in result.stderr


@pytest.mark.slow
def test_pages_of_the_functions_come_without_warnings(tmp_path):
    assert "python\n.github/api.py runs/api" in PAGES[".github/CONTRIBUTING.md"]
    pytest.importorskip("pdoc", reason="pages are made by pdoc: pip install 'jattn[docs]'")
    environment = commands.environment(JAX_PLATFORMS="cpu")
    result = commands.run_python(".github/api.py", tmp_path, cwd=ROOT, env=environment)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")
    pages = {x.stem: x.read_text(encoding="utf-8") for x in tmp_path.rglob("*.html")}
    modules = "cache compat masks nn normalizers parallel positions scores viz".split()
    assert {*pages} == {"index", "jattn", *modules}
    names = {"jattn": ["attention", "statistics"], "nn": ["Encoder.__init__", "Encoder.__call__"]}
    internal = re.compile(r"jaxtyping\.|_jax\.Array|typing\.Any|&lt;(class|function|locals)")
    for page, text in pages.items():
        assert not internal.search(text)
        assert all(f'href="#{name}"' in text for name in names.get(page, ()))
        assert ('<span class="gp">&gt;&gt;&gt; </span>' in text) == (page != "index")


def test_the_two_commands_and_a_picture_are_there():
    text = re.sub(r"\s*\\?\n\s*", " ", TEXT)
    install = "python3 -m venv .venv && .venv/bin/pip install -e"
    assert f'{install} ".[experiments]" && .venv/bin/python -m experiments.translation' in text
    assert f'{install} ".[dev]" && .venv/bin/python -m pytest' in text
    assert re.search(r"!\[[^\]]+\]\([^)]+\.png\)", TEXT)


def test_every_mask_and_score_function_is_in_the_tables():
    lines = PAGES["experiments/benchmark/README.md"].split("\n")
    table = "\n".join(line for line in lines if line.startswith("|"))
    for module in (masks, scores):
        named = {x.__name__ for x in public_rules(module)} - {"And", "Or", "Not", "Then"}
        assert len(named) >= 6
        for name in named:
            assert f"{module.__name__.split('.')[-1]}.{name}(" in table, name


@pytest.mark.parametrize("page", PAGES)
def test_names_in_the_text_exist_and_code_in_tables_is_code(page):
    additions = re.compile(r"^```py\n.*?^```", re.MULTILINE | re.DOTALL)  # by a contributor
    text = additions.sub("", PAGES[page])
    for short, name in re.findall(r"\b(masks|scores)\.([A-Za-z_]+)\b(?!\.py)", text):
        if name != "py":
            assert hasattr({"masks": masks, "scores": scores}[short], name), f"{short}.{name}"
    for row in re.findall(r"^\|.*", text, re.MULTILINE):
        for code in re.findall(r"`([^`]*(?:masks|scores)\.[A-Z][^`]*)`", row):
            ast.parse(code.replace(r"\|", "|"))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target
