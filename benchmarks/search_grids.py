"""The candidates that search_recipe.py compares: one grid per question, in chronological order."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from evalign.networks.mlp import Network
from evalign.training.recipes import Recipe, Stage, find_recipe

Inputs = Literal["standard", "quantile", "both", "bins", "clip"]
Changes = dict[str, dict[str, Any]]  # name -> fields that differ


@dataclass(frozen=True)
class Config:
    """A candidate; batches are the power of two nearest to `batch` x sqrt(training rows)."""

    name: str
    stages: tuple[Stage, ...]
    batch: float = 4.0
    dropout: float = 0.2
    hidden: tuple[int, ...] = (512, 256, 128)
    inputs: Inputs = "standard"
    watch: Literal["argmax", "plug_in"] = "argmax"  # the decision behind a stage's monitor "score"
    updates: int | None = None  # maximum number of updates, but at least 40 epochs
    sets: tuple[str, ...] | None = None  # data sets of the candidate; None for all
    network: Network = "mlp"
    ensemble: int = 1
    embedding: tuple[tuple[str, Any], ...] = ()  # options of TableEmbedding that differ

    def batch_size(self, rows: int) -> int:
        return int(2 ** round(math.log2(self.batch * math.sqrt(rows))))

    def recipe(self, rows: int) -> Recipe:
        return Recipe(self.name, "", self.stages, self.updates).for_rows(rows, self.batch_size(rows))

    def stack(self, rows: int) -> tuple[Any, ...]:
        """Configurations with equal keys train as one stacked network."""
        epochs = self.recipe(rows).epochs
        shape = (self.hidden, self.network, self.ensemble, self.embedding)
        return (self.batch_size(rows), shape, self.inputs, self.watch, round(epochs, -1))


def entropy_stage(**changes: Any) -> Stage:
    stage = Stage(
        "cross-entropy", metric=False, anchor=1.0, learning_rate=2e-3, epochs=60, patience=1000, monitor="entropy",
        decay="cosine",
    )  # fmt: skip
    return replace(stage, **changes)


def metric_stage(**changes: Any) -> Stage:
    stage = Stage(
        "metric", metric=True, anchor=1.0, learning_rate=5e-4, epochs=40, patience=1000, monitor="loss", decay="cosine"
    )
    return replace(stage, **changes)


def control(name: str, stage: dict[str, Any] | None = None, **changes: Any) -> Config:
    """Cross-entropy alone, for as many epochs as both stages of `anchored` take together."""
    return Config(name, (entropy_stage(**{"epochs": 100, **(stage or {})}),), **changes)


def anchored(
    name: str, metric: dict[str, Any] | None = None, entropy: dict[str, Any] | None = None, **changes: Any
) -> Config:
    return Config(name, (entropy_stage(**(entropy or {})), metric_stage(**(metric or {}))), **changes)


def factors() -> Iterator[Config]:
    """One factor at a time around a middle, for two kinds of input."""
    yield control("both", inputs="both")
    yield control("bins", inputs="bins")
    yield anchored("both metric", inputs="both")
    yield anchored("bins metric", inputs="bins")
    kinds: tuple[Inputs, ...] = ("standard", "quantile")
    for kind in kinds:
        yield control(kind, inputs=kind)
        for batch in (2, 8, 16):
            yield control(f"{kind} batch={batch}", inputs=kind, batch=batch)
        for dropout in (0.0, 0.1, 0.35, 0.5):
            yield control(f"{kind} dropout={dropout}", inputs=kind, dropout=dropout)
        for rate in (5e-4, 1e-3, 4e-3):
            yield control(f"{kind} lr={rate}", {"learning_rate": rate}, inputs=kind)
        for decay in (1e-4, 0.1, 0.3):
            yield control(f"{kind} decay={decay}", {"weight_decay": decay}, inputs=kind)
        for epochs in (50, 200):
            yield control(f"{kind} epochs={epochs}", {"epochs": epochs}, inputs=kind)
        for hidden in ((256, 128), (1024, 512, 256), (512, 512, 512)):
            yield control(f"{kind} hidden={'-'.join(map(str, hidden))}", inputs=kind, hidden=hidden)
        yield control(f"{kind} constant", {"decay": "none", "patience": 30, "learning_rate": 1e-3}, inputs=kind)
        yield control(f"{kind} score", {"monitor": "score"}, inputs=kind)
        yield anchored(f"{kind} metric", inputs=kind)
        of_metric: Changes = {
            "lr=1e-4": {"learning_rate": 1e-4},
            "lr=2e-4": {"learning_rate": 2e-4},
            "lr=1e-3": {"learning_rate": 1e-3},
            "anchor=0.1": {"anchor": 0.1},
            "anchor=0.3": {"anchor": 0.3},
            "anchor=3": {"anchor": 3.0},
            "T=0.1": {"temperature": 0.1},
            "T=0.35": {"temperature": 0.35},
            "rate=0.8": {"rate": 0.8, "patience": 4},
            "constant": {"learning_rate": 3e-4, "decay": "none", "rate": 0.8, "patience": 4},
            "score": {"monitor": "score"},
            "entropy": {"monitor": "entropy"},
        }
        for name, change in of_metric.items():
            yield anchored(f"{kind} metric {name}", change, inputs=kind)
        for name, changes in {"loss": {}, "score": {"monitor": "score"}}.items():
            yield anchored(f"{kind} metric plug-in {name}", changes, inputs=kind, watch="plug_in")


def inputs() -> Iterator[Config]:
    """Kinds of input, then one factor at a time with `both`, for the control and for `anchored`."""
    slow = {"learning_rate": 2e-4}
    kinds: tuple[Inputs, ...] = ("standard", "both", "clip", "bins")
    for kind in kinds:
        yield control(kind, inputs=kind)
        yield anchored(f"{kind} metric", slow, inputs=kind)
    of_control: Changes = {
        "lr=1e-3": {"learning_rate": 1e-3},
        "lr=4e-3": {"learning_rate": 4e-3},
        "decay=0.1": {"weight_decay": 0.1},
    }
    for name, change in of_control.items():
        yield control(f"both {name}", change, inputs="both")
    of_metric: Changes = {
        "lr=1e-4": {"learning_rate": 1e-4},
        "lr=5e-4": {"learning_rate": 5e-4},
        "anchor=0.3": {"anchor": 0.3},
        "anchor=3": {"anchor": 3.0},
        "anchor=10": {"anchor": 10.0},
        "T=0.1": {"temperature": 0.1},
        "rate=0.8": {"rate": 0.8, "patience": 4},
        "score": {"monitor": "score"},
        "entropy": {"monitor": "entropy"},
    }
    for name, change in of_metric.items():
        yield anchored(f"both metric {name}", {**slow, **change}, inputs="both")
    yield anchored("both metric 80+20", {**slow, "epochs": 20}, {"epochs": 80}, inputs="both")
    of_both: Changes = {
        "dropout=0.1": {"dropout": 0.1},
        "dropout=0.35": {"dropout": 0.35},
        "batch=2": {"batch": 2},
        "batch=8": {"batch": 8},
        "hidden=256-128": {"hidden": (256, 128)},
        "hidden=1024-512-256": {"hidden": (1024, 512, 256)},
    }
    for name, change in of_both.items():
        yield control(f"both {name}", inputs="both", **change)
        yield anchored(f"both metric {name}", slow, inputs="both", **change)
    for epochs in (50, 200):
        yield control(f"both epochs={epochs}", {"epochs": epochs}, inputs="both")
        yield anchored(
            f"both metric epochs={epochs}", {**slow, "epochs": epochs * 2 // 5}, {"epochs": epochs * 3 // 5},
            inputs="both",
        )  # fmt: skip


def large() -> Iterator[Config]:
    """For a set of many rows: how few epochs and how large batches suffice."""
    kinds: tuple[Inputs, ...] = ("standard", "both")
    for kind in kinds:
        for epochs in (20, 40, 100):
            for batch in (2, 4, 8) if epochs == 40 else (4,):
                name = f"{kind} epochs={epochs} batch={batch}"
                yield control(name, {"epochs": epochs}, inputs=kind, batch=batch)
                for rate in (2e-4, 5e-4):
                    metric = {"learning_rate": rate, "epochs": epochs * 2 // 5}
                    yield anchored(
                        f"{name} metric lr={rate}", metric, {"epochs": epochs * 3 // 5}, inputs=kind, batch=batch
                    )
        for dropout in (0.1, 0.35):
            yield control(f"{kind} epochs=40 dropout={dropout}", {"epochs": 40}, inputs=kind, dropout=dropout)
        for rate in (5e-4, 4e-3):
            yield control(f"{kind} epochs=40 lr={rate}", {"epochs": 40, "learning_rate": rate}, inputs=kind)


def recipes() -> Iterator[Config]:
    """Whole recipes for every set, all as long as each other: 200 epochs, or fewer where that is over 4000 updates."""
    slow, fast = {"learning_rate": 2e-4}, {"learning_rate": 5e-4}
    flat = {"decay": "none"}
    kinds: tuple[Inputs, ...] = ("standard", "both")
    for kind in kinds:
        for name, stages in {
            "cross-entropy": (entropy_stage(epochs=200),),
            "60+40 lr=2e-4": (entropy_stage(epochs=120), metric_stage(epochs=80, **slow)),
            "flat 60+40 lr=1e-3": (entropy_stage(epochs=120, **flat), metric_stage(epochs=80, learning_rate=1e-3)),
        }.items():
            yield Config(f"{kind} {name}", stages, inputs=kind, updates=4000)
    for name, stages in {
        "cross-entropy lr=1e-3": (entropy_stage(epochs=200, learning_rate=1e-3),),
        "lr=1e-3, 60+40 lr=2e-4": (entropy_stage(epochs=120, learning_rate=1e-3), metric_stage(epochs=80, **slow)),
        "60+40 lr=5e-4": (entropy_stage(epochs=120), metric_stage(epochs=80, **fast)),
        "80+20 lr=2e-4": (entropy_stage(epochs=160), metric_stage(epochs=40, **slow)),
        "80+20 lr=5e-4": (entropy_stage(epochs=160), metric_stage(epochs=40, **fast)),
        "60+40 anchor=3": (entropy_stage(epochs=120), metric_stage(epochs=80, anchor=3.0, **slow)),
        "60+40 cooling": (
            entropy_stage(epochs=120),
            metric_stage(epochs=80, rate=0.8, patience=5, max_stale=100, **slow),
        ),
        "flat 50+50 lr=1e-3": (
            entropy_stage(epochs=100, learning_rate=1e-3, **flat),
            metric_stage(epochs=100, learning_rate=1e-3),
        ),
        "joint": (metric_stage(epochs=200, learning_rate=2e-3),),
        "metric alone": (
            metric_stage(epochs=200, learning_rate=1e-3, anchor=0.0, decay="none", rate=0.9, patience=50),
        ),
    }.items():
        yield Config(f"both {name}", stages, inputs="both", updates=4000)


def finalists() -> Iterator[Config]:
    """The last candidates, for more splits of the noisy sets."""
    quick = {"epochs": 80, "learning_rate": 5e-4}
    for name, stages in {
        "cross-entropy": (entropy_stage(epochs=200),),
        "60+40 lr=5e-4": (entropy_stage(epochs=120), metric_stage(**quick)),
        "60+40 lr=5e-4 anchor=3": (entropy_stage(epochs=120), metric_stage(anchor=3.0, **quick)),
        "flat 60+40 lr=1e-3 anchor=3": (
            entropy_stage(epochs=120, decay="none"),
            metric_stage(epochs=80, learning_rate=1e-3, anchor=3.0),
        ),
    }.items():
        yield Config(f"both {name}", stages, inputs="both", updates=4000)


def networks() -> Iterator[Config]:
    """The default recipe with other networks: embeddings of numbers and categories, ensembles, both."""

    def candidate(name: str, factor: float = 1.0, **changes: Any) -> Config:
        recipe = find_recipe("anchored").scaled(factor)
        return Config(name, recipe.stages, inputs="both", updates=recipe.updates, **changes)

    bins: dict[str, Any] = {"network": "embedding"}
    narrow: dict[str, Any] = {"hidden": (256, 128)}
    eight: dict[str, Any] = {"ensemble": 8}
    yield candidate("mlp")
    yield candidate("mlp x8", **eight)
    yield candidate("embedding", **bins)
    yield candidate("embedding lr x0.5", 0.5, **bins)
    yield candidate("embedding dropout=0.35", dropout=0.35, **bins)
    yield candidate("embedding 256-128", **bins, **narrow)
    yield candidate("embedding x8", **bins, **eight)
    yield candidate("embedding x8 256-128", **bins, **eight, **narrow)
    few: dict[str, Any] = {"sets": ("yeast", "mammography", "letter", "adult")}
    yield candidate("embedding bins=24 width=8", embedding=(("bins", 24), ("width", 8)), **bins, **few)
    yield candidate("embedding bins=128 width=24", embedding=(("bins", 128), ("width", 24)), **bins, **few)


def embeddings() -> Iterator[Config]:
    """Parts of an embedding, by cross-entropy in a few epochs, small enough for a CPU; log-loss is most informative."""

    def candidate(name: str, **changes: Any) -> Config:
        stage = entropy_stage(epochs=20, learning_rate=1e-3)
        return Config(
            name, (stage,), inputs="both", batch=2, **{"hidden": (256, 128), "network": "embedding", **changes}
        )

    small = (("bins", 32), ("width", 8))
    yield candidate("mlp", network="mlp")
    yield candidate("bins=32 width=8 start=1", embedding=(*small, ("start", 1.0)))
    yield candidate("bins=32 width=8", embedding=small)
    yield candidate("bins=64 width=16")


GRIDS: dict[str, Callable[[], Iterator[Config]]] = {
    "factors": factors,
    "inputs": inputs,
    "large": large,
    "recipes": recipes,
    "finalists": finalists,
    "networks": networks,
    "embeddings": embeddings,
}
