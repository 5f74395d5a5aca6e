"""Pictures: what figures draw and name, what they refuse, and what stands in a viewer's page."""

from typing import Any

import numpy as np
import pytest

from jattn import masks, viz
from jattn.viz.inputs import visible


T, S, N, L = 3, 5, 2, 4
ROWS = ["the", "dog", "sleeps"]
COLUMNS = ["der", "hund", "schläft", ".", "<eos>"]


def weights(*shape: int) -> np.ndarray:
    """Rows that sum to 1."""
    values = np.exp(3 * np.random.default_rng(len(shape)).normal(size=shape))
    return (values / values.sum(axis=-1, keepdims=True)).astype(np.float32)


def drawn(axes: Any) -> np.ndarray:
    """The numbers that an image of the axes shows."""
    return np.ma.filled(axes.images[0].get_array(), np.nan)


def panels_of(figure: Any) -> Any:
    return figure.axes


def labels(ticks: Any) -> list[str]:
    return [label.get_text() for label in ticks]


# Figures


def test_a_heatmap_shows_the_matrix_with_its_tokens():
    array = weights(T, S)
    axes: Any = viz.heatmap(array, ROWS, COLUMNS, title="cross").axes[0]
    np.testing.assert_array_equal(drawn(axes), array)
    assert labels(axes.get_yticklabels()) == ROWS
    assert labels(axes.get_xticklabels()) == COLUMNS
    assert axes.get_title() == "cross"
    assert axes.images[0].get_clim() == (0, 1)
    assert [text.get_text() for text in axes.texts] == [f"{x:.2f}" for x in array.flat]


def test_a_heatmap_of_scores_and_differences_is_signed_and_shows_what_is_masked():
    array = np.array([[-2.0, -np.inf], [0.5, 1.0]])
    axes: Any = viz.heatmap(array, ["a", "b"]).axes[0]
    assert axes.images[0].get_clim() == (-2, 2)
    assert np.isnan(drawn(axes)[0, 1])
    assert [text.get_text() for text in axes.texts] == ["−2.00", "−∞", "0.50", "1.00"]
    assert labels(axes.get_xticklabels()) == ["a", "b"]
    assert not viz.heatmap(array, values=False).axes[0].texts


def test_figures_can_be_drawn_into_others():
    axes: Any = viz.heatmap(weights(T, S)).axes[0]
    figure = axes.figure
    assert viz.alignment(weights(N, T, S), ROWS, COLUMNS, axes=axes) is figure
    np.testing.assert_allclose(axes.images[-1].get_array(), weights(N, T, S).mean(axis=0))


@pytest.mark.parametrize(("shape", "first"), [((L, N, T, S), "layer 1, "), ((N, T, S), "")])
def test_a_grid_has_a_panel_for_each_head(shape, first):
    array = weights(*shape)
    panels = viz.grid(array, ROWS, COLUMNS).axes[:-1]  # the last is the scale
    for panel, one in zip(panels, array.reshape(-1, T, S), strict=True):
        np.testing.assert_array_equal(drawn(panel), one)
    assert [panels[0].get_title(), panels[1].get_title()] == [first + "head 1", first + "head 2"]
    named = viz.grid(weights(N, T, S), titles=["one", "$two$"]).axes
    assert [panel.get_title() for panel in named[:N]] == ["one", "$two$"]


def test_an_alignment_marks_the_greatest_weight_of_each_word():
    array = weights(T, S)
    axes: Any = viz.alignment(array, ROWS, COLUMNS).axes[0]
    centres = [(line.get_xdata().mean(), line.get_ydata().mean()) for line in axes.lines]
    marked = [(round(x - 0.086), round(y + 0.086)) for x, y in centres]  # a corner counts twice
    assert marked == [(column, row) for row, column in enumerate(array.argmax(axis=1))]
    assert labels(axes.get_xticklabels()) == COLUMNS
    array[1] = 0  # a row without keys
    assert len(viz.alignment(array, ROWS, COLUMNS).axes[0].lines) == T - 1


@pytest.mark.parametrize("positions", [None, np.arange(20, 27, dtype=np.int32)])
def test_a_mask_is_shown_pair_by_pair_and_tile_by_tile(positions):
    mask = masks.Causal() & masks.Window(left=20)
    figure = viz.show_mask(mask, 7, 30, block=(2, 8), q_positions=positions)
    pairs, tiles = panels_of(figure)
    q = (np.arange(7) if positions is None else positions)[:, None]
    kv = np.arange(30)[None, :]
    allowed = (kv <= q) & (kv >= q - 20)
    np.testing.assert_array_equal(drawn(pairs), allowed)
    kinds = np.array(
        [
            [part.any() + 0 + part.all() for part in np.split(strip, [8, 16, 24], axis=1)]
            for strip in np.split(allowed, [2, 4, 6])
        ]
    )
    np.testing.assert_array_equal(drawn(tiles), np.repeat(np.repeat(kinds, 2, 0), 8, 1)[:7, :30])
    assert f"{allowed.mean():.0%} of 7 × 30 pairs" == pairs.get_title()
    (legend,) = figure.legends
    names = [
        f"{(kinds == kind).sum()} {name}" for kind, name in enumerate(["empty", "mixed", "full"])
    ]
    assert labels(legend.get_texts()) == names


def test_masks_with_batch_and_heads_are_shown_for_one_of_them():
    ids = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    pairs = panels_of(viz.show_mask(masks.Segments(ids), 4, b=1))[0]
    np.testing.assert_array_equal(drawn(pairs), ids[1][:, None] == ids[1][None, :])
    array = np.zeros((2, 4, 4), bool)
    array[1, 2, 3] = True
    np.testing.assert_array_equal(drawn(viz.show_mask(array, 4, h=1).axes[0]), array[1])


def test_labels_show_what_tokens_hide():
    assert visible("\x1b[2J") == r"\x1b[2J"
    assert visible(" a b ") == "▁a b▁"
    assert [visible(""), visible("  "), visible("\n\t")] == ["∅", "▁▁", "↵⇥"]
    assert visible("\u202e\u2028<b>&") == r"\u202e\u2028<b>&"
    axes: Any = viz.heatmap(weights(2, 2), ["$x$", "\u202ey"]).axes[0]
    assert labels(axes.get_yticklabels()) == ["$x$", r"\u202ey"]
    axes.figure.savefig("/dev/null", format="png")  # and they are no formulas


def test_a_notebook_shows_figures():
    figure: Any = viz.heatmap(weights(2, 2))
    assert figure._repr_png_().startswith(b"\x89PNG")


untyped: Any = viz  # what is wrong on purpose is no error of types
REFUSED = {
    "a list": (
        lambda: untyped.heatmap([[1.0]]),
        TypeError,
        r"weights: expected a real array \[T, S\]",
    ),
    "three axes": (
        lambda: untyped.heatmap(weights(N, T, S)),
        ValueError,
        r"weights: .* got \[2, 3, 5\]",
    ),
    "NaN": (
        lambda: untyped.heatmap(np.array([[0, np.nan]])),
        ValueError,
        r"weights: .* nan at \[0, 1\]",
    ),
    "inf": (lambda: untyped.heatmap(np.array([[np.inf]])), ValueError, "weights: .* got inf at"),
    "no keys": (lambda: untyped.heatmap(np.ones((2, 0))), ValueError, r"weights: .* got \[2, 0\]"),
    "a string": (
        lambda: untyped.heatmap(weights(T, S), "the"),
        TypeError,
        "q_tokens: expected a seq",
    ),
    "numbers": (
        lambda: untyped.heatmap(weights(T, S), [1, 2, 3]),
        TypeError,
        "q_tokens: .* strings, got 1",
    ),
    "too few": (
        lambda: untyped.heatmap(weights(T, S), ROWS[1:]),
        ValueError,
        "q_tokens: expected T = 3",
    ),
    "keys": (
        lambda: untyped.grid(weights(N, T, S), kv_tokens=ROWS),
        ValueError,
        "kv_tokens: expected S = 5",
    ),
    "titles": (
        lambda: untyped.grid(weights(N, T, S), titles=["a"]),
        ValueError,
        "titles: .* = 2 tokens",
    ),
    "axes": (lambda: untyped.heatmap(weights(T, S), axes=1), TypeError, "axes: expected axes"),
    "flag": (
        lambda: untyped.heatmap(weights(T, S), values=1),
        TypeError,
        "values: expected True or",
    ),
    "title": (
        lambda: untyped.heatmap(weights(T, S), title=b"x"),
        TypeError,
        "title: expected a string",
    ),
    "masked": (
        lambda: untyped.alignment(np.full((1, 1), -np.inf), ["a"], ["b"]),
        ValueError,
        "weights",
    ),
    "negative": (
        lambda: untyped.alignment(-weights(T, S), ROWS, COLUMNS),
        ValueError,
        "weights: .* >= 0",
    ),
    "no words": (
        lambda: untyped.alignment(weights(T, S), None, COLUMNS),
        TypeError,
        "target: expected",
    ),
    "no mask": (lambda: untyped.show_mask("causal", 3), TypeError, "mask: expected a jattn mask"),
    "no size": (lambda: untyped.show_mask(masks.Causal(), 0), ValueError, "T: expected T >= 1"),
    "half": (
        lambda: untyped.show_mask(masks.Causal(), 3, 2.5),
        TypeError,
        "S: expected an integer",
    ),
    "blocks": (
        lambda: untyped.show_mask(masks.Causal(), 3, block=(1, 2, 3)),
        ValueError,
        "block: expected",
    ),
    "no block": (
        lambda: untyped.show_mask(masks.Causal(), 3, block=0),
        ValueError,
        "block: expected",
    ),
    "head": (lambda: untyped.show_mask(masks.Causal(), 3, h=-1), ValueError, "h: expected 0 <= h"),
    "positions": (
        lambda: untyped.show_mask(masks.Causal(), 3, q_positions=np.arange(4)),
        ValueError,
        "q_positions: expected",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_is_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
