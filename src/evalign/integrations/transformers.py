"""Hugging Face's Trainer: metric losses with exact gradient accumulation, and a callback that anneals.

The Trainer has two traps: it assumes that a `compute_loss_func` has already divided by the number of items of all
micro-batches, and does not divide by the accumulation steps; and with several processes it multiplies by their number.
`MetricTrainer` computes its own loss, and `loss_function` divides as the Trainer expects.

Token heads return (N, T, C), with labels (N, T), or (N, T, C) for multilabel and soft targets: classes are read from
the last dimension of both.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from evalign.accumulation import Accumulation, RandomState
from evalign.integrations.tracking import Tracker
from evalign.losses import MetricLoss
from evalign.storage.atomic import write_atomically

LOSS_FILE, SCHEDULE_FILE = "metric_loss.safetensors", "metric_schedule.json"


class MetricTrainer(Trainer):
    """A Trainer for `metric_loss`: `MetricTrainer(model, args, metric_loss=MetricLoss("f1"), ...)`.

    With `gradient_accumulation_steps` above 1 every group of micro-batches is processed twice (see `accumulation`),
    and has the gradient of one large batch. Evaluation reports `eval_loss`, `eval_<metric>` and `eval_soft_<metric>` of
    all rows together, not the mean over batches. Temperature and memory are saved with each checkpoint, and a schedule
    (`schedule=partial(Geometric, patience=2)`) is shown `eval_loss`; when it is finished, training stops.
    """

    # The loss of a micro-batch is already its part of the whole group's, so it is not divided.
    loss_is_scaled_for_ga = True

    def __init__(
        self, *args: Any, metric_loss: MetricLoss, schedule: Callable[[MetricLoss], Any] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.metric_loss = metric_loss.to(self.args.device)
        self.schedule = None if schedule is None else schedule(self.metric_loss)
        self._group: list[Any] = []
        self._parts: tuple[Accumulation, list[RandomState]] | None = None
        if self.schedule is not None:
            self.add_callback(AnnealingCallback(self.schedule))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._group, self._parts = samples, None
        return samples, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if len(self._group) < 2:
            return super().training_step(model, inputs, num_items_in_batch)
        if self._parts is None:  # only now: the random state of a resumed run is set after the batches are read
            self._parts = self._first_pass(model)
        _, states = self._parts
        place = next(i for i, micro_batch in enumerate(self._group) if micro_batch is inputs)
        with states[place].again():
            return super().training_step(model, inputs, num_items_in_batch)

    def _first_pass(self, model: nn.Module) -> tuple[Accumulation, list[RandomState]]:
        accumulation, states = Accumulation(self.metric_loss), []
        model.train()
        self.metric_loss.train()
        for micro_batch in self._group:
            inputs = dict(self._prepare_inputs(micro_batch))
            states.append(RandomState(inputs))
            labels = inputs.pop("labels")
            with torch.no_grad(), self.compute_loss_context_manager():
                accumulation.add(*_batch(model(**inputs), labels, self.metric_loss))
        return accumulation, states

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        if "labels" not in inputs:
            raise ValueError(f"a metric loss needs labels, got only {', '.join(inputs)}; see args.label_names")
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        self.metric_loss.train(model.training)
        if model.training and self._parts is not None:
            loss = self._parts[0].loss(*_batch(outputs, labels, self.metric_loss))
        else:
            loss = self.metric_loss(*_batch(outputs, labels, self.metric_loss))
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        tracker = Tracker(self.metric_loss)
        with tracker.listening():
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )  # fmt: skip
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in tracker.scores().items()})
        return output

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if not self.args.should_save:
            return
        state = {name: value.contiguous().cpu() for name, value in self.metric_loss.state_dict().items()}
        write_atomically(folder / LOSS_FILE, save(state))
        if self.schedule is not None:
            write_atomically(folder / SCHEDULE_FILE, json.dumps(self.schedule.state_dict()))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        if (folder / LOSS_FILE).exists():
            self.metric_loss.load_state_dict(load_file(folder / LOSS_FILE))
        if self.schedule is not None and (folder / SCHEDULE_FILE).exists():
            self.schedule.load_state_dict(json.loads((folder / SCHEDULE_FILE).read_text()))


class AnnealingCallback(TrainerCallback):
    """Passes the loss of every evaluation to a schedule such as `annealing.Geometric`, for use with your own Trainer.

    >>> from evalign.annealing import Geometric
    >>> loss = MetricLoss("f1")
    >>> AnnealingCallback(Geometric(loss, patience=1)).schedule.patience
    1
    """

    def __init__(self, schedule: Any, monitor: str = "eval_loss") -> None:
        self.schedule, self.monitor = schedule, monitor

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> TrainerControl:
        metrics: dict[str, float] = given.get("metrics") or {}
        if self.monitor in metrics:
            self.schedule.step(metrics[self.monitor])
            if getattr(self.schedule, "finished", False):
                control.should_training_stop = True
        return control


def loss_function(loss: MetricLoss) -> Callable[..., Tensor]:
    """A `compute_loss_func` for your own Trainer: `Trainer(..., compute_loss_func=loss_function(loss))`.

    Every micro-batch is weighted by its share of the labels, so that accumulation gives the mean over micro-batches.
    This is not the metric of all of them together, for which there is `MetricTrainer`.

    >>> function = loss_function(MetricLoss("f1"))
    >>> outputs, labels = {"logits": torch.eye(2)}, torch.tensor([0, 1])
    >>> function(outputs, labels, num_items_in_batch=8) / MetricLoss("f1")(torch.eye(2), labels)
    tensor(0.2500)
    """

    def compute_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        value: Tensor = loss(*_batch(outputs, labels, loss))
        if num_items_in_batch is None:
            return value
        share: Tensor = (labels != -100).sum() / num_items_in_batch
        return value * share

    return compute_loss


def _batch(outputs: Any, labels: Tensor, loss: MetricLoss) -> tuple[Tensor, Tensor]:
    """A model's logits, from a dictionary with "logits" or a tuple that starts with them, and labels, for the loss."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    assert isinstance(logits, Tensor)
    # Heads for tokens return (N, T, C), with one label for each token or one for each entry; those for images return
    # (N, C, height, width).
    each = labels.shape == logits.shape and loss.task != "binary"
    if logits.dim() == 3 and loss.class_dim == 1 and (each or labels.shape == logits.shape[:2]):
        return logits.transpose(1, 2), labels.transpose(1, 2) if each else labels
    return logits, labels
