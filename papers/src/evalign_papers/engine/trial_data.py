"""The rows of every trial, split and encoded according to its config."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalign.tables.encode import TableEncoder
from evalign_papers.datasets import Card, DataError, Dataset, Split, find_card, load, open_store, splits
from evalign_papers.datasets.dataset import Graphs
from evalign_papers.engine.config import Config

Matrix = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """One trial's rows: features scaled by the training rows, labels 0 … C - 1, (n,) or (n, E) for graphs."""

    trial: int
    train: Matrix
    train_y: Ints
    valid: Matrix
    valid_y: Ints
    test: Matrix
    test_y: Ints
    names: tuple[str, ...] = ()  # of the classes

    def seed(self, config: Config) -> int:
        return config.seed + self.trial


def dataset_of(config: Config, data_dir: str | Path | None) -> Dataset:
    """The data set of a config, with the quirk of its loader if the config names it."""
    data = config.data
    options = data.options | ({"first_line": True} if "adult_first_line" in config.quirks else {})
    return _loaded(data.name, data.protocol, tuple(sorted(options.items())), data.ratio, str(data_dir or ""))


def absent_data(configs: Iterable[Config], data_dir: str | Path | None) -> dict[str, str]:
    """Data sets of configs that are neither here nor can be downloaded, each with the reason.

    Each is searched once, so that no cell waits for a download that has already failed.
    """
    store, reasons = open_store(data_dir), dict[str, str]()
    for name in dict.fromkeys(config.data.name for config in configs):
        if name == BLOBS.name or find_card(name).generated or store.find(find_card(name)) is not None:
            continue
        try:
            load(name, data_dir)  # downloads it
        except DataError as error:
            reasons[name] = str(error)
    return reasons


@lru_cache(maxsize=2)  # a table's cells are ordered by data set
def _loaded(name: str, protocol: Any, options: tuple[Any, ...], ratio: int | None, data_dir: str) -> Dataset:
    dataset = many_blobs() if name == BLOBS.name else load(name, data_dir or None, protocol, **dict(options))
    return dataset if ratio is None else thinned(dataset, ratio)


BLOBS = Card(
    name="blobs", title="Synthetic, 200 000 negatives", kind="table", source="generated: sklearn.datasets.make_blobs",
    citation="after Bridging the Gap, NeurIPS 2022, supplement 4.1.1", licence="none needed", rows=400_000,
    num_classes=2, counts={"negative": 200_000, "positive": 200_000},
)  # fmt: skip


def many_blobs() -> Dataset:
    """The papers' two blobs with enough negatives to be thinned to 1 : 10 000."""
    import pandas as pd
    from sklearn.datasets import make_blobs

    X, y = make_blobs(BLOBS.rows, centers=2, n_features=3, cluster_std=10, random_state=42)
    return Dataset(BLOBS, pd.DataFrame(X, columns=["x1", "x2", "x3"]), y.astype(np.int64), tuple(BLOBS.counts))


def thinned(dataset: Dataset, ratio: int, seed: int = 0) -> Dataset:
    """Two classes at 1 : ratio: the surplus of positives or negatives is left out, drawn once.

    Positives are subsampled if there are too many; otherwise negatives are.
    """
    positive, negative = (np.flatnonzero(dataset.y == label) for label in (1, 0))
    random = np.random.default_rng(seed)
    if len(negative) >= ratio * len(positive):
        negative = random.choice(negative, ratio * len(positive), replace=False)
    else:
        positive = random.choice(positive, len(negative) // ratio, replace=False)
    rows = np.sort(np.concatenate([positive, negative]))
    X, y = dataset.take(rows)
    groups = None if dataset.groups is None else dataset.groups[rows]
    return replace(
        dataset, X=X, y=y, groups=groups, official_test=None, notes=(*dataset.notes, f"thinned to 1:{ratio}")
    )


def parts(config: Config, data_dir: str | Path | None, trials: list[int] | None = None) -> Iterator[Part]:
    """The parts of `trials`, or of all; the quirk "one_split" gives every trial the first one's rows."""
    dataset = dataset_of(config, data_dir)
    wanted = list(range(config.trials)) if trials is None else trials
    if "one_split" in config.quirks:
        first = _part(dataset, next(iter(splits(dataset, 1, config.seed))), config, 0)
        yield from (replace(first, trial=trial) for trial in wanted)
        return
    for trial, split in enumerate(splits(dataset, max(wanted) + 1, config.seed)):
        if trial in wanted:
            yield _part(dataset, split, config, trial)


def _part(dataset: Dataset, split: Split, config: Config, trial: int) -> Part:
    y, inputs, names = [dataset.y[rows] for rows in split], config.data.inputs, tuple[str, ...]()
    if isinstance(dataset.X, Graphs):
        whole = graph_rows(dataset.X, split.train)
        x = [whole[rows] for rows in split]
    elif isinstance(dataset.X, np.ndarray):
        if inputs != "components":
            raise ValueError(f"images need a network for images or the inputs 'components', got {inputs!r}")
        x, names = components(dataset.X, split), dataset.classes
    else:
        if inputs == "components":
            raise ValueError(f"inputs 'components' are those of images, {dataset.name} has none; use 'standard'")
        encoder = TableEncoder(numeric=inputs).fit(dataset.X, rows=split.train)
        x = [encoder.transform(dataset.X, rows=rows) for rows in split]
    return Part(trial, x[0], y[0], x[1], y[1], x[2], y[2], names)


def graph_rows(graphs: Graphs, train: Ints) -> Matrix:
    """Graphs as rows, the nodes' features and then the pairs', each feature scaled by all nodes of `train`."""
    found = []
    for features in (graphs.nodes, graphs.pairs):
        mean, std = features[train].mean((0, 1)), features[train].std((0, 1))
        found.append(((features - mean) / np.where(std > 0, std, 1)).reshape(len(features), -1))
    return np.concatenate(found, axis=1).astype(np.float32)


def components(pictures: NDArray[np.uint8], split: Split, share: float = 0.8) -> list[Matrix]:
    """The principal components of the training images that hold `share` of their variance (EAST, Table 2)."""
    from sklearn.decomposition import PCA

    x = [pictures[rows].reshape(len(rows), -1).astype(np.float32) / 255 for rows in split]
    solver = "covariance_eigh" if len(x[0]) > x[0].shape[1] else "full"
    model = PCA(share, svd_solver=solver).fit(x[0])
    return [model.transform(part).astype(np.float32) for part in x]
