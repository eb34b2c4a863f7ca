"""What `fit` costs on Adult: seconds an epoch beside a plain torch loop and skorch, and peak memory, in one run.

    python benchmarks/bench_epoch.py --data-dir DIR                  # writes benchmarks/results/bench_epoch.csv
    python benchmarks/bench_epoch.py --data-dir DIR --only memory    # its rows of memory alone, the others stay

All train the same network on the same encoded rows with the same batch size; the plain loop is cross-entropy on
in-memory tensors, with and without looking at the validation rows after an epoch as ours does. Runs are interleaved.
Memory is what a process that has loaded the table, and has trained a few rows of it, holds at most while it fits it,
less what it held before: the resident set, as Linux counts it, in `--rounds` processes. It is told beside the table as
float32, as it was loaded (`table`) and with the columns that the encoder makes of it (`encoded`), and the networks:
weights, two moments of each, their average and the best so far.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
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
import pyarrow as pa
import torch
import torch.nn.functional as F
from bench_recipes import load
from skorch import NeuralNetClassifier

from evalign import EASTClassifier
from evalign.networks import mlp
from evalign.storage import write_atomically
from evalign.tables import TableEncoder
from evalign.tables.split import distinct_rows, split_rows
from evalign.training.batches import default_batch_size

RESULTS = Path(__file__).parent / "results" / "bench_epoch.csv"
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


def held_mib(field: str) -> float:
    """Memory of this process as Linux counts it: "VmRSS" now, "VmHWM" at most since it was last asked to forget."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def print_memory(folder: Path, name: str) -> None:
    """What `fit` with default settings takes at most, on a CPU, beyond what the process held before."""
    X, y = load(name, folder)
    model = EASTClassifier(epochs=4, random_state=0, device="cpu")
    # A handful of rows first: libraries take their working space then, not for the table.
    model.fit(X.iloc[:2000].assign(), np.arange(2000) % 2)
    # What was freed and is still held, in amounts that vary from run to run, is no room for `fit` to use unseen.
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    before = held_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    model.fit(X, y)
    networks = sum(weight.numel() for weight in model.network_.parameters()) * 5
    found = {
        "rows": len(X),
        "mib_beyond_loading": held_mib("VmHWM") - before,
        "table_mib": 4 * X.size / 2**20,
        "encoded_mib": 4 * len(X) * len(model.encoder_.feature_names_out) / 2**20,
        "networks_mib": 4 * networks / 2**20,
    }
    print(json.dumps(found))


def memory_row(folder: Path, name: str, rounds: int) -> dict[str, Any]:
    """Fresh processes, one after the other; the worst of them is compared."""
    command = [sys.executable, __file__, "--data-dir", str(folder), "--memory-of", name]
    runs = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds)
    ]
    taken = [run["mib_beyond_loading"] for run in runs]
    sizes = {key: round(runs[0][key], 1) for key in ("table_mib", "encoded_mib", "networks_mib")}
    beside = max(taken) - runs[0]["networks_mib"]
    return {
        "what": f"peak memory of fit, {name}", "rows": runs[0]["rows"],
        "mib_beyond_loading": round(statistics.median(taken), 1),
        "least": round(min(taken), 1), "most": round(max(taken), 1), **sizes,
        "most_less_networks_by_table": round(beside / runs[0]["table_mib"], 2),
        "most_less_networks_by_encoded": round(beside / runs[0]["encoded_mib"], 2),
    }  # fmt: skip


def time_rows(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds of an epoch on Adult, the median of interleaved runs, and ratios to the plain loop of the same round."""
    frame, y = load("adult", folder)
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
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(run(X, y))
    base = times["plain torch loop"]
    return [
        {"what": name, "rows": len(X), "seconds_an_epoch": round(statistics.median(own), 4),
         "ratio_to_plain_loop": round(statistics.median(t / b for t, b in zip(own, base, strict=True)), 3)}
        for name, own in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["time", "memory"], help="measure these rows, keep the others of the file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print_memory(options.data_dir, options.memory_of)
        return
    rows: list[dict[str, Any]] = []
    if options.only != "memory":
        rows += time_rows(options.data_dir, options.rounds)
    if options.only != "time":
        rows += [memory_row(options.data_dir, name, options.rounds) for name in ("adult", "creditcard")]
    versions = {"device": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    table = pd.DataFrame([{**row, **versions} for row in rows])
    if options.only and options.out.exists():
        stays = pd.read_csv(options.out)
        stays = stays[stays["what"].str.startswith("peak memory") != (options.only == "memory")]
        table = pd.concat([table, stays] if options.only == "time" else [stays, table])
    table = table.dropna(axis=1, how="all").reset_index(drop=True)
    write_atomically(options.out, table.to_csv(index=False))
    print(table.to_string())


if __name__ == "__main__":
    main()
