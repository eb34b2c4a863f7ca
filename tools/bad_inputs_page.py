"""Write docs/guides/bad_inputs.md: wrong files and options, with the message of `evalign` for each.

Usage: python tools/bad_inputs_page.py
"""

import contextlib
import gzip
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "bad_inputs.md"
INTRODUCTION = """# Error messages for bad input

Wrong input ends a command with one sentence on standard error and exit code 2, before anything is trained or written.
If a table is unusual but usable, a note says how it was read. `python tools/bad_inputs_page.py` generates this page
from the messages of the command, and a test checks that it is current.

From Python the same messages are raised as `ValueError` or `TypeError`. Data read in passes has a
[separate guide](streaming.md).

```python
from evalign import MetricLoss

loss = MetricLoss("f1")
try:
    loss.temperature = 0.5
except ValueError as error:
    assert str(error) == "temperature must lie in (0, 0.4], got 0.5"
```
"""
ROWS = 90
GOOD = "weight,colour,kind\n" + "".join(
    f"{i % 7 + 3 * (i % 2)},{'red' if i % 3 else 'blue'},{'dog' if i % 2 else 'cat'}\n" for i in range(ROWS)
)
AMOUNTS = "weight,kind\n" + "".join(f"{i % 7},{i / 10}\n" for i in range(ROWS))
FIT = "evalign fit {} --target kind --out run"

# What is wrong; the file's name and content; the command.
FILES: list[tuple[str, str, str | bytes, str]] = [
    ("An empty file", "data.csv", "", FIT),
    ("A header without rows", "data.csv", "weight,kind\n", FIT),
    ("A missing file", "other.csv", GOOD, FIT.format("oter.csv")),
    ("An unknown format", "data.pdf", "%PDF", FIT),
    ("A misspelt target", "data.csv", GOOD.replace("kind", "Kind"), FIT),
    ("Columns separated by spaces", "data.csv", GOOD.replace(",", " "), FIT),
    ("A duplicate column", "data.csv", GOOD.replace("colour", "weight"), FIT),
    ("A row that is too long", "data.csv", GOOD + "1,red,dog,5\n", FIT),
    ("An unclosed quote", "data.csv", GOOD + '1,"red,dog\n', FIT),
    ("Text that is not UTF-8", "data.csv", GOOD.replace("red", "grün").encode("cp1252"), FIT),
    ("A damaged gzip file", "data.csv.gz", gzip.compress(GOOD.encode())[:40], FIT),
    ("A damaged Parquet file", "data.parquet", b"PAR1 nonsense", FIT),
    ("A damaged workbook", "data.xlsx", b"PK nonsense", FIT),
    ("Nested JSON", "data.jsonl", '{"a": {"b": 1}, "kind": "cat"}\n{"a": {"b": 2}, "kind": "dog"}\n' * 9, FIT),
    ("Rows without a label", "data.csv", GOOD + "5,red,\n", FIT),
    ("One class", "data.csv", GOOD.replace("dog", "cat"), FIT),
    ("A class with one row", "data.csv", GOOD + "5,red,emu\n", FIT),
    ("Two rows per class", "data.csv", "weight,kind\n1,cat\n2,cat\n3,dog\n4,dog\n", FIT),
    ("A numeric target", "data.csv", AMOUNTS, FIT),
    ("Only the target", "data.csv", "kind\ncat\ndog\ncat\ndog\n", FIT),
    ("Features without any value", "data.csv", "weight,kind\n" + ",cat\n,dog\n" * 9, FIT),
    ("Infinity", "data.csv", GOOD + "inf,red,cat\n", FIT),
]
OPTIONS: list[tuple[str, str]] = [
    ("A misspelt metric", "evalign fit good.csv --target kind --out run --metric f2"),
    ("A ranking metric", "evalign fit good.csv --target kind --out run --metric auroc"),
    ("Beta without F-beta", "evalign fit good.csv --target kind --out run --beta 2"),
    ("A malformed constraint", "evalign fit good.csv --target kind --out run --subject-to 'recall>0.9'"),
    ("A constraint above 1", "evalign fit good.csv --target kind --out run --subject-to 'precision>=2'"),
    ("An unknown class", "evalign fit good.csv --target kind --out run --subject-to 'recall[cow]>=0.9'"),
    ("Testing on the training file", "evalign fit good.csv --target kind --out run --test good.csv"),
    ("Two test sets", "evalign fit good.csv --target kind --out run --test new.csv --test-size 0.3"),
    ("An option of another model", "evalign fit good.csv --target kind --out run --model boost --hidden 64"),
    ("An unknown encoding", "evalign fit good.csv --target kind --out run --encoding klingon"),
    ("Dropping the target", "evalign fit good.csv --target kind --out run --drop kind"),
    ("A folder with other files", "evalign fit good.csv --target kind --out thesis"),
    ("A file instead of a folder", "evalign fit good.csv --target kind --out good.csv"),
    ("A folder that cannot be created", "evalign fit good.csv --target kind --out good.csv/run"),
    ("Predictions over their input", "evalign predict thesis good.csv --out good.csv --force"),
    ("Predictions over a file", "evalign predict thesis good.csv --out new.csv"),
    ("Predictions in an unknown format", "evalign predict thesis good.csv --out p.docx"),
    ("Not a model", "evalign predict thesis good.csv"),
]
NUMBERS = ["1,5", "22,75", "3,0"], ["12,345", "1,222", "7"], ["12.3%", "4%", "5%"], ["$5", "$1,250.50", "$7"]
NOTES: list[tuple[str, list[str]]] = [
    ("Decimal commas", [f'"{NUMBERS[0][i % 3]}"' for i in range(ROWS)]),
    ("Thousands separators", [f'"{NUMBERS[1][i % 3]}"' for i in range(ROWS)]),
    ("Percentages", [NUMBERS[2][i % 3] for i in range(ROWS)]),
    ("Amounts of money", [f'"{NUMBERS[3][i % 3]}"' for i in range(ROWS)]),
    ("A unit", [f"{i % 7}.5 kg" for i in range(ROWS)]),
    ("Two currencies", ["$5" if i % 2 else "€6" for i in range(ROWS)]),
    ("Words for missing values", ["n/a?" if i % 10 == 0 else str(i % 7) for i in range(ROWS)]),
    ("Numbers with some text", ["broken" if i % 10 == 0 else str(i % 7) for i in range(ROWS)]),
    ("Dates", [f"{i % 28 + 1:02d}.{i % 12 + 1:02d}.2024" for i in range(ROWS)]),
    ("Dates with month names", [f"{i % 28 + 1} {['Feb', 'Aug'][i % 2]} 2024" for i in range(ROWS)]),
    ("Ambiguous dates", [f"{i % 9 + 1:02d}/{i % 12 + 1:02d}/2024" for i in range(ROWS)]),
    ("A column without values", [""] * ROWS),
    ("A constant", ["1"] * ROWS),
    ("A unique text in every row", [f"row {i}" for i in range(ROWS)]),
    ("A copy of the target", ["dog" if i % 2 else "cat" for i in range(ROWS)]),
    ("A column that determines the target", ["1" if i % 2 else "0" for i in range(ROWS)]),
]


def said(words: list[str]) -> tuple[int, list[str]]:
    """Exit code and lines on standard error of a command."""
    from evalign.cli.app import main

    errors, code = io.StringIO(), 0
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(words)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, errors.getvalue().splitlines()


def notes(column: list[str]) -> list[str]:
    """The notes on a table with this column among good ones."""
    from evalign.cli.run_files import InputFiles, load

    lines = GOOD.splitlines()
    rows = [f"{entry},{line}" for entry, line in zip(column, lines[1:], strict=True)]
    Path("noted.csv").write_text("\n".join([f"new,{lines[0]}", *rows]) + "\n")
    found: list[str] = []
    load(InputFiles(Path("noted.csv"), "kind"), found.append)
    return [note for note in found if "'new'" in note]


def row(what: str, input_: str, messages: list[str]) -> str:
    text = re.sub(r"damaged \(.*\);", "damaged (...);", " ".join(messages))
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return f"| {what} | {input_} | {text} |"


def page() -> str:
    """The page as Markdown."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            lines = [INTRODUCTION, "## Files", "", "| problem | command | message |", "|---|---|---|"]
            for what, name, content, command in FILES:
                Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
                command = command.format(name)
                lines.append(row(what, f"`{command}`", _refusal(command)))
                Path(name).unlink()
            lines += ["", "## Options", "", "| problem | command | message |", "|---|---|---|"]
            Path("good.csv").write_text(GOOD)
            Path("new.csv").write_text(GOOD.replace("red", "green"))
            Path("thesis").mkdir()
            Path("thesis/thesis.tex").write_text("years of work")
            lines += [row(what, f"`{command}`", _refusal(command)) for what, command in OPTIONS]
            lines += ["", "## Odd columns", "", "| column | entries | note |",
                      "|---|---|---|"]  # fmt: skip
            for what, column in NOTES:
                entries = ", ".join(f"`{entry.strip(chr(34))}`" for entry in list(dict.fromkeys(column))[:3])
                lines.append(row(what, entries, notes(column)))
        finally:
            os.chdir(before)
    return "\n".join(lines) + "\n"


def _refusal(command: str) -> list[str]:
    code, lines = said(shlex.split(command)[1:])
    if code != 2 or not lines:
        raise SystemExit(f"{command!r} ended with {code}: {lines}")
    if left := {path.name for path in Path().iterdir() if path.name in ("run", "p.docx")}:
        raise SystemExit(f"{command!r} left {left}")
    return [lines[-1].removeprefix("evalign: ")]


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE, file=sys.stderr)
