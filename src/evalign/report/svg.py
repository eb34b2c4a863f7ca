"""Matplotlib figures as SVG that takes its colours from the page, so that one drawing serves light and dark.

Lines are drawn in stand-in colours, which are then replaced by CSS: `currentColor` for ink, variables for the rest.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, GRID = "#010203", "#020304"
COLOURS = {
    "ours": "#030401",
    "cross_entropy": "#030402",
    "random_forest": "#030403",
    "gradient_boosting": "#030404",
}
OTHER = "#030405"
_CSS = {INK: "currentColor", GRID: "var(--grid)", OTHER: "var(--c5)"} | {
    stand_in: f"var(--c{i})" for i, stand_in in enumerate(COLOURS.values(), 1)
}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it is small, can be read aloud and takes the page's font
    "text.parse_math": False,  # a label may hold a dollar sign
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.7,
}


def colour(contender: str) -> str:
    return COLOURS.get(contender, OTHER)


@contextmanager
def drawing(name: str, width: float, height: float) -> Iterator[Figure]:
    """A figure in our style; `name` keeps the ids of two drawings on one page apart. No window system is touched."""
    settings: Any = STYLE | {"svg.hashsalt": name}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure


def to_svg(figure: Figure, description: str) -> str:
    """The drawing as an <svg> element that scales with its container."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    for stand_in, css in _CSS.items():
        svg = svg.replace(stand_in, css)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height|xmlns:xlink|version)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(description, quote=True)}">{rest}'.strip()
