"""The ratios of bench_loss.csv against the size of a batch, as a picture for the README.

python benchmarks/plot_loss.py benchmarks/results/bench_loss.csv docs/images/speed.png
"""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SHOWN = {
    "f1": "1 - F1",
    "f1 + anchor": "1 - F1, plus cross-entropy",
    "mcc": "1 - MCC",
    "rival: dice": "Dice (plain torch)",
}


def main(source: Path, picture: Path) -> None:
    with source.open() as file:
        rows = [
            row for row in csv.DictReader(file) if int(row["d"]) > 1 and row.get("kind", "multiclass") == "multiclass"
        ]
    sizes = sorted({(int(row["n"]), int(row["d"])) for row in rows}, key=lambda size: (size[0] * size[1], size))
    labels = [f"{n} x {d}" for n, d in sizes]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), dpi=110)
    for name, label in SHOWN.items():
        of = {(int(row["n"]), int(row["d"])): row for row in rows if row["loss"] == name}
        at = [i for i, size in enumerate(sizes) if size in of]
        axes[0].plot(at, [float(of[sizes[i]]["ratio_cpu"]) for i in at], marker="o", label=label)
    axes[0].axhline(1, color="grey", linewidth=0.8)
    axes[0].set_xticks(range(len(sizes)), labels, rotation=30, ha="right", fontsize=7)
    axes[0].set_ylabel("work, as a multiple of cross-entropy's", fontsize=8)
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    for name, label in {"cross_entropy": "cross-entropy", "f1": "1 - F1"}.items():
        points = sorted((int(row["n"]) * int(row["d"]), float(row["ms_best"])) for row in rows if row["loss"] == name)
        axes[1].loglog([x for x, _ in points], [y for _, y in points], marker="o", label=label)
    axes[1].set_xlabel("logits, n x d", fontsize=8)
    axes[1].set_ylabel("milliseconds, best round", fontsize=8)
    axes[1].legend(fontsize=7)
    for panel in axes:
        panel.tick_params(labelsize=7)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
