"""A fitted network as one file; `evalign.container` says how, and that nothing is executed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evalign import container
from evalign.decision import Rule
from evalign.networks.ensemble import Together
from evalign.tables import TableEncoder

if TYPE_CHECKING:
    from evalign.estimator import EASTClassifier

FORMAT = "evalign.classifier"
Arrays = dict[str, torch.Tensor]


def save_classifier(model: "EASTClassifier", path: Path) -> Path:
    """Write `model` to `path`, replacing what was there in one step."""
    return container.write(path, FORMAT, *classifier_content(model))


def load_classifier(cls: type["EASTClassifier"], path: Path) -> Any:
    """Read what `save_classifier` wrote, or say in one sentence why not."""
    return classifier_of(cls, *container.read(path, FORMAT))


def classifier_content(model: "EASTClassifier") -> tuple[Arrays, dict[str, Any]]:
    """A network's arrays, and the rest of it as JSON."""
    weights = {name: value.detach().cpu().contiguous() for name, value in model.network_.state_dict().items()}
    return weights, {**fitted_content(model), "encoder": model.encoder_.to_json(), "folds": model.folds_}


def classifier_of(cls: type["EASTClassifier"], weights: Arrays, fitted: dict[str, Any]) -> Any:
    """The network that has this content."""
    params = fitted["params"]
    params["hidden"] = tuple(params["hidden"])
    if str(params["device"]).startswith("cuda") and not torch.cuda.is_available():
        params["device"] = "auto"  # trained on a GPU, used on a machine without one
    model = cls(**params)
    set_fitted(model, fitted)
    model.encoder_ = TableEncoder.from_json(fitted["encoder"])
    model.folds_ = fitted.get("folds", 1)  # not in files that were written before there were folds
    members = [model._make_network(seed=0) for _ in range(model.folds_)]
    network = members[0] if len(members) == 1 else Together(members)
    network.load_state_dict(weights)
    model.network_ = network.to(model._device)
    return model


def fitted_content(model: Any) -> dict[str, Any]:
    """Options, and what every classifier of ours has learned; `set_fitted` reads it."""
    return {
        "params": container.saved_params(model),
        "classes": container.classes_to_json(model.classes_),
        "n_features_in": model.n_features_in_,
        "feature_names_in": list(model.feature_names_in_) if hasattr(model, "feature_names_in_") else None,
        "decision": model.decision_.to_json(),
        "history": model.history_,
        "temperature": model.temperature_,
    }


def set_fitted(model: Any, fitted: dict[str, Any]) -> None:
    """What every classifier of ours has learned."""
    model.classes_ = container.classes_from_json(fitted["classes"])
    model.n_features_in_ = fitted["n_features_in"]
    if fitted["feature_names_in"] is not None:
        model.feature_names_in_ = np.array(fitted["feature_names_in"], dtype=object)
    model.decision_ = Rule.from_json(fitted["decision"])
    # JSON knows lists only; what an epoch watched was a tuple.
    model.history_ = [{**row, "watched": tuple(row.get("watched", ()))} for row in fitted["history"]]
    model.temperature_ = fitted["temperature"]


def load_model(path: Path) -> Any:
    """A classifier of whichever kind the file holds."""
    found = container.format_of(path)
    if found == "evalign.booster":
        from evalign.booster import EASTBooster

        return EASTBooster.load(path)
    if found == "evalign.blend":
        from evalign.blend import EASTBlend

        return EASTBlend.load(path)
    from evalign.estimator import EASTClassifier

    return EASTClassifier.load(path)
