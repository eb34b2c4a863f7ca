"""How trees are grown, in words that mean the same to both libraries, and what a library must offer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from numpy.typing import NDArray

Array = NDArray[Any]
Gradient = Callable[[Array], tuple[Array, Array]]  # scores -> first and second derivative


@dataclass(frozen=True)
class TreeOptions:
    """Of one ensemble of trees."""

    learning_rate: float
    leaves: int
    min_rows: int
    l2: float
    columns: float
    rows: float
    threads: int
    seed: int
    classes: int

    @property
    def outputs(self) -> int:
        """Scores of a row: two classes need one."""
        return 1 if self.classes == 2 else self.classes


@dataclass(frozen=True)
class Rows:
    """Encoded rows with their labels and weights; `categorical` are positions of columns that hold codes."""

    x: Array
    y: Array
    weight: Array
    categorical: list[int]


class Grower(Protocol):
    """An ensemble that grows: one more tree for every score with each call of `grow`."""

    def __init__(self, train: Rows, valid: Rows, options: TreeOptions) -> None: ...

    def grow(self, gradient: Gradient) -> None: ...

    def validation_scores(self) -> Array: ...

    def finished(self, rounds: int) -> "Trees": ...


class Trees(Protocol):
    """An ensemble that is done: scores (n,) of two classes, (n, C) of more; text in the library's own format."""

    def scores(self, x: Array) -> Array: ...

    def to_text(self) -> str: ...

    @classmethod
    def from_text(cls, text: str) -> Self: ...
