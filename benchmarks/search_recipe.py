"""Search for the defaults of the `anchored` recipe and of the classifier, for F1, on held-out training data.

    python benchmarks/search_recipe.py --data-dir DIR --grid recipes --splits 10 --out recipes.csv
    python benchmarks/search_report.py recipes.csv --against "both cross-entropy"

A split deals the rows, stratified, into 51 % training, 13 % early stopping, 16 % selection and 20 % test; the test
rows are never looked at. A configuration is scored on the selection rows, by the most probable class and by the
plug-in rule for F1, which is fitted to the probabilities of the early-stopping rows. docs/research/recipes.md has the
findings. One row of the CSV is one split of one configuration on one data set.
"""

import argparse
import csv
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from search_grids import GRIDS, Config, Inputs
from torch import Tensor

from evalign import Confusion, metrics
from evalign.networks.embedding import Fields
from evalign.networks.mlp import table_network
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows
from evalign.training.stacked import Trial, train_trials

SETS = ("yeast", "mammography", "letter", "shuttle", "adult", "creditcard")
PARTS = (0.512, 0.64, 0.8)  # where training, early stopping and selection end; the rest is test data


def load(name: str, folder: Path) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Numbers, indicators of categories and labels; cached as NAME.npz next to NAME.parquet."""
    kept = folder / f"{name}.npz"
    if not kept.exists():
        x, c, levels, y = _read(name, folder)
        np.savez_compressed(kept, x=x, c=c, levels=levels, y=y)
    with np.load(kept) as arrays:
        return arrays["x"].astype(np.float64), arrays["c"].astype(np.float64), arrays["y"]


def levels(name: str, folder: Path) -> list[int]:
    """Number of indicators of each categorical column."""
    with np.load(folder / f"{name}.npz") as arrays:
        if "levels" in arrays or not arrays["c"].shape[1]:
            return [int(count) for count in arrays.get("levels", ())]
    return _read(name, folder)[2]  # cached by an earlier call


def _read(name: str, folder: Path) -> tuple[NDArray[np.float32], NDArray[np.int8], list[int], NDArray[np.int64]]:
    import pandas as pd

    frame = pd.read_parquet(folder / f"{name}.parquet")
    if name == "creditcard":
        y = frame.pop("Class")
        frame = frame.drop(columns="Time").assign(Amount=np.log(frame["Amount"] + 1e-3))
    else:
        y = frame.pop("target")
        frame = frame.drop(columns=["split", "income", "fnlwgt"], errors="ignore")
    numbers = frame.select_dtypes("number")
    categories = pd.get_dummies(frame).drop(columns=numbers.columns)
    counts = [frame[column].nunique() for column in frame if column not in numbers]
    labels = pd.factorize(y, sort=True)[0].astype(np.int64)
    return numbers.to_numpy(np.float32), categories.to_numpy(np.int8), counts, labels


def encoded(x: NDArray[np.float64], train: NDArray[np.int64], inputs: Inputs) -> NDArray[np.float64]:
    """Numeric columns as the network's input, scaled by the training rows."""
    columns = []
    for column in x.T:
        if inputs in ("standard", "both", "bins"):
            columns.append((column - column[train].mean()) / (column[train].std() or 1.0))
        if inputs in ("quantile", "both"):
            columns.append(_normal_quantiles(column, column[train]))
        if inputs == "clip":
            columns.append(_smoothly_clipped(column, train))
        if inputs == "bins":
            columns.extend(_ramps(column, np.quantile(column[train], np.linspace(0, 1, 25))))
    return np.stack(columns, 1)


def _normal_quantiles(column: NDArray[np.float64], known: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rank among training values, mapped to a normal distribution; ties get the middle of their ranks."""
    q = np.quantile(known, np.linspace(0, 1, 1000))
    levels = np.linspace(0, 1, 1000)
    rank = (np.interp(column, q, levels) - np.interp(-column, -q[::-1], -levels[::-1])) / 2
    rank = np.where(column <= q[0], 0, np.where(column >= q[-1], 1, rank))
    normal: NDArray[np.float64] = torch.special.ndtri(torch.from_numpy(rank.clip(1e-7, 1 - 1e-7))).numpy()
    return normal


def _smoothly_clipped(column: NDArray[np.float64], train: NDArray[np.int64]) -> NDArray[np.float64]:
    """Scaled by the quartiles and bent to end at -3 and 3 (RealMLP, Holzmüller et al. 2024)."""
    low, middle, high = np.quantile(column[train], [0.25, 0.5, 0.75])
    scale = (high - low) or np.ptp(column[train]) / 2 or 1.0
    x: NDArray[np.float64] = (column - middle) / scale
    return x / np.sqrt(1 + (x / 3) ** 2)


def _ramps(column: NDArray[np.float64], edges: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """Piecewise linear encoding (Gorishniy et al. 2022): the progress of the value through each bin."""
    for low, high in pairwise(edges):
        yield ((column - low) / (high - low)).clip(0, 1) if high > low else np.zeros_like(column)


@dataclass(frozen=True)
class Table:
    """All splits of a data set below one another: split s has the rows from s x n, encoded its own way."""

    rows: Rows
    train: list[Tensor]
    valid: list[Tensor]
    select: list[Tensor]
    fields: list[Fields]
    classes: int


def stratified_order(labels: Tensor, seed: int) -> Tensor:
    """A random order in which every part has its share of every class: the r-th row of a class is (r + u) / n_c on."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class, counts = shuffled[labels[shuffled].argsort(stable=True)], labels.bincount()
    counts = counts[counts > 0].repeat_interleave(counts[counts > 0])
    start = torch.cat([counts.new_zeros(1), (labels[by_class].diff() != 0).nonzero().flatten() + 1])
    rank = torch.arange(len(labels)) - start.repeat_interleave(torch.diff(start, append=torch.tensor([len(labels)])))
    place = (rank + torch.rand(len(labels), generator=generator, dtype=torch.float64)) / counts
    return by_class[place.argsort(stable=True)]


@lru_cache(maxsize=2)
def table(name: str, inputs: Inputs, splits: int, folder: Path) -> Table:
    x, categories, y = load(name, folder)
    n, parts, tables, fields = len(y), [], [], []
    for split in range(splits):
        order = stratified_order(torch.from_numpy(y), split).numpy()
        train, valid, select, _ = np.split(order, [round(n * part) for part in PARTS])
        parts.append((train + split * n, valid + split * n, select + split * n))
        tables.append(np.concatenate([encoded(x, train, inputs), categories], 1).astype(np.float32))
        fields.append(fields_of(x[train], inputs, levels(name, folder)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = Rows.of(torch.from_numpy(np.concatenate(tables)).to(device), torch.from_numpy(np.tile(y, splits)).to(device))
    train_parts, valid_parts, select_parts = ([torch.from_numpy(p) for p in part] for part in zip(*parts, strict=True))
    return Table(rows, train_parts, valid_parts, select_parts, fields, int(y.max()) + 1)


def fields_of(x: NDArray[np.float64], inputs: Inputs, levels: list[int]) -> Fields:
    """Where columns stand, for networks that embed them; of numbers the ranks, where these are inputs."""
    start = encoded(x[:2], np.arange(2), inputs).shape[1]
    ends = start + np.cumsum(levels, dtype=int)
    categories = tuple((int(end) - count, int(end)) for end, count in zip(ends, levels, strict=True))
    if inputs != "both":
        return Fields(start + sum(levels), categories=categories)
    steps = np.linspace(0, 1, 1000)
    edges = [np.unique(_normal_quantiles(np.quantile(column, steps), column)) for column in x.T]
    return Fields(start + sum(levels), tuple(range(1, start, 2)), tuple(map(tuple, edges)), categories)


# Scores


def f1_rule(p: Tensor, weight: Tensor, averaged: Tensor, rounds: int = 40) -> tuple[Tensor, Tensor]:
    """(slope, intercept): classes are chosen by argmax_j slope_j p_j - intercept_j, the plug-in rule for F1.

    With tp, a and q the expected counts, F1_j = 2 tp_j / (a_j + q_j), so the gain of deciding j is
    w_j (2 p_j - F1_j) / (a_j + q_j) up to what does not depend on j. `averaged` holds w.
    """
    weight = weight[:, None] / weight.sum()
    actual = (p * weight).sum(0)

    def counts(decision: Tensor) -> Tensor:
        chosen = (decision[:, None] == torch.arange(p.shape[1], device=p.device)) * weight
        return torch.stack([(chosen * p).sum(0), chosen.sum(0)])

    def f1(c: Tensor) -> Tensor:
        return torch.where(c[0] > 0, 2 * c[0] / (actual + c[1]).clamp_min(1e-30), 0.0)

    state = counts(p.argmax(1))
    best, rule = (averaged * f1(state)).sum(), torch.stack([torch.ones_like(actual), torch.zeros_like(actual)])
    for k in range(rounds):
        gain = averaged / (actual + state[1]).clamp_min(1e-30)
        candidate = torch.stack([2 * gain, gain * f1(state)])
        new = counts((p * candidate[0] - candidate[1]).argmax(1))
        value = (averaged * f1(new)).sum()
        rule, best = torch.where(value > best + 1e-9, candidate, rule), torch.maximum(value, best)
        state = state + 2 / (k + 3) * (new - state)
    return rule[0], rule[1]


class Scores:
    """F1 of the most probable class, and of the plug-in rule, by hard counts that vmap can take."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self.average: Literal["binary", "macro"] = "binary" if classes == 2 else "macro"
        positive_only, all_alike = torch.tensor([0.0, 1.0]), torch.full((classes,), 1 / classes)
        self.averaged = (positive_only if classes == 2 else all_alike).to(device)

    def of(self, decision: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        zero = torch.zeros(len(self.averaged), dtype=weight.dtype, device=weight.device)
        tp, actual = zero.scatter_add(0, y, weight * (decision == y)), zero.scatter_add(0, y, weight)
        counts = Confusion(tp, actual, zero.scatter_add(0, decision, weight), weight.sum())
        return metrics.f1(counts, self.average)

    def argmax(self, p: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.of(p.argmax(1), y, weight)

    def plug_in(self, p: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        slope, intercept = f1_rule(p, weight, self.averaged, rounds=10)
        return self.of((p * slope - intercept).argmax(1), y, weight)


# Runs


def run(name: str, configs: list[Config], splits: int, folder: Path) -> list[dict[str, Any]]:
    """Train configurations of one stack on all splits; one row per configuration and split."""
    torch.set_num_threads(1 if torch.cuda.is_available() else torch.get_num_threads())
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    first, data = configs[0], table(name, configs[0].inputs, splits, folder)
    device = data.rows.x.device
    scores = Scores(data.classes, device)
    objective = Objective("f1", "multiclass", StepChoice("annealed"), average=scores.average)
    trials = [
        Trial(data.train[s], data.valid[s], c.recipe(len(data.train[s])), seed=s, dropout=c.dropout)
        for c in configs
        for s in range(splits)
    ]

    places = cycle(data.fields)  # networks are made in the order of the trials

    def network() -> torch.nn.Module:
        return table_network(
            first.network, next(places), data.classes, first.hidden, ensemble=first.ensemble,
            **dict(first.embedding),
        )  # fmt: skip

    started = time.perf_counter()
    batch_size = first.batch_size(len(data.train[0]))
    watch = scores.argmax if first.watch == "argmax" else scores.plug_in
    results = train_trials(network, data.rows, trials, objective, watch, batch_size=batch_size)
    seconds = time.perf_counter() - started
    rows = []
    for place, result in enumerate(results):
        config, split = configs[place // splits], place % splits
        model = network().to(device)
        model.load_state_dict(result.state)
        model.eval()
        valid, select = data.rows[data.valid[split].to(device)], data.rows[data.select[split].to(device)]
        with torch.no_grad():
            p_valid, p_select = (model(part.x).double().softmax(1) for part in (valid, select))
        slope, intercept = f1_rule(p_valid, valid.weight.double(), scores.averaged.double())
        weight = select.weight.double()
        at_label = p_select.gather(1, select.y[:, None])
        rows.append(
            {
                "set": name,
                "config": config.name,
                "split": split,
                "batch": batch_size,
                "argmax": round(float(scores.argmax(p_select, select.y, weight)), 5),
                "plug_in": round(
                    float(scores.of((p_select * slope - intercept).argmax(1), select.y, weight)), 5
                ),
                "log_loss": round(float(-at_label.clamp_min(1e-12).log().mean()), 5),
                "epochs": len(result.history),
                "trials": len(trials),
                "seconds": round(seconds, 1),
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "torch": torch.__version__,
            }
        )  # fmt: skip
    return rows


def stacks(
    sets: list[str], configs: list[Config], splits: dict[str, int], group: int, folder: Path
) -> list[tuple[str, list[Config]]]:
    """What is trained together: configurations that agree in all but dropout and stages, at most `group` trials.

    The longest come first, so that none is left to run alone at the end.
    """
    units: list[tuple[float, str, list[Config]]] = []
    for name in sets:
        n = round(PARTS[0] * len(load(name, folder)[2]))
        by_stack: dict[tuple[Any, ...], list[Config]] = {}
        for config in (config for config in configs if config.sets is None or name in config.sets):
            by_stack.setdefault(config.stack(n), []).append(config)
        size = max(1, group // splits[name])
        for key, members in by_stack.items():
            parts = [members[i : i + size] for i in range(0, len(members), size)]
            units += [(n * key[-1] * len(part), name, part) for part in parts]
    return [(name, members) for _, name, members in sorted(units, key=lambda unit: unit[0], reverse=True)]


def search(
    sets: list[str], configs: list[Config], splits: dict[str, int], group: int, jobs: int, folder: Path, out: Path
) -> None:
    units = stacks(sets, configs, splits, group, folder)
    print(f"{len(units)} stacks, {sum(len(members) * splits[name] for name, members in units)} trials")
    started = time.perf_counter()
    with (
        out.open("w", newline="") as file,
        ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        writer = None
        for done in as_completed([pool.submit(run, name, own, splits[name], folder) for name, own in units]):
            try:
                rows = done.result()
            except Exception as problem:
                print(f"a stack failed: {problem!r}")
                continue
            if writer is None:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
            writer.writerows(rows)
            file.flush()
            elapsed = time.perf_counter() - started
            print("{:6.0f} s  {set}: {trials} trials took {seconds} s".format(elapsed, **rows[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="holds NAME.parquet for every set")
    parser.add_argument("--grid", choices=GRIDS, default="recipes")
    parser.add_argument("--configs", nargs="+", help="these of the grid alone, by name")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", nargs="+", default=["5"], metavar="N", help="e.g. 10 adult=5: five for Adult")
    parser.add_argument("--group", type=int, default=100, help="trials in a stack, at most")
    parser.add_argument("--jobs", type=int, default=1, help="stacks trained at the same time")
    parser.add_argument("--out", type=Path, required=True, help="the CSV to write")
    args = parser.parse_args()
    configs = [config for config in GRIDS[args.grid]() if args.configs is None or config.name in args.configs]
    splits = {name: int(entry) for entry in args.splits if "=" not in entry for name in SETS}
    splits |= {name: int(number) for name, _, number in (entry.partition("=") for entry in args.splits) if number}
    search(args.sets, configs, splits, args.group, args.jobs, args.data_dir, args.out)


if __name__ == "__main__":
    main()
