"""Files that are complete or not there: written beside their place, flushed, renamed into it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor


class BadFile(ValueError):
    """A file is not there, is not what was written, or is of other weights."""


def replace_file(file: Path, data: bytes) -> None:
    """Replace the file by `data`."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, file)


def replace_safetensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Replace the file by one of these tensors."""
    replace_file(file, save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))


def read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a file. Raises BadFile."""
    try:
        with safe_open(file, "pt") as held:
            return {name: held.get_tensor(name) for name in held.keys()}, held.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{file}: {error}") from None
