"""Files that are complete or not there: written beside their place, flushed, renamed into it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor


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
