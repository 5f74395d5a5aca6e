"""Draws pictures of a run without a screen: its attention, loss and BLEU as PNG files, and a page
that shows every head in a browser."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from experiments.runs.files import replace
from jattn import masks, viz


_DPI = 120

_MEANINGS = {
    "encoder self-attention": "each source word attends to the source",
    "decoder self-attention": "each word attends to itself and the words before it",
    "cross-attention": "each generated word attends to the source",
}


@dataclass(frozen=True)
class Seen:
    """A sentence, its translation, and the attention weights of every head.

    Attributes:
        weights: the weights `[N, T, S]` of each attention, by the module's name.
        source: the tokens that the encoder reads.
        target_in: the tokens that the decoder reads.
        target_out: the tokens that the decoder generates.
    """

    weights: Mapping[str, np.ndarray]
    source: Sequence[str]
    target_in: Sequence[str]
    target_out: Sequence[str]

    def tokens(self, name: str) -> tuple[Sequence[str], Sequence[str]]:
        """Returns the tokens of the queries and of the keys of an attention."""
        return {
            "encoder self-attention": (self.source, self.source),
            "decoder self-attention": (self.target_in, self.target_in),
            "cross-attention": (self.target_out, self.source),
        }[name]

    def attentions(self) -> dict[str, np.ndarray]:
        """Returns the weights `[L, N, T, S]` of each attention without padding, the encoder's
        first."""
        layers: dict[str, list[tuple[int, np.ndarray]]] = {name: [] for name in _MEANINGS}
        for module, heads in self.weights.items():
            side, *layer, kind = module.split("/")  # such as decoder/layers/0/cross_attention
            name = f"{side} self-attention" if kind == "self_attention" else "cross-attention"
            rows, columns = self.tokens(name)
            number = int(layer[-1]) if layer else 0
            layers[name].append((number, heads[:, : len(rows), : len(columns)]))
        return {
            name: np.stack([heads for _, heads in sorted(numbered, key=lambda item: item[0])])
            for name, numbered in layers.items()
            if numbered
        }


def draw_sentence(seen: Seen, directory: Path) -> list[Path]:
    """Draws the attention on a sentence: the clearest head of the cross-attention at readable size,
    and all heads of each attention.

    Args:
        seen: the sentence.
        directory: the directory of the files.

    Returns:
        The files.
    """
    attentions = seen.attentions()
    files = [directory / "attention.png"]
    cross_attention = attentions["cross-attention"]
    layer, head = viz.clearest_head(cross_attention)
    title = f"cross-attention, layer {layer + 1}, head {head + 1}"
    tokens = seen.tokens("cross-attention")
    figure = viz.heatmap(cross_attention[layer, head], *tokens, title=title, values=False)
    _save(figure, files[0])
    for name, weights in attentions.items():
        files.append(directory / f"{name.replace(' ', '-')}.png")
        title = f"{name}: {_MEANINGS[name]}"
        _save(viz.grid(weights, *seen.tokens(name), title=title), files[-1])
    return files


def write_viewer(sentences: Sequence[Seen], title: str, path: Path) -> None:
    """Writes a page that shows every head on several sentences."""
    page = viz.viewer([_for_viewer(seen) for seen in sentences], title=title)
    replace(path, page.html)


def _for_viewer(seen: Seen) -> viz.Sentence:
    attentions = seen.attentions()
    tokens = {name: seen.tokens(name) for name in attentions}
    return viz.Sentence(
        attentions,
        {name: rows for name, (rows, _) in tokens.items()},
        {name: columns for name, (_, columns) in tokens.items()},
        mask={name: masks.Causal() for name in attentions if name.startswith("decoder")},
    )


def draw_losses(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the loss of a run over its steps, from its metrics: that of training and that of
    validation, both without label smoothing."""
    curves = {"unsmoothed_loss": ("training", "-"), "validation_loss": ("validation", "o-")}
    axes = _draw_curves(records, curves, "nats per token, without label smoothing")
    axes.set_yscale("log")
    _name_ticks(axes)
    _save(axes.figure, path)


def draw_bleu(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the validation BLEU of a run over its steps, from its metrics. The axis begins at 0."""
    curves = {
        "validation_bleu": ("BLEU, sacrebleu's tokens", "o-"),
        "validation_word_bleu": ("BLEU, the model's words, unsmoothed", "o--"),
    }
    axes = _draw_curves(records, curves, "validation BLEU")
    axes.set_ylim(0, 1.1 * max([1, *(line.get_ydata().max() for line in axes.get_lines())]))
    _save(axes.figure, path)


def _draw_curves(
    records: Sequence[Mapping[str, Any]], curves: Mapping[str, tuple[str, str]], unit: str
) -> Any:
    """Draws values of the records over their steps in a new figure, and returns its axes.

    Args:
        records: the metrics.
        curves: the label and style of each key of the records.
        unit: the label of the y axis.
    """
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for key, (label, style) in curves.items():
        points = [
            (record["step"], record[key]) for record in records if record.get(key) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.xaxis.set_major_locator(
        MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    )
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend()
    return axes


def _name_ticks(axes: Any) -> None:
    """Labels a logarithmic axis with plain numbers: 0.5, not 5 × 10⁻¹."""
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _save(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    replace(path, content.getvalue())
