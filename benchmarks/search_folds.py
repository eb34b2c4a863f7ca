"""One division or five folds, compared for F1 on held-out training data, as benchmarks/search_recipe.py compares.

    python benchmarks/search_folds.py --data-dir DIR --out folds --splits 10 shuttle=6 creditcard=5   # a GPU, 3 minutes
    python benchmarks/search_folds.py --report folds/scores.csv
    python benchmarks/search_folds.py --rules folds

A split keeps 20 % of the rows as test rows, which are never looked at, and compares on 16 %; the others, 64 %, are what
a classifier is fitted on. Every rule is learned on what was held out: a fifth of these rows, or by folds all of
them. The probabilities are kept next to scores.csv (NAME.npz), so that rules can be tried without training again.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from bench_recipes import decided_by, load
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, softmax
from sklearn.metrics import f1_score
from stacked_splits import Part, average_and_labels, network_probabilities, selections

from evalign import decision
from evalign.tables.split import HeldOutPredictions

SETS = ["yeast", "mammography", "shuttle", "creditcard"]
RECIPES = ["anchored", "cross_entropy"]


def run(
    name: str, recipe: str, made: dict[int, list[Part]], classes: int, device: str, out: Path
) -> Iterator[dict[str, Any]]:
    """Both forms as one stack: scores of every split and decision; the probabilities go to a file."""
    started = time.perf_counter()
    parts = [part for own in made.values() for part in own]
    found = iter(network_probabilities({"recipe": recipe}, parts, classes, device))
    seconds = round(time.perf_counter() - started, 1)
    for folds, own in made.items():
        kept: dict[str, Any] = {}
        for part, (held_out, select) in zip(own, found, strict=False):
            kept |= {f"{key}.{part.seed}": value for key, value in _kept(part, held_out, select).items()}
            valid = HeldOutPredictions(held_out, part.y[part.held_out], part.held_out_weight)
            at_label = select[np.arange(len(select)), part.test_y]
            known = {
                "set": name, "recipe": recipe, "folds": folds, "split": part.seed,
                "log_loss": round(float(-np.log(np.maximum(at_label, 1e-12)).mean()), 6), "seconds": seconds,
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            }  # fmt: skip
            for rule, score in decided_by(valid, select, part.test_y, classes).items():
                yield {**known, "decision": rule, "score": round(score, 6)}
        np.savez_compressed(out / f"{name}-{recipe}-{folds}-from{own[0].seed}.npz", **kept)


def _kept(part: Part, held_out: Any, select: Any) -> dict[str, Any]:
    return {
        "held_out": held_out.astype(np.float32), "labels": part.y[part.held_out].astype(np.int8),
        "weight": part.held_out_weight,
        "select": select.astype(np.float32), "select_labels": part.test_y.astype(np.int8),
    }  # fmt: skip


def mean_and_error(column: pd.Series) -> str:
    values = column.to_numpy(np.float64)
    return f"{values.mean():+.4f} ± {values.std(ddof=1) / len(values) ** 0.5:.4f}"


def report(rows: pd.DataFrame) -> str:
    """Mean and standard error of each form, and of their paired difference."""
    lines = ["| set | recipe | decision | one division | five folds | gain | splits |", "|" + "---|" * 7]
    values = rows.assign(log_loss=-rows.log_loss)
    loss = values[values.decision == "argmax"].assign(decision="(minus log-loss)", score=lambda own: own.log_loss)
    for names, own in pd.concat([values, loss]).groupby(["set", "recipe", "decision"], sort=False):
        table = own.pivot_table(index="split", columns="folds", values="score").dropna()
        if table.shape[1] == 2:
            said = [mean_and_error(column) for column in (table[1], table[5], table[5] - table[1])]
            lines.append("| " + " | ".join([*map(str, names), *said, str(len(table))]) + " |")
    return "\n".join(lines)


def rules(folder: Path) -> str:
    """How far what was held out stands for the mean of the networks, by the probabilities kept.

    T is the temperature that fits best. "Own" is the plug-in rule learned on the selection rows' own probabilities,
    which has no labels but which no classifier could have; "calibrated" rescales what was held out by its labels first.
    """
    found = []
    for path in sorted(folder.glob("*.npz")):
        name, recipe, folds, _ = path.stem.split("-")
        with np.load(path) as arrays:
            for split in sorted({key.split(".")[1] for key in arrays}, key=int):
                p, q = (_normalised(arrays[f"{key}.{split}"]) for key in ("held_out", "select"))
                y, truth = (arrays[f"{key}.{split}"].astype(np.int64) for key in ("labels", "select_labels"))
                average, labels = average_and_labels(p.shape[1])
                options: dict[str, Any] = {"average": average, "margin": 1 / len(p)}
                held_out = {**options, "sample_weight": arrays[f"weight.{split}"]}
                own, of_selection = temperature(p, y, held_out["sample_weight"]), temperature(q, truth)
                learned = {
                    "plug-in": decision.plug_in(p, "f1", **held_out),
                    "calibrated": replace(
                        decision.plug_in(softmax(np.log(np.maximum(p, 1e-12)) / own, axis=1), "f1", **held_out),
                        temperature=own,
                    ),
                    "own": decision.plug_in(q, "f1", **options),
                }
                scores = {
                    kind: f1_score(truth, rule.predict(q), average=average, labels=labels, zero_division=0.0)
                    for kind, rule in learned.items()
                }
                known = {"set": name, "recipe": recipe, "folds": folds, "T held out": own, "T": of_selection}
                found.append({**known, **scores})
    return pd.DataFrame(found).groupby(["set", "recipe", "folds"]).mean().round(4).to_string()


def temperature(p: Any, y: Any, weight: Any = None) -> float:
    """T that minimises the log-loss of p^(1 / T), normalised."""
    z = np.log(np.maximum(p, 1e-12))

    def loss(log_t: float) -> float:
        each = logsumexp(z / np.exp(log_t), axis=1) - z[np.arange(len(y)), y] / np.exp(log_t)
        return float(np.average(each, weights=weight))

    return float(np.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x))


def _normalised(p: Any) -> Any:
    wide = p.astype(np.float64)
    return wide / wide.sum(axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--splits", nargs="+", default=["10"], metavar="N", help="e.g. 10 creditcard=6")
    parser.add_argument("--at-once", type=int, default=10, help="splits in a stack; each is stored when it is done")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a folder")
    parser.add_argument("--report", type=Path, help="a scores.csv to show, and nothing else")
    parser.add_argument("--rules", type=Path, help="a folder filled before: how rules and temperatures carry over")
    args = parser.parse_args()
    if args.rules is not None:
        print(rules(args.rules))
        return
    if args.report is not None:
        print(report(pd.read_csv(args.report)))
        return
    if args.data_dir is None or args.out is None:
        parser.error(
            "--data-dir and --out are needed: the folder with yeast.parquet and the other sets, and one to fill"
        )
    torch.backends.cuda.matmul.allow_tf32 = True
    counts = {name: int(entry) for entry in args.splits if "=" not in entry for name in SETS}
    counts |= {name: int(number) for name, _, number in (entry.partition("=") for entry in args.splits) if number}
    args.out.mkdir(parents=True, exist_ok=True)
    stored: list[dict[str, Any]] = []
    for name in args.sets:
        X, y = load(name, args.data_dir)
        for start in range(0, counts[name], args.at_once):
            seeds = range(start, min(start + args.at_once, counts[name]))
            made = {folds: list(selections(X, y, seeds, folds)) for folds in (1, 5)}
            for recipe in args.recipes:
                rows = list(run(name, recipe, made, int(y.max()) + 1, args.device, args.out))
                stored += rows
                pd.DataFrame(stored).to_csv(args.out / "scores.csv", index=False)
                print(f"{name} {recipe} splits {list(seeds)}: {rows[0]['seconds']} s", flush=True)
    print(report(pd.DataFrame(stored)))


if __name__ == "__main__":
    main()
