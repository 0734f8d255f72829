"""Links: one stream between two processes carries all their sessions, and one message all that is ready at one time.

A session is a call of a streaming method of the service: its messages are items of frames, and so is its end. Sessions
live on a link: the server frees them when they are closed or the link ends. Nothing waits for a frame to fill: what is
put while the one before is written goes out behind it, and a lone session waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from coppice import failpoints
from coppice.errors import RETRY_HINT, InvalidField, Overloaded, Unavailable
from coppice.limits import CHUNK_BYTES
from coppice.wire.common import control_item, message_item, read_frame

log = structlog.get_logger()

LINK = "Link"  # the method that carries sessions
LINKED = frozenset(
    f"/coppice.v1.{method}"
    for method in ("VerifierService/Verify", "VerifierService/FetchFeatures", "DrafterService/Draft")
)
"""paths of the methods whose calls are sessions"""
BEAT_S = 0.5  # without another frame for so long, each side sends an empty one
SILENT_S = 2.0  # without any frame for so long a client takes the server for lost
UNUSED_S = 10.0  # a link that has had no session for so long is ended by its client
MOST_ITEMS = 256  # of a frame
MOST_UNREAD = 512  # messages of a session: then it is ended
MOST_REQUESTS_BYTES, MOST_ANSWERS_BYTES = 1 << 20, 16 << 20  # beside one message: a server has many sessions
STUCK_S = 10.0  # without any frame written for so long a side takes the other for lost

Session = Callable[[AsyncIterator[Any], Any], Awaitable[None]]
"""serves one: given its requests and its context, of which `write` sends a message"""
DRAINING = "the server is draining"
OK, CANCELLED = 0, 1
CODES = {code.value[0]: code for code in grpc.StatusCode}


class Inbox:
    """What came in of one session, for one reader on the event loop, who iterates or listens."""

    def __init__(
        self, parse: Callable[[Any], Any] = bytes, most: int = MOST_UNREAD, most_bytes: int = MOST_ANSWERS_BYTES
    ) -> None:
        """`parse` makes a message of bytes, or an exception, with which the session ends. most: unread messages."""
        self._parse, self._most, self._most_bytes = parse, most, most_bytes
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self.is_busy = False  # who listens has still to answer what came
        self._waiting_since: float | None = None  # the reader; for who listens, something came then
        self._drains = False
        self._take: Callable[[bytes], None] | None = None
        self._ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, data: Any) -> bool:
        """Add a message; what comes behind the end is dropped. False: too much is unread, and gone now."""
        if self._ended:
            return True
        if self._take is not None:
            self._waiting_since = asyncio.get_running_loop().time()
            try:
                self._take(self._read(data))
            except Exception as error:
                self.end(error)
            return True
        size = self._unread_bytes + len(data)
        if self._unread and (len(self._unread) >= self._most or size > self._most_bytes):
            self._unread.clear()
            return False
        self._unread_bytes = size
        self._unread.append(data)
        self._news.set()
        return True

    def _read(self, data: bytes) -> Any:
        message = self._parse(data)
        if isinstance(message, Exception):
            raise message
        return message

    def end(self, error: Exception | None = None) -> None:
        """Say that nothing follows, and why. What came last may fail behind the end of the others."""
        if not self._ended or (self.is_busy and self._error is None):
            self._ended, self._error = True, error
            self._news.set()

    async def listen(self, take: Callable[[Any], None]) -> None:
        """Have `take` called with every message until the end. Raises what `take` raises, and the error of `end`."""
        self._take = partial(contextvars.copy_context().run, take)  # type: ignore[call-arg]
        while self._unread and not self._ended:
            self.put(self._unread.popleft())
        while not self._ended or (self.is_busy and self._error is None):
            await self._wait()
        if self._error is not None:
            raise self._error

    def answered(self) -> None:
        """Note that what came is answered: while the server drains, nothing more is taken."""
        self.is_busy = False
        if self._ended:
            self._news.set()
        elif self._drains:
            self.end(Unavailable(DRAINING))

    def look(self, idle_s: float, drains: bool) -> None:
        """End it if its reader has waited for so long, or the server drains; what came is answered before."""
        self._drains, since = drains, self._waiting_since
        if since is None or self.is_busy:
            return
        if drains or asyncio.get_running_loop().time() - since >= idle_s:
            self.end(Unavailable(DRAINING if drains else f"no message for {idle_s:g} s"))

    async def _wait(self) -> None:
        self._news.clear()
        self._waiting_since = self._waiting_since or asyncio.get_running_loop().time()
        await self._news.wait()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Any:
        while not self._unread:
            if self._ended:
                raise self._error or StopAsyncIteration
            await self._wait()
        self._waiting_since = None
        data = self._unread.popleft()
        self._unread_bytes -= len(data)
        return self._read(data)


class Outbox:
    """What one side of a link has to send. `put` is for whoever has something, `write` for the task that sends it.

    Frames are put together here: messages may hold features, which protobuf would copy three times.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[int, tuple[bytes, ...]]] = deque()
        self.waiting = 0  # bytes that are not written yet
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()
        self._looks = 0  # since a frame was written
        self.ended = False

    def put(self, item: tuple[bytes, ...]) -> None:
        """Have an item sent, which comes in parts."""
        if self.ended:  # what comes behind the end is dropped
            return
        size = sum(map(len, item))
        self._items.append((size, item))
        self.waiting += size
        self._news.set()
        if self.waiting >= CHUNK_BYTES:
            self._room.clear()

    async def room(self) -> None:
        """Wait until less than a frame waits to be written: a long answer holds up the others of a link by no more."""
        while not self._room.is_set():
            await self._room.wait()

    def end(self) -> None:
        """Let `write` end behind what it has. There is no room any more."""
        self.ended = True
        self._room.clear()
        self._news.set()

    def close(self) -> None:
        """Drop what waits, once nobody writes it: whoever waits for room goes on."""
        self.ended = True
        self._items.clear()
        self._room.set()
        self._news.set()

    async def write(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write frames of at most CHUNK_BYTES, or of one item, until the end."""
        while not (self.ended and not self._items):
            if not self._items and self._looks < 2:
                await self._news.wait()
                self._news.clear()
                continue
            taken: list[bytes] = []
            size = count = 0
            while self._items and count < MOST_ITEMS and (not count or size + self._items[0][0] <= CHUNK_BYTES):
                more, parts = self._items.popleft()
                taken += parts
                size, count = size + more, count + 1
            self.waiting -= size
            if self.waiting < CHUNK_BYTES and not self.ended:
                self._room.set()
            await write(b"".join(taken))
            self._looks = 0

    def look(self) -> bool:
        """Note that BEAT_S has passed: nothing was written meanwhile, and an empty frame is due, or the peer reads
        nothing for STUCK_S, and the answer is True. Looks are counted, and not the time: while this process stands
        still it hears nothing, and the peer may be well.
        """
        self._looks += 1
        self._news.set()
        return self._looks * BEAT_S > STUCK_S


class Context:
    """One session's place on a link, with the verbs of a call's context that servicers use."""

    def __init__(self, outer: Any, outbox: Outbox, item: Any, parse: Callable[[bytes], Any]) -> None:
        """item: the session's first."""
        self._outer, self._outbox, self._session = outer, outbox, item.session
        trace = ((key, item.trace[key]) for key in ("traceparent", "tracestate") if key in item.trace)
        self._metadata = (*(outer.invocation_metadata() or ()), *trace)
        self.requests = Inbox(parse, most_bytes=MOST_REQUESTS_BYTES)
        self.end: dict[str, Any] = {"code": OK}  # the fields of the message

    def invocation_metadata(self) -> Any:
        """The link's, and the session's trace."""
        return self._metadata

    def peer_identities(self) -> Any:
        """Whose link it is."""
        return self._outer.peer_identities()

    async def write(self, message: bytes) -> None:
        """Send a message of the answer, as soon as there is room."""
        await self._outbox.room()
        self.send(message)

    def send(self, *message: bytes) -> None:
        """Send one that was asked for, in parts; while many wait to be written, no further question is read."""
        self._outbox.put(message_item(self._session, *message))

    @property
    def waiting(self) -> int:
        """Bytes that the link has still to write."""
        return self._outbox.waiting

    async def abort(self, code: grpc.StatusCode, details: str, hints: Any = ()) -> None:
        """End the session so. Raises AbortError."""
        self.end = {"code": code.value[0], "details": details, "retry_after_ms": dict(hints).get(RETRY_HINT, "")}
        raise grpc.aio.AbortError


class ServedLink:
    """A client's link as its server has it: a task for every session."""

    def __init__(
        self, sessions: Mapping[str, Session], parsers: Mapping[str, Callable[[bytes], Any]], most: int, idle_s: float
    ) -> None:
        """sessions, and what makes requests of bytes: by the names of methods. most: how many at once.

        idle_s: without a message for so long a session ends.
        """
        self._sessions, self._parsers, self._most, self._idle_s = sessions, parsers, most, idle_s
        self._running: dict[int, tuple[Context, asyncio.Task[None]]] = {}
        self._outbox = Outbox()

    async def serve(self, requests: AsyncIterator[Any], context: Any, draining: asyncio.Event) -> None:
        """Write frames until the client has left, or the server drains and no session is left. Raises CoppiceError."""
        reader = asyncio.create_task(self._read(requests, context))  # it ends with the stream
        writer = asyncio.create_task(self._outbox.write(context.write))
        self._look(writer, draining)
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.cancelled():
                raise Unavailable(f"frames were not read for {STUCK_S:g} s")
            for task in (reader, writer):
                if task.done():
                    task.result()
        finally:
            self._outbox.end()  # no session begins any more
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(writer, *tasks, return_exceptions=True)  # cancelled in a write it would keep the call
            self._timer.cancel()
            self._outbox.close()  # the reader may wait for room
            reader.add_done_callback(lambda reader: reader.cancelled() or reader.exception())

    def _look(self, writer: asyncio.Task[None], draining: asyncio.Event) -> None:
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._look, writer, draining)
        if self._outbox.look() or failpoints.hit("link.cut"):
            writer.cancel()
        for session, _ in self._running.values():
            session.requests.look(self._idle_s, draining.is_set())
        if draining.is_set() and not self._running:
            self._outbox.end()

    async def _read(self, requests: AsyncIterator[Any], context: Any) -> None:
        async for frame in requests:
            if isinstance(frame, InvalidField):
                raise frame
            if self._outbox.ended:
                return
            for item in frame.items:
                self._take(item, context)
            await self._outbox.room()

    def _take(self, item: Any, context: Any) -> None:
        if item.method:
            self._begin(item, context)
        if item.session not in self._running:  # it has ended, which the client does not know yet
            return
        session, task = self._running[item.session]
        if item.WhichOneof("kind") == "message":
            if not session.requests.put(item.message):
                session.requests.end(Overloaded("too many messages of the session are unread"))
        elif item.WhichOneof("kind") == "end":
            session.requests.end()
            if item.end.code != OK:
                task.cancel()

    def _begin(self, item: Any, context: Any) -> None:
        number, method = item.session, item.method
        if number in self._running:
            raise InvalidField("session", f"{number} is under way")
        if method not in self._sessions:
            return self._refuse(number, grpc.StatusCode.UNIMPLEMENTED, f"no method {method[:64]!r}")
        if len(self._running) >= self._most:
            details = f"a link carries at most {self._most} sessions"
            return self._refuse(number, grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        session = Context(context, self._outbox, item, self._parsers[method])
        task = asyncio.create_task(self._serve(method, session))
        self._running[number] = session, task
        task.add_done_callback(lambda task: self._ended(number, session, task))

    async def _serve(self, method: str, session: Context) -> None:
        with suppress(grpc.aio.AbortError):
            await self._sessions[method](session.requests, session)

    def _ended(self, number: int, session: Context, task: asyncio.Task[None]) -> None:
        """Say how; a task that was cancelled at once has never run."""
        del self._running[number]
        session.requests.end()
        if task.cancelled():
            session.end = {"code": CANCELLED, "details": "the session was closed"}
        self._outbox.put(control_item(session=number, end=session.end))

    def _refuse(self, number: int, code: grpc.StatusCode, details: str) -> None:
        self._outbox.put(control_item(session=number, end={"code": code.value[0], "details": details}))


class LinkedCall:
    """One session as its client has it, with the verbs of a call of grpc.aio."""

    def __init__(
        self, link: Link, number: int, serialize: Callable[[Any], bytes], deserialize: Callable[[bytes], Any]
    ) -> None:
        self._link, self._number, self._serialize, self._deserialize = link, number, serialize, deserialize
        self.inbox = Inbox()
        self._over = asyncio.Event()
        self._error: grpc.aio.AioRpcError | None = None
        self._is_cancelled = False

    async def write(self, message: Any) -> None:
        """Send a message. Raises asyncio.InvalidStateError when the session has ended."""
        if self._over.is_set():
            raise asyncio.InvalidStateError("the session has ended")
        self.send(message)

    def send(self, message: Any) -> None:
        """The same without an error: who reads learns that it has ended."""
        self._link.outbox.put(message_item(self._number, self._serialize(message)))

    async def done_writing(self) -> None:
        """Say that no message follows."""
        if not self._over.is_set():
            self._link.outbox.put(control_item(session=self._number, end={"code": OK}))

    async def read(self) -> Any:
        """The next message, grpc.aio.EOF at the end. Raises AioRpcError; CancelledError when it was cancelled here."""
        data = await anext(self.inbox, None)
        if self._is_cancelled:
            raise asyncio.CancelledError
        if data is not None:
            try:
                return self._deserialize(data)
            except DecodeError:
                self.fail("the answer is no message of this method")
        if self._error is not None:
            raise self._error
        return grpc.aio.EOF

    async def listen(self, take: Callable[[Any], None]) -> None:
        """Have the link's reader call `take` with every message, and return at the end. Raises as `read` and `take`."""
        await self.inbox.listen(lambda data: take(self._deserialize(data)))
        await self.read()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        """End the session on both sides; what came and was not read is dropped."""
        if self._over.is_set():
            return False
        self._is_cancelled = True
        self._leave(grpc.StatusCode.CANCELLED, "the session was closed")
        return True

    def fail(self, details: str) -> None:
        """End the session on both sides for what the server did: who reads gets INTERNAL."""
        self._leave(grpc.StatusCode.INTERNAL, details)

    def _leave(self, code: grpc.StatusCode, details: str) -> None:
        self._link.outbox.put(control_item(session=self._number, end={"code": CANCELLED}))
        self.end(code, details)

    def end(self, code: grpc.StatusCode, details: str, hint: str = "") -> None:
        """Take in how the session ended."""
        self._link.calls.pop(self._number, None)
        if code is not grpc.StatusCode.OK:
            trailing = grpc.aio.Metadata(*(((RETRY_HINT, hint),) if hint else ()))
            self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)
        self._over.set()
        self.inbox.end()

    async def code(self) -> grpc.StatusCode:
        """How it ended, as soon as it has."""
        await self._over.wait()
        return self._error.code() if self._error else grpc.StatusCode.OK

    async def details(self) -> str:
        """What its end says."""
        await self._over.wait()
        return (self._error.details() or "") if self._error else ""


class Link:
    """A client's link to one server, until it ends: it has its first session at once."""

    def __init__(self, stream: Any, address: str) -> None:
        """`stream` is the call of the method Link."""
        self._stream, self._address, self._sessions = stream, address, 0
        self.calls: dict[int, LinkedCall] = {}
        self.outbox = Outbox()
        self.is_over = False  # it takes no further session
        self._lost = ""
        self._silent = self._unused = 0  # looks since a frame came, since it had a session
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._look)
        self._task = asyncio.create_task(self._run())

    def session(
        self,
        method: str,
        trace: Mapping[str, str],
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> LinkedCall:
        """Begin a session of a method."""
        self._sessions += 1
        call = self.calls[self._sessions] = LinkedCall(self, self._sessions, serialize, deserialize)
        self.outbox.put(control_item(session=self._sessions, method=method, trace=trace))
        return call

    async def _run(self) -> None:
        """Carry sessions until the stream ends, and end with it those that are left."""
        stream, writer = self._stream, asyncio.create_task(self.outbox.write(self._stream.write))
        code, details = grpc.StatusCode.UNAVAILABLE, f"the link to {self._address} has ended"
        try:
            while (data := await stream.read()) is not grpc.aio.EOF:
                self._silent = 0
                for item in read_frame(data).items:
                    self._take(item)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or details
        except DecodeError:
            details = f"{self._address} sent what is no frame"
        except asyncio.CancelledError:
            if not stream.done():
                raise
        finally:
            self.is_over = True
            self._timer.cancel()
            stream.cancel()
            self.outbox.close()
            for call in list(self.calls.values()):
                call.end(code, self._lost or details)
        await asyncio.wait([writer], timeout=BEAT_S)
        writer.cancel()  # it waits on when the call was cancelled before it had a connection
        await asyncio.gather(writer, return_exceptions=True)

    def _look(self) -> None:
        """Give up a server that is lost, end a link that is not used."""
        self._silent, self._unused = self._silent + 1, 0 if self.calls else self._unused + 1
        if self._silent * BEAT_S > SILENT_S:
            self._lost = f"{self._address} stopped answering: nothing for {SILENT_S:g} s"
        elif self.outbox.look():
            self._lost = f"{self._address} stopped reading: nothing for {STUCK_S:g} s"
        self.is_over = bool(self._lost) or self._unused * BEAT_S > UNUSED_S
        if self.is_over:
            self._stream.cancel()
        else:
            self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._look)

    def _take(self, item: Any) -> None:
        call = self.calls.get(item.session)
        if call is None:  # it was closed, which the server did not know yet
            return
        if item.WhichOneof("kind") == "end":
            call.end(CODES.get(item.end.code, grpc.StatusCode.UNKNOWN), item.end.details, item.end.retry_after_ms)
        elif not call.inbox.put(item.message):
            call.fail("the server sent more than was read")
