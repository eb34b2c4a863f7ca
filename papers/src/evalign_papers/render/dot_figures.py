"""Figures of the research pages: differences as dots, a line for each table or data set.

Written by hand and not by a plotting library, so that the files are the same on every machine.
"""

from collections.abc import Mapping, Sequence
from html import escape
from math import copysign, sqrt
from typing import NamedTuple

from evalign_papers.analysis.contests import Duel
from evalign_papers.analysis.distance import NEAR, NOT_FAR, VERDICTS, Verdict
from evalign_papers.analysis.filled import FilledTable

CLASS_COLOURS: dict[Verdict, str] = {
    "within .02": "#0b62c4", "within .05": "#7fb2e5", "undecided": "#b4bac4", "off": "#e08a2e", "far off": "#b3261e",
}  # fmt: skip
RULE_COLOURS = {"CE argmax": "#e08a2e", "CE tuned": "#7fb2e5", "CE plug-in": "#0b62c4"}
INK, GRID, BANDS = "#1d2330", "#d9dde4", ("#f0f4fa", "#e0e8f4")
RIGHT, TOP, LINE, BOTTOM = 16, 46, 26, 46
WIDTH, RADIUS = 760, 3.2
TICKS = (-0.8, -0.4, -0.2, -0.05, 0.0, 0.05, 0.2, 0.4, 0.8)
LANES = (0, -1, 1, -2, 2, -3, 3)  # dots of a line lie on these lanes, one after the other


class Dot(NamedTuple):
    difference: float
    colour: str
    hollow: bool


class Scale(NamedTuple):
    """Places of differences: the root of their size, so that .02 and .8 are both seen."""

    left: int
    largest: float

    def place(self, difference: float) -> float:
        """
        >>> scale = Scale(left=60, largest=0.5)
        >>> scale.place(-0.5), scale.place(0.0), scale.place(0.125), scale.place(9.0)
        (60.0, 402.0, 573.0, 744.0)
        """
        half = (WIDTH - self.left - RIGHT) / 2
        return self.left + half + half * copysign(sqrt(min(abs(difference) / self.largest, 1.0)), difference)


def distance_figure(filled: Sequence[FilledTable]) -> str:
    """Measured minus printed by table, in the colour of the class; hollow dots ran below the printed budget."""
    lines = {}
    for one in filled:
        found = sorted((cell.distance, cell.reduced) for cell in one.cells if cell.distance is not None)
        lines[one.table.name] = [Dot(own.difference, CLASS_COLOURS[own.verdict], hollow) for own, hollow in found]
    legend: dict[str, tuple[str, bool]] = {name: (CLASS_COLOURS[name], False) for name in VERDICTS}
    return _figure(
        {name: dots for name, dots in lines.items() if dots}, Scale(92, 0.85),
        legend | {"below the printed budget": (CLASS_COLOURS["undecided"], True)},
        "Measured minus printed numbers, by table and class of distance", "measured minus printed", (NOT_FAR, NEAR),
    )  # fmt: skip


def contest_figure(contests: Mapping[str, Sequence[Duel]]) -> str:
    """Ours minus cross-entropy with each rule, by data set; hollow dots are not clear. Titles go before the names."""
    lines: dict[str, list[Dot]] = {}
    for title, found in contests.items():
        for duel in found:
            if colour := RULE_COLOURS.get(duel.rival.title):
                clear = duel.outcome != "no clear difference"
                line = lines.setdefault(f"{title}{duel.dataset} ({duel.field.table})", [])
                line.append(Dot(duel.comparison.difference, colour, not clear))
    legend = {name.replace("CE", "minus cross-entropy,"): (colour, False) for name, colour in RULE_COLOURS.items()}
    return _figure(
        lines, Scale(240, 0.4), legend | {"not clear": (RULE_COLOURS["CE tuned"], True)},
        "F1 of metric training minus that of cross-entropy, by data set and decision rule",
        "difference of F1 over the same splits",
    )  # fmt: skip


def _figure(
    lines: Mapping[str, Sequence[Dot]], scale: Scale, legend: Mapping[str, tuple[str, bool]], title: str, axis: str,
    bands: Sequence[float] = (),
) -> str:  # fmt: skip
    floor = TOP + LINE * len(lines)
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {floor + BOTTOM}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{floor + BOTTOM}" fill="#ffffff"/>',
    ]
    for margin, tint in zip(bands, BANDS, strict=False):
        left, right = scale.place(-margin), scale.place(margin)
        found.append(
            f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{floor - TOP}" fill="{tint}"/>'
        )
    for tick in (tick for tick in TICKS if abs(tick) <= scale.largest):
        x, text = scale.place(tick), f"{tick:+g}".replace("-", "−") if tick else "0"
        found.append(f'<path d="M{x:.1f} {TOP}V{floor}" stroke="{GRID}"/>')
        found.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{text}</text>')
    found.append(f'<text x="{scale.place(0):.1f}" y="{floor + 36}" text-anchor="middle">{escape(axis)}</text>')
    x = 92.0
    for name, (colour, hollow) in legend.items():
        found += [_circle(x, 22, colour, hollow), f'<text x="{x + 8:.0f}" y="26">{escape(name)}</text>']
        x += 36 + 6.1 * len(name)
    for number, (name, dots) in enumerate(lines.items()):
        middle = TOP + LINE * (number + 0.5)
        found.append(f'<text x="{scale.left - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        for place, dot in enumerate(dots):
            y = middle + LANES[place % len(LANES)] * RADIUS * (2 if len(dots) <= 3 else 1)
            found.append(_circle(scale.place(dot.difference), y, dot.colour, dot.hollow))
    return "\n".join([*found, "</svg>", ""])


def _circle(x: float, y: float, colour: str, hollow: bool) -> str:
    paint = f'fill="#ffffff" stroke="{colour}" stroke-width="1.4"' if hollow else f'fill="{colour}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" {paint}/>'
