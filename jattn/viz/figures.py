"""Matplotlib figures: a matrix, the heads of all layers, a mask with its tiles, an alignment.

The functions do not use `pyplot` or its list of open figures. A notebook displays a figure at the
end of a cell; `figure.savefig(path)` writes it to a file.

The colours suit colour-blind readers: weights have a scale of one hue by lightness, and signed
values a scale from purple through white to orange.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from jattn._types import AnyArray, Positions
from jattn.checks import check_flag, check_size, shown
from jattn.masks import EMPTY, FULL, MIXED, Mask, MaskLike, Span, as_mask, tile_map
from jattn.viz.inputs import checked_title, checked_tokens, checked_values, label


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # annotations checked at run time must not need matplotlib
    Axes = Figure = Any

__all__ = ["alignment", "grid", "heatmap", "show_mask"]


_MOST_LABELS = 64  # most tokens along an axis that are labelled; of more, every n-th
_MOST_NUMBERS = 100  # most cells that show their values by default
_LABEL = 0.105  # inches for a character of a label
_CELL = 0.3  # inches for a cell with a label
_LARGEST = 9.0  # inches of the largest panel


def heatmap(
    weights: AnyArray,
    q_tokens: Sequence[str] | None = None,
    kv_tokens: Sequence[str] | None = None,
    *,
    title: str | None = None,
    values: bool | None = None,
    axes: Axes | None = None,
) -> Figure:
    """Draws one matrix: a row for each query, a column for each key.

    The colour scale goes from 0 to 1, or to the greatest number if that is larger. With negative
    numbers the scale is symmetric around 0. A masked pair has no number: neither a weight of
    exactly 0 nor −inf, which `attention_scores` returns for it and which is grey.

    Args:
        weights: `[T, S]`, real and finite or −inf: weights, scores, or a difference of two.
        q_tokens: T strings beside the rows, or None for numbers. Of more than 64 tokens, every
            n-th is written.
        kv_tokens: S strings below the columns; by default `q_tokens` if T = S.
        title: a title above the figure.
        values: whether each cell shows its number; None: if there are at most 100 cells.
        axes: the matplotlib axes to draw in; by default those of a new figure.

    Returns:
        The figure.

    Raises:
        TypeError, ValueError: for invalid arguments.
        ImportError: if matplotlib is not installed.

    >>> jattn.viz.heatmap(jattn.attention_scores(q, k, mask=masks.Causal())[0, 0])
    <NotebookFigure size ... with 2 Axes>
    """
    array = checked_values("weights", weights, "[T, S]", (2,), masked=True)
    rows, columns = _labels(array.shape, q_tokens, kv_tokens)
    title = checked_title("title", title)
    check_flag("values", values, or_none=True)
    axes, figure = _axes(axes, _panel_size(rows, columns, array.shape, _CELL), title)
    image = _draw(axes, array, _scale(array))
    _name_axes(axes, rows, columns)
    if values or (values is None and array.size <= _MOST_NUMBERS):
        _write_values(axes, array, image)
    if title is not None:
        axes.set_title(title, fontsize=11, parse_math=False)
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def grid(
    weights: AnyArray,
    q_tokens: Sequence[str] | None = None,
    kv_tokens: Sequence[str] | None = None,
    *,
    title: str | None = None,
    titles: Sequence[str] | None = None,
) -> Figure:
    """Draws many heads side by side, with a row of panels for each layer.

    All panels share one colour scale, as in `heatmap`. Tokens are written beside the outer panels,
    as many as are legible there.

    Args:
        weights: `[L, N, T, S]`, or `[N, T, S]` for one layer.
        q_tokens: T strings beside the rows, or None.
        kv_tokens: S strings below the columns; by default `q_tokens` if T = S.
        title: a title above all panels.
        titles: a title above each panel, L × N strings; by default layer and head, from 1.

    Returns:
        The figure.

    Raises:
        TypeError, ValueError: for invalid arguments.
        ImportError: if matplotlib is not installed.

    >>> jattn.viz.grid(jattn.attention_weights(q, k)[0])
    <NotebookFigure size ... with 5 Axes>
    """
    array = checked_values("weights", weights, "[L, N, T, S] or [N, T, S]", (3, 4), masked=True)
    array = array.reshape(-1, *array.shape[-3:])
    L, N, T, S = array.shape
    rows, columns = _labels((T, S), q_tokens, kv_tokens)
    title = checked_title("title", title)
    names = checked_tokens("titles", titles, L * N, "L × N") or _head_names(L, N)
    cell = _CELL if L * N <= 4 else 0.2
    width, height = _panel_size(
        None, None, (T, S), min(cell, 2.4 / max(T, S)) if L * N > 12 else cell
    )
    size = N * (width + 0.15) + _room(rows) + 0.7, L * (height + 0.3) + _room(columns) + 0.3
    figure = _new_figure(size, title)
    panels = figure.subplots(L, N, squeeze=False, sharex=True, sharey=True)
    scale = _scale(array)
    font = 11 if L * N <= 4 else 9
    for index, panel in enumerate(panels.flat):
        _draw(panel, array[divmod(index, N)], scale)
        panel.set_title(label(names[index]), fontsize=font, parse_math=False)
        _name_axes(panel, rows, columns, font=font, most=(int(height / 0.13), int(width / 0.13)))
        panel.label_outer()
    figure.colorbar(panels[0, 0].images[0], ax=panels.ravel().tolist(), shrink=0.7, aspect=30)
    if title is not None:
        figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def alignment(
    weights: AnyArray,
    target: Sequence[str],
    source: Sequence[str],
    *,
    title: str | None = None,
    axes: Axes | None = None,
) -> Figure:
    """Draws the weights of each target word on the source, as in Bahdanau, Cho and Bengio 2015.

    The source is above, the target at the left, and a weight of 1 is white. A frame marks the
    greatest weight of each target word.

    Args:
        weights: `[T, S]`, or `[N, T, S]`, whose mean over heads is drawn.
        target: T strings.
        source: S strings.
        title: a title below the figure.
        axes: the matplotlib axes to draw in; by default those of a new figure.

    Returns:
        The figure.

    Raises:
        TypeError, ValueError: for invalid arguments and for negative weights.
        ImportError: if matplotlib is not installed.

    >>> jattn.viz.alignment(jnp.eye(2), ["good", "day"], ["guten", "Tag"])
    <NotebookFigure size ... with 1 Axes>
    """
    array = checked_values("weights", weights, "[T, S] or [N, T, S]", (2, 3))
    if array.min() < 0:
        raise ValueError(f"weights: expected numbers >= 0, got {array.min()}")
    array = array.reshape(-1, *array.shape[-2:]).mean(axis=0)
    rows = _required("target", target, array.shape[0], "T")
    columns = _required("source", source, array.shape[1], "S")
    title = checked_title("title", title)
    axes, figure = _axes(axes, _panel_size(rows, columns, array.shape, _CELL), title)
    axes.imshow(array, cmap="gray", vmin=0, vmax=max(1, array.max()), aspect="equal")
    _name_axes(axes, rows, columns, names=("", title or ""))
    axes.tick_params(labeltop=True, labelbottom=False)
    x, y = 0.43 * np.array([-1, 1, 1, -1, -1]), 0.43 * np.array([-1, -1, 1, 1, -1])
    for row, column in enumerate(array.argmax(axis=1).tolist()):
        if array[row].any():
            axes.plot(column + x, row + y, color="tab:orange", linewidth=1.5)
    return figure


def show_mask(
    mask: MaskLike,
    T: int,
    S: int | None = None,
    *,
    block: int | tuple[int, int] | None = None,
    b: int = 0,
    h: int = 0,
    q_tokens: Sequence[str] | None = None,
    kv_tokens: Sequence[str] | None = None,
    title: str | None = None,
    **positions: Unpack[Positions],
) -> Figure:
    """Draws a mask by pairs, and beside it the kind of each tile: empty, mixed or full.

    Attention skips empty tiles, and computes full ones without evaluating the mask.

    Args:
        mask: a mask of `jattn.masks`, or a boolean array `[*B, N, T, S]` in which True attends.
        T: the number of queries.
        S: the number of keys; None: T.
        block: the size of a tile, an integer or a pair (queries, keys); None: a power of two for
            which there are about eight tiles along an axis.
        b: the batch row, counted over all batch axes.
        h: the head.
        q_tokens: T strings beside the rows, or None for numbers.
        kv_tokens: S strings below the columns; by default `q_tokens` if T = S.
        title: a title above the figure.
        positions: q_positions, integer `[T]`, and kv_positions, integer `[S]`; by default arange.

    Returns:
        The figure.

    Raises:
        TypeError, ValueError: for invalid arguments.
        ImportError: if matplotlib is not installed.

    >>> jattn.viz.show_mask(masks.Causal() & masks.Window(left=4), 16)
    <NotebookFigure size ... with 2 Axes>
    """
    S = T if S is None else S
    for name, size in (("T", T), ("S", S)):
        check_size(name, size)
    blocks = checked_block("block", block, T, S)
    rows, columns = _labels((T, S), q_tokens, kv_tokens)
    title = checked_title("title", title)
    kinds = np.asarray(tile_map(as_mask(mask), T, S, *blocks, b=b, h=h, **positions))
    allowed = dense_mask(as_mask(mask), T, S, b, h, **positions)
    width, height = _panel_size(rows, columns, (T, S), min(_CELL, 3.6 / max(T, S)))
    figure = _new_figure((2 * max(width, 2.6) + 0.8, max(height, 2.2) + 1.2), title)
    left, right = figure.subplots(1, 2)
    left.imshow(allowed, cmap=_tile_colours(2), vmin=0, vmax=1, interpolation="nearest")
    _name_axes(left, rows, columns, most=(24, 24))
    _draw_tiles(right, kinds, (T, S), blocks)
    _name_axes(right, None, None)
    left.set_title(f"{allowed.mean():.0%} of {T} × {S} pairs", fontsize=10)
    right.set_title(f"tiles of {blocks[0]} × {blocks[1]}", fontsize=10)
    figure.legend(handles=_legend(kinds), loc="outside lower center", ncols=3, frameon=False)
    if title is not None:
        figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def dense_mask(
    mask: Mask, T: int, S: int, b: int, h: int, **positions: Unpack[Positions]
) -> np.ndarray:
    """Returns the mask of one batch row and head, at checked positions, as bool `[T, S]`."""
    given_positions = positions.get("q_positions"), positions.get("kv_positions")
    q, kv = (
        np.arange(size, dtype=np.int32) if x is None else np.asarray(x)
        for size, x in zip((T, S), given_positions, strict=True)
    )
    spans = Span(q, np.arange(T, dtype=np.int32)), Span(kv, np.arange(S, dtype=np.int32))
    return np.asarray(mask(b, h, *spans))


def checked_block(name: str, block: Any, T: int, S: int) -> tuple[int, int]:
    """Returns the sizes of a tile, by default a power of two: about eight tiles along an axis."""
    if block is None:
        size = 2 ** max(0, math.ceil(math.log2(max(T, S) / 8)))
        return size, size
    pair = block if isinstance(block, tuple) else (block, block)
    if len(pair) != 2:
        raise ValueError(f"{name}: expected an integer or two, got {shown(block)}")
    for size in pair:
        check_size(name, size)
    return int(pair[0]), int(pair[1])


def _required(name: str, value: Any, size: int, letter: str) -> list[str]:
    tokens = checked_tokens(name, value, size, letter)
    if tokens is None:
        raise TypeError(f"{name}: expected a sequence of {letter} strings, got None")
    return tokens


def _labels(
    shape: tuple[int, ...], q_tokens: Any, kv_tokens: Any
) -> tuple[list[str] | None, list[str] | None]:
    """Returns the labels of rows and columns; `kv_tokens` defaults to `q_tokens` if T = S."""
    T, S = shape
    rows = checked_tokens("q_tokens", q_tokens, T, "T")
    if kv_tokens is None and rows is not None and T == S:
        return rows, rows
    return rows, checked_tokens("kv_tokens", kv_tokens, S, "S")


def _head_names(L: int, N: int) -> list[str]:
    if L == 1:
        return [f"head {n + 1}" for n in range(N)]
    return [f"layer {layer + 1}, head {n + 1}" for layer in range(L) for n in range(N)]


def _room(labels: list[str] | None) -> float:
    """Returns the inches that the labels of an axis take."""
    return 0.4 if labels is None else _LABEL * max(map(len, map(label, labels))) + 0.2


def _panel_size(
    rows: list[str] | None, columns: list[str] | None, shape: tuple[int, ...], cell: float
) -> tuple[float, float]:
    """Returns the width and height in inches of a panel with its labels."""
    T, S = shape
    cell = min(cell, _LARGEST / max(T, S))
    width, height = max(0.8, cell * S), max(0.8, cell * T)
    labelled = rows is not None or columns is not None
    return (width + _room(rows), height + _room(columns)) if labelled else (width, height)


def _new_figure(size: tuple[float, float], title: str | None) -> Figure:
    from jattn.viz.matplotlib_figure import new_figure  # noqa: PLC0415  only drawing needs matplotlib

    return new_figure((max(size[0], 0.09 * len(title or "")), size[1]))


def _axes(axes: Axes | None, size: tuple[float, float], title: str | None) -> tuple[Axes, Figure]:
    """Returns the axes to draw in and their figure."""
    if axes is None:
        figure = _new_figure((size[0] + 1.0, size[1] + 0.5), title)
        return figure.subplots(), figure
    if not hasattr(axes, "imshow") or not hasattr(axes, "figure"):
        raise TypeError(f"axes: expected axes of matplotlib or None, got {shown(axes)}")
    figure: Any = axes.figure
    return axes, figure


def _scale(array: np.ndarray) -> dict[str, Any]:
    """Returns the colour map and its limits: from 0, or symmetric around 0 for signed values."""
    finite = array[np.isfinite(array)]
    least, most = (finite.min(), finite.max()) if finite.size else (0, 1)
    if least < 0:
        end = max(-least, most)
        return {"cmap": "PuOr_r", "vmin": -end, "vmax": end}
    return {"cmap": "Blues", "vmin": 0, "vmax": max(1, most)}


def _draw(axes: Axes, array: np.ndarray, scale: dict[str, Any]) -> Any:
    axes.set_facecolor("0.8")  # shows through at masked pairs
    visible_cells = np.ma.masked_invalid(array)
    return axes.imshow(visible_cells, aspect="equal", interpolation="nearest", **scale)


def _name_axes(
    axes: Axes,
    rows: list[str] | None,
    columns: list[str] | None,
    *,
    names: tuple[str, str] = ("query", "key"),
    font: int = 9,
    most: tuple[int, int] = (_MOST_LABELS, _MOST_LABELS),
) -> None:
    """Names the axes, and labels at most `most` rows and columns by tokens or by integers."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    # A dollar sign in a token must not begin a formula.
    style: dict[str, Any] = {"fontsize": font, "parse_math": False}
    sides = zip((axes.yaxis, axes.xaxis), (rows, columns), names, most, strict=True)
    for axis, tokens, name, count in sides:
        axis.set_label_text(name, fontsize=10, parse_math=False)
        if tokens is None:
            options: dict[str, Any] = {"integer": True, "min_n_ticks": 1, "steps": [1, 2, 5, 10]}
            axis.set_major_locator(MaxNLocator("auto", **options))
        else:
            labelled = range(0, len(tokens), -(-len(tokens) // max(1, count)))
            axis.set_ticks(labelled, [label(tokens[index]) for index in labelled], **style)
    axes.tick_params(axis="x", length=0, labelrotation=0 if columns is None else 90)
    axes.tick_params(axis="y", length=0)


def _write_values(axes: Axes, array: np.ndarray, image: Any) -> None:
    """Writes the number of each allowed pair into its cell, in black or white for contrast."""
    masked = (array == -np.inf) | ((array == 0) & (array.min() == 0))
    for row, column in np.argwhere(~masked):
        value = array[row, column]
        ink = "white" if _luminance(image.to_rgba(value)) < 0.179 else "black"
        text = f"{value:.2f}".replace("-", "−")
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color=ink)


def _luminance(colour: Sequence[float]) -> float:
    """Returns the relative luminance of WCAG 2; white and black on 0.179 have equal contrast."""
    channels = np.asarray(colour[:3])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


_KINDS = {  # kinds of tiles: name, colour, hatching
    EMPTY: ("empty", "#f2f2f2", "///"),
    MIXED: ("mixed", "#92c5de", ""),
    FULL: ("full", "#08519c", ""),
}


def _tile_colours(count: int) -> Any:
    from matplotlib.colors import ListedColormap  # noqa: PLC0415

    colours = [colour for _, colour, _ in _KINDS.values()]
    return ListedColormap([colours[0], colours[-1]] if count == 2 else colours)


def _draw_tiles(
    axes: Axes, kinds: np.ndarray, shape: tuple[int, int], blocks: tuple[int, int]
) -> None:
    """Draws each tile in the colour of its kind, with lines between; the last may be smaller."""
    (T, S), (block_q, block_kv) = shape, blocks
    tile_of_pair = np.ix_(np.arange(T) // block_q, np.arange(S) // block_kv)
    axes.imshow(kinds[tile_of_pair], cmap=_tile_colours(3), vmin=0, vmax=2, interpolation="nearest")
    if max(kinds.shape) <= 64:
        style: dict[str, Any] = {"color": "white", "linewidth": 0.8}
        for row in range(block_q, T, block_q):
            axes.axhline(row - 0.5, **style)
        for column in range(block_kv, S, block_kv):
            axes.axvline(column - 0.5, **style)


def _legend(kinds: np.ndarray) -> list[Any]:
    from matplotlib.patches import Patch  # noqa: PLC0415

    return [
        Patch(facecolor=colour, edgecolor="0.6", label=f"{np.count_nonzero(kinds == kind)} {name}")
        for kind, (name, colour, _) in _KINDS.items()
    ]
