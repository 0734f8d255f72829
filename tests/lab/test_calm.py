"""What disturbs an answer, beside real neighbours and by counts made up; and what is asked again then."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from coppice.speculation.sampling import SamplingParams
from coppice.training.progress import Progress
from lab import calm
from lab.asking import GREEDY, Ids
from lab.calm import Calm
from lab.turns import TIMES, timed_in_turns

CORES = sorted(os.sched_getaffinity(0))
TICKS = round(1 / calm.TICK_S)
"""of a second"""
ME, CHILD, NEIGHBOUR = os.getpid(), 900_001, 900_002


@contextmanager
def neighbours() -> Iterator[None]:
    """As many processes that do nothing but run as there are cores, none of them below this one."""
    told = f"for core in {' '.join(map(str, CORES))}; do (while :; do :; done) >/dev/null 2>&1 & echo $!; done"
    started = subprocess.run(["sh", "-c", told], stdout=subprocess.PIPE, timeout=30, check=True)
    try:
        yield
    finally:
        for pid in started.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


def work(seconds: float = 0.4) -> None:
    """Keep this core busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_real_neighbours_disturb_nearly_everything() -> None:
    watch = Calm()
    with neighbours():
        assert sum(watch.during(work)[1] for _ in range(8)) >= 7
    assert watch.watched


class Kernel:
    """What the kernel says: seconds that each core was idle and stolen, and that processes used."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at_s, self.running = folder, 0.0, 1
        self.idle, self.steal, self.used = 100.0, 10.0, {ME: 7.0, CHILD: 8.0, NEIGHBOUR: 9.0}
        self.write()

    def write(self) -> None:
        """Say it."""
        cores = [f"cpu{core} 50 0 9 {round(self.idle * TICKS)} 3 0 0 {round(self.steal * TICKS)} 0 0" for core in CORES]
        lines = ["cpu 1 2 3 4 5 6 7 8 0 0", *cores, "intr 5 6 7", f"procs_running {self.running}", ""]
        (self.folder / "stat").write_text("\n".join(lines))
        for pid, parent in ((ME, 1), (CHILD, ME), (NEIGHBOUR, 1)):
            (self.folder / str(pid)).mkdir(exist_ok=True)
            columns = ["S", parent, *[0] * 9, round(self.used[pid] * TICKS), 0, 0, 0, 20, 0]
            (self.folder / str(pid) / "stat").write_text(f"{pid} (a (b) c) {' '.join(map(str, columns))}\n")

    def passes(
        self, seconds: float, own: float = 0.0, child: float = 0.0, others: float = 0.0, steal: float = 0
    ) -> None:
        """Let time pass, of which shares of all cores were used by whom."""
        of_all = seconds * len(CORES)
        self.at_s += seconds
        self.idle += seconds * (1 - own - child - others - steal)
        self.steal += seconds * steal
        for pid, share in ((ME, own), (CHILD, child), (NEIGHBOUR, others)):
            self.used[pid] += share * of_all
        self.write()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Counts made up, and a core that spins as fast as ever."""
    made_up = Kernel(tmp_path)
    monkeypatch.setattr(calm, "PROC", tmp_path)
    monkeypatch.setattr(calm, "time", SimpleNamespace(perf_counter=lambda: made_up.at_s))
    monkeypatch.setattr(calm, "_spin_s", lambda: 0.001)
    monkeypatch.setattr(calm, "_fastest_s", lambda: 0.001)
    return made_up


@pytest.mark.parametrize(
    ("seconds", "shares", "disturbed"),
    [
        (10.0, {"own": 0.3, "child": 0.7}, False),
        (10.0, {"child": 0.5}, False),
        (10.0, {"child": 0.5, "others": 0.09}, False),
        (10.0, {"child": 0.5, "others": 0.12}, True),
        (10.0, {"child": 0.5, "steal": 0.09}, False),
        (10.0, {"child": 0.5, "steal": 0.12}, True),
        (0.02, {"child": 0.2, "others": 0.5}, False),  # less than the kernel counts
        (0.2, {"child": 0.2, "others": 0.5}, True),
    ],
)
def test_what_others_took_disturbs_and_what_is_below_this_process_does_not(
    kernel: Kernel, seconds: float, shares: dict[str, float], disturbed: bool
) -> None:
    watch = Calm()
    assert watch.during(lambda: kernel.passes(seconds, **shares)) == (None, disturbed)
    assert watch.watched


def test_a_slow_core_or_a_full_queue_at_either_end_disturbs(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Calm()

    def ends(before: Sequence[float], after: Sequence[float], running: int = 1) -> bool:
        """Whether spins that take so many times the fastest's time disturb."""
        spins = iter([*before, *after])
        monkeypatch.setattr(calm, "_spin_s", lambda: 0.001 * next(spins))
        kernel.running = running
        kernel.write()
        disturbed = watch.during(lambda: kernel.passes(1.0, child=0.8))[1]
        assert not list(spins)
        return disturbed

    slow = [calm.SLOW + 0.1] * calm.TRIES
    assert not ends([1.0], [1.2])
    assert not ends([*slow[1:], 1.0], [*slow[1:], 1.0])
    assert ends(slow, [1.0])
    assert ends([1.0], slow)
    assert not ends([1.0], [1.0], running=len(CORES))
    assert ends([1.0] * calm.TRIES, [1.0] * calm.TRIES, running=len(CORES) + 1)


def test_without_counts_nothing_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    (tmp_path / "stat").write_text("\n".join(f"cpu{core} 0 0 0 0 0 0 0 0 0 0" for core in CORES) + "\nprocs_running 0")
    for folder in (tmp_path, tmp_path / "none"):  # a sandbox's, and a system's without them
        monkeypatch.setattr(calm, "PROC", folder)
        watch = Calm()
        watch.count(4, again=False, disturbed=watch.during(lambda: None)[1])
        assert (watch.watched, watch.disturbed) == (False, 0)
        assert str(watch).startswith("4 answers were timed; nothing was watched")


# --- asking again ---


class Told(Calm):
    """Calls a way of a group disturbed as often as it is told to."""

    def __init__(self, disturbed: dict[tuple[str, Ids], int]) -> None:
        super().__init__()
        self.left = Counter(disturbed)

    def during(self, act):  # type: ignore[no-untyped-def]
        given = act()
        self.left[given[:2]] -= 1
        return given, self.left[given[:2]] >= 0


def taken(disturbed: dict[tuple[str, Ids], int], groups: int) -> tuple[Told, dict[str, Counter[Ids]], list[list[int]]]:
    """Ask two ways; returns the counts, how often each was asked what, and which of its answers was kept."""
    asked: dict[str, Counter[Ids]] = {"a": Counter(), "b": Counter()}

    def way(name: str, prompts: Sequence[Ids], sampling: SamplingParams) -> tuple[str, Ids, int]:
        (ids,) = prompts
        asked[name][ids] += 1
        return name, ids, asked[name][ids]

    told = Told(disturbed)
    ways = {name: lambda *group, name=name: way(name, *group) for name in asked}
    with Progress("answers") as progress:
        given = timed_in_turns(ways, [([(number,)], GREEDY) for number in range(groups)], progress, told)
    assert [{its[:2] for its in each.values()} for each in given] == [
        {("a", (number,)), ("b", (number,))} for number in range(groups)
    ]
    return told, asked, [[its[2] for its in each.values()] for each in given]


def test_a_disturbed_pair_is_asked_again_as_a_whole_and_the_calm_one_counts() -> None:
    told, asked, kept = taken({("b", (2,)): 1}, 4)
    assert asked["a"] == asked["b"] == {(0,): 2, (1,): 1, (2,): 2, (3,): 1}  # the first one warms up, too
    assert kept == [[2, 2], [1, 1], [2, 2], [1, 1]]
    assert str(told) == "2 of 8 timed answers were asked again, 0 stayed disturbed"


def test_asking_again_ends() -> None:
    told, asked, _ = taken({("a", (1,)): 99}, 20)
    assert asked["a"][1,] == asked["b"][1,] == TIMES
    assert (told.answers, told.again, told.disturbed) == (40, 2, 2)
    told, asked, _ = taken({("a", (number,)): 99 for number in range(5)}, 5)
    assert asked["a"] == {(number,): 2 + (number == 0) for number in range(5)}  # in all as many again as there are
    assert (told.answers, told.again, told.disturbed) == (10, 10, 10)
