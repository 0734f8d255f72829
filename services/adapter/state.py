"""What one head's adapter remembers: one JSON file and the latest versions of the weights.

Every file is complete or the one before: written beside its place, flushed, renamed into it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Self

import structlog
from pydantic import BaseModel, Field, PrivateAttr, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from coppice.adaptation.signals import Stream
from coppice.adaptation.weights import Weights
from coppice.errors import InvalidField

from .decide import BanditState
from .paper import PaperState

log = structlog.get_logger()

FILE = "state.json"
VERSIONS = 8
"""on disk at most"""
_NAME = re.compile(r"version-(\d{8,})\.safetensors")


class BadFile(InvalidField):
    """A version's file is not there, is not what was written, or is of other weights."""

    def __init__(self, reason: str) -> None:
        super().__init__("version", reason)


def _replace(file: Path, data: bytes) -> None:
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, file)


class Versions:
    """The latest versions of a head's weights, as files of the tensors that differ from the deployed ones."""

    def __init__(self, folder: Path, deployed: Weights) -> None:
        """`deployed`: version 0, which has no file."""
        self.folder, self.deployed = folder, deployed

    def numbers(self) -> list[int]:
        """List the versions on disk, ascending."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def save(self, weights: Weights, good: int) -> None:
        """Write a version, complete or not at all. The oldest ones make room, but not the good one."""
        changed = {name: weights.tensors[name].contiguous() for name in weights.differing(self.deployed)}
        _replace(self._file(weights.version), save(changed, {"weights_hash": weights.hash.hex()}))
        numbers = self.numbers()
        old = [number for number in numbers[:-1] if number != good]
        for number in old[: max(0, len(numbers) - VERSIONS)]:
            self._file(number).unlink()

    def load(self, number: int) -> Weights:
        """Read a version. Raises BadFile when there is none, its file is damaged, or it is of another head."""
        if not number:
            return self.deployed
        file = self._file(number)
        try:
            with safe_open(file, "pt") as opened:
                changed = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                expected = (opened.metadata() or {}).get("weights_hash")
        except (OSError, SafetensorError) as error:
            raise BadFile(f"{file}: {error}") from None
        weights = self.deployed.changed(changed, number)
        if weights.hash.hex() != expected:
            raise BadFile(f"{file} is damaged or of another head")
        return weights

    def _file(self, number: int) -> Path:
        return self.folder / f"version-{number:08d}.safetensors"


class QueryPoint(BaseModel):
    """One query, as the adapter's status tells of it."""

    query: int
    tau: float
    tokens_per_s: float
    s: float
    version: int | None
    """None: the weights changed meanwhile"""
    action: str


class Change(BaseModel):
    """One change of the weights, as the adapter's status tells of it."""

    query: int
    what: str
    version: int
    train_s: float
    sync_s: float
    why: str


class State(BaseModel):
    """Everything that outlives the process. What records changed and how far they were read is saved together."""

    bandit: BanditState = BanditState()
    paper: PaperState = PaperState()
    positions: dict[Stream, Annotated[str, Field(pattern=r"^\d+-\d+$")]] = {}
    """the id of the last entry that was read of each stream"""
    numbers: dict[Stream, dict[str, int]] = {}
    """by stream and sender, the highest number of an entry that was read"""
    paused: bool = False
    live: int = 0
    """the version that is to be in use"""
    good: int = 0
    """the last version that was found good"""
    newest: int = 0
    """the highest number that was ever given to a version"""
    queries: int = 0
    reverts: int = 0
    history: list[QueryPoint] = []
    changes: list[Change] = []
    _file: Path = PrivateAttr(Path(FILE))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what an earlier run wrote into the folder; a damaged file counts as none."""
        file = folder / FILE
        state = cls()
        if file.exists():
            try:
                state = cls.model_validate_json(file.read_bytes())
            except (ValidationError, OSError) as error:
                log.warning("the state cannot be read and starts anew", file=str(file), why=str(error)[:200])
        state._file = file
        return state

    def save(self) -> None:
        """Write it to the folder that it was loaded from."""
        _replace(self._file, self.model_dump_json().encode())

    def next_number(self) -> int:
        """Return a number that no version had."""
        self.newest += 1
        return self.newest
