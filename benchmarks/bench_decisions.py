"""Decision rules and their peers: tables x five models x splits; F1, MCC, balanced accuracy, a constraint, shifts.

    python benchmarks/bench_decisions.py --data-dir DIR --jobs 16 --minutes 7  # cells that are not stored yet
    python benchmarks/bench_decisions.py --part shifts --data-dir DIR          # the same for changed class shares
    python benchmarks/bench_decisions.py --time     # CPU seconds at (1e6, 2), (1e5, 100), (1e5, 1000)
    python benchmarks/bench_decisions.py --large 10000000 2   # a rule of generated batches: seconds and peak memory
    python benchmarks/bench_decisions.py --summary  # tables of what is stored, and a figure

A cell is a table, a model and a split of 75/25. Five folds of the training part give held-out probabilities, a model
of all of it those of the test rows: every rule sees the same numbers. Cells are done split by split (tables above
5,000 rows in the first `--large-splits` only), and appended to `--out` as soon as they are finished. Peers that are not
installed are left out with a message: xcolumns (Frank-Wolfe and block coordinate ascent) and mapie (risk control).
scikit-learn's TunedThresholdClassifierCV runs on the folds' probabilities; TabPFN's rule of one threshold per class is
written out below, as its weights are not needed for it.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # before anything that makes threads is imported

import argparse
import multiprocessing
import platform
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, matthews_corrcoef, recall_score
from sklearn.model_selection import StratifiedKFold, StratifiedShuffleSplit, TunedThresholdClassifierCV
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from evalign import MetricDecision, decision
from evalign.decision.calibration import fit_calibration
from evalign.decision.shift import class_shares, reweighted

RESULTS = Path(__file__).with_name("results") / "bench_decisions.csv"
SHIFT_RESULTS = RESULTS.with_name("bench_decisions_shifts.csv")
TIMES = RESULTS.with_name("bench_decisions_time.csv")
LARGE_TIMES = RESULTS.with_name("bench_decisions_large.csv")
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "decisions.png"
PAPERS = ("mammography", "adult", "creditcard", "yeast", "shuttle", "letter")
MOST = 20_000  # rows of a table
LARGE = 5_000  # rows of a table that takes part in `--large-splits` splits
METRICS = ("f1", "mcc", "balanced_accuracy")
SHIFTS = ("none", "x4", "x1/4", "swap", "covariate")
FLOOR = 0.9  # of recall
Rows = list[dict[str, Any]]


@cache
def load(path: Path) -> tuple[Any, Any]:
    """Features as numbers and labels 0 to C - 1; of two classes the rarer one is 1."""
    table = pd.read_parquet(path)
    y = table.pop("Class" if "Class" in table else "target").to_numpy()
    table = table.drop(columns=[c for c in ("split", "income", "Time") if c in table])
    if len(table) > MOST:  # positives stay
        codes = np.unique(y, return_inverse=True)[1]
        rare = np.bincount(codes)[codes] < 1000
        rng = np.random.default_rng(0)
        keep = np.union1d(np.flatnonzero(rare), rng.permutation(len(y))[:MOST])
        table, y = table.iloc[keep], y[keep]
    y = np.unique(y, return_inverse=True)[1]
    frequent = np.bincount(y)[y] >= 8
    table, y = table[frequent], np.unique(y[frequent], return_inverse=True)[1]
    if y.max() == 1 and y.mean() > 0.5:
        y = 1 - y
    X = pd.get_dummies(table, dtype=float)
    return X.fillna(X.median()).reset_index(drop=True), y


def boosted(seed: int) -> Any:
    """LightGBM, or scikit-learn's boosted trees if it is not installed."""
    try:
        from lightgbm import LGBMClassifier
    except ImportError:
        return HistGradientBoostingClassifier(max_iter=60, random_state=seed)
    return LGBMClassifier(n_estimators=60, n_jobs=1, verbose=-1, random_state=seed)


MODELS: dict[str, Callable[[int], Any]] = {
    "logistic": lambda seed: make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)),
    "naive Bayes": lambda seed: make_pipeline(StandardScaler(), GaussianNB(var_smoothing=1e-3)),
    "boosted": boosted,
    "forest": lambda seed: RandomForestClassifier(100, n_jobs=1, random_state=seed),
    "network": lambda seed: make_pipeline(
        StandardScaler(), MLPClassifier((64,), max_iter=40, early_stopping=False, random_state=seed)
    ),
}


def fitted_probabilities(model: Any, X: Any, y: Any, new: Any, classes: int) -> Any:
    """Probabilities of new rows, 0 for a class that was absent in training."""
    model.fit(X.to_numpy(), y)
    p = np.zeros((len(new), classes))
    p[:, model.classes_] = model.predict_proba(new.to_numpy())
    return p / np.maximum(p.sum(axis=1, keepdims=True), 1e-300)


class Cell:
    """Data of a cell, shared by all rules."""

    def __init__(self, path: Path, model: str, split: int) -> None:
        X, y = load(path)
        self.classes = int(y.max()) + 1
        train, test = next(StratifiedShuffleSplit(1, test_size=0.25, random_state=split).split(X, y))
        self.X, self.y = X.iloc[train].reset_index(drop=True), y[train]
        self.new, self.z = X.iloc[test].reset_index(drop=True), y[test]
        folds = StratifiedKFold(5, shuffle=True, random_state=split)
        self.p, self.fold = np.zeros((len(train), self.classes)), np.zeros(len(train), dtype=int)
        for k, (a, b) in enumerate(folds.split(self.X, self.y)):
            self.p[b] = fitted_probabilities(
                MODELS[model](split), self.X.iloc[a], self.y[a], self.X.iloc[b], self.classes
            )
            self.fold[b] = k
        self.q = fitted_probabilities(MODELS[model](split), self.X, self.y, self.new, self.classes)


def scored(metric: str, truth: Any, decided: Any, classes: int) -> float:
    if metric == "mcc":
        return float(matthews_corrcoef(truth, decided))
    if metric == "balanced_accuracy":
        return float(recall_score(truth, decided, average="macro", labels=np.unique(truth), zero_division=0))
    average = "binary" if classes == 2 else "macro"
    return float(
        f1_score(truth, decided, average=average, labels=None if classes == 2 else range(classes), zero_division=0)
    )


# -- rules: (held-out p, labels, test p, metric) -> decisions of the test rows -----------------------------------


def jointly(p: Any, y: Any, q: Any, metric: str) -> Any:
    """Joint prediction of the test rows, as by `predict_jointly`."""
    return decision.joint_rule(decision.calibrated(p, y, metric), q, metric).predict(q)


class Given(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose probabilities are known: those at the index of a table, or the columns of an array."""

    def __init__(self, table: Any = None, classes: int = 2) -> None:
        self.table, self.classes = table, classes

    def fit(self, X: Any, y: Any) -> "Given":
        self.classes_ = np.arange(self.classes)
        return self

    def predict_proba(self, X: Any) -> Any:
        return np.asarray(X) if self.table is None else self.table[X.index.to_numpy()]


SCORERS = {"f1": "f1", "mcc": "matthews_corrcoef", "balanced_accuracy": "balanced_accuracy"}


def tuned_threshold(p: Any, y: Any, q: Any, metric: str) -> Any:
    """scikit-learn's tuned threshold, for two classes."""
    if p.shape[1] != 2:
        return None
    tuner = TunedThresholdClassifierCV(Given(classes=2), scoring=SCORERS[metric], cv=StratifiedKFold(5), refit=True)
    return tuner.fit(p, y).predict(q)


def one_against_rest(p: Any, y: Any, q: Any, metric: str) -> Any:
    """TabPFN's rule: the best threshold of each class against the others, then the largest p / threshold."""
    if metric == "mcc":
        return None
    grid = np.linspace(0.01, 0.99, 99)
    chosen = np.full(p.shape[1], 0.5)
    for k in range(p.shape[1]):
        positive = y == k
        cut = np.searchsorted(grid, p[:, k], side="right")  # number of thresholds that p reaches
        tp = positive.sum() - np.cumsum(np.bincount(cut[positive], minlength=100))[:99]
        fp = (~positive).sum() - np.cumsum(np.bincount(cut[~positive], minlength=100))[:99]
        fn, tn = positive.sum() - tp, (~positive).sum() - fp
        if metric == "f1":
            values = 2 * tp / np.maximum(2 * tp + fp + fn, 1)
        else:
            values = tp / max(positive.sum(), 1) + tn / max((~positive).sum(), 1)
        chosen[k] = grid[values.argmax()]
    if p.shape[1] == 2:
        return (q[:, 1] >= chosen[1]).astype(int)
    return (q / chosen).argmax(axis=1)


@cache
def xcolumns() -> Any:
    """The modules of xcolumns, or None. Its numba functions are only for sparse matrices, and numba may be missing."""
    try:
        import numba  # noqa: F401
    except ImportError:
        stub = types.ModuleType("numba")
        stub.njit = lambda *a, **k: a[0] if a and callable(a[0]) else (lambda f: f)  # type: ignore[attr-defined]
        sys.modules["numba"] = stub
    try:
        from xcolumns import block_coordinate, frank_wolfe

        return frank_wolfe, block_coordinate
    except ImportError as error:
        print(f"xcolumns is left out: {error}", flush=True)
        return None


def _peer_metric(metric: str, classes: int, module: Any = np) -> Any:
    """A metric of xcolumns' vectors tp, fp, fn, tn."""

    def f1(tp: Any, fp: Any, fn: Any, tn: Any) -> Any:
        values = 2 * tp / (2 * tp + fp + fn + 1e-9)
        return values[1] if classes == 2 else module.mean(values)

    def balanced(tp: Any, fp: Any, fn: Any, tn: Any) -> Any:
        return module.mean(tp / (tp + fn + 1e-9))

    return {"f1": f1, "balanced_accuracy": balanced}.get(metric)


def peer_frank_wolfe(p: Any, y: Any, q: Any, metric: str) -> Any:
    peer, aim = xcolumns(), None
    if peer is not None:
        import autograd.numpy

        aim = _peer_metric(metric, p.shape[1], autograd.numpy)
    if aim is None:
        return None
    found = peer[0].find_classifier_using_fw(
        np.eye(p.shape[1])[y], p, aim, k=1, max_iters=50, init_classifier="top", seed=0, alpha_uniform_search_step=0.01
    )
    return np.asarray(found.predict(q, seed=0)).argmax(axis=1)


def peer_block_coordinate(p: Any, y: Any, q: Any, metric: str) -> Any:
    peer = xcolumns()
    if peer is None or metric == "mcc" or len(q) > 6000:  # a loop over rows in Python
        return None
    if metric == "f1":
        one: Any = lambda tp, fp, fn, tn: 2 * tp / (2 * tp + fp + fn + 1e-9)  # noqa: E731
    else:
        one = lambda tp, fp, fn, tn: tp / (tp + fn + 1e-9)  # noqa: E731
    zero: Any = lambda tp, fp, fn, tn: 0.0 * tp  # noqa: E731
    aims = [zero, one] if q.shape[1] == 2 and metric == "f1" else one
    found = peer[1].predict_using_bc_with_0approx(q, aims, k=1, seed=0, init_y_pred="top", max_iter=20)
    return np.asarray(found).argmax(axis=1)


RULES: dict[str, Callable[..., Any]] = {
    "argmax": lambda p, y, q, metric: q.argmax(axis=1),
    "plug-in": lambda p, y, q, metric: decision.plug_in(p, metric).predict(q),
    "tuned": lambda p, y, q, metric: decision.tuned(p, y, metric).predict(q),
    "calibrated": lambda p, y, q, metric: decision.calibrated(p, y, metric).predict(q),
    "jointly": jointly,
    "scikit-learn": tuned_threshold,
    "TabPFN rule": one_against_rest,
    "xCOLUMNs Frank-Wolfe": peer_frank_wolfe,
    "xCOLUMNs block coordinate": peer_block_coordinate,
}


def _mapie(p: Any, y: Any, q: Any) -> Any:
    try:
        from mapie.risk_control import BinaryClassificationController
    except ImportError as error:
        print(f"mapie is left out: {error}", flush=True)
        return None
    control = BinaryClassificationController(
        lambda x: x, "recall", FLOOR, 0.9, "precision", list_predict_params=np.linspace(0, 0.99, 100)
    ).calibrate(p, y)
    return np.ones(len(q), dtype=int) if control.best_predict_param is None else control.predict(q)


def _constrained(p: Any, y: Any, q: Any, confidence: float | None, learn: Any) -> Any:
    return learn(p, y, "precision", subject_to=f"recall >= {FLOOR}", confidence=confidence).predict(q)


CONSTRAINED: dict[str, Callable[..., Any]] = {
    "plug-in": lambda p, y, q: decision.plug_in(p, "precision", target=y, subject_to=f"recall >= {FLOOR}").predict(q),
    "tuned": lambda p, y, q: _constrained(p, y, q, None, decision.tuned),
    "calibrated": lambda p, y, q: _constrained(p, y, q, None, decision.calibrated),
    "certified at 0.9": lambda p, y, q: _constrained(p, y, q, 0.9, decision.calibrated),
    "MAPIE at 0.9": _mapie,
}


def shifted(kind: str, z: Any, new: Any, rng: Any) -> tuple[Any, Any]:
    """Rows of the test part after a shift, and their class shares (None for a shift that is not one of shares)."""
    counts = np.bincount(z)
    shares = counts / counts.sum()
    if kind == "none":
        return np.arange(len(z)), shares
    if kind == "covariate":
        varied = [j for j in range(new.shape[1]) if new.iloc[:, j].nunique() >= 5] or list(range(new.shape[1]))
        rank = new.iloc[:, rng.choice(varied)].rank(method="first").to_numpy() / len(z)
        return np.flatnonzero(rng.random(len(z)) < np.where(rank > 0.5, 1.0, 0.1)), None
    if kind == "swap":
        order = counts.argsort()
        aim = np.empty(len(counts))
        aim[order] = shares[order[::-1]]
    else:
        rare = 1 if len(counts) == 2 else int(counts.argmin())
        aim = shares.copy()
        aim[rare] = min(aim[rare] * (4.0 if kind == "x4" else 0.25), 0.8)
        others = np.arange(len(counts)) != rare
        aim[others] *= (1 - aim[rare]) / aim[others].sum()
    size = int(min(counts / aim))
    number = np.minimum(np.maximum(np.round(size * aim).astype(int), 1), counts)
    rows = np.concatenate([rng.choice(np.flatnonzero(z == k), number[k], replace=False) for k in range(len(counts))])
    return rows, number / number.sum()


def shift_rows(cell: Cell, known: dict[str, Any], split: int) -> Rows:
    """F1 of the rule learned in training, of `adapt`, of EM without a test, and of the rule that knows the shares."""
    out = []
    everything = pd.concat([cell.X, cell.new], ignore_index=True)
    given = Given(np.concatenate([cell.p, cell.q]), cell.classes).fit(None, None)
    model = MetricDecision(given, "f1", folds="prefit").fit(everything.iloc[: len(cell.y)], cell.y)
    calibration = fit_calibration(cell.p, cell.y, np.ones(len(cell.y)))
    before = np.bincount(cell.y, minlength=cell.classes) / len(cell.y)
    for number, kind in enumerate(SHIFTS):
        rows, shares = shifted(kind, cell.z, cell.new, np.random.default_rng([split, number]))
        if len(rows) < 50:  # too few to detect a shift
            continue
        X, z, q = everything.iloc[len(cell.y) + rows], cell.z[rows], calibration(cell.q[rows])

        def by(shares: Any, q: Any = q, before: Any = before) -> Any:
            moved = reweighted(q, shares / before)
            return decision.plug_in(moved, "f1").predict(moved)

        started = time.process_time()
        adapted = model.adapt(X)
        seconds = time.process_time() - started
        decided = {
            "training's rule": model.predict(X),
            "adapt": adapted.predict(X),
            "predict_jointly": model.predict_jointly(X),
            "EM without a test": by(class_shares(q, before)[0]),
        }
        if shares is not None:
            decided["knows the shares"] = by(shares)
        found = {"found": adapted.shift_.kind, "test_rows": len(z)}
        for rule, labels in decided.items():
            score = scored("f1", z, labels, cell.classes)
            out.append({**known, **found, "scenario": kind, "metric": "f1", "rule": rule, "score": score,
                        "seconds": seconds if rule == "adapt" else np.nan})  # fmt: skip
    return out


def rule_rows(cell: Cell, known: dict[str, Any]) -> Rows:
    """Score of every rule by every metric, and precision and recall of rules with a floor of recall."""
    out = []
    for metric in METRICS:
        for rule, decide in RULES.items():
            began = time.process_time()
            labels = decide(cell.p, cell.y, cell.q, metric)
            if labels is not None:
                score = scored(metric, cell.z, labels, cell.classes)
                out.append({**known, "scenario": "rules", "metric": metric, "rule": rule, "score": score,
                            "seconds": time.process_time() - began})  # fmt: skip
    for rule, constrained in CONSTRAINED.items() if cell.classes == 2 else ():
        labels = constrained(cell.p, cell.y, cell.q)
        if labels is not None:
            flagged = labels == 1
            precision = float((cell.z[flagged] == 1).mean()) if flagged.any() else 0.0
            out.append({**known, "scenario": "constraint", "metric": "precision", "rule": rule,
                        "score": precision, "reached": float(flagged[cell.z == 1].mean())})  # fmt: skip
    return out


def cell_rows(part: str, path: Path, model: str, split: int) -> Rows:
    """All rows of a cell; an error becomes a row, so that it does not end the others."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.process_time()
    known = {"table": path.stem, "model": model, "split": split}
    try:
        cell = Cell(path, model, split)
        known |= {"classes": cell.classes, "train_rows": len(cell.y), "test_rows": len(cell.z), "found": ""}
        out = shift_rows(cell, known, split) if part == "shifts" else rule_rows(cell, known)
        return [*out, {**known, "scenario": "done", "seconds": time.process_time() - started}]
    except Exception as error:
        return [{**known, "scenario": "done", "rule": f"failed: {error!r}"[:200], "seconds": 0.0}]


COLUMNS = ["table", "model", "split", "classes", "train_rows", "test_rows", "scenario", "metric", "rule", "score",
           "reached", "found", "seconds"]  # fmt: skip


def append(rows: Rows, out: Path) -> None:
    """Append in one write, so that a killed run leaves complete cells."""
    table = pd.DataFrame(rows).reindex(columns=COLUMNS)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = table.to_csv(index=False, header=not out.exists(), float_format="%.6g")
    with out.open("a") as file:
        file.write(text)


def run(args: argparse.Namespace) -> None:
    """Run the cells that are not stored, split by split, for the given minutes."""
    paths = [*sorted((args.data_dir / "suite").glob("*.parquet")), *(args.data_dir / f"{n}.parquet" for n in PAPERS)]
    paths = [path for path in paths if path.exists() and (not args.tables or path.stem in args.tables)]
    done = set()
    if args.out.exists():
        stored = pd.read_csv(args.out)
        stored = stored[stored.scenario == "done"]
        done = set(zip(stored.table, stored.model, stored.split, strict=True))
    # Long ones first within a split, so that no core waits at the end.
    paths.sort(key=lambda path: -path.stat().st_size)
    rows = {path: len(load(path)[1]) for path in paths}
    cells = [
        (args.part, path, model, split)
        for split in range(args.first_split, args.splits)
        for path in paths
        for model in MODELS
        if split < args.large_splits or rows[path] < LARGE
    ]
    cells = [cell for cell in cells if (cell[1].stem, *cell[2:]) not in done]
    print(f"{len(cells)} cells to do, {len(done)} stored", flush=True)
    until = time.monotonic() + 60 * args.minutes
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        results = pool.imap_unordered(_rows_of, cells)
        for number in range(len(cells)):
            try:
                append(results.next(timeout=max(0.1, until - time.monotonic())), args.out)
            except multiprocessing.TimeoutError:
                print(f"time is up after {number} cells", flush=True)
                pool.terminate()
                return
    print("all cells are done", flush=True)


def _rows_of(cell: tuple[str, Path, str, int]) -> Rows:
    return cell_rows(*cell)


def times(out: Path, rules: list[str], repeats: int = 3) -> None:
    """CPU seconds of learning a rule and deciding all rows, median of `repeats`, with one thread; macro F1."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Block coordinate ascent is a loop over rows in Python: left out.
    rules = rules or [rule for rule in RULES if rule not in ("argmax", "xCOLUMNs block coordinate")]
    for n, classes in ((10**6, 2), (10**5, 100), (10**5, 1000)):
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(n, classes)).astype(np.float32) * 1.5 - 0.02 * np.arange(classes, dtype=np.float32)
        p = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float64)
        p /= p.sum(axis=1, keepdims=True)
        y = (p.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1).clip(max=classes - 1)
        for rule in rules:
            found: list[float] = []
            while len(found) < repeats and sum(found) < 20:
                started = time.process_time()
                labels = RULES[rule](p, y, p, "f1")
                if labels is None:
                    break
                found.append(time.process_time() - started)
            if found:
                row = {"rows": n, "classes": classes, "rule": rule, "seconds": float(np.median(found)),
                       "score": scored("f1", y, labels, classes), "machine": platform.machine(),
                       "cores": os.cpu_count(), "numpy": np.__version__}  # fmt: skip
                print(row, flush=True)
                pd.DataFrame([row]).to_csv(out, mode="a", header=not out.exists(), index=False)


def large(rows: int, classes: int, out: Path) -> None:
    """Seconds and peak memory of `learn_from_batches` on batches that are generated anew in every pass."""
    import resource

    size = max(1, 10**7 // classes)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(size, classes)).astype(np.float32) * 1.5 - 0.02 * np.arange(classes, dtype=np.float32)
    base = np.exp(logits - logits.max(axis=1, keepdims=True))
    del logits
    passes = 0

    def batches() -> Iterator[tuple[Any, Any]]:
        nonlocal passes
        passes += 1
        for k in range(-(-rows // size)):  # class shares differ between batches
            own = np.random.default_rng([1, k])
            p = base[: min(size, rows - k * size)] * np.exp(0.2 * own.normal(size=classes)).astype(np.float32)
            p /= p.sum(axis=1, keepdims=True)
            below = p.cumsum(axis=1) < own.random((len(p), 1), dtype=np.float32)
            yield p, below.sum(axis=1).clip(max=classes - 1)

    for _ in batches():
        pass
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began, cpu = time.perf_counter(), time.process_time()
    rule = decision.learn_from_batches(batches, "f1")
    row = {"rows": rows, "classes": classes, "kind": rule.kind, "value": rule.value, "passes": passes - 1,
           "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu, "start_mib": start,
           "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
           "array_mib": rows * classes * 8 / 2**20, "cores": os.cpu_count(), "numpy": np.__version__}  # fmt: skip
    print(row, flush=True)
    pd.DataFrame([row]).to_csv(out, mode="a", header=not out.exists(), index=False, float_format="%.6g")


def differences(table: pd.DataFrame, against: str) -> pd.DataFrame:
    """Mean over tables of (rule - against), and its error: Nadeau and Bengio's within tables, all tables pooled.

    Scores of the models are averaged within a split; J splits of a table have variance (1/J + n_test/n_train) s^2.
    """
    means = table.groupby(["table", "split", "rule"]).score.mean().unstack("rule")
    ratio = (table.groupby("table").test_rows.first() / table.groupby("table").train_rows.first()).to_dict()
    out = []
    for rule in means.columns:
        gap = (means[rule] - means[against]).dropna()
        if gap.empty or rule == against:
            continue
        by = gap.groupby("table")
        size = by.ngroups
        variance = [float(np.nan_to_num(some.var())) * (1 / len(some) + ratio[name]) for name, some in by]
        within = float(np.sqrt(sum(variance))) / size
        among = float(by.mean().std() / np.sqrt(size)) if size > 1 else np.nan
        out.append({"rule": rule, "difference": by.mean().mean(), "error": within, "error_over_tables": among,
                    "wins": int((by.mean() > 0.002).sum()), "losses": int((by.mean() < -0.002).sum()),
                    "tables": size})  # fmt: skip
    columns = ["rule", "difference", "error", "error_over_tables", "wins", "losses", "tables"]
    return pd.DataFrame(out, columns=columns).sort_values("difference", ascending=False)


def summary(sources: list[Path], picture: Path | None) -> None:
    """Tables of what is stored, as text; and a figure."""
    table = pd.concat([pd.read_csv(source) for source in sources if source.exists()], ignore_index=True)
    done = table[table.scenario == "done"]
    failed = done[done.rule.notna()]
    print(f"{len(done)} cells, {done.split.nunique()} splits, {done.table.nunique()} tables, {len(failed)} failed")
    print(failed.rule.value_counts().to_string())
    with pd.option_context("display.width", 160, "display.max_columns", 20, "display.float_format", "{:.4f}".format):
        for metric in METRICS:
            part = table[(table.scenario == "rules") & (table.metric == metric)]
            for name, some in (("two classes", part[part.classes == 2]), ("more classes", part[part.classes > 2])):
                print(f"\n{metric}, {name}: mean score, and difference from calibrated")
                print(some.groupby("rule").score.mean().round(4).to_dict())
                print(differences(some, "calibrated").to_string(index=False))
        part = table[table.scenario == "constraint"]
        missed = (part.reached < FLOOR).groupby(part.rule).mean()
        print(f"\nprecision subject to recall >= {FLOOR}: share of test sets that miss it, and precision")
        print(pd.DataFrame({"missed": missed, "precision": part.groupby("rule").score.mean()}).to_string())
        part = table[table.scenario.isin(SHIFTS)]
        print("\nF1 after a shift (test sets of 50 rows or more)")
        print(part.groupby(["scenario", "rule"]).score.mean().unstack("scenario").to_string())
        one = part[part.rule == "adapt"]
        print("\nwhat adapt found")
        print(one.groupby(["scenario", "found"]).size().unstack(fill_value=0).to_string())
        for kind in SHIFTS[:4]:
            against = "training's rule" if kind == "none" else "knows the shares"
            found = differences(part[part.scenario == kind], against)
            print(f"\n{kind}: difference from {against}\n{found.to_string(index=False)}")
    if picture is not None:
        draw(table, picture)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Differences from the default rule by metric and number of classes, and from the rule of training by shift."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rules, moved = table[table.scenario == "rules"], table[table.scenario.isin(SHIFTS)]
    kinds = (("two classes", rules.classes == 2), ("more classes", rules.classes > 2))
    named = {f"{metric.replace('_', ' ')},\n{name}": rules[(rules.metric == metric) & some]
             for metric in METRICS for name, some in kinds}  # fmt: skip
    peers = [rule for rule in RULES if rule not in ("tuned", "calibrated", "jointly")]
    adapting = ["EM without a test", "predict_jointly", "adapt", "knows the shares"]
    panels = [("score minus that of the default rule (decision.calibrated)", named, "calibrated", peers)]
    if len(moved):
        shifts = {kind: moved[moved.scenario == kind] for kind in SHIFTS[:4]}
        panels.append(("F1 minus that of the rule of training, by shift", shifts, "training's rule", adapting))
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 3.6 * len(panels)), layout="constrained", squeeze=False)
    for axis, (title, groups, against, names) in zip(axes[:, 0], panels, strict=True):
        found = [differences(part, against) for part in groups.values()]
        for k, name in enumerate(names):
            rows = [f[f.rule == name] for f in found]
            values = [float(r.difference.iloc[0]) if len(r) else np.nan for r in rows]
            errors = [float(r.error.iloc[0]) if len(r) else np.nan for r in rows]
            at = np.arange(len(groups)) + (k - (len(names) - 1) / 2) * 0.7 / len(names)
            axis.errorbar(at, values, errors, fmt="o", label=name, markersize=4, capsize=2)
        axis.axhline(0.0, color="0.6", linewidth=0.8)
        axis.set_xticks(range(len(groups)), list(groups), fontsize=7)
        axis.set_title(title, fontsize=10)
        axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("EVALIGN_DATA", "data")))
    parser.add_argument("--part", choices=("rules", "shifts"), default="rules")
    parser.add_argument(
        "--out", type=Path, help="results/bench_decisions.csv or, of shifts, bench_decisions_shifts.csv"
    )
    parser.add_argument("--tables", nargs="*", help="names of tables; all without it")
    parser.add_argument("--first-split", type=int, default=0)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--large-splits", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--time", nargs="*", metavar="RULE", help="only the times, into bench_decisions_time.csv")
    parser.add_argument(
        "--large", type=int, nargs=2, metavar=("ROWS", "CLASSES"), help="into bench_decisions_large.csv"
    )
    parser.add_argument("--summary", action="store_true", help="only the tables and the figure")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args()
    if args.summary:
        summary([RESULTS, SHIFT_RESULTS] if args.out is None else [args.out], args.picture)
        return
    args.out = args.out or (SHIFT_RESULTS if args.part == "shifts" else RESULTS)
    if args.large:
        large(args.large[0], args.large[1], args.out.with_name(LARGE_TIMES.name))
    elif args.time is not None:
        times(args.out.with_name(TIMES.name), args.time)
    else:
        run(args)


if __name__ == "__main__":
    main()
