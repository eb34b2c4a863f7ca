"""docs/images/reproduction.svg: every printed number as a dot at its distance, in the colour of its class."""

from collections.abc import Sequence
from html import escape
from math import copysign, sqrt

from evalign_papers.analysis.distance import NEAR, NOT_FAR, VERDICTS, Verdict
from evalign_papers.analysis.filled import FilledTable

COLOURS: dict[Verdict, str] = {
    "within .02": "#0b62c4", "within .05": "#7fb2e5", "undecided": "#b4bac4", "off": "#e08a2e", "far off": "#b3261e",
}  # fmt: skip
INK, GRID, OUTER, INNER = "#1d2330", "#d9dde4", "#f0f4fa", "#e0e8f4"
LEFT, RIGHT, TOP, LINE, BOTTOM = 92, 16, 46, 26, 46
WIDTH, RADIUS, LARGEST = 760, 3.2, 0.85
TICKS = (-0.8, -0.4, -0.2, -0.05, 0.0, 0.05, 0.2, 0.4, 0.8)
LANES = (0, -1, 1, -2, 2, -3, 3)  # dots of one table lie on these lines, one after the other


def distance_figure(filled: Sequence[FilledTable]) -> str:
    """Measured minus printed by table, on a root scale; hollow dots ran below the printed budget.

    Written by hand and not by a plotting library, so that the file is the same on every machine.
    """
    tables = [(one.table.name, [cell for cell in one.cells if cell.distance is not None]) for one in filled]
    tables = [(name, sorted(cells, key=lambda cell: cell.distance or ())) for name, cells in tables if cells]
    height = TOP + LINE * len(tables) + BOTTOM
    floor = height - BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}" role="img">',
        "<title>Measured minus printed numbers, by table and class of distance</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for margin, tint in ((NOT_FAR, OUTER), (NEAR, INNER)):
        lines.append(f'<rect x="{place_of(-margin):.1f}" y="{TOP}" width="{place_of(margin) - place_of(-margin):.1f}" '
                     f'height="{floor - TOP}" fill="{tint}"/>')  # fmt: skip
    for tick in TICKS:
        lines.append(f'<path d="M{place_of(tick):.1f} {TOP}V{floor}" stroke="{GRID}"/>')
        lines.append(f'<text x="{place_of(tick):.1f}" y="{floor + 16}" text-anchor="middle">{_signed(tick)}</text>')
    lines.append(f'<text x="{place_of(0):.1f}" y="{floor + 36}" text-anchor="middle">measured minus printed</text>')
    lines += _legend()
    for number, (name, cells) in enumerate(tables):
        middle = TOP + LINE * (number + 0.5)
        lines.append(f'<text x="{LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        for place, cell in enumerate(cells):
            if cell.distance is None:
                continue
            x, y = place_of(cell.distance.difference), middle + LANES[place % len(LANES)] * RADIUS
            lines.append(_dot(x, y, cell.distance.verdict, hollow=cell.reduced))
    return "\n".join([*lines, "</svg>", ""])


def place_of(difference: float) -> float:
    """Place of a difference: its root, so that .02 and .8 are both seen.

    >>> place_of(0.0) == (LEFT + WIDTH - RIGHT) / 2, place_of(-LARGEST) == LEFT, place_of(LARGEST) == WIDTH - RIGHT
    (True, True, True)
    """
    half = (WIDTH - LEFT - RIGHT) / 2
    return LEFT + half + half * copysign(sqrt(min(abs(difference), LARGEST) / LARGEST), difference)


def _dot(x: float, y: float, verdict: Verdict, *, hollow: bool) -> str:
    tint = COLOURS[verdict]
    paint = f'fill="#ffffff" stroke="{tint}" stroke-width="1.4"' if hollow else f'fill="{tint}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" {paint}/>'


def _legend() -> list[str]:
    found, x = [], LEFT
    for verdict in VERDICTS:
        found += [_dot(x, 22, verdict, hollow=False), f'<text x="{x + 8}" y="26">{verdict}</text>']
        x += 100
    found += [_dot(x, 22, "undecided", hollow=True), f'<text x="{x + 8}" y="26">below the printed budget</text>']
    return found


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+g}".replace("-", "−")
