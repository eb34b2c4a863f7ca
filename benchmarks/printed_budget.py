"""Run cells of the papers' tables at the printed budget, within a time limit.

    python benchmarks/printed_budget.py cells 'btg/*/paper/adult.*' --device cpu --jobs 9 --seconds 440 --out adult.tar
    python benchmarks/printed_budget.py cifar10 east/1/paper/cifar10.f1:1e-4 --trials 3 --seconds 430 --out rows.jsonl

`cells` runs the configs that match a pattern below the folder of tables, as `evalign reproduce` does, and packs their
reports after each one; a later run resumes. `cifar10` trains Darknet-19 by EAST's printed protocol (patience 50 a
temperature, no bound on epochs) at one batch size and some learning rates of the printed grid, one thread each, and
writes a line per network: its curve, and the scores at the lowest validation loss. `reports` turns these lines into
reports. It needs torch, scikit-learn, pandas and pyarrow only.
"""

import argparse
import json
import os
import tarfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from evalign_papers.engine.cells import Cell
from evalign_papers.engine.config import Config
from evalign_papers.engine.printed import PACKAGED
from evalign_papers.engine.reports import Report, TrialReport, environment, report_path, save_report
from evalign_papers.engine.settings import LONGER_BUDGET, UNBOUNDED


def run_cells(args: argparse.Namespace) -> None:
    from evalign_papers.engine.scheduler import is_open, pieces_of, run_cell, run_trial

    started = time.monotonic()
    named = dict.fromkeys(path for pattern in args.patterns for path in sorted(PACKAGED.glob(f"{pattern}.json")))
    cells = [Cell(path) for path in named if not path.name.endswith(".report.json")]
    cells = [cell for cell in cells if cell.row not in args.skip]
    todo = [cell for cell in cells if is_open(cell, args.trials)]
    print(f"{len(todo)} of {len(cells)} cells to run", flush=True)
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), _set_up_worker, (args.tf32,))
    waiting = {
        pool.submit(run_cell, cell.path, args.data_dir, args.device, args.trials)
        if trial is None
        else pool.submit(run_trial, cell.path, args.data_dir, args.device, trial)
        for cell, trial in pieces_of(todo, args.trials)
    }
    while waiting:
        left = args.seconds - (time.monotonic() - started)
        finished, waiting = wait(waiting, max(0.0, min(left, 30.0)), FIRST_COMPLETED)
        for future in finished:
            done = future.result()
            print(f"{done.cell}: {done.error or f'{done.trials} trials'}, {done.seconds:.0f} s", flush=True)
        _pack(cells, args.out)
        if left <= 0:
            print(f"time is up: {len(waiting)} cells are not complete", flush=True)
            for process in list(pool._processes.values()):
                process.kill()
            os._exit(0)


def _set_up_worker(tf32: bool) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def _pack(cells: list[Cell], out: Path) -> None:
    temporary = out.with_suffix(".part")
    with tarfile.open(temporary, "w") as archive:
        for path in (report_path(cell.path) for cell in cells):
            if path.exists():
                archive.add(path, str(path.relative_to(PACKAGED)))
    temporary.replace(out)


def at_point(path: Path, rate: float, batch_size: int) -> Config:
    """The config of a cell at one point of its printed grid."""
    config = Cell(path).config
    assert config.training is not None
    stages = tuple(replace(stage, learning_rate=rate) for stage in config.training.stages)
    return replace(config, training=replace(config.training, stages=stages, batch_size=batch_size))


class Job(NamedTuple):
    """One network: a cell's config at a learning rate, and a trial."""

    path: Path
    rate: float
    trial: int


def train_one(job: Job, shared: argparse.Namespace, dataset: Any, pixels: Any, started: Event) -> dict[str, Any]:
    """Train one network until patience or time runs out; its scores, its curve, and which of the two it was.

    Sets `started` after the first epoch, when nothing is recorded or seeded any more.
    """
    from evalign.training.batches import probabilities_of
    from evalign_papers.engine.scores import hard_scores
    from evalign_papers.engine.single_trials import image_splits, train_images

    config = at_point(job.path, job.rate, shared.batch)
    [(_, split)] = image_splits(config, dataset, [job.trial])
    begin, curve, stopped = time.time(), list[list[float]](), ["patience"]

    def watch(_trial: int, epoch: Any) -> None:
        curve.append([epoch.temperature, epoch.train_loss, epoch.loss, epoch.score])
        started.set()
        if time.time() > shared.deadline or len(curve) >= shared.epochs:
            stopped[0] = "time"
            raise KeyboardInterrupt

    try:
        with on_a_stream(pixels):
            trained = train_images(config, dataset, pixels, split, job.trial, {}, None, watch, catch_interrupt=True)
    finally:
        started.set()
    test = probabilities_of(trained.test.double(), "multiclass").numpy()
    scores = hard_scores(test.argmax(1), dataset.y[split.test], len(dataset.classes), dataset.classes)
    best = min(range(len(curve)), key=lambda i: curve[i][2])
    return {
        "cell": Cell(job.path).name, "loss": Cell(job.path).row, "learning_rate": job.rate, "batch_size": shared.batch,
        "trial": job.trial, "epochs": len(curve), "stopped_by": stopped[0], "best_epoch": best + 1,
        "seconds": round(time.time() - begin, 1), "test": {name: round(score, 4) for name, score in scores.items()},
        "validation_loss": curve[best][2], "validation_score": curve[best][3],
        "environment": environment(shared.device), "curve": [[round(v, 4) for v in line] for line in curve],
    }  # fmt: skip


def on_a_stream(pixels: Any) -> Any:
    """A stream of the thread's own on a GPU, so that networks trained at once share it kernel by kernel."""
    import torch

    return torch.cuda.stream(torch.cuda.Stream()) if pixels.is_cuda else nullcontext()  # type: ignore[no-untyped-call]


def run_cifar(args: argparse.Namespace) -> None:
    """Train all networks at once, one thread each; every one starts when the one before has trained an epoch."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import numpy as np
    import torch

    from evalign_papers.engine.trial_data import dataset_of

    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    trials = range(args.first_trial, args.first_trial + (args.trials or 1))
    chosen = [(cell, float(rate)) for cell, _, rate in (one.partition(":") for one in args.cells)]
    jobs = [Job(PACKAGED / f"{cell}{LONGER_BUDGET}.json", rate, trial) for trial in trials for cell, rate in chosen]
    dataset = dataset_of(Cell(jobs[0].path).config, args.data_dir)
    pixels = torch.from_numpy(np.ascontiguousarray(dataset.X)).to(args.device)
    args.deadline = time.time() + args.seconds
    futures = set[Future[dict[str, Any]]]()
    with ThreadPoolExecutor(len(jobs)) as pool, args.out.open("a", encoding="utf-8") as file:
        for job in jobs:
            started = Event()
            futures.add(pool.submit(train_one, job, args, dataset, pixels, started))
            started.wait()
            print(f"{time.strftime('%X')} {job.path.name} {job.rate:g} {job.trial} trains", flush=True)
        for future in as_completed(futures):
            line = future.result()
            file.write(json.dumps(line) + "\n")
            file.flush()
            print({key: value for key, value in line.items() if key != "curve"}, flush=True)


def write_reports(args: argparse.Namespace) -> None:
    """Write rows of `cifar10` as reports of the cells `@longer` that they match."""
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    for path in sorted(PACKAGED.glob(f"*/*/paper/cifar10.*{LONGER_BUDGET}.json")):
        cell = Cell(path)
        training = cell.config.training
        assert training is not None
        point = training.stages[0].learning_rate, training.batch_size
        own = {
            row["trial"]: row
            for row in rows
            if row["cell"] == cell.name and (row["learning_rate"], row["batch_size"]) == point
        }
        trials = [
            TrialReport(
                trial, cell.config.seed + trial, {}, row["epochs"], row["seconds"], {"paper": row["test"]}
            )
            for trial, row in own.items()
        ]  # fmt: skip
        if not trials:
            continue
        stopped = sum(row["stopped_by"] == "time" for row in own.values())
        where = next(reversed(own.values()))["environment"] | ({"stopped_by_time": stopped} if stopped else {})
        report = Report(cell.config, trials, [], where, sum(trial.seconds for trial in trials))
        save_report(report, report_path(cell.path))
        print(f"{cell.path.name}: {len(trials)} trials, {stopped} stopped by time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    cells = commands.add_parser("cells")
    cells.add_argument("patterns", nargs="+")
    cells.add_argument("--jobs", type=int, default=1)
    cells.add_argument("--tf32", action="store_true", help="TF32 for matrix products on a GPU")
    cells.add_argument("--skip", nargs="*", default=(), help="rows to leave out, such as ap_perf, which needs highspy")
    cells.set_defaults(run=run_cells)
    cifar = commands.add_parser("cifar10")
    cifar.add_argument("cells", nargs="+", help="cell:learning rate, such as east/1/paper/cifar10.f1:1e-4")
    cifar.add_argument("--batch", type=int, default=256)
    cifar.add_argument("--epochs", type=int, default=UNBOUNDED, help="for a trial run")
    cifar.add_argument("--first-trial", type=int, default=0)
    cifar.set_defaults(run=run_cifar)
    reports = commands.add_parser("reports", help="rows of cifar10 as reports of the cells @longer")
    reports.add_argument("rows", type=Path)
    reports.set_defaults(run=write_reports)
    for one in (cells, cifar):
        one.add_argument("--seconds", type=float, default=430.0)
        one.add_argument("--trials", type=int)
        one.add_argument("--device", default="cuda")
        one.add_argument("--data-dir", default=os.environ.get("EVALIGN_DATA"))
        one.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
