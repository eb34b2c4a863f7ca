"""Fit a classifier on a stream: survey, encoder, batches shuffled within a buffer, training and decision."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evalign.checks import represents, safe_divide
from evalign.confusion import Confusion
from evalign.distributed import Sync, all_summed, resolve
from evalign.estimators.network import EASTClassifier
from evalign.objective import Objective, cross_entropy
from evalign.streaming.source import Chunk, ParquetRows, Parts, RowGroup, gathered, own_rank, rank_count
from evalign.streaming.statistics import Survey, labels_of, survey
from evalign.tables.files import TableError
from evalign.tables.split import Codes, Floats, HeldOutPredictions
from evalign.training.batches import Batches, Rows, Term, argmax_score, default_batch_size, predict_logits
from evalign.training.checkpoint import Checkpoint, identify
from evalign.training.in_memory import InMemory, Phase, batch_loss, mean_over_members
from evalign.training.loop import Epoch, OnEpoch, Run
from evalign.training.offsets import next_offset, of_matrix, with_offset
from evalign.training.recipes import UPDATES, Recipe, Stage

BUFFER = 65_536  # rows shuffled together
VALIDATION = 0.2  # share of the rows that are not for testing
LANES = 8  # row groups read at a time, because neighbouring rows of a file are often similar

Encode = Callable[[pd.DataFrame], Rows]


@dataclass(frozen=True)
class StreamBatches:
    """Endless batches of about `size` rows; every training row is in one batch of a pass.

    A pass reads the row groups in random order, `LANES` of them in turn, and shuffles the rows in the buffer. The seed
    and the number of previous batches determine everything, so a position is a single number: `start_at` reads up to
    it, without encoding, and continues from there.
    """

    source: ParquetRows
    groups: Sequence[RowGroup]
    parts: Parts
    encode: Encode
    size: int
    buffer: int = BUFFER

    def start_at(self, position: int) -> Iterator[Rows]:
        """Batches from this position on."""
        passed = 0
        for number in itertools.count():
            before = passed
            for block, chunks in enumerate(self._blocks(number)):
                marks = [self.parts.train_rows(chunk.numbers) for chunk in chunks]
                rows = sum(int(mark.sum()) for mark in marks)
                count = max(1, round(rows / self.size)) if rows else 0
                if passed + count > position:
                    yield from self._batches((number, block), chunks, marks, count, skip=max(0, position - passed))
                passed += count
            if passed == before:
                raise TableError(f"{self.source.path} has no training rows among the row groups of this rank")

    def _blocks(self, number: int) -> Iterator[list[Chunk]]:
        """The successive contents of the buffer in one pass."""
        order = np.random.default_rng([self.parts.seed, number]).permutation(len(self.groups))
        held: list[Chunk] = []
        rows = 0
        for chunk in self.source.chunks([self.groups[i] for i in order], LANES):
            held.append(chunk)
            rows += chunk.batch.num_rows
            if rows >= self.buffer:
                yield held
                held, rows = [], 0
        if held:
            yield held

    def _batches(
        self, position: tuple[int, int], chunks: list[Chunk], marks: list[np.ndarray], count: int, skip: int
    ) -> Iterator[Rows]:
        parts = [self.encode(chunk.frame(mark)) for chunk, mark in zip(chunks, marks, strict=True) if mark.any()]
        rows = Rows(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y", "weight")))
        order = torch.from_numpy(np.random.default_rng([self.parts.seed, *position]).permutation(len(rows)))
        for index in order.tensor_split(count)[skip:]:
            yield rows[index.to(rows.y.device)]


def step_loss(network: nn.Module, batch: Rows, phase: Phase) -> Tensor:
    """The loss of all ranks' batches; averaged over ranks, its gradients equal those of one process with all rows."""
    sync = resolve("auto", training=True)
    if sync is None:
        return batch_loss(network, batch, phase)
    stage, objective, temperature, offset = phase
    assert isinstance(objective, Objective)
    z = with_offset(network(batch.x), offset, "multiclass")

    def loss_of(z: Tensor) -> Tensor:
        if stage.metric:
            return objective.of_sums(sync(objective.sums(z, batch.y, batch.weight, temperature)))
        return stage.anchor * _mean_entropy(z, batch, sync)

    return mean_over_members(loss_of, z, "multiclass")


def _mean_entropy(z: Tensor, batch: Rows, sync: Sync) -> Tensor:
    """Cross-entropy of all ranks' rows; batches of ranks may differ by a row, so means must not be averaged."""
    mass = batch.weight.sum()
    own = torch.stack([cross_entropy(z, batch.y, batch.weight, "multiclass") * mass, mass])
    total = represents(all_summed(own.detach(), sync.group), own, sync.ranks)
    return safe_divide(total[0], total[1])


@torch.no_grad()
def validate(network: nn.Module, rows: Rows, phase: Phase) -> tuple[dict[str, float], Tensor]:
    """Loss at this temperature, cross-entropy and hard score of all ranks' rows, and their confusion matrix."""
    stage, objective, temperature, offset = phase
    assert isinstance(objective, Objective)
    logits = predict_logits(network, rows.x)
    soft = objective.sums(with_offset(logits, offset, "multiclass"), rows.y, rows.weight, temperature)
    entropy = cross_entropy(logits, rows.y, rows.weight, "multiclass") * soft.weight
    matrix = Confusion.hard(logits.argmax(1), rows.y, logits.shape[1], sample_weight=rows.weight).matrix
    own = torch.cat([soft.vector.double(), entropy.double().reshape(1), matrix.double().reshape(-1)])
    total = all_summed(own) if rank_count() > 1 else own
    size = soft.vector.numel()
    summed = soft.with_vector(total[:size])
    matrix = total[size + 1 :].reshape(matrix.shape).cpu()
    entropy = safe_divide(total[size], summed.weight)
    loss = objective.of_sums(summed) if stage.metric else stage.anchor * safe_divide(summed.entropy, summed.weight)
    score = objective.score(of_matrix(matrix))
    return {"loss": float(loss), "entropy": float(entropy), "score": float(score)}, matrix


EPOCHS = 40  # at least, for early stopping and for resuming


def epoch_updates(rows: int, batch_size: int) -> int:
    """Updates per epoch: those of a pass over `rows` training rows, or fewer if a pass is long.

    If one pass has more updates than training allows, training is one pass in forty epochs.

    >>> [epoch_updates(n, 4096) for n in (10_000, 1_000_000, 20_000_000, 1_000_000_000)]
    [2, 100, 123, 6104]
    """
    whole = max(1, round(rows / batch_size))
    return min(whole, math.ceil(max(UPDATES, whole) / EPOCHS))


def train_stream(
    network: nn.Module,
    batches: StreamBatches,
    valid: Rows,
    recipe: Recipe,
    objective: Objective,
    *,
    updates: int,
    seed: int,
    checkpoint: Path | None = None,
    on_epoch: OnEpoch | None = None,
) -> list[Epoch]:
    """Train `network` by the stages of `recipe`, in epochs of `updates` batches; it ends with its best weights.

    With `checkpoint` the first rank writes everything there after every epoch, and training resumes from a file of its
    own: the position in the stream follows from the number of epochs. Several ranks share each batch. Ctrl-C ends
    training and keeps the best weights so far.
    """
    source, file = StreamRows(network, batches, valid, objective, updates, seed), None
    if checkpoint is not None:
        ranks = {"rows": [batches.source.rows, updates], "ranks": rank_count()}
        file = Checkpoint(checkpoint, {**identify(recipe.stages, seed, batches.size, network), **ranks})
    with torch.random.fork_rng():
        alone, first = rank_count() == 1, own_rank() == 0
        return source.run(recipe.stages, checkpoint=file, saves=first, on_epoch=on_epoch, catch_interrupt=alone)


class StreamRows(InMemory):
    """A `training.loop.Source` of one network on a stream; validation rows are in memory, each rank has its own."""

    def __init__(
        self, network: nn.Module, batches: StreamBatches, valid: Rows, objective: Objective, updates: int, seed: int
    ) -> None:
        # Neither training rows nor a generator of batches: those follow from seed and position.
        super().__init__(
            network, valid, valid, objective, "multiclass", argmax_score(objective.score), Batches(1, 1, seed=seed)
        )
        self.stream, self.updates, self.seed = batches, updates, seed
        # DDP averages the gradients; the network itself keeps its parameter names, and is what is saved.
        self.model = DistributedDataParallel(network) if rank_count() > 1 else network
        self.upcoming: Iterator[Rows] | None = None

    def run_updates(self, run: Run, phase: Phase) -> Tensor:
        # The seed differs by epoch, so that a resumed one has the same dropout masks, and by rank.
        torch.manual_seed((self.seed * 1_000_003 + len(run.history)) * 1009 + own_rank())
        self.model.train()
        if self.upcoming is None:
            self.upcoming = self.stream.start_at(len(run.history) * self.updates)
        return self.update_on(itertools.islice(self.upcoming, self.updates), run, phase)

    def loss(self, batch: Rows, phase: Phase) -> Tensor:
        return step_loss(self.model, batch, phase)

    def validate(self, phase: Phase) -> dict[str, float]:
        return validate(self.network, self.valid, phase)[0]

    def estimate_offset(self, objective: Objective | Term, stage: Stage) -> Tensor:
        assert isinstance(objective, Objective)
        matrix = validate(self.network, self.valid, Phase(stage, objective, stage.temperature))[1]
        return next_offset(matrix, objective, stage, self.offset).to(self.valid.x.device)


@dataclass
class Stream:
    """A data set, the partition of its rows, and the result of the first pass."""

    source: ParquetRows
    parts: Parts
    survey: Survey

    @classmethod
    def open(cls, source: ParquetRows, *, test_size: float = 0.2, seed: int) -> "Stream":
        """Read all rows once; under torchrun every rank reads its share."""
        parts = Parts.for_rows(source.rows, test_size, VALIDATION, seed)
        return cls(source, parts, survey(source, source.share(own_rank(), rank_count()), parts))


def fit_stream(
    model: EASTClassifier, stream: Stream, *, checkpoint: Path | None = None, on_epoch: OnEpoch | None = None
) -> EASTClassifier:
    """Fit `model` with its options, reading the rows in passes; the result is the same on all ranks.

    Unlike `fit`, it does not merge equal rows, stratify the validation rows or train folds.
    """
    recipe = model.checked_recipe()
    if model.folds not in (1, "auto"):
        raise TableError(f"rows read in passes are not split into folds; use folds=1, got {model.folds}")
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
        raise TableError(f"{source.path} has {source.rows} rows, too few to hold any out; remove --stream")
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
    width = sum(column.width for column in model.encoder_.columns_)
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
