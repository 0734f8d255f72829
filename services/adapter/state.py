"""What one head's adapter remembers, in files that are complete or the ones before, and what all of them count."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import BaseModel, Field, PrivateAttr, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from coppice.adaptation.signals import Stream
from coppice.adaptation.weights import Weights
from coppice.errors import InvalidField
from coppice.training.answers import write_whole

from .decide import BanditState, PaperState

log = structlog.get_logger()

FILE = "state.json"
VERSIONS = 8  # on disk at most
_NAME = re.compile(r"version-(\d{8,})\.safetensors")


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
        write_whole(self._file(weights.version), save(changed, {"weights_hash": weights.hash.hex()}))
        numbers = self.numbers()
        old = [number for number in numbers[:-1] if number != good]
        for number in old[: max(0, len(numbers) - VERSIONS)]:
            self._file(number).unlink()

    def load(self, number: int) -> Weights:
        """Read a version. Raises InvalidField when there is none, its file is damaged, or it is of another head."""
        if not number:
            return self.deployed
        file = self._file(number)
        try:
            with safe_open(file, "pt") as opened:
                changed = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                expected = (opened.metadata() or {}).get("weights_hash")
        except (OSError, SafetensorError) as error:
            raise InvalidField("version", f"{file}: {error}") from None
        weights = self.deployed.changed(changed, number)
        if weights.hash.hex() != expected:
            raise InvalidField("version", f"{file} is damaged or of another head")
        return weights

    def _file(self, number: int) -> Path:
        return self.folder / f"version-{number:08d}.safetensors"


class State(BaseModel):
    """Everything that outlives the process. What records changed and how far they were read is saved together."""

    bandit: BanditState = BanditState()
    paper: PaperState = PaperState()
    positions: dict[Stream, Annotated[str, Field(pattern=r"^\d+-\d+$")]] = {}
    """the id of the last entry that was read of each stream"""
    numbers: dict[Stream, dict[str, int]] = {}  # by stream and sender, the highest number of an entry that was read
    paused: bool = False
    live: int = 0  # the version that is to be in use
    good: int = 0  # the last version that was found good
    newest: int = 0  # the highest number that was ever given to a version
    queries: int = 0
    reverts: int = 0
    history: list[dict[str, Any]] = []  # fields of each `QueryPoint` of the adapter's status
    changes: list[dict[str, Any]] = []  # fields of each `Change` of it
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
        write_whole(self._file, self.model_dump_json().encode())

    def next_number(self) -> int:
        """Return a number that no version had."""
        self.newest += 1
        return self.newest


class AdapterMetrics:
    """What the adapter counts, by head."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        named: dict[str, Any] = {"registry": self.registry, "namespace": "coppice", "subsystem": "adapter"}
        counter: Any = partial(Counter, **named)
        gauge: Any = partial(Gauge, **named)
        histogram: Any = partial(Histogram, **named)
        self.read = counter("records_read", "records read from Redis", ["head", "stream"])
        self.malformed = counter("records_malformed", "records that are not what they should be", ["head", "stream"])
        self.lost = counter("records_lost", "records that were sent and never read: trimmed or flushed", ["stream"])
        self.dropped = counter("samples_dropped", "samples that taught nothing", ["head", "reason"])
        self.actions = counter("actions", "what queries were used for", ["head", "action"])
        self.updates = counter("updates", "updates trained", ["head", "action"])
        self.failed = counter("updates_failed", "updates that changed nothing or were not finite", ["head", "reason"])
        self.reverts = counter("reverts", "times the weights were taken back", ["head", "reason"])
        self.signal = histogram("signal", "s of a query", ["head"], buckets=(0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500))
        self.waiting = gauge("samples_waiting", "texts to learn from, by kind of text or by buffer", ["head", "group"])
        self.active = gauge("active", "1 while it is the active adapter, 0 while it stands by")
        self.version = gauge("version", "version that is to be in use", ["head"])
        self.live = gauge("replica_version", "version in use", ["head", "replica"])
        self.stale = gauge("replicas_stale", "replicas that do not use the weights they are to use", ["head"])
        self.paused = gauge("paused", "1 while paused", ["head"])
        seconds = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
        self.train_seconds = histogram("train_seconds", "time of an update", ["head", "action"], buckets=seconds)
        self.sync_seconds = histogram(
            "sync_seconds", "time of a weight sync to all replicas", ["head"], buckets=seconds
        )
