"""F1 after training in batches of 64, with and without a memory, and in batches of 4096.

    python benchmarks/bench_batches_training.py --data-dir DIR --sets mammography       # ten minutes on one busy core
    python benchmarks/bench_batches_training.py --data-dir DIR --device cuda            # credit card: for a GPU

The recipe "anchored" (cross-entropy, then soft F1 + 3 x cross-entropy) with cosine decay, its learning rates multiplied
by every factor of a grid, ten splits (64 / 16 / 20). Each arm is compared at the factor with its best mean F1 on
validation rows. All trials of a batch size are one stacked network; the arms of a split share rows, initial weights and
row order. Test rows are read at the end.
"""

import argparse
import csv
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import f1_score
from torch import Tensor
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from evalign.memory import Memory
from evalign.networks.mlp import mlp
from evalign.objective import Objective, cross_entropy
from evalign.steps import StepChoice
from evalign.tables.encode import TableEncoder
from evalign.training.loop import Controller
from evalign.training.recipes import Recipe, Stage, find_recipe
from evalign_papers.datasets import load
from evalign_papers.datasets.dataset import Dataset
from evalign_papers.datasets.splits import splits
from evalign_papers.engine.trial_data import thinned

RESULTS = Path(__file__).parent / "results" / "bench_batches_training.csv"
SMALL, LARGE = 64, 4096
FACTORS = {SMALL: (1.0, 2.0, 4.0, 8.0, 16.0), LARGE: (8.0, 16.0, 32.0, 64.0, 128.0)}
OBJECTIVE = Objective("f1", "binary", StepChoice("annealed"), "binary", backend="eager")


def dataset(name: str, folder: Path) -> Dataset:
    """Credit card with 100 negatives for every positive, drawn as in the table of imbalances."""
    return thinned(load(name, folder), 100) if name == "creditcard" else load(name, folder)


def recipe(rows: int, size: int) -> Recipe:
    found = find_recipe("anchored")
    stages = tuple(replace(stage, decay="cosine") for stage in found.stages)
    return replace(found, stages=stages).for_rows(rows, size)


@dataclass(frozen=True)
class Arm:
    """One trial of the stack."""

    split: int
    remembers: bool
    factor: float


class Stack:
    """Networks of all trials of one batch size, trained together; every trial sees the rows of its own split."""

    def __init__(self, parts: Sequence[Any], arms: list[Arm], size: int, hidden: tuple[int, ...], device: str) -> None:
        self.arms, self.device = arms, torch.device(device)
        self.parts = [self._of_arms(parts, part) for part in ("train", "valid", "test")]
        rows, features = self.parts[0][0].shape[1:]
        self.recipe = recipe(rows, size)
        self.steps = max(1, round(rows / size))
        networks = []
        for arm in arms:
            torch.manual_seed(arm.split)
            networks.append(mlp(features, 1, hidden, 0.25))
        weights, _ = stack_module_state(networks)
        self.network = networks[0].to("meta")
        self.weights = {name: value.detach().to(self.device) for name, value in weights.items()}
        self.memory = Memory().to(self.device)
        self.counts = torch.zeros(len(arms), 7, dtype=torch.float64, device=self.device)
        self.seen = torch.zeros(len(arms), 2, dtype=torch.float64, device=self.device)
        self.remembers = torch.tensor([arm.remembers for arm in arms], device=self.device)

    def _of_arms(self, parts: Sequence[Any], part: str) -> tuple[Tensor, Tensor]:
        x, y = (np.stack([getattr(p, part)[i] for p in parts]) for i in (0, 1))
        which = torch.tensor([arm.split for arm in self.arms])
        return torch.from_numpy(x)[which].to(self.device), torch.from_numpy(y)[which].to(self.device)

    def train(self) -> None:
        best = {name: value.clone() for name, value in self.weights.items()}
        for stage in self.recipe.stages:
            self._stage(stage, best)
            self.weights = {name: value.clone() for name, value in best.items()}

    def _stage(self, stage: Stage, best: dict[str, Tensor]) -> None:
        controllers = [
            Controller(replace(stage, learning_rate=arm.factor * stage.learning_rate)) for arm in self.arms
        ]  # fmt: skip
        averages = [{name: torch.zeros_like(v) for name, v in self.weights.items()} for _ in range(2)]
        updates = 0
        while not controllers[0].finished:
            temperature = controllers[0].temperature
            before = self.memory.temperature.clone()
            self.memory.at_temperature(temperature)
            if not torch.equal(before, self.memory.temperature):
                self.counts.zero_()
            rates = torch.tensor([c.learning_rate for c in controllers], device=self.device)
            for index in self._batches(controllers[0].epochs + len(stage.name)):
                updates += 1
                gradients = self._gradients(index, stage, temperature)
                self._update(gradients, averages, rates, updates, stage.weight_decay)
            losses, entropies, scores = self.validate(self.parts[1], stage, temperature)
            better = [
                c.step(loss=a, entropy=b, score=s)
                for c, a, b, s in zip(controllers, losses, entropies, scores, strict=True)
            ]  # fmt: skip
            chosen = torch.tensor(better, device=self.device)
            for name, value in self.weights.items():
                mask = chosen.view(-1, *[1] * (value.dim() - 1))
                best[name] = torch.where(mask, value, best[name])

    def _batches(self, epoch: int) -> Sequence[Tensor]:
        """Rows of every arm, the same for the arms of a split; each time a few different rows are left out."""
        rows = self.parts[0][0].shape[1]
        orders = {
            arm.split: torch.randperm(rows, generator=torch.Generator().manual_seed(1000 * epoch + arm.split))
            for arm in self.arms
        }
        order = torch.stack([orders[arm.split] for arm in self.arms]).to(self.device)
        size = rows // self.steps
        return torch.split(order[:, : size * self.steps], size, 1)

    def _gradients(self, index: Tensor, stage: Stage, temperature: float) -> dict[str, Tensor]:
        x, y = self.parts[0]
        x = torch.gather(x, 1, index[:, :, None].expand(-1, -1, x.shape[2]))
        y = torch.gather(y, 1, index)
        one = partial(self._loss, stage=stage, temperature=temperature)
        per_trial = vmap(grad_and_value(one, has_aux=True), randomness="different")
        found: Any = per_trial(self.weights, x, y, self.counts, self.seen, self.remembers)
        gradients: dict[str, Tensor] = found[0]
        self.counts, self.seen = found[1][1]
        return gradients

    def _loss(
        self, weights: Any, x: Tensor, y: Tensor, counts: Tensor, seen: Tensor, remembers: Tensor, *, stage: Stage,
        temperature: float,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        z = functional_call(self.network.train(), weights, (x,)).squeeze(-1)
        ones = torch.ones_like(z)
        if not stage.metric:
            return stage.anchor * cross_entropy(z, y, ones, "binary"), (counts, seen)
        objective = replace(OBJECTIVE, anchor=stage.anchor)
        sums = objective.sums(z, y, ones, temperature)
        # A separate memory per trial, whose state is passed in and out.
        memory = Memory()
        memory.state, memory.seen = counts.clone(), seen.clone()
        loss = torch.where(remembers, objective.of_sums(memory(sums)), objective.of_sums(sums))
        return loss, (memory.state.detach(), memory.seen.detach())

    @torch.no_grad()
    def _update(
        self, gradients: dict[str, Tensor], averages: list[dict[str, Tensor]], rates: Tensor, updates: int, decay: float
    ) -> None:
        """AdamW with a learning rate for every trial (Loshchilov and Hutter 2019, torch's defaults)."""
        for name, gradient in gradients.items():
            weight, first, second = self.weights[name], averages[0][name], averages[1][name]
            rate = rates.view(-1, *[1] * (weight.dim() - 1))
            first.lerp_(gradient, 0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            root = (second / (1 - 0.999**updates)).sqrt_().add_(1e-8)
            weight.mul_(1 - rate * decay).sub_(rate * (first / (1 - 0.9**updates)) / root)

    @torch.no_grad()
    def validate(
        self, part: tuple[Tensor, Tensor], stage: Stage, temperature: float
    ) -> tuple[list[float], list[float], list[float]]:
        """Loss, cross-entropy and F1 at argmax of every trial."""
        objective = replace(OBJECTIVE, anchor=stage.anchor)

        def one(weights: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            z = functional_call(self.network.eval(), weights, (x,)).squeeze(-1)
            ones = torch.ones_like(z)
            entropy = cross_entropy(z, y, ones, "binary")
            loss = objective(z, y, ones, temperature) if stage.metric else stage.anchor * entropy
            positive = (z >= 0).float()
            return loss, entropy, 2 * (positive * y).sum() / (positive.sum() + y.sum())

        found = vmap(one)(self.weights, *part)
        loss, entropy, score = (x.tolist() for x in found)
        return loss, entropy, score

    @torch.no_grad()
    def test_scores(self) -> list[float]:
        x, y = self.parts[2]
        z = vmap(lambda weights, x: functional_call(self.network.eval(), weights, (x,)).squeeze(-1))(self.weights, x)
        return [float(f1_score(*pair, zero_division=0.0)) for pair in zip(y.cpu(), (z >= 0).cpu(), strict=True)]


@dataclass(frozen=True)
class Part:
    train: tuple[np.ndarray, np.ndarray]
    valid: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def encoded(name: str, folder: Path, trials: int) -> list[Part]:
    data = dataset(name, folder)
    found = []
    for split in splits(data, trials):
        encoder = TableEncoder(numeric="standard").fit(data.X, rows=split.train)
        found.append(Part(*((encoder.transform(data.X, rows=rows), data.y[rows]) for rows in split)))
    return found


def trained(name: str, parts: list[Part], hidden: tuple[int, ...], device: str) -> list[dict[str, Any]]:
    rows = []
    for size in (LARGE, SMALL):
        arms = [
            Arm(split, remembers, factor)
            for split in range(len(parts))
            for remembers in ((False, True) if size == SMALL else (False,))
            for factor in FACTORS[size]
        ]
        started, stack = time.perf_counter(), Stack(parts, arms, size, hidden, device)
        stack.train()
        loss, entropy, score = stack.validate(stack.parts[1], stack.recipe.stages[-1], 0.2)
        tested = stack.test_scores()
        print(f"{name}, batch {size}: {stack.recipe.epochs} epochs of {stack.steps} updates, {len(arms)} trials, "
              f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
        rows += [
            {"set": name, "split": arm.split, "batch": size, "memory": "auto" if arm.remembers else "none",
             "rate_factor": arm.factor, "valid_loss": loss[i], "valid_entropy": entropy[i], "valid_f1": score[i],
             "test_f1": tested[i]}
            for i, arm in enumerate(arms)
        ]  # fmt: skip
    return rows


def chosen(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """F1 on test rows of each arm at the factor with the best mean F1 on validation rows, split by split."""
    frame = pd.DataFrame(rows)
    arms = {}
    for (batch, memory), arm in frame.groupby(["batch", "memory"]):
        factor = arm.groupby("rate_factor")["valid_f1"].mean().idxmax()
        own = arm[arm["rate_factor"] == factor].set_index("split")["test_f1"]
        arms[f"batch {batch}, memory {memory}, rates x {factor:g}"] = own
    return pd.DataFrame(arms)


def show(rows: list[dict[str, Any]]) -> None:
    table = chosen(rows)
    large = next(name for name in table if str(name).startswith(f"batch {LARGE}"))
    for name in table:
        gap = table[name] - table[large]
        print(f"{rows[0]['set']:12} {name:40} F1 {_shown(table[name])}, minus batch {LARGE}: {_shown(gap)}", flush=True)


def _shown(values: Any) -> str:
    return f"{values.mean():.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


def write(path: Path, rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in (row | facts).items()} for row in rows
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--sets", default="mammography,creditcard")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--hidden", default="64,32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} cpu"
    facts = {"hidden": options.hidden.replace(",", "-"), "device": device, "torch": torch.__version__,
             "commit": git.stdout.strip()}  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name in options.sets.split(","):
        parts = encoded(name, options.data_dir, options.splits)
        own = trained(name, parts, tuple(map(int, options.hidden.split(","))), options.device)
        show(own)
        rows += own
        write(options.out, rows, facts)


if __name__ == "__main__":
    main()
