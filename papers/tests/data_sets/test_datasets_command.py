"""The command `evalign datasets`."""

import json

import pytest
from typer.testing import CliRunner

from evalign_papers import datasets
from evalign_papers.commands import datasets as command
from evalign_papers.datasets.folders import VARIABLE


def run(*arguments):
    import typer

    app = typer.Typer()
    app.command()(command.command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_lists_all_and_downloads_nothing(two_files, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(two_files))
    result = run()
    assert result.exit_code == 0, result.output
    for name in datasets.names():
        assert name in result.output
    assert str(two_files) in result.output


def test_the_command_in_json(two_files):
    result = run("--data-dir", str(two_files), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    rows = {row["name"]: row for row in answer["datasets"]}
    assert list(rows) == datasets.names()
    assert rows["yeast"]["present"]
    assert rows["yeast"]["files"] == [str(two_files / "yeast.parquet")]
    assert not rows["adult"]["present"]
    assert rows["synthetic_5"]["state"] == "generated"
    assert rows["creditcard"]["imbalance"] == pytest.approx(284315 / 492)
    assert rows["creditcard"]["equitability"] == pytest.approx(0.0183, abs=1e-4)
    assert rows["cifar10"]["equitability"] == pytest.approx(1.0)
    assert rows["caltech256"]["counts"] is None
    assert answer["places"] == [{"folder": str(two_files), "named_by": "--data-dir"}]


def test_the_command_checks_what_is_there(two_files):
    assert run("yeast", "--data-dir", str(two_files), "--check").exit_code == 0
    path = two_files / "letter.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    result = run("--data-dir", str(two_files), "--check")
    assert result.exit_code == 2
    assert "letter: " in result.output
    assert "it is truncated" in result.output
    answer = json.loads(run("--data-dir", str(two_files), "--check", "--json").output)
    states = {row["name"]: row["state"] for row in answer["datasets"]}
    assert (states["letter"], states["yeast"], states["adult"]) == ("damaged", "checked", "absent")
    assert states["synthetic_33"] == "checked"


def test_the_command_shows_a_card():
    result = run("adult")
    assert result.exit_code == 0
    for text in ("CC BY 4.0", "Kohavi", "adult.data and adult.test", ">50K 11687"):
        assert text in result.output
    assert isinstance(run("adlt").exception, ValueError)
