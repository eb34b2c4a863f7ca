"""mkdocs hook: the files of benchmarks/results as tables on the benchmarks page, and as downloads."""

import csv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = "research/benchmarks.md"
MARK = "<!-- results -->"
MOST_ROWS = 100  # longest table to show; longer files are only linked


def on_files(files: Any, config: Any) -> Any:
    """Add each file to the site, next to the benchmarks page."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.glob("*.csv")):
        files.append(File.generated(config, f"{Path(PAGE).parent}/results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown.replace(MARK, "\n".join(section(path) for path in sorted(RESULTS.glob("*.csv"))))


def section(path: Path) -> str:
    """Heading, the script that wrote the file, and its rows unless there are too many."""
    with path.open(newline="") as file:
        header, *rows = list(csv.reader(file))
    script = next((name for name in _scripts() if path.stem.startswith(name)), None)
    by = f"`python benchmarks/{script}.py`, " if script else ""
    lines = [f"## {path.stem}", "", f"{by}{len(rows)} rows: [{path.name}](results/{path.name})", ""]
    if len(rows) <= MOST_ROWS:
        lines += [_line(header), "|" + "---|" * len(header), *map(_line, rows), ""]
    else:
        lines += [f"Columns: {', '.join(header)}.", ""]
    return "\n".join(lines)


def _scripts() -> list[str]:
    """Names of scripts, longest first: bench_batches_value belongs to bench_batches."""
    return sorted((path.stem for path in (ROOT / "benchmarks").glob("*.py")), key=len, reverse=True)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
