"""skorch: a classifier with a metric as its criterion, and a callback that anneals and records the metric.

skorch's own classifiers do not know that `MetricLoss` takes logits, and return these as probabilities: use
`MetricNetClassifier`, or give `NeuralNetBinaryClassifier` `predict_nonlinearity=binary_probabilities`.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier
from skorch.callbacks import Callback
from skorch.dataset import unpack_data
from torch import Tensor

from evalign.accumulation import accumulate
from evalign.integrations.tracking import Tracker
from evalign.losses import MetricLoss


class MetricNetClassifier(NeuralNetClassifier):
    """skorch's classifier with `MetricLoss` as criterion: `MetricNetClassifier(Module, criterion__metric="mcc")`.

    The metric is F1 unless `criterion__metric` names another. The module returns logits: (N, C), or (N,), (N, 1) or
    (N, 2) with `criterion__task="binary"`, or (N, L) with `criterion__task="multilabel"`, whose `predict` gives 0/1 for
    every label. Options of the loss are `criterion__anchor`, `criterion__memory` and so on. With `parts` above 1 every
    batch is split into that many micro-batches, with the gradient of the whole.

    >>> MetricNetClassifier(torch.nn.Linear, criterion__metric="mcc").criterion.__name__
    'MetricLoss'
    """

    train_split: Any

    def __init__(
        self,
        module: Any,
        *args: Any,
        criterion: Any = MetricLoss,
        parts: int = 1,
        predict_nonlinearity: Any = "auto",
        **options: Any,
    ) -> None:
        if criterion is MetricLoss:
            options.setdefault("criterion__metric", "f1")
        super().__init__(module, *args, criterion=criterion, predict_nonlinearity=predict_nonlinearity, **options)
        self.parts = parts

    def _get_predict_nonlinearity(self) -> Callable[[Tensor], Tensor]:
        if self.predict_nonlinearity == "auto" and isinstance(self.criterion_, MetricLoss):
            return partial(probabilities, self.criterion_)
        chosen: Callable[[Tensor], Tensor] = super()._get_predict_nonlinearity()
        return chosen

    def get_split_datasets(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """As in skorch; labels of many columns cannot be stratified, which is skorch's default."""
        chosen = self.train_split
        if getattr(chosen, "stratified", False) and getattr(y, "ndim", 1) > 1:
            self.train_split = copy(chosen)
            self.train_split.stratified = False
        try:
            return super().get_split_datasets(X, y, **fit_params)
        finally:
            self.train_split = chosen

    def predict(self, X: Any) -> Any:
        """Labels: the most probable class, or 1 where a probability reaches the threshold of the loss."""
        loss = self.criterion_
        if not isinstance(loss, MetricLoss) or loss.task == "multiclass":
            return super().predict(X)
        p, threshold = self.predict_proba(X), loss.objective.thresholds
        yes = (p[:, 1] if loss.task == "binary" else p) >= (threshold if isinstance(threshold, float) else 0.5)
        return yes.astype("int64")

    def train_step_single(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        if self.parts == 1:
            step: dict[str, Any] = super().train_step_single(batch, **fit_params)
            return step
        self._set_training(True)
        x, y = unpack_data(batch)
        if not isinstance(x, Tensor) or not isinstance(self.criterion_, MetricLoss):
            raise TypeError(
                f"parts={self.parts} needs a tensor as input and a MetricLoss, got {type(x).__name__} and "
                f"{type(self.criterion_).__name__}; use parts=1"
            )
        predicted: list[Tensor] = []

        def forward(part: Tensor) -> Tensor:
            predicted.append(self.infer(part, **fit_params))
            return predicted[-1]

        y = y.to(self.device)
        split = list(zip(x.tensor_split(self.parts), y.tensor_split(self.parts), strict=True))
        loss = accumulate(self.criterion_, forward, split)
        return {"loss": loss, "y_pred": torch.cat(predicted[self.parts :]).detach()}


class MetricCallback(Callback):
    """Records `valid_<metric>` (hard), `valid_soft_<metric>` and `temperature` of every epoch, and anneals.

    Scores are those of all validation rows together. `schedule` makes a schedule, such as `annealing.Geometric`, from
    the loss; it follows the validation loss and ends training when finished. Save its `state_dict` in addition to
    `net.save_params`, whose `f_criterion` has temperature and memory.

    >>> MetricCallback().prefix
    'valid_'
    """

    def __init__(self, schedule: Callable[[MetricLoss], Any] | None = None, prefix: str = "valid_") -> None:
        self.schedule, self.prefix = schedule, prefix

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **options: Any) -> None:
        loss = net.criterion_
        if not isinstance(loss, MetricLoss):
            raise TypeError(f"criterion must be MetricLoss, got {type(loss).__name__}; set criterion=MetricLoss")
        plain = isinstance(net, (NeuralNetClassifier, NeuralNetBinaryClassifier))
        if (
            plain
            and not isinstance(net, MetricNetClassifier)
            and loss.from_logits
            and net.predict_nonlinearity == "auto"
        ):
            raise TypeError(
                f"{type(net).__name__} would return logits as probabilities: use MetricNetClassifier, or set "
                "predict_nonlinearity (binary_probabilities for binary tasks)"
            )
        self.tracker_ = Tracker(loss)
        self.handle_ = self.tracker_.listen()
        if self.schedule is not None and getattr(self, "schedule_", None) is None:
            self.schedule_ = self.schedule(loss)

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **options: Any) -> None:
        self.handle_.remove()
        self.tracker_.reset()

    def on_epoch_begin(self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **options: Any) -> None:
        self.tracker_.reset()

    def on_epoch_end(self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **options: Any) -> None:
        scores = self.tracker_.scores()
        net.history.record("temperature", self.tracker_.loss.temperature)
        for name, value in scores.items():
            if name != "loss":  # skorch records the mean over batches under this name
                net.history.record(self.prefix + name, value)
        if self.schedule is None or not scores:
            return
        self.schedule_.step(scores["loss"])
        if getattr(self.schedule_, "finished", False):
            raise KeyboardInterrupt  # how skorch ends training early

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.schedule_.state_dict()
        return state


def binary_probabilities(logits: Tensor) -> Tensor:
    """Probabilities of both classes from logits (N,) or (N, 1).

    >>> binary_probabilities(torch.zeros(1, 1))
    tensor([[0.5000, 0.5000]])
    """
    return probabilities(MetricLoss("f1", task="binary"), logits)


def probabilities(loss: MetricLoss, output: Tensor) -> Tensor:
    """Probabilities from the output of a module: (N, C), (N, 2) for binary tasks, or (N, L).

    >>> probabilities(MetricLoss("f1", task="binary"), torch.zeros(1))
    tensor([[0.5000, 0.5000]])
    """
    if loss.task == "multiclass":
        return output.softmax(loss.class_dim) if loss.from_logits else output
    if loss.task == "binary" and output.dim() > 1 and output.shape[1] == 2:
        return output.softmax(1) if loss.from_logits else output
    p = output.sigmoid() if loss.from_logits else output
    if loss.task == "multilabel":
        return p
    p = p.squeeze(1) if p.dim() > 1 else p
    return torch.stack([1 - p, p], 1)
