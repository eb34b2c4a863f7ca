"""Render a result as one self-contained HTML page: nothing is loaded from a network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from scipy.stats import t as student_t

from evalign.report import plots

MOST_CELLS = 30  # classes of a confusion matrix that is shown whole
# What people use as it comes, the most usual first.
USUAL = ("random_forest", "lightgbm", "logistic_regression", "gradient_boosting", "cross_entropy")
FEWEST_SPLITS = 3  # for a p-value: two splits have one degree of freedom


def render(result: dict[str, Any]) -> str:
    """The page; everything that came from a user's file is escaped."""
    environment = Environment(
        loader=PackageLoader("evalign", "report/templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"score": score, "signed": signed}
    return environment.get_template("report.html.j2").render(
        r=result,
        headline=headline(result),
        verdict=verdict(result),
        file_name=Path(result["data"]["file"]).name,
        figures=figures(result),
        matrices=[matrix(rule["confusion"], rule["title"], result["classes"]) for rule in result["per_class"]],
        several=result["splits"] > 1,
        tested=result["splits"] >= FEWEST_SPLITS,
        constraints=list(result["table"][0]["limits"]),
        flat=flat,
    )


def headline(result: dict[str, Any]) -> str | None:
    """What ours and the rival people would use do to the rows, in counts; None for more than two classes.

    >>> row = {"contender": "ours", "decision": "auto", "title": "blend", "confusion": [[90, 4], [1, 5]]}
    >>> forest = {"contender": "random_forest", "decision": "argmax", "title": "random forest + argmax"}
    >>> forest |= {"confusion": [[94, 0], [4, 2]]}
    >>> headline({"reference": ["ours", "auto"], "table": [row, forest], "classes": ["ok", "fraud"], "splits": 1})
    "Catches 5 of 6 'fraud' rows with 4 false alarms; random forest + argmax catches 2 with 0."
    """
    if len(result["classes"]) != 2:
        return None
    ours = next(row for row in result["table"] if [row["contender"], row["decision"]] == result["reference"])
    (_, alarms), (missed, caught) = ours["confusion"]
    words = f"Catches {caught:,} of {missed + caught:,} {result['classes'][1]!r} rows with {alarms:,} false alarms"
    usual = [row for row in result["table"] if row["decision"] == "argmax" and row["contender"] in USUAL]
    if usual:
        rival = min(usual, key=lambda row: USUAL.index(row["contender"]))
        (_, theirs), (_, hits) = rival["confusion"]
        words += f"; {rival['title']} catches {hits:,} with {theirs:,}"
    return f"{words}, over {result['splits']} splits." if result["splits"] > 1 else f"{words}."


def verdict(result: dict[str, Any]) -> str:
    """What the table says about ours, in a sentence that does not flatter."""
    name, reference = result["metric"]["title"], result["reference"]
    ours = next(row for row in result["table"] if [row["contender"], row["decision"]] == reference)
    rivals = [row for row in result["table"] if row["contender"] != "majority" and not _is_ours(row)]
    begin = f"{ours['title'].capitalize()} reached {name} {score(ours['score'])}"
    if ours["limits"]:
        values = ", ".join(f"{text}: {score(value)}" for text, value in ours["limits"].items())
        begin += f" and {'misses' if ours['missed'] else 'meets'} its constraints on the test rows ({values})"
    if not rivals:
        return f"{begin}; no rival was trained, so whether that is good cannot be told."
    # A rival that misses a constraint has bought its score with it.
    best = max(rivals, key=lambda row: (not row["missed"], row["score"]))
    usual = [row for row in rivals if (row["contender"], row["decision"]) == ("cross_entropy", "argmax")]
    words = [f"{begin}, the strongest rival ({best['title']}) {score(best['score'])}: {_gap(best)}."]
    words += [f"Against cross-entropy + argmax, what is mostly used: {_gap(row)}." for row in usual if row is not best]
    return " ".join(words)


def _is_ours(row: dict[str, Any]) -> bool:
    return str(row["contender"]).startswith("ours")


def _gap(row: dict[str, Any]) -> str:
    """Ours minus it, its noise, and whether one shows above the other."""
    gap = row["difference"]
    if "difference_interval" in row:
        low, high = row["difference_interval"]
        clear, noise = low > 0 or high < 0, f"95 % interval {signed(low)} to {signed(high)}"
    else:
        error = row["difference_error"] or 0.0
        # Student's t: two standard errors of five splits are not 95 %.
        clear = abs(gap) > float(student_t.ppf(0.975, len(row["scores"]) - 1)) * error
        noise = f"standard error {error:.3f}"
    word = ("better" if gap > 0 else "worse") if clear else "no clear difference"
    return f"{signed(gap)} ({noise}), {word}"


def figures(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Title, drawing and caption of each plot that the result has numbers for."""
    one = result["splits"] == 1
    first = "" if one else " First split."
    found = [
        (
            "Scores at a glance",
            plots.scores(result),
            "Points are scores, lines 95 % intervals from resampled test rows; the majority class is in the table only."
            if one
            else "Points are means over the splits, lines one standard error either side, ticks the splits; "
            "the majority class is in the table only.",
        )
    ]
    if result["curves"]:
        caption = f"Test rows. Curves are what any threshold could reach, marks where each rule stands.{first}"
        found.append(("Precision against recall", plots.precision_recall(result), caption))
    elif len(result["classes"]) > 2:
        caption = "Precision and recall of every class, rare classes first; test rows in brackets, 95 % intervals."
        found.append(("The trade-off, class by class", plots.class_scores(result), caption))
    if result["calibration"]:
        caption = f"Test rows in bins of equal size; honest probabilities lie on the dashed line.{first}"
        found.append(("Calibration", plots.calibration(result), caption))
    if result.get("importance"):
        caption = "Mean and standard deviation over shuffles of one column at a time, on a sample of held-out rows."
        found.append(("Which columns matter", plots.importance(result), caption))
    if any(result["history"].values()):
        caption = f"By argmax on validation rows; a ring marks the epoch whose weights were kept.{first}"
        found.append(("Training", plots.training(result), caption))
    return [{"title": title, "svg": Markup(svg), "caption": caption} for title, svg, caption in found]


def matrix(confusion: Sequence[Sequence[int]], title: str, classes: Sequence[str]) -> dict[str, Any]:
    """Counts with the share of their row for shading; of very many classes only the most frequent confusions."""
    if len(classes) <= MOST_CELLS:
        rows = [
            {"name": name, "cells": [(n, n / max(1, sum(line))) for n in line], "total": sum(line)}
            for name, line in zip(classes, confusion, strict=True)
        ]
        return {"title": title, "rows": rows, "pairs": None}
    pairs = [
        (n, classes[i], classes[j]) for i, line in enumerate(confusion) for j, n in enumerate(line) if i != j and n
    ]
    return {"title": title, "rows": None, "pairs": sorted(pairs, key=lambda pair: -pair[0])[:20]}


def score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def signed(value: float | None) -> str:
    """A difference with its sign, in typographic minus.

    >>> signed(0.0123), signed(-0.5), signed(None)
    ('+0.012', '−0.500', '–')
    """
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")


def flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings as text, those left at None out."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name}: {text(v)}" for name, v in value.items())
        return ", ".join(map(text, value)) if isinstance(value, list | tuple) else str(value)

    return [(name.replace("_", " "), text(value)) for name, value in values.items() if value not in (None, (), [])]
