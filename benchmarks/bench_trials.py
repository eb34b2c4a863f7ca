"""Wall time of ten trials trained as one stacked network against one trial, same recipe and number of epochs."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from search_recipe import Scores, table

from evalign.networks import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.recipes import Recipe, find_recipe
from evalign.training.trials import Trial, train_trials


def fixed_length(recipe: Recipe, epochs: int) -> Recipe:
    """The recipe in `epochs` epochs a stage, whatever validation says."""
    stages = (replace(stage, epochs=epochs, patience=10 * epochs) for stage in recipe.stages)
    return replace(recipe, stages=tuple(stages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--set", default="mammography")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=15, help="of each stage")
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    data = table(args.set, "standard", args.trials, args.data_dir)
    scores = Scores(data.classes, data.rows.x.device)
    objective = Objective("f1", "multiclass", StepChoice("annealed"), average=scores.average)
    recipe = fixed_length(find_recipe("anchored"), args.epochs)
    trials = [Trial(data.train[s], data.valid[s], recipe, seed=s) for s in range(args.trials)]

    def seconds(trials: list[Trial]) -> float:
        started = time.perf_counter()
        train_trials(
            lambda: mlp(data.rows.x.shape[1], data.classes), data.rows, trials, objective, scores.argmax,
            batch_size=args.batch_size,
        )  # fmt: skip
        return time.perf_counter() - started

    short = [replace(trial, recipe=fixed_length(recipe, 1)) for trial in trials]
    seconds(short), seconds(short[:1])  # warm up
    one, many = (min(seconds(some) for _ in range(2)) for some in (trials[:1], trials))
    device = torch.cuda.get_device_name() if data.rows.x.is_cuda else "cpu"
    print("set,trials,epochs,seconds_one,seconds_all,ratio,device,torch")
    print(
        f"{args.set},{args.trials},{2 * args.epochs},{one:.2f},{many:.2f},{many / one:.2f},{device},{torch.__version__}"
    )


if __name__ == "__main__":
    main()
