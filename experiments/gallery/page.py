"""Writes the page: for each variant its formula, a picture of its weights, times and code."""

import inspect
import io
import sys
from collections.abc import Mapping

import jax
import numpy as np

import jattn
from experiments.gallery import plain, variants
from experiments.gallery.measuring import Measurement, Times
from experiments.gallery.variant import Variant
from experiments.gallery.variants import GROUPS, load
from experiments.walkthrough.elements import (
    code_block,
    document,
    escape,
    fold,
    marked,
    paragraphs,
    picture,
)
from experiments.walkthrough.step import Code


TITLE = "A gallery of attention"
_TOKENS = 64
_STYLE = """
.table { overflow-x: auto; margin: 0 0 0.9rem; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid var(--edge); }
th { font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: 400; color: var(--faint); padding-top: 0.8rem; }
.paper { color: var(--faint); font-size: 0.92rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  table { font-size: 0.85rem; }
  th, td { padding: 0.2rem 0.35rem; }
}
"""
_ABOUT = (
    "Each variant of attention below is a few lines that call jattn. They were checked against the "
    "formula in plain `jax.numpy`, which holds a matrix of all pairs: output and all gradients "
    "agree. Both were compiled for this machine and timed, in float32, with "
    f"{plain.HEADS} heads of {plain.SIZE} channels; other sizes are in the code.",
    "“Times as fast” is the time of the plain formula divided by jattn's. “Skipped” is the share "
    "of tiles of 128 × 128 pairs that jattn does not compute, at the greatest length. Memory (MB) "
    "is that of temporary arrays. Pictures show the weights of two heads for 64 random tokens.",
)


def written(measurements: Mapping[str, Measurement]) -> str:
    """Returns the page for the measurements of variants by name."""
    sections = "".join(_section(name, load(name), x) for name, x in measurements.items())
    body = f"""<header>
<h1>{TITLE}</h1>
{paragraphs(_ABOUT)}</header>
<nav aria-label="variants">
{_summary(measurements)}</nav>
<main>
{sections}</main>
"""
    return document(TITLE, body, _STYLE)


def _summary(measurements: Mapping[str, Measurement]) -> str:
    """Returns the table of all variants, which links to their sections."""
    lengths = [*next(iter(measurements.values())).forward]
    headings = [f"{T:,}" for T in lengths] + [f"{lengths[0]:,}\N{NO-BREAK SPACE}∇"]
    rows = []
    for group, names in GROUPS.items():
        measured = [name for name in names.split() if name in measurements]
        if measured:
            rows.append(f'<tr><th colspan="{2 + len(headings)}">{escape(group)}</th></tr>')
        for name in measured:
            x = measurements[name]
            times = [*x.forward.values(), x.backward]
            link = f'<a href="#{escape(name)}">{escape(load(name).title)}</a>'
            rows.append(_row([link, f"{x.skipped:.0%}", *map(ratio, times)]))
    label = "tiles skipped, and times as fast as the plain formula; ∇: with gradients"
    return _table(["", "skipped", *headings], rows, label)


def ratio(times: Times) -> str:
    """Formats how many times as fast jattn is."""
    value = times.dense / times.jattn
    return f"{value:.0f}" if value >= 9.95 else f"{value:#.2g}"


def _section(name: str, variant: Variant, x: Measurement) -> str:
    """Returns the section of a variant."""
    label = escape(name)
    return f"""<section id="{label}">
<h2><a href="#{label}">{escape(variant.title)}</a></h2>
{paragraphs(variant.blocks)}<p class="paper">{marked(variant.paper)}</p>
{_picture(variant)}{_times(x)}{_code(name)}</section>
"""


def _times(x: Measurement) -> str:
    """Returns the table of times and memory of a variant."""
    passes = {f"{T:,}": times for T, times in x.forward.items()}
    passes[f"{next(iter(x.forward)):,}\N{NO-BREAK SPACE}∇"] = x.backward
    rows = []
    for label, times in passes.items():
        memory = (f"{size / 1e6:,.2f}" for size in (times.jattn_bytes, times.dense_bytes))
        rows.append(_row([label, f"{times.jattn:,.1f}", f"{times.dense:,.1f}", *memory]))
    headings = ["tokens", "jattn, ms", "plain, ms", "jattn, MB", "plain, MB"]
    error = f"largest difference {x.error:.0e} of the maximum; {x.skipped:.0%} of tiles skipped"
    return _table(headings, rows, error)


def _row(cells: list[str]) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _table(headings: list[str], rows: list[str], label: str) -> str:
    heads = "".join(f"<th>{escape(x)}</th>" for x in headings)
    body = "\n".join(rows)
    return (
        f'<p class="label">{escape(label)}</p>\n<div class="table" tabindex="0"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n"
    )


def _code(name: str) -> str:
    """Returns the code of a variant's file; its imports are folded."""
    source = inspect.getsource(sys.modules[f"{variants.__name__}.{name}"]).split('"""', 2)[2]
    imports, _, lines = source.strip().partition("\n\n\n")
    folded = fold("imports", code_block(Code("imports", "python", imports)))
    return folded + code_block(Code("code", "python", lines))


def picture_of(variant: Variant) -> bytes:
    """Draws the weights of a variant's heads as a PNG file."""
    inputs = variant.inputs(jax.random.key(0), _TOKENS)
    # Smaller products, so that the picture shows more than a few keys of each query.
    weights = np.asarray(jax.jit(variant.drawn_weights)({**inputs, "q": inputs["q"] / 4}))
    figure = jattn.viz.grid(weights)
    if 0 <= weights.min() and weights.max() < 0.5:  # hardly visible on a scale that ends at 1
        for panel in figure.axes[: len(weights)]:
            panel.images[0].set_clim(0, weights.max())
    figure.set_size_inches(6.4, 3.35)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=144)
    return content.getvalue()


def _picture(variant: Variant) -> str:
    sizes = f"{plain.HEADS} heads, {_TOKENS} queries by their keys"
    return picture(picture_of(variant), f"weights of {variant.title}: {sizes}")
