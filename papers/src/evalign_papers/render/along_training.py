"""Blocks of docs/research/results.md from `benchmarks/bench_east.py`: along training, by rows, by temperature."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import pandas as pd

from evalign_papers.analysis.hypothesis_tests import TEST_TO_TRAIN, Comparison, over_splits
from evalign_papers.render.benchmarks import judged_together
from evalign_papers.render.documents import markdown_table
from evalign_papers.render.wording import NONE, signed

K = TypeVar("K")
SCORES, CURVES = "bench_east.csv", "bench_east_curves.csv"
COMMAND = "`python benchmarks/bench_east.py`"
NOTHING = f"Nothing has been run yet: {COMMAND}."
METHODS = ("cross-entropy", "EAST", "anchored", "average precision")
EPOCHS = (1, 5, 20, 100, 500)
ROWS = (("cross-entropy", "f1_argmax"), ("cross-entropy", "f1_plug_in"), ("EAST", "f1_argmax"),
        ("anchored", "f1_argmax"), ("anchored", "f1_plug_in"))  # fmt: skip
RULES = {"f1_argmax": "argmax", "f1_plug_in": "plug-in", "f1_tuned": "tuned"}


def east_blocks(folder: Path) -> dict[str, str]:
    """Blocks of the document, by name."""
    scores, curves = (pd.read_csv(folder / name) if (folder / name).exists() else None for name in (SCORES, CURVES))
    return {
        "east-rows": NOTHING if scores is None else rows_block(scores),
        "east-precision": NOTHING if scores is None else precision_block(scores),
        "east-temperature": NOTHING if scores is None else temperature_block(scores),
        "east-curves": NOTHING if curves is None else curves_block(curves),
    }


def rows_block(scores: pd.DataFrame) -> str:
    """F1 by training rows, and EAST with argmax minus cross-entropy with the plug-in rule."""
    compared = {
        (name, share): over_splits(
            _by_split(own, "EAST", "f1_argmax"),
            _by_split(own, "cross-entropy", "f1_plug_in"),
            test_to_train=TEST_TO_TRAIN / share,
        )
        for (name, share), own in _groups(scores)
    }
    corrected = _corrected(compared)
    lines = []
    for (name, share), own in _groups(scores):
        means = [_mean(own, method, rule) for method, rule in ROWS]
        lines.append([name, f"{own['rows'].min():,}", *means, corrected[name, share]])
    head = ["data", "training rows", *(f"{method}, {RULES[rule]}" for method, rule in ROWS),
            "EAST, argmax minus cross-entropy, plug-in"]  # fmt: skip
    return f"{markdown_table(head, lines)}\n\n{_family(compared.values())}"


def precision_block(scores: pd.DataFrame) -> str:
    """Average precision by training, and the differences from cross-entropy over the same splits."""
    lines, compared = [], {}
    for (name, share), own in _groups(scores):
        for method in METHODS[1:]:
            compared[name, share, method] = over_splits(
                _by_split(own, method, "average_precision"),
                _by_split(own, "cross-entropy", "average_precision"),
                test_to_train=TEST_TO_TRAIN / share,
            )
    corrected = _corrected(compared)
    for (name, share), own in _groups(scores):
        base = _mean(own, "cross-entropy", "average_precision")
        lines.append([name, f"{own['rows'].min():,}", base, *(corrected[name, share, one] for one in METHODS[1:])])
    head = ["data", "training rows", "cross-entropy", *(f"{method}, difference" for method in METHODS[1:])]
    return f"{markdown_table(head, lines)}\n\n{_family(compared.values())}"


def temperature_block(scores: pd.DataFrame) -> str:
    """Soft F1 of trained networks on test rows at each temperature, and hard F1, means over splits."""
    columns = [name for name in map(str, scores) if name.startswith("soft_")]
    whole = scores[(scores["share"] == 1.0) & scores[columns[0]].notna()]
    lines = [
        [str(name), str(method), f"{own['f1_argmax'].mean():.3f}", *(f"{own[column].mean():.3f}" for column in columns)]
        for (name, method), own in whole.groupby(["set", "method"], sort=False)
    ]
    head = ["data", "trained on", "hard", *(f"T = {column.removeprefix('soft_')}" for column in columns)]
    return (
        f"{markdown_table(head, lines)}\n\nMeans over {whole['split'].nunique()} splits, all training rows. {COMMAND}"
    )


def curves_block(curves: pd.DataFrame) -> str:
    """Soft and hard F1 of training and test rows and cross-entropy of test rows, along training."""
    lines = list[list[str]]()
    for (name, method), own in curves.groupby(["set", "method"], sort=False):
        splits = own["split"].nunique()
        shown = [(str(epoch), own[own["epoch"] == epoch]) for epoch in EPOCHS]
        kept = own[own["kept"]].groupby("split").last()
        shown.append((f"kept ({kept['epoch'].min()} to {kept['epoch'].max()})", kept))
        for label, at in shown:
            if len(at) < splits:  # some splits had stopped
                continue
            mean = at[["soft_train", "hard_train", "soft_test", "hard_test", "entropy_test"]].mean()
            gaps = mean["hard_train"] - mean["hard_test"], mean["hard_test"] - mean["soft_test"]
            lines.append(
                [
                    str(name),
                    str(method),
                    label,
                    *(f"{value:.3f}" for value in mean),
                    *(signed(gap) for gap in gaps),
                ]
            )
    head = ["data", "trained on", "epoch", "soft, training rows", "hard, training rows", "soft, test rows",
            "hard, test rows", "cross-entropy, test rows", "hard, training minus test",
            "test, hard minus soft"]  # fmt: skip
    note = f"Means over {curves['split'].nunique()} splits; soft at T = 0.2, training rows without dropout. {COMMAND}"
    return f"{markdown_table(head, lines)}\n\n{note}"


def _groups(scores: pd.DataFrame) -> list[tuple[tuple[str, float], pd.DataFrame]]:
    """Rows by data set, in their order, and share of training rows, ascending."""
    order = {name: i for i, name in enumerate(scores["set"].unique())}
    found = [((str(name), float(str(share))), own) for (name, share), own in scores.groupby(["set", "share"])]
    return sorted(found, key=lambda one: (order[one[0][0]], one[0][1]))


def _by_split(own: pd.DataFrame, method: str, column: str) -> dict[int, float]:
    rows = own[own["method"] == method]
    return {int(split): float(value) for split, value in zip(rows["split"], rows[column], strict=True)}


def _mean(own: pd.DataFrame, method: str, column: str) -> str:
    rows = own[own["method"] == method]
    return f"{rows[column].mean():.3f}" if len(rows) else NONE


def _corrected(compared: Mapping[K, Comparison | None]) -> dict[K, str]:
    """Differences with stars by corrected p values; a dash if there is none."""
    found = {key: signed(one.difference, one.error, p) for key, (one, p) in judged_together(compared).items()}
    return {key: found.get(key, NONE) for key in compared}


def _family(compared: Iterable[Comparison | None]) -> str:
    count = sum(one is not None for one in compared)
    return f"{count} paired comparisons over splits, corrected (Holm) as one family. {COMMAND}"
