"""Pictures of a run: where its attention looks, how its loss fell and its BLEU rose. PNG, without a
screen."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.files import replace
from experiments.translation.console import visible


_TOKEN = 0.24  # inches for a row or column, so that its label can be read
_LABEL = 0.8  # inches for the labels of an axis
_TITLE = 0.085  # inches for a letter of the title
_DPI = 120


def draw_attention(
    weights: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str, path: Path
) -> None:
    """Draws all heads of one attention side by side.

    Args:
        weights: `[N, T, S]`, each row summing to 1.
        rows: the T tokens that attend.
        columns: the S tokens that are attended to.
        title: stands above.
        path: of the PNG file.
    """
    heads = len(weights)
    across = _panels_across(heads)
    down = math.ceil(heads / across)
    width = across * (_TOKEN * len(columns) + _LABEL) + 1.2
    height = down * (_TOKEN * len(rows) + _LABEL + 0.3) + 0.4
    figure = Figure(figsize=(max(width, _TITLE * len(title)), height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    panels = list(grid.flat)
    image = None
    for head, panel in enumerate(panels[:heads]):
        image = panel.imshow(weights[head], vmin=0, vmax=1, cmap="Blues", aspect="equal")
        panel.set_title(f"head {head + 1}", fontsize=9)
        _label(panel, rows, columns)
    for panel in panels[heads:]:
        panel.set_axis_off()
    if image is not None:
        figure.colorbar(image, ax=panels, shrink=0.6, label="weight")
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def draw_sentence(
    weights: Mapping[str, np.ndarray],
    source: Sequence[str],
    target_in: Sequence[str],
    target_out: Sequence[str],
    directory: Path,
) -> list[Path]:
    """Draws every attention of a model on one sentence, and returns the files.

    Args:
        weights: `[N, T, S]` for each attention, by the module's name.
        source: the tokens that the encoder reads.
        target_in: the tokens that the decoder reads.
        target_out: the tokens that it generates there.
        directory: where the files go.
    """
    tokens = {
        "encoder self-attention": (source, source, "each word of the source reads the source"),
        "decoder self-attention": (target_in, target_in, "each word reads those before it"),
        "cross-attention": (target_out, source, "each word, as it is generated, reads the source"),
    }
    files = []
    for name, layer, heads in _attentions(weights):
        rows, columns, meaning = tokens[name]
        path = directory / f"{name.replace(' ', '-')}-layer-{layer}.png"
        title = f"{name}, layer {layer}: {meaning}"
        draw_attention(heads[:, : len(rows), : len(columns)], rows, columns, title, path)
        files.append(path)
    return files


def draw_losses(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the loss of a run against its steps, from its metrics."""
    curves = {
        "loss": ("training, as it is minimised", "-"),
        "validation_loss": ("validation, without label smoothing", "o-"),
    }
    _draw_curves(records, curves, "nats per token", path, scale="log")


def draw_bleu(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the validation BLEU of a run against its steps, from its metrics."""
    curves = {
        "validation_bleu": ("BLEU, sacrebleu's tokens", "o-"),
        "validation_word_bleu": ("BLEU, the model's words, unsmoothed", "o--"),
    }
    _draw_curves(records, curves, "validation BLEU", path, scale="linear")


def _draw_curves(
    records: Sequence[Mapping[str, Any]],
    curves: Mapping[str, tuple[str, str]],
    unit: str,
    path: Path,
    *,
    scale: str,
) -> None:
    """Draws figures of the records over their steps.

    Args:
        records: the metrics.
        curves: for each figure its label and style.
        unit: what the figures are.
        path: of the PNG file.
        scale: of their axis.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, (label, style) in curves.items():
        found = [(record["step"], record.get(key)) for record in records]
        points = [(step, value) for step, value in found if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set_yscale(scale)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend()
    _save(figure, path)


def _panels_across(heads: int) -> int:
    """As nearly square as can be, and without gaps if four panels a row or fewer allow it."""
    square = math.ceil(math.sqrt(heads))
    return next((count for count in range(square, 5) if heads % count == 0), square)


def _label(panel: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    # A dollar sign in a text is a dollar sign and begins no formula.
    style: dict[str, Any] = {"fontsize": 8, "parse_math": False}
    panel.set_xticks(range(len(columns)), _visible(columns), rotation=90, **style)
    panel.set_yticks(range(len(rows)), _visible(rows), **style)
    panel.tick_params(length=0, labelbottom=True, labelleft=True)


def _visible(tokens: Sequence[str]) -> list[str]:
    """Tokens with their spaces as low blocks: where they are pieces, that is where words begin."""
    return [visible(token.replace(" ", "\u2581")) for token in tokens]


def _save(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    replace(path, content.getvalue())


def _attentions(weights: Mapping[str, np.ndarray]) -> list[tuple[str, int, np.ndarray]]:
    """What each attention is, its layer from 1 on, and its weights."""
    found = []
    for module, heads in weights.items():
        side, *layer, kind = module.split("/")  # such as decoder/layers/0/cross_attention
        name = f"{side} self-attention" if kind == "self_attention" else "cross-attention"
        found.append((name, int(layer[-1]) + 1 if layer else 1, heads))
    return sorted(found, key=lambda item: item[:2])
