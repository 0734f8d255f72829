"""The sessions that a verifier holds, and the KV that each was given when it opened."""

from __future__ import annotations

import itertools
from dataclasses import replace

from coppice.config.sections import VerifierSettings
from coppice.engine.engine import Engine
from coppice.engine.kv_cache import KVPool, OutOfBlocks
from coppice.errors import InvalidField, NotFound, Unavailable
from coppice.limits import BLOCK_SIZE, TREE_ROOM
from coppice.telemetry import PrefixCacheMetrics, SessionMetrics
from coppice.wire.verifier import OpenSession

from .features import Feed
from .prefix import CachedBlock, Prefix, block_digest, root_digest
from .session import Session

_LATER = 2.0**-20  # of a use, for each block that lies further behind in the text: it is given up earlier


class PrefixCache:
    """The blocks that are kept, by their hash. Every method runs on the worker's thread."""

    def __init__(self, pool: KVPool, most_tokens: int, metrics: PrefixCacheMetrics) -> None:
        """`most_tokens`: that are kept at most; 0 keeps nothing."""
        self._pool, self._metrics = pool, metrics
        self._most = most_tokens // pool.block_size
        self._held: dict[bytes, tuple[int, CachedBlock]] = {}  # with the block's number in the pool
        self._digests: dict[int, bytes] = {}  # by that number
        self._uses = itertools.count(1)
        metrics.tokens.set_function(lambda: len(self._held) * pool.block_size)

    def open(self, request: OpenSession, tokens: int) -> Prefix:
        """Room for `tokens` tokens of a session, the longest prefix that is here in it. Raises OutOfBlocks."""
        salt = request.salt if self._most else ""
        found = self._find(request) if salt and not request.want_prompt_log_probs else []
        numbers = [number for number, _ in found]
        table = self._pool.allocate(request.session, tokens, numbers)
        for number in set(table.blocks.tolist()).difference(numbers) & self._digests.keys():
            self._forget(number)
        use = next(self._uses)
        for number, at in enumerate(numbers):
            self._pool.keep(at, use - number * _LATER)
        prefix = Prefix(table, [block for _, block in found], salt, request.feature_layers)
        self._metrics.queries.inc(len(request.ids))
        self._metrics.hits.inc(prefix.reused_tokens)
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
        found: list[tuple[int, CachedBlock]] = []
        digest, size = root_digest(request.salt), self._pool.block_size
        for start in range(0, len(request.ids) - size, size):
            digest = block_digest(digest, request.ids[start : start + size])
            held = self._held.get(digest)
            if held is None or not set(request.feature_layers) <= set(held[1].layers):
                break
            found.append(held)
        return found

    def _keep(self, prefix: Prefix, number: int, use: int) -> None:
        """Keep the `number`th block of a session, the one that is here already if there is one."""
        block, at = prefix.blocks[number], int(prefix.table.blocks[number])
        held = self._held.get(block.digest)
        if held is not None:
            at = held[0]
            if set(block.layers) <= set(held[1].layers):
                block = held[1]
        elif len(self._held) >= self._most:
            given_up = self._pool.give_up()
            if given_up is None:
                return
            self._forget(given_up)
        self._held[block.digest] = at, block
        self._digests[at] = block.digest
        self._pool.keep(at, use - number * _LATER)

    def _forget(self, at: int) -> None:
        del self._held[self._digests.pop(at)]
        self._metrics.evicted.inc(self._pool.block_size)


def reserved_tokens(request: OpenSession, settings: VerifierSettings) -> int:
    """KV tokens a session is admitted with, whole blocks and at most all there are, so that no session loses any."""
    wanted = -(-(request.max_len + TREE_ROOM) // BLOCK_SIZE)
    return min(wanted, settings.kv_tokens // BLOCK_SIZE) * BLOCK_SIZE


class Sessions:
    """Open sessions by key and by name. Every method runs on the worker's thread."""

    def __init__(
        self, engine: Engine, settings: VerifierSettings, metrics: SessionMetrics, repetition_penalty: float
    ) -> None:
        """`repetition_penalty`: of sessions that set none."""
        self._engine, self._settings, self._metrics = engine, settings, metrics
        self._repetition_penalty = repetition_penalty
        self.cache = PrefixCache(engine.pool, settings.prefix_cache_tokens, PrefixCacheMetrics(metrics.registry))
        self._by_key: dict[int, Session] = {}
        self._by_name: dict[str, Session] = {}

    def open(self, key: int, request: OpenSession) -> Session:
        """Admit a session and give it its KV. Raises InvalidField, and Unavailable while the pool has no room: the
        blocks of a closing session are on their way back.
        """
        if request.session in self._by_name:
            raise InvalidField("open.session", "is already open")
        layers = self._engine.info.layers
        for layer in request.feature_layers:
            if layer not in range(layers):
                raise InvalidField("open.feature_layers", f"{layer} is not a layer of this target (0..{layers - 1})")
        try:
            prefix = self.cache.open(request, reserved_tokens(request, self._settings))
        except OutOfBlocks as error:
            raise Unavailable(str(error)) from None
        try:
            request = replace(request, sampling=request.sampling.with_defaults(self._repetition_penalty))
            session = Session(key, request, prefix, self._settings.feature_window, self._engine.info.vocab_size)
        except BaseException:
            self.cache.close(prefix)
            raise
        self._by_key[key] = self._by_name[request.session] = session
        self._metrics.opened.inc()
        return session

    def close(self, key: int) -> Session | None:
        """Free a session and its KV; returns it, None when it never opened."""
        session = self._by_key.pop(key, None)
        if session is not None:
            del self._by_name[session.request.session]
            self.cache.close(session.prefix)
            self._metrics.closed.inc()
        return session

    def get(self, key: int) -> Session:
        """An open session. Raises NotFound."""
        if key not in self._by_key:
            raise NotFound("the session is not open")
        return self._by_key[key]

    def unfollow(self, feed: Feed) -> None:
        """Feed a follower no more, if its session is still open."""
        session = self._by_name.get(feed.ref.session)
        if session is not None and feed in session.feeds:
            session.feeds.remove(feed)

    def named(self, name: str) -> Session:
        """An open session by the name that its client gave it. Raises NotFound."""
        if name not in self._by_name:
            raise NotFound(f"no session {name} here")
        return self._by_name[name]
