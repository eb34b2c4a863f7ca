"""Memory and speed of `evalign fit FOLDER`, on rows that are generated file by file.

    python benchmarks/bench_stream.py                                  # 20 million rows, 1.2 GB on the disk for a while
    python benchmarks/bench_stream.py --rows 1000000 --epochs 10       # adds a row to results/bench_stream.csv

The command runs in a separate process whose memory is sampled four times a second; up to a hundred samples are added to
results/bench_stream_memory.csv. `start_mib` is the memory before the first row is read (libraries).
`training_early_mib` and `training_late_mib` are the peaks of the second and the last quarter of training, which differ
if memory grows with the rows seen. The size of the encoded table as one float32 array is also given.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

from evalign.streaming.fit_stream import epoch_updates
from evalign.training.batches import default_batch_size
from evalign.training.recipes import find_recipe

RESULTS = Path(__file__).parent / "results"
NUMBERS, TOWNS, ROW_GROUP, FILE = 10, 20, 100_000, 1_000_000
ENCODED = NUMBERS + 1 + TOWNS  # columns: one of the numbers has gaps
LOOKS = 100


def generate(folder: Path, rows: int) -> None:
    """Ten numeric columns, one with gaps, a category, and a label with 3 % positives."""
    for i, start in enumerate(range(0, rows, FILE)):
        n, rng = min(FILE, rows - start), np.random.default_rng(i)
        x = rng.standard_normal((n, NUMBERS), dtype=np.float32)
        columns: dict[str, Any] = {f"x{j}": x[:, j] for j in range(NUMBERS)}
        columns["x0"] = np.where(rng.random(n) < 0.05, np.nan, np.exp(x[:, 0])).astype(np.float32)
        columns["town"] = pa.array(np.array([f"town {k}" for k in range(TOWNS)])[rng.integers(0, TOWNS, n)])
        columns["y"] = (x[:, :3].sum(1) + x[:, 3] * x[:, 4] + rng.standard_normal(n) > 4.2).astype(np.int8)
        table = pa.table(columns)
        pa.parquet.write_table(table, folder / f"part-{i:04}.parquet", row_group_size=ROW_GROUP)


@dataclass
class Watched:
    """A process, its memory over time, and the time of each line it printed."""

    held: list[tuple[float, float]] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, command: list[str]) -> None:
        started = time.perf_counter()
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            assert process.stderr is not None

            def listen(lines: Any) -> None:
                for line in lines:
                    self.said.append((time.perf_counter() - started, line.strip()))

            listener = threading.Thread(target=listen, args=(process.stderr,))
            listener.start()
            while process.poll() is None:
                if mib := resident(process.pid):
                    self.held.append((time.perf_counter() - started, mib))
                time.sleep(0.25)
            listener.join()
        self.seconds = time.perf_counter() - started
        if process.returncode:
            raise SystemExit("\n".join(line for _, line in self.said))

    def when(self, words: str) -> float:
        return next(second for second, line in self.said if words in line)

    def words(self, words: str) -> str:
        return next(line for _, line in self.said if words in line)

    def peak(self, start: float, end: float) -> int:
        """Peak memory in MiB between two times."""
        return round(max(mib for second, mib in self.held if start <= second <= end))


def resident(pid: int) -> float:
    """Resident memory of a process in MiB; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0) / 1024


def measured(folder: Path, rows: int, hidden: str, epochs: int | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A row with the cost of the fit, and rows with its memory over time."""
    out = folder / "run"
    options = ["--hidden", hidden, "--device", "cpu", *(["--epochs", str(epochs)] if epochs else [])]
    command = [sys.executable, "-m", "evalign", "fit", str(folder / "data"), "-t", "y", "-o", str(out), *options]
    watched = Watched()
    watched.run(command)
    result = json.loads((out / "result.json").read_text())
    trained = {row["contender"]: row for row in result["table"] if row["decision"] == "plug_in"}
    training = sum(row["seconds"] for row in trained.values())
    reading, read = watched.when("reading them once"), watched.when("first pass")
    quarter = training / 4
    files = sum(file.stat().st_size for file in (folder / "data").iterdir())
    summary = {
        "rows": rows, "files_mib": round(files / 2**20), "table_as_float32_mib": round(rows * ENCODED / 2**18),
        "start_mib": watched.peak(0, reading), "survey_peak_mib": watched.peak(reading, read),
        "training_early_mib": watched.peak(read + quarter, read + 2 * quarter),
        "training_late_mib": watched.peak(read + 3 * quarter, read + training),
        "peak_mib": watched.peak(0, watched.seconds), "survey_rows_a_second": round(rows / (read - reading)),
        "training_rows_a_second": round(rows_seen(int(watched.words("first pass").split()[2]), epochs) / training),
        "training_seconds": round(training, 1), "seconds": round(watched.seconds, 1), "epochs": epochs or "recipe",
        "hidden": hidden.replace(",", "-"),
        **{f"test_f1_{name}": round(trained[name]["score"], 4) for name in ("ours", "cross_entropy")},
        "threads": os.environ.get("OMP_NUM_THREADS", ""), "device": f"{platform.machine()} cpu",
        "torch": torch.__version__, "commit": commit(),
    }  # fmt: skip
    thin = watched.held[:: -(-len(watched.held) // LOOKS)]
    return summary, [{"rows": rows, "second": round(s, 1), "mib": round(mib)} for s, mib in thin]


def rows_seen(train_rows: int, epochs: int | None) -> int:
    """Rows that ours and then cross-entropy train on, without early stopping."""
    size = default_batch_size(train_rows)
    updates = epoch_updates(train_rows, size)
    recipes = [
        find_recipe(name).limited(epochs).for_rows(updates * size, size) for name in ("anchored", "cross_entropy")
    ]
    return sum(recipe.epochs for recipe in recipes) * updates * size


def commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, stdout=subprocess.PIPE, text=True, cwd=RESULTS).stdout.strip()


def add(path: Path, rows: list[dict[str, Any]]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--epochs", type=int, default=None, help="at most; the recipe's unless given")
    parser.add_argument("--hidden", default="64,32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        generate(folder / "data", options.rows)
        summary, held = measured(folder, options.rows, options.hidden, options.epochs)
    print(summary)
    add(RESULTS / "bench_stream.csv", [summary])
    add(RESULTS / "bench_stream_memory.csv", held)


if __name__ == "__main__":
    main()
