"""Options that commands share, and `Settings`, what they amount to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from evalign.comparison.aims import Aim

MODELS = ("auto", "network", "boost", "blend")
DATA, GOAL, TRAINING, OUTPUT = "Data", "What to be good at", "Training", "Output"

Data = Annotated[
    Path, typer.Argument(metavar="DATA", help="CSV, TSV (also .gz) or Parquet file with a header.", show_default=False)
]
Target = Annotated[
    str, typer.Option("--target", "-t", help="Column with the labels.", show_default=False, rich_help_panel=DATA)
]
Test = Annotated[
    Path | None,
    typer.Option("--test", help="File with the test rows; without it a part of DATA.", rich_help_panel=DATA),
]
TestSize = Annotated[
    float, typer.Option("--test-size", help="Share of every class that is kept for testing.", rich_help_panel=DATA)
]
Drop = Annotated[
    list[str] | None, typer.Option("--drop", help="Column to leave out; repeatable.", rich_help_panel=DATA)
]
Metric = Annotated[
    str,
    typer.Option(
        "--metric",
        "--maximize",
        "-m",
        help="f1, fbeta, precision, recall, specificity, accuracy, balanced_accuracy, jaccard, gmean, mcc, "
        "cohen_kappa or quadratic_kappa.",
        rich_help_panel=GOAL,
    ),
]
Average = Annotated[
    str | None,
    typer.Option(
        "--average", help="binary, macro, micro or weighted; binary for two classes, else macro.", rich_help_panel=GOAL
    ),
]
Beta = Annotated[
    list[str] | None,
    typer.Option("--beta", help="Of fbeta: a number, or LABEL=NUMBER, repeatable.", rich_help_panel=GOAL),
]
Positive = Annotated[
    str | None,
    typer.Option(
        "--positive", help="Of two classes the one that counts; the second in sorted order.", rich_help_panel=GOAL
    ),
]
SubjectTo = Annotated[
    list[str] | None,
    typer.Option(
        "--subject-to",
        help='Constraint, e.g. "precision>=0.9" or "recall[dog]>=0.8"; repeatable.',
        rich_help_panel=GOAL,
    ),
]
RecipeName = Annotated[
    str, typer.Option("--recipe", help="anchored, paper, btg or cross_entropy.", rich_help_panel=TRAINING)
]
Decision = Annotated[
    str | None,
    typer.Option(
        "--decision",
        help="How probabilities become labels: plug_in (the default), tuned (that of boosted trees) or argmax.",
        rich_help_panel=TRAINING,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="network; boost (trees; needs the extra boost); blend (both and randomised trees, averaged); or auto: all "
        "three, and the best on held-out rows is kept.",
        rich_help_panel=TRAINING,
    ),
]
Budget = Annotated[
    float,
    typer.Option(
        "--budget",
        help="Of --model auto: seconds for all models together; who runs out of time keeps what is best so far.",
        rich_help_panel=TRAINING,
    ),
]
Epochs = Annotated[
    int | None, typer.Option("--epochs", help="At most so many; the recipe's unless given.", rich_help_panel=TRAINING)
]
Network = Annotated[
    str,
    typer.Option(
        "--network",
        help="What a network sees of a column: mlp its numbers; embedding a learned curve or vector (a blend's has "
        "it too); or periodic.",
        rich_help_panel=TRAINING,
    ),
]
Ensemble = Annotated[
    int, typer.Option("--ensemble", help="Networks trained together and averaged.", min=1, rich_help_panel=TRAINING)
]
Folds = Annotated[
    str,
    typer.Option(
        "--folds",
        help="auto: 5 where a class is rare, else 1. 1 holds rows out once; k trains k networks, each on own folds.",
        rich_help_panel=TRAINING,
    ),
]
Hidden = Annotated[str, typer.Option("--hidden", help="Widths of the hidden layers.", rich_help_panel=TRAINING)]
Seed = Annotated[
    int, typer.Option("--seed", help="Decides the split and the training.", min=0, rich_help_panel=TRAINING)
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", rich_help_panel=TRAINING)]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", help="Read a Parquet file in passes, as a folder of them always is.", rich_help_panel=DATA
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.", rich_help_panel=OUTPUT)]
Json = Annotated[
    bool, typer.Option("--json", help="The result as JSON on stdout, and nothing else there.", rich_help_panel=OUTPUT)
]


@dataclass(frozen=True)
class Settings:
    """The options of a run that are not about files; in plain types, so that they can be written down."""

    metric: str = "f1"
    average: str | None = None
    beta: float | dict[str, float] | None = None
    positive: str | None = None
    subject_to: tuple[str, ...] = ()
    recipe: str = "anchored"
    decision: str | None = None  # None is each model's own default
    epochs: int | None = None
    hidden: tuple[int, ...] = (512, 256, 128)
    seed: int = 0
    device: str = "auto"
    model: str = "network"
    budget: float = 600.0
    network: str = "mlp"
    ensemble: int = 1
    folds: int | str = "auto"  # or a number

    def check(self) -> None:
        """Whatever can be told wrong before a table is read, which may take long."""
        from evalign import _checks as checks
        from evalign import decision, metrics
        from evalign.boosting.libraries import is_installed
        from evalign.comparison.aims import DECISIONS
        from evalign.networks.tabular import CURVES
        from evalign.training.recipes import find_recipe

        checks.check_choice("metric", self.metric, metrics.METRICS)
        if self.average is not None:
            checks.check_choice("average", self.average, metrics.AVERAGES)
            if not metrics.is_averaged(self.metric):
                raise ValueError(f"{self.metric} is one number for all classes; leave --average out")
        if self.beta is not None and self.metric != "fbeta":
            raise ValueError(f"--beta goes with --metric fbeta, got --metric {self.metric}; change one of them")
        for constraint in self.subject_to:
            decision.parse_constraint(_without_label(constraint))
        if self.subject_to and self.decision == "argmax":
            raise ValueError("--subject-to needs --decision plug_in or tuned, got argmax")
        find_recipe(self.recipe)
        checks.check_choice("model", self.model, MODELS)
        checks.check_choice("network", self.network, CURVES)
        checks.check_number("ensemble", self.ensemble, low=1)
        checks.check_number("budget", self.budget, low=0.0, open_low=True)
        if self.model in ("boost", "blend") and not is_installed("lightgbm"):
            raise ValueError(
                f"--model {self.model} needs LightGBM, which is not installed; pip install 'evalign[boost]'"
            )
        if self.decision is not None:
            checks.check_choice("decision", self.decision, DECISIONS)
        if self.epochs is not None:
            checks.check_number("epochs", self.epochs, low=1)
        check_device(self.device)

    def aim(self) -> "Aim":
        from evalign.comparison.aims import Aim

        return Aim(self.metric, self.average, self.beta, self.positive, self.subject_to)  # type: ignore[arg-type]

    def for_network(self) -> dict[str, Any]:
        """Options that our classifier and its cross-entropy rival share."""
        return {
            "network": self.network,
            "ensemble": self.ensemble,
            "folds": self.folds,
            "hidden": self.hidden,
            "epochs": self.epochs,
            "device": self.device,
            "decision": self.decision_of("network"),
        }

    def for_trees(self) -> dict[str, Any]:
        """Options that our boosted trees and their cross-entropy rival share; an epoch is a round."""
        rounds = {} if self.epochs is None else {"rounds": self.epochs}
        return {"decision": self.decision_of("boost"), **rounds}

    def for_blend(self) -> dict[str, Any]:
        """Options that our blend and its cross-entropy rival share."""
        rounds = {} if self.epochs is None else {"rounds": self.epochs}
        own = {"ensemble": self.ensemble, "hidden": self.hidden, "epochs": self.epochs}
        # Beside trees a network with embeddings has most to add (docs/research/boosting.md).
        network = {"network": "embedding" if self.network == "mlp" else self.network, **own}
        folds = {} if self.folds == "auto" else {"folds": self.folds}
        return {
            "decision": self.decision_of("blend"), "device": self.device, "boost": rounds, "network": network, **folds
        }  # fmt: skip

    def decision_of(self, model: str) -> str:
        """The decision asked for, or what the model does by itself."""
        return self.decision or {"network": "plug_in", "boost": "tuned", "blend": "plug_in"}[model]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_beta(entries: Sequence[str] | None) -> float | dict[str, float] | None:
    """["2"] is one number for all, ["dog=5", "cat=2"] one per label.

    >>> parse_beta(["2"]), parse_beta(["dog=5"])
    (2.0, {'dog': 5.0})
    """
    if not entries:
        return None
    if len(entries) == 1 and "=" not in entries[0]:
        return _beta(entries[0], entries[0])
    betas: dict[str, float] = {}
    for entry in entries:
        label, equals, number = entry.rpartition("=")
        if not equals:
            raise ValueError(f"--beta is one number, or LABEL=NUMBER for each label, got {' and '.join(entries)}")
        if label in betas:
            raise ValueError(f"--beta names {label!r} twice; give each label once")
        betas[label] = _beta(number, entry)
    return betas


def _beta(text: str, entry: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 < number < 1e6:  # phrased so that nan fails too
        raise ValueError(f"--beta must be a number above 0, such as 2 or dog=5, got {entry!r}")
    return number


def parse_folds(text: str) -> int | str:
    """A number of folds, or "auto".

    >>> parse_folds("5"), parse_folds("auto")
    (5, 'auto')
    """
    if text != "auto" and not (text.isdigit() and 0 < int(text) <= 100):
        raise ValueError(f"--folds must be auto or a number from 1 to 100, got {text!r}")
    return text if text == "auto" else int(text)


def parse_hidden(text: str) -> tuple[int, ...]:
    """Layer widths from "512,256".

    >>> parse_hidden("32,16")
    (32, 16)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 0 < int(part) <= 2**16 for part in parts):
        raise ValueError(f"--hidden must be widths of layers such as 512,256,128, got {text!r}")
    return tuple(int(part) for part in parts)


def check_device(name: str) -> None:
    """The device must be one that torch knows and this machine has."""
    import torch

    if name == "auto":
        return
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        found = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"--device must be one this machine has ({', '.join(found)}), got {name!r}") from None


def _without_label(constraint: str) -> str:
    """A constraint whose class is named by a label, which is not known yet, as one that can be parsed."""
    import re

    return re.sub(r"\[[^\]]*\]", "[0]", constraint)


def found_device(device: str) -> str:
    """The device named, or for "auto" the GPU where there is one."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
