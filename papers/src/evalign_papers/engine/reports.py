"""Report of a cell: the scores of every trial, the choices made on validation data, and the environment."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evalign.storage.atomic import write_atomically
from evalign_papers.engine.config import Config, as_content, read_config, strict

Scores = dict[str, dict[str, float]]  # decision -> metric -> value


@dataclass(frozen=True)
class TrialReport:
    trial: int
    seed: int
    chosen: dict[str, float]
    epochs: int
    seconds: float
    scores: Scores


@dataclass
class Report:
    config: Config
    trials: list[TrialReport] = field(default_factory=list)
    grid: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.trials) >= self.config.trials

    @property
    def done(self) -> set[int]:
        return {trial.trial for trial in self.trials}

    def values(self, decision: str, metric: str) -> list[float]:
        """One number per trial, in the order of trials."""
        return [trial.scores[decision][metric] for trial in sorted(self.trials, key=lambda trial: trial.trial)]


def environment(device: str) -> dict[str, Any]:
    import torch

    import evalign

    name = (
        torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    tf32 = device.startswith("cuda") and torch.get_float32_matmul_precision() != "highest"
    return {
        "evalign": evalign.__version__, "commit": _commit(), "torch": torch.__version__,
        "python": platform.python_version(), "device": name, **({"matmul": "TF32"} if tf32 else {}),
    }  # fmt: skip


def _commit() -> str | None:
    """The commit of the checkout, marked if files differ from it; None for an installed package."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def report_path(config_path: Path) -> Path:
    """
    >>> report_path(Path("papers/btg/1/honest/adult.f1.json")).name
    'adult.f1.report.json'
    """
    return config_path.with_name(f"{config_path.name.removesuffix('.json')}.report.json")


def save_report(report: Report, path: Path) -> None:
    content = {
        "config": as_content(report.config), "config_sha256": report.config.sha256, "complete": report.complete,
        "trials": [asdict(trial) for trial in sorted(report.trials, key=lambda trial: trial.trial)],
        "grid": report.grid, "environment": report.environment, "seconds": round(report.seconds, 2),
    }  # fmt: skip
    write_atomically(path, json.dumps(_rounded(content), indent=1, ensure_ascii=False) + "\n")


def load_report(path: Path, config: Config | None = None) -> Report:
    """A report, checked against its config: the one next to it, unless given.

    A report of another config is refused: its numbers would appear in the wrong cell.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        own = strict(Config, content["config"], f"{path}: config")
        trials = [strict(TrialReport, trial, f"{path}: trial") for trial in content["trials"]]
        report = Report(own, trials, content["grid"], content["environment"], content["seconds"])
        checksum = content["config_sha256"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report ({error}); delete it and run the cell again") from None
    if config is None:
        beside = path.with_name(path.name.removesuffix(".report.json") + ".json")
        config = read_config(beside) if beside.exists() else own
    if not checksum == own.sha256 == config.sha256:
        raise ValueError(
            f"{path} was made with a config other than the one next to it; delete it and run the cell again"
        )
    return report


def _rounded(content: Any) -> Any:
    """Round scores to six digits; further ones differ between machines and enlarge the repository."""
    if isinstance(content, float):
        return round(content, 6)
    if isinstance(content, dict):
        return {key: value if key == "config" else _rounded(value) for key, value in content.items()}
    return [_rounded(item) for item in content] if isinstance(content, list) else content
