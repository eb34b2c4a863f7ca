"""Quality with defaults: evalign's blend and common tools, each with a tuned decision, on many tables.

    python benchmarks/bench_quality.py --data-dir DIR --jobs 16     # every table of DIR and DIR/suite, resumable
    python benchmarks/bench_quality.py --summary                    # ranks and paired differences of the stored rows
    python benchmarks/bench_quality.py --summary --methods evalign CatBoost    # of splits that all of these have
    python benchmarks/bench_quality.py --data-dir DIR --metric mcc  # another metric for all; also with --summary
    make peers-tabular              # .venv-tabular has CatBoost, AutoGluon and pytabkit, too

Splits of 75/25 by class (CocktailParty: by frame), every choice inside the training part, test rows read once. The
score is that of the metric, F1 of the rarer class or macro F1 as a rule. A rival is fitted as it comes on encoded
columns and gets `MetricDecision`'s tuned rule from five folds. Rows are stored as soon as they are known, failures with
their error; what is there is not run again (failures are with `--retry`). One thread a process. Tables of more than
`--max-rows` rows are thinned by class first. Rivals that are not installed are left out. Rows without a commit are
older than that column.
"""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import argparse
import math
import multiprocessing
import platform
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from bench_recipes import SETS
from bench_recipes import load as load_paper
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import balanced_accuracy_score, f1_score, matthews_corrcoef

from evalign.storage.atomic import write_atomically
from evalign.tables.encode import TableEncoder, TreeTable
from evalign.tables.split import split_rows

RESULTS = Path(__file__).parent / "results" / "bench_suite.csv"
TEST = 0.25
OURS = "evalign"
AUTOGLUON_SECONDS = 60
SMALL = 600  # rows of tables that are summarised separately
MAX_ROWS = 12_000
METRICS = ("f1", "mcc", "balanced_accuracy")
KEY = ["table", "split", "method", "metric", "max_rows"]
PAIRS = "cocktailparty_pairs"  # of people in a frame; pairs of one frame share people
Ints = NDArray[np.int64]
Method = Callable[[Any, Ints, Any, int, str], Ints]  # training rows, labels, test rows, seed, metric -> labels


def blend(**options: Any) -> Method:
    def run(X: Any, y: Ints, X_test: Any, seed: int, metric: str) -> Ints:
        from evalign import EASTBlend

        model = EASTBlend(metric, n_jobs=1, device="cpu", random_state=seed, **options).fit(X, y)
        return model.predict(X_test)

    return run


def rival(make: Callable[[int, list[int], int], Any], encoder: Any = TreeTable, **fit: Any) -> Method:
    def run(X: Any, y: Ints, X_test: Any, seed: int, metric: str) -> Ints:
        from evalign import MetricDecision

        encode = encoder().fit(X)
        x, x_test = encode.transform(X), encode.transform(X_test)
        categorical = encode.categorical if isinstance(encode, TreeTable) else []
        named = dict.fromkeys(fit, categorical)
        model = MetricDecision(make(seed, categorical, x.shape[1]), metric, decision="tuned").fit(x, y, **named)
        return model.predict(x_test)

    return run


def lightgbm(seed: int, categorical: list[int], columns: int) -> Any:
    from lightgbm import LGBMClassifier

    return LGBMClassifier(random_state=seed, n_jobs=1, verbose=-1)


def xgboost(seed: int, categorical: list[int], columns: int) -> Any:
    from xgboost import XGBClassifier

    types = ["c" if j in categorical else "q" for j in range(columns)]
    return XGBClassifier(random_state=seed, n_jobs=1, enable_categorical=True, feature_types=types)


class Framed(ClassifierMixin, BaseEstimator):
    """A library for data frames with categories; missing ones become -1, missing numbers the training median."""

    def __init__(self, make: Callable[[int, list[int]], Any], seed: int, categorical: list[int]) -> None:
        self.make, self.seed, self.categorical = make, seed, categorical

    def fit(self, x: Any, y: Ints) -> "Framed":
        self.gaps_ = pd.DataFrame(x).median().fillna(0.0)
        self.gaps_[self.categorical] = -1.0
        self.model_ = self.make(self.seed, self.categorical).fit(self.frame(x), y)
        self.classes_ = np.unique(y)
        return self

    def frame(self, x: Any) -> pd.DataFrame:
        whole = dict.fromkeys(self.categorical, np.int64)
        table = pd.DataFrame(x).fillna(self.gaps_).astype(whole).astype(dict.fromkeys(whole, "category"))
        return table.rename(columns=str)

    def predict_proba(self, x: Any) -> Any:
        return self.model_.predict_proba(self.frame(x))


def framed(make: Callable[[int, list[int]], Any]) -> Method:
    return rival(lambda seed, categorical, columns: Framed(make, seed, categorical))


def catboost(seed: int, categorical: list[int]) -> Any:
    from catboost import CatBoostClassifier

    options: Any = {"random_seed": seed, "thread_count": 1, "verbose": 0, "allow_writing_files": False}
    return CatBoostClassifier(cat_features=categorical, **options)


def tabm(seed: int, categorical: list[int]) -> Any:
    from pytabkit import TabM_D_Classifier

    return TabM_D_Classifier(random_state=seed, n_threads=1)


def realmlp(seed: int, categorical: list[int]) -> Any:
    from pytabkit import RealMLP_TD_Classifier

    return RealMLP_TD_Classifier(random_state=seed, n_threads=1)


def autogluon(X: Any, y: Ints, X_test: Any, seed: int, metric: str) -> Ints:
    """AutoGluon's `best_quality` with a minute of one core; it tunes the threshold of two classes by itself."""
    from autogluon.tabular import TabularPredictor

    metric = "f1_macro" if metric == "f1" and y.max() > 1 else metric
    with tempfile.TemporaryDirectory() as folder:
        predictor = TabularPredictor("target", eval_metric=metric, path=folder, verbosity=0)
        predictor.fit(
            X.assign(target=y), presets="best_quality", time_limit=AUTOGLUON_SECONDS, num_cpus=1, num_gpus=0,
            excluded_model_types=["FASTAI"], dynamic_stacking=False,
        )  # fmt: skip
        found: Ints = predictor.predict(X_test, as_pandas=False).astype(np.int64)
        return found


def random_forest(seed: int, categorical: list[int], columns: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(300, random_state=seed)


def histogram_boosting(seed: int, categorical: list[int], columns: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(categorical_features=categorical or None, random_state=seed)


def logistic_regression(seed: int, categorical: list[int], columns: int) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=2000)


METHODS: dict[str, Method] = {
    OURS: blend(),
    "evalign quick": blend(preset="quick"),
    "LightGBM": rival(lightgbm, categorical_feature=True),
    "XGBoost": rival(xgboost),
    "CatBoost": framed(catboost),
    "TabM": framed(tabm),
    "RealMLP": framed(realmlp),
    "AutoGluon": autogluon,
    "random forest": rival(random_forest),
    "histogram boosting": rival(histogram_boosting, partial(TreeTable, max_categories=250)),  # its maximum is 255
    "logistic regression": rival(logistic_regression, TableEncoder),
}
NEEDS = {"LightGBM": "lightgbm", "XGBoost": "xgboost", "CatBoost": "catboost", "AutoGluon": "autogluon"}
NEEDS |= dict.fromkeys(("TabM", "RealMLP"), "pytabkit")
MODULES = {method: [module] for method, module in NEEDS.items()}
MODULES |= {method: ["lightgbm", "torch"] for method in (OURS, "evalign quick")}


def tables(folder: Path) -> list[str]:
    """Names of the tables in a folder and its `suite`, small files first."""
    suite, flat = sorted((folder / "suite").glob("*.parquet")), sorted(folder.glob("*.parquet"))
    known = [path for path in flat if path.stem in (*SETS, PAIRS)]
    found = sorted(suite + known or flat, key=lambda path: path.stat().st_size)
    return [path.relative_to(folder).with_suffix("").as_posix() for path in found]


def load(name: str, folder: Path) -> tuple[pd.DataFrame, Ints]:
    """Features and labels 0 … C - 1; of two classes the rarer one is 1."""
    if name in SETS:
        X, y = load_paper(name, folder)
    elif name == PAIRS:
        frame = pd.read_parquet(folder / f"{name}.parquet")
        names = ["frame", "person1", "person2", "same_group", "target"]
        X, y = frame.drop(columns=names), frame["target"].to_numpy(np.int64)
    else:
        X = pd.read_parquet(folder / f"{name}.parquet")
        y = pd.factorize(X.pop("target"), sort=True)[0].astype(np.int64)
    return X, 1 - y if y.max() == 1 and y.mean() > 0.5 else y


def divide(name: str, folder: Path, y: Ints, split: int) -> tuple[Ints, Ints]:
    """Training and test rows."""
    if name != PAIRS:
        return split_rows(y, TEST, 1000 + split)
    frames = pd.read_parquet(folder / f"{name}.parquet", columns=["frame"])["frame"].to_numpy()
    shuffled = np.random.default_rng(1000 + split).permutation(np.unique(frames))
    held_out = np.isin(frames, shuffled[: round(TEST * len(shuffled))])
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def scored(metric: str, truth: Ints, predicted: Ints, classes: int) -> float:
    if metric == "f1":
        average = "binary" if classes == 2 else "macro"
        return float(f1_score(truth, predicted, average=average, labels=None if classes == 2 else range(classes)))
    return float(matthews_corrcoef(truth, predicted) if metric == "mcc" else balanced_accuracy_score(truth, predicted))


def cell(folder: Path, name: str, split: int, method: str, metric: str, max_rows: int) -> dict[str, Any]:
    """Run one method on one split of one table."""
    warnings.simplefilter("ignore")
    X, y = load(name, folder)
    if len(y) > max_rows and name != PAIRS:
        kept, _ = split_rows(y, 1 - max_rows / len(y), 0)
        X, y = X.iloc[kept], y[kept]
    train, test = divide(name, folder, y, split)
    started, cpu = time.perf_counter(), time.process_time()
    predicted = METHODS[method](X.iloc[train], y[train], X.iloc[test], split, metric)
    classes = int(y.max()) + 1
    return dict(zip(KEY, (name, split, method, metric, max_rows), strict=True)) | {
        "score": round(scored(metric, y[test], predicted, classes), 6), "rows": len(y), "classes": classes,
        "seconds": round(time.perf_counter() - started, 2), "cpu_seconds": round(time.process_time() - cpu, 2),
        **origin(method),
    }  # fmt: skip


def failure(one: tuple[Any, ...], error: BaseException) -> dict[str, Any]:
    """The row of a cell that failed."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return dict(zip(KEY, one[1:], strict=True)) | {"error": text, **origin(one[3])}


def origin(method: str) -> dict[str, str]:
    """Machine, commit and versions of what ran."""
    installed_by = packages_distributions()  # xgboost may come from xgboost-cpu
    packages = [installed_by[module][0] for module in ("sklearn", *MODULES.get(method, []))]
    versions = [f"{name} {version(name)}" for name in packages]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores", "commit": commit(), "versions": ", ".join(versions)
    }  # fmt: skip


@cache
def commit() -> str:
    folder = Path(__file__).parent
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=folder
    )
    return os.environ.get("EVALIGN_COMMIT") or found.stdout.strip()


def summary(rows: pd.DataFrame, ours: str = OURS, *, common: bool = False) -> str:
    """Mean rank, score and paired difference to each rival over the splits that all finished.

    Methods with fewer splits than others are compared on their own ones, below the table, unless `common`.

    The first error is that of a mean over tables, s / sqrt(T). The second is what the choice of splits alone explains,
    with the variance of each table's mean corrected for overlapping splits (Nadeau and Bengio 2003). `rest` is the
    mean difference without the table where it is farthest from zero.
    """
    failures = rows[rows.score.isna()]
    rows = rows[rows.score.notna()]
    every = rows.pivot_table(index=["table", "split"], columns="method", values="score")
    partial = every.columns[(every.count() < every.count().max()) & (not common)]
    scores = every.drop(columns=partial).dropna()
    seconds = rows.pivot_table(index="table", columns="method", values="cpu_seconds")
    by_table = scores.groupby("table").mean()
    ranks = by_table.rank(axis=1, ascending=False).mean()
    splits = scores.groupby("table").size()
    lines = [
        f"{len(by_table)} tables, {len(scores)} splits; difference: {ours} minus the method",
        "", "| method | mean rank | score | difference | ± over tables | ± over splits | median | rest | better on "
        "| worse on | CPU s |", "|" + "---|" * 11,
    ]  # fmt: skip
    for method in map(str, ranks.sort_values().index):
        line = f"| {method} | {ranks[method]:.2f} | {by_table[method].mean():.4f} |"
        if method == ours:
            line += " | | | | | | |"
        else:
            gap = scores[ours] - scores[method]
            mean = gap.groupby("table").mean()
            factor = 1 / splits + TEST / (1 - TEST)
            spread = gap.groupby("table").var()
            own = math.sqrt((factor * spread.fillna(spread.mean())).sum(skipna=False)) / len(mean)
            center, error = _mean(mean)
            better, worse = np.sum(mean.to_numpy() > 0), np.sum(mean.to_numpy() < 0)
            rest = mean.drop(mean.abs().idxmax()).mean()
            line += f" {center:+.4f} | {error:.4f} | {own:.4f} | {mean.median():+.4f} | {rest:+.4f} "
            line += f"| {better} | {worse} |"
        lines.append(f"{line} {float(seconds[method].reindex(by_table.index).mean()):.1f} |")
    for method in map(str, partial):
        gap = (every[ours] - every[method]).dropna()
        center, error = _mean(gap.groupby("table").mean())
        lines.append(
            f"\n{ours} minus {method}, {len(gap)} splits of {gap.groupby('table').ngroups} tables: "
            f"{center:+.4f} ± {error:.4f} over tables ({seconds[method].mean():.0f} s of CPU)"
        )
    if len(failures):
        lines.append(f"\nFailed: {', '.join(f'{name} {n}' for name, n in failures.groupby('method').size().items())}")
    rivals = scores.drop(columns=[m for m in scores if str(m).startswith("evalign")])
    if len(rivals.columns) < 2:
        return "\n".join(lines)
    behind = by_table[ours] - rivals.groupby("table").mean().max(axis=1)
    small = rows.groupby("table").rows.first().reindex(behind.index) < SMALL
    elsewhere = (rivals.groupby("table").transform("sum") - rivals).to_numpy().argmax(1)  # best on the other splits
    picked = pd.Series(rivals.to_numpy()[np.arange(len(rivals)), elsewhere], rivals.index)
    unseen = (scores[ours] - picked)[splits.reindex(picked.index, level=0) > 1].groupby("table").mean()
    for which, gap in {
        "test rows of each table": behind,
        f"test rows of each table, {small.sum()} tables below {SMALL} rows": behind[small],
        "test rows of each table, larger tables": behind[~small],
        "other splits of each table": unseen,
    }.items():
        if not len(gap):
            continue
        center, error = _mean(gap)
        lines.append(f"\nAgainst the best rival picked on the {which}: {center:+.4f} ± {error:.4f}")
    return "\n".join(lines)


def _mean(values: Any) -> tuple[float, float]:
    """Mean and standard error."""
    x = np.asarray(values, dtype=float)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def installed(method: str) -> bool:
    return method not in NEEDS or find_spec(NEEDS[method]) is not None


def missing(options: argparse.Namespace, stored: pd.DataFrame) -> Iterator[tuple[str, int, str, str, int]]:
    done = set(stored[KEY].itertuples(index=False, name=None))
    for split in range(options.splits):
        for name in options.tables or tables(options.data_dir):
            for method in options.methods:
                one = (name, split, method, options.metric, options.max_rows)
                if one not in done and installed(method):
                    yield one


def read(path: Path) -> pd.DataFrame:
    """Stored rows; empty without a file."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=[*KEY, "score", "error"])


def finished(
    run: Callable[..., Any],
    cells: Iterable[tuple[Any, ...]],
    jobs: int,
    minutes: float | None,
    failed: Callable[[tuple[Any, ...], BaseException], Any] | None = None,
) -> Iterator[Any]:
    """Results of `run(*cell)` in processes, as they come; nothing starts after `minutes`.

    A failure is printed, and yields `failed(cell, error)` if that is given.
    """
    started = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(run, *one): one for one in cells}
        for future in as_completed(futures):
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                yield future.result()
            else:
                print("failed:", futures[future], error, flush=True)
                if failed is not None:
                    yield failed(futures[future], error)
            if minutes is not None and time.monotonic() - started > 60 * minutes:
                for other in futures:
                    other.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tables", nargs="+")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--max-rows", type=int, default=MAX_ROWS)
    parser.add_argument("--metric", choices=METRICS, default="f1")
    parser.add_argument("--retry", action="store_true", help="run cells again that failed")
    parser.add_argument("--minutes", type=float, help="start nothing after so many minutes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    stored = read(options.out)
    if options.retry and "error" in stored:
        stored = stored[stored.error.isna()]

    def compared(rows: pd.DataFrame) -> pd.DataFrame:
        wanted: pd.DataFrame = rows[rows.method.isin(options.methods) & (rows.metric == options.metric)]
        return wanted

    if options.summary:
        print(summary(compared(stored), common=options.methods != list(METHODS)))
        return
    waiting = list(missing(options, stored))
    print(f"{len(waiting)} cells to run, {len(stored)} stored", flush=True)
    rows: list[Any] = stored.to_dict("records")
    cells = [(options.data_dir, *one) for one in waiting]
    for row in finished(cell, cells, options.jobs, options.minutes, failure):
        rows.append(row)
        write_atomically(options.out, pd.DataFrame(rows).to_csv(index=False))
        print(" ".join(str(value) for value in row.values()), flush=True)
    if OURS in set((found := compared(pd.DataFrame(rows))).method):
        print(summary(found))


if __name__ == "__main__":
    main()
