"""A script of the benchmarks as a module, and made-up probabilities as it stores them."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def made_up_outputs(search: Any, seed: int, sharpness: int) -> Any:
    rng = np.random.default_rng(seed)
    labels, select_labels = rng.integers(0, 2, 200), rng.integers(0, 2, 50)
    noise = np.random.default_rng([seed, sharpness])

    def probabilities_of(y: Any) -> Any:
        p = 1 / (1 + np.exp(-sharpness * (y - 0.5) - noise.normal(0, 1, len(y))))
        return np.stack([1 - p, p], axis=1)

    return search.MemberOutputs(
        probabilities_of(labels), labels, np.ones(200), probabilities_of(select_labels), select_labels
    )
