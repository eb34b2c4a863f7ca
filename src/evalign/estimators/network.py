"""EASTClassifier: a scikit-learn classifier trained on the metric it is judged by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from evalign import checks, metrics
from evalign.decision import Rule
from evalign.estimators.base import Arrays, MetricClassifier
from evalign.networks.mlp import NETWORKS, MeanOfNetworks, Network, fields_of, table_network
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.tables.columns import Numeric
from evalign.tables.encode import TableEncoder
from evalign.tables.packed import EncodedTable, release_memory
from evalign.tables.split import Codes, Floats, TrainingRows
from evalign.training.batches import Rows, Score, argmax_score, default_batch_size, predict_logits
from evalign.training.in_memory import train
from evalign.training.loop import Epoch, OnEpoch
from evalign.training.recipes import Recipe, find_recipe
from evalign.training.stacked import FoldedRows, train_folds

ANNEALED = StepChoice("annealed")
EPOCHS = 60  # epochs of our recipes; 200 are no better (42 tables, -.001 +- .002 for 60)
FOLDS = 5
RARE = 100  # held-out rows of a class: the standard error of a share of one half is 0.05
MANY = 300_000  # rows; beyond about 200,000 a recipe's number of updates grows with the table


@dataclass(kw_only=True, eq=False, repr=False)
class EASTClassifier(MetricClassifier):
    """A network for tables, trained on a confusion-matrix metric, with a decision rule for it.

    Accepts arrays and data frames with numbers, strings, categories, booleans and missing values.

    Parameters
    ----------
    metric and the other parameters of every classifier: see `MetricClassifier`.
    recipe: "anchored" (cross-entropy, then metric + cross-entropy), "paper" (EAST as printed), "btg",
        "cross_entropy", "anchored_offset" (not for decision="plug_in"), or a `Recipe`; see docs/research/recipes.md.
    network: input of the layers: "mlp" the numbers themselves; "embedding" a learned piecewise linear curve of each
        number and a vector for each category.
    hidden, dropout: the network's layers.
    ensemble: number of networks trained on the same batches; predictions are the mean of their probabilities.
    batch_size: "auto" grows with the table.
    epochs: maximum in total; None is 60, or the number of a paper's recipe.
    learning_rate: of the first stage; those of the other stages are scaled with it. None is the recipe's.
    folds: k networks take k times the time of one on a CPU, about the same time on a GPU. "auto" is 5 where one
        division would hold out fewer than 100 rows of the rarest class and the table has at most 300,000 rows; else 1,
        as with amp=True, class offsets or a metric that is a function, which may not stack.
    numeric: numbers "standard" (scaled), "quantile" (ranked to a normal shape) or "both" (a column of each).
    amp: whether the network runs in bfloat16; worth it for wide layers on a GPU.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_`, `history_` (a row per epoch; of folds that of the
    first network), `temperature_` (of the weights kept, in the same way), `decision_` (the rule), `encoder_`,
    `network_`, `folds_` (how many networks were trained, one for each fold), and after `fit` only
    `held_out_predictions_` (what the decision was learned from).

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = EASTClassifier("f1", hidden=(32,), epochs=20, random_state=0).fit(X, y)
    >>> model.predict(X).shape, model.predict_proba(X).shape
    ((150,), (150, 3))
    >>> curves = EASTClassifier("f1", network="embedding", ensemble=2, hidden=(16,), epochs=20, random_state=0)
    >>> curves.fit(X, y).predict_proba(X).shape
    (150, 3)
    """

    FORMAT = "evalign.classifier"

    recipe: str | Recipe = "anchored"
    network: Network = "mlp"
    hidden: Sequence[int] = (256, 128)
    dropout: float = 0.2
    ensemble: int = 1
    batch_size: int | Literal["auto"] = "auto"
    epochs: int | None = None
    learning_rate: float | None = None
    folds: int | Literal["auto"] = "auto"
    numeric: Numeric = "both"
    amp: bool = False

    def export_onnx(self, path: str | Path) -> Path:
        """Export the network and its decision as an ONNX graph; see `evalign.estimators.onnx`."""
        from evalign.estimators.onnx import export_classifier

        check_is_fitted(self)
        return export_classifier(self, Path(path))

    # -- the parts of fit ---------------------------------------------------------------------------------------

    def _cross_fit(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        """Train `network_`: one on a single division, or one per fold; `on_epoch` gets the epochs of the first."""
        recipe = self.checked_recipe()
        self.folds_ = len(data.divisions)
        self.encoder_ = data.encoder(TableEncoder, numeric=self.numeric)
        p = (self._train_folds if self.folds_ > 1 else self._train_one)(data, recipe, on_epoch)
        release_memory()
        return p

    def _train_one(self, data: TrainingRows, recipe: Recipe, on_epoch: OnEpoch | None) -> Floats:
        """Train `network_` on one division; returns the probabilities of its validation rows."""
        (division,) = data.divisions

        def on_device(part: Codes, weight: Floats) -> Rows:
            x = self._encoded(data, part)
            return Rows(x, self._tensor(data.codes[part]), self._tensor(weight.astype(np.float32)))

        train_rows = on_device(division.train, division.train_weight)
        valid_rows = on_device(division.valid, division.valid_weight)
        size = self._batch_size(recipe, len(train_rows))
        recipe = recipe.for_rows(len(train_rows), size)
        release_memory()

        self.network_ = self.make_network(data.seed).to(self.torch_device)
        history = train(
            self.network_, train_rows, valid_rows, recipe, self.objective(), self._score(), batch_size=size,
            seed=data.seed, amp=self.amp, on_epoch=self._listener(on_epoch),
        )  # fmt: skip
        self._keep_history(history, recipe)
        return _predicted(self.network_, valid_rows.x)

    def _train_folds(self, data: TrainingRows, recipe: Recipe, on_epoch: OnEpoch | None) -> Floats:
        """Train a network for every division; returns each one's predictions of the rows that it held out."""
        folded = FoldedRows.of(partial(self._encoded, data), data.codes, data.divisions, self.torch_device)
        size = folded.batch_size(self._batch_size(recipe, len(folded.train[0])))
        recipe = recipe.for_rows(len(folded.train[0]), size)
        release_memory()
        if self.verbose:
            print(f"training {self.folds_} networks, one for each fold")
        trained = train_folds(
            self._new_network, folded, recipe, self.objective(), self._score(), batch_size=size, seed=data.seed,
            on_epoch=self._listener(on_epoch),
        )  # fmt: skip
        self.network_ = trained.network
        self._keep_history(trained.histories[0], recipe)
        return trained.held_out

    def _encoded(self, data: TrainingRows, places: Codes) -> EncodedTable:
        """Encoded rows of the table, packed on a CPU to save memory."""
        rows = data.rows[places]
        if self.torch_device.type == "cpu":
            packed: EncodedTable = self.encoder_.packed(data.X, rows=rows)
            return packed
        return torch.from_numpy(self.encoder_.transform(data.X, rows=rows)).to(self.torch_device)

    def _keep_history(self, history: list[Epoch], recipe: Recipe) -> None:
        self.history_ = [vars(epoch) for epoch in history]
        self.temperature_ = next((e.temperature for e in reversed(history) if e.best), recipe.stages[-1].temperature)

    def _batch_size(self, recipe: Recipe, rows: int) -> int:
        return self.batch_size if self.batch_size != "auto" else recipe.batch_size or default_batch_size(rows)

    def checked_recipe(self) -> Recipe:
        """The recipe for the given epochs and learning rate, after checking all options."""
        self._check_metric_and_decision()
        checks.check_number("dropout", self.dropout, low=0.0, high=1.0, open_high=True)
        checks.check_choice("network", self.network, NETWORKS)
        checks.check_number("ensemble", self.ensemble, low=1, whole=True)
        if self.network == "embedding" and self.numeric == "standard":
            raise ValueError(
                "network 'embedding' cuts numbers at their quantiles, which numeric 'standard' does not learn; "
                "use numeric='both' or 'quantile'"
            )
        if self.folds != "auto" and (
            type(self.folds) is bool or not isinstance(self.folds, Integral) or self.folds < 1
        ):
            raise ValueError(f"folds must be 'auto' or a whole number of at least 1, got {self.folds!r}")
        if self.batch_size != "auto":
            checks.check_number("batch_size", self.batch_size, low=1, whole=True)
        if self.epochs is not None:
            checks.check_number("epochs", self.epochs, low=1, whole=True)
        recipe = find_recipe(self.recipe)
        if recipe.updates is not None:  # one of ours, not a paper's
            short = recipe.limited(EPOCHS).stopping_early()
            recipe = replace(short, updates=recipe.updates) if self.epochs is None else recipe.stopping_early()
        recipe = recipe.limited(self.epochs)
        if self.decision == "plug_in":
            _check_plug_in(recipe)
        if self.learning_rate is not None:
            checks.check_number("learning_rate", self.learning_rate, low=0.0, open_low=True)
            recipe = recipe.scaled(self.learning_rate / recipe.stages[0].learning_rate)
        return recipe

    def _check_options(self) -> None:
        self.checked_recipe()

    def _fold_count(self, codes: Codes) -> int:
        """Number of folds; "auto" is 1 for what cannot be stacked."""
        recipe = self.checked_recipe()
        alone = "amp=True" if self.amp else None
        if recipe.has_offsets:
            alone = alone or f"the class offsets of recipe {recipe.name!r}"
        if self.folds != "auto":
            if alone and self.folds > 1:
                raise ValueError(f"folds are trained as one stack, which does not support {alone}; use folds=1")
            return int(self.folds)
        return 1 if alone or callable(self.metric) else automatic_folds(codes, self.validation_fraction)

    def make_network(self, seed: int) -> nn.Module:
        """A network for the table that `encoder_` was fitted on; with folds, that of one fold."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return self._new_network()

    def _new_network(self) -> nn.Module:
        return table_network(
            self.network, fields_of(self.encoder_), len(self.classes_), self.hidden, self.dropout,
            ensemble=self.ensemble,
        )  # fmt: skip

    def _score(self) -> Score:
        return argmax_score(metrics.resolve(self._training_metric, average=self._average, beta=self._beta))

    def _probabilities(self, X: Any, fold: int | None = None) -> Floats:
        network = self.network_
        if fold is not None and isinstance(network, MeanOfNetworks):
            network = network[fold]
        return _predicted(network, torch.from_numpy(self.encoder_.transform(X)).to(self.torch_device))

    def _joint_plug_in(self, p: Floats) -> Rule:
        if self.decision != "auto" and self.subject_to is None:  # not calibrated, and no rule of `fit` to fall back on
            _check_plug_in(find_recipe(self.recipe))
        return super()._joint_plug_in(p)

    def _content(self) -> tuple[Arrays, dict[str, Any]]:
        weights = {name: value.detach().cpu().contiguous() for name, value in self.network_.state_dict().items()}
        return weights, {"encoder": self.encoder_.to_json(), "folds": self.folds_}

    def _set_content(self, arrays: Arrays, fitted: dict[str, Any]) -> None:
        if str(self.device).startswith("cuda") and not torch.cuda.is_available():
            self.device = "auto"  # trained on a GPU, used on a machine without one
        self.encoder_, self.folds_ = TableEncoder.from_json(fitted["encoder"]), fitted["folds"]
        members = [self.make_network(seed=0) for _ in range(self.folds_)]
        self.network_ = members[0] if len(members) == 1 else MeanOfNetworks(members)
        self.network_.load_state_dict(arrays)
        self.network_.to(self.torch_device)

    def to(self, device: str) -> Self:
        """Predict on another device."""
        super().to(device)
        if not self.multilabel_:
            self.network_.to(self.torch_device)
        return self

    def objective(self) -> Objective:
        return Objective(self._training_metric, "multiclass", ANNEALED, average=self._average, beta=self._beta)

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.torch_device)


def _predicted(network: nn.Module, x: EncodedTable) -> Floats:
    p: Floats = predict_logits(network, x).double().softmax(1).cpu().numpy()
    return p


def _check_plug_in(recipe: Recipe) -> None:
    """Refuse a plug-in decision for probabilities that are not calibrated."""
    if recipe.has_offsets:
        raise ValueError(
            f"recipe {recipe.name!r} has class offsets, which move the probabilities to where argmax serves the "
            "metric; a plug-in decision would count them twice: use decision='auto', 'tuned' or 'argmax'"
        )


def automatic_folds(labels: Codes, fraction: float) -> int:
    """5 if holding out `fraction` leaves the rarest class fewer than `RARE` validation rows, else 1.

    Tables of more than `MANY` rows always get 1, since training five networks on them takes hours on a CPU.

    >>> automatic_folds(np.repeat([0, 1], [9000, 400]), 0.2), automatic_folds(np.repeat([0, 1], [9000, 600]), 0.2)
    (5, 1)
    """
    counts = np.bincount(labels)
    rarest = int(counts[counts > 0].min())
    return FOLDS if fraction * rarest < RARE and len(labels) <= MANY else 1
