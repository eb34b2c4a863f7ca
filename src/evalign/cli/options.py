"""Command-line options shared by several commands, and the `Settings` they are parsed into."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from evalign.comparison.aims import Aim

MODELS = ("blend", "network", "boost", "auto")
NETWORK_OPTIONS = ("network", "ensemble", "folds", "hidden")
DATA, GOAL, TRAINING, OUTPUT = "Data", "Metric to optimise", "Training", "Output"

in_data, in_goal, in_training, in_output = (
    partial(typer.Option, rich_help_panel=panel) for panel in (DATA, GOAL, TRAINING, OUTPUT)
)
Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="Table with a header: CSV, TSV (also .gz), Parquet, Feather, JSON lines or Excel.",
        show_default=False,
    ),
]
Target = Annotated[str, in_data("--target", "-t", help="Column that holds the labels.", show_default=False)]
Test = Annotated[Path | None, in_data("--test", help="File of test rows; by default a share of DATA is held out.")]
TestSize = Annotated[
    float | None, in_data("--test-size", help="Share of each class held out for testing. Default: 0.2.")
]
Drop = Annotated[list[str] | None, in_data("--drop", help="Column to ignore; repeatable.")]
Decimal = Annotated[
    str | None, in_data("--decimal", help="Decimal separator of text files, . or , (default: detected).")
]
Na = Annotated[
    list[str] | None, in_data("--na", help="Entry that means missing, beside NA, null, ? and the like; repeatable.")
]
Encoding = Annotated[str | None, in_data("--encoding", help="Encoding of text files. Default: UTF-8.")]
DropUnlabelled = Annotated[bool, in_data("--drop-unlabelled", help="Drop rows without a label.")]
Task = Annotated[str | None, in_data("--task", help="classification: take each number in the target as a class.")]
Force = Annotated[bool, in_output("--force", "-f", help="Overwrite what --out names.")]
Metric = Annotated[
    str,
    in_goal(
        "--metric",
        "--maximize",
        "-m",
        help="Metric to optimise: f1, fbeta, precision, recall, specificity, accuracy, balanced_accuracy, jaccard, "
        "gmean, mcc, cohen_kappa or quadratic_kappa.",
    ),
]
Average = Annotated[
    str | None,
    in_goal(
        "--average",
        help="Average over classes: binary, macro, micro or weighted. Default: binary for two classes, else macro.",
    ),
]
Beta = Annotated[
    list[str] | None, in_goal("--beta", help="Beta of --metric fbeta: a number, or LABEL=NUMBER; repeatable.")
]
Positive = Annotated[
    str | None, in_goal("--positive", help="Positive class of two. Default: the last in sorted order.")
]
SubjectTo = Annotated[
    list[str] | None,
    in_goal("--subject-to", help='Constraint such as "precision>=0.9" or "recall[dog]>=0.8"; repeatable.'),
]
RecipeName = Annotated[
    str,
    in_training(
        "--recipe",
        help="Training recipe: cross_entropy, anchored, paper or btg. auto: cross_entropy in a blend unless argmax "
        "decides, else anchored.",
    ),
]
Confidence = Annotated[
    float | None,
    in_goal(
        "--confidence",
        help="Probability with which constraints hold on new rows, such as 0.9. Default: they hold on held-out rows.",
    ),
]
Decision = Annotated[
    str | None,
    in_training(
        "--decision",
        help="Decision rule: auto (calibrate on held-out rows, then plug-in), plug_in, tuned or argmax. Default: auto.",
    ),
]
Model = Annotated[
    str,
    in_training(
        "--model",
        help="blend (linear model, randomised and boosted trees and a network, averaged); network; boost (boosted "
        "trees); or auto: train all three and keep the best on held-out rows.",
    ),
]
Budget = Annotated[
    float,
    in_training(
        "--budget",
        help="Seconds for all models of --model auto together; a model that runs out of time keeps its best state.",
    ),
]
Preset = Annotated[str, in_training("--preset", help="Effort of a blend: quick, default or best.")]
TimeLimit = Annotated[float | None, in_training("--time-limit", help="Seconds that the training of a blend may take.")]
Epochs = Annotated[int | None, in_training("--epochs", help="Maximum number of epochs. Default: set by the recipe.")]
Network = Annotated[
    str,
    in_training(
        "--network",
        help="Network input: mlp (scaled numbers), embedding (a learned vector per column; used in blends) or "
        "periodic.",
    ),
]
Ensemble = Annotated[int, in_training("--ensemble", help="Number of networks to train and average.", min=1)]
Folds = Annotated[
    str,
    in_training(
        "--folds",
        help="Cross-validation folds, one network each; 1 is a single hold-out. auto: 5 if a class is rare, else 1.",
    ),
]
Hidden = Annotated[str | None, in_training("--hidden", help="Hidden layer widths, separated by commas.")]
Seed = Annotated[int, in_training("--seed", help="Random seed of split and training.", min=0, max=2**32 - 1)]
Device = Annotated[str, in_training("--device", help="Device to train on: auto, cpu, cuda or cuda:N.")]
Stream = Annotated[
    bool, in_data("--stream", help="Read a Parquet file in passes instead of into memory (folders always are).")
]
Quiet = Annotated[bool, in_output("--quiet", "-q", help="Print errors only.")]
Json = Annotated[bool, in_output("--json", help="Print the result as JSON, and nothing else, to standard output.")]


@dataclass(frozen=True)
class Settings:
    """Options of a run that do not concern files, in plain types that JSON can hold."""

    metric: str = "f1"
    average: str | None = None
    beta: float | dict[str, float] | None = None
    positive: str | None = None
    subject_to: tuple[str, ...] = ()
    confidence: float | None = None  # with which constraints hold on new rows
    recipe: str = "auto"
    decision: str | None = None  # None: the default of the model
    epochs: int | None = None
    hidden: tuple[int, ...] | None = None  # None: the default of the model
    seed: int = 0
    device: str = "auto"
    model: str = "blend"
    budget: float = 600.0
    network: str = "mlp"
    ensemble: int = 1
    folds: int | str = "auto"  # or a number
    preset: str = "default"
    time_limit: float | None = None

    def check(self, context: typer.Context | None = None) -> None:
        """Raise for invalid options, and for options on the command line that the model does not use."""
        from evalign import _checks as checks
        from evalign import curves, decision, metrics
        from evalign.boosting.growth import is_installed
        from evalign.comparison.aims import DECISIONS
        from evalign.networks.mlp import CURVES
        from evalign.training.recipes import find_recipe

        if self.metric in (*curves.RANKINGS, "auc", "roc_auc"):
            raise ValueError(
                f"{self.metric} ranks rows, and no decision changes it; name a metric of labels, such as f1"
            )
        checks.check_choice("metric", self.metric, metrics.METRICS)
        if self.average is not None:
            checks.check_choice("average", self.average, metrics.AVERAGES)
            if not metrics.is_averaged(self.metric):
                raise ValueError(f"{self.metric} is one number for all classes; leave --average out")
        if self.beta is not None and self.metric != "fbeta":
            raise ValueError(f"--beta goes with --metric fbeta, got --metric {self.metric}; change one of them")
        for constraint in self.subject_to:
            decision.parse_constraint(constraint)
        if self.subject_to and self.decision == "argmax":
            raise ValueError("--subject-to needs --decision auto, plug_in or tuned, got argmax")
        if self.confidence is not None:
            checks.check_number("confidence", self.confidence, low=0.5, high=1.0, open_high=True)
            if not self.subject_to or self.decision not in (None, "auto"):
                raise ValueError("--confidence goes with --subject-to and --decision auto; change one of them")
        if self.recipe != "auto":
            find_recipe(self.recipe)
        checks.check_choice("preset", self.preset, ("quick", "default", "best"))
        if self.time_limit is not None:
            checks.check_number("time_limit", self.time_limit, low=0.0, open_low=True)
        checks.check_choice("model", self.model, MODELS)
        checks.check_choice("network", self.network, CURVES)
        checks.check_number("ensemble", self.ensemble, low=1)
        checks.check_number("budget", self.budget, low=0.0, open_low=True)
        if self.model == "boost" and not is_installed("lightgbm"):
            raise ValueError(
                f"--model {self.model} needs LightGBM, which is not installed; pip install 'evalign[boost]'"
            )
        if self.decision is not None:
            checks.check_choice("decision", self.decision, DECISIONS)
        if self.epochs is not None:
            checks.check_number("epochs", self.epochs, low=1)
        for name in given_options(context):
            if name in NETWORK_OPTIONS and self.model == "boost":
                raise ValueError(f"--{name} is an option of networks, got --model boost; remove one of them")
            if name in ("preset", "time_limit") and self.model in ("network", "boost"):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is an option of blends, got --model {self.model}; remove one of them")
            if name == "budget" and self.model != "auto":
                raise ValueError(f"--budget is an option of --model auto, got --model {self.model}; remove one of them")
        check_device(self.device)

    def aim(self) -> "Aim":
        from evalign.comparison.aims import Aim

        return Aim(self.metric, self.average, self.beta, self.positive, self.subject_to, self.confidence)  # type: ignore[arg-type]

    def for_network(self) -> dict[str, Any]:
        """Options shared by EASTClassifier and its cross-entropy baseline."""
        return {
            "network": self.network,
            "ensemble": self.ensemble,
            "folds": self.folds,
            "hidden": self.hidden or (512, 256, 128),
            "epochs": self.epochs,
            "device": self.device,
            "decision": self.decision_of("network"),
        }

    def for_trees(self) -> dict[str, Any]:
        """Options shared by EASTBooster and its cross-entropy baseline; an epoch is a boosting round."""
        rounds = {} if self.epochs is None else {"rounds": self.epochs}
        return {"decision": self.decision_of("boost"), **rounds}

    def for_blend(self) -> dict[str, Any]:
        """Options shared by EASTBlend and its cross-entropy baseline."""
        rounds = {} if self.epochs is None else {"rounds": self.epochs}
        network: dict[str, Any] = {"network": self.network}
        network |= {"ensemble": self.ensemble} if self.ensemble > 1 else {}
        network |= {"hidden": self.hidden} if self.hidden is not None else {}
        network |= {"epochs": self.epochs} if self.epochs is not None else {}
        return {
            "decision": self.decision_of("blend"), "device": self.device, "preset": self.preset,
            "time_limit": self.time_limit, "folds": self.folds, "boost": rounds, "network": network,
        }  # fmt: skip

    def recipe_of(self, model: str) -> str:
        """The requested recipe, or the default of the model."""
        return self.recipe if self.recipe != "auto" or model == "blend" else "anchored"

    def decision_of(self, model: str) -> str:
        """The requested decision rule, or the default of the model."""
        return self.decision or "auto"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def given_options(context: typer.Context | None) -> list[str]:
    """Names of the options on the command line, as opposed to defaults."""
    if context is None:
        return []
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def parse_beta(entries: Sequence[str] | None) -> float | dict[str, float] | None:
    """Parse --beta: ["2"] is one number for all classes, ["dog=5", "cat=2"] one per label.

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
    """Parse --folds: a number, or "auto".

    >>> parse_folds("5"), parse_folds("auto")
    (5, 'auto')
    """
    if text != "auto" and not (text.isdigit() and 0 < int(text) <= 100):
        raise ValueError(f"--folds must be auto or a number from 1 to 100, got {text!r}")
    return text if text == "auto" else int(text)


def parse_hidden(text: str | None) -> tuple[int, ...] | None:
    """Parse --hidden: layer widths such as "512,256".

    >>> parse_hidden("32,16")
    (32, 16)
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 0 < int(part) <= 2**16 for part in parts):
        raise ValueError(f"--hidden must be widths of layers such as 512,256,128, got {text!r}")
    return tuple(int(part) for part in parts)


def check_device(name: str) -> None:
    """Raise unless torch knows the device and this machine has it."""
    import torch

    if name == "auto":
        return
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        found = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"--device must be one this machine has ({', '.join(found)}), got {name!r}") from None


def resolve_device(device: str) -> str:
    """Resolve "auto" to the GPU if there is one, else the CPU."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
