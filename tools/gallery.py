"""Run the gallery's pages and write their figures: `python tools/gallery.py [PAGE ...]`."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

GALLERY = Path(__file__).parent.parent / "docs" / "gallery"


def run_page(page: Path) -> Path:
    """Run a page's code in the current folder; return the figure it saves there."""
    names: dict[str, object] = {"__name__": page.stem}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    return Path(f"{page.stem}.svg")


def pages() -> list[Path]:
    return sorted(page for page in GALLERY.glob("*.md") if page.stem != "index")


def main() -> None:
    chosen = [GALLERY / f"{name}.md" for name in sys.argv[1:]] or pages()
    for page in chosen:
        print(f"--- {page.stem}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            shutil.copy(run_page(page), GALLERY / "images" / f"{page.stem}.svg")
            os.chdir(GALLERY)


if __name__ == "__main__":
    main()
