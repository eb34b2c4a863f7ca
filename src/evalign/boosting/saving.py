"""A fitted booster as one file: each fold's trees in the library's own text; `evalign.container` says how."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evalign import container
from evalign.boosting.libraries import find_library
from evalign.boosting.table import TreeTable
from evalign.saving import Arrays, fitted_content, set_fitted

if TYPE_CHECKING:
    from evalign.booster import EASTBooster

FORMAT = "evalign.booster"


def save_booster(model: "EASTBooster", path: Path) -> Path:
    """Write `model` to `path`, replacing what was there in one step."""
    return container.write(path, FORMAT, *booster_content(model))


def load_booster(cls: type["EASTBooster"], path: Path) -> Any:
    """Read what `save_booster` wrote, or say in one sentence why not."""
    return booster_of(cls, *container.read(path, FORMAT))


def booster_content(model: "EASTBooster") -> tuple[Arrays, dict[str, Any]]:
    """A booster's trees as text in arrays, and the rest of it as JSON."""
    fitted = {
        **fitted_content(model),
        "encoder": model.encoder_.to_json(),
        "rounds": model.rounds_,
        "columns": model.columns_,
        "start": model.start_,
    }
    arrays = {f"trees_{i}": container.text_as_array(trees.to_text()) for i, trees in enumerate(model.trees_)}
    return arrays, fitted


def booster_of(cls: type["EASTBooster"], arrays: Arrays, fitted: dict[str, Any]) -> Any:
    """The booster that has this content."""
    model = cls(**fitted["params"])
    set_fitted(model, fitted)
    model.encoder_ = TreeTable.from_json(fitted["encoder"])
    model.rounds_, model.columns_, model.start_ = fitted["rounds"], fitted["columns"], np.array(fitted["start"])
    read = find_library(model.library).trees.from_text
    model.trees_ = [read(container.array_as_text(arrays[f"trees_{i}"])) for i in range(len(arrays))]
    return model
