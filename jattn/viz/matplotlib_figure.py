"""The figure class: the only module that imports matplotlib, and itself imported when drawing."""

import io


try:
    from matplotlib.figure import Figure
except ImportError as error:  # pragma: no cover
    raise ImportError("figures are drawn by matplotlib: pip install 'jattn[viz]'") from error


class NotebookFigure(Figure):
    """A figure that a notebook displays without pyplot."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=120)
        return content.getvalue()


def new_figure(size: tuple[float, float]) -> NotebookFigure:
    """Returns an empty figure with constrained layout; `size` is width and height in inches."""
    return NotebookFigure(figsize=size, layout="constrained")
