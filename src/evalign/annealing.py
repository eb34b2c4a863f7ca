"""The temperature schedule of EAST: sets `loss.temperature`, and stores its state in `state_dict`."""

import math
from typing import Any, Protocol

from evalign import checks


class HasTemperature(Protocol):
    temperature: float


class Geometric:
    """T_k = T_0 r^k, cooled when the loss at a temperature stops improving (EAST Sec. 4.3).

    Call `step` with the validation loss after every epoch. At one temperature, `patience` epochs without a new best end
    it; then T is multiplied by `rate`, and the search for a best restarts. When `max_stale` successive temperatures
    have not brought a new overall best, or T falls below `minimum`, it is `finished`.

    >>> from evalign import MetricLoss
    >>> loss = MetricLoss("f1")
    >>> schedule = Geometric(loss, start=0.2, rate=0.9, patience=1)
    >>> schedule.step(0.5), schedule.step(0.6), round(loss.temperature, 4)
    (False, True, 0.18)
    """

    def __init__(
        self,
        loss: HasTemperature,
        start: float = 0.2,
        rate: float = 0.9,
        patience: int = 50,
        max_stale: int = 3,
        minimum: float = 1e-3,
    ) -> None:
        checks.check_number("rate", rate, low=0.0, high=1.0, open_low=True, open_high=True)
        checks.check_number("patience", patience, low=1, whole=True)
        checks.check_number("max_stale", max_stale, low=1, whole=True)
        checks.check_temperature(start)
        checks.check_number("minimum", minimum, low=0.0, high=start)
        if not hasattr(loss, "temperature"):
            raise TypeError(f"a schedule sets the temperature of a MetricLoss, got {type(loss).__name__} without one")
        objective: Any = getattr(loss, "objective", None)
        if objective is not None and objective.step.step != "annealed" and not objective.is_ranking:
            raise ValueError(
                f"a schedule needs a loss with step='annealed', got step={objective.step.step!r}, which has no "
                "temperature; leave out the schedule (schedule=None)"
            )
        self.loss = loss
        self.loss.temperature = start
        self.start, self.rate, self.patience, self.max_stale, self.minimum = start, rate, patience, max_stale, minimum
        self.coolings = 0
        self.finished = False
        self.best: float | None = None  # over all temperatures
        self.best_here: float | None = None  # at this temperature
        self.waited = 0
        self.stale = 0

    def state_dict(self) -> dict[str, Any]:
        """State without the loss, as numbers and None, ready for JSON."""
        state = {name: value for name, value in vars(self).items() if name != "loss"}
        return {**state, "temperature": self.loss.temperature}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        expected = set(self.state_dict())
        if set(state) != expected:
            raise ValueError(
                f"state must have the keys {sorted(expected)}, got {sorted(state)}; is it from another schedule?"
            )
        self.loss.temperature = state["temperature"]
        vars(self).update({name: value for name, value in state.items() if name != "temperature"})

    def step(self, validation_loss: float) -> bool:
        """Record one epoch's validation loss; True if it cooled. A nan never counts as a best."""
        if self.finished:
            return False
        value = float(validation_loss)
        if self.best_here is None or value < self.best_here:
            # A first value of nan must not become the best, since nothing is below nan.
            self.best_here, self.waited = (None, self.waited + 1) if math.isnan(value) else (value, 0)
        else:
            self.waited += 1
        return self.cool() if self.waited >= self.patience else False

    def cool(self) -> bool:
        """End this temperature now."""
        improved = self.best_here is not None and (self.best is None or self.best_here < self.best)
        if improved:
            self.best = self.best_here
        self.stale = 0 if improved else self.stale + 1
        temperature = self.start * self.rate ** (self.coolings + 1)
        if self.stale >= self.max_stale or temperature < self.minimum:
            self.finished = True
            return False
        self.coolings += 1
        self.best_here, self.waited = None, 0
        self.loss.temperature = temperature
        return True
