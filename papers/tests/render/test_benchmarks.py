"""The tables on trees in docs/research/results.md: means, paired differences and who is ahead, from made-up rows."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from evalign_papers.render.along_training import NOTHING as NOTHING_OF_EAST
from evalign_papers.render.along_training import east_blocks
from evalign_papers.render.benchmarks import NOTHING, tree_blocks

SPLITS = 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sets: on one the booster is .1 ahead of everything, on the other a forest is ahead of it."""
    rng, rows = np.random.default_rng(0), []
    hard = rng.normal(0, 0.02, SPLITS)  # a hard split is hard for all
    means = {
        "yeast": {"booster": 0.7, "booster, cross-entropy": 0.6, "random forest": 0.55, "cross-entropy": 0.58},
        "adult": {"booster": 0.7, "booster, cross-entropy": 0.7, "random forest": 0.8, "anchored": 0.65},
    }
    for name, methods in means.items():
        for method, mean in methods.items():
            for rule in ("argmax", "plug-in", *(["own"] if "booster" in method else [])):
                scores = mean + hard + rng.normal(0, 0.003, SPLITS)
                rows += [(name, method, rule, split, score) for split, score in enumerate(scores)]
    pd.DataFrame(rows, columns=["set", "method", "decision", "split", "score"]).to_csv(
        tmp_path / "bench_quality.csv", index=False
    )
    return tmp_path


def corrected(values: np.ndarray) -> float:
    """Nadeau and Bengio's standard error."""
    return float(np.sqrt((1 / SPLITS + 0.2 / 0.64) * values.var(ddof=1)))


def cells(block: str, *starts: str) -> list[str]:
    """The cells of the one line of a table whose cells begin with these."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if "|" in line]
    (found,) = [line for line in lines if all(start in line for start in starts)]
    return found


def scores(folder: Path, name: str, method: str, rule: str) -> np.ndarray:
    rows = pd.read_csv(folder / "bench_quality.csv")
    own = rows[(rows.set == name) & (rows.method == method) & (rows.decision == rule)]
    return own.sort_values("split").score.to_numpy()


def test_the_metric_is_judged_by_paired_differences(folder: Path) -> None:
    block = tree_blocks(folder)["trees-metric"]
    ours, theirs = (scores(folder, "yeast", name, "argmax") for name in ("booster", "booster, cross-entropy"))
    line = cells(block, "yeast", "argmax")
    assert line[3] == f"{ours.mean():.3f} ± {corrected(ours):.3f}"
    gap = ours - theirs
    assert line[5] == f"**+{gap.mean():.3f} ± {corrected(gap):.3f}**\\*\\*\\*"
    assert "*" not in cells(block, "adult", "argmax")[5]


def test_rivals_are_taken_off_by_each_rule(folder: Path) -> None:
    block = tree_blocks(folder)["trees-rivals"]
    assert cells(block, "yeast", "random forest")[3].startswith("**+0.1")
    assert cells(block, "adult", "random forest")[4].startswith("**−0.")
    assert "4 paired comparisons" in block


def test_the_best_of_ours_meets_the_best_rival(folder: Path) -> None:
    block = tree_blocks(folder)["trees-best"]
    yeast, adult = cells(block, "yeast"), cells(block, "adult")
    assert (yeast[1], adult[1]) == ("booster, as it decides",) * 2
    assert yeast[3].startswith("cross-entropy")
    assert adult[3].startswith("random forest")
    assert "Clearly ahead on 1 of 2 sets (yeast), clearly behind on 1 (adult)" in block
    rule = yeast[3].split(", ")[1]
    gap = scores(folder, "yeast", "booster", "own") - scores(folder, "yeast", "cross-entropy", rule)
    assert yeast[5].startswith(f"**+{gap.mean():.3f} ± {corrected(gap):.3f}**")


def test_nothing_stored_is_said(tmp_path: Path) -> None:
    assert set(tree_blocks(tmp_path).values()) == {NOTHING}


def test_blocks_along_training(tmp_path: Path) -> None:
    """Made-up rows of bench_east: paired differences with the error of that many training rows, means of curves."""
    rng, rows, curves = np.random.default_rng(1), [], []
    for share in (0.5, 1.0):
        for method, mean in (("cross-entropy", 0.6), ("EAST", 0.7), ("average precision", 0.5)):
            rows += [
                {
                    "set": "yeast", "method": method, "share": share, "rows": round(1000 * share), "split": split,
                    "f1_argmax": score, "f1_tuned": score, "f1_plug_in": score + 0.01, "average_precision": score,
                    "soft_0.1": None if method == "average precision" else score - 0.02,
                }
                for split, score in enumerate(mean + 0.01 * rng.standard_normal(5))
            ]  # fmt: skip
    for split, last in enumerate((5, 20)):
        curves += [
            {
                "set": "yeast", "method": "EAST", "split": split, "epoch": epoch, "kept": epoch == last,
                "soft_train": 0.9, "hard_train": 0.8, "soft_test": 0.6, "hard_test": 0.7, "entropy_test": 1.0,
            }
            for epoch in (1, 5, 20)[: 2 + split]
        ]  # fmt: skip
    assert set(east_blocks(tmp_path).values()) == {NOTHING_OF_EAST}
    pd.DataFrame(rows).to_csv(tmp_path / "bench_east.csv", index=False)
    pd.DataFrame(curves).to_csv(tmp_path / "bench_east_curves.csv", index=False)
    blocks = east_blocks(tmp_path)
    table = pd.DataFrame(rows)
    for share in (0.5, 1.0):
        own = table[table.share == share].set_index(["method", "split"])
        gap = (own.loc["EAST"].f1_argmax - own.loc["cross-entropy"].f1_plug_in).to_numpy()
        error = np.sqrt((1 / 5 + 0.2 / (0.64 * share)) * gap.var(ddof=1))
        line = cells(blocks["east-rows"], "yeast", f"{round(1000 * share):,}")
        assert line[-1].startswith(f"**+{gap.mean():.3f} ± {error:.3f}**")
        assert line[5] == "–"  # anchored was not run
        assert cells(blocks["east-precision"], f"{round(1000 * share):,}")[-1].startswith("**−0.")
    soft = table[(table.share == 1.0) & (table.method == "EAST")]
    assert cells(blocks["east-temperature"], "EAST")[2:] == [
        f"{soft.f1_argmax.mean():.3f}", f"{soft['soft_0.1'].mean():.3f}",
    ]  # fmt: skip
    assert "average precision" not in blocks["east-temperature"]
    assert cells(blocks["east-curves"], "5")[3:] == ["0.900", "0.800", "0.600", "0.700", "1.000", "+0.100", "+0.100"]
    assert "kept (5 to 20)" in blocks["east-curves"]
    assert "| 20 |" not in blocks["east-curves"]  # one of two splits had stopped before
