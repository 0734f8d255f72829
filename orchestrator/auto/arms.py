"""What `auto` can choose in a step: whose trees to ask for, and how they become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.speculation.policy import Policy

PLAIN = "plain"
SINGLE = "single:"
CASCADE = "cascade"


@dataclass(frozen=True, slots=True)
class Arm:
    """One choice: how the trees become one, and the request's heads that are asked, by index; of a cascade in order."""

    name: str
    policy: Policy
    heads: tuple[int, ...]

    @property
    def first(self) -> tuple[int, ...]:
        """The heads that are asked at once."""
        return self.heads[:1] if self.name == CASCADE else self.heads


def arms_of(heads: Sequence[str]) -> tuple[Arm, ...]:
    """Plain, each head alone, and with several heads a cascade, route and merge."""
    alone = [Arm(SINGLE + name, Policy("route", tuple(heads)), (at,)) for at, name in enumerate(heads)]
    every, combined = tuple(range(len(heads))), {CASCADE: "merge", "route": "route", "merge": "merge"}
    joint = [Arm(name, Policy(how, tuple(heads)), every) for name, how in combined.items() if len(heads) > 1]
    return (Arm(PLAIN, Policy(PLAIN, ()), ()), *alone, *joint)
