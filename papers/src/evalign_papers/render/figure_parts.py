"""Sizes, colours and legend shared by the page's figures."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evalign.report.plots import TINTS as PAGE_TINTS

WIDTH = 5.4  # inches at 72 per inch: about a phone's width
TINTS = PAGE_TINTS[:5]


class Drawn(NamedTuple):
    title: str
    svg: str
    caption: str


def shared_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend below all panels, with each label once."""
    found: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= {str(label): handle for label, handle in zip(labels, handles, strict=True)}
    if found:
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=min(5, len(found)))
