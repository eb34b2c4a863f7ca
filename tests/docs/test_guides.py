"""The Python of the guides runs, and their links exist."""

import re
from pathlib import Path

import pytest

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))


@pytest.mark.filterwarnings("ignore")  # of the libraries, about their own parts
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_python_of_the_guide_runs(guide):
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, guide.name, "exec"), names)
    assert names.keys() & {"loss", "callback", "options", "net", "model"}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_what_the_guide_names_is_there(guide):
    text, root = guide.read_text(), guide.parent.parent.parent
    links = re.findall(r"\]\(([^)#]+?)\)", text)
    named = re.findall(r"((?:examples|benchmarks)/[\w/]+\.(?:py|csv))", text)
    for path in [*(guide.parent / link for link in links), *(root / name for name in named)]:
        assert path.exists(), path
    assert links or named
