"""The sessions that a verifier holds, and the KV that each was given when it opened."""

from __future__ import annotations

from dataclasses import replace

from coppice.config.sections import VerifierSettings
from coppice.engine.engine import Engine
from coppice.engine.kv_cache import BLOCK_SIZE, OutOfBlocks
from coppice.errors import InvalidField, NotFound, Unavailable
from coppice.limits import TREE_ROOM
from coppice.messages.steps import OpenSession
from coppice.telemetry import PrefixCacheMetrics, SessionMetrics

from .feed import Feed
from .prefix_cache import PrefixCache
from .session import Session


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

    def unfollow(self, name: str, feed: Feed) -> None:
        """Let a feed of a session that is still open take no more."""
        session = self._by_name.get(name)
        if session is not None and feed in session.feeds:
            session.feeds.remove(feed)

    def named(self, name: str) -> Session:
        """An open session by the name that its client gave it. Raises NotFound."""
        if name not in self._by_name:
            raise NotFound(f"no session {name} here")
        return self._by_name[name]
