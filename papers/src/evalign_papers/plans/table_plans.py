"""Configs of tabular experiments: BtG, EAST, MF and our own checks."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalign.training.batches import default_batch_size
from evalign.training.recipes import Stage, find_recipe
from evalign_papers.datasets import find_card
from evalign_papers.datasets.dataset import Protocol
from evalign_papers.engine.config import VERSION, Config, Data, Grid, Method, Network, Training
from evalign_papers.engine.settings import (
    BTG,
    EAST,
    MF,
    POSITIVE_BUDGET,
    PRINTED_BUDGET,
    RELEASED_BUDGET,
    UNBOUNDED,
    printed_settings,
)

HERE = Path(__file__).parents[1] / "tables"
TABLES = {
    "btg": ["1", "4", "s4", "s5", "s6", "s7", "s9", "s11"],
    "east": ["1", "3"],
    "mf": ["2"],
    "checks": ["ablation", "scratch", "imbalance", "cooling", "text", "slope", "points"],
}
IMAGES = ("cifar10", "caltech256", "caltech101")  # the third replaces the second, which is not available
EXTRA = ("anchored", "ce", "forest", "boosting")
# The papers stop only by patience; a bound limits the cost of a stack, which runs as long as its longest trial.
BTG_EPOCHS = {
    "cocktailparty": 500,
    "adult": 300,
    "mammography": 500,
    "creditcard": 100,
    "synthetic_5": 300,
    "synthetic_33": 300,
}
EAST_EPOCHS = {"cocktailparty": 600, "adult": 120, "mammography": 600, "creditcard": 40}
LARGER = {"adult": (2048,)}
EAST_PATIENCE = {"cocktailparty": 20, "adult": 8, "mammography": 20, "creditcard": 5}

BTG_NETWORK = Network((32, 16), 0.5, "one")
EAST_NETWORK = Network((512, 256, 128), 0.25, "classes")
OUR_NETWORK = Network((512, 256, 128), 0.2, "classes")
BTG_QUIRKS = ("cut_logits", "mean_over_thresholds", "test_chooses", "auroc_of_cuts")
METRIC = {
    "metric": "f1",
    "average": "binary",
    "step": "linear",
    "delta": 0.1,
    "k": 10.0,
    "threshold": 0.5,
    "beta": None,
}
STAGE = Stage("metric", metric=True, anchor=0.0, learning_rate=1e-3, epochs=0, patience=100, weight_decay=0.0)
ENTROPY = replace(STAGE, name="cross-entropy", metric=False, anchor=1.0)


NO_CAP = {"adult"}  # stopped by patience only, as printed


def quirks_of_data(name: str, paper: bool) -> tuple[str, ...]:
    return ("adult_first_line",) if paper and name == "adult" else ()


def btg(table: str, cell: str, name: str, protocol: Any) -> dict[str, Any]:
    """A cell of Bridging the Gap: network 32-16, Adam 1e-3, batches of 1024, patience 100."""
    loss, _, rest = cell.partition("-")
    shape = "sigmoid" if "sigmoid" in rest else "linear"
    batch = int(cell.rpartition("-b")[2]) if "-b" in cell else 1024
    paper = protocol == "paper"
    quirks = (*BTG_QUIRKS, *quirks_of_data(name, paper)) if paper else ()
    epochs = UNBOUNDED if paper and name in NO_CAP else BTG_EPOCHS[name]
    stage = replace(STAGE, epochs=epochs, step=shape)
    decide_for = "accuracy" if loss == "accuracy" else "f1"
    if loss in ("f1", "f2", "f3", "accuracy", "auroc"):
        beta = {"f2": 2.0, "f3": 3.0}.get(loss)
        metric = "fbeta" if beta else loss
        if paper and rest != "text":
            quirks = ("released_soft_sets", *quirks)
            method = Method("released", {"metric": metric, "step": shape, "beta": beta})
        else:
            grid = [i / 10 for i in range(1, 10)] if loss == "auroc" else 0.5
            slope = slope_of(rest)
            stage = replace(stage, step="sigmoid" if "k" in slope else stage.step)
            options = {**METRIC, "metric": metric, "step": stage.step, "beta": beta, "threshold": grid, **slope}
            method = Method("metric", options)
    elif loss == "bce":
        method, stage = Method("cross_entropy", {}), replace(ENTROPY, epochs=epochs)
    elif loss == "dice":
        quirks = ("dice_per_sample", *quirks) if paper else quirks
        method = Method("dice", {"squash": rest != "logits", "per_sample": paper})
    elif loss == "wmw":
        quirks = ("wmw_of_positives", *quirks) if paper else quirks
        method = Method("wmw", {"gamma": 0.2, "p": 3.0, "of_positives": paper})
    elif loss == "ap_perf":
        method, batch = Method("ap_perf", {}), 20
        quirks = tuple(quirk for quirk in quirks if quirk != "adult_first_line")  # too slow to be run again
        stage = replace(STAGE, epochs=20, patience=5, learning_rate=3e-4)
    elif loss == "svm_perf":
        method = Method("svm_perf", {"loss": rest, "C": 1.0})
        return {
            "method": method,
            "quirks": tuple(q for q in quirks if q in ("auroc_of_cuts", "adult_first_line")),
            "decide_for": "f1",
        }
    else:
        raise ValueError(f"btg-{table}: no plan for {cell!r}")
    training = Training((stage,), batch, class_weight=table == "s9", oversample=table == "s11")
    return {"method": method, "network": BTG_NETWORK, "training": training, "quirks": quirks, "decide_for": decide_for}


def slope_of(rest: str) -> dict[str, Any]:
    """Options of the step that a cell is named after.

    >>> slope_of("delta-0_1"), slope_of("k-20"), slope_of("three-0_9"), slope_of("linear")
    ({'delta': 0.1}, {'k': 20.0}, {'step': 'three_points', 'threshold': 0.9}, {})
    """
    name, _, value = rest.partition("-")
    if name in ("delta", "k") and value:
        return {name: float(value.replace("_", "."))}
    if name in ("three", "five"):
        return {"step": "three_points" if name == "three" else "linear", "threshold": float(value.replace("_", "."))}
    return {}


def east(table: str, cell: str, name: str, protocol: Any) -> dict[str, Any]:
    """A cell of EAST: network 512-256-128, AdamW, a grid on validation data, geometric cooling."""
    paper = protocol == "paper"
    quirks = ("one_split", *quirks_of_data(name, paper)) if paper else ()
    if cell in ("ccs", "forest"):
        method = Method({"forest": "random_forest"}.get(cell, cell), {})
        own = ("macro_f1", *quirks_of_data(name, paper)) if paper else ()
        return {"method": method, "quirks": own, "decide_for": "f1"}
    small = name not in ("creditcard",)
    grid = Grid(
        (1e-3, 1e-4), (0.25, 0.5) if small else (), (0.8, 0.9) if cell not in ("ce", "dice") else (), (),
        select="loss" if paper else "score", search="once" if paper else "each",
    )  # fmt: skip
    larger = paper and name in LARGER
    if larger:  # the printed grid but for the small batches, which take most of its time
        grid = replace(grid, learning_rate=(1e-2, 1e-3, 1e-4), dropout=(0.25, 0.5), batch_size=LARGER[name])
    patience = {"2": MF.patience}.get(table, EAST.patience) if larger else EAST_PATIENCE[name]
    stage = replace(
        STAGE,
        epochs=UNBOUNDED if larger else EAST_EPOCHS[name],
        patience=patience,
        rate=0.9,
        step="annealed",
        weight_decay=1e-2,
    )
    if table == "2":  # MF: the slope is constant
        stage, grid = replace(stage, rate=None, step="linear"), replace(grid, rate=())
    if cell == "ce":
        method, stage = (
            Method("cross_entropy", {}),
            replace(stage, name="cross-entropy", metric=False, anchor=1.0, rate=None),
        )
    elif cell == "dice":
        method, stage = Method("dice", {"squash": True, "per_sample": paper}), replace(stage, rate=None)
        quirks = ("dice_per_sample", *quirks) if paper else quirks
    else:
        options = {
            **METRIC,
            "metric": cell,
            "average": "macro" if paper else "binary",
            "step": stage.step,
            "delta": 0.2,
            "threshold": None,
        }
        method = Method("metric", options)
    network = replace(EAST_NETWORK, outputs="one") if cell == "dice" else EAST_NETWORK
    training = Training((stage,), 1024, class_weight=False, oversample=False)
    decide_for = cell if cell in ("accuracy", "mcc") else "f1"
    return {
        "method": method,
        "network": network,
        "training": training,
        "grid": grid,
        "quirks": quirks,
        "decide_for": decide_for,
    }


def ours(cell: str, rows: int, average: str, inputs: str = "both") -> dict[str, Any]:
    """Our recipes at their defaults, whole or with one part taken out, and trees."""
    if cell in ("forest", "boosting"):
        return {
            "method": Method({"forest": "random_forest", "boosting": "gradient_boosting"}[cell], {}),
            "quirks": (),
            "decide_for": "f1",
        }
    batch = default_batch_size(round(0.64 * rows))
    entropy = cell == "ce"
    recipe = find_recipe("cross_entropy" if entropy else "paper" if cell == "f1" else "anchored")
    if cell == "f1":  # EAST as printed, as many epochs as ours
        stages = tuple(replace(stage, epochs=200, patience=20) for stage in recipe.stages)
    else:
        stages = recipe.for_rows(round(0.64 * rows), batch).stages
    options = {**METRIC, "average": average, "step": "annealed", "threshold": None}
    if cell == "no-anchor":
        stages = (stages[0], replace(stages[1], anchor=0.0))
    elif cell == "no-annealing":
        stages = (stages[0], replace(stages[1], cool_to=None))
    elif cell == "no-dynamic-threshold":
        options["threshold"] = 0.5
    elif cell == "no-soft-matrix":
        options["step"] = "identity"
    elif cell in ("linear", "cosine"):
        stages = (stages[0], replace(stages[1], cool_to=0.02, cooling="linear" if cell == "linear" else "cosine"))
    elif cell == "none":
        stages = (stages[0], replace(stages[1], cool_to=None))
    elif cell.startswith("geometric"):
        rate = float(cell.partition("-")[2].replace("_", "."))
        stages = (stages[0], replace(stages[1], cool_to=None, rate=rate, patience=3, max_stale=30))
    method = Method("cross_entropy", {}) if entropy else Method("metric", options)
    training = Training(stages, batch, class_weight=False, oversample=False)
    return {"method": method, "network": OUR_NETWORK, "training": training, "quirks": (), "decide_for": "f1"}


SCRATCH_EPOCHS = 500  # for schedules that cool independent of validation


def scratch(cell: str) -> dict[str, Any]:
    """EAST from scratch at its printed patience, one part or the schedule replaced; the batch size is fixed."""
    stage = replace(
        STAGE, epochs=UNBOUNDED, patience=EAST.patience, rate=0.9, step="annealed", weight_decay=1e-2
    )  # fmt: skip
    options = {**METRIC, "average": "macro", "step": "annealed", "delta": 0.2, "threshold": None}
    method = Method("metric", options)
    if cell == "ce":
        method = Method("cross_entropy", {})
        stage = replace(stage, name="cross-entropy", metric=False, anchor=1.0, rate=None)
    elif cell.startswith("geometric"):
        stage = replace(stage, rate=float(cell.partition("-")[2].replace("_", ".")))
    elif cell in ("linear", "cosine"):
        stage = replace(
            stage, rate=None, cool_to=0.02, cooling="linear" if cell == "linear" else "cosine", epochs=SCRATCH_EPOCHS,
            patience=SCRATCH_EPOCHS,
        )  # fmt: skip
    elif cell == "no-annealing":
        stage = replace(stage, rate=None)
    elif cell == "no-dynamic-threshold":
        method = replace(method, options={**options, "threshold": 0.5})
    elif cell == "no-soft-matrix":
        method, stage = replace(method, options={**options, "step": "identity"}), replace(stage, rate=None)
    elif cell != "east":
        raise ValueError(f"checks-scratch: no plan for {cell!r}")
    return {
        "method": method,
        "network": EAST_NETWORK,
        "training": Training((stage,), 1024, class_weight=False, oversample=False),
        "grid": Grid(EAST.learning_rate, EAST.dropout, (), (), select="loss", search="once"),
        "quirks": (),
        "decide_for": "f1",
    }


def data_of(name: str, protocol: Any, inputs: Any) -> tuple[Data, int, int]:
    """The data set, its rows and its classes; `creditcard-100` is creditcard thinned to 1 : 100."""
    base, _, ratio = name.partition("-")
    if ratio:
        base = "blobs" if base == "synthetic" else base
        positives, negatives = (492, 284_315) if base == "creditcard" else (200_000, 200_000)
        odds = int(ratio)
        rows = positives * (odds + 1) if negatives >= odds * positives else negatives + negatives // odds
        return Data(base, protocol, {}, odds, inputs), rows, 2
    card = find_card(name)
    return Data(name, protocol, {}, None, inputs), card.rows, card.num_classes


def plan(paper: str, table: str) -> Iterator[tuple[Path, Config]]:
    content = json.loads((HERE / paper / table / "table.json").read_text())
    for row in content["rows"]:
        cell = row["cell"]
        if "from" in row:
            continue
        for name in content["datasets"]:
            if name in IMAGES:
                continue
            of_btg = paper == "checks" and table in ("text", "slope", "points")
            extra = (paper == "checks" and not of_btg) or (row.get("extra", False) and cell in EXTRA)
            protocols: list[Protocol] = (
                list(content.get("protocols", ["paper", "honest"]))
                if of_btg
                else (["honest"] if extra and not (paper == "east" and cell == "forest") else ["paper", "honest"])
            )
            for protocol in protocols:
                from_scratch = (paper, table) == ("checks", "scratch")
                inputs = "both" if extra and not from_scratch and cell not in ("forest", "boosting") else "standard"
                data, rows, classes = data_of(name, protocol, inputs)
                if from_scratch:
                    parts = scratch(cell)
                elif extra and protocol == "honest":
                    parts = ours(cell, rows, "binary" if classes == 2 else "macro")
                else:
                    parts = (btg if paper == "btg" or of_btg else east)(table, cell, name, protocol)
                where = f"{paper}/{table}/{protocol}/{name}.{cell}"
                full = {"network": None, "training": None, "grid": None, **parts}
                config = Config(
                    version=VERSION, cell=where, protocol=protocol, data=data, trials=10, seed=0, **full
                )  # fmt: skip
                yield HERE / f"{where}.json", config
                capped = config.training is not None and (cell == "ap_perf" or name not in NO_CAP)
                if (paper == "btg" or table == "text") and protocol == "paper" and capped:
                    yield HERE / f"{where}{RELEASED_BUDGET}.json", at_released_budget(config)
                if paper in ("east", "mf") and protocol == "paper" and config.grid is not None:
                    yield HERE / f"{where}{PRINTED_BUDGET}.json", at_printed_budget(config)
                    if (paper, name) == ("east", "creditcard") and cell != "dice":
                        yield from larger_budgets(where, config)
                    if name == "adult" and cell == "f1":
                        yield from positive_class(where, config)
                    if name in ("cocktailparty", "mammography") and cell == "f1":
                        positive = f"{where}{POSITIVE_BUDGET}"
                        yield HERE / f"{positive}.json", of_positives(at_printed_budget(config), positive)


def larger_budgets(where: str, config: Config) -> Iterator[tuple[Path, Config]]:
    """Credit card: the printed protocol with batches of 8192 only; F1 macro and of the positive class."""
    full = at_printed_budget(config)
    assert full.grid is not None
    larger = replace(full, cell=f"{where}@larger", grid=replace(full.grid, batch_size=(8192,)))
    yield HERE / f"{where}@larger.json", larger
    if config.method.options.get("metric") == "f1":
        yield HERE / f"{where}@larger-positive.json", of_positives(larger, f"{where}@larger-positive")


def positive_class(where: str, config: Config) -> Iterator[tuple[Path, Config]]:
    """Adult trained on the F1 of the positive class: the same budget, and one short run at a single point."""
    assert config.training is not None
    yield HERE / f"{where}@larger-positive.json", of_positives(config, f"{where}@larger-positive")
    stages = tuple(replace(stage, epochs=120, patience=EAST_PATIENCE["adult"]) for stage in config.training.stages)
    short = replace(config, grid=None, training=replace(config.training, stages=stages, batch_size=LARGER["adult"][0]))
    yield HERE / f"{where}@short-positive.json", of_positives(short, f"{where}@short-positive")


def of_positives(config: Config, cell: str) -> Config:
    method = replace(config.method, options={**config.method.options, "average": "binary"})
    return replace(config, cell=cell, method=method)


def at_released_budget(config: Config) -> Config:
    """The same cell as the released code trains it: patience 100, 5000 epochs at most."""
    assert config.training is not None
    stages = tuple(replace(stage, epochs=5000, patience=BTG.patience) for stage in config.training.stages)
    return replace(
        config, cell=f"{config.cell}{RELEASED_BUDGET}", training=replace(config.training, stages=stages),
        quirks=tuple(dict.fromkeys((*config.quirks, *quirks_of_data(config.data.name, paper=True)))),
    )  # fmt: skip


def at_printed_budget(config: Config) -> Config:
    """A separate config of the cell with every number of the printed protocol."""
    printed, grid, training = printed_settings(config), config.grid, config.training
    assert printed is not None
    assert grid is not None
    assert training is not None
    stages = tuple(replace(stage, epochs=UNBOUNDED, patience=printed.patience) for stage in training.stages)
    searched = replace(
        grid, learning_rate=printed.learning_rate, dropout=printed.dropout, batch_size=printed.batch_size,
        rate=printed.rate if grid.rate else (),
    )  # fmt: skip
    return replace(
        config, cell=f"{config.cell}{PRINTED_BUDGET}", grid=searched, training=replace(training, stages=stages)
    )
