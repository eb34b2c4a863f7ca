"""Wall time of many trials trained as one stacked network relative to one trial, for a fixed number of epochs.

    python benchmarks/bench_trials.py --data-dir DIR                 # 1, 2, 5, 10, 20 and 40 trials of Mammography

Rows, including the cost of one more trial, are added to benchmarks/results/bench_trials.csv.
"""

import argparse
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from search_recipe import Scores, table

from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.recipes import Recipe, find_recipe
from evalign.training.stacked import Trial, train_trials

RESULTS = Path(__file__).parent / "results" / "bench_trials.csv"


def fixed_length(recipe: Recipe, epochs: int) -> Recipe:
    """The recipe with `epochs` epochs a stage, without early stopping."""
    stages = (replace(stage, epochs=epochs, patience=10 * epochs) for stage in recipe.stages)
    return replace(recipe, stages=tuple(stages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--set", default="mammography")
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 2, 5, 10, 20, 40])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--epochs", type=int, default=15, help="of each stage")
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    most = max(args.trials)
    data = table(args.set, "standard", most, args.data_dir)
    scores = Scores(data.classes, data.rows.x.device)
    objective = Objective("f1", "multiclass", StepChoice("annealed"), average=scores.average)
    recipe = fixed_length(find_recipe("anchored"), args.epochs)
    trials = [Trial(data.train[s], data.valid[s], recipe, seed=s) for s in range(most)]

    def seconds(trials: list[Trial]) -> float:
        started = time.perf_counter()
        train_trials(
            lambda: mlp(data.rows.x.shape[1], data.classes), data.rows, trials, objective, scores.argmax,
            batch_size=args.batch_size,
        )  # fmt: skip
        return time.perf_counter() - started

    short = [replace(trial, recipe=fixed_length(recipe, 1)) for trial in trials]
    device = torch.cuda.get_device_name() if data.rows.x.is_cuda else f"{platform.machine()}, {os.cpu_count()} cores"
    rows = []
    for count in sorted({1, *args.trials}):
        seconds(short[:count])  # warm up
        taken = min(seconds(trials[:count]) for _ in range(2))
        rows.append({"set": args.set, "trials": count, "epochs": 2 * args.epochs, "seconds": round(taken, 3)})
        one = rows[0]["seconds"]
        rows[-1]["ratio_to_one"] = round(taken / one, 3)
        rows[-1]["seconds_per_extra_trial"] = round((taken - one) / (count - 1), 4) if count > 1 else None
        print(rows[-1], flush=True)
    frame = pd.DataFrame(rows).assign(device=device, torch=torch.__version__)
    stored = pd.read_csv(args.out) if args.out.exists() else pd.DataFrame()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pd.concat([stored, frame], ignore_index=True).to_csv(args.out, index=False)


if __name__ == "__main__":
    main()
