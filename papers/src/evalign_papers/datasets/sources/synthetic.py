"""Synthetic 5 % and 33 %: two blobs in three dimensions, the positive one thinned; row for row the authors' sets.

BtG's supplement (4.1.1) says that "a randomly-sampled proportion of the positive data points" is removed. The authors'
released code does it with imbalanced-learn's `make_imbalance(random_state=42)`, which draws the positives to keep with
`RandomState(42).choice` and puts them behind the negatives. That takes three lines, so it is done here.
"""

import numpy as np
import pandas as pd

from evalign_papers.datasets.dataset import Card, Dataset, Protocol
from evalign_papers.datasets.folders import Store

SEED = 42


def _card(name: str, percent: str, share: float) -> Card:
    positives = int(share * 5000)
    return Card(
        name=name,
        title=f"Synthetic {percent}",
        kind="table",
        source="generated: sklearn.datasets.make_blobs",
        citation="Bridging the Gap, NeurIPS 2022, supplement 4.1.1",
        licence="none needed",
        rows=5000 + positives,
        num_classes=2,
        counts={"negative": 5000, "positive": positives},
        notes=(f"A share of {share:g} of the 5000 positives is kept; both protocols have the same rows.",),
    )


CARD_5, CARD_33 = _card("synthetic_5", "5 %", 0.05), _card("synthetic_33", "33 %", 0.5)


def load_5(store: Store, protocol: Protocol) -> Dataset:
    return _load(CARD_5, protocol)


def load_33(store: Store, protocol: Protocol) -> Dataset:
    return _load(CARD_33, protocol)


def _load(card: Card, protocol: Protocol) -> Dataset:
    from sklearn.datasets import make_blobs

    X, y = make_blobs(10000, centers=2, n_features=3, cluster_std=10, random_state=SEED)
    positive = np.flatnonzero(y == 1)
    # RandomState, not default_rng: its stream is frozen, and it is the one the authors' rows come from.
    kept = np.random.RandomState(SEED).choice(len(positive), card.counts["positive"], replace=False)
    rows = np.concatenate([np.flatnonzero(y == 0), positive[kept]])
    frame = pd.DataFrame(X[rows], columns=["x1", "x2", "x3"])
    return Dataset(card, frame, y[rows].astype(np.int64), tuple(card.counts), protocol)
