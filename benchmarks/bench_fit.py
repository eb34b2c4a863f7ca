"""What `fit` costs on Adult: seconds an epoch beside a plain torch loop and skorch, and peak memory, in one run.

    python benchmarks/bench_fit.py --data-dir DIR          # writes benchmarks/results/bench_fit.csv

All train the same network on the same encoded rows with the same batch size; the plain loop is cross-entropy on
in-memory tensors, with and without looking at the validation rows after an epoch as ours does. Runs are interleaved.
Memory is the peak resident set of a process that fits, less that of one that only loads the table.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait fight over busy cores

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from bench_quality import load
from skorch import NeuralNetClassifier

from evalign import EASTClassifier
from evalign.networks import mlp
from evalign.tables import TableEncoder
from evalign.tables.distinct import distinct_rows, split_rows
from evalign.training.batches import default_batch_size

RESULTS = Path(__file__).parent / "results" / "bench_fit.csv"
EPOCHS = 4
SAME: dict[str, Any] = {"numeric": "standard", "random_state": 0, "device": "cpu"}  # the same columns for all


def ours(X: np.ndarray, y: np.ndarray, recipe: str) -> float:
    """Median seconds of an epoch of `fit`, validation included."""
    model = EASTClassifier(recipe=recipe, epochs=EPOCHS, **SAME).fit(X, y)
    return float(statistics.median(row["seconds"] for row in model.history_))


def metric_stage(X: np.ndarray, y: np.ndarray) -> float:
    model = EASTClassifier(recipe="anchored", epochs=2 * EPOCHS, **SAME).fit(X, y)
    last = model.history_[-1]["stage"]
    return float(statistics.median(row["seconds"] for row in model.history_ if row["stage"] == last))


def plain_loop(X: np.ndarray, y: np.ndarray, *, validate: bool) -> float:
    train, valid = split_rows(y, 0.2, 0)
    x, labels = torch.from_numpy(X[train]), torch.from_numpy(y[train])
    held, held_y = torch.from_numpy(X[valid]), torch.from_numpy(y[valid])
    network = mlp(X.shape[1], 2, EASTClassifier().hidden, EASTClassifier().dropout)
    optimiser = torch.optim.AdamW(network.parameters())
    size, seconds = default_batch_size(len(train)), []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        network.train()
        for index in torch.randperm(len(x)).split(size):  # type: ignore[no-untyped-call]
            loss = F.cross_entropy(network(x[index]), labels[index])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        if validate:
            network.eval()
            with torch.no_grad():
                F.cross_entropy(network(held), held_y).item()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def skorch_loop(X: np.ndarray, y: np.ndarray, size: int) -> float:
    network = mlp(X.shape[1], 2, EASTClassifier().hidden, EASTClassifier().dropout)
    model = NeuralNetClassifier(
        network,
        max_epochs=EPOCHS,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        batch_size=size,
        verbose=0,
    )
    return float(statistics.median(model.fit(X, y).history[:, "dur"]))


def peak_mib(folder: Path, name: str, fit: bool) -> float:
    """Peak resident memory of a fresh process that loads a set and, if told, fits it."""
    out = subprocess.run(
        [sys.executable, __file__, "--data-dir", str(folder), "--peak-of", name, *(["--fit"] if fit else [])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(json.loads(out.stdout)["peak_mib"])


def measure_peak(folder: Path, name: str, fit: bool) -> None:
    X, y = load(name, folder)
    model = EASTClassifier(epochs=4, random_state=0, device="cpu")
    # Both processes train a handful of rows first: libraries take their working space then, not for the table.
    model.fit(X.iloc[:2000].assign(), np.arange(2000) % 2)
    if fit:
        model.fit(X, y)
    print(json.dumps({"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--fit", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        measure_peak(options.data_dir, options.peak_of, options.fit)
        return
    frame, y = load("adult", options.data_dir)
    distinct, _ = distinct_rows(frame, y, np.ones(len(y)))  # ours counts equal rows once; give all the same ones
    X, y = TableEncoder().fit_transform(frame.iloc[distinct]), y[distinct]
    contenders: dict[str, Callable[[Any, Any], float]] = {
        "plain torch loop": lambda X, y: plain_loop(X, y, validate=False),
        "plain torch loop + validation": lambda X, y: plain_loop(X, y, validate=True),
        "fit, cross-entropy stage": lambda X, y: ours(X, y, "cross_entropy"),
        "fit, metric stage": metric_stage,
        "skorch, same batches": lambda X, y: skorch_loop(X, y, default_batch_size(int(0.8 * len(y)))),
        "skorch, its default batches of 128": lambda X, y: skorch_loop(X, y, 128),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            times[name].append(run(X, y))
    base = times["plain torch loop"]
    rows: list[dict[str, Any]] = [
        {"what": name, "seconds_an_epoch": round(statistics.median(own), 4),
         "ratio_to_plain_loop": round(statistics.median(t / b for t, b in zip(own, base, strict=True)), 3)}
        for name, own in times.items()
    ]  # fmt: skip
    for name in ("adult", "creditcard"):
        table, _ = load(name, options.data_dir)
        matrix_mib = TableEncoder(numeric=EASTClassifier().numeric).fit_transform(table).nbytes / 2**20
        extra = peak_mib(options.data_dir, name, True) - peak_mib(options.data_dir, name, False)
        rows.append(
            {
                "what": f"peak memory of fit, {name}",
                "mib_beyond_loading": round(extra, 1),
                "table_as_float32_mib": round(matrix_mib, 1),
                "ratio_to_table": round(extra / matrix_mib, 2),
            }
        )
    table = pd.DataFrame(rows).assign(
        device=platform.machine(), threads=torch.get_num_threads(), torch=torch.__version__, rows=len(X)
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out, index=False)
    print(table.to_string())


if __name__ == "__main__":
    main()
