"""Build the result of a comparison as plain JSON types, and render it as a self-contained HTML page."""

import math
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from evalign import metrics
from evalign.comparison.goals import Judge, as_confusion
from evalign.comparison.run import Comparison, line_title
from evalign.comparison.significance import Line, interval, resampled_matrices, resampled_scores, summarise
from evalign.report import plots

POINTS = 200
EPOCHS = 1000


def thinned(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Thin a history to about EPOCHS rows, the kept epoch among them.

    >>> rows = [{"epoch": i, "best": i == 7} for i in range(3000)]
    >>> short = thinned(rows)
    >>> len(short) <= EPOCHS + 1, 7 in [row["epoch"] for row in short]
    (True, True)
    """
    history = [row for row in history if not math.isnan(row.get("score", 0.0))]  # trees have no watched score
    if len(history) <= EPOCHS:
        return history
    keep = set(np.linspace(0, len(history) - 1, EPOCHS).round().astype(int).tolist())
    keep.add(max((i for i, row in enumerate(history) if row["best"]), default=0))
    return [history[i] for i in sorted(keep)]


PER_CLASS = {"precision": metrics.precision, "recall": metrics.recall, "f1": metrics.f1}


def build_result(
    comparison: Comparison, reference: tuple[str, str], *, repeats: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Scores, intervals, per-class scores, curves and histories; the caller adds settings, data and notes.

    With one split intervals come from resampling test rows, with more the standard error from the splits.
    """
    judge, lines = comparison.judge, summarise(comparison.rows, reference, test_size=comparison.test_share)
    lines.sort(key=lambda line: bool(judge.missed(line.limits)))  # one that misses a constraint does not compete
    table = [_entry(line, judge) for line in lines]
    if comparison.splits == 1:
        _add_intervals(table, comparison, reference, repeats, seed)
    if judge.costs is not None:
        table = [_as_costs(entry) for entry in table]
    shown = shown_in_detail(lines, reference)
    ours = next(t for t in comparison.trials if t.contender.name == reference[0])
    drawn = [t for t in comparison.trials if judge.binary and t.contender.name != "majority"]
    shown_histories = (reference[0], "cross_entropy")
    # Several models, as in a blend, have no common history.
    trained = [
        t for t in comparison.trials
        if t.contender.name in shown_histories and hasattr(t.estimator, "history_")
        and not (hasattr(t.estimator, "members_") or hasattr(t.estimator, "label_models_"))
    ]  # fmt: skip
    return {
        "metric": {
            "name": judge.aim.name,
            "title": metric_title(judge),
            "average": judge.average,
            "beta": judge.beta,
            "lower_is_better": judge.costs is not None,
        },
        "task": "multilabel" if judge.multilabel else "binary" if judge.binary else "multiclass",
        "classes": judge.names,
        "class_rows": class_rows(comparison),
        "splits": comparison.splits,
        "interrupted": comparison.interrupted,
        "reference": list(reference),
        "table": table,
        "per_class": [per_class(line, judge, repeats, seed) for line in shown],
        "curves": [curve for t in drawn if (curve := t.precision_recall(judge, POINTS))],
        "calibration": [t.calibration() for t in drawn],
        "operating": ours.operating_points(reference[1], POINTS) if judge.binary else None,
        "rules": [
            {"contender": t.contender.name, "rules": {name: rule.to_json() for name, rule in t.rules.items()}}
            for t in comparison.trials
        ],
        "history": {trial.contender.title: thinned(trial.estimator.history_) for trial in trained},
    }


def class_rows(comparison: Comparison) -> list[int]:
    """Test rows of each class over all splits, or of each label if multilabel."""
    judge, truth = comparison.judge, comparison.trials[0].truth
    rows = truth.sum(0) if judge.multilabel else np.bincount(truth, minlength=len(judge.classes))
    return [int(count) * comparison.splits for count in rows]


def metric_title(judge: Judge) -> str:
    """Display name of the metric.

    >>> from evalign.comparison.goals import Aim
    >>> metric_title(Judge(Aim("f1"), ["no", "yes"])), metric_title(Judge(Aim("mcc"), [0, 1, 2]))
    ("F1 of 'yes'", 'MCC')
    """
    name = judge.aim.name
    if judge.costs is not None:
        return "mean cost"
    words = {"f1": "F1", "mcc": "MCC", "gmean": "G-mean", "fbeta": "F-beta"}.get(name, name.replace("_", " "))
    if name == "fbeta" and isinstance(judge.beta, int | float):
        words = f"F{judge.beta:g}"
    if not metrics.is_averaged(name):
        return words
    return f"{words} of {judge.names[1]!r}" if judge.average == "binary" else f"{judge.average} {words}"


def shown_in_detail(lines: Sequence[Line], reference: tuple[str, str]) -> list[Line]:
    """The reference, cross-entropy with its usual decision and with the reference's, and the best other model."""
    by_key = {(line.contender, line.decision): line for line in lines}
    keys = [reference, ("cross_entropy", "argmax"), ("cross_entropy", "plug_in")]
    others = [key for key in by_key if key[0] not in ("cross_entropy", "majority") and not key[0].startswith("ours")]
    return [by_key[key] for key in dict.fromkeys([*keys, *others[:1]]) if key in by_key]


def per_class(line: Line, judge: Judge, repeats: int, seed: int) -> dict[str, Any]:
    """Precision, recall and F1 of each class as [value, low, high]."""
    if judge.multilabel:
        tables, at = list(line.confusion), slice(1, 2)  # the score of class 1 of a label
    else:
        tables, at = [line.confusion], slice(None)
    drawn = [list(resampled_matrices(table, repeats=repeats, seed=seed)) for table in tables]
    scores: dict[str, Any] = {name: [] for name in PER_CLASS}
    for name, score in PER_CLASS.items():
        for table, draws in zip(tables, drawn, strict=True):
            value = score(as_confusion(table), None).numpy()
            low, high = interval(np.concatenate([score(as_confusion(part), None).numpy() for part in draws]))
            scores[name] += np.stack([value, low, high], axis=1)[at].tolist()
    return {
        "title": line_title(line.title, line.decision),
        "contender": line.contender,
        "decision": line.decision,
        "confusion": line.confusion.tolist(),
    } | scores


def versions() -> dict[str, str]:
    """Versions of packages that a result may depend on."""
    from evalign import __version__

    packages = ("torch", "numpy", "scikit-learn", "pandas", "pyarrow")  # which this package needs
    return {"evalign": __version__, "python": platform.python_version()} | {name: version(name) for name in packages}


def _entry(line: Line, judge: Judge) -> dict[str, Any]:
    return {
        **vars(line),
        "title": line_title(line.title, line.decision),
        "score": line.mean,
        "scores": list(line.scores),
        "missed": judge.missed(line.limits),
        "seconds": round(line.seconds, 3),
        "confusion": line.confusion.tolist(),
    }


def _add_intervals(
    table: Sequence[dict[str, Any]], comparison: Comparison, reference: tuple[str, str], repeats: int, seed: int
) -> None:
    """Add intervals from resampled test rows; for costs, 1.96 standard errors of the mean cost per row."""
    judge, trials = comparison.judge, comparison.trials
    if judge.costs is not None:
        spread = _spread
        scores = {f"{t.contender.name}/{name}": -paid for t in trials for name, paid in t.paid.items()}
    else:
        spread = interval
        predictions = {f"{t.contender.name}/{name}": one for t in trials for name, one in t.predictions.items()}
        scores = resampled_scores(
            trials[0].truth, predictions, len(judge.classes), judge.scores, repeats=repeats, seed=seed
        )
    ours = scores["/".join(reference)]
    for entry in table:
        theirs = scores[f"{entry['contender']}/{entry['decision']}"]
        entry["interval"], entry["difference_interval"] = spread(theirs).tolist(), spread(ours - theirs).tolist()


def _spread(values: NDArray[np.float64]) -> NDArray[np.float64]:
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return np.array([values.mean() - half, values.mean() + half])


def _as_costs(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with its scores, minus costs, as costs."""
    flipped = {key: -entry[key] for key in ("score", "difference")} | {"scores": [-s for s in entry["scores"]]}
    spreads = {key: [-x for x in entry[key][::-1]] for key in ("interval", "difference_interval") if key in entry}
    return entry | flipped | spreads


MOST_CELLS = 30  # maximum number of classes of a confusion matrix shown in full
# Models as they are commonly used, the most common first.
USUAL = ("random_forest", "lightgbm", "logistic_regression", "gradient_boosting", "cross_entropy")


def render(result: dict[str, Any]) -> str:
    """The HTML page; everything from a user's file is escaped."""
    environment = Environment(
        loader=PackageLoader("evalign", "report/templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"score": score, "signed": signed}
    miss, alarm = slider_costs(result) if result["operating"] else (0, 0)
    return environment.get_template("report.html.j2").render(
        r=result,
        miss=miss,
        alarm=alarm,
        headline=headline(result),
        verdict=verdict(result),
        target=flat({"target": result["data"]["target"]})[0][1],
        file_name=Path(result["data"]["file"]).name,
        figures=figures(result),
        matrices=[
            matrix(rule["confusion"], rule["title"], result["classes"])
            for rule in result["per_class"]
            if result["task"] != "multilabel"
        ],
        several=result["splits"] > 1,
        spread=interval_of(result),
        decided="; rows left undecided do not count" if "reject" in (result["settings"].get("costs") or {}) else "",
        tested=any(row["p"] is not None for row in result["table"]),
        constraints=list(result["table"][0]["limits"]),
        shift=shift_section(result),
        flat=flat,
    )


def slider_costs(result: dict[str, Any]) -> tuple[float, float]:
    """Costs of a miss and of a false alarm that the slider starts with: those of training, or 10 and 1.

    >>> slider_costs({"classes": ["ok", "fraud"], "settings": {"costs": {"fraud:ok": 20.0, "fp": 3.0}}})
    (20.0, 3.0)
    """
    costs, (negative, positive) = result["settings"].get("costs") or {"fn": 10, "fp": 1}, result["classes"][:2]
    miss, alarm = ("fn", f"{positive}:{negative}"), ("fp", f"{negative}:{positive}")
    return sum(costs.get(key, 0) for key in miss), sum(costs.get(key, 0) for key in alarm)


def headline(result: dict[str, Any]) -> str:
    """Numbers of rows that our model and the usual one get right.

    >>> row = {"contender": "ours", "decision": "auto", "title": "blend", "confusion": [[90, 4], [1, 5]]}
    >>> forest = {"contender": "random_forest", "decision": "argmax", "title": "forest + argmax"}
    >>> forest |= {"confusion": [[94, 0], [4, 2]]}
    >>> found = {"reference": ["ours", "auto"], "table": [row, forest], "classes": ["ok", "fraud"], "splits": 1}
    >>> headline(found | {"task": "binary", "class_rows": [94, 6]})
    "Catches 5 of 6 'fraud' rows with 4 false alarms; forest with default settings catches 2 with 0."
    >>> headline(found | {"task": "multiclass", "class_rows": [94, 6]})
    "Labels 95 of 100 rows correctly, worst in 'fraud' (5 of 6); forest with default settings labels 96 (2 of 6)."
    """
    rows, classes = result["class_rows"], result["classes"]
    ours = np.array(next(row for row in result["table"] if _is_reference(row, result))["confusion"])
    usual = [row for row in result["table"] if row["decision"] == "argmax" and row["contender"] in USUAL]
    rival = min(usual, key=lambda row: USUAL.index(row["contender"]), default=None)
    theirs = ours if rival is None else np.array(rival["confusion"])
    if result["task"] == "binary":
        words = f"Catches {ours[1, 1]:,} of {rows[1]:,} {classes[1]!r} rows with {ours[0, 1]:,} false alarms"
        if undecided := sum(rows) - ours.sum():
            words += f" and leaves {undecided:,} of {sum(rows):,} rows undecided"
        against = f"catches {theirs[1, 1]:,} with {theirs[0, 1]:,}"
    elif result["task"] == "multilabel":
        found, alarms = ours[:, 1, 1].sum(), ours[:, 0, 1].sum()
        words = f"Finds {found:,} of {sum(rows):,} labels with {alarms:,} false alarms"
        against = f"finds {theirs[:, 1, 1].sum():,} with {theirs[:, 0, 1].sum():,}"
    else:
        worst = min((k for k, n in enumerate(rows) if n), key=lambda k: ours[k, k] / rows[k])
        words = f"Labels {ours.trace():,} of {sum(rows):,} rows correctly"
        against = f"labels {theirs.trace():,}"
        if ours.trace() < sum(rows):
            words += f", worst in {classes[worst]!r} ({ours[worst, worst]:,} of {rows[worst]:,})"
            against += f" ({theirs[worst, worst]:,} of {rows[worst]:,})"
    if rival is not None:
        how = "argmax" if rival["contender"] == "cross_entropy" else "default settings"
        words += f"; {rival['title'].removesuffix(' + argmax')} with {how} {against}"
    return f"{words}, over {result['splits']} splits." if result["splits"] > 1 else f"{words}."


def _is_reference(row: dict[str, Any], result: dict[str, Any]) -> bool:
    return bool([row["contender"], row["decision"]] == result["reference"])


def verdict(result: dict[str, Any]) -> str:
    """Our score against the strongest rival and the usual choice, with the uncertainty, in words."""
    name, ours = result["metric"]["title"], next(row for row in result["table"] if _is_reference(row, result))
    rivals = [row for row in result["table"] if not row["contender"].startswith(("ours", "majority"))]
    begin = f"{ours['title'].capitalize()} reached {name} {score(ours['score'])}"
    if ours["limits"]:
        values = ", ".join(f"{text}: {score(value)}" for text, value in ours["limits"].items())
        begin += f" and {'misses' if ours['missed'] else 'meets'} its constraints on the test rows ({values})"
    if not rivals:
        return f"{begin}; no rival was trained for comparison."
    # A rival that misses a constraint does not compete.
    competing = [row for row in rivals if not row["missed"]]
    if not competing:
        return f"{begin}; {'so does every rival' if ours['missed'] else 'no rival meets them'}."
    sign = -1 if result["metric"].get("lower_is_better") else 1
    best = max(competing, key=lambda row: sign * row["score"])
    words = [f"{begin}, the strongest rival ({best['title']}) {score(best['score'])}: {_gap(best, sign)}."]
    for row in rivals:
        if (row["contender"], row["decision"]) == ("cross_entropy", "argmax") and row is not best:
            missed = "Cross-entropy + argmax, the usual choice, misses them."
            words.append(
                missed if row["missed"] else f"Against cross-entropy + argmax, the usual choice: {_gap(row, sign)}."
            )
    return " ".join(words)


def _gap(row: dict[str, Any], sign: int = 1) -> str:
    """Our score minus the row's, its uncertainty, and whether it is clear; `sign` is -1 if less is better."""
    gap = row["difference"]
    if "difference_interval" in row:
        low, high = row["difference_interval"]
        clear, noise = low > 0 or high < 0, f"95 % interval {signed(low)} to {signed(high)}"
    else:
        noise, p = f"standard error {row['difference_error'] or 0.0:.3f}", row["p"]
        if p is None:
            return f"{signed(gap)} ({noise}), too few splits to test"
        clear, noise = p < 0.05, f"{noise}, p = {p:.2g}"
    word = ("better" if sign * gap > 0 else "worse") if clear else "no clear difference"
    return f"{signed(gap)} ({noise}), {word}"


def shift_section(result: dict[str, Any]) -> dict[str, Any] | None:
    """Class shares in training and in new rows, as `evalign predict --adapt` adds them; the largest changes first.

    >>> found = {"kind": "shares", "classes": ["ok", "fraud"], "before": [0.9, 0.1], "shares": [0.6, 0.4], "rows": 50}
    >>> found |= {"low": [0.5, 0.3], "high": [0.7, 0.5], "p_shares": 0.004, "p_fit": 0.5}
    >>> section = shift_section({"shift": found | {"decided": {"fraud": [4, 17], "ok": [46, 33]}}})
    >>> section["adapted"], section["rows"][0]
    (True, {'name': 'fraud', 'before': '10.0 %', 'now': '40.0 %', 'interval': '30.0 % to 50.0 %', 'decided': '4 → 17'})
    """
    found = result.get("shift")
    if found is None:
        return None
    before, now = np.array(found["before"]), np.array(found["shares"])
    adapted = found["kind"] in ("shares", "given")
    order = np.argsort(-np.abs(np.log(np.maximum(now, 1e-12) / np.maximum(before, 1e-12))), kind="stable")

    def row(k: int) -> dict[str, Any]:
        then, after = found["decided"][str(found["classes"][k])]
        limits = [percent(found[end][k]) for end in ("low", "high")] if "low" in found else []
        return {
            "name": found["classes"][k], "before": percent(before[k]), "now": percent(now[k]),
            "interval": " to ".join(limits), "decided": f"{then:,} → {after:,}" if adapted else f"{then:,}",
        }  # fmt: skip

    tests = [("class shares are equal", found.get("p_shares")), ("nothing else changed", found.get("p_fit"))]
    return {
        "adapted": adapted,
        "rows": [row(k) for k in order[:MOST_CELLS]],
        "more": max(0, len(order) - MOST_CELLS),
        "svg": Markup(plots.shares(found, order[: plots.MOST_CLASSES].tolist())),
        "tests": [(name, f"p = {value:.2g}") for name, value in tests if value is not None],
    }


def figures(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Title, drawing and caption of each plot for which the result has data."""
    one, spread = result["splits"] == 1, interval_of(result)
    first = "" if one else " First split."
    found = [
        (
            "Scores at a glance",
            plots.scores(result),
            f"Points are scores, lines the {spread}; the majority class is in the table only."
            if one
            else "Points are means over the splits, lines one standard error either side, ticks the splits; "
            "the majority class is in the table only.",
        )
    ]
    rejects = "reject" in (result["settings"].get("costs") or {})  # rules that reject rows are not points of a curve
    if result["curves"] and not rejects:
        cross = " The cross is our 95 % interval." if one else first
        caption = f"Test rows. Curves show all thresholds, marks the decision rules.{cross}"
        found.append(("Precision against recall", plots.precision_recall(result), caption))
    if result["task"] != "binary":
        caption = "Precision and recall of every class, rare classes first; test rows in brackets, 95 % intervals."
        found.append(("The trade-off, class by class", plots.class_scores(result), caption))
    if result["calibration"]:
        caption = f"Test rows in bins of equal size; calibrated probabilities lie on the dashed line.{first}"
        found.append(("Calibration", plots.calibration(result), caption))
    if result.get("importance"):
        caption = "Mean and standard error over shuffles of one column at a time, on a sample of held-out rows."
        found.append(("Which columns matter", plots.importance(result), caption))
    if any(result["history"].values()):
        caption = f"By argmax on validation rows; a ring marks the epoch whose weights were kept.{first}"
        found.append(("Training", plots.training(result), caption))
    return [{"title": title, "svg": Markup(svg), "caption": caption} for title, svg, caption in found]


def interval_of(result: dict[str, Any]) -> str:
    """Caption for the intervals of one split."""
    costs = result["metric"].get("lower_is_better")
    return "95 % interval of the mean over test rows" if costs else "95 % interval from resampled test rows"


def matrix(confusion: Sequence[Sequence[int]], title: str, classes: Sequence[str]) -> dict[str, Any]:
    """Counts with the share of their row for shading; of very many classes only the most frequent confusions."""
    if len(classes) <= MOST_CELLS:
        rows = [
            {"name": name, "cells": [(n, n / max(1, sum(line))) for n in line]}
            for name, line in zip(plots.shortened(classes, 16), confusion, strict=True)
        ]
        return {"title": title, "rows": rows, "pairs": None}
    pairs = [
        (n, classes[i], classes[j]) for i, line in enumerate(confusion) for j, n in enumerate(line) if i != j and n
    ]
    return {"title": title, "rows": None, "pairs": sorted(pairs, key=lambda pair: -pair[0])[:20]}


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def signed(value: float | None) -> str:
    """A difference with its sign, in typographic minus.

    >>> signed(0.0123), signed(-0.5), signed(None)
    ('+0.012', '−0.500', '–')
    """
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")


def flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings as text, without those left at None."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name}: {text(v)}" for name, v in value.items())
        return ", ".join(map(text, value)) if isinstance(value, list | tuple) else str(value)

    return [(name.replace("_", " "), text(value)) for name, value in values.items() if value not in (None, (), [])]
