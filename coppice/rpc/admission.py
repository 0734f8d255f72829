"""Admission to a bounded resource: clients take turns, a bounded queue, a bounded wait."""

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import AsyncIterator

from coppice.errors import Overloaded

_SHORTEST_HINT_S, _LONGEST_HINT_S = 0.1, 60.0
_TRIES, _LONGEST_TURNS = 2, 8  # how many of the refused come back for a free place; after how many turns at most


class Admission:
    """`capacity` units (sessions, KV tokens), for which clients take turns (start-time fair queueing). For one loop."""

    def __init__(self, what: str, capacity: int, queued: int, wait_s: float) -> None:
        self.what, self.capacity, self.queued, self.wait_s = what, capacity, queued, wait_s
        self.used = 0
        self._held_s = 0.0  # moving average of how long units are held
        self._next_back = 0.0  # when the latest who was refused is to come back
        self._waiting: list[tuple[int, asyncio.Event]] = []  # with the round each is served in
        self._round = 0  # of the latest who was served
        self._next_round: dict[str, int] = {}  # by client; forgotten while nobody waits

    @property
    def waiting(self) -> int:
        """Callers in the queue."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def admit(self, units: int = 1, client: str = "") -> AsyncIterator[None]:
        """Hold `units` inside the block; who waits does so behind those of the same client. Raises Overloaded at once
        when they can never fit or the queue is full, or after `wait_s` in the queue.
        """
        await self._acquire(units, client)
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            yield
        finally:
            self.used -= units
            held_s = clock() - began
            self._held_s = 0.9 * (self._held_s or held_s) + 0.1 * held_s
            self._wake()

    def _full(self, units: int, reason: str) -> Overloaded:
        """The refusal, with a hint when to come back, each later than the last: a few come back for each free place."""
        now = asyncio.get_running_loop().time()
        later = max(now + _SHORTEST_HINT_S, self._next_back) + self._held_s * units / self.capacity / _TRIES
        longest = min(_LONGEST_HINT_S, _SHORTEST_HINT_S + _LONGEST_TURNS * self._held_s)
        self._next_back = min(later, now + longest)
        return Overloaded(reason, self._next_back - now)

    def check(self, units: int = 1) -> bool:
        """Whether `admit` would have them hold at once; else they wait. Raises Overloaded when it would, at once."""
        if units > self.capacity:
            raise Overloaded(f"{units} {self.what} asked for, {self.capacity} is all there is")
        if not self._waiting and self.used + units <= self.capacity:
            return True
        if len(self._waiting) >= self.queued:
            raise self._full(units, f"no {self.what} free and {len(self._waiting)} requests waiting")
        return False

    async def _acquire(self, units: int, client: str) -> None:
        """Wait for this caller's turn. A caller takes its units itself, in the turn of the loop in which it sees that
        they are there, and leaves the queue itself: nothing is granted to one who may just be giving up.
        """
        if self.check(units):
            self.used += units
            self._next_round = {client: self._round + 1}
            return
        called = asyncio.Event()
        place = max(self._round, self._next_round.get(client, 0)), called
        self._next_round[client] = place[0] + 1
        self._waiting.insert(bisect_right(self._waiting, place[0], key=lambda waiting: waiting[0]), place)
        try:
            async with asyncio.timeout(self.wait_s):
                while self._waiting[0] is not place or self.used + units > self.capacity:
                    called.clear()
                    await called.wait()
            self.used += units
            self._round = place[0]
        except TimeoutError:
            raise self._full(units, f"no {self.what} became free within {self.wait_s:g} s") from None
        finally:
            self._waiting.remove(place)
            if not self._waiting:
                self._next_round.clear()
            self._wake()

    def _wake(self) -> None:
        """Have the first in the queue look whether its units are there."""
        if self._waiting:
            self._waiting[0][1].set()
