"""Lightning: a callback that anneals, logs the soft and the hard metric, and checkpoints its state."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from evalign.accumulation import accumulate
from evalign.annealing import Geometric
from evalign.integrations.tracking import Tracker
from evalign.losses import MetricLoss

MakeSchedule = Callable[[MetricLoss], Any]


class MetricCallback(pl.Callback):
    """Anneals and logs the `MetricLoss` of a LightningModule, whose `validation_step` only has to call the loss.

    After every validation epoch it logs `val_loss`, `val_<metric>` (hard), `val_soft_<metric>` and `temperature`, all
    from the counts of the whole epoch and of all ranks, and shows the loss to the schedule, which may cool. When the
    schedule is finished, training stops. The schedule's place is part of the checkpoint; so are temperature and memory,
    with the module that owns the loss.

    Parameters
    ----------
    schedule: function that makes a schedule, such as `annealing.Geometric`, from the loss; None keeps the
        temperature, as it must be for steps other than "annealed".
    attribute: name of the loss in the module.
    prefix: of the logged names.

    >>> from functools import partial
    >>> MetricCallback(partial(Geometric, patience=5)).attribute
    'loss'
    """

    def __init__(
        self, schedule: MakeSchedule | None = Geometric, *, attribute: str = "loss", prefix: str = "val_"
    ) -> None:
        super().__init__()
        self.make_schedule, self.attribute, self.prefix = schedule, attribute, prefix
        self.schedule: Any = None
        self.tracker: Tracker | None = None
        self._stored: dict[str, Any] | None = None
        self._handle: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        loss = getattr(pl_module, self.attribute, None)
        if not isinstance(loss, MetricLoss):
            raise TypeError(
                f"the module must have a MetricLoss as self.{self.attribute}, got {type(loss).__name__}; "
                "name it with MetricCallback(attribute=...)"
            )
        if self.make_schedule is not None and stage == "fit":
            self.schedule = self.make_schedule(loss)
            if self._stored is not None:
                self.schedule.load_state_dict(self._stored)
        if self._handle is None:
            self.tracker = Tracker(loss)
            self._handle = self.tracker.listen()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self.tracker is not None
        self.tracker.reset()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self.tracker is not None
        scores = self.tracker.scores()
        if not scores:
            raise RuntimeError(
                f"no validation batch reached self.{self.attribute}; call it in validation_step with logits and labels"
            )
        pl_module.log_dict(
            {self.prefix + name: value for name, value in scores.items()}
            | {"temperature": self.tracker.loss.temperature},
            rank_zero_only=False,
        )
        if self.schedule is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.schedule.step(scores["loss"])
        if getattr(self.schedule, "finished", False):
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {} if self.schedule is None else self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stored = state_dict or None
        if self.schedule is not None and self._stored is not None:
            self.schedule.load_state_dict(self._stored)


def step_in_parts(module: pl.LightningModule, loss: MetricLoss, batch: tuple[Tensor, ...], parts: int) -> Tensor:
    """One optimiser step on `batch` = (x, target[, weight]), in `parts` micro-batches with the exact gradient.

    For a module with `automatic_optimization = False`: the body of its `training_step`. Lightning's own
    `accumulate_grad_batches` averages the metrics of micro-batches, which is not the metric of the batch.
    """
    if module.automatic_optimization:
        raise RuntimeError("step_in_parts takes the optimiser step itself; set self.automatic_optimization = False")
    optimiser = module.optimizers()
    assert isinstance(optimiser, LightningOptimizer)
    optimiser.zero_grad()
    split = list(zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True))
    value = accumulate(loss, module, split, backward=module.manual_backward)
    optimiser.step()
    return value
