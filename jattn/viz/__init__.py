"""Pictures of attention: figures by matplotlib, and a viewer in one HTML file.

`heatmap`, `grid`, `show_mask` and `alignment` return figures of matplotlib, which is imported when
the first of them draws. `viewer` makes a page to look at all heads of a model. All take plain
arrays and tokens, from any library; `weights_at` computes a few rows of what is too long to hold.
"""

from jattn.viz.figures import alignment, grid, heatmap, show_mask
from jattn.viz.head_numbers import head_numbers
from jattn.viz.rows import weights_at
from jattn.viz.viewer import Sentence, Viewer, stack_layers, viewer


__all__ = [
    "Sentence",
    "Viewer",
    "alignment",
    "grid",
    "head_numbers",
    "heatmap",
    "show_mask",
    "stack_layers",
    "viewer",
    "weights_at",
]


def __dir__() -> list[str]:
    return __all__
