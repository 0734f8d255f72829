"""Whether neighbours disturbed what was timed: what else the cores did meanwhile, and how fast they were."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SHARE = 0.1
"""of the usable cores' time that others may take from what is timed"""
GRAIN_S = 0.03
"""that counts as nothing: the kernel counts the time of each core and process in hundredths of a second"""
SLOW = 2.0
"""times the fastest spin, above which a core is slow: virtual ones are at 1.4 for minutes, and answers hardly slower"""
TURNS, CALIBRATIONS = 50_000, 200  # of a spin, about a millisecond; spins of which the fastest counts
TRIES = 5  # spins in a row: by the last one the services have done what they do behind an answer
PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
IDLE, STEAL = slice(3, 5), 7  # of a core's columns in /proc/stat; waiting for a disk is idle, too
PARENT, USED = 1, slice(11, 15)  # of a process's columns behind its name in /proc/PID/stat; ended children included


@dataclass(frozen=True, slots=True)
class Moment:
    """What the usable cores have done until now, in seconds, those of all cores added up."""

    at_s: float
    cores: int
    idle_s: float
    steal_s: float
    """taken by the hypervisor"""
    own_s: float
    """used by this process and all below it"""
    crowded: bool
    """whether this core is slow, or as many others are ready to run as the machine has cores"""

    @classmethod
    def now(cls) -> Moment | None:
        """Spin a little and read the kernel's counts, in some 5 ms; None where there are none."""
        if not (PROC / "stat").exists():
            return None
        crowded = all(_spin_s() > SLOW * _fastest_s() or _full() for _ in range(TRIES))
        at_s, counts = time.perf_counter(), _counts()
        usable = [counts[name] for core in os.sched_getaffinity(0) if (name := f"cpu{core}") in counts]
        if not any(map(any, usable)):  # a sandbox's
            return None
        idle_s, steal_s = (TICK_S * sum(each) for each in zip(*((sum(c[IDLE]), c[STEAL]) for c in usable), strict=True))
        return cls(at_s, len(usable), idle_s, steal_s, _own_s(), crowded)

    def disturbed_since(self, began: Moment) -> bool:
        """Whether others took more than their share from what was done since, or crowded the cores at an end of it."""
        time_s = (self.at_s - began.at_s) * self.cores
        others_s = time_s - (self.idle_s - began.idle_s) - (self.own_s - began.own_s)
        taken_s = max(others_s, self.steal_s - began.steal_s)
        return began.crowded or self.crowded or taken_s > SHARE * time_s + GRAIN_S


@dataclass(slots=True)
class Calm:
    """How many answers were timed, how many of them were asked again, and how many stayed disturbed."""

    answers: int = 0
    again: int = 0
    disturbed: int = 0
    watched: bool = True
    """whether this system says what its cores do"""

    def during(self, act: Callable[[], T]) -> tuple[T, bool]:
        """What an act gives, and whether it was disturbed."""
        began, given, ended = Moment.now(), act(), Moment.now()
        if began is None or ended is None:
            self.watched = False
            return given, False
        return given, ended.disturbed_since(began)

    def count(self, answers: int, again: bool, disturbed: bool) -> None:
        """Count answers that were timed together."""
        self.answers += answers
        self.again += answers * again
        self.disturbed += answers * disturbed

    def __str__(self) -> str:
        if not self.watched:
            return f"{self.answers} answers were timed; nothing was watched: this system does not say what its cores do"
        return f"{self.again} of {self.answers} timed answers were asked again, {self.disturbed} stayed disturbed"


def _spin_s() -> float:
    began = time.perf_counter()
    for _ in range(TURNS):
        pass
    return time.perf_counter() - began


@cache
def _fastest_s() -> float:
    """The spin's time when nothing is in its way."""
    return min(_spin_s() for _ in range(CALIBRATIONS))


def _counts() -> dict[str, list[int]]:
    """The numbers of each line of /proc/stat."""
    lines = (PROC / "stat").read_text(encoding="ascii").splitlines()
    return {name: list(map(int, numbers)) for name, *numbers in map(str.split, lines)}


def _full() -> bool:
    """Whether beside this thread as many others run, or wait to run, as there are cores."""
    counts = _counts()
    return counts["procs_running"][0] > sum(name.startswith("cpu") for name in counts) - 1


def _own_s() -> float:
    """Seconds of cores that this process and all below it have used, those that ended included."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for folder in PROC.glob("[0-9]*"):
        try:
            columns = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        used[int(folder.name)] = sum(map(int, columns[USED]))
        children[int(columns[PARENT])].append(int(folder.name))
    own = [os.getpid()]
    for pid in own:
        own += children[pid]
    return TICK_S * sum(used[pid] for pid in own)
