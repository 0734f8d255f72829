"""The prefix cache: committed text in full blocks, each known by a hash of its ids, all before them and a salt."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge

from coppice.engine.kv_cache import BlockTable, KVPool
from coppice.wire.verifier import OpenSession

from .features import Numbers

_LATER = 2.0**-20  # of a use, for each block that lies further behind in the text: it is evicted earlier


def digest_of(before: bytes, ids: Sequence[int] = ()) -> bytes:
    """The hash of a block, given that of the one before it; of no ids, given a salt: what the first block is behind."""
    return sha256(before + np.array(ids, "<u4").tobytes()).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """What is known of a full block besides its KV: its hash, and (block_size, F) features of `layers`."""

    digest: bytes
    layers: tuple[int, ...] = ()
    features: Numbers | None = None


class Prefix:
    """One session's text as the cache knows it: its full blocks, and what has been committed behind them."""

    def __init__(self, table: BlockTable, cached: Sequence[CachedBlock], salt: str, layers: tuple[int, ...]) -> None:
        """cached: the blocks that it begins with and that need not be prefilled. Without a salt none will be kept."""
        self.table, self.blocks = table, list(cached)
        self.reused_tokens = len(cached) * table.block_size
        self._layers = layers
        self._salted, self._digest = bool(salt), cached[-1].digest if cached else digest_of(salt.encode())
        self.ids: list[int] = []  # that were appended and are in no full block yet
        self._rows: list[Numbers] = []

    def append(self, ids: Sequence[int], features: Numbers | None) -> None:
        """Take committed ids and their (n, F) features; their KV may not be in its place yet."""
        if self._salted:
            self.ids += ids
            self._rows += [] if features is None else [features]

    def cut(self) -> int:
        """Turn the first of `ids` into a full block, and return its number."""
        size = self.table.block_size
        self._digest = digest_of(self._digest, self.ids[:size])
        features = None
        if self._rows:
            rows = np.concatenate(self._rows) if len(self._rows) > 1 else self._rows[0]
            features, self._rows = rows[:size].copy(), [rows[size:]]
        del self.ids[:size]
        self.blocks.append(CachedBlock(self._digest, self._layers, features))
        return len(self.blocks) - 1


class PrefixCache:
    """The blocks that are kept, by their hash. Every method runs on the worker's thread."""

    def __init__(self, pool: KVPool, most_tokens: int, registry: CollectorRegistry) -> None:
        """`most_tokens`: that are kept at most; 0 keeps nothing. registry: of the cache's metrics."""
        self._pool, self._most = pool, most_tokens // pool.block_size
        self._held: dict[bytes, tuple[int, CachedBlock]] = {}  # with the block's number in the pool
        self._digests: dict[int, bytes] = {}  # by that number
        self._uses = itertools.count(1)
        named: dict[str, Any] = {"registry": registry, "namespace": "coppice", "subsystem": "verifier"}
        self._queries = Counter("prefix_cache_queries", "tokens of prompts that were looked up", **named)
        self._hits = Counter("prefix_cache_hits", "tokens of prompts that were not prefilled again", **named)
        self._evicted = Counter("prefix_cache_evictions", "tokens that were given up for others", **named)
        tokens = Gauge("prefix_cache_tokens", "tokens whose KV is kept, those of open sessions too", **named)
        tokens.set_function(lambda: len(self._held) * pool.block_size)

    def open(self, request: OpenSession, tokens: int) -> Prefix:
        """Room for `tokens` tokens of a session, the longest prefix that is here in it. Raises OutOfBlocks."""
        salt = request.salt if self._most else ""
        cached = self._find(request) if salt and not request.want_prompt_log_probs else []
        numbers = [number for number, _ in cached]
        table = self._pool.allocate(request.session, tokens, numbers)
        for number in set(table.blocks.tolist()).difference(numbers) & self._digests.keys():
            self._forget(number)
        use = next(self._uses)
        for number, at in enumerate(numbers):
            self._pool.keep(at, use - number * _LATER)
        prefix = Prefix(table, [block for _, block in cached], salt, request.feature_layers)
        self._queries.inc(len(request.ids))
        self._hits.inc(prefix.reused_tokens)
        return prefix

    def fill(self, prefix: Prefix) -> None:
        """Take in the blocks of a session that have become full and whose KV is in its place."""
        use = next(self._uses)
        while len(prefix.ids) >= self._pool.block_size:
            self._keep(prefix, prefix.cut(), use)

    def close(self, prefix: Prefix) -> None:
        """Give a session's room back; all its blocks were used just now, and those that were given up are back."""
        use = next(self._uses)
        for number in range(len(prefix.blocks)):
            self._keep(prefix, number, use)
        self._pool.free(prefix.table)

    def _find(self, request: OpenSession) -> list[tuple[int, CachedBlock]]:
        """The kept blocks that a session's ids begin with. The last id is in none of them: its logits are wanted."""
        cached: list[tuple[int, CachedBlock]] = []
        digest, size = digest_of(request.salt.encode()), self._pool.block_size
        for start in range(0, len(request.ids) - size, size):
            digest = digest_of(digest, request.ids[start : start + size])
            entry = self._held.get(digest)
            if entry is None or not set(request.feature_layers) <= set(entry[1].layers):
                break
            cached.append(entry)
        return cached

    def _keep(self, prefix: Prefix, number: int, use: int) -> None:
        """Keep the `number`th block of a session, the one that is here already if there is one."""
        block, at = prefix.blocks[number], int(prefix.table.blocks[number])
        if entry := self._held.get(block.digest):
            at, held = entry
            block = held if set(block.layers) <= set(held.layers) else block
        elif len(self._held) >= self._most:
            evicted = self._pool.give_up()
            if evicted is None:
                return
            self._forget(evicted)
        self._held[block.digest] = at, block
        self._digests[at] = block.digest
        self._pool.keep(at, use - number * _LATER)

    def _forget(self, at: int) -> None:
        del self._held[self._digests.pop(at)]
        self._evicted.inc(self._pool.block_size)
