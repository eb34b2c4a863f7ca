"""Training settings as printed in the papers, and how far a config falls short of them.

`reductions` lists in which respects a run is below the printed budget; its numbers are then marked with a dagger.
"""

from collections.abc import Sequence
from typing import NamedTuple

from evalign_papers.engine.config import Config
from evalign_papers.engine.reports import Report

UNBOUNDED = 100_000  # more epochs than any run takes: the papers stop only by patience
TRIALS = 10
ESTIMATORS = ("random_forest", "ccs", "svm_perf")  # rivals of which only the number of trials is printed
PRINTED_BUDGET, RELEASED_BUDGET = "@printed", "@released"
LONGER_BUDGET = "@longer"  # the printed patience at one point of the grid
POSITIVE_BUDGET = "@printed-positive"  # of two classes: trained on the F1 of the positive one


class Settings(NamedTuple):
    """Settings of one paper for one kind of data; a tuple is a grid from which validation loss chooses."""

    source: str
    learning_rate: tuple[float, ...]  # () where the text gives none
    batch_size: tuple[int, ...]
    dropout: tuple[float, ...]
    rate: tuple[float, ...]  # of cooling; () where the slope is constant
    patience: int
    trials: int = TRIALS


RATES, DROPOUTS, COOLING = (1e-2, 1e-3, 1e-4), (0.25, 0.5), (0.8, 0.9)
TABULAR = (128, 256, 512, 1024, 2048)
EAST = Settings("EAST, E.1 and E.4", RATES, TABULAR, DROPOUTS, COOLING, 50)
MF = Settings("MF, Sec. 6; the grid is EAST's, MF refers to a supplement", RATES, TABULAR, DROPOUTS, (), 100)
BTG = Settings("BtG supplement, 4.2 and 4.3", (1e-3,), (1024,), (), (), 100)
AP_PERF = BTG._replace(
    source="released code, main.py: parameters of AP-Perf's author", learning_rate=(3e-4,), batch_size=(20,)
)
PRINTED: dict[tuple[str, str], Settings] = {
    ("btg", "table"): BTG,
    ("btg", "ap_perf"): AP_PERF,
    ("btg", "images"): Settings("BtG supplement, 4.2", (1e-4,), (128,), (), (), 100),
    ("btg", "graphs"): Settings("BtG, Sec. 5.3: the rest is Thompson et al.'s, not repeated", (), (), (), (), 100),
    ("btg", "batches"): Settings("BtG supplement, Table 5", (1e-3,), (128, 1024, 2048, 4096), (), (), 100),
    ("east", "table"): EAST,
    ("east", "creditcard"): EAST._replace(batch_size=(*TABULAR, 4096, 8192)),  # 4069 is printed
    ("east", "cifar10"): EAST._replace(batch_size=(32, 64, 128, 256), dropout=()),
    ("east", "caltech256"): EAST._replace(batch_size=(32, 64), dropout=()),
    ("mf", "table"): MF,
    ("mf", "creditcard"): MF._replace(batch_size=(*TABULAR, 4096, 8192)),
    ("mf", "cifar10"): MF._replace(batch_size=(32, 64, 128, 256), dropout=()),
    ("mf", "caltech256"): MF._replace(batch_size=(32, 64), dropout=()),
}


def printed_settings(config: Config) -> Settings | None:
    """The printed settings for the data of a config; None for our own rows and for methods other than networks."""
    if config.training is None or config.network is None:
        return None
    paper, table = config.cell.split("/")[:2]
    paper = "btg" if (paper, table) == ("checks", "text") else paper
    name = "caltech256" if config.data.name == "caltech101" else config.data.name  # its stand-in
    kind = {"mlp": "table", "graph": "graphs"}.get(config.network.kind, "images")
    if (paper, table) == ("btg", "s5"):
        kind = "batches"
    if config.method.name == "ap_perf":
        kind = "ap_perf"
    return PRINTED.get((paper, name)) or PRINTED.get((paper, kind))


def reductions(config: Config, report: Report | None = None) -> list[str]:
    """The respects in which a run is below the printed protocol.

    A bound on epochs only counts if a trial reached it, or if nothing has been run yet.
    """
    if config.protocol != "paper":
        return []
    planned = config.trials if report is None else len(report.trials)
    printed = printed_settings(config)
    if printed is None or config.training is None:
        return [f"{planned} of {TRIALS} trials"] if config.method.name in ESTIMATORS and planned < TRIALS else []
    found = []
    training, grid = config.training, config.grid
    stages = training.stages
    patience = min(stage.patience for stage in stages)
    cap = sum(stage.epochs for stage in stages)
    if patience < printed.patience and not (patience >= cap and cap < printed.patience):
        found.append(f"patience {patience} of {printed.patience}")
    if cap < UNBOUNDED:
        reached = None if report is None else sum(trial.epochs >= cap for trial in report.trials)
        if reached is None or (report is not None and reached):
            by = "" if report is None else f", reached by {reached} of {len(report.trials)} trials"
            found.append(f"at most {cap} epochs{by}")
    tried = {
        "learning rate": (printed.learning_rate, grid.learning_rate if grid else (), stages[0].learning_rate),
        "batch size": (printed.batch_size, grid.batch_size if grid else (), training.batch_size),
        "dropout": (printed.dropout, grid.dropout if grid else (), config.network.dropout if config.network else 0.0),
        "cooling rate": ((), (), 0.0) if stages[0].rate is None else
                        (printed.rate, grid.rate if grid else (), stages[0].rate),
    }  # fmt: skip
    for name, (wanted, searched, fixed) in tried.items():
        ours: Sequence[float] = searched or (fixed,)
        if (missing := [value for value in wanted if value not in ours]) and not (
            name == "batch size" and config.cell.startswith("btg/s5")
        ):
            found.append(f"{name} {_listed(ours)} of {_listed(wanted)}" if len(missing) < len(wanted) else
                         f"{name} {_listed(ours)}, not {_listed(wanted)}")  # fmt: skip
    if report is not None and (stopped := report.environment.get("stopped_by_time")):
        found.append(f"{stopped} of {len(report.trials)} trials stopped by time")
    if planned < TRIALS:
        found.append(f"{planned} of {TRIALS} trials")
    return found


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
