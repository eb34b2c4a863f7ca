"""Matplotlib figures as SVG that takes its colours from the page, so that one drawing serves light and dark.

Lines are drawn in stand-in colours, which are then replaced by CSS: `currentColor` for ink, variables for the rest.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
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


MARKERS = {"argmax": "o", "tuned": "s", "plug_in": "D"}
WIDTH = 5.4  # inches at 72 per inch: about a phone's width, so that letters stay readable there
MOST_CLASSES = 24


def scores(result: dict[str, Any]) -> str:
    """One line per contender and decision: the score, its interval, and with several splits each split's score."""
    table = [row for row in result["table"][::-1] if row["contender"] != "majority"]
    with drawing("scores", WIDTH, 0.8 + 0.27 * len(table)) as figure:
        axes = figure.add_subplot()
        for y, row in enumerate(table):
            tint, (low, high) = colour(row["contender"]), _interval(row)
            axes.plot([low, high], [y, y], color=tint, solid_capstyle="round", linewidth=2.2)
            axes.plot(row["score"], y, "o", color=tint, markersize=6)
            if len(row["scores"]) > 1:
                axes.plot(row["scores"], [y] * len(row["scores"]), "|", color=tint, markersize=7, alpha=0.55)
        axes.set_yticks(range(len(table)), [_short(row["title"], 34) for row in table])
        axes.set(xlabel=result["metric"]["title"], ylim=(-0.6, len(table) - 0.4))
        axes.grid(axis="y", visible=False)
        return to_svg(
            figure, f"{result['metric']['title']} of every contender with its interval; the table has numbers"
        )


def precision_recall(result: dict[str, Any]) -> str:
    """Two classes: curves on the test rows, with the points that decision rules chose."""
    with drawing("trade-off", WIDTH, 4.2) as figure:
        axes = figure.add_subplot()
        for curve in reversed(result["curves"]):  # ours last, on top of the others
            tint = colour(curve["contender"])
            axes.plot(curve["recall"], curve["precision"], color=tint, label=curve["title"], linewidth=1.4, alpha=0.85)
            for name, (recall, precision) in curve["points"].items():
                chosen = [curve["contender"], name] == result["reference"]
                axes.plot(recall, precision, MARKERS[name], color=tint, markersize=8 if chosen else 5.5)
                if chosen:
                    axes.plot(recall, precision, "o", markersize=16, markerfacecolor="none", markeredgecolor=INK)
        _decision_legend(axes, [name for curve in result["curves"] for name in curve["points"]])
        axes.set(xlabel="recall", ylabel="precision", xlim=(-0.02, 1.02), ylim=(-0.02, 1.04))
        return to_svg(figure, "Precision against recall on the test rows, with the points the decision rules chose")


def class_scores(result: dict[str, Any]) -> str:
    """More classes: precision and recall of every class under each of the rules shown in detail, rare classes first."""
    rows, names = result["class_rows"], result["classes"]
    order = sorted(range(len(names)), key=lambda k: rows[k])[:MOST_CLASSES]
    with drawing("classes", WIDTH, 1.1 + 0.32 * len(order)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, score in ((left, "precision"), (right, "recall")):
            for shift, rule in enumerate(result["per_class"]):
                y = [i + 0.16 * (shift - (len(result["per_class"]) - 1) / 2) for i in range(len(order))]
                values = [rule[score][k] for k in order]
                tint = colour(rule["contender"])
                axes.hlines(y, [v[1] for v in values], [v[2] for v in values], color=tint, linewidth=1.2, alpha=0.6)
                axes.plot([v[0] for v in values], y, MARKERS[rule["decision"]], color=tint, markersize=4.5,
                          label=_short(rule["title"], 40))  # fmt: skip
            axes.set(xlabel=score, xlim=(-0.04, 1.04), xticks=(0, 0.5, 1))
            axes.grid(axis="y", visible=False)
        left.set_yticks(range(len(order)), [f"{_short(names[k], 16)} ({rows[k]})" for k in order])
        left.invert_yaxis()
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        return to_svg(figure, "Precision and recall of every class with 95 % intervals, rare classes first")


def training(result: dict[str, Any]) -> str:
    """Validation score, cross-entropy and temperature by epoch; a ring marks the epoch whose weights were kept."""
    with drawing("training", WIDTH, 4.8) as figure:
        score, entropy, heat = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1.3))
        names = zip(("ours", "cross_entropy"), result["history"].items(), strict=False)
        for name, (title, history) in reversed(list(names)):
            epochs = [row["epoch"] for row in history]
            for axes, key in ((score, "score"), (entropy, "entropy")):
                axes.plot(epochs, [row[key] for row in history], color=colour(name), label=title, linewidth=1.3)
                if kept := [row for row in history if row["best"]]:
                    axes.plot(kept[-1]["epoch"], kept[-1][key], "o", markersize=8, markerfacecolor="none",
                              markeredgecolor=INK)  # fmt: skip
            if name == "ours":
                _mark_stages(score, history)
                hot = [row for row in history if row["stage"] == "metric"]
                heat.step([r["epoch"] for r in hot], [r["temperature"] for r in hot], color=colour(name), where="mid")
        score.set_ylabel("validation score")
        score.legend(loc="best")
        entropy.set_ylabel("cross-entropy")
        heat.set(ylabel="temperature", xlabel="epoch")
        heat.set_ylim(bottom=0)
        figure.align_ylabels()
        return to_svg(figure, "Validation score, cross-entropy and temperature by epoch")


def _mark_stages(axes: Axes, history: Sequence[dict[str, Any]]) -> None:
    for before, row in pairwise(history):
        if row["stage"] != before["stage"]:
            axes.axvline(row["epoch"] - 0.5, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
            axes.annotate(f" {row['stage']}", (row["epoch"] - 0.5, 1.0), xycoords=("data", "axes fraction"),
                          fontsize=8.5, va="bottom")  # fmt: skip


def _decision_legend(axes: Axes, names: Sequence[str]) -> None:
    for name in dict.fromkeys(names):
        axes.plot([], [], MARKERS[name], color=INK, markersize=5, label=name.replace("_", "-"))
    axes.plot([], [], "o", markersize=9, markerfacecolor="none", markeredgecolor=INK, label="chosen")
    axes.plot([], [], color=GRID)
    axes.legend(loc="lower left", ncols=2)


def _interval(row: dict[str, Any]) -> tuple[float, float]:
    """95 % of resamples, or one standard error either side."""
    if "interval" in row:
        low, high = row["interval"]
        return low, high
    error = row["error"] or 0.0
    return row["score"] - error, row["score"] + error


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
