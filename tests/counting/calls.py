"""Counts calls of the project's own functions a step: `python -m tests.counting.calls [POLICY ...]`.

A function counts when it is called at least 0.8 times a step, so that what happens once a request is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coppice.client import Client
from coppice.stack import process
from coppice.stack.spec import HeadSpec
from tests import fork_server
from tests.stacks import serving

PROMPT = "def read_lines(path):\n"
HEADS = ("specblock-code", "lookup")
NEW_TOKENS, TRIES = 64, 3
REGULAR = 0.8  # calls a step from which a function counts


@dataclass(frozen=True)
class Calls:
    """Calls a step by process and function."""

    steps: int
    by_process: dict[str, dict[str, float]]

    def total(self, process: str) -> float:
        """All of a process's calls a step."""
        return sum(self.by_process[process].values())


@contextmanager
def _counted(folder: Path) -> Iterator[None]:
    """Services that start meanwhile count their calls."""

    def fork(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> process.Fork:
        counting = {**environment, "COUNT_CALLS": str(folder)}
        return fork_server.fork("tests.counting.counted", [module, *arguments], log, counting)

    before, process.fork = process.fork, fork  # type: ignore[assignment]
    try:
        yield
    finally:
        process.fork = before


def _read(folder: Path, pid: int) -> Counter[str]:
    """What a process has counted by now."""
    (folder / f"{pid}.ask").touch()
    until = time.monotonic() + 30.0
    while (folder / f"{pid}.ask").exists():
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} does not tell its counts")
        time.sleep(0.01)
    return Counter(json.loads((folder / f"{pid}.json").read_text(encoding="utf-8")))


def count(policies: Sequence[str], heads: Sequence[str] = HEADS) -> dict[str, Calls]:
    """Calls a step under each policy, of a process by the sampled answer of some that takes it the fewest: a full
    machine adds late drafts and cut trees to others.
    """
    found: dict[str, Calls] = {}
    with tempfile.TemporaryDirectory() as name, _counted(Path(name)):
        shipped = map(HeadSpec.parse, heads)
        patient = serving(Path(name), None, *shipped, draft_deadline_ms=5000)  # late drafts take calls of their own
        with patient as stack, Client(stack.address) as client:
            pids = {name: ready.pid for name, ready in stack.services.items()}
            for policy in policies:
                tries = [_measured(client, Path(name), pids, policy, seed) for seed in range(TRIES)]
                fewest = {role: min(tries, key=lambda calls: calls.total(role)).by_process[role] for role in pids}
                found[policy] = Calls(min(calls.steps for calls in tries), fewest)
    return found


def _measured(client: Client, folder: Path, pids: Mapping[str, int], policy: str, seed: int) -> Calls:
    before = {role: _read(folder, pid) for role, pid in pids.items()}
    answer = client.generate(PROMPT, policy=policy, temperature=0.8, seed=seed, max_new_tokens=NEW_TOKENS)
    steps, counts = len(answer.accept_lengths), dict[str, dict[str, float]]()
    for role, pid in pids.items():
        made = {name: calls / steps for name, calls in (_read(folder, pid) - before[role]).items()}
        counts[role] = {name: calls for name, calls in made.items() if calls >= REGULAR}
    return Calls(steps, counts)


def main() -> None:
    """Print each process's functions and how often a step calls them."""
    for policy, calls in count(sys.argv[1:] or [f"single:{HEADS[0]}", "auto"]).items():
        for role, counted in calls.by_process.items():
            print(policy, calls.steps, f"steps: {role} {calls.total(role):.0f}")
            for name, a_step in sorted(counted.items(), key=lambda one: -one[1]):
                print(f"  {a_step:7.1f} {name}")


if __name__ == "__main__":
    main()
