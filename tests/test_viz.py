"""Pictures: what figures draw and name, what they refuse, and what stands in a viewer's page."""

import base64
import html
import io
import json
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores, viz
from jattn.viz.inputs import visible
from tests.arrays import temporaries
from tests.test_masks import true_kinds


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


def labels(texts: Any) -> list[str]:
    return [text.get_text() for text in texts]


def test_a_heatmap_shows_the_matrix_with_its_tokens():
    array = weights(T, S)
    axes: Any = viz.heatmap(array, ROWS, COLUMNS, title="cross").axes[0]
    np.testing.assert_array_equal(drawn(axes), array)
    assert [labels(axes.get_yticklabels()), labels(axes.get_xticklabels())] == [ROWS, COLUMNS]
    assert axes.images[0].get_clim() == (0, 1)
    assert labels(axes.texts) == [f"{x:.2f}" for x in array.flat]
    assert (axes.get_title(), axes.get_ylabel(), axes.get_xlabel()) == ("cross", "query", "key")
    assert axes.figure._repr_png_().startswith(b"\x89PNG")  # which a notebook shows


def test_masked_cells_of_a_heatmap_are_blank():
    array = np.array([[1.0, 0.0], [0.004, 0.996]])
    axes: Any = viz.heatmap(array).axes[0]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(0, 0): "1.00", (0, 1): "0.00", (1, 1): "1.00"}
    difference: Any = viz.heatmap(array - array.T).axes[0]
    assert labels(difference.texts) == ["0.00", "−0.00", "0.00", "0.00"]


@pytest.mark.parametrize("size", [1, 3, 200])
def test_ticks_without_tokens_are_integers(size):
    mask_figure: Any = viz.show_mask(masks.Causal(), size)
    heatmap: Any = viz.heatmap(weights(size, size), values=False)
    for axes in (heatmap.axes[0], *mask_figure.axes):
        axes.figure.draw_without_rendering()
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [x for x in axis.get_majorticklocs() if low <= x <= high]
            assert 1 <= len(ticks) <= 12 and all(x == int(x) for x in ticks)
        assert (axes.get_ylabel(), axes.get_xlabel()) == ("query", "key")


def test_a_large_heatmap_has_no_numbers_and_labels_that_do_not_overlap():
    names = [f"token{place}" for place in range(200)]
    figure: Any = viz.heatmap(weights(200, 200), names)
    axes = figure.axes[0]
    assert not axes.texts
    figure.draw_without_rendering()
    for ticks, axis in ((axes.get_xticklabels(), 0), (axes.get_yticklabels(), 1)):
        assert labels(ticks) == names[::4]
        corners = np.array([tick.get_window_extent().get_points()[:, axis] for tick in ticks])
        low, high = corners[corners[:, 0].argsort()].T
        assert (low[1:] - low[:-1]).min() >= (high - low).max()
    few: Any = viz.show_mask(masks.Causal(), 100, q_tokens=names[:100]).axes[0]
    assert labels(few.get_yticklabels()) == names[:100:5]


def test_a_heatmap_of_scores_is_signed_and_shows_what_is_masked():
    array = np.array([[-2.0, -np.inf], [0.5, 1.0]])
    axes: Any = viz.heatmap(array, ["a", "b"]).axes[0]
    assert axes.images[0].get_clim() == (-2, 2)
    assert np.isnan(drawn(axes)[0, 1])
    assert labels(axes.texts) == ["−2.00", "0.50", "1.00"]
    assert labels(axes.get_xticklabels()) == ["a", "b"]
    assert not viz.heatmap(array, values=False).axes[0].texts


@pytest.mark.parametrize(("shape", "first"), [((L, N, T, S), "layer 1, "), ((N, T, S), "")])
def test_a_grid_has_a_panel_for_each_head(shape, first):
    array = weights(*shape)
    panels = viz.grid(array, ROWS, COLUMNS).axes[:-1]  # the last is the scale
    for panel, one in zip(panels, array.reshape(-1, T, S), strict=True):
        np.testing.assert_array_equal(drawn(panel), one)
    assert [panels[0].get_title(), panels[1].get_title()] == [first + "head 1", first + "head 2"]
    corner = panels[-N]
    assert (corner.get_ylabel(), corner.get_xlabel()) == ("query", "key")
    named = viz.grid(weights(N, T, S), titles=["one", "$two$"]).axes
    assert [panel.get_title() for panel in named[:N]] == ["one", "$two$"]


def test_an_alignment_marks_the_greatest_weight_of_each_word():
    array = weights(T, S)
    axes: Any = viz.alignment(array, ROWS, COLUMNS).axes[0]
    centres = [(line.get_xdata().mean(), line.get_ydata().mean()) for line in axes.lines]
    marked = [(round(x - 0.086), round(y + 0.086)) for x, y in centres]  # a corner counts twice
    assert marked == [(column, row) for row, column in enumerate(array.argmax(axis=1))]
    assert labels(axes.get_xticklabels()) == COLUMNS
    assert viz.alignment(weights(N, T, S), ROWS, COLUMNS, axes=axes) is axes.figure
    np.testing.assert_allclose(axes.images[-1].get_array(), weights(N, T, S).mean(axis=0))
    array[1] = 0  # a row without keys
    assert len(viz.alignment(array, ROWS, COLUMNS).axes[0].lines) == T - 1


@pytest.mark.parametrize("positions", [None, np.arange(20, 27, dtype=np.int32)])
def test_a_mask_is_shown_pair_by_pair_and_tile_by_tile(positions):
    mask = masks.Causal() & masks.Window(left=20)
    figure: Any = viz.show_mask(mask, 7, 30, block=(2, 8), q_positions=positions)
    pairs, tiles = figure.axes
    q = (np.arange(7) if positions is None else positions)[:, None]
    kv = np.arange(30)[None, :]
    allowed = (kv <= q) & (kv >= q - 20)
    np.testing.assert_array_equal(drawn(pairs), allowed)
    kinds = true_kinds(allowed, 2, 8)
    np.testing.assert_array_equal(drawn(tiles), np.repeat(np.repeat(kinds, 2, 0), 8, 1)[:7, :30])
    assert f"{allowed.mean():.0%} of 7 × 30 pairs" == pairs.get_title()
    names = [f"{(kinds == kind).sum()} {x}" for kind, x in enumerate(["empty", "mixed", "full"])]
    assert labels(figure.legends[0].get_texts()) == names


def test_masks_with_batch_and_heads_are_shown_for_one_of_them():
    ids, array = np.array([[0, 0, 1, 1], [0, 1, 1, 1]]), np.zeros((2, 4, 4), bool)
    array[1, 2, 3] = True
    pairs, of_head = viz.show_mask(masks.Segments(ids), 4, b=1), viz.show_mask(array, 4, h=1)
    np.testing.assert_array_equal(drawn(pairs.axes[0]), ids[1][:, None] == ids[1][None, :])
    np.testing.assert_array_equal(drawn(of_head.axes[0]), array[1])


def test_labels_show_what_tokens_hide():
    shown = {"\x1b[2J": r"\x1b[2J", " a b ": "▁a b▁", "": "∅", "  ": "▁▁", "\n\t": "↵⇥"}
    shown["\u202e\u2028<b>&"] = r"\u202e\u2028<b>&"
    shown[b"caf\xe9".decode(errors="surrogateescape")] = r"caf\udce9"
    assert {token: visible(token) for token in shown} == shown
    tokens = ["$x$", "\u202e\udce9"]
    axes: Any = viz.heatmap(weights(2, 2), tokens, title="\udce9").axes[0]
    assert labels(axes.get_yticklabels()) == ["$x$", r"\u202e\udce9"]
    axes.figure.savefig("/dev/null", format="png")  # and they are no formulas


def test_a_notebook_shows_the_tiles_of_a_mask():
    shown = (masks.Causal() & masks.Window(left=3))._repr_html_()
    assert shown is not None
    assert "32 queries × 32 keys in tiles of 1 × 1: 902 empty, 0 mixed, 122 full" in shown
    rows = {int(y): int(w) for y, w in re.findall(r'y="(\d+)" width="(\d+)" [^>]*#08519c', shown)}
    assert rows == {row: min(row + 1, 4) for row in range(32)}
    large: Any = masks.Segments(np.arange(100) // 50)._repr_html_()
    assert "100 queries × 100 keys in tiles of 4 × 4: 288 empty, 49 mixed, 288 full" in large
    assert 'role="img" aria-label="100 queries × 100 keys in tiles of 4 × 4: 288' in large
    assert "4 queries × 9 keys" in str(masks.Blocks(np.ones((2, 3), bool), (2, 3))._repr_html_())
    traced = []
    jax.jit(lambda x: traced.append(masks.Segments(x)._repr_html_()))(jnp.arange(4))
    assert traced == [None]


def test_the_repr_of_a_mask_is_one_line():
    ids = np.arange(300) // 50
    mask = masks.Causal() & masks.Segments(ids, jnp.asarray(ids[:200]))
    segments = "Segments(q_ids=int32[300], kv_ids=int32[200])"
    assert repr(mask) == f"And(left=Causal(), right={segments})"
    few = repr(masks.Segments(np.array([[0, 1], [2, 2]], np.int32)))
    assert few.startswith("Segments(q_ids=array([[0, 1], [2, 2]], dtype=int32),")


def test_the_clearest_head_is_sharp_and_leaves_no_key_out():
    array = np.full((2, 3, 3, 3), 1 / 3)
    array[0, 2] = np.eye(3)[0]  # sharp, but of one key
    array[1, 1] = 0.8 * np.eye(3)[::-1] + 0.2 / 3
    assert viz.clearest_head(array) == (1, 1)
    assert part_of(viz.viewer(array).html)["clearest"] == [1, 1]  # with which a page opens
    assert viz.clearest_head(array[1]) == (1,)


def test_numbers_of_heads_are_their_formulas():
    assert all(np.isnan(x) for x in viz.head_numbers(np.zeros((3, 3))).values())
    array = weights(2, 2, T, S).astype(np.float64)
    array[1, 0, 1] = 0  # a row without keys
    numbers = viz.head_numbers(array)
    for layer, head in np.ndindex(2, 2):
        rows = [(t, row) for t, row in enumerate(array[layer, head]) if row.sum()]
        entropy = [-sum(w * np.log(w) for w in row if w > 0) for _, row in rows]
        distance = [sum(w * abs(t - s) for s, w in enumerate(row)) for t, row in rows]
        read = [sum(row[s] for _, row in rows) for s in range(S)]
        means = [sum(s * w for s, w in enumerate(row)) for _, row in rows]
        expected = {
            "entropy": np.mean(entropy),
            "coverage": np.mean(np.minimum(read, 1)),
            "monotonicity": np.mean(np.diff(means) >= 0),
            "distance": np.mean(distance),
            "first": np.mean([row[0] for _, row in rows]),
            "previous": np.nan,
        }
        got = {name: values[layer, head] for name, values in numbers.items()}
        assert got == pytest.approx(expected, nan_ok=True)
    square = array[..., :T]
    got = viz.head_numbers(square)["previous"]
    for place in np.ndindex(2, 2):
        previous = [row[t] for t, row in enumerate(square[place][1:]) if row.any()]
        assert got[place] == pytest.approx(np.mean(previous))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("normalizer", ["lse", "none"])
@pytest.mark.parametrize(
    ("mask", "score"),
    [
        (None, None),
        (
            masks.Causal() & masks.Lengths(kv=np.array([0, 4])),
            scores.Bias(weights(2, 6, 5, 7)) >> scores.SoftCap(3.0),
        ),
        (
            masks.Segments(np.array([0, 0, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 1, 1])),
            scores.Alibi(np.linspace(0, 1, 6, dtype=np.float32)),
        ),
        (masks.Predicate(lambda b, h, q, kv: (q + kv + h + b) % 3 != 0), None),
    ],
)
def test_weights_at_some_rows_are_those_of_all(mask, score, normalizer):
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(2, 5, 6, 10)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, 2, 7, 3, 10)), jnp.float32)
    rules: dict[str, Any] = {"mask": mask, "score": score, "scale": 1.5}
    rules["q_positions"] = jnp.arange(5) * 2
    full = np.asarray(jattn.attention_weights(q, k, **rules))
    lse = jattn.attention(q, k, v, return_lse=True, **rules)[1] if normalizer == "lse" else None
    selected = viz.weights_at(q, k, lse, rows=[4, 1], heads=[5, 0, 3], **rules)
    np.testing.assert_allclose(selected, full[:, [5, 0, 3]][:, :, [4, 1]], rtol=1e-5, atol=1e-6)
    row = viz.weights_at(q[0, :, :3], k[0], rows=2, scale=1.5)[:, 0]
    full = jattn.attention_weights(q[0, :, :3], k[0], scale=1.5)
    np.testing.assert_allclose(row, full[:, 2], atol=1e-6)


def test_weights_with_a_sink_are_shares_of_all():
    q, k, v = jnp.asarray(np.random.default_rng(2).normal(size=(3, 5, 2, 4)), jnp.float32)
    out, lse = jattn.attention(q, k, v, return_lse=True)
    _, lse = jattn.with_sink(out, lse, jnp.array([0.5, -jnp.inf], jnp.float32))
    selected = viz.weights_at(q, k, lse, rows=range(5))
    denominator = np.exp(jattn.attention_scores(q, k)).sum(axis=-1)
    denominator[0] += np.exp(0.5)
    expected = np.exp(jattn.attention_scores(q, k)) / denominator[..., None]
    np.testing.assert_allclose(selected, expected, rtol=1e-5)


@pytest.mark.default_tiles
def test_weights_at_some_rows_take_memory_for_these():
    T, N, H = 8192, 8, 64
    mask = masks.Segments(np.arange(T) // 1000)
    q = jax.ShapeDtypeStruct((T, N, H), jnp.float32)
    lse = jax.ShapeDtypeStruct((N, T), jnp.float32)

    call = lambda q, k, lse: viz.weights_at(q, k, lse, rows=[5, 8000], heads=[3, 6], mask=mask)  # noqa: E731
    out = jax.eval_shape(call, q, q, lse)
    assert (out.shape, out.dtype) == ((2, 2, T), np.float32)
    # 13 MB, where T × S of a head takes 268
    assert temporaries(call, q.shape, q.shape, lse.shape) < 3 * 4 * 2 * T * H


def blocks_of(page: str) -> list[bytes]:
    texts = re.findall(r'<script type="text/plain" id="block-\d+">([^<]*)</script>', page)
    return [zlib.decompress(base64.b64decode(text)) for text in texts]


def stored(content: bytes, rows: int, dtype: str) -> np.ndarray:
    """The numbers of a block: the scale of each row, then integers."""
    scales = np.frombuffer(content[: 4 * rows], "<f4")
    return scales[:, None] * np.frombuffer(content[4 * rows :], dtype).reshape(rows, -1)


def attentions_of(page: str) -> dict[str, Any]:
    """The attentions of each sentence of a page, by the name of the sentence."""
    (text,) = re.findall(r'<script type="application/json" id="about">([^<]*)</script>', page)
    return {x["name"]: x["attentions"] for x in json.loads(text)["sentences"]}


def part_of(page: str) -> Any:
    """The only attention of a page."""
    ((part,),) = attentions_of(page).values()
    return part


def test_the_page_holds_weights_to_half_a_step():
    array = weights(L, N, T, S)
    array[0, 0] *= np.array([[1e-4], [1], [0]])  # rows of every size
    page = viz.viewer(array, ROWS, COLUMNS).html
    part, blocks = part_of(page), blocks_of(page)
    assert part["sizes"] == [L, N, T, S]
    for layer, head in np.ndindex(L, N):
        cells = stored(blocks[part["heads"][0][layer][head]], T, "u1")
        half_step = array[layer, head].max(axis=-1, keepdims=True) / 510
        assert (abs(cells - array[layer, head]) <= half_step * 1.001).all()
    assert part["numbers"][0]["entropy"] == np.round(viz.head_numbers(array)["entropy"], 6).tolist()


def test_the_page_holds_queries_and_keys():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(L, T, N, 6)), rng.normal(size=(L, S, 1, 6))
    query[0, 1] = 0
    page = viz.viewer(weights(L, N, T, S), ROWS, COLUMNS, query=query, key=key).html
    blocks = blocks_of(page)
    for array, indices in zip((query, key), part_of(page)["vectors"], strict=True):
        for layer, head in np.ndindex(L, array.shape[2]):
            rows = array[layer, :, head]
            numbers = stored(blocks[indices[layer][head]], len(rows), "<i2")
            np.testing.assert_allclose(numbers, rows, atol=1e-4)
    plain = viz.viewer(weights(T, S), query=query[0, :, 0], key=key[0, :, 0]).html
    assert len(part_of(plain)["vectors"]) == 2


def test_tokens_that_are_not_given_are_numbers():
    numbers = [*"12345"]
    for columns, given_names in ((numbers[:T], None), (numbers, None), (COLUMNS, COLUMNS)):
        part = part_of(viz.viewer(weights(T, len(columns)), kv_tokens=given_names).html)
        assert (part["rows"], part["columns"]) == (numbers[:T], columns)
        assert part["cross"] == (len(columns) != T)
    # Only for the same tokens there is a weight of the key before the query.
    names = [*viz.head_numbers(weights(T, T))]
    for keys, expected in ((ROWS, names), (COLUMNS[:T], names[:-1])):
        part = part_of(viz.viewer(weights(T, T), ROWS, keys).html)
        assert [*part["numbers"][0]] == expected


def test_a_mask_has_the_axes_of_the_weights():
    allowed = np.tri(T, dtype=bool)
    pages = (viz.viewer(weights(T, T), ROWS, mask=mask).html for mask in (allowed, allowed[None]))
    assert len(set(pages)) == 1
    with pytest.raises(ValueError, match=r"mask: expected \[N, T, S\], got shape"):
        viz.viewer(weights(1, T, T), ROWS, mask=allowed)


def test_thumbnails_keep_what_is_furthest_from_0():
    array = np.zeros((1, 100, 60), np.float32)
    array[0, 97, 31] = 1
    page = viz.viewer(array, ["q"] * 100, ["k"] * 60, other=array[:, ::-1]).html
    thumbnails = part_of(page)["thumbnails"]
    cells = np.frombuffer(blocks_of(page)[thumbnails["block"]], np.int8)
    first, second, difference = cells.reshape(3, *thumbnails["sizes"])
    assert (first > 0).sum() == (second > 0).sum() == 1
    np.testing.assert_array_equal(difference, first - second)


HOSTILE = ["</script><script>alert(1)</script>", "<!--", "&amp;"]
HOSTILE += ["\u2028\u2029", "%SCRIPT%", "\ud800"]


def test_no_token_is_markup():
    page = viz.viewer(weights(6, 6), HOSTILE, title=HOSTILE[0]).html
    plain = viz.viewer(weights(6, 6), ["a"] * 6).html
    for mark in ("<script", "</script", "<!--", "%SCRIPT%", "alert(1)"):
        harmless = mark in ("alert(1)", "%SCRIPT%")
        more = page.count(mark) - plain.count(mark)
        assert more > 0 if harmless else more == 0, mark
    assert not re.search("[\u2028\u2029]", page)
    rows = part_of(page)["rows"]
    assert (rows[0], rows[3]) == (HOSTILE[0], r"\u2028\u2029")
    page.encode("utf-8")


def test_a_page_asks_for_nothing(tmp_path):
    page = viz.viewer(weights(T, S), ROWS, COLUMNS)
    assert page.save(tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    assert "default-src 'none'" in page.html
    rest = re.sub(r'<script type="text/plain"[^>]*>[^<]*</script>', "", page.html)
    assert not re.search(r"https?:|//cdn|fetch\(|XMLHttpRequest|WebSocket|import\(", rest)
    assert not re.search(r"(inner|outer)HTML|insertAdjacent|document\.write|eval\(", rest)


def test_a_notebook_shows_the_page_in_a_frame():
    page = viz.viewer(weights(T, S), ROWS, ['"><b>', *COLUMNS[1:]])
    (content,) = re.findall('srcdoc="([^"]*)"', page._repr_html_())
    assert html.unescape(content) == page.html
    assert 'sandbox="allow-scripts"' in page._repr_html_()
    assert len(repr(page)) < 100


def test_layers_are_stacked_by_name():
    captured = {
        "decoder/layers/10/self_attention": np.full((N, T, T), 10.0),
        "decoder/layers/2/self_attention": np.full((N, T, T), 2.0),
        "encoder/attention": weights(N, T, S),
    }
    stacked = viz.stack_layers(captured)
    assert stacked["decoder/layers/self_attention"][:, 0, 0, 0].tolist() == [2, 10]
    assert stacked["encoder/attention"].shape == (1, N, T, S)


def test_sentences_of_several_attentions_have_names():
    array = weights(N, T, S)
    first = viz.Sentence({"a": array, "b": array[0]}, ROWS, {"a": COLUMNS, "b": COLUMNS})
    second = viz.Sentence(weights(T, T), ROWS, name="mine")
    attentions = attentions_of(viz.viewer([first, second]).html)
    assert [*attentions] == ["1: the dog sleeps", "mine"]
    sizes = {part["name"]: part["sizes"] for part in attentions["1: the dog sleeps"]}
    assert sizes == {"a": [1, N, T, S], "b": [1, 1, T, S]}


untyped: Any = viz  # what is wrong on purpose is no error of types
heatmap, grid, alignment = untyped.heatmap, untyped.grid, untyped.alignment
show_mask, viewer, stack_layers = untyped.show_mask, untyped.viewer, untyped.stack_layers
SQUARE, WIDE, HEADS = weights(T, T), weights(T, S), weights(N, T, S)
CAUSAL = masks.Causal()


def at(**options: Any) -> Any:
    q = np.ones((5, 1, 4), np.float32)
    return untyped.weights_at(q, q, **options)


WRONG_TYPES = [
    (lambda: heatmap([[1.0]]), r"weights: expected a real array \[T, S\]"),
    (lambda: heatmap(WIDE, "the"), "q_tokens: expected a seq"),
    (lambda: heatmap(WIDE, [1, 2, 3]), "q_tokens: .* strings, got 1"),
    (lambda: heatmap(WIDE, axes=1), "axes: expected axes"),
    (lambda: heatmap(WIDE, values=1), "values: expected True or"),
    (lambda: heatmap(WIDE, title=b"x"), "title: expected a string"),
    (lambda: alignment(WIDE, None, COLUMNS), "target: expected"),
    (lambda: show_mask("causal", 3), "mask: expected a jattn mask"),
    (lambda: show_mask(CAUSAL, 3, 2.5), "S: expected an integer"),
    (lambda: viewer([[1.0]], ["a"]), "weights: expected an array"),
    (lambda: viewer(None), "weights: expected a real array"),
    (lambda: viewer(SQUARE, query="q"), "query: expected a real array"),
    (lambda: viewer(SQUARE, ROWS, models="ab"), "models: expected"),
    (lambda: viewer(SQUARE, ROWS, title=None), "title: expected"),
    (lambda: viewer(SQUARE, ROWS).save(1), "path: expected"),
    (lambda: stack_layers([1]), "weights: expected a mapping"),
    (lambda: stack_layers({"a": 1}), "weights: expected names and arrays"),
    (lambda: untyped.head_numbers("x"), "weights: expected"),
    (lambda: at(rows="0"), "rows: expected"),
    (lambda: at(rows=np.ones(2)), "rows: expected an integer array"),
    (lambda: at(rows=[]), "rows: expected"),
    (lambda: at(rows=0, heads=True), "heads: expected"),
]
WRONG_VALUES = [
    (lambda: heatmap(HEADS), r"weights: .* got \[2, 3, 5\]"),
    (lambda: heatmap(np.array([[0, np.nan]])), r"weights: .* nan at \[0, 1\]"),
    (lambda: heatmap(np.array([[np.inf]])), "weights: .* got inf at"),
    (lambda: heatmap(np.ones((2, 0))), r"weights: .* got \[2, 0\]"),
    (lambda: heatmap(WIDE, ROWS[1:]), "q_tokens: expected T = 3"),
    (lambda: grid(HEADS, kv_tokens=ROWS), "kv_tokens: expected S = 5"),
    (lambda: grid(HEADS, titles=["a"]), "titles: .* = 2 tokens"),
    (lambda: alignment(np.full((1, 1), -np.inf), ["a"], ["b"]), "weights"),
    (lambda: alignment(-WIDE, ROWS, COLUMNS), "weights: .* >= 0"),
    (lambda: show_mask(CAUSAL, 0), "T: expected T >= 1"),
    (lambda: show_mask(CAUSAL, 3, block=(1, 2, 3)), "block: expected"),
    (lambda: show_mask(CAUSAL, 3, block=0), "block: expected"),
    (lambda: show_mask(CAUSAL, 3, h=-1), "h: expected 0 <= h"),
    (lambda: viewer(np.array([[np.nan]]), ["a"]), "weights: .* nan"),
    (lambda: viewer(WIDE, ROWS), "kv_tokens: .* S = 5"),
    (lambda: viewer(-SQUARE, ROWS), "weights: .* `other`"),
    (lambda: viewer(SQUARE, ROWS, other=weights(S, S)), "other: expected the shape of weights"),
    (lambda: viewer({"a": SQUARE}, {"b": ROWS}), "tokens: expected names of weights.*'b'"),
    (lambda: viewer({"a": SQUARE}, {"a": ROWS[1:]}), r"tokens\['a'\]: expected T = 3"),
    (lambda: viewer([untyped.Sentence(SQUARE, ROWS)], ROWS), "tokens: sentences bring their own"),
    (lambda: viewer(SQUARE, mask=masks.Segments(np.ones((2, T), int))), r"got one of batch \[2\]"),
    (lambda: viewer(SQUARE, ROWS, mask=np.ones((2, T, T), bool)), "mask: expected N = 1 heads"),
    (lambda: viewer(SQUARE, query=weights(T, 4)), r"key: .* as the other is given"),
    (
        lambda: viewer(HEADS, query=weights(T, 3, 4), key=weights(S, 1, 4)),
        "query: expected L, T, N = 1, 3, 2, got",
    ),
    (
        lambda: viewer(HEADS, query=weights(T, N, 4), key=weights(S, 3, 4)),
        "key: expected L, S, H = 1, 5, 4 and K heads that divide N = 2",
    ),
    (lambda: viewer(HEADS, query=weights(T, 4), key=weights(S, 4)), r"query: .* got \[3, 4\]"),
    (lambda: stack_layers({"a/0": np.ones(1), "a/1": np.ones(2)}), "expected one shape for 'a'"),
    (lambda: untyped.head_numbers(np.ones(3)), "weights: expected"),
    (lambda: viz.clearest_head(-WIDE), "weights: .* >= 0"),
    (lambda: at(rows=5), "rows: expected 0 <= place < T = 5, got 5"),
    (lambda: at(rows=[0, -1]), "rows: .* got -1"),
    (lambda: at(rows=np.ones((1, 1), int)), "rows: expected an integer or"),
    (lambda: at(rows=0, lse=np.ones((1, 4), np.float32)), "lse: expected"),
    (lambda: show_mask(CAUSAL, 3, q_positions=np.arange(4)), "q_positions: expected"),
]


def test_what_cannot_be_drawn_is_refused(unchecked):
    for error, calls in ((TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES)):
        for call, message in calls:
            with pytest.raises(error, match=message):
                call()


def test_a_label_is_no_longer_than_there_is_room_for():
    """A token of 100,000 letters took minutes to draw, and of 1,000 the whole picture."""
    figure = viz.grid(np.full((2, 2, 2), 0.5, np.float32), ["x" * 100_000, "b" * 1000])
    figure.savefig(io.BytesIO())
    names = [name for axes in figure.axes for name in labels(axes.get_yticklabels())]
    assert f"{'x' * 40}…" in names and max(map(len, names)) == 41
