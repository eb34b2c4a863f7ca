"""docs/guides/bad_inputs.md has the messages of the command."""

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "bad_inputs_page.py"


def test_the_page_is_current():
    spec = importlib.util.spec_from_file_location("bad_inputs_page", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text() == tool.page(), f"run python {TOOL}"
