"""Training time of LightGBM and XGBoost with our objective and with their own, interleaved in one run.

    python benchmarks/bench_boost.py --data-dir DIR          # writes benchmarks/results/bench_boost.csv

A fixed number of rounds on the training rows of Adult (two classes, categories) and Letter (26 classes), the library's
defaults, no validation rows; the median of alternating repeats. "derivatives" is the time our objective takes outside
the library.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pandas as pd
import torch
from bench_recipes import load

from evalign.boosting import lightgbm as with_lightgbm
from evalign.boosting import xgboost as with_xgboost
from evalign.boosting.score_objective import ScoreObjective  # before the libraries: torch brings the threads they share
from evalign.tables.encode import TreeTable

import lightgbm  # isort: skip
import xgboost  # isort: skip

RESULTS = Path(__file__).parent / "results" / "bench_boost.csv"


def lightgbm_runs(
    x: Any, y: Any, cats: list[int], classes: int, rounds: int, threads: int
) -> dict[str, Callable[[], Any]]:
    params: dict[str, Any] = {"verbose": -1, "num_threads": threads, "force_row_wise": True, "seed": 0}
    data = lightgbm.Dataset(x, y, categorical_feature=cats, params=dict(params), free_raw_data=False).construct()
    params |= {"num_class": classes} if classes > 2 else {}
    task: Any = "binary" if classes == 2 else "multiclass"
    own = "binary" if classes == 2 else "multiclass"
    return {
        "own": lambda: lightgbm.train({**params, "objective": own}, data, rounds),
        "ours": lambda: lightgbm.train(
            {**params, "objective": with_lightgbm.MetricObjective("f1", task=task)}, data, rounds
        ),
    }


def xgboost_runs(
    x: Any, y: Any, cats: list[int], classes: int, rounds: int, threads: int
) -> dict[str, Callable[[], Any]]:
    types = ["c" if j in set(cats) else "q" for j in range(x.shape[1])]
    data = xgboost.QuantileDMatrix(x, y, feature_types=types, enable_categorical=True, nthread=threads)
    params: dict[str, Any] = {"nthread": threads, "seed": 0}
    params |= {"num_class": classes} if classes > 2 else {}
    task: Any = "binary" if classes == 2 else "multiclass"
    own = "binary:logistic" if classes == 2 else "multi:softprob"
    ours = {**params, "base_score": 0.0, "disable_default_eval_metric": True}
    return {
        "own": lambda: xgboost.train({**params, "objective": own}, data, rounds),
        "ours": lambda: xgboost.train(ours, data, rounds, obj=with_xgboost.MetricObjective("f1", task=task)),
    }


def derivative_seconds(y: Any, classes: int, rounds: int) -> float:
    """Seconds of `rounds` calls of the objective alone."""
    task: Any = "binary" if classes == 2 else "multiclass"
    rng = np.random.default_rng(0)
    scores = rng.normal(size=len(y) if classes == 2 else (len(y), classes)).astype(np.float32)
    objective = ScoreObjective("f1", task=task)
    objective.gradient(scores, y)
    started = time.perf_counter()
    for _ in range(rounds):
        objective.gradient(scores, y)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["adult", "letter"])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.sets:
        X, y = load(name, options.data_dir)
        table, classes = TreeTable().fit(X), int(y.max()) + 1
        x = table.transform(X)
        for library, make in (("lightgbm", lightgbm_runs), ("xgboost", xgboost_runs)):
            runs = make(x, y, table.categorical, classes, options.rounds, options.threads)
            seconds: dict[str, list[float]] = {key: [] for key in runs}
            for repeat in range(options.repeats + 1):
                for key, run in runs.items():
                    started = time.perf_counter()
                    run()
                    if repeat:  # the first warms up
                        seconds[key].append(time.perf_counter() - started)
            own, ours = (statistics.median(seconds[key]) for key in ("own", "ours"))
            ratios = [b / a for a, b in zip(seconds["own"], seconds["ours"], strict=True)]
            rows.append(
                {
                    "set": name, "library": library, "rows": len(y), "classes": classes, "rounds": options.rounds,
                    "own_s": round(own, 3), "ours_s": round(ours, 3), "ratio": round(statistics.median(ratios), 3),
                    "derivatives_s": round(derivative_seconds(y, classes, options.rounds), 3),
                    "threads": options.threads, "machine": platform.machine(), "torch": torch.__version__,
                    "lightgbm": lightgbm.__version__, "xgboost": xgboost.__version__,
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(options.out, index=False)


if __name__ == "__main__":
    main()
