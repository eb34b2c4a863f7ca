"""Training checkpoints: one file, written atomically, read without executing anything.

On a CPU, a run that was interrupted and resumed ends with the same bits as an uninterrupted one.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evalign.training.loop import Epoch, Run

if TYPE_CHECKING:
    from evalign.training.in_memory import InMemory

FORMAT = "evalign.training"


class Checkpoint:
    """State of a source and its run, saved every `every` epochs; `identity` distinguishes runs."""

    def __init__(self, path: Path, identity: dict[str, Any], every: int = 1) -> None:
        self.path, self.identity, self.every = Path(path), identity, every

    def save(self, source: "InMemory", run: Run) -> None:
        if len(run.history) % self.every and not run.controller.finished:
            return
        parameters = list(source.network.parameters())
        arrays = {
            **{f"network.{name}": value for name, value in source.network.state_dict().items()},
            **{f"best.{name}": value for name, value in source.best.items()},
            **{
                f"optimiser.{i}.{name}": value
                for i, parameter in enumerate(parameters)
                for name, value in source.optimiser.state.get(parameter, {}).items()
            },
            **{f"random.{name}": value for name, value in _random_states(source).items()},
        }
        if source.offset is not None:
            arrays["offset"] = source.offset
        controller = run.controller
        content = {
            "run": self.identity,
            "stage": run.number,
            "history": [asdict(epoch) for epoch in run.history],
            "controller": {name: getattr(controller, name) for name in ("epochs", "waited", "finished", "best")},
            "temperature": controller.heat.temperature,
            "cooling": None if controller.cooling is None else controller.cooling.state_dict(),
        }
        container = _container()
        # Clones, since safetensors refuses tensors that share memory.
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in arrays.items()}
        container.write(self.path, FORMAT, plain, content)

    def restore(self, source: "InMemory", run: Run) -> bool:
        """Restore source and run from the file; False if there is none."""
        if not self.path.exists():
            return False
        container = _container()
        try:
            arrays, content = container.read(self.path, FORMAT)
        except ValueError as error:
            raise ValueError(f"training cannot resume from {self.path} ({error}); remove it to start over") from None
        for name, value in self.identity.items():
            found = content["run"].get(name)
            if found != value:
                raise ValueError(
                    f"{self.path} belongs to a run with {name} {found!r}, this one has {value!r}; "
                    "pass that value, or remove the file to start over"
                )
        source.network.load_state_dict(_part(arrays, "network."))
        run.begin(int(content["stage"]))
        source.begin_stage(0, run)
        device = next(source.network.parameters()).device
        source.best = {name: value.to(device) for name, value in _part(arrays, "best.").items()}
        source.offset = arrays["offset"].to(device) if "offset" in arrays else None
        run.history = [Epoch(**{**one, "watched": tuple(one["watched"])}) for one in content["history"]]
        controller = run.controller
        for name, number in content["controller"].items():
            setattr(controller, name, number)
        controller.heat.temperature = content["temperature"]
        if controller.cooling is not None:
            controller.cooling.load_state_dict(content["cooling"])
        for i, parameter in enumerate(source.network.parameters()):
            state = _part(arrays, f"optimiser.{i}.")
            if state:
                # In the parameter's own memory order, which a fused optimiser requires of its averages.
                averages = {name: torch.empty_like(parameter).copy_(state[name]) for name in ("exp_avg", "exp_avg_sq")}
                source.optimiser.state[parameter] = {"step": state["step"].to(device), **averages}
        _set_random_states(source, _part(arrays, "random."))
        return True


def identify(stages: Sequence[Any], seed: int, batch_size: int, network: nn.Module) -> dict[str, Any]:
    """Identity that a checkpoint must share with the run that resumes from it."""
    return {
        "stages": [asdict(stage) for stage in stages],
        "seed": seed,
        "batch_size": batch_size,
        "network": {name: list(value.shape) for name, value in network.state_dict().items()},
    }


def _container() -> ModuleType:
    """Imported only when a checkpoint is requested: training itself needs torch alone."""
    try:
        from evalign.storage import container
    except ImportError:
        raise ValueError("checkpoints need safetensors; install it with: pip install 'evalign[tables]'") from None
    return container


def _random_states(source: "InMemory") -> dict[str, Tensor]:
    device = next(source.network.parameters()).device
    found = {"batches": source.batches.generator.get_state(), "cpu": torch.get_rng_state()}
    return {**found, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else found


def _set_random_states(source: "InMemory", states: dict[str, Tensor]) -> None:
    device = next(source.network.parameters()).device
    source.batches.generator.set_state(states["batches"])
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _part(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
