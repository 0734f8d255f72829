"""A run's work folder, which lies beside the model folder that it makes, and how a folder is put in its place."""

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from coppice.training.data.corpora import parse_spec

BEST = "best.safetensors"
"""in a run's work folder: the weights to export"""


@dataclass(frozen=True)
class Run:
    """What a model card tells of a run."""

    title: str
    command: str
    data: dict[str, dict[str, Any]]
    """as in data.json"""
    state: dict[str, Any]
    """as in the newest checkpoint"""
    held_out: dict[str, float]
    """held-out loss of each domain"""
    target: str = ""
    """the name of a head's target"""


def work_folder(out: Path) -> Path:
    """Return where a run keeps what is not shipped: beside the model folder, which can so be copied as it is."""
    return out.with_name(out.name + ".work")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step-*"))


def write_run(work: Path, title: str, lines: list[str], flags: dict[str, str]) -> None:
    """Write down the command that starts this run, directories stripped, for the card."""
    parts = [f"--data '{parse_spec(line).public}'" for line in lines]
    parts += [f"--{name} {value}".strip() for name, value in flags.items()]
    work.mkdir(parents=True, exist_ok=True)
    run = {"title": title, "command": f"coppice train {title} " + " ".join(parts), "target": flags.get("target", "")}
    (work / "run.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def read_run(work: Path) -> Run:
    """Read what a card tells of the run in `work`. Held-out losses are those of its last evaluation."""
    state = json.loads((checkpoints(work / "checkpoints")[-1] / "state.json").read_text(encoding="utf-8"))
    run = json.loads((work / "run.json").read_text(encoding="utf-8"))
    facts = json.loads((work / "data" / "data.json").read_text(encoding="utf-8"))
    return Run(**run, data=facts, state=state, held_out=state["held_out"])


@contextmanager
def stop_signal() -> Iterator[Event]:
    """Let SIGTERM set an event, so that what works can end at a place to go on from."""
    stopping = Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Give an empty folder to write into; at the end, and only without an error, it takes the place of `out`."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone, but images run as another user
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
