"""EAST against cross-entropy along training, by rows of training data, and by temperature.

    python benchmarks/bench_east.py --data-dir DIR --device cuda

The networks are EAST's (512-256-128, dropout 0.25), trained from scratch at a learning rate of 1e-3, batches of 1024
and the printed patience of 50, on five splits of 64/16/20 and on 1/16 to all of the training rows. Writes
benchmarks/results/bench_east.csv (a row per network: F1 by three decisions, average precision, soft F1 at each
temperature) and bench_east_curves.csv (values along training on all rows).
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score
from torch import Tensor

from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows, Watch, predict_logits
from evalign.training.recipes import Recipe, Stage, find_recipe
from evalign.training.stacked import Trial, train_trials
from evalign_papers.engine.cells import Cell
from evalign_papers.engine.printed import PACKAGED
from evalign_papers.engine.reports import environment
from evalign_papers.engine.scores import honest_scores
from evalign_papers.engine.settings import EAST, UNBOUNDED
from evalign_papers.engine.stacked_trials import WatchedStack
from evalign_papers.engine.terms import metric_score
from evalign_papers.engine.trial_data import Part, parts

RESULTS = Path(__file__).parent / "results"
SETS = ("yeast", "mammography", "letter", "adult", "shuttle")
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
TEMPERATURES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4)
SHOWN_EPOCHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
HIDDEN, DROPOUT, BATCH = (512, 256, 128), 0.25, 1024
PRINTED = Stage(
    "metric", metric=True, anchor=0.0, learning_rate=1e-3, epochs=UNBOUNDED, patience=EAST.patience, rate=0.9
)
RECIPES = {
    "cross-entropy": Recipe("cross-entropy", "", (replace(PRINTED, metric=False, anchor=1.0, rate=None),)),
    "EAST": Recipe("EAST", "", (PRINTED,)),
    "anchored": find_recipe("anchored"),
    # Start from cross-entropy, since a ranking has no gradient if all probabilities are equal.
    "average precision": Recipe(
        "average precision",
        "",
        (
            replace(PRINTED, name="cross-entropy", metric=False, anchor=1.0, rate=None),
            replace(PRINTED, name="ranking", rate=None),
        ),
    ),
}


def objective_of(classes: int, metric: str = "f1") -> Objective:
    if metric == "average precision":
        return Objective("average_precision", "binary", StepChoice("annealed"), average="binary")
    return Objective("f1", "multiclass", StepChoice("annealed"), average="binary" if classes == 2 else "macro")


def values_along_training(soft: Objective, test_rows: int, classes: int) -> Watch:
    """Soft metric at T = 0.2, hard metric and cross-entropy of the test rows and of equally many training rows."""
    score = metric_score("f1", classes)

    def watch(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        found = []
        for own in (slice(0, test_rows), slice(test_rows, None)):
            z, labels, weights = logits[own], y[own], weight[own]
            entropy = -z.log_softmax(1).gather(1, labels[:, None]).mean()
            found += [1 - soft(z, labels, weights, torch.full_like(entropy, 0.2)), score(z, labels, weights), entropy]
        return torch.stack(found)

    return watch


def train(name: str, method: str, share: float, own: list[Part], device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train all splits as one stack; yields pairs ("scores" or "curves", row)."""
    classes = 1 + max(int(part.train_y.max()) for part in own)
    ranks = method == "average precision"
    x, y, trials, tests, watched = list[Any](), list[Any](), list[Trial](), list[Tensor](), list[Tensor]()
    start = 0
    for part in own:
        random = np.random.default_rng(part.trial)
        rows = len(part.train_y)
        chosen = random.permutation(rows)[: max(2 * classes, round(share * rows))]
        seen = (
            chosen[: len(part.test_y)] if len(chosen) >= len(part.test_y) else random.choice(chosen, len(part.test_y))
        )
        x += [part.train, part.valid, part.test]
        y += [part.train_y, part.valid_y, part.test_y]
        at = np.cumsum([start, rows, len(part.valid_y), len(part.test_y)])
        trials.append(
            Trial(
                torch.from_numpy(start + chosen), torch.arange(int(at[1]), int(at[2])), RECIPES[method], part.trial,
            )
        )  # fmt: skip
        watched.append(torch.from_numpy(np.concatenate([np.arange(at[2], at[3]), start + seen])))
        tests.append(torch.arange(int(at[2]), int(at[3])))
        start = int(at[3])
    width = x[0].shape[1]
    table = Rows.of(torch.from_numpy(np.concatenate(x)).to(device), torch.from_numpy(np.concatenate(y)).to(device))
    soft = replace(objective_of(classes), backend="eager")
    began = time.perf_counter()

    def make() -> torch.nn.Module:
        return mlp(width, 1 if ranks else classes, HIDDEN, DROPOUT)

    results = train_trials(
        make, table, trials, objective_of(classes, method), metric_score("f1", 2 if ranks else classes),
        batch_size=BATCH, task="binary" if ranks else "multiclass",
        kind=None if ranks else partial(
            WatchedStack, watch=values_along_training(soft, len(own[0].test_y), classes), watched=watched
        ),
    )  # fmt: skip
    seconds = time.perf_counter() - began
    for part, trial, result, test in zip(own, trials, results, tests, strict=True):
        network = make().to(device)
        network.load_state_dict(result.state)
        logits = [predict_logits(network, table.x[rows.to(device)]).cpu().double() for rows in (trial.valid, test)]
        p = [_probabilities(z) for z in logits]
        decided = honest_scores(p[0], part.valid_y, p[1], part.test_y, "f1")
        labels = torch.from_numpy(part.test_y)
        row = {
            "set": name, "method": method, "share": share, "rows": len(trial.train), "split": part.trial,
            "epochs": len(result.history), "seconds": round(seconds / len(own), 2),
            **{f"f1_{rule}": round(decided[rule]["f1"], 5) for rule in ("argmax", "tuned", "plug_in")},
            "average_precision": round(average_precision(part.test_y, p[1]), 5),
        }  # fmt: skip
        if not ranks:
            ones = torch.ones(len(labels), dtype=torch.float64)
            for t in TEMPERATURES:
                value = 1 - float(soft(logits[1], labels, ones, torch.tensor(t, dtype=torch.float64)))
                row[f"soft_{t:g}"] = round(value, 5)
        yield "scores", row
        if share == 1.0 and not ranks:
            best = max(i for i, epoch in enumerate(result.history) if epoch.best)
            shown = {e - 1 for e in SHOWN_EPOCHS if e <= len(result.history)} | {best, len(result.history) - 1}
            for i in sorted(shown):
                epoch = result.history[i]
                values = [epoch.temperature, epoch.train_loss, epoch.loss, epoch.score, *epoch.watched]
                names = ("temperature", "train_loss", "valid_loss", "hard_valid", "soft_test", "hard_test",
                         "entropy_test", "soft_train", "hard_train", "entropy_train")  # fmt: skip
                yield (
                    "curves",
                    {
                        "set": name, "method": method, "split": part.trial, "epoch": i + 1, "kept": i == best,
                        **{key: round(value, 5) for key, value in zip(names, values, strict=True)},
                    },
                )  # fmt: skip


def _probabilities(logits: Tensor) -> NDArray[np.float64]:
    if logits.shape[1] == 1:
        positive = logits.sigmoid()
        return torch.cat([1 - positive, positive], 1).numpy()
    return logits.softmax(1).numpy()


def average_precision(y: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """Average precision of the positive class, or its mean over the classes that have test rows."""
    if p.shape[1] == 2:
        return float(average_precision_score(y, p[:, 1]))
    present = [k for k in range(p.shape[1]) if (y == k).any()]
    return float(np.mean([average_precision_score(y == k, p[:, k]) for k in present]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--methods", nargs="+", default=list(RECIPES))
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", default=os.environ.get("EVALIGN_DATA"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, where = time.monotonic(), environment(args.device)
    found: dict[str, list[dict[str, Any]]] = {"scores": [], "curves": []}
    config = Cell(PACKAGED / "checks/scratch/honest/yeast.east.json").config
    for name in args.sets:
        own = list(
            parts(replace(config, data=replace(config.data, name=name)), args.data_dir, list(range(args.splits)))
        )
        two = max(int(part.train_y.max()) for part in own) == 1
        for share in sorted(args.shares, reverse=True):
            for method in args.methods:
                if (method == "average precision" and not two) or time.monotonic() - started > args.seconds:
                    continue
                for kind, row in train(name, method, share, own, args.device):
                    found[kind].append(row | {"device": where["device"], "torch": where["torch"]})
                means = pd.DataFrame(found["scores"][-args.splits :]).filter(regex="epochs|f1_|average").mean().round(4)
                print(name, method, share, means.to_dict(), f"{time.monotonic() - started:.0f} s", flush=True)
                for kind, file in (("scores", "bench_east.csv"), ("curves", "bench_east_curves.csv")):
                    write(pd.DataFrame(found[kind]), args.out / file)


def write(rows: pd.DataFrame, path: Path) -> None:
    """Add rows to a file; they replace those of the same set, method and share."""
    if rows.empty:
        return
    key = [name for name in ("set", "method", "share") if name in rows]
    if path.exists():
        before = pd.read_csv(path)
        mine = set(rows[key].itertuples(index=False, name=None))
        keep = [tuple(one) not in mine for one in before[key].itertuples(index=False, name=None)]
        rows = pd.concat([before[keep], rows])
    rows.to_csv(path, index=False)


if __name__ == "__main__":
    main()
