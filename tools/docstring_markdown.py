"""Docstrings as Markdown: examples become blocks of code, and a section such as `Parameters` becomes a list."""

import re

EXAMPLE = re.compile(r"(^>>> .*(?:\n(?!$).*)*)", re.MULTILINE)  # ends with an empty line, as a doctest does
SECTION = re.compile(r"^(\w+)\n-{3,}\n((?:.+\n?)*)", re.MULTILINE)
ENTRY = re.compile(r"^(\w[\w, ]*): ", re.MULTILINE)
CODE_OR_SIGN = re.compile(r"(`[^`]*`)|[<*]")


def as_markdown(text: str) -> str:
    """The text of a docstring, for Markdown.

    >>> as_markdown("Parameters\\n----------\\nbeta: b < 2 * c,\\n    above 0")
    '**Parameters**\\n\\n- `beta`: b &lt; 2 &#42; c,\\n    above 0'
    """
    parts = EXAMPLE.split(text)  # alternating prose and examples
    return "".join(f"```pycon\n{part}\n```" if i % 2 else _prose(part) for i, part in enumerate(parts))


def _prose(text: str) -> str:
    # In formulas, * is not emphasis and < does not open a tag.
    text = CODE_OR_SIGN.sub(lambda match: match[1] or {"<": "&lt;", "*": "&#42;"}[match[0]], text)
    return SECTION.sub(lambda match: f"**{match[1]}**\n\n" + ENTRY.sub(r"- `\1`: ", match[2]), text)
