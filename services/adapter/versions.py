"""Weight versions on disk: what each changed since version 0, and who its parent was."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from coppice.weights.atomic import replace_file

TENSORS, RECORD, GOOD = "tensors.safetensors", "version.json", "good.json"
_NAME = re.compile(r"version-(\d{8})")


class BadVersion(ValueError):
    """A version is not there, or its files are not what was written."""


@dataclass(frozen=True)
class Version:
    """One set of weights that was, or is, in use."""

    number: int
    """1 or more; version 0 is the head as it was deployed, and no file"""
    parent: int
    weights_hash: str
    """the caller's, of all weights, in hexadecimal"""


class Versions:
    """A folder of at most `keep` versions. The newest and the last good one are never deleted to make room."""

    def __init__(self, folder: Path, keep: int = 8) -> None:
        if keep < 2:
            raise ValueError("the newest and the last good version need two places")
        self.folder, self.keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(".*.partial"):  # of a process that ended meanwhile
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()

    def numbers(self) -> list[int]:
        """The versions on disk, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def save(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Write all tensors that differ from version 0, complete or not at all. Raises ValueError for a known number.

        The oldest versions make room.
        """
        if version.number < 1 or version.number in self.numbers():
            raise ValueError(f"version {version.number} is there already")
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        final = self._folder(version.number)
        partial = self.folder / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        replace_file(partial / TENSORS, data)
        self._describe(partial, version, hashlib.sha256(data).hexdigest())
        os.replace(partial, final)
        self._make_room()

    def read(self, number: int) -> Version:
        """What is told of a version. Raises BadVersion."""
        return self._read(number)[0]

    def load(self, number: int) -> tuple[Version, dict[str, Tensor]]:
        """A version and all its tensors that differ from version 0. Raises BadVersion for a damaged file."""
        version, wanted = self._read(number)
        file = self._folder(number) / TENSORS
        try:
            data = file.read_bytes()
            if hashlib.sha256(data).hexdigest() != wanted:
                raise BadVersion(f"{file} is damaged")
            tensors: dict[str, Tensor] = load(data)
        except (OSError, SafetensorError) as error:
            raise BadVersion(f"{file}: {error}") from None
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise BadVersion(f"{file}: {name} is not finite")
        return version, tensors

    # --- the last good one ---

    @property
    def good(self) -> int:
        """The version marked good last that is still there; 0: the head as it was deployed."""
        there = {0, *self.numbers()}
        return next((number for number in reversed(self._goods()) if number in there), 0)

    def mark_good(self, number: int) -> None:
        """Remember a version, or 0, as good. Raises BadVersion when it is not there."""
        if number:
            self._read(number)
        goods = [*(held for held in self._goods() if held != number), number][-self.keep :]
        replace_file(self.folder / GOOD, json.dumps(goods).encode())

    def load_good(self) -> tuple[Version | None, dict[str, Tensor]]:
        """The last good version that is undamaged, and its tensors; without any, None and no tensors: version 0."""
        for number in reversed(self._goods()):
            if not number:
                break
            try:
                return self.load(number)
            except BadVersion:
                continue
        return None, {}

    def _goods(self) -> list[int]:
        try:
            told = json.loads((self.folder / GOOD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [number for number in told if isinstance(number, int)] if isinstance(told, list) else []

    # --- files ---

    def _folder(self, number: int) -> Path:
        return self.folder / f"version-{number:08d}"

    def _describe(self, folder: Path, version: Version, sha256: str) -> None:
        told = asdict(version) | {"sha256": sha256}
        replace_file(folder / RECORD, (json.dumps(told, indent=1) + "\n").encode())

    def _read(self, number: int) -> tuple[Version, str]:
        """A version, and the SHA-256 of its tensors' file."""
        file = self._folder(number) / RECORD
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            sha256 = str(told.pop("sha256"))
            version = Version(**told)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadVersion(f"{file}: {error}") from None
        if version.number != number:
            raise BadVersion(f"{file} is of version {version.number}")
        return version, sha256

    def _make_room(self) -> None:
        numbers = self.numbers()
        spared = {numbers[-1], self.good}
        doomed = [number for number in numbers if number not in spared]
        for number in doomed[: max(0, len(numbers) - self.keep)]:
            folder = self._folder(number)
            partial = self.folder / f".{folder.name}.partial"
            os.replace(folder, partial)  # a version is there as a whole or not at all
            shutil.rmtree(partial)
