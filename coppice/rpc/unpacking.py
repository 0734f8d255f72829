"""Requests from bytes: the parts of a large message are counted before any of them becomes an object.

An empty element of a repeated field is two bytes on the wire and a hundred as an object. A message is refused here by
the count of its parts, which its bytes tell, so that no caller makes a server allocate many times what it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor

from coppice.errors import InvalidField

MAX_PARTS = 4096  # fields and elements of a message, those of its parts included; a packed list is one
SMALL_BYTES = 16 << 10  # a message up to this size is not worth counting
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_GROUPS = (3, 4)


class Refused:
    """Stands for a request that cannot be read: grpc would send the parser's text to the client."""

    def __init__(self, why: str) -> None:
        self.error = InvalidField("request", why)


def parser(method: MethodDescriptor) -> Callable[[bytes], Any]:
    """A function that makes a method's request of bytes, or a Refused."""
    described = method.input_type
    message = message_factory.GetMessageClass(described)

    def parse(data: bytes) -> Any:
        try:
            if len(data) > SMALL_BYTES and _count(data, 0, len(data), described, MAX_PARTS) > MAX_PARTS:
                return Refused(f"has more than {MAX_PARTS} parts")
            return message.FromString(data)
        except Exception:
            return Refused("the bytes are not a message of this method")

    return parse


def _count(data: bytes, at: int, end: int, described: Descriptor | None, most: int) -> int:
    """Parts of the message in data[at:end], counted up to one more than `most`. Raises IndexError, ValueError."""
    fields = described.fields_by_number if described else {}
    parts = 0
    while at < end and parts <= most:
        tag, at = _varint(data, at)
        parts, kind = parts + 1, tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            field = fields.get(tag >> 3)
            if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE:
                parts += _count(data, at, min(end, at + size), field.message_type, most - parts)
            at += size
        elif kind not in _GROUPS:  # what is in a group follows its tag
            at += {_FIXED_64: 8, _FIXED_32: 4}[kind]
    return parts


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at data[at:], and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than ten bytes")
