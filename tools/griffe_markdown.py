"""griffe extension: convert docstrings to Markdown for the site."""

from typing import Any

import griffe
from tools.docstring_markdown import as_markdown


class DocstringMarkdown(griffe.Extension):
    """The extension, loaded by mkdocstrings through mkdocs.yml."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
