"""Documents whose numbers are generated: prose by hand, with blocks between marks that are written from reports.

<!-- begin f1 -->
… written anew each time …
<!-- end f1 -->
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from evalign.storage.atomic import write_atomically

_BLOCK = re.compile(r"<!-- begin (?P<name>[\w-]+) -->\n.*?<!-- end (?P=name) -->", re.DOTALL)


def refreshed(text: str, blocks: Mapping[str, str]) -> str:
    """The document with every block replaced; a block that has no content, or no place, is an error.

    >>> refreshed("a\\n<!-- begin x -->\\nold\\n<!-- end x -->\\nb", {"x": "new"})
    'a\\n<!-- begin x -->\\n\\nnew\\n\\n<!-- end x -->\\nb'
    """
    places = [match["name"] for match in _BLOCK.finditer(text)]
    if sorted(places) != sorted(blocks):
        raise ValueError(
            f"the document must have the blocks {', '.join(sorted(blocks))}, once each, it has "
            f"{', '.join(sorted(places)) or 'none'}; add <!-- begin NAME --> and <!-- end NAME --> lines"
        )
    return _BLOCK.sub(lambda match: _framed(match["name"], blocks[match["name"]]), text)


def write_document(path: Path, blocks: Mapping[str, str], *, check: bool = False) -> bool:
    """Refresh a document in place, or only look (`check`); whether it was up to date."""
    old = path.read_text(encoding="utf-8")
    new = refreshed(old, blocks)
    if not check and new != old:
        write_atomically(path, new)
    return new == old


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [head, *rows]
    text = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
    return "\n".join([text[0], "|---" * len(head) + "|", *text[1:]])


def _framed(name: str, content: str) -> str:
    return f"<!-- begin {name} -->\n\n{content.strip()}\n\n<!-- end {name} -->"
