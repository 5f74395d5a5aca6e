"""Draws diagrams of boxes, matrices and arrows as SVG.

Colours are those of the page, which follow the reader's light or dark theme; a diagram that is
saved as a file of its own has the colours of the light theme.
"""

import html
import math
import re


INK, FAINT = "var(--ink, #1b1f24)", "var(--faint, #57606a)"
LINK = "var(--link, #0b5cad)"
# Transparent, so that text on them is legible in both themes.
TONES = ("transparent", "#3b82f640", "#f59e0b40", "#22a06b40", "#a855f740")


class Drawing:
    """An SVG image under construction.

    Attributes:
        width, height: its size in units; a letter of ordinary text is 17 units high.
        label: what readers hear who cannot see it.
    """

    def __init__(self, width: int, height: int, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, text: str, *, size: int = 17, faint: bool = False, anchor="middle"
    ) -> None:
        """Writes text centred at a point; "W_Q" is a W with a small Q below."""
        pieces = re.split(r"_(\w)", html.escape(text))
        # Every second piece is the letter after an underscore.
        for i in range(1, len(pieces), 2):
            pieces[i] = (
                f'<tspan dy="4" font-size="{size * 0.7:.0f}">{pieces[i]}</tspan>'
                '<tspan dy="-4">&#8203;</tspan>'
            )
        self.parts.append(
            f'<text x="{x:g}" y="{y + size * 0.35:g}" font-size="{size}" text-anchor="{anchor}"'
            f' style="fill:{FAINT if faint else INK}">{"".join(pieces)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", *, tone: int = 0
    ) -> None:
        """Draws a box with text in it; `tone` is the number of its colour."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"'
            f' style="fill:{TONES[tone]};stroke:{INK}"></rect>'
        )
        if text:
            self.text(x + width / 2, y + height / 2, text)

    def frame(self, x: float, y: float, width: float, height: float, text: str) -> None:
        """Draws a dashed frame around boxes, with text in its upper left corner."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="9"'
            f' style="fill:none;stroke:{FAINT};stroke-dasharray:5 5"></rect>'
        )
        self.text(x + 12, y + 17, text, size=15, faint=True, anchor="start")

    def matrix(
        self, x: float, y: float, rows: int, columns: int, name: str, *, tone: int = 1
    ) -> None:
        """Draws a matrix of square cells, with its name above and its shape below."""
        cell = 12
        width, height = cell * columns, cell * rows
        self.box(x, y, width, height, tone=tone)
        lines = [f"M{x + cell * n} {y}v{height}" for n in range(1, columns)]
        lines += [f"M{x} {y + cell * n}h{width}" for n in range(1, rows)]
        self.parts.append(f'<path d="{"".join(lines)}" style="stroke:{INK};opacity:0.25"></path>')
        self.text(x + width / 2, y - 13, name)
        self.text(x + width / 2, y + height + 12, f"{rows} × {columns}", size=14, faint=True)

    def line(self, *points: tuple[float, float], width: float = 1.5, opacity: float = 1.0) -> None:
        """Draws a line through points; one without an arrow has the colour of links."""
        self._path(points, f"fill:none;stroke:{LINK};stroke-width:{width:g};opacity:{opacity:g}")

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draws an arrow through points."""
        (x0, y0), (x, y) = points[-2:]
        length = math.hypot(x - x0, y - y0)
        # The direction of the last piece; the head is 10 units long and 8 wide.
        u, v = (x - x0) / length, (y - y0) / length
        base = x - 10 * u, y - 10 * v
        self._path((*points[:-1], base), f"fill:none;stroke:{INK};stroke-width:1.5")
        corners = (x, y), (base[0] - 4 * v, base[1] + 4 * u), (base[0] + 4 * v, base[1] - 4 * u)
        self._path(corners, f"fill:{INK}")

    def _path(self, points: tuple[tuple[float, float], ...], style: str) -> None:
        places = "L".join(f"{x:.4g} {y:.4g}" for x, y in points)
        self.parts.append(f'<path d="M{places}" style="{style}"></path>')

    def svg(self) -> str:
        """Returns the image as an SVG element."""
        content = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
            f' width="{self.width}" height="{self.height}" role="img"'
            f' aria-label="{html.escape(self.label)}"'
            f' font-family="system-ui, DejaVu Sans, sans-serif">\n{content}\n</svg>'
        )
