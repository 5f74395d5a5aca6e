"""The walkthrough: its steps run and hold what they claim, and its page is whole."""

import ast
import base64
import io
import os
import re
import subprocess
import sys
import textwrap
import tokenize
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import pytest
from matplotlib.figure import Figure

from experiments.walkthrough import introduction, page
from experiments.walkthrough.__main__ import main
from experiments.walkthrough.documents import CODING, DOCUMENTS
from experiments.walkthrough.names import asked, borrowed, given
from experiments.walkthrough.printed import matches
from experiments.walkthrough.running import run
from experiments.walkthrough.step import ClaimFailed, Step, check, show, step
from experiments.walkthrough.steps import STEPS


CHEAP = ("vectors", "simple-self-attention", "interaction", "query-key-value", "causal")


def by_name(name: str) -> Step:
    """A step of the walkthrough."""
    return next(one for one in STEPS if one.name == name)


@step(CODING)
def hostile() -> Figure:
    """Title <b> & "quotes".

    Text with `x < y` and <script>alert(1)</script>.
    """
    # A comment before <i>the first</i> line.
    print("<img src=x onerror=alert(2)>")
    check("a & b < c", True)
    # The picture.
    return Figure()


@step(CODING)
def broken() -> None:
    """A step that does not hold."""
    check("one is two", 1 == 2)  # noqa: PLR0133


class Reader(HTMLParser):
    """The elements of a page, what it would load, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.names: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.names += [value or "" for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_names_titles_and_texts():
    names = [one.name for one in STEPS]
    assert len(set(names)) == len(names)
    for one in STEPS:
        assert re.fullmatch(r"[a-z0-9-]+", one.name)
        assert one.title and one.paragraphs and one.follows, one.name
        assert any("check(" in code.text for code in one.code), one.name
    assert {document for one in STEPS for document in one.follows} == set(DOCUMENTS)


@pytest.mark.parametrize("name", CHEAP)
def test_a_step_runs_and_its_claims_hold(name):
    result = run(by_name(name))
    assert result.output.count("✓") >= 3
    assert result.pictures and all(png.startswith(b"\x89PNG") for png in result.pictures)


def test_a_claim_that_does_not_hold_is_an_error(capsys):
    with pytest.raises(ClaimFailed, match="one is two"):
        run(broken)
    with pytest.raises(ClaimFailed):
        check("all are", [True, False])
    check("all are", [True, True])
    show("x", [[1.0, 2.0]])
    assert capsys.readouterr().out == "✓ all are\nx [1, 2]\n[[1. 2.]]\n"


def test_printed_digits_are_looked_at():
    assert matches([[1.25, 3e-8]], "1.25 3.00e-08")
    assert matches([[1.2549, 3.004e-8]], "1.25 3.00e-08")
    for wrong in ([[1.256, 3e-8]], [[1.25, 3.01e-8]], [[1.25]], [1.25, 3e-8]):
        assert not matches(wrong, "1.25 3.00e-08")


def test_the_page_escapes_and_loads_nothing():
    text = page.written([run(hostile), run(by_name("interaction"))])
    read = Reader(text)
    assert not read.open
    assert not set(read.tags) & {"script", "iframe", "object", "link"}
    for shown in (
        'Title <b> & "quotes"',
        "<script>alert(1)</script>",
        "# A comment before <i>the first</i> line.",
        "<img src=x onerror=alert(2)>",
        "✓ a & b < c",
        'check("a & b < c", True)',
    ):
        assert shown in read.text
    for address in read.addresses:
        assert (
            address.startswith("data:image/png;base64,") or address.removeprefix("#") in read.names
        )
        if address.startswith("data:"):
            assert base64.b64decode(address.split(",")[1], validate=True).startswith(b"\x89PNG")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert re.search(r'content="default-src \'none\'', text)


def test_code_on_the_page_is_the_functions_own():
    step_lines, drawing = hostile.code
    assert step_lines.text.startswith("# A comment before <i>the first</i> line.\nprint(")
    assert drawing.label == "drawing" and drawing.text == "return Figure()\n"
    assert [code.label for code in by_name("causal").code][:2] == ["softmax_of_scores", "filled"]
    for code in (code for one in STEPS for code in one.code):
        if code.language == "python":
            compile(code.text.replace("return ", "_ = "), code.label, "exec")


def test_every_name_in_the_code_comes_from_somewhere():
    lines = introduction.prelude(STEPS).text
    imported = {
        (alias.asname or alias.name.split(".")[0])
        for node in ast.parse(lines).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    used = set()
    for place, one in enumerate(STEPS):
        taken = {name for found in borrowed(STEPS, place).values() for name in found}
        assert asked(one) - taken <= imported, one.name
        used |= asked(one)
    assert imported <= used | {"jax"}
    places = [place for place, one in enumerate(STEPS) if "JOURNEY" in asked(one)]
    (origin,) = (place for place, one in enumerate(STEPS) if "JOURNEY" in given(one))
    assert places and all("JOURNEY" in borrowed(STEPS, place)[origin] for place in places)


def test_the_code_on_the_page_runs_as_it_stands_there(capsys):
    scope: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(introduction.prelude(STEPS).text, scope)
        for one in STEPS:
            own = [code for code in one.code if code.label in ("the step", "drawing")]
            for code in one.code:
                if code.language == "python" and code not in own:
                    exec(code.text, scope)
            if one.name in CHEAP:
                lines = textwrap.indent("".join(code.text for code in own), "    ")
                exec(f"def step():\n{lines}", scope)
                assert scope["step"](), one.name
    assert capsys.readouterr().out.count("✓") >= 3 * len(CHEAP)


def test_comments_stand_above_their_lines():
    for code in (code for one in STEPS for code in one.code if code.language == "python"):
        for token in tokenize.generate_tokens(io.StringIO(code.text).readline):
            if token.type == tokenize.COMMENT:
                assert token.line.strip() == token.string, token.line


def test_the_page_says_what_its_helpers_take():
    helpers = introduction.helpers()
    assert list(helpers) == [
        "check(claim, holds)",
        "show(name, array, digits=4)",
        "same(a, b, tolerance=1e-12)",
        "matches(got, printed)",
        "panels(columns, *, width=7.0, height=3.0)",
    ]
    read = Reader(page.written([run(by_name("vectors")), run(by_name("simple-self-attention"))]))
    for text in (*helpers, *helpers.values(), "jax_enable_x64", *introduction.LETTERS.values()):
        assert text.replace("`", "") in " ".join(read.text.split())
    assert "simple-self-attention" in read.text.split("What comes next")[1]


def test_the_command_runs_one_step(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "interaction"]) == 0
    said = capsys.readouterr().out
    assert "Y = L X R" in said and "✓ R and X R are as printed" in said
    assert [path.name for path in tmp_path.iterdir()] == ["interaction-1.png"]
    assert main(["--list"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        one.name for one in STEPS
    ]


def test_the_command_tells_what_is_wrong(tmp_path, capsys, monkeypatch):
    assert main(["nothing"]) == 2
    assert "no step 'nothing'; there are vectors" in capsys.readouterr().err
    command: Any = __import__("experiments.walkthrough.__main__", fromlist=["STEPS"])
    monkeypatch.setattr(command, "STEPS", (broken,))
    assert main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: broken: this did not hold: one is two\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.minutes
def test_all_steps_and_the_page(tmp_path):
    # As users run it: with their compiler's options and tiles, for some steps measure times.
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-m", "experiments.walkthrough", "--out", str(tmp_path)],
        cwd=Path(__file__).parent.parent,
        env=inherited,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("✓") >= 4 * len(STEPS)
    read = Reader((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert read.names == [one.name for one in STEPS]
    assert read.tags.count("img") >= len(STEPS)
    for one in STEPS:
        assert one.title in read.text
