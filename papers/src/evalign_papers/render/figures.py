"""Figures drawn from reports: precision against recall by beta, and F1 against imbalance."""

from collections.abc import Sequence

from evalign.report.plots import drawing, to_svg
from evalign_papers.analysis.filled import FilledTable
from evalign_papers.render.figure_parts import TINTS, WIDTH, Drawn, shared_legend

SOURCES = (("printed", "s:", TINTS[4]), ("paper", "o-", TINTS[1]), ("honest", "D-", TINTS[0]))


def trade_off(tables: Sequence[FilledTable]) -> Drawn | None:
    """Precision against recall over beta, of every data set: printed, under the paper's protocol, honest."""
    places = [(filled, dataset) for filled in tables for dataset in filled.table.datasets]
    if not places:
        return None
    with drawing("trade-off", WIDTH, 2.6 * ((len(places) + 1) // 2)) as figure:
        grid = figure.subplots((len(places) + 1) // 2, 2, squeeze=False, sharex=True, sharey=True)
        for axes, (filled, dataset) in zip(grid.flat, places, strict=False):
            for source, style, tint in SOURCES:
                points = _points(filled, dataset, source)
                if points:
                    recall, precision = zip(*points, strict=True)
                    axes.plot(recall, precision, style, color=tint, markersize=4.5, linewidth=1.2, label=source)
            axes.set_title(dataset, fontsize=9.5)
            axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        for axes in grid.flat[len(places) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel("precision")
        for axes in grid[-1]:
            axes.set_xlabel("recall")
        shared_legend(figure, list(grid.flat))
        svg = to_svg(figure, "Precision against recall of networks trained on F1, F2 and F3; the tables have numbers")
    caption = (
        "From F1 (left) over F2 to F3 (right): a larger beta buys recall. Means over trials; not run is not drawn."
    )
    return Drawn("Precision or recall, by beta", svg, caption)


def imbalance(filled: FilledTable) -> Drawn | None:
    """F1 against negatives per positive, one panel for each family of data sets; None before anything was run."""
    families = sorted({dataset.rsplit("-", 1)[0] for dataset in filled.table.datasets})
    if not any(cell.measured["honest"].scores for cell in filled.cells):
        return None
    with drawing("imbalance", WIDTH, 3.0) as figure:
        grid = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
        for axes, family in zip(grid, families, strict=True):
            datasets = [name for name in filled.table.datasets if name.startswith(f"{family}-")]
            for row, tint in zip(filled.table.rows, TINTS, strict=False):
                found = [
                    (int(name.rsplit("-", 1)[1]), filled.cell(row, name, "f1").measured["honest"]) for name in datasets
                ]
                drawn = [(ratio, cell.mean, cell.std or 0.0) for ratio, cell in found if cell.mean is not None]
                if drawn:
                    ratio, mean, spread = zip(*drawn, strict=True)
                    axes.errorbar(
                        ratio, mean, yerr=spread, fmt="o-", color=tint, label=row.label, markersize=4, capsize=2
                    )
            axes.set(xscale="log", xlabel="negatives per positive")
            ratios = [int(name.rsplit("-", 1)[1]) for name in datasets]
            axes.set_xticks(ratios, [str(ratio) for ratio in ratios])  # as powers they would be mathematics
            axes.set_xticks([], minor=True)
            axes.set_title(family, fontsize=9.5)
        grid[0].set_ylabel("F1")
        shared_legend(figure, list(grid))
        svg = to_svg(figure, "F1 against imbalance for each method; the table has numbers")
    return Drawn(
        "F1 as the positive class gets rarer", svg, "Honest protocol, argmax; bars are deviations over trials."
    )


def _points(filled: FilledTable, dataset: str, source: str) -> list[tuple[float, float]]:
    """(recall, precision) of each beta, in the order of rows."""
    found = []
    for row in filled.table.rows:
        cells = [filled.cell(row, dataset, name) for name in ("recall", "precision")]
        numbers = [
            (cell.printed.mean if cell.printed else None) if source == "printed" else cell.measured[source].mean
            for cell in cells
        ]
        if numbers[0] is not None and numbers[1] is not None:
            found.append((numbers[0], numbers[1]))
    return found
