"""A small SVG picture of a tile map, which notebooks show as a mask's representation."""

import itertools
from typing import Any

import numpy as np


_SIDE = 192  # pixels along the longer axis
_COLOURS = ("#f2f2f2", "#92c5de", "#08519c")  # empty, mixed, full


def tile_picture(kinds: np.ndarray, caption: str) -> str:
    """Returns HTML that shows kinds `[n, m]`: 0 empty, 1 mixed, 2 full."""
    n, m = kinds.shape
    size = _SIDE / max(n, m)
    runs = "".join(
        f'<rect x="{start}" y="{row}" width="{stop - start}" height="1" fill="{_COLOURS[kind]}"/>'
        for row in range(n)
        for start, stop, kind in _runs(kinds[row].tolist())
    )
    return (
        f'<figure style="margin: 0; display: inline-block">'
        f'<svg width="{m * size:.0f}" height="{n * size:.0f}" viewBox="0 0 {m} {n}" '
        f'preserveAspectRatio="none" shape-rendering="crispEdges" role="img" '
        f'aria-label="{caption}" '
        f'style="border: 1px solid #888">{runs}</svg>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _runs(row: list[Any]) -> list[tuple[int, int, int]]:
    """Returns `(start, stop, kind)` of each run of equal kinds in a row."""
    edges = [0, *(j for j in range(1, len(row)) if row[j] != row[j - 1]), len(row)]
    return [(start, stop, row[start]) for start, stop in itertools.pairwise(edges)]
