"""Plot mean rank against fit time from the rows of bench_quality.py, for the README.

python benchmarks/plot_quality.py benchmarks/results/bench_suite.csv docs/images/headline.svg
"""

import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

FEWEST = 50  # scores of a tool that is shown
# Of labels that would cross those of others.
PLACES = {"XGBoost": (-7, 3), "LightGBM": (-7, -4), "logistic regression": (7, -13)}


def main(source: Path, picture: Path) -> None:
    rows = pd.read_csv(source)
    scores = rows.pivot_table(index=["table", "split"], columns="method", values="score")
    scores = scores.loc[:, scores.count() >= FEWEST].dropna()  # splits that all tools shown have
    by_table = scores.groupby("table").mean()
    ranks = by_table.rank(axis=1, ascending=False).mean()
    seconds = rows.pivot_table(index="table", columns="method", values="cpu_seconds").reindex(by_table.index).mean()
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.add_subplot(
        xlabel=f"seconds of CPU for a fit, mean over {len(by_table)} tables", ylabel="mean rank by F1 (1 is best)",
        xscale="log", xlim=(0.8 * seconds.min(), 3 * seconds.max()),
    )  # fmt: skip
    for method in map(str, ranks.index):
        own = method.startswith("evalign")
        tint = "#0b62c4" if own else "#5b6473"
        axes.plot(seconds[method], ranks[method], "o", color=tint, markersize=9 if own else 6)
        label, place = method if own else f"{method}, tuned", PLACES.get(method, (7, 3))
        axes.annotate(
            label, (seconds[method], ranks[method]), xytext=place, ha="left" if place[0] > 0 else "right",
            textcoords="offset points", color=tint, fontweight="bold" if own else "normal", fontsize=9,
        )  # fmt: skip
    axes.set_ylim(ranks.max() + 0.3, ranks.min() - 0.4)  # the best on top
    axes.set_xticks(ticks := [0.2, 0.5, 1, 2, 5, 10, 20, 50], [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
