"""Quality by the honest protocol: ten splits 64/16/20, default settings, test rows read once, every rival beside us.

    python benchmarks/bench_quality.py --data-dir DIR                     # all sets, stacked trials
    python benchmarks/bench_quality.py --data-dir DIR --sets yeast --engine single   # EASTClassifier itself
    python benchmarks/bench_quality.py --summary                          # the table from the stored rows

Rows go to benchmarks/results/bench_quality.csv as soon as a set and method are done; what is there is not run again.
`--engine stacked` trains the ten splits as one stacked network, which equals training them one by one
(tests/test_trials.py) and saves a GPU's time; columns that a split lacks are zeros there.
"""

import argparse
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split

from evalign import EASTClassifier, decision, metrics
from evalign.decision import Rule
from evalign.distinct import distinct_rows, divide_rows
from evalign.metrics import Average
from evalign.networks import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.tables import TableEncoder
from evalign.training.batches import Batches, default_batch_size
from evalign.training.loop import Rows, predict_logits
from evalign.training.recipes import Recipe, find_recipe
from evalign.training.scores import argmax_score
from evalign.training.trials import Trial, train_trials

RESULTS = Path(__file__).parent / "results" / "bench_quality.csv"
SETS = ["yeast", "mammography", "letter", "shuttle", "adult", "creditcard"]
PAPER = find_recipe("paper")
NETWORKS: dict[str, str | Recipe] = {
    "anchored": "anchored",
    "cross-entropy": "cross_entropy",
    "EAST as printed": replace(PAPER, stages=tuple(replace(stage, epochs=200) for stage in PAPER.stages)),
}
TREES: dict[str, Callable[[int], Any]] = {
    "random forest": lambda seed: RandomForestClassifier(300, random_state=seed, n_jobs=-1),
    "histogram gradient boosting": lambda seed: HistGradientBoostingClassifier(random_state=seed, early_stopping=True),
}
Matrix = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass
class Part:
    """One split, encoded as a classifier of ours encodes it: distinct rows, scaling learned on training rows."""

    train: Matrix
    train_y: Ints
    train_weight: NDArray[np.float64]
    valid: Matrix
    valid_y: Ints
    valid_weight: NDArray[np.float64]
    test: Matrix
    test_y: Ints
    seed: int


def load(name: str, folder: Path) -> tuple[pd.DataFrame, Ints]:
    """Features and labels 0 … C - 1 as the papers have them."""
    frame = pd.read_parquet(folder / f"{name}.parquet")
    if name == "adult":
        return frame.drop(columns=["income", "split", "target", "fnlwgt"]), frame["target"].to_numpy(np.int64)
    if name == "creditcard":
        y = frame["Class"].to_numpy(np.int64)
        return frame.drop(columns=["Class", "Time"]).assign(Amount=np.log(frame["Amount"] + 1e-3)), y
    codes = pd.factorize(frame["target"], sort=True)[0].astype(np.int64)
    return frame.drop(columns=[c for c in ("target", "split") if c in frame]), codes


def parts(X: pd.DataFrame, y: Ints, splits: int) -> Iterator[Part]:
    numeric = EASTClassifier().numeric
    for seed in range(splits):
        dev, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed, stratify=y)
        own = X.iloc[dev]
        rows, weight = distinct_rows(own, y[dev], np.ones(len(dev)))
        division = divide_rows(y[dev][rows], weight, EASTClassifier().validation_fraction, seed)
        train, valid = division.train, division.valid
        encoder = TableEncoder(numeric=numeric).fit(own, rows=rows[train])
        yield Part(
            encoder.transform(own, rows=rows[train]), y[dev][rows][train], division.train_weight,
            encoder.transform(own, rows=rows[valid]), y[dev][rows][valid], division.valid_weight,
            encoder.transform(X.iloc[test]), y[test], seed,
        )  # fmt: skip


def network_probabilities(
    recipe: str | Recipe, made: list[Part], classes: int, device: str
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Validation and test probabilities of every split, the splits of one batch count trained as one stack."""
    model = EASTClassifier()
    average, _ = average_and_labels(classes)
    width = max(part.train.shape[1] for part in made)

    def padded(x: Matrix) -> torch.Tensor:
        return torch.from_numpy(np.pad(x, ((0, 0), (0, width - x.shape[1])))).to(device)

    size = default_batch_size(min(len(part.train) for part in made))
    groups: dict[int, list[int]] = {}
    for i, part in enumerate(made):
        groups.setdefault(Batches(len(part.train), size, seed=0).count, []).append(i)
    found: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    for group in groups.values():
        own = [made[i] for i in group]
        x = torch.cat([padded(z) for p in own for z in (p.train, p.valid)])
        y = torch.from_numpy(np.concatenate([z for p in own for z in (p.train_y, p.valid_y)])).to(device)
        weight = np.concatenate([z for p in own for z in (p.train_weight, p.valid_weight)]).astype(np.float32)
        trials, start = [], 0
        for part in own:
            middle, end = start + len(part.train), start + len(part.train) + len(part.valid)
            trials.append(
                Trial(torch.arange(start, middle), torch.arange(middle, end), find_recipe(recipe), seed=part.seed)
            )
            start = end
        results = train_trials(
            lambda: mlp(width, classes, model.hidden, model.dropout), Rows(x, y, torch.from_numpy(weight).to(device)),
            trials, Objective("f1", "multiclass", StepChoice("annealed"), average=average),
            argmax_score(metrics.resolve("f1", average=average)), batch_size=size,
        )  # fmt: skip
        for i, part, result in zip(group, own, results, strict=True):
            network = mlp(width, classes, model.hidden, model.dropout).to(device)
            network.load_state_dict(result.state)
            found[i] = tuple(  # type: ignore[assignment]
                predict_logits(network, padded(z)).double().softmax(1).cpu().numpy() for z in (part.valid, part.test)
            )
    return [found[i] for i in range(len(made))]


def single_scores(recipe: str | Recipe, X: pd.DataFrame, y: Ints, splits: int, device: str) -> Iterator[dict[str, Any]]:
    """The same through EASTClassifier on the raw table; it holds out validation rows and decides by itself."""
    average, labels = average_and_labels(int(y.max()) + 1)
    for seed in range(splits):
        dev, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed, stratify=y)
        model = EASTClassifier(recipe=recipe, random_state=seed, device=device).fit(X.iloc[dev], y[dev])
        argmax = model.classes_[model.predict_proba(X.iloc[test]).argmax(1)]
        for rule, predicted in (("argmax", argmax), ("plug-in", model.predict(X.iloc[test]))):
            score = f1_score(y[test], predicted, average=average, labels=labels, zero_division=0.0)
            yield {"decision": rule, "split": seed, "score": round(float(score), 6)}


def average_and_labels(classes: int) -> tuple[Average, list[int] | None]:
    return ("binary", None) if classes == 2 else ("macro", list(range(classes)))


def tree_probabilities(make: Callable[[int], Any], made: list[Part], classes: int) -> list[tuple[Any, Any]]:
    found = []
    for part in made:
        copies = np.repeat(np.arange(len(part.train)), np.rint(part.train_weight).astype(np.int64))  # as given
        model = make(part.seed).fit(part.train[copies], part.train_y[copies])
        both = []
        for z in (part.valid, part.test):
            p = np.zeros((len(z), classes))
            p[:, model.classes_] = model.predict_proba(z)
            both.append(p)
        found.append((both[0], both[1]))
    return found


def decided(valid: Any, test: Any, part: Part, classes: int) -> dict[str, float]:
    """Test F1 of argmax, tuned and plug-in decisions, learned on the validation rows."""
    average, labels = average_and_labels(classes)
    weight = part.valid_weight
    rules = {
        "argmax": Rule("argmax", classes),
        "tuned": decision.tuned(valid, part.valid_y, "f1", average=average, sample_weight=weight),
        "plug-in": decision.plug_in(valid, "f1", average=average, sample_weight=weight, margin=1 / len(valid)),
    }
    return {
        name: float(f1_score(part.test_y, rule.predict(test), average=average, labels=labels, zero_division=0.0))
        for name, rule in rules.items()
    }


def summary(rows: pd.DataFrame) -> str:
    """Mean and standard error per set, method and decision, and the difference to cross-entropy + plug-in."""
    lines = [
        "| set | method | decision | F1 | ± se | ours (anchored, plug-in) - this | ± se | splits |",
        "|" + "---|" * 8,
    ]
    for name, own in rows.groupby("set", sort=False):
        table = own.pivot_table(index="split", columns=["method", "decision"], values="score")
        ours = table.get(("anchored", "plug-in"))
        for method, rule in dict.fromkeys(zip(own.method, own.decision, strict=True)):
            score = table[method, rule].dropna()
            line = f"| {name} | {method} | {rule} | {score.mean():.4f} | {score.sem():.4f} |"
            if ours is not None:
                gap = (ours - score).dropna()
                line += f" {gap.mean():+.4f} | {gap.sem():.4f} |"
            lines.append(f"{line} {len(score)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--methods", nargs="+", default=[*NETWORKS, *TREES])
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--engine", choices=["stacked", "single"], default="stacked")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    stored = pd.read_csv(options.out) if options.out.exists() else pd.DataFrame()
    if options.summary:
        print(summary(stored))
        return
    if options.data_dir is None:
        parser.error("--data-dir is needed: the folder with yeast.parquet and the other sets")
    device_name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    for name in options.sets:
        todo = [
            method for method in options.methods
            if stored.empty or stored[(stored.set == name) & (stored.method == method)].empty
        ]  # fmt: skip
        if not todo:
            continue
        X, y = load(name, options.data_dir)
        classes = int(y.max()) + 1
        made = list(parts(X, y, options.splits)) if options.engine == "stacked" or {*todo} & {*TREES} else []
        for method in todo:
            if method in NETWORKS and options.engine == "single":
                rows = list(single_scores(NETWORKS[method], X, y, options.splits, options.device))
            else:
                if method in TREES:
                    probabilities = tree_probabilities(TREES[method], made, classes)
                else:
                    probabilities = network_probabilities(NETWORKS[method], made, classes, options.device)
                rows = [
                    {"decision": rule, "split": part.seed, "score": round(score, 6)}
                    for part, (valid, test) in zip(made, probabilities, strict=True)
                    for rule, score in decided(valid, test, part, classes).items()
                ]
            engine = "scikit-learn" if method in TREES else options.engine
            known = {"set": name, "method": method, "engine": engine, "device": device_name, "torch": torch.__version__}
            rows = [{**known, **row} for row in rows]
            stored = pd.concat([stored, pd.DataFrame(rows)], ignore_index=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            stored.to_csv(options.out, index=False)
            print(summary(pd.DataFrame(rows)), flush=True)


if __name__ == "__main__":
    main()
