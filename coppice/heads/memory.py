"""What a look-up head remembers: the texts of ended sessions, apart for each salt, bounded in tokens and in salts."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from coppice.heads.lookup import TEXT_END, Lookup

SALTS = 64  # remembered at once
BLOCKS = 8  # parts that a full memory consists of, about: it forgets one at a time
CHUNK = 4096  # ids counted before other sessions get their turn


class Memory:
    """The latest texts of one salt, in blocks of several texts or of a long one. Each block has an index of its own."""

    def __init__(self, most: int) -> None:
        """`most`: tokens that are remembered."""
        self._most = most
        self.blocks: deque[Lookup] = deque()
        """the latest first"""
        self.tokens = 0

    def add(self, ids: list[int]) -> None:
        """Remember a text, the end of one that is too long, and forget the oldest block when there is no room.

        It is found once `count` has taken it in.
        """
        text = [*ids[-self._most + 1 :], TEXT_END]
        if not self.blocks or len(self.blocks[0].ids) + len(text) > self._most // BLOCKS:
            self.blocks.appendleft(Lookup())
        self.blocks[0].ids += text
        self.tokens += len(text)
        while self.tokens > self._most:
            self.tokens -= len(self.blocks.pop().ids)

    def count(self) -> Iterator[None]:
        """Take in what was added, a chunk for each item: texts may be long, and other sessions wait."""
        for block in list(self.blocks):
            while block.uncounted:
                block.count(CHUNK)
                yield


class Memories:
    """The memories of a head by salt. The salt that was used longest ago is forgotten when there are too many."""

    def __init__(self, most: int) -> None:
        """`most`: tokens that are remembered for each salt; 0: none."""
        self._most = most
        self._of: OrderedDict[str, Memory] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Tokens that are remembered for all salts together."""
        return sum(memory.tokens for memory in self._of.values())

    def of(self, salt: str) -> Memory | None:
        """What is remembered for a salt; None for the empty one, which remembers nothing."""
        if not salt or not self._most:
            return None
        memory = self._of.setdefault(salt, Memory(self._most))
        self._of.move_to_end(salt)
        if len(self._of) > SALTS:
            self._of.popitem(last=False)
        return memory
