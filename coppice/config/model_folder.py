"""What a folder must hold to be a model's, as far as config.json tells."""

from __future__ import annotations

import json
from pathlib import Path

from coppice.errors import InvalidField


def why_no_model(folder: str | Path | None, typed: bool = False) -> str:
    """Why a folder's config.json is not a model's; empty when it is. `typed`: it must say the model's type."""
    if not folder:
        return "names no model folder"
    path = Path(folder)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        for file in (path, *path.glob("*")):
            if file.suffix == ".gguf":
                return f"{file} is a GGUF file of llama.cpp; what is loaded is safetensors with a config.json"
        return f"{folder} holds no model (no config.json)"
    except OSError as error:
        return f"{folder} holds no model (config.json: {error.strerror})"
    except ValueError:
        return f"{folder} holds no model (config.json is no JSON)"
    if not isinstance(config, dict) or (typed and not isinstance(config.get("model_type"), str)):
        return f"{folder} holds no model (config.json has no model_type)"
    if typed and any(path.glob("*.bin")) and not any(path.glob("*.safetensors")):
        return f"{folder} holds no model that is loaded (its weights are pickles, *.bin, and no safetensors)"
    return ""


def check_model(setting: str, folder: str | Path | None, typed: bool = False) -> None:
    """Raise InvalidField, which names the setting, unless a folder holds a Hugging Face model."""
    if why := why_no_model(folder, typed):
        raise InvalidField(setting, why)
