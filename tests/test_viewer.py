"""The viewer's page, driven in a headless browser."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jattn import masks, viz
from tests.browser import Browser


L, N, T, S = 2, 3, 5, 7
LEAST = 0.1  # the least weight that has a line, as a page opens

HOSTILE = ['</script><img src=x onerror="window.hacked=1">', "<!--<script>"]
HOSTILE += ["\"'`&amp;&lt;${window.hacked=1}", "a\u2028b\u2029c"]
HOSTILE += ["\u202eright-to-left \u05d0\u05d1", "👩‍🔬", "%SCRIPT%"]
SHOWN = [*HOSTILE[:3], r"a\u2028b\u2029c", r"\u202eright-to-left אב", "👩‍🔬", "%SCRIPT%"]


def weights(seed: int, *shape: int, causal: bool = False) -> np.ndarray:
    allowed = np.tri(*shape[-2:], dtype=bool) | (not causal)
    values = np.where(allowed, np.exp(3 * np.random.default_rng(seed).normal(size=shape)), 0)
    return values / values.sum(axis=-1, keepdims=True)


# Of these no weight is as near to a least one as rounding might bring it.
ENCODER = weights(43, L, N, S, S)
DECODER = weights(29, L, N, T, T, causal=True)
CROSS = weights(0, L, N, T, S)
CLEAREST = np.unravel_index(CROSS.max(axis=2).mean(axis=-1).argmax(), (L, N))
OTHER = {
    "encoder": weights(4, L, N, S, S),
    "decoder": weights(5, L, N, T, T, causal=True),
    "cross": weights(6, L, N, T, S),
}
QUERIES = np.random.default_rng(8).normal(size=(L, T, N, 6))
KEYS = np.random.default_rng(9).normal(size=(L, S, 1, 6))
SOURCE = ["der", "hund", "schläft", "weil", "er", "müde", "ist"]
TARGET = ["the", "dog", "sleeps", "as", "tired"]


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    first = viz.Sentence(
        {"encoder": ENCODER, "decoder": DECODER, "cross": CROSS},
        {"encoder": SOURCE, "decoder": TARGET, "cross": TARGET},
        {"cross": SOURCE},
        mask={"decoder": masks.Causal()},
        other=OTHER,
        query={"cross": QUERIES},
        key={"cross": KEYS},
    )
    second = viz.Sentence(weights(7, 2, S, S), HOSTILE, name=HOSTILE[0])
    page = viz.viewer([first, second], title=HOSTILE[0], models=("<b>old", "new"), block=2)
    return page.save(tmp_path_factory.mktemp("viewer") / "page.html")


@pytest.fixture
def opened(window: Browser, page_path: Any) -> Iterator[Browser]:
    """The page as it opens. Whatever is done, it asks for nothing, and nothing complains."""
    window.show(1366, 768)
    window.open(page_path)
    window.settle()
    yield window
    assert window.complaints == []
    assert window.requests == [page_path.as_uri()]
    assert window.evaluate("window.hacked") is None


@pytest.fixture
def page(opened: Browser) -> Browser:
    """The page with all heads of the encoder's first layer."""
    choose(opened, "attention", "encoder")
    opened.evaluate("document.activeElement.blur()")
    opened.press("0", "Digit0")
    opened.press("ArrowUp")
    return opened


def lines(page: Browser) -> int:
    return int(page.get("#lines", "ariaLabel").split()[0])


def picture(page: Browser, canvas: str = "#lines") -> str:
    return page.get(canvas, "toDataURL()")


def choose(page: Browser, group: str, name: str) -> None:
    buttons = f"[...document.querySelectorAll('#{group} button')]"
    place = page.evaluate(f"{buttons}.findIndex((x) => x.textContent === '{name}')")
    page.click(f"#{group} button:nth-child({place + 1})")


def tokens(page: Browser, side: str) -> list[str]:
    return page.evaluate(
        f"[...document.querySelectorAll('#{side} .token')]"
        ".sort((a, b) => a.dataset.place - b.dataset.place)"
        ".map((x) => x.querySelector('bdi').textContent)"
    )


def cells_of(page: Browser) -> list[float]:
    """The corner of the matrix's cells in its canvas, and the size of a cell."""
    return [float(x) for x in page.get("#matrix", "dataset.cells").split()]


def hover_cell(page: Browser, row: int, column: int) -> str:
    """The status while the mouse points at a cell of the matrix."""
    x, y, size = cells_of(page)
    box = page.get("#matrix", "getBoundingClientRect().toJSON()")
    page.mouse("Moved", box["x"] + x + (column + 0.5) * size, box["y"] + y + (row + 0.5) * size)
    page.settle()
    return page.text("#status")


def values_in(status: str) -> list[tuple[int, float, float]]:
    """Head, value and half a step of each value in the status."""
    triples = re.findall(r"head (\d+) ([+−]?[\d.]+) ± ([\d.]+)", status)
    return [(int(h), float(v.replace("−", "-")), float(half)) for h, v, half in triples]


def test_a_page_opens_with_the_clearest_head_of_the_cross_attention(opened):
    layer, head = CLEAREST
    assert opened.text("#attention [aria-pressed=true]") == "cross"
    assert opened.get("#layer", "selectedIndex") == layer
    pressed = "[...document.querySelectorAll('.head')].map((x) => x.ariaPressed === 'true')"
    assert opened.evaluate(pressed) == [number == head for number in range(N)]
    assert lines(opened) == (CROSS[layer, head] >= LEAST).sum()


def test_a_strip_of_colours_shows_each_head_at_a_token(page):
    def strip(side: str, number: int) -> tuple[list[str], list[float]]:
        style = page.get(f"#{side} .token:nth-child({number}) .strip", "style.background")
        cells = re.findall(r"rgba?\((\d+, \d+, \d+)(?:, ([\d.]+))?\)", style)[::2]  # of two ends
        return [colour for colour, _ in cells], [float(alpha or 1) for _, alpha in cells]

    assert strip("keys", 3) == ([], [])
    page.hover("#queries .token:nth-child(2)")
    colours, _ = strip("queries", 2)
    assert len(set(colours)) == N
    assert strip("queries", 3) == ([], [])
    for key in range(S):
        of_key, alphas = strip("keys", key + 1)
        assert of_key == colours
        np.testing.assert_allclose(alphas, ENCODER[0, :, 1, key], atol=0.005)
    page.hover("#keys .token:nth-child(4)")
    np.testing.assert_allclose(strip("queries", 1)[1], ENCODER[0, :, 0, 3], atol=0.005)
    page.click(".head:nth-child(2)")
    page.hover("#queries .token:nth-child(2)")
    assert strip("keys", 1)[0] == colours[::2]


def test_neurons_show_the_products_of_a_query_and_a_key(opened):
    choose(opened, "view", "Neurons")
    layer, head = CLEAREST
    opened.press("ArrowRight")
    opened.press("ArrowRight")
    row = 1
    for column in range(4):
        opened.press("ArrowDown")
        products = QUERIES[layer, row, head] * KEYS[layer, column, 0]
        order = np.argsort(-abs(products))[:3]
        greatest = ", ".join(f"{products[i]:.2f} (element {i + 1})" for i in order)
        weight = CROSS[layer, head, row, column]
        status = opened.text("#status").replace("−", "-")
        text = f"{TARGET[row]} and {SOURCE[column]}, head {head + 1}: "
        pattern = text + r"q·k (\S+), weight (\S+); greatest products "
        ((product, shown_weight),) = re.findall(pattern + re.escape(greatest), status)
        assert float(product) == pytest.approx(products.sum(), abs=0.006)
        assert float(shown_weight) == pytest.approx(weight, abs=CROSS.max() / 510 + 0.0006)
    plain = picture(opened, "#neurons")
    opened.press("ArrowRight")
    assert picture(opened, "#neurons") != plain
    choose(opened, "attention", "encoder")
    assert opened.text("#view [aria-pressed=true]") == "Heads"
    assert "Neurons" not in opened.text("#view")


def test_heads_are_toggled_by_a_click_and_isolated_by_two(page):
    by_head = (ENCODER[0] >= LEAST).sum(axis=(1, 2))
    assert lines(page) == by_head.sum()
    all_lines = picture(page)
    page.click(".head:nth-child(2)")
    assert lines(page) == by_head[0] + by_head[2]
    assert picture(page) != all_lines
    page.click(".head:nth-child(2)")
    assert picture(page) == all_lines
    for back in ("#all-heads", ".head:nth-child(3)"):
        page.click(".head:nth-child(3)", times=2)
        assert lines(page) == by_head[2]
        page.click(back, times=1 if back == "#all-heads" else 2)
        assert picture(page) == all_lines


def test_a_token_shows_its_own_weights(page):
    page.hover("#queries .token:nth-child(2)")
    assert lines(page) == (ENCODER[0, :, 1] >= LEAST).sum()
    mean = ENCODER[0, :, 1].mean(axis=0)
    best = mean.argmax()
    assert page.text("#status").startswith(f"hund reads {SOURCE[best]} {mean[best]:.3f}"[:-1])
    page.hover("#keys .token:nth-child(4)")
    assert lines(page) == (ENCODER[0, :, :, 3] >= LEAST).sum()
    page.click("#keys .token:nth-child(4)")
    page.hover("header")
    assert lines(page) == (ENCODER[0, :, :, 3] >= LEAST).sum()  # held
    page.press("Escape")
    assert lines(page) == (ENCODER[0] >= LEAST).sum()


def test_the_layer_the_least_weight_and_the_attention_can_be_changed(page):
    page.press("ArrowDown")
    assert lines(page) == (ENCODER[1] >= LEAST).sum()
    page.change("#least", 3)
    assert page.text("#least-name") == page.get("#least", "ariaValueText") == "0.50"
    assert page.text("#least-control").split("\n")[0] == "hide below"
    assert lines(page) == (ENCODER[1] >= 10**-0.3).sum()
    assert tokens(page, "queries") == tokens(page, "keys") == SOURCE
    choose(page, "attention", "cross")
    assert (tokens(page, "queries"), tokens(page, "keys")) == (TARGET, SOURCE)
    assert lines(page) == (CROSS[1] >= 10**-0.3).sum()
    choose(page, "attention", "decoder")
    assert tokens(page, "keys") == TARGET


def test_the_slider_goes_through_the_steps_of_decoding(page):
    choose(page, "attention", "decoder")
    page.click("#step")  # its middle
    number = int(page.get("#step", "value"))
    assert 0 < number < T
    assert page.text("#step-name") == f"{number}: {TARGET[number - 1]}"
    page.hover("header")
    assert lines(page) == (DECODER[0, :, number - 1] >= LEAST).sum()
    later = page.evaluate("document.querySelectorAll('.token.later').length")
    assert later == 2 * (T - number)  # neither queries nor keys
    page.evaluate("document.activeElement.blur()")
    page.press("ArrowRight")
    assert page.text("#step-name") == f"{number + 1}: {TARGET[number]}"
    page.press("Escape")
    assert page.text("#step-name") == "all"


def test_the_matrix_tells_values_to_the_step_of_quantisation_and_is_zoomed(page):
    choose(page, "attention", "cross")
    choose(page, "view", "Matrix")
    for row, column in ((0, 0), (2, 6), (4, 3)):
        status = hover_cell(page, row, column)
        assert status.startswith(f"{TARGET[row]} reads {SOURCE[column]}: ")
        heads, numbers, half_steps = zip(*values_in(status), strict=True)
        assert sorted(heads) == [1, 2, 3] and [*numbers] == sorted(numbers, reverse=True)
        arrays = CROSS[0, np.array(heads) - 1, row]
        steps = arrays.max(axis=-1) / 510
        np.testing.assert_allclose(half_steps, steps, rtol=0.2)
        assert (abs(numbers - arrays[:, column]) <= steps + 5e-5).all()
    size = cells_of(page)[2]
    page.mouse("Wheel", *page.middle_of("#matrix"), deltaX=0, deltaY=-400)
    page.settle()
    assert cells_of(page)[2] > 1.2 * size or size >= 59
    assert values_in(hover_cell(page, 3, 3))
    page.press("f")
    assert cells_of(page)[2] == pytest.approx(size)


def test_the_matrix_has_whole_names_and_colours_to_the_greatest_mean_of_a_row(page):
    choose(page, "view", "Matrix")
    page.evaluate(
        "(() => { const p = CanvasRenderingContext2D.prototype, fill = p.fillText;"
        " window.bold = []; p.fillText = function (text, x, y) {"
        " if (this.font.startsWith('bold')) window.bold.push("
        "[text, this.measureText(text).width <= this.getTransform().f]);"  # f: from the top
        " fill.call(this, text, x, y); }; })()"
    )
    hover_cell(page, 3, 2)
    assert page.evaluate("window.bold").pop() == [max(SOURCE, key=len), True]
    page.change("#contrast", "row")
    x, y, size = cells_of(page)
    columns = ENCODER[0].mean(axis=0).argmax(axis=1).tolist()
    places = [[x + (s + 0.5) * size, y + (t + 0.5) * size] for t, s in enumerate(columns)]
    page.hover("header")
    colours = page.evaluate(
        "(() => { const c = document.querySelector('#matrix'), w = c.width;"
        " const all = c.getContext('2d').getImageData(0, 0, w, c.height).data;"
        f" return {places}.map(([x, y]) => 4 * (Math.floor(y) * w + Math.floor(x)))"
        ".map((at) => [...all.slice(at, at + 3)]); })()"
    )
    assert colours == S * [[0x08, 0x30, 0x6B]]  # of the greatest weight


def test_the_difference_of_two_models_is_signed(page):
    assert page.text("#model button:first-child") == "<b>old"
    assert page.get("#scale", "hidden")
    choose(page, "model", "difference")
    assert not page.get("#scale", "hidden")
    size = abs(ENCODER[0] - OTHER["encoder"][0])
    assert (size >= LEAST + 0.005).sum() <= lines(page) <= (size >= LEAST - 0.005).sum()
    names = "Values: <b>old less new. Blue: more in <b>old; orange: more in new."
    assert page.text("#status").endswith(names)
    choose(page, "view", "Matrix")
    for row, column in ((1, 2), (5, 0)):
        status = hover_cell(page, row, column)
        assert f"{SOURCE[column]}, <b>old less new: " in status
        for head, value, _ in values_in(status):
            first, second = ENCODER[0, head - 1, row], OTHER["encoder"][0, head - 1, row]
            tolerance = (first.max() + second.max()) / 510 + 5e-5
            assert abs(value - (first - second)[column]) <= tolerance
    choose(page, "model", "new")
    assert not page.get("#scale", "hidden")
    choose(page, "view", "Heads")
    assert page.get("#scale", "hidden")


def test_the_mask_and_its_tiles_are_laid_over(page):
    choose(page, "view", "Matrix")
    assert page.get("#mask-control", "hidden")
    choose(page, "attention", "decoder")
    plain = picture(page, "#matrix")
    page.press("m")
    assert picture(page, "#matrix") != plain
    assert hover_cell(page, 1, 3).endswith("; masked")
    assert "masked" not in hover_cell(page, 3, 1)
    key = "Tiles of 2 × 2: 3 empty (crossed out), 2 mixed (dashed), 4 full"
    assert page.text("#mask-key").startswith(key)
    assert page.get("#mask-key", "clientHeight") > 0
    page.press("m")
    assert page.get("#mask-key", "hidden")


def test_the_model_view_enlarges_a_head(page):
    choose(page, "view", "Model")
    panels = "[...document.querySelectorAll('.panel canvas')].map((x) => x.toDataURL())"
    shown = page.evaluate(panels)
    assert len(shown) == len(set(shown)) == L * N
    page.click("[aria-label='layer 2, head 3']")
    ((head, number, _),) = values_in(hover_cell(page, 1, 2))
    assert (head, number) == (3, pytest.approx(ENCODER[1, 2, 1, 2], abs=0.003))


def test_numbers_of_each_head_are_told_and_sorted(page):
    choose(page, "view", "Numbers")
    numbers = viz.head_numbers(ENCODER)
    cells = "[...document.querySelectorAll('tbody tr')].map((x) => [...x.children].map("
    rows = page.evaluate(cells + "(y) => y.textContent))")
    assert rows[4] == ["2.2", *(f"{numbers[name][1, 1]:.3f}" for name in numbers)]
    assert page.text("#status").startswith("head: layer.head, so 2.4 is head 4 of layer 2.")
    page.click("th:nth-child(2) button")
    assert page.text("#status") == f"entropy: {page.get('th:nth-child(2) button', 'title')}."
    sorted_ = page.evaluate(cells + "(y) => y.textContent)[1])")
    assert sorted_ == [f"{x:.3f}" for x in sorted(numbers["entropy"].flat)]
    page.click("tbody tr:nth-child(1) button")
    layer, head = np.unravel_index(numbers["entropy"].argmin(), (L, N))
    assert page.get("#layer", "selectedIndex") == layer
    assert values_in(hover_cell(page, 0, 0))[0][0] == head + 1


def test_hostile_tokens_are_text(page):
    assert page.text("h1") == page.evaluate("document.title") == HOSTILE[0]
    page.press("s")
    assert tokens(page, "queries") == tokens(page, "keys") == SHOWN
    assert page.get("#sentence", "selectedOptions[0].text") == SHOWN[0]
    for number, token in enumerate(SHOWN, start=1):
        page.hover(f"#queries .token:nth-child({number})")
        assert page.text("#status").startswith(f"{token} reads ")
        assert page.get(f"#queries .token:nth-child({number})", "title") == token
    choose(page, "view", "Matrix")
    assert hover_cell(page, 0, 1).startswith(f"{SHOWN[0]} reads {SHOWN[1]}: ")
    assert page.evaluate("document.images.length") == 0
    assert page.evaluate("document.querySelectorAll('main script, nav script').length") == 0


def test_keys_do_what_the_help_says(page):
    page.press("2", "Digit2")
    assert lines(page) == (ENCODER[0, [0, 2]] >= LEAST).sum()
    page.press("!", "Digit1", shift=True)
    assert lines(page) == (ENCODER[0, 0] >= LEAST).sum()
    page.press("0", "Digit0")
    assert lines(page) == (ENCODER[0] >= LEAST).sum()
    page.press("a")
    assert tokens(page, "queries") == TARGET
    page.press("v")
    page.press("v")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        page.press(key)
    assert page.text("#status").startswith("dog reads dog: ")
    assert page.text("#step-name") == "all"
    assert page.get("#layer", "selectedIndex") == 0
    page.press("ArrowDown", shift=True)
    assert page.get("#layer", "selectedIndex") == 1
    page.press("?", "Slash")
    assert page.get("#help", "open")


def test_dark_and_light_follow_the_system_and_the_switch(page, page_path):
    colours = ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]
    for dark in (False, True):
        page.show(1366, 768, dark=dark)
        page.open(page_path)
        for colour in (colours[dark], colours[not dark]):
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == colour
            page.click("#theme")


def boxes(page: Browser, selector: str) -> np.ndarray:
    """Left, top, right and bottom of the elements of a CSS selector that are shown."""
    shown = f"[...document.querySelectorAll('{selector}')].filter((x) => x.getClientRects().length)"
    sides = ".map((x) => x.getBoundingClientRect()).map((x) => [x.left, x.top, x.right, x.bottom])"
    return np.array(page.evaluate(shown + sides))


SEPARATE = "h1, header button, nav > *, #controls > *, #status, main"


@pytest.mark.parametrize("dark", [False, True])
def test_letters_on_the_buttons_of_heads_have_contrast(window, tmp_path, dark):
    window.show(1366, 768, dark=dark)
    window.open(viz.viewer(weights(9, 8, T, T)).save(tmp_path / "heads.html"))
    window.press("0", "Digit0")
    style = "[...document.querySelectorAll('.head')].map((x) => getComputedStyle(x))"
    pairs = window.evaluate(f"{style}.map((x) => [x.color, x.backgroundColor])")
    assert len({background for _, background in pairs}) == 8
    for pair in pairs:
        channels = np.array([re.findall(r"\d+", colour) for colour in pair], float) / 255
        is_dark, bright = channels <= 0.04045, ((channels + 0.055) / 1.055) ** 2.4
        linear = np.where(is_dark, channels / 12.92, bright)
        low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])  # WCAG 2.2's relative luminance
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair


def test_a_button_that_is_pressed_keeps_the_focus(opened):
    """After a head is enlarged, the matrix has the focus."""
    for view, button in (
        ("Heads", "#attention button:nth-child(1)"),
        ("Heads", "#view button:nth-child(3)"),
        ("Heads", "#model button:nth-child(3)"),
        ("Heads", ".head:nth-child(2)"),
        ("Heads", "#theme"),
        ("Matrix", "#zoom-in"),
        ("Numbers", "th:nth-child(3) button"),
    ):
        choose(opened, "view", view)
        opened.get(button, "focus()")
        for _ in range(2):
            opened.press("Enter")
            assert opened.get(button, "matches(':focus')"), button
    for view, button in (("Model", ".panel"), ("Numbers", "td button")):
        choose(opened, "view", view)
        opened.get(button, "focus()")
        opened.press("Enter")
        assert opened.get("#matrix", "matches(':focus')"), button


def test_escape_stops_the_playing(page):
    page.click("#play")
    assert page.text("#step-name") == f"1: {SOURCE[0]}"
    page.press("Escape")
    assert (page.text("#play"), page.text("#step-name")) == ("▶", "all")
    page.evaluate("new Promise((then) => setTimeout(then, 900))")  # longer than a step is shown
    assert page.text("#step-name") == "all"


@pytest.fixture(scope="module")
def ten_words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    words = "on sunday the young neighbor opened the heavy suitcase .".split()
    page = viz.viewer(weights(9, 6, 8, 10, 10), words, mask=masks.Causal())
    return page.save(tmp_path_factory.mktemp("viewer") / "words.html")


def test_controls_take_one_row_at_1280_pixels(window, ten_words):
    window.show(1280, 720)
    window.open(ten_words)
    window.press("ArrowRight")
    for view in ("Heads", "Matrix"):
        choose(window, "view", view)
        for _ in range(10):
            window.press("ArrowRight", shift=True)
            middles = boxes(window, "#controls > *")[:, 1::2].mean(axis=1)
            assert len(middles) >= 6 and np.ptp(middles) < 2
            assert window.get("#heads", "scrollWidth") <= window.get("#heads", "clientWidth")
            assert window.get("#controls", "scrollWidth") <= 1280


@pytest.mark.slow
def test_keys_of_neurons_are_reached_by_arrows_and_scrolled_to(window, tmp_path):
    query, key = np.random.default_rng(10).normal(size=(2, 20, 4))
    page = viz.viewer(weights(11, 20, 20), query=query, key=key)
    window.show(1280, 320)
    window.open(page.save(tmp_path / "neurons.html"))
    choose(window, "view", "Neurons")
    for _ in range(15):
        window.press("ArrowDown")
    assert window.text("#status").startswith("1 and 15, head 1: ")
    assert window.get("#neurons-view", "scrollTop") > 100
    box = window.get("#neurons", "getBoundingClientRect().toJSON()")
    window.mouse("Moved", box["right"] - 60, box["bottom"] - 40)
    window.settle()
    assert "and 15," in window.text("#status") or "and 14," in window.text("#status")
    for _ in range(16):
        window.press("ArrowUp")
    assert window.text("#status").startswith("1 and 1, ")
    assert window.get("#neurons-view", "scrollTop") == 0
    assert window.complaints == []


def test_eight_tokens_are_seen_at_twice_the_size(window, ten_words):
    """A window of 1280 × 720 pixels, enlarged to 200 %."""
    window.show(640, 360)
    window.open(ten_words)
    window.settle()
    ((_, top, _, bottom),) = boxes(window, "main")
    for side in ("queries", "keys"):
        _, tops, _, bottoms = boxes(window, f"#{side} .token").T
        assert sum((tops >= top) & (bottoms <= bottom)) >= 8
    assert window.evaluate("document.documentElement.scrollWidth") <= 640


@pytest.mark.parametrize("size", [(390, 844), (1366, 768), (1920, 1080)])
def test_nothing_overlaps_or_is_cut(page, page_path, size):
    page.show(*size, phone=size[0] < 500)
    page.open(page_path)
    for view in ("Heads", "Model", "Matrix", "Neurons", "Numbers"):
        choose(page, "view", view)
        corners = boxes(page, SEPARATE)
        assert corners.min() >= 0 and (corners[:, 2:] <= np.array(size) + 0.5).all()
        for one, other in itertools.combinations(corners, 2):
            assert (one[:2] >= other[2:] - 0.5).any() or (other[:2] >= one[2:] - 0.5).any(), view
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.get("main", "clientHeight") >= 0.5 * size[1]


@pytest.mark.slow
@pytest.mark.default_tiles
def test_2048_tokens_open_within_two_seconds(window, tmp_path):
    size = 2048
    scores = np.random.default_rng(0).normal(size=(2, size, size)).astype(np.float32)
    values = np.exp(4 * scores) * np.tri(size, dtype=np.float32)
    values /= values.sum(axis=-1, keepdims=True)
    names = [f"token{place}" for place in range(size)]
    path = viz.viewer(values, names, mask=masks.Causal()).save(tmp_path / "long.html")
    window.show(1366, 768)
    seconds = []
    while not seconds or (min(seconds) > 2 and len(seconds) < 4):  # the machine may be busy
        window.open(path)
        seconds.append(float(window.evaluate("document.body.dataset.ready")) / 1000)
    assert min(seconds) <= 2
    assert 20 < window.evaluate("document.querySelectorAll('.token').length") < 200
    window.get("#heads-view", "scrollTop = 20000")
    window.settle()
    shown = [int(token.removeprefix("token")) for token in tokens(window, "keys")]
    assert shown == [*range(shown[0], shown[-1] + 1)]
    assert shown[0] > 500
    window.press("v")
    window.press("v")
    window.settle()
    plain = picture(window, "#matrix")
    window.press("m")
    window.settle()
    assert picture(window, "#matrix") != plain
    assert window.complaints == []


@pytest.mark.slow
@pytest.mark.default_tiles
def test_a_token_of_100000_letters_hangs_no_view(window, tmp_path):
    """It is drawn as far as there is room for it, and its title is whole."""
    long = "🦜x" * 50_000
    rows = np.full((1, 40, 40), 1 / 40, np.float32)
    path = viz.viewer(rows, [long, "b"] * 20).save(tmp_path / "long.html")
    window.show(1366, 768)
    window.open(path)
    assert window.get("#queries .token", "title.length") == 150_000
    assert len(tokens(window, "queries")[0]) < 200
    for view in ("Matrix", "Heads", "Model", "Matrix"):
        choose(window, "view", view)
    began = window.evaluate("performance.now()")
    for place in range(8):
        assert " reads " in hover_cell(window, place, 0)
    assert window.evaluate("performance.now()") - began < 4000
    assert window.complaints == []
