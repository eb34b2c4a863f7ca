"""Count the evalign source files that one use of the library enters: a loss call, an estimator's fit, `evalign fit`.

    python tools/count_files.py loss | fit | command [--list]

A file counts once, when Python enters one of its functions; compiled loops and module imports do not count. Each use is
counted on its second call: the first one also imports, registers and compiles.
"""

import argparse
import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import evalign

SOURCE = str(Path(evalign.__file__).parent)


def entered(action: Callable[[], object]) -> list[str]:
    """Files of evalign whose functions run during `action`, as paths relative to the package."""
    seen: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not the body of a module or class
            seen.add(frame.f_code.co_filename)

    sys.setprofile(look)
    threading.setprofile(look)  # members of a blend train in threads
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(str(Path(name).relative_to(SOURCE)) for name in seen if name.startswith(SOURCE))


def loss() -> list[str]:
    import torch

    from evalign import MetricLoss

    criterion, labels = MetricLoss("f1", anchor=1.0), torch.arange(64) % 10

    def step() -> None:
        criterion(torch.randn(64, 10, requires_grad=True), labels).backward()

    step()
    return entered(step)


def fit() -> list[str]:
    from evalign import EASTClassifier

    x, y = _table()
    EASTClassifier("f1", epochs=2).fit(x, y)
    return entered(lambda: EASTClassifier("f1", epochs=2).fit(x, y))


def command() -> list[str]:
    from evalign.cli.app import main

    x, y = _table()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "table.csv"
        rows = [",".join(f"{v:.4f}" for v in row) + f",{label}" for row, label in zip(x, y, strict=True)]
        data.write_text("\n".join(["a,b,c,d,label", *rows]) + "\n")

        def run() -> None:
            arguments = [
                "fit",
                str(data),
                "--target",
                "label",
                "--metric",
                "f1",
                "--out",
                str(Path(folder) / "run"),
                "--force",
            ]
            sys.argv = ["evalign", *arguments]
            try:
                main()
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(f"evalign fit ended with {end.code}") from end

        run()
        return entered(run)


def _table() -> tuple[Any, Any]:
    import numpy as np

    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 4))
    return x, np.where(x[:, 0] + generator.normal(size=200) > 1, "yes", "no")


USES = {"loss": loss, "fit": fit, "command": command}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("use", choices=USES)
    parser.add_argument("--list", action="store_true", help="name the files too")
    chosen = parser.parse_args()
    os.environ["EVALIGN_COMPILE"] = "wait"  # otherwise the eager form would be used until the loops are compiled
    files = USES[chosen.use]()
    print(len(files))
    if chosen.list:
        print("\n".join(files))
