"""Config of a cell: everything that determines its numbers, and nothing else.

Unknown and missing keys are errors (only stages have defaults, those of `training.recipes.Stage`). A report holds the
checksum of its config and is refused next to any other.
"""

import dataclasses
import hashlib
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from evalign.checks import check_choice
from evalign.metrics import METRICS
from evalign.training.recipes import Stage
from evalign_papers.datasets.dataset import Protocol

VERSION = 1
T = TypeVar("T")

# Deviations of the authors' released code from the papers' text; off unless a config names them.
QUIRKS: dict[str, str] = {
    "released_soft_sets": "trained on the mean over thresholds 0.1 … 0.9 of soft sets that swap tau and 1 - tau",
    "cut_logits": "logits of networks without a sigmoid are cut at 0.1 … 0.9 as if they were probabilities",
    "mean_over_thresholds": "scores are means over the thresholds 0.1 … 0.9, not those of one decision",
    "test_chooses": "the reported figure is the best on test data among the checkpoints that improved validation",
    "auroc_of_cuts": "AUROC is that of thresholded predictions, i.e. balanced accuracy",
    "wmw_of_positives": "WMW compares positives with positives",
    "dice_per_sample": "Dice sums within a sample, not over the batch",
    "adult_first_line": "adult.test is read with its first line, so no test row has the age code of a training row",
    "one_split": "all trials share one split and differ in initial weights only",
    "macro_f1": "the F1 column has macro F1 where other rows have F1 of the positive class",
}


@dataclass(frozen=True)
class Data:
    """A data set of `evalign_papers.datasets` under a protocol; `ratio` thins the positives to 1 : ratio.

    `tail` thins the classes of the training part exponentially, the last to 1 : tail; the test part stays whole.
    `inputs` of tables are scaled numbers ("standard") or these and their quantiles ("both"); of images, for methods
    other than networks, the principal components that hold 80 % of the variance ("components").
    """

    name: str
    protocol: Protocol
    options: dict[str, Any]
    ratio: int | None
    inputs: Literal["standard", "both", "components"]
    tail: int | None = None


@dataclass(frozen=True)
class Method:
    """The trained method. `options` are those of the loss or estimator."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Network:
    """`hidden` and `dropout` are those of "mlp" (of "graph" one width); `augment` shifts and mirrors images."""

    hidden: tuple[int, ...]
    dropout: float
    outputs: Literal["one", "classes"]
    kind: Literal["mlp", "tiny_darknet", "darknet19", "graph"] = "mlp"
    augment: bool = False


@dataclass(frozen=True)
class Training:
    stages: tuple[Stage, ...]
    batch_size: int
    class_weight: bool
    oversample: bool


@dataclass(frozen=True)
class Grid:
    """Values to choose from on validation data, by `select`; `search` for each trial or once, on the first split."""

    learning_rate: tuple[float, ...]
    dropout: tuple[float, ...]
    rate: tuple[float, ...]
    batch_size: tuple[int, ...]
    select: Literal["score", "loss"]
    search: Literal["each", "once"]
    offset: tuple[float, ...] = ()  # strengths of class offsets, for stages that have them


@dataclass(frozen=True)
class Config:
    version: int
    cell: str
    protocol: Protocol
    data: Data
    method: Method
    network: Network | None
    training: Training | None
    grid: Grid | None
    decide_for: str
    quirks: tuple[str, ...]
    trials: int
    seed: int

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(
                f"a config of version {VERSION} is needed, got {self.version}; write it again with evalign_papers.plans"
            )
        check_choice("decide_for", self.decide_for, METRICS)
        for quirk in self.quirks:
            check_choice("quirk", quirk, QUIRKS)
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}")

    @property
    def sha256(self) -> str:
        return hashlib.sha256(to_json(self).encode()).hexdigest()


def to_json(config: Config) -> str:
    return json.dumps(as_content(config), indent=1, ensure_ascii=False) + "\n"


def as_content(value: Any) -> Any:
    """A config as JSON values. Options at their defaults are left out, so that a new option changes no checksum."""
    if dataclasses.is_dataclass(value):
        own = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
        return {name: as_content(now) for name, (now, default) in own.items() if now != default}
    return [as_content(item) for item in value] if isinstance(value, tuple) else value


def from_json(text: str, where: str = "config") -> Config:
    """Parse a config; unknown and missing keys are errors.

    >>> from_json('{"version": 1, "colour": "red"}')
    Traceback (most recent call last):
    ValueError: config: unknown key 'colour'; known: version, cell, protocol, data, method, network, training, grid, \
decide_for, quirks, trials, seed
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} must be valid JSON ({error}); restore the original file") from None
    return strict(Config, content, where)


def read_config(path: Path) -> Config:
    return from_json(path.read_text(encoding="utf-8"), str(path))


def strict(kind: type[T], content: Any, where: str) -> T:
    """Build a dataclass from parsed JSON, including nested ones."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be an object, got {type(content).__name__}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in content:
        if key not in fields:
            raise ValueError(f"{where}: unknown key {key!r}; known: {', '.join(fields)}")
    for key, field in fields.items():
        if key not in content and field.default is dataclasses.MISSING:
            raise ValueError(f"{where}: key {key!r} is missing; add it, a config has no defaults")
    hints = typing.get_type_hints(kind)
    return kind(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in content.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return strict(typing.cast(type, hint), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return tuple(_value(arguments[0], item, where) for item in value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} must be one of {', '.join(map(repr, arguments))}, got {value!r}")
        return value
    if origin is dict:
        hint = dict
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{where} must be {hint.__name__}, got {value!r}")
    return value
