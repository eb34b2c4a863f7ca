"""The command line from a user's view: results, files, notes, and one line for every error."""

import html
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import f1_score, fbeta_score, precision_score, recall_score

from commands import Said, command
from evalign import EASTClassifier
from evalign.cli import console
from evalign.cli.app import main
from evalign.cli.console import Output

FAST = ["--model", "network", "--epochs", "4", "--hidden", "16", "--device", "cpu"]
Call = Callable[..., Said]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line in this process."""

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Said(int(stopped.value.code or 0), captured.out, captured.err)

    return run


def animals(n: int, seed: int) -> pd.DataFrame:
    """Three classes, one of them rare; numbers, a category, a flag, missing values."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(["cat", "dog", "emu"], n, p=[0.55, 0.35, 0.1])
    weight = rng.normal(size=n) + np.select([kind == "cat", kind == "dog"], [-1.0, 1.0], 2.5)
    weight[:3] = np.nan
    return pd.DataFrame(
        {
            "weight": weight,
            "height": rng.normal(size=n) + 2.0 * (kind == "emu"),
            "colour": np.where(rng.random(n) < 0.8, np.where(kind == "cat", "grey", "brown"), "white"),
            "tame": rng.random(n) < 0.7,
            "kind": kind,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    animals(240, 0).to_csv(path / "train.csv", index=False)
    animals(120, 1).to_csv(path / "test.csv", index=False)
    animals(120, 1).to_parquet(path / "test.parquet")
    animals(60, 2).drop(columns="kind").to_csv(path / "new.tsv", sep="\t", index=False)
    return path


@pytest.fixture(scope="module")
def fitted(folder: Path) -> Path:
    """One run that many tests look at."""
    with pytest.raises(SystemExit) as stopped:
        main(["fit", str(folder / "train.csv"), "-t", "kind", "-o", str(folder / "run"), "-q", *FAST,
              "--test", str(folder / "test.csv")])  # fmt: skip
    assert stopped.value.code == 0
    return folder / "run"


def result_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


def row_of(result: dict[str, Any], contender: str, decision: str) -> dict[str, Any]:
    [row] = [r for r in result["table"] if (r["contender"], r["decision"]) == (contender, decision)]
    return dict(row)


def labels_of(matrix: list[list[int]]) -> tuple[list[int], list[int]]:
    pairs = [(i, j) for i, line in enumerate(matrix) for j, n in enumerate(line) for _ in range(n)]
    return [i for i, _ in pairs], [j for _, j in pairs]


# -- fit --------------------------------------------------------------------------------------------------------------


def test_fit_writes_model_report_and_result(fitted: Path) -> None:
    assert sorted(path.name for path in fitted.iterdir()) == ["model.safetensors", "report.html", "result.json"]
    result = result_of(fitted)
    assert result["split"]["training_and_validation_rows"] == 240
    assert result["split"]["test_rows"] == 120
    assert result["split"]["validation_rows"] == 240  # by folds, since no class would have 100 of one division
    assert result["settings"]["seed"] == 0
    assert result["versions"]["evalign"]
    assert result["command_line"].startswith("evalign fit ")
    assert "--epochs 4" in result["command_line"]
    assert {(row["contender"], row["decision"]) for row in result["table"]} == {
        ("ours", "auto"), ("cross_entropy", "argmax"), ("cross_entropy", "plug_in"), ("cross_entropy", "auto"),
        ("majority", "argmax"),
    }  # fmt: skip


def test_scores_are_scikit_learns(fitted: Path, folder: Path, call: Call) -> None:
    truth = pd.read_csv(folder / "test.csv")["kind"]
    assert call("predict", fitted, folder / "test.csv", "-o", folder / "p.csv", "-q").code == 0
    result = result_of(fitted)
    ours = row_of(result, "ours", "auto")
    predicted = pd.read_csv(folder / "p.csv")["prediction"]
    assert ours["score"] == pytest.approx(f1_score(truth, predicted, average="macro"), abs=1e-12)
    for row in result["table"]:
        y, d = labels_of(row["confusion"])
        assert row["score"] == pytest.approx(f1_score(y, d, average="macro"), abs=1e-12)
        assert row["difference"] == pytest.approx(ours["score"] - row["score"], abs=1e-12)
        low, high = row["interval"]
        assert low <= row["score"] <= high
    # After four epochs the rare class may not be predicted at all.
    each = [score(truth, predicted, average=None, zero_division=0.0) for score in (precision_score, recall_score)]
    [detail] = [rule for rule in result["per_class"] if rule["contender"] == "ours"]
    assert [value for value, _, _ in detail["precision"]] == pytest.approx(each[0], abs=1e-12)
    assert [value for value, _, _ in detail["recall"]] == pytest.approx(each[1], abs=1e-12)


@pytest.mark.slow
def test_fit_prints_the_honest_table(folder: Path, call: Call, tmp_path: Path) -> None:
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *FAST)
    assert said.code == 0, said.err
    rivals = ("cross-entropy + argmax", "cross-entropy + plug-in", "cross-entropy + calibrated", "majority class")
    for words in ("ours (anchored) + calibrated", *rivals):
        assert words in said.out
    assert str(tmp_path / "run" / "report.html") in said.out
    assert "rows outside the test set" in said.out
    assert result_of(tmp_path / "run")["split"]["test_rows"] == 48


@pytest.mark.slow
def test_same_seed_same_result_other_seed_other_split(folder: Path, call: Call, tmp_path: Path) -> None:
    tables = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        data = folder / "train.csv"
        said = call("fit", data, "-t", "kind", "-o", tmp_path / name, *FAST, "--seed", seed, "--json")
        assert said.code == 0, said.err
        assert said.err == ""
        result = json.loads(said.out)  # nothing but JSON on stdout
        assert result == result_of(tmp_path / name)
        tables.append([(row["title"], row["confusion"]) for row in result["table"]])
    assert tables[0] == tables[1]
    assert tables[0] != tables[2]


@pytest.mark.slow
def test_beta_by_label_positive_and_average(folder: Path, call: Call, tmp_path: Path) -> None:
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "a", *FAST, "--json",
                "--metric", "fbeta", "--beta", "emu=5", "--beta", "dog=2")  # fmt: skip
    assert said.code == 0, said.err
    result = json.loads(said.out)
    y, d = labels_of(row_of(result, "ours", "auto")["confusion"])
    each = [fbeta_score(y, d, beta=beta, labels=[k], average="macro") for k, beta in enumerate((1, 2, 5))]
    assert row_of(result, "ours", "auto")["score"] == pytest.approx(np.mean(each), abs=1e-12)

    two = animals(200, 5)
    two["kind"] = np.where(two["kind"] == "cat", "cat", "other")
    two.to_csv(tmp_path / "two.csv", index=False)
    said = call("fit", tmp_path / "two.csv", "-t", "kind", "-o", tmp_path / "b", *FAST, "--json", "--positive", "cat")
    assert said.code == 0, said.err
    result = json.loads(said.out)
    assert result["classes"] == ["other", "cat"]
    y, d = labels_of(row_of(result, "ours", "auto")["confusion"])
    assert row_of(result, "ours", "auto")["score"] == pytest.approx(f1_score(y, d), abs=1e-12)
    assert [curve["contender"] for curve in result["curves"]] == ["ours", "cross_entropy"]


@pytest.mark.slow
def test_counting_the_frequent_class_is_noted(call: Call, tmp_path: Path) -> None:
    two = animals(200, 5)
    two["kind"] = np.where(two["kind"] == "emu", "emu", "other")
    two.to_csv(tmp_path / "two.csv", index=False)
    said = call("fit", tmp_path / "two.csv", "-t", "kind", "-o", tmp_path / "run", *FAST)
    assert "note: 'other' is the positive class, the more frequent one; use --positive emu for the other" in said.err
    said = call(
        "fit", tmp_path / "two.csv", "-t", "kind", "-o", tmp_path / "run", *FAST, "--positive", "other", "--force"
    )
    assert "more frequent" not in said.err


def test_constraints_are_shown_with_what_they_reached(folder: Path, call: Call, tmp_path: Path) -> None:
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "a", *FAST, "--json",
                "--maximize", "recall", "--subject-to", "precision>=0.3",
                "--subject-to", "recall[emu]>=0.999")  # fmt: skip
    assert said.code == 0, said.err
    result = json.loads(said.out)
    row = row_of(result, "ours", "auto")
    y, d = labels_of(row["confusion"])
    expected = precision_score(y, d, average="macro", zero_division=0.0), recall_score(y, d, average=None)[2]
    assert list(row["limits"].values()) == pytest.approx(expected, abs=1e-12)
    assert ("recall[emu]>=0.999" in row["missed"]) == (expected[1] < 0.999)


def test_a_constraint_that_cannot_be_met_exits_with_3(folder: Path, call: Call, tmp_path: Path) -> None:
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "a", *FAST,
                "--subject-to", "precision>=0.9999", "--subject-to", "recall>=0.9999")  # fmt: skip
    assert said.code == 3, said.err
    assert "nearest feasible: precision >= 0." in said.err
    assert (tmp_path / "a" / "report.html").exists()


def test_decision_and_recipe_are_taken(folder: Path, call: Call, tmp_path: Path) -> None:
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "a", *FAST, "--json",
                "--decision", "tuned", "--recipe", "paper", "--metric", "mcc", "--drop", "tame")  # fmt: skip
    assert said.code == 0, said.err
    result = json.loads(said.out)
    assert result["reference"] == ["ours", "tuned"]
    assert row_of(result, "cross_entropy", "tuned")["title"] == "cross-entropy + tuned"
    assert result["data"]["features"] == 3


@pytest.mark.slow
def test_network_and_ensemble_are_taken(folder: Path, call: Call, tmp_path: Path) -> None:
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *FAST, "--network", "embedding",
                "--ensemble", "3", "--folds", "1")  # fmt: skip
    assert said.code == 0, said.err
    model = EASTClassifier.load(tmp_path / "run" / "model.safetensors")
    assert (model.network, model.ensemble, model.network_[1].members) == ("embedding", 3, 3)
    result = result_of(tmp_path / "run")
    assert (result["settings"]["network"], result["settings"]["ensemble"]) == ("embedding", 3)
    assert result["split"]["validation_rows"] < 60  # a part of 240 rows


def test_folds_are_taken_and_told(folder: Path, call: Call, tmp_path: Path) -> None:
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *FAST, "--folds", "2")
    assert said.code == 0, said.err
    model = EASTClassifier.load(tmp_path / "run" / "model.safetensors")
    assert (model.folds, model.folds_, len(model.network_)) == (2, 2, 2)
    result = result_of(tmp_path / "run")
    assert result["settings"]["folds"] == 2
    assert result["split"]["validation_rows"] == result["split"]["training_and_validation_rows"]
    assert "each by one of 2 folds" in result["protocol"]
    assert any(note.startswith("2 networks were trained") for note in result["notes"])


@pytest.mark.slow
def test_constant_column_works_with_a_note(folder: Path, call: Call, tmp_path: Path) -> None:
    animals(200, 0).assign(planet="earth").to_csv(tmp_path / "a.csv", index=False)
    said = call("fit", tmp_path / "a.csv", "-t", "kind", "-o", tmp_path / "run", *FAST)
    assert said.code == 0, said.err
    assert "note: constant columns carry no information: 'planet'" in said.err
    assert any("planet" in note for note in result_of(tmp_path / "run")["notes"])
    quiet = call("fit", tmp_path / "a.csv", "-t", "kind", "-o", tmp_path / "run", "--quiet", "--force", *FAST)
    assert quiet == (0, "", "")  # nothing but errors, on either stream


def test_a_folder_with_something_else_is_left_alone(folder: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path, *FAST)
    assert_wrong(said, "'thesis.tex'")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_text("another tool's")
    assert_wrong(call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "other", *FAST), "no result.json")
    assert (tmp_path / "other" / "model.safetensors").read_text() == "another tool's"
    assert_wrong(call("fit", folder / "train.csv", "-t", "kind", "-o", folder / "train.csv", *FAST), "is a file")


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


@contextmanager
def pressing_ctrl_c(monkeypatch: pytest.MonkeyPatch, at: tuple[str, int]) -> Iterator[None]:
    """Press Ctrl-C when the contender whose title starts so has finished that epoch."""

    @contextmanager
    def progress(self: Output, steps: int, epochs: int, splits: int = 1) -> Iterator[Any]:
        def step(title: str, split: int) -> Any:
            def on_epoch(epoch: Any) -> None:
                if title.startswith(at[0]) and epoch.epoch == at[1]:
                    signal.raise_signal(signal.SIGINT)

            return on_epoch

        yield step

    with monkeypatch.context() as patch:
        patch.setattr(Output, "progress", progress)
        yield


def test_ctrl_c_keeps_the_best_so_far(
    folder: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pressing_ctrl_c(monkeypatch, ("ours", 3)):
        said = call(
            "fit",
            folder / "train.csv",
            "-t",
            "kind",
            "-o",
            tmp_path / "run",
            "--model",
            "network",
            "--epochs",
            "50",
            "--hidden",
            "16",
        )
    assert said.code == 0, said.err
    assert "Ctrl-C ended the training of ours (anchored); its best weights so far were kept" in said.err
    assert "cross-entropy was not trained" in said.err
    result = result_of(tmp_path / "run")
    assert result["interrupted"]
    assert len(result["history"]["ours (anchored)"]) == 3
    assert {row["contender"] for row in result["table"]} == {"ours", "majority"}
    assert call("predict", tmp_path / "run", folder / "test.csv", "-q").code == 0


def test_ctrl_c_in_the_rival_keeps_ours_whole(
    folder: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pressing_ctrl_c(monkeypatch, ("cross-entropy", 2)):
        said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *FAST)
    assert said.code == 0, said.err
    assert "Ctrl-C ended the training of cross-entropy" in said.err
    assert len(result_of(tmp_path / "run")["history"]["ours (anchored)"]) == 4


def test_ctrl_c_with_nothing_to_keep_is_130(
    folder: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("evalign.tables.read.read_table", pressed)
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *FAST)
    assert (said.code, said.err.strip()) == (130, "evalign: interrupted; nothing was written")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ctrl_c_in_compare_keeps_complete_splits(
    folder: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalign.comparison.contenders.RIVALS", {})
    pressed: list[int] = []

    @contextmanager
    def progress(self: Output, steps: int, epochs: int, splits: int = 1) -> Iterator[Any]:
        def step(title: str, split: int) -> Any:
            return lambda epoch: signal.raise_signal(signal.SIGINT) if split == 1 and not pressed else None

        yield step

    monkeypatch.setattr(Output, "progress", progress)
    said = call("compare", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *FAST, "--splits", "3")
    assert said.code == 0, said.err
    assert "after 1 of 3 splits" in said.err


# -- predict ----------------------------------------------------------------------------------------------------------


def test_predict_in_every_format(fitted: Path, folder: Path, call: Call, tmp_path: Path) -> None:
    tables = []
    for name in ("p.csv", "p.tsv", "p.parquet"):
        said = call("predict", fitted, folder / "new.tsv", "--out", tmp_path / name)
        assert said.code == 0, said.err
        assert said.out == f"60 predictions: {tmp_path / name}\n"
        read = pd.read_parquet if name.endswith("parquet") else pd.read_csv
        tables.append(read(tmp_path / name, **({"sep": "\t"} if name.endswith("tsv") else {})))
    for table in tables:
        assert list(table) == ["prediction", "probability_cat", "probability_dog", "probability_emu"]
        assert len(table) == 60
        assert table.iloc[:, 1:].to_numpy() == pytest.approx(tables[0].iloc[:, 1:].to_numpy())
        assert table["prediction"].tolist() == tables[0]["prediction"].tolist()
    assert tables[0].iloc[:, 1:].sum(axis=1).to_numpy() == pytest.approx(np.ones(60))


def test_predict_to_stdout_without_probabilities(fitted: Path, folder: Path, call: Call) -> None:
    said = call("predict", fitted, folder / "new.tsv", "--no-proba")
    lines = said.out.splitlines()
    assert (said.code, said.err, lines[0], len(lines)) == (0, "", "prediction", 61)
    assert set(lines[1:]) <= {"cat", "dog", "emu"}


def test_predict_says_the_score_and_what_it_ignores(fitted: Path, folder: Path, call: Call, tmp_path: Path) -> None:
    extra = animals(120, 1).assign(id=range(120))
    extra = extra[["id", "kind", "tame", "colour", "height", "weight"]]  # another order
    extra.to_csv(tmp_path / "extra.csv", index=False)
    said = call("predict", fitted, tmp_path / "extra.csv", "-o", tmp_path / "p.csv", "--keep", "id")
    assert (said.code, said.err) == (0, "")  # the target is known, the id is asked for
    assert list(pd.read_csv(tmp_path / "p.csv"))[:2] == ["id", "prediction"]
    said = call("predict", fitted, tmp_path / "extra.csv", "-o", tmp_path / "p.csv", "--target", "kind", "--force")
    assert "columns unknown to the model were ignored: 'id'" in said.err
    score = row_of(result_of(fitted), "ours", "auto")["score"]
    assert f"f1 on these rows: {score:.4f}" in said.err
    said = call("predict", fitted, folder / "test.parquet", "-o", tmp_path / "q.csv", "--target", "kind", "--json")
    assert json.loads(said.out)["score"] == pytest.approx(score, abs=1e-12)
    assert said.err == ""


def test_predict_jointly_is_the_models_and_so_is_its_score(
    fitted: Path, folder: Path, call: Call, tmp_path: Path
) -> None:
    said = call("predict", fitted, folder / "test.parquet", "-o", tmp_path / "p.csv", "--target", "kind", "--jointly")
    assert said.code == 0, said.err
    found, frame = pd.read_csv(tmp_path / "p.csv"), pd.read_parquet(folder / "test.parquet")
    model = EASTClassifier.load(fitted / "model.safetensors")
    assert found["prediction"].tolist() == model.predict_jointly(frame[model.feature_names_in_]).tolist()
    expected = f1_score(frame["kind"], found["prediction"], average="macro")
    assert f"f1 on these rows: {expected:.4f}" in said.err


def test_predict_adapts_and_reports_what_it_found(fitted: Path, folder: Path, call: Call, tmp_path: Path) -> None:
    frame = animals(400, 3)
    frame = frame[(frame["kind"] == "dog") | (np.arange(400) % 4 == 0)]
    frame.to_csv(tmp_path / "later.csv", index=False)
    arguments = ("predict", fitted, tmp_path / "later.csv", "-o", tmp_path / "p.csv", "--adapt", "--json")
    said = call(*arguments)
    assert said.code == 0, said.err
    found = json.loads(said.out)
    model = EASTClassifier.load(fitted / "model.safetensors")
    adapted = model.adapt(frame[model.feature_names_in_])
    labels = pd.read_csv(tmp_path / "p.csv")["prediction"]
    assert labels.tolist() == adapted.predict(frame[model.feature_names_in_]).tolist()
    assert found["shift"]["kind"] == adapted.shift_.kind
    before = model.predict(frame[model.feature_names_in_])
    assert found["shift"]["decided"]["dog"] == [int((before == "dog").sum()), int((labels == "dog").sum())]
    page = (tmp_path / "p.report.html").read_text()
    assert "Class shares of later.csv" in page
    assert found["shift"]["reason"] in html.unescape(page)
    (tmp_path / "p.csv").unlink()
    assert_wrong(call(*arguments), "p.report.html, the report of --adapt, exists")
    assert call(*arguments, "--force").code == 0


def test_predict_wants_the_columns_of_training(fitted: Path, folder: Path, call: Call, tmp_path: Path) -> None:
    frame = pd.read_csv(folder / "new.tsv", sep="\t")
    frame.rename(columns={"weight": "wieght"}).to_csv(tmp_path / "a.csv", index=False)
    said = call("predict", fitted, tmp_path / "a.csv")
    assert_wrong(said, "no column 'weight', only 'wieght', 'height', 'colour', 'tame'; did you mean 'wieght'?")
    frame.assign(weight="heavy").to_csv(tmp_path / "b.csv", index=False)
    assert_wrong(call("predict", fitted, tmp_path / "b.csv"), "'weight' held numbers in training, got 'heavy'")
    frame.assign(weight=np.inf).to_csv(tmp_path / "c.csv", index=False)
    assert_wrong(call("predict", fitted, tmp_path / "c.csv"), "'weight' holds infinity")
    assert_wrong(call("predict", fitted, folder / "new.tsv", "-o", tmp_path / "a.xlsx"), "must end in .csv")
    assert_wrong(call("predict", fitted, folder / "new.tsv", "--json"), "--out")
    assert_wrong(call("predict", fitted, folder / "new.tsv", "--target", "kind"), "no column 'kind'")
    assert_wrong(call("predict", fitted, folder / "new.tsv", "--keep", "naem"), "no column 'naem'")


def test_damaged_and_foreign_models(fitted: Path, folder: Path, call: Call, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    whole = (fitted / "model.safetensors").read_bytes()
    new = folder / "new.tsv"
    assert_wrong(call("predict", tmp_path / "nowhere", new), "does not exist")
    assert_wrong(call("predict", tmp_path, new), "no model.safetensors")
    (tmp_path / "a.safetensors").write_bytes(whole[:-100])
    assert_wrong(call("predict", tmp_path / "a.safetensors", new), "damaged")
    (tmp_path / "b.safetensors").write_bytes(whole[:-8] + bytes(8))
    assert_wrong(call("predict", tmp_path / "b.safetensors", new), "damaged")
    import torch

    save_file({"a": torch.ones(2)}, tmp_path / "c.safetensors")
    assert_wrong(call("predict", tmp_path / "c.safetensors", new), "not an evalign classifier")
    header = json.dumps({"format": "evalign.classifier", "version": 99})
    save_file({"a": torch.ones(2)}, tmp_path / "d.safetensors", metadata={"evalign": header})
    assert_wrong(call("predict", tmp_path / "d.safetensors", new), "version 99")


# -- compare and demo -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compare_adds_trees_over_splits(folder: Path, call: Call, tmp_path: Path) -> None:
    said = call("compare", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *FAST, "--splits", "2", "--json")
    assert said.code == 0, said.err
    result = json.loads(said.out)
    pairs = {(row["contender"], row["decision"]) for row in result["table"]}
    assert (
        len(pairs) == 9 * 4 + 1
    )  # three of ours, cross-entropy, LightGBM, XGBoost, forest, boosting, linear; majority
    assert ("random_forest", "tuned") in pairs
    assert ("gradient_boosting", "plug_in") in pairs
    assert ("ours", "auto") in pairs
    for row in result["table"]:
        assert row["error"] == pytest.approx(np.std(row["scores"], ddof=1) / np.sqrt(2), abs=1e-12)
    assert (tmp_path / "run" / "report.html").stat().st_size > 20_000
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_demo_from_end_to_end(call: Call, tmp_path: Path) -> None:
    said = call("demo", "-o", tmp_path / "demo", "--splits", "2")
    assert said.code == 0, said.err
    assert_wrong(call("demo", "-o", tmp_path / "demo"), "holds an earlier run")
    assert str(tmp_path / "demo" / "report.html") in said.out
    assert "random forest + tuned" in said.out
    assert "Catches" in said.out
    assert len(pd.read_csv(tmp_path / "demo" / "payments.csv")) == 5000


# -- wrong input ------------------------------------------------------------------------------------------------------


def assert_wrong(said: Said, words: str) -> None:
    """One line on stderr with this text, exit code 2, nothing on stdout."""
    assert said.code == 2, said
    assert said.err.startswith("evalign: "), said.err
    assert said.err.count("\n") == 1, said.err
    assert words in said.err
    assert said.out == ""


def edited(change: Callable[[pd.DataFrame], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        frame = animals(60, 0)
        made = change(frame)
        (frame if made is None else made).to_csv(path, index=False)

    return write


def raw(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)

    return write


WRONG_TABLES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing file": (lambda path: None, "does not exist"),
    "empty file": (raw(""), "is empty"),
    "header only": (raw("a,kind\n"), "no rows"),
    "wrong target": (edited(lambda f: f.rename(columns={"kind": "kinds"})), "did you mean 'kinds'?"),
    "one class": (edited(lambda f: f.assign(kind="cat")), "at least two classes"),
    "a class with one row": (edited(lambda f: f.assign(kind=["yak", *f["kind"][1:]])), "'yak' has fewer"),
    "label missing": (edited(lambda f: f.assign(kind=f["kind"].where(f.index > 0))), "must have a label in every row"),
    "infinity": (edited(lambda f: f.assign(weight=np.inf)), "'weight' holds infinity"),
    "duplicate column": (raw("a,a,kind\n1,2,x\n3,4,y\n5,6,x\n7,8,y\n"), "'a' more than once"),
    "ragged rows": (raw("a,kind\n1,x\n2,y,z\n"), "line 3"),
    "regression target": (edited(lambda f: f.assign(kind=f["height"])), "regression"),
    "target alone": (edited(lambda f: f[["kind"]]), "add feature columns"),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_wrong_tables(name: str, call: Call, tmp_path: Path) -> None:
    write, words = WRONG_TABLES[name]
    write(tmp_path / "a.csv")
    assert_wrong(call("fit", tmp_path / "a.csv", "--target", "kind", "--out", tmp_path / "run", *FAST), words)
    assert not (tmp_path / "run").exists()


WRONG_OPTIONS = {
    "unknown metric": (["--metric", "f2"], "did you mean 'fbeta'?"),
    "beta of another metric": (["--beta", "2"], "--beta requires --metric fbeta"),
    "negative beta": (["--metric", "fbeta", "--beta", "-1"], "--beta must be a number above 0"),
    "beta in words": (["--metric", "fbeta", "--beta", "two"], "such as 2 or dog=5, got 'two'"),
    "two betas": (["--metric", "fbeta", "--beta", "2", "--beta", "dog=3"], "LABEL=NUMBER for each label"),
    "beta twice": (["--metric", "fbeta", "--beta", "dog=2", "--beta", "dog=3"], "'dog' twice"),
    "beta of no label": (["--metric", "fbeta", "--beta", "dgo=2"], "did you mean 'dog'?"),
    "positive of three": (["--positive", "dog"], "two classes"),
    "unknown average": (["--average", "makro"], "did you mean 'macro'?"),
    "average of mcc": (["--metric", "mcc", "--average", "macro"], "remove --average"),
    "binary of three": (["--average", "binary"], "needs two classes"),
    "constraint without a number": (["--subject-to", "precision>=high"], "must end in a number"),
    "constraint of no form": (["--subject-to", "precision"], "look like 'recall >= 0.9'"),
    "strict constraint": (["--subject-to", "precision>0.9"], "did you mean '>='?"),
    "constraint on no metric": (["--subject-to", "presicion>=0.9"], "did you mean 'precision'?"),
    "constraint on no class": (["--subject-to", "recall[cow]>=0.9"], "the class in"),
    "constraint and argmax": (["--subject-to", "recall>=0.9", "--decision", "argmax"], "--subject-to needs"),
    "unknown recipe": (["--recipe", "anchor"], "did you mean 'anchored'?"),
    "unknown decision": (["--decision", "plugin"], "did you mean 'plug_in'?"),
    "unknown device": (["--device", "gpu"], "--device must be one this machine has"),
    "no epochs": (["--epochs", "0"], "epochs must lie in [1"),
    "unknown network": (["--network", "embeding"], "did you mean 'embedding'?"),
    "no member": (["--ensemble", "0"], "see evalign fit --help"),
    "no folds": (["--folds", "many"], "--folds must be auto or a number from 1 to 100"),
    "no layers": (["--hidden", "a,b"], "--hidden must be widths"),
    "test size": (["--test-size", "1.5"], "--test-size must lie between 0 and 1"),
    "unknown drop": (["--drop", "hieght"], "did you mean 'height'?"),
    "missing test file": (["--test", "nowhere.csv"], "nowhere.csv does not exist"),
    "usage": (["--bogus"], "see evalign fit --help"),
    "not a number": (["--seed", "x"], "see evalign fit --help"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options(name: str, folder: Path, call: Call, tmp_path: Path) -> None:
    options, words = WRONG_OPTIONS[name]
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", "--hidden", "16", *options)
    assert_wrong(said, words)
    assert not (tmp_path / "run").exists()


def test_infinity_in_a_test_row_is_told_before_training(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = animals(200, 0)
    frame.loc[7, "weight"] = np.inf
    frame.to_csv(tmp_path / "a.csv", index=False)
    monkeypatch.setattr("evalign.comparison.run.evaluate", lambda *arguments, **options: pytest.fail("trained"))
    assert_wrong(call("fit", tmp_path / "a.csv", "-t", "kind", "-o", tmp_path / "run", *FAST), "infinity in 1 row")


def test_wrong_test_files(folder: Path, call: Call, tmp_path: Path) -> None:
    animals(30, 3).assign(kind="yak").to_csv(tmp_path / "yak.csv", index=False)
    animals(30, 3).drop(columns="height").to_csv(tmp_path / "flat.csv", index=False)
    start = ["fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *FAST, "--test"]
    assert_wrong(call(*start, tmp_path / "yak.csv"), "has the label 'yak' in 'kind'")
    assert_wrong(call(*start, tmp_path / "flat.csv"), "no column 'height'")


def test_parquet_with_lists_is_refused(call: Call, tmp_path: Path) -> None:
    animals(60, 0).assign(tags=[["a", "b"]] * 60).to_parquet(tmp_path / "a.parquet")
    assert_wrong(call("fit", tmp_path / "a.parquet", "-t", "kind", "-o", tmp_path / "run"), "'tags' holds")


def test_bugs_are_told_from_wrong_input(
    folder: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalign.cli.run_files.load", lambda *arguments: np.concatenate([]))
    said = call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run")
    assert said.code == 1
    assert "this is a bug (ValueError: need at least one array" in said.err
    assert "EVALIGN_TRACEBACK=1" in said.err
    monkeypatch.setenv("EVALIGN_TRACEBACK", "1")
    with pytest.raises(ValueError, match="need at least one array"):
        main(["fit", str(folder / "train.csv"), "-t", "kind", "-o", str(tmp_path / "run")])


# -- the real command -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_command_fits_and_predicts(folder: Path, tmp_path: Path) -> None:
    done = command("fit", folder / "train.csv", "--target", "kind", "--out", "run", *FAST, cwd=tmp_path)
    assert (done.code, "majority class" in done.out) == (0, True), done.err
    assert "Traceback" not in done.err
    done = command("predict", "run", folder / "new.tsv", cwd=tmp_path)
    assert (done.code, len(done.out.splitlines())) == (0, 61), done.err


@pytest.mark.slow
def test_closed_pipe_ends_quietly(fitted: Path, folder: Path) -> None:
    pd.concat([pd.read_csv(folder / "new.tsv", sep="\t")] * 200).to_csv(folder / "long.csv", index=False)
    process = subprocess.Popen(
        [sys.executable, "-m", "evalign", "predict", str(fitted), str(folder / "long.csv")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("prediction,")
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=300), error) == (141, "")


@pytest.mark.slow
def test_real_command_fails_in_one_line(folder: Path, tmp_path: Path) -> None:
    done = command("fit", folder / "train.csv", "--target", "Knid", "--out", tmp_path / "run")
    assert_wrong(done, "did you mean 'kind'?")
    assert_wrong(command("fit", folder / "train.csv"), "see evalign fit --help")


def test_help_is_quick_and_complete(call: Call) -> None:
    code = (
        "import sys, evalign.cli.app\n"
        "slow = {'torch', 'numpy', 'pandas', 'sklearn', 'matplotlib', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("fit", "predict", "compare", "demo"):
        said = call(name, "--help")
        assert said.code == 0
        assert f"Example: evalign {name}" in said.out
    assert "Commands" in call().out


@pytest.mark.slow
def test_output_that_is_closed_or_of_few_letters(folder: Path, fitted: Path, tmp_path: Path) -> None:
    pd.read_csv(folder / "train.csv").assign(place="Orléans").to_csv(tmp_path / "new.csv", index=False)
    words = [sys.executable, "-m", "evalign", "predict", fitted, tmp_path / "new.csv", "--keep", "place"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, env=ascii_only, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"Orl\xe9ans" in done.stdout
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *words], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_version(call: Call) -> None:
    from evalign import __version__

    assert call("--version") == (0, f"evalign {__version__}\n", "")


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from evalign.training.loop import Epoch

    clock, said = [0.0], []
    monkeypatch.setattr("evalign.cli.console.time.monotonic", lambda: clock[0])
    output, screen = Output(quiet=False, as_json=False), io.StringIO()
    monkeypatch.setattr(output, "say", said.append)
    epochs = [Epoch(number, "metric", 0.16, 3e-4, 0.4, 0.5, 0.3, 0.81) for number in (1, 3, 5)]
    with output.progress(2, 10) as step:
        on_epoch = step("ours", 0)
        assert on_epoch is not None
        for epoch, clock[0] in zip(epochs, (1.0, 6.0, 10.0), strict=True):
            on_epoch(epoch)
    # 3 of 10 epochs of one of two models took 6 s, so the rest takes 34 s; the next line is not due after 4 s
    assert said == ["ours, epoch 3, validation score 0.8100; 6 s so far, 34 s left at most"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Output(quiet=True, as_json=False).progress(1, 10) as step:
        assert step("ours", 0) is None
    output.stderr = Console(file=screen, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with output.progress(2, 10, splits=2) as step:
        on_epoch = step("ours", 0)
        assert on_epoch is not None
        on_epoch(epochs[1])
    assert "ours, split 1 of 2, epoch 3, validation score 0.8100" in screen.getvalue()


def test_progress_of_a_blend_is_its_own_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    from evalign.cli.console import Listener
    from evalign.training.loop import Epoch

    clock, said = [0.0], []
    monkeypatch.setattr("evalign.cli.console.time.monotonic", lambda: clock[0])
    output = Output(quiet=False, as_json=False)
    monkeypatch.setattr(output, "say", said.append)
    epoch = Epoch(1, "trees", 0.0, 0.0, np.nan, np.nan, np.nan, np.nan)  # of a member, one of a thousand or so
    with output.progress(3, 1000) as step:
        on_epoch = step("ours (blend)", 0)
        assert isinstance(on_epoch, Listener)
        on_epoch.expect(40.0)
        for clock[0] in (6.0, 30.0, 50.0):
            on_epoch(epoch)
    assert said == [
        "ours (blend); 6 s so far, about 34 s left for this model",
        "ours (blend); 30 s so far, about 10 s left for this model",
        "ours (blend); 50 s so far",
    ]


def test_progress_of_boosted_trees_is_up_to_their_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    from evalign.cli.console import Listener
    from evalign.training.loop import Epoch

    clock, said = [0.0], []
    monkeypatch.setattr("evalign.cli.console.time.monotonic", lambda: clock[0])
    output = Output(quiet=False, as_json=False)
    monkeypatch.setattr(output, "say", said.append)
    with output.progress(3, 1000) as step:
        on_round = step("trees", 0)
        assert isinstance(on_round, Listener)
        on_round.patience = 30
        for number, best, clock[0] in ((40, True, 8.0), (60, False, 14.0)):
            on_round(Epoch(number, "metric", 0.2, 0.1, 0.4, 0.5, 0.3, 0.81, best))
    # Round 40 was the best, so growing ends after round 70, a tenth of what 1000 rounds would take.
    assert said == [
        "trees, round 40, validation score 0.8100; 8 s so far, 6 s left for this model unless it improves",
        "trees, round 60, validation score 0.8100; 14 s so far, 2 s left for this model unless it improves",
    ]


def test_a_blend_tells_its_estimate_before_the_first_epoch() -> None:
    from evalign import EASTBlend
    from evalign.training.loop import Epoch

    class Told(list[float]):
        def expect(self, seconds: float) -> None:
            self.append(seconds)

        def __call__(self, epoch: Epoch) -> None:
            assert len(self) == 1  # before the first epoch

    frame, told = animals(120, 0), [Told(), Told()]
    for limit, one in zip((None, 0.01), told, strict=True):
        model = EASTBlend(members=["linear", "forest"], forest={"trees": 10}, time_limit=limit, random_state=0)
        model.fit(frame.drop(columns="kind"), frame["kind"], on_epoch=one)
    assert 0 < told[0][0] < 5
    assert told[1] == [0.01]


def test_bench_times_both_losses_in_one_run(call: Call):
    done = call("bench", "--size", "64x5", "--rounds", 3, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)["sizes"]
    assert (row["rows"], row["classes"]) == (64, 5)
    assert row["ratio"] > 0
    assert row["control"] > 0
    wrong = {
        ("--size", "64"): "ROWSxCLASSES",
        ("--metric", "luck"): "metric must be",
        ("--device", "foo"): "--device must",
    }
    for arguments, message in wrong.items():
        assert_wrong(call("bench", *arguments), message)


@pytest.mark.slow
def test_progress_of_compare_counts_the_rounds_of_boosted_trees(
    folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard: list[tuple[str, int | None, int]] = []

    class Heard(console.Listener):
        def __call__(self, epoch: Any) -> None:
            heard.append((self.name, self.patience, self.epochs))

    monkeypatch.setattr(console, "Listener", Heard)
    words = ["compare", folder / "train.csv", "--target", "kind", "--out", tmp_path / "run"]
    fast = ["--model", "network", "--epochs", "3", "--hidden", "4", "--splits", "2", "--folds", "1", "--device", "cpu"]
    assert call(*words, *fast).code == 0
    assert ("ours (boosted trees, anchored), split 1 of 2", 30, 3) in heard
    assert ("ours (anchored), split 2 of 2", None, 3) in heard
