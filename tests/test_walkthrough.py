"""The walkthrough: its steps run and hold what they claim, and its page is whole."""

import base64
import dataclasses
import functools
import html
import io
import re
import tokenize
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.walkthrough import introduction, page
from experiments.walkthrough.__main__ import main
from experiments.walkthrough.alignments import alignments
from experiments.walkthrough.diagrams import one_row
from experiments.walkthrough.documents import CODING, DOCUMENTS
from experiments.walkthrough.formulas import Formula
from experiments.walkthrough.names import borrowed, defined_names, preparation, undefined_names
from experiments.walkthrough.printed import matches
from experiments.walkthrough.running import Result, run
from experiments.walkthrough.similarity import INPUTS, JOURNEY
from experiments.walkthrough.step import ClaimFailed, Step, check, draw, show, step
from experiments.walkthrough.steps import STEPS
from tests.commands import environment, run_python


CHEAP = ("vectors", "simple-self-attention", "interaction", "query-key-value", "causal")
WITH_DIAGRAMS = ("recurrence", "query-key-value", "heads", "transformer")

BY_NAME = {candidate.name: candidate for candidate in STEPS}


@functools.cache
def page_without_runs() -> str:
    """The page of all steps, as if each had printed one claim and drawn nothing."""
    return page.written([Result(candidate, "✓ a claim\n", (), (), 0.0) for candidate in STEPS])


@step(CODING, misprints=("A misprint: a < b.",))
def hostile() -> None:
    """Title <b> & "quotes".

    Text with `x < y` and <script>alert(1)</script>.

        a < b "& <i>text</i>"
    """
    # A comment before <i>the first</i> line.
    print("<img src=x onerror=alert(2)>")
    check("a & b < c", True)
    # The picture.
    draw(Figure())


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
    names = [*BY_NAME]
    assert len(names) == len(STEPS)
    for candidate in STEPS:
        assert re.fullmatch(r"[a-z0-9-]+", candidate.name)
        assert candidate.title and candidate.paragraphs and candidate.follows, candidate.name
        code = (*candidate.helpers, candidate.lines, candidate.drawing)
        assert any("check(" in part.text for part in code), candidate.name
        assert any(isinstance(block, Formula) for block in candidate.paragraphs), candidate.name
    assert {document for candidate in STEPS for document in candidate.follows} == set(DOCUMENTS)
    # The documents begin with recurrent networks, and go from them to attention.
    assert names.index("recurrence") < names.index("simple-self-attention")
    assert {name for name in names if BY_NAME[name].diagram} == set(WITH_DIAGRAMS)


@pytest.mark.parametrize(
    ("line", "mathml"),
    [
        ("a_ij", "<msub><mi>a</mi><mrow><mrow><mi>i</mi><mi>j</mi></mrow></mrow></msub>"),
        ("Kᵀ", "<msup><mi>K</mi><mrow><mi>T</mi></mrow></msup>"),
        ("(a + b) / √c", "<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow>"
         "<mrow><msqrt><mi>c</mi></msqrt></mrow></mfrac>"),
        ("2i/D", "<mrow><mn>2</mn><mi>i</mi><mo>/</mo><mi>D</mi></mrow>"),
        ("Σ_k^N", "<munderover><mo>∑</mo><mrow><mi>k</mi></mrow>"
         "<mrow><mi>N</mi></mrow></munderover>"),
        ('x "if" 1 < 2', '<mi>x</mi><mspace width="0.2em"></mspace><mtext>if</mtext>'
         '<mspace width="0.2em"></mspace><mn>1</mn><mo>&lt;</mo><mn>2</mn>'),
        ("softmax(s)_i", "<mrow><mi>softmax</mi><msub><mrow><mo>(</mo><mi>s</mi><mo>)</mo></mrow>"
         "<mrow><mi>i</mi></mrow></msub></mrow>"),
    ],
)  # fmt: skip
def test_a_formula_is_typeset(line, mathml):
    assert Formula((line,)).mathml() == f'<math display="block">{mathml}</math>'


def test_all_formulas_are_well_formed():
    blocks = [block for candidate in STEPS for block in candidate.paragraphs]
    for formula in (block for block in blocks if isinstance(block, Formula)):
        for element in formula.mathml().split("\n"):
            assert ElementTree.fromstring(element).tag == "math"
    for line in ("(a", "a)", "f(x]"):
        with pytest.raises(ValueError, match=r"unexpected|not closed"):
            Formula((line,)).mathml()


def test_diagrams_are_svg_made_by_the_code():
    diagram = one_row(JOURNEY, INPUTS, 1)
    image = ElementTree.fromstring(diagram.svg)
    texts = ["".join(text.itertext()) for text in image.iter("{http://www.w3.org/2000/svg}text")]
    shares = [text for text in texts if text.startswith("0.")]
    # “Coding” prints these weights of “journey”, to four digits.
    assert shares == "0.14 0.24 0.23 0.12 0.11 0.16".split()
    for name in WITH_DIAGRAMS:
        diagram = BY_NAME[name].diagram
        assert diagram and diagram.caption
        image = ElementTree.fromstring(diagram.svg)
        assert image.get("aria-label") and len(list(image)) > 10


@functools.cache
def result_of(name: str) -> Result:
    return run(BY_NAME[name])


@pytest.mark.parametrize("name", CHEAP)
def test_a_step_runs_and_its_claims_hold(name):
    result = result_of(name)
    assert result.output.count("✓") >= 3
    assert result.pictures and all(png.startswith(b"\x89PNG") for png in result.pictures)
    assert all(" by " in x for x in result.descriptions), "panels and axes, for who cannot see them"


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
    text = page.written([run(hostile), result_of("query-key-value")])
    read = Reader(text)
    assert not read.open and not set(read.tags) & {"script", "iframe", "object", "link"}
    for shown in (
        'Title <b> & "quotes"',
        "<script>alert(1)</script>",
        "# A comment before <i>the first</i> line.",
        "<img src=x onerror=alert(2)>",
        "✓ a & b < c",
        'check("a & b < c", True)',
        "A misprint: a < b.",
        "& <i>text</i>",
    ):
        assert shown in read.text
    for address in read.addresses:
        if address.startswith("data:image/png;base64,"):
            assert base64.b64decode(address.split(",")[1], validate=True).startswith(b"\x89PNG")
        else:
            assert address.removeprefix("#") in read.names
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "prefers-color-scheme: dark" in style and "content=\"default-src 'none'" in text


def test_code_on_the_page_is_the_functions_own_and_imports_what_earlier_steps_define():
    assert hostile.lines.text.startswith("# A comment before <i>the first</i> line.\nprint(")
    assert hostile.drawing.text == "draw(Figure())\n"
    assert [code.label for code in BY_NAME["causal"].helpers][:2] == ["softmax_of_scores", "filled"]
    places = [place for place, x in enumerate(STEPS) if "JOURNEY" in undefined_names(x)]
    (origin,) = (place for place, x in enumerate(STEPS) if "JOURNEY" in defined_names(x))
    assert places
    for place in places:
        assert "JOURNEY" in borrowed(STEPS, place)[origin]
        line = "from experiments.walkthrough.similarity import"
        assert re.search(f"{line} .*JOURNEY", preparation(STEPS[place]).text)


def pasted(text: str, name: str) -> str:
    """The Python code of a step in the order of the page."""
    (section,) = re.findall(f'<section id="{name}">(.*?)</section>', text, re.DOTALL)
    blocks = re.findall(r'<code class="language-python">(.*?)</code></pre>', section, re.DOTALL)
    return "\n".join(html.unescape(re.sub(r"<[^>]*>", "", block)) for block in blocks)


def as_pasted(candidate: Step) -> Step:
    """The step, with the code that the page shows in place of its function."""
    code = compile(pasted(page_without_runs(), candidate.name), candidate.name, "exec")
    body = functools.wraps(candidate.body)(lambda: exec(code, {"__name__": "pasted"}))
    return dataclasses.replace(candidate, body=body)


@pytest.mark.usefixtures("standard_promotion")
def test_the_code_of_a_step_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    as_pasted(BY_NAME["query-key-value"]).body()
    assert capsys.readouterr().out.count("✓") >= 3
    assert (tmp_path / "picture-1.png").read_bytes().startswith(b"\x89PNG")


def test_what_precedes_each_step_can_be_pasted_and_comments_stand_above_their_lines():
    """Also of steps that take long to run: imports, helpers, and lines without `return`."""
    text = page_without_runs()
    for candidate in STEPS:
        scope: dict[str, Any] = {"__name__": "pasted"}
        exec(preparation(candidate).text, scope)
        compile(pasted(text, candidate.name), candidate.name, "exec")
        assert undefined_names(candidate) <= set(scope), candidate.name
        code = io.StringIO(preparation(candidate).text + candidate.lines.text)
        for token in tokenize.generate_tokens(code.readline):
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
        "draw(*figures)",
    ]
    read = Reader(page_without_runs())
    for text in (*helpers, *helpers.values(), "jax_enable_x64", *introduction.LETTERS.values()):
        assert text.replace("`", "") in " ".join(read.text.split())
    assert "simple-self-attention" in read.text.split("What comes next")[1]


def test_the_page_of_all_steps():
    text = page_without_runs()
    assert text.index("<h1>") < text.index("<svg") < text.index("<nav") < text.index("<section")
    # Letters are lowered and raised in text but not in code.
    assert "learned matrix W<sub>O</sub>." in text
    assert "e<sup>−∞</sup> is 0" in text and "10000<sup>−2i/D</sup>" in text
    assert "<code>W_k x ↦ q</code>" in text
    # Imports, helpers and misprints are folded.
    whole = Reader(text).text
    unfolded = Reader(re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)).text
    for hidden in ("import jax", "def softmax", "Misprint", "Error in", "Errors in", "pip install"):
        assert hidden in whole and hidden not in unfolded
    assert "weights = softmax(scores)" in unfolded


def test_alignments_have_a_panel_for_each_map():
    maps = {name: np.eye(7) for name in ("RNNsearch", "Transformer", "decoder times encoder")}
    figure = alignments(maps, list("abcdefg"), list("hijklmn"))
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == list(maps)


@pytest.mark.parametrize(
    ("width", "height", "dark"),
    [(390, 844, True), (1280, 800, True), (1920, 1080, False)],
)
def test_the_first_screen(window, tmp_path, width, height, dark):
    path = tmp_path / "index.html"
    path.write_text(page_without_runs(), encoding="utf-8")
    window.show(width, height, dark=dark, phone=width < 500)
    window.open(path, ready="true")

    def top(selector: str) -> float:
        return window.get(selector, "getBoundingClientRect().top")

    assert top("header svg") < height / 2 and top("nav") < height * 0.7
    # MathML is drawn as such: a numerator is above its denominator.
    numerator, denominator = (f"#simple-self-attention mfrac > :nth-child({n})" for n in (1, 2))
    assert top(numerator) < top(denominator)
    window.assert_fits_and_loads_only(path)


def test_the_command_runs_one_step(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "query-key-value"]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"query-key-value-1.png", "query-key-value-diagram.svg"}
    image = (tmp_path / "query-key-value-diagram.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(image).tag.endswith("svg")
    assert capsys.readouterr().out.count("✓") >= 3
    assert main(["--list"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [*BY_NAME]


@pytest.mark.parametrize(("columns", "widest"), [(40, 40), (300, 100)])
def test_text_wraps_at_the_width_of_the_terminal(tmp_path, capsys, monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["--out", str(tmp_path), "interaction"]) == 0
    text, rest = capsys.readouterr().out.split("\nX [4, 5]\n")
    assert "    Y = L X R\n" in text and "Understanding the attention" in text
    assert widest - 12 < max(map(len, text.splitlines())) <= widest
    assert "✓ R and X R are as printed" in rest
    assert [path.name for path in tmp_path.iterdir()] == ["interaction-1.png"]


def test_the_command_tells_what_is_wrong(tmp_path, capsys, monkeypatch):
    assert main(["nothing"]) == 2
    assert "no step 'nothing'; there are vectors" in capsys.readouterr().err
    command: Any = __import__("experiments.walkthrough.__main__", fromlist=["STEPS"])
    monkeypatch.setattr(command, "STEPS", (broken,))
    assert main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: broken: this did not hold: one is two\n"
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file")]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.endswith("/file could not be written: File exists\n")


COMMAND = """
import sys
from experiments.walkthrough import __main__ as command
from tests.test_walkthrough import as_pasted
command.STEPS = tuple(map(as_pasted, command.STEPS))
sys.exit(command.main(["--out", sys.argv[1]]))
"""


@pytest.mark.exhaustive
@pytest.mark.minutes
def test_all_steps_as_pasted_and_the_page(tmp_path):
    """The command runs with users' compiler options and tiles, because some steps measure times."""
    inherited = {name: value for name, value in environment().items() if name != "XLA_FLAGS"}
    result = run_python("-c", COMMAND, tmp_path, env=inherited)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("✓") >= 4 * len(STEPS)
    read = Reader((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert read.names == [*BY_NAME]
    assert read.tags.count("img") >= len(STEPS)
    assert "“sought” has its greatest weight at" in read.text
    for candidate in STEPS:
        assert candidate.title in read.text
