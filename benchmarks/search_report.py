"""The CSV of search_recipe.py as a Markdown table: means over splits, and paired differences from one configuration.

    python benchmarks/search_report.py recipes.csv --against "both cross-entropy"

A difference is the mean over splits, +- its standard error after Nadeau and Bengio (2003), of a configuration's score
less the other's on the same split.
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

TEST_TO_TRAIN = 0.16 / 0.51  # selection rows to training rows
Scores = dict[str, dict[str, dict[int, float]]]  # configuration -> data set -> split -> score


def read(files: list[Path], column: str) -> Scores:
    scores: Scores = defaultdict(lambda: defaultdict(dict))
    for file in files:
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                scores[row["config"]][row["set"]][int(row["split"])] = float(row[column])
    return scores


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error, corrected for splits that share rows; nan for one value."""
    if len(values) < 2:
        return float(np.mean(values)), np.nan
    return float(np.mean(values)), float(np.std(values, ddof=1) * (1 / len(values) + TEST_TO_TRAIN) ** 0.5)


def cell(own: dict[int, float], other: dict[int, float] | None) -> str:
    if not own:
        return ""
    if other is None:
        mean, error = mean_and_error(list(own.values()))
        return f"{mean:.4f} ± {error:.4f}"
    both = own.keys() & other.keys()
    if not both:
        return f"({np.mean(list(own.values())):.4f})"
    mean, error = mean_and_error([own[split] - other[split] for split in both])
    return f"{mean:+.4f} ± {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--against", help="the configuration to take differences from")
    parser.add_argument("--column", choices=["plug_in", "argmax", "log_loss"], default="plug_in")
    args = parser.parse_args()
    scores = read(args.files, args.column)
    sets = sorted({name for of_config in scores.values() for name in of_config})
    print(f"| {args.column} | " + " | ".join(sets) + " |")
    print("|---" * (len(sets) + 1) + "|")
    for config, of_config in sorted(scores.items(), key=lambda item: (item[0] != args.against, item[0])):
        others = {} if args.against in (None, config) else scores[args.against]
        cells = [cell(of_config.get(name, {}), others.get(name) if others else None) for name in sets]
        print(f"| {config} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
