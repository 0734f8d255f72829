"""What `auto` can choose in a step: whose trees to ask for, and how they become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.speculation.policy import Policy

PLAIN = "plain"
SINGLE = "single:"


@dataclass(frozen=True, slots=True)
class Arm:
    """One choice: the request's heads that are asked, by index, and how their trees become one."""

    name: str
    policy: Policy
    heads: tuple[int, ...]


def arms_of(heads: Sequence[str]) -> tuple[Arm, ...]:
    """Plain, each head alone, and with several heads all of them routed and merged."""
    alone = [Arm(SINGLE + name, Policy("route", tuple(heads)), (at,)) for at, name in enumerate(heads)]
    every = tuple(range(len(heads)))
    joint = [Arm(how, Policy(how, tuple(heads)), every) for how in ("route", "merge") if len(heads) > 1]
    return (Arm(PLAIN, Policy(PLAIN, ()), ()), *alone, *joint)
