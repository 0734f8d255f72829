"""Conversations with every method, and all that may be wrong with them; a seed and a number always make the same one.

A conversation is what a good client sends. Messages are spoiled by their descriptors or as bytes, so that a new field
is fuzzed from its first day; the conversation itself is spoiled by what is dropped, sent twice, cut off or cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from coppice.errors import CALL_ENDED

SEED = 1
HANG_S = 2.0 * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # longest wait for an answer, and for the end
_DEPTH = 4  # of messages in a made-up message

Talk = Generator[tuple[Message, bool], Message | None]
"""The messages of a good client and whether it waits for an answer to each, which is sent in; None if it did not."""

_LENGTHS = (0, 1, 2, 3, 16, 17, 64, 65, 256, 257, 1024, 1025)
_STRINGS = (
    *("", "x", "\0", "plain", "x" * 64, "x" * 65, "x" * 257, "💥" * 81, "../../etc/passwd", "{{ 7 * 7 }}", "a\r\nb: c"),
    *("127.0.0.1:1", "unix:/nowhere", "\ufffe\u2028", "float32", "user"),
)
_BYTES = (b"", b"\0", b"\xff" * 4, b"\x7f" * 31, b"\x7f" * 32, b"\x7f" * 33, b"\0\0\xc0\x7f" * 96, b"{}" * 500)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3.4e38, math.nan, math.inf, -math.inf)
_EXTREMES: dict[int, Sequence[Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 99, -1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 10**9, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 64, 65, 256, 257, 2**17, 2**17 + 1, 2**31 - 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: _FLOATS,
    FieldDescriptor.CPPTYPE_DOUBLE: (*_FLOATS, 5e-324, 1e-300, 1.7e308),
}
_HUGE = 1 << 20


def within(message: Message) -> Iterator[Message]:
    """A message, and those that are in it; of lists their last."""
    yield message
    for of, value in message.ListFields():
        if of.type == of.TYPE_MESSAGE and not of.message_type.GetOptions().map_entry:
            yield from within(value[-1] if of.is_repeated else value)


class Mutator:
    """Spoils messages."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def value(self, of: FieldDescriptor) -> Any:
        """Something for a field that is no message: at an end of its range, or beyond what anyone expects."""
        if of.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            known = _STRINGS if of.type == FieldDescriptor.TYPE_STRING else _BYTES
            chosen = self.random.choice(known)
            return chosen[:1] * (_HUGE + 1) if self.random.random() < 0.01 else chosen
        return self.random.choice(_EXTREMES[of.cpp_type])

    def made_up(self, of: Descriptor, depth: int = _DEPTH) -> Message:
        """A message in which every field was or was not put."""
        message = GetMessageClass(of)()
        for each in of.fields:
            if depth and self.random.random() < 0.5:
                self.put(message, each, depth - 1)
        return message

    def put(self, message: Message, of: FieldDescriptor, depth: int = _DEPTH) -> None:
        """Write something into one field; another member of its oneof is gone then."""
        is_message = of.type == FieldDescriptor.TYPE_MESSAGE
        if not of.is_repeated:
            if is_message:
                getattr(message, of.name).CopyFrom(self.made_up(of.message_type, depth))
                getattr(message, of.name).SetInParent()
            else:
                setattr(message, of.name, self.value(of))
            return
        entries = getattr(message, of.name)
        if is_message and of.message_type.GetOptions().map_entry:
            key, value = of.message_type.fields
            entries.clear()
            name = str if key.type == FieldDescriptor.TYPE_STRING else int
            for at in range(self.random.choice(_LENGTHS)):
                entries[name(at) if self.random.random() < 0.9 else self.value(key)] = self.value(value)
            return
        length = 2**17 + 1 if self.random.random() < 0.01 else self.random.choice(_LENGTHS)
        kept = list(entries)[: self.random.randint(0, len(entries))]
        one = self.made_up(of.message_type, depth) if is_message else self.value(of)
        size = one.ByteSize() if is_message else len(one) if isinstance(one, str | bytes) else 0
        if size * length > 4 * _HUGE:
            length = 1  # a thousand of them would be a gigabyte to make
        del entries[:]
        entries.extend((kept + [one] * max(0, length - len(kept)))[:length])

    def alter(self, message: Message) -> None:
        """Change one field, however deep it lies."""
        owner = self.random.choice(list(within(message)))
        if not owner.DESCRIPTOR.fields:
            return
        of = self.random.choice(owner.DESCRIPTOR.fields)
        if self.random.random() < 0.2:
            owner.ClearField(of.name)
        else:
            self.put(owner, of)

    def spoiled(self, message: Message) -> bytes:
        """What is sent instead of a message."""
        way = self.random.random()
        if way < 0.6:
            changed = deepcopy(message)
            for _ in range(self.random.choice((1, 1, 1, 2, 3))):
                self.alter(changed)
            return changed.SerializeToString()
        if way < 0.7:
            return self.made_up(message.DESCRIPTOR).SerializeToString()
        return self._bytes(message)

    def _bytes(self, message: Message) -> bytes:
        data, random = message.SerializeToString(), self.random
        ways: tuple[Callable[[], bytes], ...] = (
            lambda: data[: random.randint(0, len(data))],
            lambda: self._flipped(data),
            lambda: data + data,
            lambda: data + self.made_up(message.DESCRIPTOR).SerializeToString(),
            lambda: (
                data + random.choice((b"\xf8\x7f\x01", b"\xfa\x7f\x03abc", b"\xf9\x7f" + bytes(8)))
            ),  # no such field
            lambda: data + random.choice((b"\x0b", b"\x0c", b"\x0b" * 200, b"\xff" * 11, b"\x07", b"\x00")),
            lambda: data + b"\x0a\xff\xff\xff\xff\x0f",  # a length beyond the end
            lambda: self._not_utf8(message),
            lambda: random.randbytes(random.choice((1, 2, 16, 300, 5000))),
            lambda: self._nested(random.choice((50, 99, 101, 5000))),
        )
        return random.choice(ways)()

    def _flipped(self, data: bytes) -> bytes:
        flipped = bytearray(data or b"\0")
        for _ in range(self.random.choice((1, 1, 2, 8))):
            flipped[self.random.randrange(len(flipped))] ^= 1 << self.random.randrange(8)
        return bytes(flipped)

    def _not_utf8(self, message: Message) -> bytes:
        """The message with a string that is none, if there may be one."""
        changed = deepcopy(message)
        places = [(part, of) for part in within(changed) for of in part.DESCRIPTOR.fields]
        if strings := [(part, of.name) for part, of in places if of.type == of.TYPE_STRING and not of.is_repeated]:
            setattr(*self.random.choice(strings), "é")
        return changed.SerializeToString().replace("é".encode(), b"\xc3\x28")

    def _nested(self, depth: int) -> bytes:
        """Field 1 in field 1 in field 1."""
        data = b""
        for _ in range(depth):
            size = len(data)
            length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
            data = b"\x0a" + length + data
        return data


@dataclass
class Outcome:
    """How one conversation ended."""

    method: MethodDescriptor
    number: int
    sent: list[bytes] = field(default_factory=list)
    code: grpc.StatusCode | None = None
    details: str = ""
    slowest_s: float = 0.0
    cancelled: bool = False
    unseen: bool = False
    """a write found the call ended, and the status it ended with is lost"""

    def __str__(self) -> str:
        """What is needed to see it again."""
        shown = [
            f"  {len(data)} bytes {hashlib.sha256(data).hexdigest()[:8]}: {self._shown(data)}" for data in self.sent
        ]
        head = f"{self.method.full_name} {self.number} of seed {SEED}: {self.code} after {self.slowest_s:.2f} s"
        return "\n".join((f"{head}: {self.details[:400]!r}", *shown))

    def _shown(self, data: bytes) -> str:
        try:
            text = str(GetMessageClass(self.method.input_type).FromString(data)).replace("\n", " ")
        except DecodeError:
            text = data.hex()
        return text if len(text) < 1500 else f"{text[:1500]} ..."


async def converse(
    channel: grpc.aio.Channel, method: MethodDescriptor, number: int, talk: Callable[[Random, str], Talk]
) -> Outcome:
    """Hold one conversation, most likely a spoiled one. Every method is called as a stream: on the wire it is one."""
    random = Random(f"{SEED}/{method.full_name}/{number}")
    outcome = Outcome(method, number)
    call = channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}")()
    try:
        await _say_all(call, outcome, random, talk(random, f"fuzz-{number}"))
        outcome.cancelled |= _follows(outcome)
        if not outcome.cancelled:
            await _timed(outcome, call.done_writing())
            while await _timed(outcome, call.read()) is not grpc.aio.EOF:
                pass
    except (grpc.RpcError, asyncio.InvalidStateError):
        pass  # it has ended; the status tells how
    except TimeoutError:
        outcome.slowest_s = math.inf
    finally:
        call.cancel()
    outcome.code, outcome.details = await call.code(), await call.details() or ""
    outcome.unseen = outcome.details == CALL_ENDED
    return outcome


def _follows(outcome: Outcome, alone: bool = False) -> bool:
    """Whether the call goes on for as long as the session that it follows; `alone`: and hears of its commits alone."""
    if outcome.method.name == "FetchFeatures":
        asked = GetMessageClass(outcome.method.input_type)
        with suppress(DecodeError):
            return any(not (alone and asked.FromString(data).ref.count) for data in outcome.sent)
    return False


async def _say_all(call: Any, outcome: Outcome, random: Random, talk: Talk) -> None:
    """Say what the client would, less some, some of it twice, some of it spoiled; cancel or stop at any point."""
    mutator, answers = Mutator(random), GetMessageClass(outcome.method.output_type)
    spoil = random.choice((0.0, 0.2, 0.5, 1.0))
    ends_early = random.choice((0.0, 0.0, 0.1, 0.3))
    unawaited = random.choice((False, False, True))
    answer: Message | None = None
    said: list[bytes] = []
    try:
        message, answered = next(talk)
        while True:
            outcome.cancelled = random.random() < ends_early / 2
            if outcome.cancelled or random.random() < ends_early:
                return
            data = mutator.spoiled(message) if random.random() < spoil else message.SerializeToString()
            way = random.random() if spoil else 1.0
            sending = [] if way < 0.03 else [data, data] if way < 0.06 else [data]
            if way > 0.97 and spoil and said:
                sending = [random.choice(said)]
            for each in sending:
                said.append(each)
                outcome.sent.append(each)
                await _timed(outcome, call.write(each))
            answer = None
            if answered and not outcome.method.client_streaming and random.random() < 0.9:
                await _timed(outcome, call.done_writing())  # as clients do; for the others a server waits a little
            if answered and sending and not unawaited and not _follows(outcome, alone=True):
                read = await _timed(outcome, call.read())
                if read is grpc.aio.EOF:
                    return
                answer = answers.FromString(read)
            message, answered = talk.send(answer)
    except StopIteration:
        return


async def _timed(outcome: Outcome, waiting: Any) -> Any:
    began = time.monotonic()
    async with asyncio.timeout(HANG_S):
        result = await waiting
    outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)
    return result
