"""The two five-point steps as numbers that a kernel can take."""

from typing import NamedTuple

from torch import Tensor


class FivePoints(NamedTuple):
    """A step whose threshold is tau <= 1/2 of its row: lines that meet at tau (1 -+ reach) with values low, 1 - low.

    With x = p / tau: h = a x below 1 - reach, 1/2 + b (x - 1) up to 1 + reach. `annealed` has low = T and
    reach = 5 T / 2, `linear` low = delta and reach = 1/2. On a GPU the annealed step's `temperature` is read where it
    is, in place of both numbers: asking for its value would stop the queue, and freeze it in a CUDA graph.
    """

    low: float
    reach: float
    temperature: Tensor | None = None

    @property
    def a(self) -> float:  # of no effect where the outer line has no length (T = 0.4)
        return self.low / (1 - self.reach) if self.reach < 1 else 0.0

    @property
    def b(self) -> float:
        return (0.5 - self.low) / self.reach

    def numbers(self) -> tuple[float, float, float, float, float]:
        """a, b, low, and the ends of the middle line over tau, the left one below 0 where there is no outer line."""
        assert self.temperature is None
        return self.a, self.b, self.low, 1 - self.reach if self.reach < 1 else -1.0, 1 + self.reach


class Lines(NamedTuple):
    """A step with a threshold of its own: three lines, joined at `left` and at 1 - `room`.

    h = below p, 1/2 + middle (p - tau), 1 - above (1 - p).
    """

    left: float
    room: float
    tau: float
    below: float
    middle: float
    above: float

    @classmethod
    def at(cls, tau: float, points: FivePoints) -> "Lines":
        """The step at a threshold on either side of 1/2: beyond it, the mirror image.

        >>> Lines.at(0.5, FivePoints(low=0.1, reach=0.5))
        Lines(left=0.25, room=0.25, tau=0.5, below=0.4, middle=1.6, above=0.4)
        """
        half = points.reach * min(tau, 1 - tau)
        left, room = tau - half, 1 - tau - half
        below, above = (points.low / end if end > 0 else 0.0 for end in (left, room))
        return cls(left, room, tau, below, (1 - 2 * points.low) / (2 * half), above)


class Settings(NamedTuple):
    """What a fused loss is told besides its batch; `thresholds` are those of yes/no problems."""

    points: FivePoints
    smoothing: float = 0.0
    losses: bool = True  # whether cross-entropies are wanted
    thresholds: tuple[float, ...] = ()
