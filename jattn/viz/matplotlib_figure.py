"""The one place that imports matplotlib, when something is drawn."""

import io


try:
    from matplotlib.figure import Figure
except ImportError as error:  # pragma: no cover
    raise ImportError("figures are drawn by matplotlib: pip install 'jattn[viz]'") from error


class NotebookFigure(Figure):
    """A figure without pyplot that a notebook shows."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=120)
        return content.getvalue()


def new_figure(size: tuple[float, float]) -> NotebookFigure:
    """An empty figure of width and height in inches, whose parts make room for each other."""
    return NotebookFigure(figsize=size, layout="constrained")
