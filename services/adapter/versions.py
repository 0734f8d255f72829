"""Weight versions on disk: each file holds what its version changed since the head was deployed."""

from __future__ import annotations

import re
from pathlib import Path

from coppice.weights.versions import Weights

from .atomic import BadFile, read_safetensors, replace_safetensors

_NAME = re.compile(r"version-(\d{8,})\.safetensors")


class Versions:
    """A folder of at most `keep` versions. The newest and the good one are never deleted to make room."""

    def __init__(self, folder: Path, deployed: Weights, keep: int = 8) -> None:
        """`deployed` are the weights that versions are changes of; they are version 0, and have no file."""
        if keep < 2:
            raise ValueError("the newest and the good version need two places")
        self.folder, self.deployed, self.keep = folder, deployed, keep
        self.good = 0
        """the version to go back to"""
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(".*.partial"):  # of a process that ended meanwhile
            partial.unlink()

    def numbers(self) -> list[int]:
        """List the versions on disk, ascending."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def save(self, weights: Weights) -> None:
        """Write the tensors that differ from version 0, complete or not at all; the oldest versions make room.

        Raises ValueError for a number that is there already.
        """
        if weights.version < 1 or weights.version in self.numbers():
            raise ValueError(f"version {weights.version} is there already")
        changed = {name: weights.tensors[name] for name in weights.differing(self.deployed)}
        replace_safetensors(self._file(weights.version), changed, {"weights_hash": weights.hash.hex()})
        numbers = self.numbers()
        old = [number for number in numbers if number not in (numbers[-1], self.good)]
        for number in old[: max(0, len(numbers) - self.keep)]:
            self._file(number).unlink()

    def load(self, number: int) -> Weights:
        """Read a version. Raises BadFile when there is none, its file is damaged or it is of another head."""
        if not number:
            return self.deployed
        file = self._file(number)
        changed, facts = read_safetensors(file)
        weights = self.deployed.changed(changed, number)
        if weights.hash.hex() != facts.get("weights_hash"):
            raise BadFile(f"{file} is damaged or of another head")
        return weights

    def _file(self, number: int) -> Path:
        return self.folder / f"version-{number:08d}.safetensors"
