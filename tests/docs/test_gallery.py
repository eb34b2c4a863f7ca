"""Each page of the gallery runs from top to bottom, draws its figure, and shows it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("gallery", ROOT / "tools" / "gallery.py")
gallery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)
PAGES = gallery.pages()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_and_draws_its_picture(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture = gallery.run_page(page)
    assert "<svg" in picture.read_text()


def test_every_page_is_listed_and_shows_its_picture():
    index = (gallery.GALLERY / "index.md").read_text()
    assert len(PAGES) == 8
    for page in PAGES:
        assert f"({page.name})" in index
        assert f"(images/{page.stem}.svg)" in page.read_text()
        assert (gallery.GALLERY / "images" / f"{page.stem}.svg").stat().st_size > 1000
