"""Plots of the report as SVG, coloured by CSS variables, so that one drawing serves light and dark mode."""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from evalign.comparison.run import TITLES

INK, GRID = "#010203", "#020304"
# Stand-ins for the page's colours --c1 to --c8: ours first, a neutral grey last, for everything else.
TINTS = tuple(f"#03040{i}" for i in range(1, 9))
OTHER = TINTS[-1]
_CSS = {INK: "currentColor", GRID: "var(--grid)"} | {tint: f"var(--c{i})" for i, tint in enumerate(TINTS, 1)}
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


def palette(result: dict[str, Any]) -> dict[str, str]:
    """A colour for each contender, ours first, the same in every drawing of a page."""
    names = list(dict.fromkeys(row["contender"] for row in result["table"] if row["contender"] != "majority"))
    names.sort(key=lambda name: name != result["reference"][0])
    return dict(zip(names, TINTS, strict=False))


@contextmanager
def drawing(name: str, width: float, height: float) -> Iterator[Figure]:
    """A figure in our style, without a window system; `name` keeps the ids of drawings on one page distinct."""
    settings: Any = STYLE | {"svg.hashsalt": name}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure


def to_svg(figure: Figure, description: str) -> str:
    """The drawing as an <svg> element that scales with its container."""
    text = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the reader's browser has more fonts
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    for stand_in, css in _CSS.items():
        svg = svg.replace(stand_in, css)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height|xmlns:xlink|version)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(description, quote=True)}">{rest}'.strip()


MARKERS = {"argmax": "o", "tuned": "s", "plug_in": "D", "auto": "P"}
WIDTH = 5.4  # inches at 72 per inch: about a phone's width, so that letters stay readable there
MOST_CLASSES = 24


def scores(result: dict[str, Any]) -> str:
    """One line per contender and decision: the score, its interval and, with several splits, the score of each."""
    table = [row for row in result["table"][::-1] if row["contender"] != "majority"]
    tints = palette(result)
    titles = [row["title"] if len(row["title"]) <= 34 else row["title"].replace(" + ", "\n+ ") for row in table]
    height = 0.27 if titles == [row["title"] for row in table] else 0.38
    with drawing("scores", WIDTH, 0.8 + height * len(table)) as figure:
        axes = figure.add_subplot()
        for y, row in enumerate(table):
            tint, (low, high) = tints.get(row["contender"], OTHER), _interval(row)
            axes.plot([low, high], [y, y], color=tint, solid_capstyle="round", linewidth=2.2)
            axes.plot(row["score"], y, "o", color=tint, markersize=6)
            if len(row["scores"]) > 1:
                axes.plot(row["scores"], [y] * len(row["scores"]), "|", color=tint, markersize=7, alpha=0.55)
        axes.set_yticks(range(len(table)), titles)
        axes.set(xlabel=result["metric"]["title"], ylim=(-0.6, len(table) - 0.4))
        axes.locator_params(axis="x", nbins=6)
        axes.grid(axis="y", visible=False)
        return to_svg(
            figure, f"{result['metric']['title']} of every contender with its interval; the table has numbers"
        )


def precision_recall(result: dict[str, Any]) -> str:
    """Curves of two classes on the test rows, with the points of decision rules, and our interval with one split."""
    tints = palette(result)
    own = next(rule for rule in result["per_class"] if [rule["contender"], rule["decision"]] == result["reference"])
    with drawing("trade-off", WIDTH, 4.9) as figure:
        axes = figure.add_subplot()
        for i, curve in enumerate(result["curves"]):
            tint, above = tints.get(curve["contender"], OTHER), 3 - i / 100  # ours on top of the others
            axes.plot(curve["recall"], curve["precision"], color=tint, label=curve["title"], linewidth=1.4, alpha=0.85,
                      zorder=above)  # fmt: skip
            for name, (recall, precision) in curve["points"].items():
                chosen = [curve["contender"], name] == result["reference"]
                axes.plot(recall, precision, MARKERS.get(name, "o"), color=tint, markersize=8 if chosen else 5.5,
                          zorder=above)  # fmt: skip
                if chosen:
                    axes.plot(recall, precision, "o", markersize=16, markerfacecolor="none", markeredgecolor=INK,
                              clip_on=False)  # fmt: skip
                if chosen and result["splits"] == 1:
                    axes.hlines(precision, *own["recall"][1][1:], color=INK, linewidth=1, zorder=4)
                    axes.vlines(recall, *own["precision"][1][1:], color=INK, linewidth=1, zorder=4)
        _decision_marks(axes, [name for curve in result["curves"] for name in curve["points"]])
        figure.legend(loc="outside lower center", ncols=2)  # below the axes, where it hides no curve
        axes.set(xlabel="recall", ylabel="precision", xlim=(-0.02, 1.02), ylim=(-0.02, 1.04))
        return to_svg(figure, "Precision against recall on the test rows, with the points the decision rules chose")


def class_scores(result: dict[str, Any]) -> str:
    """Precision and recall of every class under each rule shown in detail, rare classes first."""
    rows, names, tints = result["class_rows"], result["classes"], palette(result)
    order = sorted(range(len(names)), key=lambda k: rows[k])[:MOST_CLASSES]
    titles, shown = shortened([rule["title"] for rule in result["per_class"]], 40), shortened(names, 16)
    with drawing("classes", WIDTH, 1.1 + 0.32 * len(order)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, score in ((left, "precision"), (right, "recall")):
            for shift, (rule, title) in enumerate(zip(result["per_class"], titles, strict=True)):
                y = [i + 0.16 * (shift - (len(result["per_class"]) - 1) / 2) for i in range(len(order))]
                values = [rule[score][k] for k in order]
                tint = tints.get(rule["contender"], OTHER)
                axes.hlines(y, [v[1] for v in values], [v[2] for v in values], color=tint, linewidth=1.2, alpha=0.6)
                axes.plot([v[0] for v in values], y, MARKERS.get(rule["decision"], "o"), color=tint, markersize=4.5,
                          label=title)  # fmt: skip
            axes.set(xlabel=score, xlim=(-0.04, 1.04), ylim=(len(order) - 0.5, -0.5))
            axes.set_xticks((0, 0.5, 1), ("0", "0.5", "1"))
            axes.grid(axis="y", visible=False)
        left.set_yticks(range(len(order)), [f"{shown[k]} ({rows[k]})" for k in order])
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        return to_svg(figure, "Precision and recall of every class with 95 % intervals, rare classes first")


def training(result: dict[str, Any]) -> str:
    """Validation score and cross-entropy by epoch, temperature of a metric stage; a ring marks the kept epoch."""
    tints = [TINTS[0], TINTS[1]]
    hot = [row for row in next(iter(result["history"].values())) if row["stage"] == "metric"]
    heated = len({row["temperature"] for row in hot}) > 1  # boosted trees have one temperature
    with drawing("training", WIDTH, 4.8 if heated else 3.7) as figure:
        panels = figure.subplots(3 if heated else 2, 1, sharex=True, height_ratios=(3, 2, 1.3)[: 3 if heated else 2])
        score, entropy = panels[:2]
        for i, (tint, (title, history)) in reversed(
            list(enumerate(zip(tints, result["history"].items(), strict=False)))
        ):
            epochs = [row["epoch"] for row in history]
            for axes, key in ((score, "score"), (entropy, "entropy")):
                axes.plot(epochs, [row[key] for row in history], color=tint, label=title if axes is score else None,
                          linewidth=1.3)  # fmt: skip
                if kept := [row for row in history if row["best"]]:
                    axes.plot(kept[-1]["epoch"], kept[-1][key], "o", markersize=8, markerfacecolor="none",
                              markeredgecolor=INK)  # fmt: skip
            if i == 0 and hot:
                _mark_stages(score, history)
            if i == 0 and heated:
                panels[2].step([r["epoch"] for r in hot], [r["temperature"] for r in hot], color=tint, where="mid")
        score.set_ylabel("validation score")
        figure.legend(loc="outside lower center", ncols=2)
        entropy.set_ylabel("cross-entropy")
        panels[-1].set_xlabel("boosting round" if result["settings"].get("model") == "boost" else "epoch")
        if heated:
            panels[2].set_ylabel("temperature")
            panels[2].set_ylim(bottom=0)
        figure.align_ylabels()
        return to_svg(figure, "Validation score and cross-entropy by epoch" + (", and temperature" if heated else ""))


def calibration(result: dict[str, Any]) -> str:
    """Observed share against predicted probability on the test rows; calibrated probabilities lie on the diagonal."""
    tints = palette(result)
    with drawing("calibration", WIDTH, 4.6) as figure:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=GRID, linewidth=1.2, linestyle=(0, (4, 3)))
        for i, curve in enumerate(result["calibration"]):
            axes.plot(curve["predicted"], curve["observed"], "o-", color=tints.get(curve["contender"], OTHER),
                      markersize=4, linewidth=1.3, label=curve["title"], zorder=3 - i / 100)  # fmt: skip
        # The bins of a rare class end far below 1.
        top = min(1.0, 1.1 * max(max(curve["predicted"] + curve["observed"]) for curve in result["calibration"]))
        figure.legend(loc="outside lower center", ncols=2)
        axes.set(xlabel="predicted probability", ylabel="observed share", xlim=(-0.02 * top, 1.02 * top),
                 ylim=(-0.02 * top, 1.02 * top))  # fmt: skip
        return to_svg(figure, "Observed share against predicted probability, in bins of equally many test rows")


def importance(result: dict[str, Any]) -> str:
    """Drop of the metric when a column is shuffled, largest first."""
    rows = sorted(result["importance"], key=lambda row: -row["mean"])[:MOST_CLASSES]
    with drawing("importance", WIDTH, 0.8 + 0.27 * len(rows)) as figure:
        axes = figure.add_subplot()
        axes.barh(range(len(rows)), [row["mean"] for row in rows], xerr=[row["error"] for row in rows],
                  color=TINTS[0], ecolor=INK, height=0.6)  # fmt: skip
        axes.set_yticks(range(len(rows)), shortened([row["column"] for row in rows], 28))
        axes.invert_yaxis()
        change = "rise" if result["metric"].get("lower_is_better") else "loss"
        axes.set(xlabel=f"{change} of {result['metric']['title']} when the column is shuffled")
        axes.grid(axis="y", visible=False)
        return to_svg(figure, "Permutation importance of the columns on held-out rows, the largest first")


def shares(shift: dict[str, Any], order: Sequence[int]) -> str:
    """Class shares in training (rings) and in new rows (points with intervals), in this order of classes."""
    before, now = shift["before"], shift["shares"]
    with drawing("shares", WIDTH, 0.9 + 0.27 * len(order)) as figure:
        axes = figure.add_subplot()
        for y, k in enumerate(order):
            if "low" in shift:
                axes.plot([shift["low"][k], shift["high"][k]], [y, y], color=TINTS[0], linewidth=2.2)
            axes.plot(now[k], y, "o", color=TINTS[0], markersize=6, label="now" if not y else None)
            axes.plot(before[k], y, "o", markersize=9, markerfacecolor="none", markeredgecolor=INK,
                      label="in training" if not y else None)  # fmt: skip
        axes.set_yticks(range(len(order)), shortened([str(shift["classes"][k]) for k in order], 28))
        axes.set(xlabel="share of the rows", xlim=(-0.02, 1.02), ylim=(len(order) - 0.4, -0.6))
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=2)
        return to_svg(figure, "Share of each class in training and in the new rows")


def _mark_stages(axes: Axes, history: Sequence[dict[str, Any]]) -> None:
    for before, row in pairwise(history):
        if row["stage"] != before["stage"]:
            axes.axvline(row["epoch"] - 0.5, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
            axes.annotate(f" {row['stage']}", (row["epoch"] - 0.5, 1.0), xycoords=("data", "axes fraction"),
                          fontsize=8.5, va="bottom")  # fmt: skip


def _decision_marks(axes: Axes, names: Sequence[str]) -> None:
    for name in dict.fromkeys(names):
        axes.plot([], [], MARKERS.get(name, "o"), color=INK, markersize=5, label=TITLES.get(name, name))
    axes.plot([], [], "o", markersize=9, markerfacecolor="none", markeredgecolor=INK, label="chosen")


def _interval(row: dict[str, Any]) -> tuple[float, float]:
    """95 % of resamples, or one standard error either side."""
    if "interval" in row:
        low, high = row["interval"]
        return low, high
    error = row["error"] or 0.0
    return row["score"] - error, row["score"] + error


def shortened(names: Sequence[str], most: int) -> list[str]:
    """Names of at most `most` letters, or of up to 40 if they would be equal otherwise.

    >>> shortened(["a", "class of cats", "class of dogs"], 6)
    ['a', '… cats', '… dogs']
    """

    def start(name: str, size: int) -> str:
        return name if len(name) <= size else name[: size - 1] + "…"

    def end(name: str, size: int) -> str:
        return name if len(name) <= size else "…" + name[1 - size :]

    tried = ([cut(name, size) for name in names] for size in range(most, max(most, 40) + 1) for cut in (start, end))
    return next((short for short in tried if len(set(short)) == len(names)), [start(name, most) for name in names])
