"""Fit a classifier on a stream: survey, encoder, training and decision."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from evalign.estimators.base import HeldOutPredictions
from evalign.estimators.network import EASTClassifier
from evalign.streaming.source import ParquetRows, Parts, gathered, own_rank, rank_count
from evalign.streaming.statistics import Survey, labels_of, survey
from evalign.streaming.stream_training import StreamBatches, epoch_updates, train_stream
from evalign.tables.files import TableError
from evalign.training.batches import Rows, default_batch_size
from evalign.training.evaluation import predict_logits
from evalign.training.loop import OnEpoch

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass
class Stream:
    """A data set, the partition of its rows, and the result of the first pass."""

    source: ParquetRows
    parts: Parts
    survey: Survey

    @classmethod
    def open(
        cls, source: ParquetRows, *, test_size: float = 0.2, validation_fraction: float = 0.2, seed: int
    ) -> "Stream":
        """Read all rows once; under torchrun every rank reads its share."""
        parts = Parts.for_rows(source.rows, test_size, validation_fraction, seed)
        return cls(source, parts, survey(source, source.share(own_rank(), rank_count()), parts))


def fit_stream(
    model: EASTClassifier, stream: Stream, *, checkpoint: Path | None = None, on_epoch: OnEpoch | None = None
) -> EASTClassifier:
    """Fit `model` as its options say, reading the rows in passes; the same on all ranks.

    Where `fit` differs: rows that are equal are not counted as one, validation rows are not taken by class, and there
    are no folds.
    """
    recipe = model.checked_recipe()
    if model.folds not in (1, "auto"):
        raise TableError(f"rows that are read in passes are not dealt into folds; use folds=1, got {model.folds}")
    model.folds_ = 1
    source, found = stream.source, stream.survey
    model.classes_ = found.classes
    model.class_order  # noqa: B018  (says so if pos_label is no label, before any training)
    model.encoder_ = found.statistics.encoder(model.numeric)
    model.n_features_in_, model.feature_names_in_ = len(source.features), np.array(source.features, dtype=object)
    rows = found.statistics.rows
    size = recipe.batch_size or default_batch_size(rows) if model.batch_size == "auto" else int(model.batch_size)
    updates = epoch_updates(rows, size)
    recipe = recipe.for_rows(updates * size, size)
    seed = stream.parts.seed

    def encode(frame: pd.DataFrame) -> Rows:
        return encoded(model, [frame], source)

    batches = StreamBatches(
        source, source.share(own_rank(), rank_count()), stream.parts, encode, max(1, size // rank_count())
    )
    valid = encoded(model, found.valid, source)
    if not sum(gathered(len(valid))):
        raise TableError(f"{source.path} has {source.rows} rows, of which none was held out; leave --stream out")
    model.network_ = model.make_network(seed).to(model.torch_device)
    history = train_stream(
        model.network_, batches, valid, recipe, model.objective(), updates=updates, seed=seed,
        checkpoint=checkpoint, on_epoch=on_epoch,
    )  # fmt: skip
    model.history_ = [vars(epoch) for epoch in history]
    model.temperature_ = next((e.temperature for e in reversed(history) if e.best), recipe.stages[-1].temperature)
    p, codes = probabilities(model, found.valid, source)
    return model.learn_decision(HeldOutPredictions(p, codes, np.ones(len(codes))))


def encoded(model: EASTClassifier, frames: Sequence[pd.DataFrame], source: ParquetRows) -> Rows:
    """Rows for the network, on its device."""
    width = sum(column.width for column in model.encoder_._columns)
    x = [np.zeros((0, width), np.float32), *(model.encoder_.transform(frame[source.features]) for frame in frames)]
    y = [np.zeros(0, np.int64), *(codes_of(model, frame, source.target) for frame in frames)]
    return Rows.of(
        torch.from_numpy(np.concatenate(x)).to(model.torch_device),
        torch.from_numpy(np.concatenate(y)).to(model.torch_device),
    )


def codes_of(model: EASTClassifier, frame: pd.DataFrame, target: str) -> Codes:
    """Labels as class codes of the network."""
    at = pd.Index(model.classes_).get_indexer(pd.Index(labels_of(frame[target], target)))
    assert (at >= 0).all()  # the survey has seen every row
    codes: Codes = model.class_order[at].astype(np.int64)
    return codes


def probabilities(model: EASTClassifier, frames: Sequence[pd.DataFrame], source: ParquetRows) -> tuple[Floats, Codes]:
    """Probabilities of held-out rows in the network's order and their labels, of all ranks."""
    rows = encoded(model, frames, source)
    p = predict_logits(model.network_, rows.x).double().softmax(1).cpu().numpy()
    parts = gathered((p, rows.y.cpu().numpy()))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
