"""Pictures of attention: figures by matplotlib, and a viewer in one HTML file.

`heatmap`, `grid`, `show_mask` and `alignment` return matplotlib figures; matplotlib is imported
when the first figure is drawn. `viewer` makes an HTML page that shows all heads of a model. All
functions take plain arrays and tokens, from any library. `weights_at` computes selected rows of the
weights where the whole `[T, S]` matrix would not fit in memory.
"""

from jattn.viz.figures import alignment, grid, heatmap, show_mask
from jattn.viz.head_numbers import clearest_head, head_numbers
from jattn.viz.rows import weights_at
from jattn.viz.viewer import Sentence, Viewer, stack_layers, viewer


__all__ = [
    "Sentence",
    "Viewer",
    "alignment",
    "clearest_head",
    "grid",
    "head_numbers",
    "heatmap",
    "show_mask",
    "stack_layers",
    "viewer",
    "weights_at",
]
__dir__ = __all__.copy
