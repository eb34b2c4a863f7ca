"""`evalign reproduce` end to end: a tiny table, killed at random, on Ray, and wrong input."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import joblib
import pytest
import sklearn.datasets
import typer

from evalign_papers.commands.reproduce import command, state
from evalign_papers.engine.cells import Cell, at_printed_budget, cells_of, held
from evalign_papers.engine.config import Grid, read_config, to_json
from evalign_papers.engine.printed import find_papers, load_table
from evalign_papers.engine.reports import Report, load_report, report_path
from evalign_papers.engine.run_cell import run
from evalign_papers.engine.scheduler import pieces_of, run_cells, run_trial

PAPERS = find_papers()
DATA = ("cocktailparty", "mammography")
ROWS = {"f1": "f1-linear-b1024", "bce": "bce-b1024"}


@pytest.fixture
def tiny(tmp_path) -> Path:
    """Two losses and a linear model on generated data: three trials of three epochs."""
    folder = tmp_path / "papers/btg/tiny"
    for protocol in ("honest", "paper"):
        (folder / protocol).mkdir(parents=True)
        for cell, source in ROWS.items():
            config = read_config(PAPERS / f"btg/s5/{protocol}/synthetic_5.{source}.json")
            assert config.training is not None
            stages = tuple(replace(stage, epochs=3) for stage in config.training.stages)
            config = replace(
                config, cell=f"btg/tiny/{protocol}/synthetic_5.{cell}", trials=3,
                training=replace(config.training, stages=stages),
            )  # fmt: skip
            (folder / protocol / f"synthetic_5.{cell}.json").write_text(to_json(config))
            linear = replace(
                config, cell=f"btg/tiny/{protocol}/synthetic_5.ccs", network=None, training=None, quirks=(),
                method=replace(config.method, name="ccs", options={}),
            )  # fmt: skip
            (folder / protocol / "synthetic_5.ccs.json").write_text(to_json(linear))
    printed = {"synthetic_5": {"f1": [0.5, 0.06], "accuracy": [0.95, 0.01]}}
    table = {
        "name": "btg-tiny", "title": "A tiny table", "source": "made up for a test", "note": "",
        "decision": {"paper": "paper", "honest": "argmax"}, "decimals": [2, 2],
        "metrics": {"f1": "F1", "accuracy": "Accuracy"}, "datasets": ["synthetic_5"],
        "rows": [{"label": cell, "cell": cell, "printed": printed} for cell in (*ROWS, "ccs")],
    }  # fmt: skip
    (folder / "table.json").write_text(json.dumps(table))
    return tmp_path / "papers"


def results(papers: Path) -> dict[str, object]:
    """Everything of every report but when and how long."""
    found = {}
    for path in sorted(papers.rglob("*.report.json")):
        report = load_report(path)
        trials = [(t.trial, t.seed, t.chosen, t.epochs, t.scores) for t in report.trials]
        found[path.name + path.parent.name] = (report.config, trials, report.complete)
    return found


def evalign(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "evalign", *arguments], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.slow
def test_a_tiny_table_from_the_command_line(tiny, tmp_path):
    page = tmp_path / "page.html"
    done = evalign("reproduce", "btg-tiny", "--papers", str(tiny), "--jobs", "1", "--report", "--out", str(page))
    assert done.returncode == 0, done.stderr
    assert "A tiny table" in done.stdout
    assert "0.50 ± 0.06" in done.stdout
    assert "A tiny table" in page.read_text()
    refused = evalign("reproduce", "--papers", str(tiny), "--report", "--out", str(page))
    assert (refused.returncode, "pass --force to overwrite it" in refused.stderr) == (2, True)
    assert len(results(tiny)) == 6
    before = {path: path.stat().st_mtime_ns for path in tiny.rglob("*.report.json")}
    again = evalign("reproduce", "btg-tiny", "--papers", str(tiny), "--json")
    assert json.loads(again.stdout)["tables"][0]["state"] == "complete"
    assert {path: path.stat().st_mtime_ns for path in tiny.rglob("*.report.json")} == before
    listed = evalign("reproduce", "--list", "--papers", str(tiny))
    assert "6/6" in listed.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["btg-99"], "no table is called 'btg-99'"),
        ([], "expected a table"),
        (["btg-tiny", "--dataset", "mnist"], "dataset must be"),
        (["btg-tiny", "--row", "luck"], "row must be"),
        (["btg-tiny", "--engine", "slurm"], "engine must be"),
        (["btg-tiny", "--protocol", "kind"], "protocol must be"),
        (["btg-tiny", "--budget", "huge"], "budget must be"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tiny, arguments, message):
    done = evalign("reproduce", *arguments, "--papers", str(tiny))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_data_set_is_looked_for_once_and_said_once(tmp_path, monkeypatch, capsys):
    attempts = []

    def offline(*_, **__):
        attempts.append(1)
        raise URLError("Name or service not known")

    monkeypatch.setattr("pooch.retrieve", offline)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", offline)
    monkeypatch.delenv("EVALIGN_DATA", raising=False)
    folder = tmp_path / "papers/btg/1"
    for name in ("table.json", *(f"honest/{data}.{cell}.json" for data in DATA for cell in ("f1", "bce"))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PAPERS / "btg/1" / name, folder / name)
    with pytest.raises(typer.Exit) as left:
        command(["btg-1"], papers=tmp_path / "papers", jobs=1, quiet=True)
    assert left.value.exit_code == 2
    assert len(attempts) == 1  # by OpenML for Mammography; CocktailParty has no address
    said = capsys.readouterr().err.splitlines()
    cells = [f"btg/1/honest/{data}.f1 and 1 more were not run" for data in DATA]
    assert [line.split(": ")[1] for line in said] == cells
    assert "needs mammography.parquet" in said[1]
    assert not list(tmp_path.rglob("*.report.json"))


def test_an_interrupted_run_says_where_its_trials_are(tiny, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("evalign_papers.engine.scheduler.run_cells", interrupted)
    with pytest.raises(SystemExit) as left:
        command(["btg-tiny"], papers=tiny, jobs=1)
    assert left.value.code == 130
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"6 of 6 cells to run, 1 at once on cpu; reports go to {tiny}"
    assert last == f"evalign: interrupted; finished trials are kept in {tiny}, the same command runs the rest"


def test_a_data_folder_that_is_not_there_is_refused_before_anything_runs(tiny, capsys):
    with pytest.raises(ValueError, match="--data-dir must name a folder"):
        command(["btg-tiny"], papers=tiny, data_dir=tiny / "nowhere")
    assert "to run" not in capsys.readouterr().err


@pytest.mark.slow
def test_killed_at_twenty_moments_the_reports_are_those_of_an_undisturbed_run(tiny, tmp_path):
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(tiny, undisturbed)
    table = load_table(tiny, "btg-tiny")
    started = time.perf_counter()
    assert all(done.error is None for done in run_cells(cells_of(undisturbed, table)))
    took = time.perf_counter() - started
    dice = random.Random(0)
    interrupted = 0
    for _ in range(20):
        child = os.fork()
        if child == 0:  # a runner that dies without a word
            for _done in run_cells(cells_of(tiny, table)):
                pass
            os._exit(0)
        time.sleep(dice.random() * took / 5)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        interrupted += os.WIFSIGNALED(status)
        for path in tiny.rglob("*.report.json"):
            load_report(path)  # whole at every moment
    assert interrupted >= 5
    assert all(done.error is None for done in run_cells(cells_of(tiny, table)))
    assert results(tiny) == results(undisturbed)
    assert len(results(tiny)) == 6


@pytest.mark.slow
def test_fewer_trials_now_and_the_rest_later_are_the_same(tiny, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(tiny, whole)
    table = load_table(tiny, "btg-tiny")
    list(run_cells(cells_of(whole, table)))
    list(run_cells(cells_of(tiny, table), trials=1))
    assert {len(trials) for _, trials, _ in results(tiny).values()} == {1}
    list(run_cells(cells_of(tiny, table)))
    assert results(tiny) == results(whole)


@pytest.mark.slow
def test_trials_that_are_not_stacked_are_run_side_by_side(tiny, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(tiny, whole)
    table = load_table(tiny, "btg-tiny")
    list(run_cells(cells_of(whole, table)))
    cells = cells_of(tiny, table)
    pieces = pieces_of(cells)
    split = {cell.name for cell in cells if cell.row == "ccs"}
    assert split
    for cell in cells:
        trials = [piece.trial for piece in pieces if piece.cell == cell]
        assert trials == (list(range(cell.config.trials)) if cell.name in split else [None])
    assert pieces[0].trial is not None  # what takes long comes first
    done = list(run_cells(cells, jobs=2))
    assert sorted(one.cell for one in done) == sorted(cell.name for cell in cells)
    assert {(one.trials, one.error) for one in done} == {(cell.config.trials, None) for cell in cells}
    assert results(tiny) == results(whole)


@pytest.mark.slow
def test_single_trials_add_to_one_report_in_any_order(tiny):
    path = tiny / "btg/tiny/honest/synthetic_5.ccs.json"
    config = replace(Cell(path).config, trials=4)
    path.write_text(to_json(config))
    expected = run(config)
    with joblib.parallel_config("loky"):
        joblib.Parallel(n_jobs=2)(joblib.delayed(run_trial)(path, None, "cpu", trial) for trial in (3, 1, 0, 1, 2))
    report = load_report(report_path(path))
    assert [trial.trial for trial in report.trials] == [0, 1, 2, 3]
    assert [round(value, 6) for value in expected.values("argmax", "f1")] == report.values("argmax", "f1")
    (elsewhere,) = run(config, device="cuda", only=2).trials  # a GPU is not for these, and need not be there
    assert elsewhere.scores == expected.trials[2].scores
    assert run(config, device="cuda", only=2).environment["device"].endswith("cores")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.slow
def test_ray_and_processes_give_the_same_reports(tiny, tmp_path):
    ray = pytest.importorskip("ray")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tiny, elsewhere)
    table = load_table(tiny, "btg-tiny")
    assert all(done.error is None for done in run_cells(cells_of(tiny, table), jobs=2))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        assert all(done.error is None for done in run_cells(cells_of(elsewhere, table), jobs=2, engine="ray"))
    finally:
        ray.shutdown()
    assert results(elsewhere) == results(tiny)


@pytest.mark.slow
def test_a_cell_in_other_hands_is_left_alone(tiny):
    path = tiny / "btg/tiny/honest/synthetic_5.ccs.json"
    stacked = tiny / "btg/tiny/honest/synthetic_5.f1.json"
    trial_locks = [path.with_name(f"{path.name}.{trial}") for trial in range(3)]
    with contextlib.ExitStack() as locks:
        assert all(locks.enter_context(held(file)) for file in (stacked, *trial_locks))
        done = [*run_cells([Cell(path), Cell(stacked)]), *run_cells([Cell(path), Cell(stacked)], jobs=2)]
    assert [one.error for one in done] == 4 * ["another process is running it"]
    assert not report_path(path).exists()
    assert not report_path(stacked).exists()
    assert not list(tiny.rglob("*.lock"))


def test_the_printed_budget_is_a_config_of_its_own(tiny):
    cell = Cell(tiny / "btg/tiny/honest/synthetic_5.f1.json")
    assert at_printed_budget(cell) == cell  # none is planned
    released = cell.path.with_name("synthetic_5.f1@released.json")
    released.write_text(to_json(replace(cell.config, cell=f"{cell.config.cell}@released")))
    assert at_printed_budget(cell).path == released
    beside = cell.path.with_name("synthetic_5.f1@printed.json")
    beside.write_text(to_json(replace(cell.config, cell=f"{cell.config.cell}@printed")))
    assert at_printed_budget(cell).path == beside
    assert at_printed_budget(cell).row == "f1"
    assert [done.error for done in run_cells([cell])] == [None]
    table = load_table(tiny, "btg-tiny")
    assert [state(tiny, table, printed=printed)["complete"] for printed in (False, True)] == [1, 0]


def test_a_grid_that_was_interrupted_goes_on_with_the_next_batch_size(tiny):
    path = tiny / "btg/tiny/paper/synthetic_5.f1.json"
    grid = Grid((1e-3, 1e-2), (), (), (512, 2048), "loss", "once")
    config = replace(Cell(path).config, grid=grid, trials=2)
    whole = run(config)
    seen = []

    def stop_after_the_first(report):
        seen.append(len(report.grid))
        raise KeyboardInterrupt

    begun = Report(config)
    with pytest.raises(KeyboardInterrupt):
        run(config, report=begun, save=stop_after_the_first)
    assert seen == [2]
    assert {entry["point"]["batch_size"] for entry in begun.grid} == {2048}
    resumed = run(config, report=begun)
    assert resumed.grid == whole.grid
    assert resumed.values("paper", "f1") == whole.values("paper", "f1")


def test_trials_of_the_very_same_config_in_another_table_are_taken_over(tiny):
    cells = cells_of(tiny, load_table(tiny, "btg-tiny"), ["honest"])
    (first,) = (cell for cell in cells if cell.row == "ccs")
    assert [done.error for done in run_cells([first])] == [None]
    marked = json.loads(report_path(first.path).read_text())
    marked["trials"][0]["scores"]["argmax"]["f1"] = 0.123  # a figure that running would never give
    report_path(first.path).write_text(json.dumps(marked))

    def beside(name: str, seed: int = 0) -> Cell:
        path = tiny / f"btg/other/honest/synthetic_5.{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(replace(first.config, cell=f"btg/other/honest/synthetic_5.{name}", seed=seed)))
        return Cell(path)

    same, other_seed = beside("same"), beside("seeded", 7)
    assert [done.error for done in run_cells([same, other_seed])] == [None, None]
    taken, run_anew = same.report, other_seed.report
    assert taken is not None
    assert run_anew is not None
    assert taken.values("argmax", "f1")[0] == 0.123
    assert taken.environment["trials_of"] == first.name
    assert run_anew.values("argmax", "f1")[0] != 0.123
    assert "trials_of" not in run_anew.environment
