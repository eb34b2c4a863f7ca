"""Save a fitted model in one file: arrays as safetensors, the rest as JSON in its header, with a checksum over both.

The header names a format and its version. Loading reads numbers and text and executes nothing.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from evalign.storage.atomic import write_atomically

VERSION = 1
Model = TypeVar("Model")


def write(path: Path, format: str, arrays: dict[str, torch.Tensor], fitted: dict[str, Any]) -> Path:
    """Write a model to `path`, atomically; equal models give equal bytes."""
    text = json.dumps(fitted, default=_plain)
    header = {"format": format, "version": VERSION, "sha256": _checksum(arrays, text), "classifier": text}
    # One entry, since safetensors writes several in no fixed order.
    return write_atomically(path, save(arrays, metadata={"evalign": json.dumps(header)}))


def read(path: Path, format: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read arrays and JSON content; raise ValueError for damaged files and other formats or versions."""
    arrays, header = _open(path)
    found = header.get("format")
    if found != format:
        kind = "an evalign classifier" if not str(found).startswith("evalign.") else f"of the format {format}"
        raise ValueError(f"{path} is a safetensors file, but not {kind}; give the file that save() wrote")
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {header.get('version')}, this evalign reads version {VERSION}; "
            "load it with the version that saved it, or fit again"
        )
    text = str(header.get("classifier"))
    if header.get("sha256") != _checksum(arrays, text):
        raise ValueError(f"{path} is damaged: its checksum does not match its content; fit and save it again")
    return arrays, json.loads(text)


def load(path: Path, format: str, build: Callable[[dict[str, torch.Tensor], dict[str, Any]], Model]) -> Model:
    """Read a file and pass its content to `build`; files with unknown parts are refused."""
    content = read(path, format)
    try:
        return build(*content)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} was saved by another version of evalign ({error}); load it with that one, or fit again"
        ) from None


def format_of(path: Path) -> Any:
    """The format named in a file, or None."""
    return _open(path)[1].get("format")


def classes_to_json(classes: np.ndarray) -> dict[str, Any]:
    kind = "object" if classes.dtype == object else classes.dtype.str
    values = classes.tolist()
    if not all(isinstance(v, (str, int, float, bool)) for v in values):
        raise ValueError(f"only labels that are text, numbers or booleans can be saved, got {type(values[0]).__name__}")
    return {"dtype": kind, "values": values}


def saved_params(model: Any) -> dict[str, Any]:
    """An estimator's options as plain types; a random generator is saved as None."""
    if not isinstance(model.metric, str):
        raise ValueError(f"only a metric given by name can be saved, got the function {model.metric_name!r}")
    if not isinstance(getattr(model, "recipe", ""), str):  # a forest has none
        raise ValueError(f"only a recipe given by name can be saved, got the recipe object {model.recipe.name!r}")
    params: dict[str, Any] = model.get_params()
    params["random_state"] = params["random_state"] if isinstance(params["random_state"], (int, np.integer)) else None
    # JSON keys are text, keys of options may be numbers or pairs of labels.
    return {name: {"pairs": list(v.items())} if isinstance(v, Mapping) else v for name, v in params.items()}


def loaded_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `saved_params` wrote."""
    return {
        name: {tuple(k) if isinstance(k, list) else k: own for k, own in v["pairs"]} if isinstance(v, dict) else v
        for name, v in params.items()
    }


def packed(models: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The content of several models: arrays by the models' names, and the rest by name."""
    arrays: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {}
    for name, model in models.items():
        own, rest[name] = model.content()
        arrays |= {f"{name}.{key}": value for key, value in own.items()}
    return arrays, rest


def unpacked(kinds: Mapping[str, Any], arrays: dict[str, torch.Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The models that `packed` wrote."""
    return {
        name: kinds[name].from_content(
            {key.removeprefix(f"{name}."): a for key, a in arrays.items() if key.startswith(f"{name}.")}, own
        )
        for name, own in rest.items()
    }


def _open(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"no model file at {path}; give the file that save() wrote")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("evalign", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not a model file ({error}); fit and save it again") from None
    return arrays, header if isinstance(header, dict) else {}


def _checksum(arrays: dict[str, torch.Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's; other types are refused."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise ValueError(f"only text, numbers, lists and mappings can be saved, got a {type(value).__name__} in an option")
