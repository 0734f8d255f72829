"""What a folder must hold to be a model's, and what its files say of it, known before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coppice.errors import InvalidField
from coppice.limits import MAX_STOP_IDS, MAX_TOKEN_ID, check_count

CONFIG, GENERATION, NESTED = "config.json", "generation_config.json", "text_config of config.json"
TOKENIZER, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_EACH = {"architectures", "model_type", "transformers_version", "_name_or_path", "eos_token_id"}
"""what a configuration and the one in it may say each for itself"""
_NO_LENGTH = int(1e30)  # model_max_length of a tokenizer that knows none


def why_no_model(folder: str | Path | None, typed: bool = False) -> str:
    """Why a folder's config.json is not a model's; empty when it is. `typed`: it must say the model's type."""
    if not folder:
        return "names no model folder"
    path = Path(folder)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        for file in (path, *path.glob("*")):
            if file.suffix == ".gguf":
                return f"{file} is a GGUF file of llama.cpp; what is loaded is safetensors with a config.json"
        return f"{folder} holds no model (no config.json)"
    except OSError as error:
        return f"{folder} holds no model (config.json: {error.strerror})"
    except (ValueError, RecursionError):
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


def text_ends(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """The ids that end a text, by the place that names them: the first place counts, as in transformers.

    Empty where none is named. Raises InvalidField over ids that no service takes.
    """
    config, ends = _read(folder, CONFIG), {}
    for place, values in ((GENERATION, _read(folder, GENERATION)), (CONFIG, config), (NESTED, _nested(config))):
        named = values.get("eos_token_id")
        ids = tuple(named) if isinstance(named, list) else () if named is None else (named,)
        check_count(f"eos_token_id in {folder}, {place}", len(ids), 0, MAX_STOP_IDS)
        if odd := [token for token in ids if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID]:
            raise InvalidField("eos_token_id", f"{odd[0]!r} in {folder}, {place}, is not in 0..{MAX_TOKEN_ID}")
        ends[place] = ids
    for place in (TOKENIZER, SPECIAL):
        token = _special_id(folder, place, "eos_token")
        ends[place] = () if token is None else (token,)
    return {place: ids for place, ids in ends.items() if ids}


def ends_line(ends: Mapping[str, Sequence[int]]) -> str:
    """What ends a text, by which file, and what other files say."""
    named = [(place, ", ".join(map(str, sorted(set(ids))))) for place, ids in ends.items()]
    if not named:
        return "no file of the model names an id that ends a text"
    rest = "".join(f"; {place} says {ids}" for place, ids in named if ids != named[0][1])
    return f"a text ends at {named[0][1]}, by {named[0][0]}{rest}"


def text_config(folder: str | Path) -> dict[str, Any]:
    """What config.json says of the model of text, which may be one among others. Raises InvalidField."""
    config = _read(folder, CONFIG)
    return config | _nested(config)


def disagreements(folder: str | Path) -> Iterator[str]:
    """Where config.json, or the tokenizer's beside it, says one thing in two ways: a line each, with what counts.

    What ends a text is `ends_line`'s.
    """
    config, text, tokenizer = _read(folder, CONFIG), text_config(folder), _read(folder, TOKENIZER)
    nested = _nested(config)
    rope, scaling = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
    rotation = {"rope_type": scaling.get("type"), "rope_theta": text.get("rope_theta"), **scaling} if scaling else rope
    length = tokenizer.get("model_max_length")
    twice = sorted((config.keys() & nested.keys()) - _EACH)
    for name, value, counts, other in (
        *((name, config[name], NESTED, nested[name]) for name in twice),
        *((f"rope_parameters, {name}", rope[name], "rope_scaling", rotation.get(name) or "nothing") for name in rope),
        ("rope_theta", text.get("rope_theta"), "rope_parameters", rotation.get("rope_theta")),
        ("torch_dtype", text.get("torch_dtype"), "dtype", text.get("dtype")),
        (f"model_max_length ({TOKENIZER})", length, "max_position_embeddings", text.get("max_position_embeddings")),
        ("bos_token_id", text.get("bos_token_id"), TOKENIZER, _special_id(folder, TOKENIZER, "bos_token")),
    ):
        if None not in (value, other) and value != other and value != _NO_LENGTH:
            yield f"{folder}: {name} is {value}, but {counts} says {other}, which counts"


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of a text model among others."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _read(folder: str | Path, name: str) -> dict[str, Any]:
    """A JSON object of a folder; empty without the file, and for a tokenizer's that is none: that serves no chats.

    Raises InvalidField.
    """
    try:
        values = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) and name in (CONFIG, GENERATION):
        raise InvalidField("target", f"{Path(folder) / name} is no JSON object")
    return values if isinstance(values, dict) else {}


def _special_id(folder: str | Path, name: str, role: str) -> int | None:
    """The id of a special token that a file names, such as "eos_token"."""
    token = _read(folder, name).get(role)
    content = token.get("content") if isinstance(token, dict) else token
    return added_tokens(folder).get(content) if isinstance(content, str) else None


def added_tokens(folder: str | Path) -> dict[str, int]:
    """Ids of the tokens that tokenizer.json names before its vocabulary, which is not read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        _, _, rest = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8").partition('"added_tokens":')
        return {token["content"]: token["id"] for token in json.JSONDecoder().raw_decode(rest.lstrip())[0]}
    return {}
