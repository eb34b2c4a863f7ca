"""Nothing is overwritten, lost or half-written; errors are reported in one sentence before training."""

import errno
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.table import Table as RichTable

from commands import FAST, Said, animals, assert_refused, call, command
from evalign.cli.console import Output
from evalign.storage import atomic


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safety")
    animals().to_csv(path / "train.csv", index=False)
    animals(60, 1).to_csv(path / "new.csv", index=False)
    said = call("fit", path / "train.csv", "-t", "kind", "-o", path / "run", "-q", *FAST)
    assert said == (0, "", "")  # --quiet prints nothing but errors
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- overwriting ------------------------------------------------------------------------------------------------------


def test_predict_refuses_to_overwrite_its_input(folder: Path) -> None:
    before = content(folder)
    new = folder / "new.csv"
    for force in ([], ["--force"]):
        assert_refused(call("predict", folder / "run", new, "--out", new, *force), "is an input of this command")
    (folder / "link.csv").symlink_to(new)
    assert_refused(
        call("predict", folder / "run", new, "--out", folder / "link.csv", "--force"), "an input of this command"
    )
    (folder / "link.csv").unlink()
    assert content(folder) == before


def test_predict_overwrites_with_force_only(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    out.write_text("years of work")
    assert_refused(call("predict", folder / "run", folder / "new.csv", "--out", out), "--force")
    assert out.read_text() == "years of work"
    assert call("predict", folder / "run", folder / "new.csv", "--out", out, "--force").code == 0
    assert len(pd.read_csv(out)) == 60


@pytest.mark.parametrize("name", ["fit", "compare"])
def test_a_run_is_overwritten_with_force_only(folder: Path, name: str) -> None:
    before = content(folder / "run")
    said = call(name, folder / "train.csv", "-t", "kind", "-o", folder / "run")
    assert_refused(said, "holds an earlier run; choose another folder, or pass --force to overwrite it")
    assert content(folder / "run") == before


def test_force_replaces_a_run_as_a_whole(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call("fit", folder / "train.csv", "-t", "kind", "-o", out, *FAST, "--seed", 1, "-q").code == 0
    before = content(out)
    assert call("fit", folder / "train.csv", "-t", "kind", "-o", out, *FAST, "--seed", 2, "-q", "--force").code == 0
    after = content(out)
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in after)


# -- --out is checked first, failures leave nothing -------------------------------------------------------------------


def test_out_is_checked_before_training(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalign.comparison.run.evaluate", lambda *arguments, **options: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/evalign/run")):
        assert_refused(call("fit", folder / "train.csv", "-t", "kind", "-o", out, *FAST))
    monkeypatch.setattr("evalign.cli.predict.load_model", lambda *arguments: pytest.fail("loaded"))
    for out in (tmp_path / "file" / "p.csv", Path("/proc/p.csv"), tmp_path / "p.docx", tmp_path):
        assert_refused(call("predict", folder / "run", folder / "new.csv", "-o", out))


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_leaves_nothing_and_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def failing(handle: int) -> None:
        if (calls := next(count)) > 0:  # the first write is the check before training
            raise OSError(reason, os.strerror(reason))
        assert calls == 0

    for name, arguments in {
        "run": ["fit", folder / "train.csv", "-t", "kind", *FAST],
        "p.csv": ["predict", folder / "run", folder / "new.csv"],
        "p.parquet": ["predict", folder / "run", folder / "new.csv"],
    }.items():
        count = iter(range(99))
        monkeypatch.setattr(atomic.os, "fsync", failing)
        said = call(*arguments, "-q", "--out", tmp_path / name)
        monkeypatch.undo()
        assert_refused(said, f"{tmp_path / name} cannot be written ({os.strerror(reason)})")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
@pytest.mark.slow
def test_a_full_disk(folder: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        said = call("fit", folder / "train.csv", "-t", "kind", "-q", "--out", disk / "run", *FAST, "--hidden", "256")
        assert_refused(said, f"{disk / 'run'} cannot be written (No space left on device)")
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        said = call("fit", folder / "train.csv", "-t", "kind", "-q", "--out", disk / "run", *FAST)
        assert_refused(said, "Read-only file system")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_error_after_training_leaves_no_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("no page")

    monkeypatch.setattr("evalign.report.page.render", fail)
    assert call("fit", folder / "train.csv", "-t", "kind", "-q", "-o", tmp_path / "a" / "run", *FAST).code != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fit", "predict"])
def test_a_kill_at_any_moment_leaves_whole_files(folder: Path, tmp_path: Path, name: str) -> None:
    """Ten moments each of fit and predict: every file that has its final name is whole."""
    out = tmp_path / ("run" if name == "fit" else "p.csv")
    arguments = {
        "fit": ["fit", folder / "train.csv", "-t", "kind", "-o", out, "--force", *FAST],
        "predict": ["predict", folder / "run", folder / "new.csv", "-o", out, "--force"],
    }[name]
    words = [sys.executable, "-m", "evalign", *map(str, arguments)]
    started = time.monotonic()
    assert subprocess.run(words, capture_output=True, check=True).returncode == 0
    whole, seconds = content(tmp_path), time.monotonic() - started
    for share in np.random.default_rng(0).uniform(0.3, 1.05, 10):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(share * seconds)
        process.kill()
        process.wait()
        found = {name: data for name, data in content(tmp_path).items() if "/." not in f"/{name}"}
        assert found.keys() <= whole.keys()
        if name == "predict":
            assert found == whole  # the same predictions every time
        elif "run/result.json" in found:
            json.loads(found["run/result.json"])
            assert call("predict", out, folder / "new.csv", "-q").code == 0
    assert call(*arguments, "-q").code == 0  # and the next run is none the worse
    assert not list(tmp_path.rglob(".writing-*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_named(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "evalign", "predict", folder / "run", folder / "new.csv"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    said = Said(done.returncode, "", done.stderr)
    assert_refused(said, "standard output cannot be written (No space left on device); redirect it elsewhere")


def test_a_path_that_no_file_can_have_is_named(folder: Path, tmp_path: Path) -> None:
    name = "x" * 300 + ".csv"
    for words in (["fit", tmp_path / name, "-t", "kind", "-o", tmp_path / "run"], ["predict", folder / "run", name]):
        assert_refused(call(*words), f"{name} cannot be used (File name too long); check the path")


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS])
def test_advice_fits_what_a_disk_failed_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    def fail(handle: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(atomic.os, "fsync", fail)
    advice = "; free some space, or choose another place" if reason == errno.ENOSPC else "; choose another place"
    with pytest.raises(OSError, match=rf"a.txt cannot be written \({os.strerror(reason)}\){advice}$"):
        atomic.write_atomically(tmp_path / "a.txt", "content")
    with (
        pytest.raises(OSError, match=rf"run cannot be written \({os.strerror(reason)}\){advice}$"),
        atomic.staged_folder(tmp_path / "run", last="a.txt") as stage,
    ):
        atomic.write_atomically(stage / "a.txt", "content")


def test_ctrl_c_while_the_command_is_being_imported() -> None:
    """Ctrl-C in the first tenths of a second says the same as later."""
    code = (
        "import builtins, evalign.__main__ as command\nreal = builtins.__import__\n"
        "def stopped(name, *rest, **more):\n    if name == 'evalign.cli.app': raise KeyboardInterrupt\n"
        "    return real(name, *rest, **more)\nbuiltins.__import__ = stopped\ncommand.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "evalign: interrupted; nothing was written\n")


def test_names_that_our_font_lacks_cause_no_warning(tmp_path: Path) -> None:
    frame = animals().replace({"kind": {"cat": "日本", "dog": "中国"}})
    frame.to_csv(tmp_path / "train.csv", index=False)
    said = command("fit", tmp_path / "train.csv", "-t", "kind", "-o", tmp_path / "run", "-q", *FAST)
    assert said == (0, "", "")


# -- files of the user ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("name", ["payments.csv", "new_payments.csv", "model.safetensors.bak", "checkpoint-1.pt"])
def test_demo_leaves_the_files_of_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, force: list[str]
) -> None:
    monkeypatch.setattr("evalign.cli.compare.run", lambda *arguments, **options: pytest.fail("trained"))
    (tmp_path / name).write_text("years of work")
    assert_refused(call("demo", "--out", tmp_path, *force), f"{tmp_path}")
    assert content(tmp_path) == {name: b"years of work"}


def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        assert (tmp_path / "a" / "demo" / "payments.csv").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("evalign.cli.compare.run", interrupted)
    assert call("demo", "-o", tmp_path / "a" / "demo", "-q") == (130, "", "evalign: interrupted; nothing was written\n")
    assert list(tmp_path.iterdir()) == []


def test_a_demo_takes_the_tables_that_an_earlier_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalign.cli.compare.run", lambda *arguments, **options: None)
    assert call("demo", "--out", tmp_path).code == 0
    assert call("demo", "--out", tmp_path).code == 0  # as if it had been killed
    monkeypatch.setattr("evalign.cli.compare.run", lambda *arguments, **options: 1 / 0)
    assert call("demo", "--out", tmp_path).code == 1
    assert sorted(content(tmp_path)) == ["new_payments.csv", "payments.csv"]


def test_a_stream_leaves_checkpoints_of_the_user_alone(folder: Path, tmp_path: Path) -> None:
    pd.read_csv(folder / "train.csv").to_parquet(tmp_path / "train.parquet")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-best.pt").write_text("years of work")
    fit = ["fit", tmp_path / "train.parquet", "--stream", "-t", "kind", "-o", tmp_path / "run", "--epochs", "1"]
    assert_refused(call(*fit, "--force"), "also holds 'checkpoint-best.pt'")
    assert content(tmp_path / "run") == {"checkpoint-best.pt": b"years of work"}


def test_predictions_do_not_go_among_the_files_to_read(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    pd.read_csv(folder / "new.csv").to_parquet(data / "new.parquet")
    (tmp_path / "link").symlink_to(data)
    before = content(data)
    for source in (data, tmp_path / "link"):
        for out in (data / "p.parquet", data / "more" / "p.csv", tmp_path / "link" / "p.parquet", data / "new.parquet"):
            said = call("predict", folder / "run", source, "--out", out, "--force")
            assert_refused(said, f"is inside the input folder {source}; choose another place")
    assert content(data) == before


def test_only_our_constraints_are_noted(folder: Path, tmp_path: Path) -> None:
    quick = ["--splits", "1", "--model", "network", "--epochs", "1", "--hidden", "4", "--folds", "1"]
    limits = ["--subject-to", "precision>=0.9999", "--subject-to", "recall>=0.9999"]
    said = call("compare", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *quick, *limits)
    assert 1 <= said.err.count("no decision meets") <= 3  # of our network, trees and blend


def test_compare_has_two_models(folder: Path, tmp_path: Path) -> None:
    said = call("compare", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", "--model", "boost")
    assert_refused(said, "--model must be one of blend, network, got 'boost'")


def test_compare_exits_with_3_if_a_constraint_is_not_met(folder: Path, tmp_path: Path) -> None:
    quick = ["--splits", "1", "--model", "network", "--epochs", "1", "--hidden", "4", "--folds", "1", "-q"]
    limits = ["--subject-to", "precision>=0.9999", "--subject-to", "recall>=0.9999"]
    said = call("compare", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *quick, *limits)
    assert said == (3, "", "")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["table"]


# -- options that contradict each other -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--test", "train.csv"], "is the training file"),
        (["--test", "copy.csv"], "is the training file"),
        (["--test", "new.csv", "--test-size", "0.3"], "give only one"),
        (["--model", "boost", "--ensemble", "3"], "--ensemble is an option of networks"),
        (["--model", "boost", "--hidden", "3"], "--hidden is an option of networks"),
        (["--seed", "99999999999999999999"], "--seed"),
        (["--seed", "-1"], "--seed"),
        (["--subject-to", "precision>=2"], "precision lies between 0 and 1"),
        (["--model", "network", "--time-limit", "5"], "--time-limit is an option of blends"),
        (["--drop", "kind"], "names the target"),
        (["--task", "regression"], "--task must be classification"),
        (["--decimal", ";"], "--decimal must be . or ,"),
        (["--encoding", "klingon"], "--encoding must name a text encoding"),
        (["--encoding", "utf-16"], "is UTF-8 text and cannot be read with another encoding"),
    ],
)
def test_contradictions_are_refused(folder: Path, tmp_path: Path, options: list[str], words: str) -> None:
    (folder / "copy.csv").write_bytes((folder / "train.csv").read_bytes())
    options = [str(folder / word) if word.endswith(".csv") else word for word in options]
    assert_refused(call("fit", folder / "train.csv", "-t", "kind", "-o", tmp_path / "run", *options), words)
    assert not (tmp_path / "run").exists()


# -- speed ------------------------------------------------------------------------------------------------------------


def test_a_wrong_file_is_refused_before_torch_is_imported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    code = (
        "import sys\nfrom evalign.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stopped:\n"
        "    slow = {'torch', 'pandas', 'pyarrow', 'sklearn', 'scipy'} & set(sys.modules)\n"
        "    sys.exit(f'imported {slow}' if slow else stopped.code)"
    )
    for words, message in {
        ("fit", "empty.csv", "-t", "kind", "-o", "run"): "is empty",
        ("compare", "empty.csv", "-t", "kind", "-o", "run"): "is empty",
        ("predict", str(folder / "run"), "empty.csv"): "is empty",
        ("fit", str(folder / "train.csv"), "-t", "knid", "-o", "run"): "did you mean 'kind'?",
        ("fit", str(folder / "train.csv"), "-t", "kind", "-o", str(folder / "run")): "earlier run",
    }.items():
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 2, done.stderr
        assert message in done.stderr


@pytest.mark.slow
def test_an_empty_file_is_refused_within_a_second(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    arguments = ["fit", tmp_path / "empty.csv", "-t", "kind", "-o", tmp_path / "run"]
    assert_refused(command(*arguments), "is empty")
    before = os.times()
    command(*arguments)
    after = os.times()  # of the processor: the wall clock also counts whoever else is busy
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0


def test_a_failed_write_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, "fsync", fail)
    with pytest.raises(OSError, match=r"a\.txt cannot be written"):
        atomic.write_atomically(tmp_path / "new" / "folder" / "a.txt", "content")
    assert list(tmp_path.iterdir()) == []


def test_a_narrow_terminal_shows_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    table = RichTable(*(f"column number {i}" for i in range(5)))
    table.add_row(*(f"0.{i}2345678901" for i in range(5)))
    Output(quiet=False, as_json=False).show(table)
    assert "…" not in screen.getvalue()
    assert all(f"0.{i}2345678901" in screen.getvalue() for i in range(5))
