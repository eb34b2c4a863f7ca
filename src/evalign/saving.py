"""A fitted classifier as one file: weights as safetensors, everything else as JSON in its header.

One file cannot be half updated. The header names a format version and the checksum of the weights; loading reads
numbers and text and executes nothing.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from evalign.decision import Rule
from evalign.files import write_atomically
from evalign.tables import TableEncoder
from evalign.training.recipes import Recipe

if TYPE_CHECKING:
    from evalign.estimator import EASTClassifier

FORMAT, VERSION = "evalign.classifier", 1


def save_classifier(model: "EASTClassifier", path: Path) -> Path:
    """Write `model` to `path`, replacing what was there in one step."""
    if not isinstance(model.metric, str):
        raise ValueError(f"only a metric given by name can be saved, got the function {model._metric_name!r}")
    if isinstance(model.recipe, Recipe):
        raise ValueError(f"only a recipe given by name can be saved, got the recipe object {model.recipe.name!r}")
    weights = {name: value.detach().cpu().contiguous() for name, value in model.network_.state_dict().items()}
    params = model.get_params()
    params["random_state"] = params["random_state"] if isinstance(params["random_state"], int) else None
    fitted = {
        "params": params,
        "classes": _classes_to_json(model.classes_),
        "n_features_in": model.n_features_in_,
        "feature_names_in": list(model.feature_names_in_) if hasattr(model, "feature_names_in_") else None,
        "features_out": next(iter(weights.values())).shape[1],
        "encoder": model.encoder_.to_json(),
        "decision": model.decision_.to_json(),
        "history": model.history_,
        "temperature": model.temperature_,
    }
    text = json.dumps(fitted, default=_plain)
    header = {"format": FORMAT, "version": VERSION, "sha256": _checksum(weights, text), "classifier": text}
    # One entry, since safetensors writes several in no fixed order: the same model gives the same bytes.
    return write_atomically(path, save(weights, metadata={"evalign": json.dumps(header)}))


def load_classifier(cls: type["EASTClassifier"], path: Path) -> Any:
    """Read what `save_classifier` wrote, or say in one sentence why not."""
    if not path.is_file():
        raise FileNotFoundError(f"no model file at {path}; give the file that save() wrote")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("evalign", "{}"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or no model file ({error}); fit and save it again") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a safetensors file, but not an evalign classifier; give the file that save() wrote"
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {header.get('version')}, this evalign reads version {VERSION}; "
            "load it with the evalign that saved it, or fit again"
        )
    text = str(header.get("classifier"))
    if header.get("sha256") != _checksum(weights, text):
        raise ValueError(f"{path} is damaged: its checksum does not match its content; fit and save it again")
    fitted = json.loads(text)
    params = fitted["params"]
    params["hidden"] = tuple(params["hidden"])
    model = cls(**params)
    model.classes_ = _classes_from_json(fitted["classes"])
    model.n_features_in_ = fitted["n_features_in"]
    if fitted["feature_names_in"] is not None:
        model.feature_names_in_ = np.array(fitted["feature_names_in"], dtype=object)
    model.encoder_ = TableEncoder.from_json(fitted["encoder"])
    model.decision_ = Rule.from_json(fitted["decision"])
    model.history_, model.temperature_ = fitted["history"], fitted["temperature"]
    network = model._make_network(fitted["features_out"], seed=0)
    network.load_state_dict(weights)
    model.network_ = network.to(model._device)
    return model


def _checksum(weights: dict[str, torch.Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _classes_to_json(classes: np.ndarray) -> dict[str, Any]:
    kind = "object" if classes.dtype == object else classes.dtype.str
    values = classes.tolist()
    if not all(isinstance(v, (str, int, float, bool)) for v in values):
        raise ValueError(f"only labels that are text, numbers or booleans can be saved, got {type(values[0]).__name__}")
    return {"dtype": kind, "values": values}


def _classes_from_json(data: dict[str, Any]) -> np.ndarray:
    return np.array(data["values"], dtype=np.dtype(data["dtype"]))


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's; whatever else is refused by name."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"cannot save a {type(value).__name__}")
