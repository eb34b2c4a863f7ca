"""Links, file names and API entries of the documents exist; docstrings and results become pages. No network."""

import csv
import doctest
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)")  # an address with a scheme is no file
FENCE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def links_of(text):
    """Relative links as (path, anchor), those in code left out."""
    return [(path, anchor) for path, anchor in LINK.findall(FENCE.sub("", text))]


def anchors_of(text):
    """What headings can be linked by, as Python-Markdown and GitHub name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def test_links_are_found_in_prose_only():
    assert links_of("[a](b.md#c) ![d](e.png) [f](https://g) `[h](i)`\n```\n[j](k)\n```") == [
        ("b.md", "c"),
        ("e.png", ""),
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_links_to_is_there(document):
    text = document.read_text()
    for path, anchor in links_of(text):
        linked = document.parent / path if path else document
        assert linked.exists(), f"{document.relative_to(ROOT)} links to {path}, which is not there"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors_of(linked.read_text()), f"{path} has no heading for #{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_are_there(document):
    for named in re.findall(
        r"\b(?:benchmarks|docs|examples|papers|src|tests|tools)/[\w./-]+\.\w+", document.read_text()
    ):
        assert (ROOT / named).exists(), f"{document.relative_to(ROOT)} names {named}, which is not there"


def test_pages_of_the_api_name_what_can_be_imported():
    named = re.findall(
        r"^::: (\S+)$", "\n".join(p.read_text() for p in (ROOT / "docs" / "api").glob("*.md")), re.MULTILINE
    )
    assert len(named) > 20
    for name in named:
        module, _, member = name.rpartition(".")
        file = ROOT / "src" / Path(*name.split("."))
        if not (file.with_suffix(".py").exists() or (file / "__init__.py").exists()):
            source = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text()
            assert re.search(rf"^(?:def|class) {member}\b", source, re.MULTILINE), name


PACKAGES = ("", ".decision")  # the others export nothing: each name is imported from its module


@pytest.mark.parametrize("package", PACKAGES, ids=lambda name: f"evalign{name}")
def test_every_public_name_has_an_entry_in_the_api(package):
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    entries = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    module = importlib.import_module(f"evalign{package}")
    for name in getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]:
        found = getattr(module, name)
        if inspect.ismodule(found):
            inside = {found.__name__, *(f"evalign.{name}.{part}" for part in vars(found))}
            assert inside & entries, name
        elif callable(found):
            assert {found.__module__, f"{found.__module__}.{found.__qualname__}"} & entries, name


def test_the_navigation_names_pages_that_are_there():
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert all((ROOT / "docs" / page).exists() for page in listed)
    assert "index.md" in listed


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_become_markdown(monkeypatch):
    module = tool("docstring_markdown")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    results = doctest.testmod(module)
    assert results.attempted == 1
    assert results.failed == 0
    assert module.as_markdown("`a * b` < c") == "`a * b` &lt; c"
    assert module.as_markdown("Sum.\n\n>>> 1 + 1 * 2\n3\n\nMore.") == (
        "Sum.\n\n```pycon\n>>> 1 + 1 * 2\n3\n```\n\nMore."
    )


def test_results_become_tables(tmp_path):
    module = tool("benchmark_page")
    assert module.MARK in (ROOT / "docs" / module.PAGE).read_text()
    path = tmp_path / "bench_loss_small.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["loss", "ms"], ["a|b", "1.5"]])
    page = module.section(path)
    assert "`python benchmarks/bench_loss.py`, 1 rows: [bench_loss_small.csv](results/bench_loss_small.csv)" in page
    assert page.splitlines()[4:7] == ["| loss | ms |", "|---|---|", "| a\\|b | 1.5 |"]
    shown = module.on_page_markdown(f"x\n{module.MARK}\ny", page=None)
    assert all(f"## {file.stem}\n" in shown for file in (ROOT / "benchmarks" / "results").glob("*.csv"))
