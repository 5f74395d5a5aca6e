"""Pictures of attention: figures by matplotlib, and a viewer in one HTML file.

`heatmap`, `grid`, `show_mask` and `alignment` return figures of matplotlib, which is imported when
the first of them draws. All take plain arrays and tokens, from any library.
"""

from jattn.viz.figures import alignment, grid, heatmap, show_mask


__all__ = [
    "alignment",
    "grid",
    "heatmap",
    "show_mask",
]


def __dir__() -> list[str]:
    return __all__
