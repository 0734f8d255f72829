"""TCP proxies on loopback: the way to cut, or to slow, the connections of a process while both ends live."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

_HOST = "127.0.0.1"
_PIECE = 64 << 10


class _Proxy:
    """One listening port whose connections go on to an upstream address."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.rpartition(":")
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port, self.delay_s = 0, 0.0

    async def listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, _HOST, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            self._open.add(writer)
            with contextlib.suppress(OSError):
                onward_reader, onward = await asyncio.open_connection(self._upstream[0], int(self._upstream[2]))
                writers.append(onward)
                self._open.add(onward)
                pumps = [self._pump(reader, onward), self._pump(onward_reader, writer)]
                await asyncio.wait([asyncio.create_task(pump) for pump in pumps])
        finally:
            self._open.difference_update(writers)
            for end in writers:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes until one side ends; then the other ends too."""
        try:
            while data := await reader.read(_PIECE):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        except OSError:
            writer.transport.abort()
        finally:
            writer.close()


class Proxies(contextlib.AbstractContextManager["Proxies"]):
    """A proxy before each process, all on one thread of their own.

    Called with a process's name and HOST:PORT it gives the address to reach it by (`via` of a Stack).
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._proxies: dict[str, _Proxy] = {}
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        for name in self._proxies:
            self.cut(name)
        self._do(asyncio.sleep(0.05))  # the connections' tasks end
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __call__(self, name: str, address: str) -> str:
        if name not in self._proxies:
            self._proxies[name] = _Proxy(address)
            self._do(self._proxies[name].listen())
        return f"{_HOST}:{self._proxies[name].port}"

    def cut(self, name: str) -> None:
        """End every connection to a process and refuse new ones."""
        self._do(self._proxies[name].cut())

    def heal(self, name: str) -> None:
        """Take connections again, without a delay."""
        self._proxies[name].delay_s = 0.0
        self._do(self._proxies[name].listen())

    def slow(self, name: str, seconds: float) -> None:
        """Hold back whatever passes, each way, by as much."""
        self._proxies[name].delay_s = seconds

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)
