"""Everything that training needs to go on where it was, in one file: written in one step, read without executing.

On a CPU a run that was interrupted and resumed ends with the bits of one that was not.
"""

import contextlib
import copy
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from evalign.training.batches import Batches
from evalign.training.history import Controller, Epoch
from evalign.training.recipes import Stage
from evalign.training.step import WeightAverage, adamw

FORMAT = "evalign.training"


class Progress:
    """Where training stands: stage, optimiser, average, cooling and stopping, best weights, offsets and history."""

    def __init__(
        self, network: nn.Module, stages: tuple[Stage, ...], batches: Batches, *, recorded: bool = False
    ) -> None:
        self.network, self.stages, self.batches, self.recorded = network, stages, batches, recorded
        self.history: list[Epoch] = []
        self.offset: Tensor | None = None
        self.average: WeightAverage | None = None
        self.begin(0)

    def begin(self, stage: int) -> None:
        """A new optimiser, average and controller for a stage, from the weights that the network has."""
        self.stage = stage
        self.keep()
        if not self.finished:
            own = self.stages[stage]
            self.controller = Controller(own)
            self.optimiser = adamw(self.network, own, recorded=self.recorded)
            self.average = WeightAverage(self.network, own.average) if own.average else None
            if self.average is not None:
                update = self.average.update
                self.optimiser.register_step_post_hook(lambda *_: update())

    @property
    def finished(self) -> bool:
        return self.stage >= len(self.stages)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """The network has the weights to be judged and kept inside: the averaged ones, where a stage averages."""
        return contextlib.nullcontext() if self.average is None else self.average.in_place()

    def keep(self) -> None:
        self.best = copy.deepcopy(self.network.state_dict())


class Checkpoint:
    """A file that holds a `Progress`, saved after every `every` epochs; `run` tells one training from another."""

    def __init__(self, path: Path, run: dict[str, Any], every: int = 1) -> None:
        self.path, self.run, self.every = Path(path), run, every

    def save(self, progress: Progress) -> None:
        if len(progress.history) % self.every and not progress.controller.finished:
            return
        parameters = list(progress.network.parameters())
        arrays = {
            **{f"network.{name}": value for name, value in progress.network.state_dict().items()},
            **{f"best.{name}": value for name, value in progress.best.items()},
            **{
                f"optimiser.{i}.{name}": value
                for i, parameter in enumerate(parameters)
                for name, value in progress.optimiser.state.get(parameter, {}).items()
            },
            **{f"random.{name}": value for name, value in _random_states(progress).items()},
            **{f"average.{i}": value for i, value in enumerate(progress.average.state if progress.average else [])},
        }
        if progress.offset is not None:
            arrays["offset"] = progress.offset
        controller = progress.controller
        content = {
            "run": self.run,
            "stage": progress.stage,
            "history": [asdict(epoch) for epoch in progress.history],
            "controller": {name: getattr(controller, name) for name in ("epochs", "waited", "finished", "best")},
            "temperature": controller.heat.temperature,
            "cooling": None if controller.cooling is None else controller.cooling.state_dict(),
        }
        container = _container()
        # Clones, since safetensors refuses tensors that share memory.
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in arrays.items()}
        container.write(self.path, FORMAT, plain, content)

    def restore(self, progress: Progress) -> bool:
        """Put a progress where the file says it was; False where there is no file."""
        if not self.path.exists():
            return False
        container = _container()
        try:
            arrays, content = container.read(self.path, FORMAT)
        except ValueError as error:
            raise ValueError(f"training cannot go on from {self.path} ({error}); remove it to start anew") from None
        for name, value in self.run.items():
            found = content["run"].get(name)
            if found != value:
                raise ValueError(
                    f"{self.path} is of a training with {name} {found!r}, this one has {value!r}; "
                    "give that one, or remove the file to start anew"
                )
        progress.network.load_state_dict(_part(arrays, "network."))
        progress.begin(int(content["stage"]))
        device = next(progress.network.parameters()).device
        progress.best = {name: value.to(device) for name, value in _part(arrays, "best.").items()}
        progress.offset = arrays["offset"].to(device) if "offset" in arrays else None
        progress.history = [Epoch(**{**one, "watched": tuple(one["watched"])}) for one in content["history"]]
        controller = progress.controller
        for name, number in content["controller"].items():
            setattr(controller, name, number)
        controller.heat.temperature = content["temperature"]
        if controller.cooling is not None:
            controller.cooling.load_state_dict(content["cooling"])
        for i, parameter in enumerate(progress.network.parameters()):
            state = _part(arrays, f"optimiser.{i}.")
            if state:
                # In the parameter's own memory order, which a fused optimiser asks of its averages.
                averages = {name: torch.empty_like(parameter).copy_(state[name]) for name in ("exp_avg", "exp_avg_sq")}
                progress.optimiser.state[parameter] = {"step": state["step"].to(device), **averages}
        for i, value in enumerate(progress.average.state if progress.average else []):
            value.copy_(arrays[f"average.{i}"])
        _set_random_states(progress, _part(arrays, "random."))
        return True


def _container() -> ModuleType:
    """Imported when a checkpoint is asked for: training itself needs torch alone."""
    try:
        from evalign.storage import container
    except ImportError:
        raise ValueError("checkpoints need safetensors; install it with: pip install 'evalign[tables]'") from None
    return container


def _random_states(progress: Progress) -> dict[str, Tensor]:
    device = next(progress.network.parameters()).device
    found = {"batches": progress.batches.generator.get_state(), "cpu": torch.get_rng_state()}
    return {**found, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else found


def _set_random_states(progress: Progress, states: dict[str, Tensor]) -> None:
    device = next(progress.network.parameters()).device
    progress.batches.generator.set_state(states["batches"])
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _part(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
