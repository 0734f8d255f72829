"""Named places where a process misbehaves, by the setting `server.failpoints`, so that races repeat in tests."""

import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Literal

Action = Literal["delay", "garbage", "exit"]

ACTIONS: Mapping[str, Action] = {
    "drafter.slow": "delay",  # before a batch is drafted
    "drafter.stale": "garbage",  # an answer names an earlier step
    "drafter.garbage": "garbage",  # a tree is none
    "link.cut": "garbage",  # a link ends; asked every half second
    "verifier.verdict": "exit",  # a step is committed, its verdict not sent
    "adapter.read": "exit",  # records were taken from Redis and nothing was done with them
    "adapter.step": "exit",  # an update is trained and no replica has it
    "adapter.push": "exit",  # an update is packed for a replica
    "adapter.acknowledge": "exit",  # a replica uses an update, and nobody has heard it say so
}
"""Every failpoint, and what its value means: `delay` seconds, the share of answers that are `garbage`, or the number of
the hit at which the process kills itself (`exit`, SIGKILL)."""

_enabled: dict[str, tuple[float, Iterator[int]]] = {}  # a value, and the numbers of its hits, which threads share


def parse(text: str) -> dict[str, float]:
    """Read NAME=VALUE;NAME=VALUE. Raises ValueError naming what is no failpoint or no value of one."""
    values = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, written = part.partition("=")
        action = ACTIONS.get(name)
        if action is None:
            raise ValueError(f"{name!r} is no failpoint; there are {', '.join(ACTIONS)}")
        try:
            value = float(written)
        except ValueError:
            raise ValueError(f"{part!r} is not NAME=NUMBER") from None
        fits, meaning = {
            "delay": (0 < value <= 60, "a delay is above 0 and at most 60 seconds"),
            "garbage": (0 < value <= 1, "a share of answers is above 0 and at most 1"),
            "exit": (value >= 1 and value % 1 == 0, "the number of a hit is a whole one from 1"),
        }[action]
        if not fits:
            raise ValueError(f"{part!r}: {meaning}")
        values[name] = value
    return values


def enable(text: str) -> None:
    """Enable these failpoints and no others in this process. Raises ValueError."""
    values = parse(text)
    _enabled.clear()
    _enabled.update({name: (value, itertools.count(1)) for name, value in values.items()})


def hit(name: str) -> bool:
    """Come to a failpoint: wait or die here if told to; whether the caller is to answer with garbage."""
    enabled = _enabled.get(name)
    if enabled is None:
        return False
    value, hits = enabled
    count, action = next(hits), ACTIONS[name]
    if action == "delay":
        time.sleep(value)
    elif action == "exit":
        if count == value:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        return int(count * value) > int((count - 1) * value)  # evenly spread, and the same in every run
    return False
