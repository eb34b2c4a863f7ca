"""Configs of image, graph and long-tail experiments: network, epochs and stages.

Hyperparameters are one point each, not a grid: 30 epochs of Darknet-19 on CIFAR-10 are what a grid point costs. The
paper's protocol has a constant learning rate, no augmentation, and keeps the epoch of lowest validation loss; the
honest one a cosine, augmentation, and the epoch of the best validation score. Three trials per cell.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalign.training.recipes import Stage
from evalign_papers.datasets.dataset import Protocol
from evalign_papers.datasets.sources.cifar10 import CLASSES
from evalign_papers.engine.config import VERSION, Config, Data, Grid, Method, Network, Training
from evalign_papers.engine.settings import COOLING, LONGER_BUDGET, PRINTED, PRINTED_BUDGET, UNBOUNDED
from evalign_papers.plans.table_plans import BTG_EPOCHS, HERE, METRIC, STAGE, at_printed_budget, btg

TABLES = {"btg": ["2", "3", "s12"], "east": ["1", "2", "4", "6"], "mf": ["1"], "checks": ["longtail"]}
YES_NO = ("cifar10_transportation", "cifar10_frog")
MANY = ("cifar10", "caltech101", "caltech256")
EPOCHS = {"cifar10": 30, "caltech101": 120, "caltech256": 120}
CALTECH = {"dog": 55, "frog": 79}  # codes of Caltech-256 (EAST, Table 4), which has 257 classes
BATCH = 256
TAIL_EPOCHS, TAIL_BATCH = 60, 128
BTG_EPOCHS |= {"cifar10_transportation": 25, "cifar10_frog": 25, "cocktailparty_graph": 500}
MACRO = {**METRIC, "average": "macro", "step": "annealed", "delta": 0.2, "threshold": None}
STRENGTHS = {"balanced_accuracy": (1.0, 1.5, 2.0), "f1": (0.5, 1.0)}  # the best of early runs lie inside


def yes_no(table: str, cell: str, name: str, protocol: str) -> dict[str, Any]:
    """BtG on images: Tiny Darknet, learning rate 1e-4, batches of 128."""
    found = btg(table, cell, name, protocol)
    honest = protocol == "honest"
    changes: dict[str, Any] = {"learning_rate": 1e-4, "patience": 25}
    if honest:
        changes = {"learning_rate": 1e-3, "patience": 25, "decay": "cosine", "monitor": "score"}
    stages = tuple(replace(stage, **changes) for stage in found["training"].stages)
    network = Network((), 0.0, "one", kind="tiny_darknet", augment=honest)
    return {**found, "network": network, "training": replace(found["training"], stages=stages, batch_size=128)}


def graph(table: str, cell: str, name: str, protocol: str) -> dict[str, Any]:
    """BtG's graph network: 32 wide, two rounds, batches of 64 frames."""
    found = btg(table, cell, name, protocol)
    training = replace(found["training"], batch_size=64)
    return {**found, "network": Network((32,), 0.0, "one", kind="graph"), "training": training}


def many(cell: str, name: str, protocol: str, *, anneals: bool) -> dict[str, Any]:
    """EAST and MF on images: Darknet-19, or principal components for other methods."""
    paper = protocol == "paper"
    if cell in ("forest", "ccs", "boosting"):
        names = {"forest": "random_forest", "boosting": "gradient_boosting"}
        return {"method": Method(names.get(cell, cell), {}), "quirks": (), "decide_for": "f1"}
    epochs = EPOCHS[name]
    stage = replace(STAGE, epochs=epochs, patience=epochs, step="annealed", weight_decay=1e-2)
    if not paper:
        stage = replace(stage, decay="cosine", monitor="score")
    quirks: tuple[str, ...] = ("one_split",) if paper else ()
    cooled = replace(stage, rate=0.9, patience=max(2, epochs // 15), max_stale=epochs)
    entropy = replace(stage, name="cross-entropy", metric=False, anchor=1.0)
    stages: tuple[Stage, ...] = (cooled,)
    method = Method("metric", MACRO)
    if cell == "ce":
        stages, method = (entropy,), Method("cross_entropy", {})
    elif cell == "dice":
        quirks = ("dice_per_sample", *quirks) if paper else quirks
        stages, method = (stage,), Method("dice", {"squash": True, "per_sample": paper})
    elif cell == "anchored":
        first = replace(entropy, epochs=2 * epochs // 3, patience=epochs)
        second = replace(stage, anchor=1.0, learning_rate=3e-4, epochs=epochs // 3, patience=epochs, cool_to=0.1)
        stages = (first, second)
    elif cell in ("f1", "accuracy", "mcc"):
        method = Method("metric", {**MACRO, "metric": cell})
    else:
        wanted, own = class_and_beta(cell)
        many_classes = name == "caltech256"
        beta = [1.0] * (257 if many_classes else len(CLASSES))
        beta[CALTECH[wanted] if many_classes else CLASSES.index(wanted)] = own
        method = Method("metric", {**MACRO, "metric": "fbeta", "beta": beta})
        if not anneals:  # MF: the slope is constant
            stages = (replace(stage, step="linear"),)
            method = Method("metric", {**method.options, "step": "linear"})
    decide_for = cell if cell in ("accuracy", "mcc") else "f1"
    network = Network((), 0.0, "classes", kind="darknet19", augment=not paper)
    training = Training(stages, BATCH, class_weight=False, oversample=False)
    return {"method": method, "network": network, "training": training, "quirks": quirks, "decide_for": decide_for}


def class_and_beta(cell: str) -> tuple[str, float]:
    """
    >>> class_and_beta("recall-frog"), class_and_beta("dog-beta-2_5")
    (('frog', 5.0), ('dog', 2.5))
    """
    first, _, rest = cell.partition("-")
    if first in ("precision", "recall"):
        return rest, 0.25 if first == "precision" else 5.0
    return first, float(rest.removeprefix("beta-").replace("_", "."))


def longtail(cell: str) -> dict[str, Any]:
    """Sixty epochs for every method; the strength of offsets is chosen on validation rows from the same values."""
    entropy = Stage(
        "cross-entropy", metric=False, anchor=1.0, learning_rate=1e-3, epochs=TAIL_EPOCHS, patience=TAIL_EPOCHS,
        monitor="last", decay="cosine",
    )  # fmt: skip
    both = replace(entropy, name="metric", metric=True, cool_to=0.07)
    goal = "f1" if cell.endswith("-f1") else "balanced_accuracy"
    method, weighted, grid = Method("metric", {**MACRO, "metric": goal}), False, None
    kind = cell.removesuffix("-f1")
    if kind in ("ce", "balanced"):
        method, weighted = Method("cross_entropy", {}), kind == "balanced"
        stages: tuple[Stage, ...] = (entropy,)
    elif kind == "adjusted":
        stages = (replace(entropy, offset=1.0),)  # of balanced accuracy: log prior
    elif kind == "east":
        stages = (replace(STAGE, epochs=TAIL_EPOCHS, patience=4, rate=0.9, max_stale=TAIL_EPOCHS, step="annealed",
                          decay="cosine", weight_decay=1e-2),)  # fmt: skip
    elif kind == "beside":
        stages = (both,)
    elif kind == "beside-offset":
        stages = (replace(both, offset=1.0),)
    elif kind == "staged-offset":
        third = TAIL_EPOCHS // 3
        first = replace(entropy, epochs=third, decay="none")
        second = replace(both, epochs=third, decay="none", cool_to=None, offset=1.0)
        stages = (first, second, replace(both, name="metric, offsets anew", epochs=third, offset=1.0))
    else:
        raise ValueError(f"checks-longtail: no plan for {cell!r}")
    if any(stage.offset for stage in stages):
        grid = Grid((), (), (), (), "score", "each", offset=STRENGTHS[goal])
    network = Network((), 0.0, "classes", kind="darknet19", augment=True)
    training = Training(stages, TAIL_BATCH, class_weight=weighted, oversample=False)
    return {"method": method, "network": network, "training": training, "grid": grid, "quirks": (), "decide_for": goal}


def cell_of(paper: str, table: str, cell: str, name: str, protocol: str) -> dict[str, Any]:
    if paper == "checks":
        return longtail(cell)
    if name in YES_NO:
        return yes_no(table, cell, name, protocol)
    if name == "cocktailparty_graph":
        return graph(table, cell, name, protocol)
    return many(cell, name, protocol, anneals=paper != "mf")


def data_of(paper: str, name: str, protocol: Any, parts: dict[str, Any]) -> Data:
    base, _, tail = name.partition("-")
    inputs: Any = "standard" if parts.get("network") else "components"
    return Data(base, protocol, {}, None, inputs, tail=int(tail) if tail else None)


def plan_images(paper: str, table: str) -> Iterator[tuple[Path, Config]]:
    """The configs of a table's images and graphs, also of our own rows that it borrows."""
    content = json.loads((HERE / paper / table / "table.json").read_text())
    chosen = [name for name in content["datasets"] if name in (*YES_NO, *MANY, "cocktailparty_graph") or "-" in name]
    for row in content["rows"]:
        ours = row.get("extra", False)
        if "from" in row and not ours:
            continue
        folder = row.get("from", f"{paper}/{table}")
        protocols: list[Protocol] = ["honest"] if ours and row["cell"] != "forest" else ["paper", "honest"]
        for name in chosen:
            for protocol in protocols:
                parts = cell_of(paper, table, row["cell"], name, protocol)
                where = f"{folder}/{protocol}/{name}.{row['cell']}"
                config = Config(
                    version=VERSION, cell=where, protocol=protocol, data=data_of(paper, name, protocol, parts),
                    trials=10 if name == "cocktailparty_graph" else 3, seed=0,
                    **{"network": None, "training": None, "grid": None, **parts},
                )  # fmt: skip
                yield HERE / f"{where}.json", config
                if paper in ("east", "mf") and protocol == "paper" and config.training and name != "caltech101":
                    yield HERE / f"{where}{PRINTED_BUDGET}.json", with_printed_grid(config)
                if name == "cifar10" and paper in ("east", "mf") and protocol == "paper" and config.training:
                    yield HERE / f"{where}{LONGER_BUDGET}.json", with_printed_patience(config)


def with_printed_patience(config: Config) -> Config:
    """The same cell at the printed patience, without a bound on epochs, at one point of the printed grid."""
    assert config.training is not None
    patience = PRINTED[config.cell.split("/")[0], "cifar10"].patience
    stages = tuple(
        replace(
            stage, learning_rate=1e-4, epochs=UNBOUNDED, patience=patience, max_stale=3,
            rate=0.9 if stage.rate is not None else None,
        )
        for stage in config.training.stages
    )  # fmt: skip
    training = replace(config.training, stages=stages, batch_size=256)
    return replace(config, cell=f"{config.cell}{LONGER_BUDGET}", training=training, grid=None)


def with_printed_grid(config: Config) -> Config:
    """The same cell with every number of the printed protocol; the grid is searched once, on the first trial."""
    assert config.training is not None
    cools = any(stage.rate is not None for stage in config.training.stages)
    rates = COOLING if cools else ()
    return at_printed_budget(replace(config, trials=10, grid=Grid((), (), rates, (), select="loss", search="once")))
