"""Command-line options shared by several commands, and the `Settings` they are parsed into."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from evalign.comparison.goals import Aim

MODELS = ("blend", "network", "boost")
NETWORK_OPTIONS = ("network", "ensemble", "folds", "hidden")
DATA, GOAL, TRAINING, OUTPUT = "Data", "Metric to optimise", "Training", "Output"

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="Table with a header: CSV, TSV (also .gz), Parquet, Feather, JSON lines or Excel.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing output.", rich_help_panel=OUTPUT)]
Device = Annotated[str, typer.Option("--device", help="Device: auto, cpu, cuda or cuda:N.", rich_help_panel=TRAINING)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.", rich_help_panel=OUTPUT)]
# Name, type, panel, help, and flags that differ from --name. A default is that of `Settings`, else None or False.
_TABLE: list[tuple[Any, ...]] = [
    ("target", str, DATA,
     "Column of labels, or several 0/1 columns separated by commas (multilabel); double quotes keep a comma in a name.",
     "--target", "-t"),
    ("test", Path | None, DATA, "File of test rows. Default: hold out a share of DATA."),
    ("test_size", float | None, DATA, "Share of each class held out for testing. Default: 0.2."),
    ("drop", list[str] | None, DATA, "Column to ignore; repeatable."),
    ("decimal", str | None, DATA, "Decimal separator of text files, . or , (default: detected)."),
    ("na", list[str] | None, DATA, "Text that means a missing value, besides NA, null, ? and similar; repeatable."),
    ("encoding", str | None, DATA, "Encoding of text files. Default: UTF-8."),
    ("drop_unlabelled", bool, DATA, "Drop rows without a label."),
    ("task", str | None, DATA, "Set to classification to treat numeric labels such as 0.5 as classes."),
    ("stream", bool, DATA, "Read a Parquet file in passes instead of loading it; always on for folders."),
    ("metric", str, GOAL,
     "Metric to optimise: f1, fbeta, precision, recall, specificity, accuracy, balanced_accuracy, jaccard, gmean, mcc, "
     "cohen_kappa or quadratic_kappa.", "--metric", "--maximize", "-m"),
    ("average", str | None, GOAL,
     "Average over classes: binary, macro, micro or weighted. Default: binary for two classes, else macro."),
    ("beta", list[str] | None, GOAL, "Beta of --metric fbeta: a number, or LABEL=NUMBER; repeatable."),
    ("positive", str | None, GOAL, "Positive class of a binary target. Default: the last in sorted order."),
    ("costs", str | None, GOAL,
     "Costs to minimise instead of a metric: TRUE:DECIDED=COST such as fraud:ok=100,ok:fraud=1; fn=100,fp=1 for two "
     "classes; reject=5 to leave rows undecided; or a CSV or JSON file of these. A cost is a number or a column."),
    ("subject_to", list[str] | None, GOAL,
     'Constraint such as "precision>=0.9" or "recall[dog]>=0.8"; repeatable.'),
    ("confidence", float | None, GOAL,
     "Probability with which the constraints hold on new rows, such as 0.9. Default: they hold on held-out rows only."),
    ("model", str, TRAINING,
     "blend (linear model, randomised and boosted trees and a network, averaged); network; or boost (boosted trees)."),
    ("preset", str, TRAINING, "Effort of a blend: quick, default or best."),
    ("time_limit", float | None, TRAINING, "Maximum training time of a blend, in seconds."),
    ("recipe", str, TRAINING,
     "Training recipe: cross_entropy, anchored, paper or btg. auto: cross_entropy in a blend unless --decision argmax, "
     "otherwise anchored."),
    ("decision", str | None, TRAINING,
     "Decision rule: auto (calibrate on held-out rows, then plug-in), plug_in, tuned or argmax. Default: auto."),
    ("epochs", int | None, TRAINING, "Maximum number of epochs. Default: set by the recipe."),
    ("network", str, TRAINING,
     "Network input: mlp (scaled numbers) or embedding (a learned vector per column)."),
    ("ensemble", int, TRAINING, "Number of networks to train and average."),
    ("folds", str | None, TRAINING,
     "Cross-validation folds, one network each; 1 is a single hold-out. Default: 5 if a class is rare, else 1."),
    ("hidden", str | None, TRAINING, "Hidden layer widths, separated by commas."),
    ("seed", int, TRAINING, "Random seed of split and training."),
]  # fmt: skip
_LIMITS: dict[str, dict[str, Any]] = {"ensemble": {"min": 1}, "seed": {"min": 0, "max": 2**32 - 1}}
ALL: dict[str, Any] = {
    name: Annotated[
        kind,
        typer.Option(
            *flags or (f"--{name.replace('_', '-')}",), help=text, rich_help_panel=panel, **_LIMITS.get(name, {})
        ),
    ]
    for name, kind, panel, text, *flags in _TABLE
} | {"device": Device, "force": Force, "quiet": Quiet, "json": Json}
READING = ("decimal", "na", "encoding")


@dataclass(frozen=True)
class Settings:
    """Options of a run, files excepted, as plain JSON types."""

    metric: str = "f1"
    average: str | None = None
    beta: float | dict[str, float] | None = None
    positive: str | None = None
    subject_to: tuple[str, ...] = ()
    costs: dict[str | tuple[str, str], float | str] | None = None
    confidence: float | None = None  # probability that constraints hold on new rows
    recipe: str = "auto"
    decision: str | None = None  # None: the default of the model
    epochs: int | None = None
    hidden: tuple[int, ...] | None = None  # None: the default of the model
    seed: int = 0
    device: str = "auto"
    model: str = "blend"
    network: str = "mlp"
    ensemble: int = 1
    folds: int | str = "auto"  # or a number
    preset: str = "default"
    time_limit: float | None = None

    def check(self, context: typer.Context | None = None) -> None:
        """Raise for invalid options, and for options on the command line that the model does not use."""
        from evalign import checks, curves, decision, metrics
        from evalign.boosting.growth import is_installed
        from evalign.comparison.goals import DECISIONS
        from evalign.decision.costs import COST
        from evalign.networks.mlp import NETWORKS
        from evalign.training.recipes import find_recipe

        if self.metric in (*curves.RANKINGS, "auc", "roc_auc"):
            raise ValueError(
                f"{self.metric} depends only on the order of rows, so no decision rule changes it; choose a metric of "
                "labels, such as f1"
            )
        if self.costs is None and self.metric == COST:
            raise ValueError("--metric cost needs --costs, such as --costs fn=100,fp=1")
        if self.costs is None:
            checks.check_choice("--metric", self.metric, metrics.METRICS)
        elif self.decision is not None or self.recipe == "btg":
            raise ValueError("--costs minimises the expected cost; remove --decision and --recipe btg")
        if self.average is not None:
            checks.check_choice("--average", self.average, metrics.AVERAGES)
            if not metrics.is_averaged(self.metric):
                raise ValueError(f"{self.metric} is a single number for all classes; remove --average")
        if self.beta is not None and self.metric != "fbeta":
            raise ValueError(f"--beta requires --metric fbeta, got --metric {self.metric}; change one of them")
        for constraint in self.subject_to:
            decision.parse_constraint(constraint)
        if self.subject_to and self.decision == "argmax":
            raise ValueError("--subject-to needs --decision auto, plug_in or tuned, got argmax")
        if self.confidence is not None:
            checks.check_number("--confidence", self.confidence, low=0.5, high=1.0, open_high=True)
            if not self.subject_to or self.decision not in (None, "auto"):
                raise ValueError(
                    "--confidence requires --subject-to and --decision auto; add them, or remove --confidence"
                )
        if self.recipe != "auto":
            find_recipe(self.recipe)
        checks.check_choice("--preset", self.preset, ("quick", "default", "best"))
        if self.time_limit is not None:
            checks.check_number("--time-limit", self.time_limit, low=0.0, open_low=True)
        checks.check_choice("--model", self.model, MODELS)
        checks.check_choice("--network", self.network, NETWORKS)
        if self.model == "boost" and not is_installed("lightgbm"):
            raise ValueError(
                f"--model {self.model} needs LightGBM, which is not installed; pip install 'evalign[boost]'"
            )
        if self.decision is not None:
            checks.check_choice("--decision", self.decision, DECISIONS)
        if self.epochs is not None:
            checks.check_number("--epochs", self.epochs, low=1)
        for name in given_options(context):
            if name in NETWORK_OPTIONS and self.model == "boost":
                raise ValueError(f"--{name} is an option of networks, got --model boost; remove one of them")
            if name in ("preset", "time_limit") and self.model in ("network", "boost"):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is an option of blends, got --model {self.model}; remove one of them")
        resolve_device(self.device)

    def aim(self) -> "Aim":
        from evalign.comparison.goals import Aim

        return Aim(
            self.metric, self.average, self.beta, self.positive, self.subject_to, self.confidence, self.costs  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def cost_columns(self) -> list[str]:
        """Columns of the data that hold costs."""
        return list(dict.fromkeys(cost for cost in (self.costs or {}).values() if isinstance(cost, str)))

    def options_of(self, model: str) -> dict[str, Any]:
        """Options of a kind of model and of its cross-entropy baseline; an epoch is a boosting round."""
        rounds = {} if self.epochs is None else {"rounds": self.epochs}
        if model == "boost":
            return {"decision": self.rule, **rounds}
        network = {"network": self.network, "ensemble": self.ensemble, "hidden": self.hidden, "epochs": self.epochs}
        shared = {"decision": self.rule, "device": self.device, "folds": self.folds}
        if model == "network":
            return network | {"hidden": self.hidden or (512, 256, 128)} | shared
        own = {name: value for name, value in network.items() if value is not None and (name, value) != ("ensemble", 1)}
        return shared | {"preset": self.preset, "time_limit": self.time_limit, "boost": rounds, "network": own}

    def contender(self, judge: Any, model: str) -> Any:
        """Our contender of a kind of model."""
        from evalign.comparison import contenders as c

        make = {"boost": c.ours_boosted, "blend": c.ours_blended, "network": c.ours}[model]
        return make(judge, recipe=self.recipe_of(model), **self.options_of(model))

    def recipe_of(self, model: str) -> str:
        """The requested recipe, or the default of the model."""
        return self.recipe if self.recipe != "auto" or model == "blend" else "anchored"

    @property
    def rule(self) -> str:
        """The requested decision rule, or the default."""
        return self.decision or "auto"

    def to_json(self) -> dict[str, Any]:
        costs = {key if isinstance(key, str) else ":".join(key): cost for key, cost in (self.costs or {}).items()}
        return asdict(self) | {"costs": costs or None}

    @classmethod
    def of(cls, given: dict[str, Any], context: typer.Context) -> "Settings":
        """Settings from the options of a command, by name; --costs sets the metric to "cost"."""
        own = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        for name, parse in PARSERS.items():
            own[name] = parse(own.get(name))
        if own["costs"] is not None:
            if "metric" in given_options(context) and own["metric"] != "cost":
                raise ValueError(
                    f"--costs replaces --metric, got both --costs and --metric {own['metric']}; remove one of them"
                )
            own["metric"] = "cost"
        return cls(**own)


def given_options(context: typer.Context | None) -> list[str]:
    """Names of the options on the command line, as opposed to defaults."""
    if context is None:
        return []
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def parse_beta(entries: Sequence[str] | None) -> float | dict[str, float] | None:
    """Parse --beta: ["2"] gives one number for all classes, ["dog=5", "cat=2"] one per label.

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
            raise ValueError(f"--beta must be one number, or LABEL=NUMBER for each label, got {' and '.join(entries)}")
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


def parse_costs(text: str | None) -> dict[str | tuple[str, str], float | str] | None:
    """Parse --costs: entries such as "fraud:ok=100", or a .csv or .json file.

    A CSV file has the true classes in its first column and the decided ones in its header; JSON is {"fn": 100} or
    {"fraud": {"ok": 100}}. Keys of the result are those of `costs` of the classifiers.

    >>> parse_costs("fraud:ok=amount,ok:fraud=1,reject=0.5")
    {('fraud', 'ok'): 'amount', ('ok', 'fraud'): 1.0, 'reject': 0.5}
    """
    if text is None:
        return None
    path = Path(text)
    if path.suffix.lower() in (".csv", ".json"):
        if not path.is_file():
            raise ValueError(f"--costs {path} does not exist; check the path, or write fn=100,fp=1")
        try:
            entries = _cost_table(path)
        except (ValueError, OSError, AttributeError) as error:
            raise ValueError(f"--costs {path} is not a table of costs ({error}); see evalign fit --help") from None
    else:
        parts = [part.rpartition("=") for part in text.split(",")]
        if not all(key and value for key, _, value in parts):
            raise ValueError(f"--costs must be entries such as fn=100,fp=1, or a .csv or .json file, got {text!r}")
        entries = [(key.strip(), value.strip()) for key, _, value in parts]
    found: dict[str | tuple[str, str], float | str] = {}
    for key, cost in entries:
        if isinstance(key, str) and ":" in key:
            true, _, decided = key.partition(":")
            key = (true.strip(), decided.strip())
        if key in found:
            raise ValueError(f"--costs names {key!r} twice; give each cost once")
        try:
            found[key] = float(cost)
        except (TypeError, ValueError):
            found[key] = str(cost)
    if not found:
        raise ValueError(f"--costs {text} holds no cost; give at least one, such as fn=100")
    return found


def _cost_table(path: Path) -> list[tuple[Any, Any]]:
    """Keys and costs of a file."""
    if path.suffix.lower() == ".csv":
        import pandas as pd

        table = pd.read_csv(path, index_col=0, dtype=str, keep_default_na=False).to_dict("index")
    else:
        table = json.loads(path.read_text())
    rows = [(key, row if isinstance(row, dict) else {None: row}) for key, row in table.items()]
    pairs = [
        ((str(key), str(to)) if to is not None else str(key), cost) for key, row in rows for to, cost in row.items()
    ]
    return [(key, cost) for key, cost in pairs if cost not in ("", None)]


# Parsers of command-line values.
PARSERS: dict[str, Callable[[Any], Any]] = {
    "beta": parse_beta, "costs": parse_costs, "folds": lambda text: parse_folds(text or "auto"),
    "hidden": parse_hidden, "subject_to": lambda given: tuple(given or ()),
}  # fmt: skip


def takes(*names: str, without: Sequence[str] = (), **defaults: Any) -> Callable[[Callable[..., None]], Any]:
    """Add options by name, or all but those `without`, to a command that takes them as keywords."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in inspect.signature(command).parameters.values() if one.kind is not one.VAR_KEYWORD]
        taken = names or [name for name in ALL if name not in (*without, *(one.name for one in own))]
        own = [one.replace(kind=one.KEYWORD_ONLY) for one in own]
        order = [*own[:2], *(_parameter(name, defaults) for name in taken), *own[2:]]
        command.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]
        return command

    return wrap


def _parameter(name: str, defaults: dict[str, Any]) -> inspect.Parameter:
    """An option as a parameter of a function; --target has no default, and some are parsed from None."""
    kind = ALL[name].__origin__
    default = defaults.get(name, False if kind is bool else None if name in PARSERS else getattr(Settings, name, None))
    default = inspect.Parameter.empty if name == "target" and default is None else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=ALL[name])


def resolve_device(name: str) -> str:
    """The device to compute on; "auto" is the GPU if there is one. Raise unless this machine has the device."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        found = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"--device must be one this machine has ({', '.join(found)}), got {name!r}") from None
    return name
