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
    """One choice: the request's heads that are asked, by index, and how their trees become one.

    Of a cascade the first head is asked, and the second one only where the first one's tree promises too little.
    """

    name: str
    policy: Policy
    heads: tuple[int, ...]

    @property
    def first(self) -> tuple[int, ...]:
        """The heads that are asked at once."""
        return self.heads[:1] if self.name == CASCADE else self.heads


def arms_of(heads: Sequence[str]) -> tuple[Arm, ...]:
    """Plain, each head alone, and with several heads a cascade of two, and all of them routed and merged."""
    alone = [Arm(SINGLE + name, Policy("route", tuple(heads)), (at,)) for at, name in enumerate(heads)]
    every = tuple(range(len(heads)))
    combined = {CASCADE: "merge", "route": "route", "merge": "merge"}
    joint = [Arm(name, Policy(how, tuple(heads)), every) for name, how in combined.items() if len(heads) > 1]
    return (Arm(PLAIN, Policy(PLAIN, ()), ()), *alone, *joint)
