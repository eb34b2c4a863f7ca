"""Random malformed tables and wrong options: exit code 0, 2 or 3, one line, no traceback, no file lost."""

import json
import random
import string
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import FAST, Said, animals, call
from evalign.cli.console import EXIT_INTERRUPTED

TABLES, OPTION_SETS = 1000, 300
QUICK = 40  # of each in the quick part of the suite
FRAME = animals(40)
BLEND = ["--preset", "quick", "--device", "cpu"]  # the default model


def check(said: Said, folder: Path, before: dict[str, bytes], out: Path) -> None:
    assert said.code in (0, 2, 3), said
    assert "Traceback" not in said.err
    assert "this is a bug" not in said.err
    if said.code == 2:
        assert said.err.count("evalign: ") == 1, said.err
        assert said.err.splitlines()[-1].startswith("evalign: "), said.err
    for name, data in before.items():
        assert (folder / name).read_bytes() == data, f"{name} was changed"
    left = {path.name for path in folder.iterdir()} - set(before)
    if out.name in left and out.is_dir():
        assert {path.name for path in out.iterdir()} >= {"result.json", "report.html"}
        json.loads((out / "result.json").read_text())
    assert left <= {out.name}, left
    assert said.code == 0 or not left or said.code == 3


# -- tables -----------------------------------------------------------------------------------------------------------

ENTRIES = [
    "", " ", "NA", "n/a?", "nan", "inf", "-inf", "1e309", "-0", "1,5", "1.234,5", "12,345", "$5", "5 €", "12.3%", "1e5",
    "0x1F", "true", "False", "2024-01-31", "31.12.2024", "01/02/2024", "12:30", "99999999999999999999", "é", "日本",
    "\u200b", "\x00", "\x1b[31m", "'", '"', '""', "a,b", "a;b", "a\tb", "a\nb", "=1+1", "[bold]x[/bold]", "{}", "[1,2]",
    "x" * 300, "001", "1_000", "-", "--", ".", "+", "NULL", "\ufeff", "<script>", "%s", "{0}", "\\", "/etc/passwd",
]  # fmt: skip


def malformed(draw: random.Random) -> tuple[str, bytes]:
    """A file name and content: a good table with a few things wrong."""
    lines = [list(map(str, FRAME.columns)), *[list(map(str, row)) for row in FRAME.to_numpy()]]
    for _ in range(draw.randrange(4)):
        kind = draw.randrange(9)
        column = draw.randrange(len(lines[0]))
        if kind == 0:  # one entry
            row = lines[draw.randrange(len(lines))]
            row[column % min(4, len(row))] = draw.choice(ENTRIES)
        elif kind == 1:  # a whole column of one or two odd entries
            odd = draw.sample(ENTRIES, 2)
            for row in lines[1:]:
                row[column % len(row)] = draw.choice(odd)
        elif kind == 2:  # one more column
            odd = draw.sample(ENTRIES, draw.randrange(1, 6))
            name = draw.choice(["", " ", "kind", "Kind", "new", "a=<missing>", "prediction", draw.choice(ENTRIES)])
            lines = [[*row, name if i == 0 else draw.choice(odd)] for i, row in enumerate(lines)]
        elif kind == 3:  # a ragged row
            row = lines[draw.randrange(len(lines))]
            row[:] = row[: draw.randrange(len(row) + 1)] or ["x"] * 9
        elif kind == 4:  # few rows
            lines = lines[: draw.randrange(len(lines) + 1)] or [[""]]
        elif kind == 5:  # rows twice, or in another order
            lines = [lines[0], *draw.choices(lines[1:] or [lines[0]], k=draw.randrange(1, 60))]
        elif kind == 6:  # labels
            for row in lines[1:]:
                row[3 % len(row)] = draw.choice(["0", "1", "0.5", "001", "", "cat", "1e3", "True"])
        elif kind == 7:  # no header
            lines = lines[1:] or [[""]]
        else:  # columns in another order, one lost
            order = draw.sample(range(len(lines[0])), max(1, len(lines[0]) - draw.randrange(2)))
            lines = [[row[j] for j in order if j < len(row)] for row in lines]
    delimiter = draw.choice([",", ",", ",", ";", "\t", "|", " "])
    quote = draw.random() < 0.3
    text = draw.choice(["\n", "\n", "\r\n", "\r"]).join(
        delimiter.join(f'"{entry}"' if quote or "," in entry else entry for entry in row) for row in lines
    )
    data = text.encode(draw.choice(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "cp1252"]), errors="replace")
    if draw.random() < 0.15:  # bytes
        data = bytearray(data)
        for _ in range(draw.randrange(1, 6)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        data = bytes(data[: draw.randrange(len(data) + 1)]) if draw.random() < 0.3 else bytes(data)
    suffix = draw.choice([".csv"] * 12 + [".tsv", ".txt", ".csv.gz", ".parquet", ".xlsx", ".jsonl", ".feather", ".pdf"])
    return f"table{suffix}", data


def call_untrained(*words: Any) -> Said:
    """`evalign fit` up to training, which takes most of the time."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evalign.cli.fit.train", stop)
        said = call("fit", *words)
    return said._replace(code=0) if said.code == EXIT_INTERRUPTED else said


def try_tables(numbers: range, folder: Path, *, trained_every: int) -> tuple[list[str], set[int]]:
    """Tables on which a promise was broken, and the exit codes of all."""
    codes, failures = set(), []
    for number in numbers:
        draw = random.Random(number)
        name, data = malformed(draw)
        for path in folder.iterdir():
            path.unlink() if path.is_file() else [*map(Path.unlink, path.iterdir()), path.rmdir()]
        (folder / name).write_bytes(data)
        words: list[Any] = [folder / name, "-t", draw.choice(["kind"] * 9 + ["weight"])]
        words += draw.choice([[], [], [], ["--decimal", ","], ["--na", "x"], ["--encoding", "cp1252"]])
        out = folder / "run"
        if number % trained_every:
            said = call_untrained(*words, "-o", out)
        else:
            model = FAST if number % (2 * trained_every) else BLEND
            said = call("fit", *words, "-o", out, *model, *draw.choice([[], ["--drop-unlabelled"], ["-q"], ["--json"]]))
        try:
            check(said, folder, {name: data}, out)
        except AssertionError as error:
            failures.append(f"table {number}, {name}: {error}\n{data[:2000]!r}")
        codes.add(said.code)
    return failures, codes


def test_malformed_tables(tmp_path: Path) -> None:
    failures, codes = try_tables(range(1, QUICK), tmp_path, trained_every=20)
    assert not failures, "\n".join(failures)
    assert {0, 2} <= codes  # both kinds were among them


@pytest.mark.slow
def test_a_thousand_malformed_tables(tmp_path: Path) -> None:
    failures, codes = try_tables(range(QUICK, TABLES), tmp_path, trained_every=10)
    assert not failures, "\n".join(failures)
    assert {0, 2} <= codes


# -- options ----------------------------------------------------------------------------------------------------------

VALUES = ["0", "1", "2", "0.5", "1.5", "nan", "inf", "1e99", "99999999999999999999", "", " ", "f1", "mcc", "x", "cat",
          "dog", "auto", "cpu", "cuda", "cuda:99", "macro", "binary", "cat=2", "cat=0", "=", "recall>=0.9", "recall>=2",
          "precision<=0", "recall[cat]>=0.5", "recall[cow]>=0.5", "recall", ">=", "tuned", "plug_in", "argmax", "paper",
          "anchored", "embedding", "boost", "4", "4,4", "4,,4", "weight", "kind", "utf-16", ",", ".", "classification",
          "no/where.csv", "table.csv", "new.csv", "/", "."]  # fmt: skip
NAMES = ["--metric", "--average", "--beta", "--positive", "--subject-to", "--test", "--test-size", "--drop", "--recipe",
         "--decision", "--seed", "--device", "--decimal", "--na", "--encoding", "--task", "--network", "--ensemble",
         "--folds", "--hidden", "--target", "--out", "--preset", "--time-limit", "--confidence", "--epochs",
         "--model"]  # fmt: skip
GOALS = ["--costs", "--costs", "--target", "--subject-to", "--positive", "--metric", "--decision", "--drop"]
COSTS = ["fn=1,fp=2", "fn=1", "fn=weight", "fn=weight,fp=1,reject=0.5", "fp=colour", "cat:dog=3", "cat:cow=1",
         "cat:dog=", "fn=-1", "fn=nan", "fn=1e999", "reject=weight", "tp=x", "fn=1,fn=2", "=1", ",", "", "weight",
         "costs.csv", "table.csv", "weight,height", "kind,colour", "kind,kind", '"kind"', "kind,", "recall>=0.9", "dog",
         "cost", "auto"]  # fmt: skip
FLAGS = ["--force", "--quiet", "--json", "--stream", "--drop-unlabelled", "--bogus"]


def try_options(
    numbers: range, folder: Path, names: Sequence[str] = NAMES, values: Sequence[str] = VALUES
) -> list[str]:
    """Option sets on which a promise was broken."""
    failures = []
    table, new = FRAME.to_csv(index=False).encode(), animals(20, 5).to_csv(index=False).encode()
    for number in numbers:
        draw = random.Random(number)
        for path in folder.iterdir():
            path.unlink() if path.is_file() else [*map(Path.unlink, path.iterdir()), path.rmdir()]
        (folder / "table.csv").write_bytes(table)
        (folder / "new.csv").write_bytes(new)
        out = folder / "run"
        run = draw.choice([partial(call, "fit")] * 4 + [call_untrained])
        words: list[Any] = [folder / "table.csv", "-t", "kind", "-o", out, *(FAST if number % 4 else BLEND)]
        for _ in range(draw.randrange(1, 4)):
            value = draw.choice([*values, "".join(draw.choices(string.printable, k=3))])
            value = str(folder / value) if value.endswith(".csv") else value
            name = draw.choice(names)
            if name == "--out":  # somewhere in this folder
                value = str(folder / draw.choice(["run", "table.csv", "new.csv/run"]))
            words += [name, value] if draw.random() < 0.85 else [draw.choice(FLAGS)]
        said = run(*words)
        try:
            check(said, folder, {"table.csv": table, "new.csv": new}, out)
        except AssertionError as error:
            failures.append(f"options {number}, {words}: {error}")
    return failures


def test_wrong_option_sets(tmp_path: Path) -> None:
    failures = try_options(range(QUICK), tmp_path)
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_many_wrong_option_sets(tmp_path: Path) -> None:
    failures = try_options(range(QUICK, OPTION_SETS), tmp_path)
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_wrong_costs_and_targets(tmp_path: Path) -> None:
    failures = try_options(range(QUICK), tmp_path, GOALS, COSTS)
    assert not failures, "\n".join(failures)
