"""Several ways to do the same, in turns, and again where neighbours disturbed what was timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

from coppice.client.completion import Completion
from coppice.training.progress import Progress
from lab.asking import Act, Ask, Group, K, T
from lab.calm import Calm

TIMES = 4
"""that a group is asked, at most"""


@dataclass
class Taken(Generic[K, T]):
    """What every way gave for a group in one turn, and whether none of them was disturbed."""

    group: Group
    number: int
    given: dict[K, T]
    calm: bool
    times: int = 1
    """that it was asked"""


def in_turn(
    ways: Mapping[K, Act[T]], group: Group, number: int, progress: Progress | None, calm: Calm | None = None
) -> Taken[K, T]:
    """Have every way act on a group; for groups of odd numbers the last way is the first. `calm` watches each."""
    given, disturbed = {}, False
    for way in list(ways)[:: -1 if number % 2 else 1]:
        act = partial(ways[way], *group)
        given[way], its = calm.during(act) if calm else (act(), False)
        disturbed |= its
        if progress:
            progress.add(len(group[0]))
    return Taken(group, number, {way: given[way] for way in ways}, not disturbed)


def ask_again(ways: Mapping[K, Act[T]], taken: Sequence[Taken[K, T]], progress: Progress, calm: Calm) -> None:
    """Ask disturbed groups again, all ways so that they stay pairs, those first that were asked the least.

    A group is asked TIMES times at most, and in all not more groups than there are.
    """
    for _ in taken:
        disturbed = [each for each in taken if not each.calm and each.times < TIMES]
        if not disturbed:
            break
        progress.say(f"asking again: {len(disturbed)} groups were disturbed")
        one = min(disturbed, key=lambda each: each.times)
        again = in_turn(ways, one.group, one.number, None, calm)
        one.given, one.calm, one.times = again.given, again.calm, one.times + 1


def timed_in_turns(
    ways: Mapping[K, Act[T]], groups: Sequence[Group], progress: Progress, calm: Calm
) -> list[dict[K, T]]:
    """What every way gave for each group. The first group is asked before, uncounted; disturbed ones again."""
    in_turn(ways, groups[0], 1, progress)
    taken = [in_turn(ways, group, number, progress, calm) for number, group in enumerate(groups)]
    ask_again(ways, taken, progress, calm)
    count(taken, calm)
    return [each.given for each in taken]


def count(taken: Sequence[Taken[K, T]], calm: Calm) -> None:
    """Count what was taken."""
    for each in taken:
        calm.count(len(each.given) * len(each.group[0]), each.times > 1, not each.calm)


def compare(
    ways: Mapping[K, Ask], groups: Sequence[Group], progress: Progress, calm: Calm | None = None
) -> dict[K, list[Completion]]:
    """Every way's answers to all groups, in turns; with `calm` they are timed, see `timed_in_turns`."""
    if calm:
        given = timed_in_turns(ways, groups, progress, calm)
    else:
        given = [in_turn(ways, group, number, progress).given for number, group in enumerate(groups)]
    return {way: [answer for each in given for answer in each[way]] for way in ways}
