"""One reader and one writer for all messages: a plain value and its message have fields of the same names.

The annotations of the value are the table of its fields: `Annotated[int, Within(0, 64)]` is a number that is refused
outside of 0..64. What else there is to know, such as which fields are repeated or may be unset, the descriptor says.
"""

import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, Union

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from coppice import limits
from coppice.errors import InvalidField

T = TypeVar("T")
M = TypeVar("M", bound=Message)  # A class of messages


class Within(NamedTuple):
    """The bounds of a number, and of each number in a repeated field. NaN is within none."""

    low: float
    high: float


class Length(NamedTuple):
    """The bounds of the length of a repeated field, a text or bytes."""

    low: int
    high: int


class AsLongAs(NamedTuple):
    """A repeated field has as many entries as another one; if it has a default, it may also be empty."""

    name: str


class Among(NamedTuple):
    """A text is one of these."""

    choices: tuple[str, ...]


class Conversion(NamedTuple):
    """How a field is written and read that is not the same in both."""

    write: Callable[[Any], Any] | None  # what the message is given, of a value that is not None
    read: Callable[[Any, str, str], Any]
    """of the message, the field's name and the path of the message, which ends with a dot or is empty"""


NAMED_ALONE = frozenset({"fence", "sampling", "next"})  # Fields that refusals name without the message that holds them
CODECS: dict[str, "Codec[Any]"] = {}  # by the full name of the message
_BY_CLASS: dict[type, "Codec[Any]"] = {}


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field,))
def carried_by(message: Any, frozen: bool = True) -> Callable[[type[T]], type[T]]:
    """Class decorator: a dataclass with slots whose values travel in `message`."""

    def register(value: type[T]) -> type[T]:
        value = dataclass(frozen=frozen, slots=True)(value)
        _BY_CLASS[value] = CODECS[message.DESCRIPTOR.full_name] = Codec(value, message)
        return value

    return register


def codec(value: type[T]) -> "Codec[T]":
    """Reads and writes the values of a class that is `carried_by` a message."""
    return _BY_CLASS[value]


class Codec(Generic[T]):
    """Converts values of one class, `fields` and `read` being one another's inverse."""

    def __init__(self, value: type[T], message: Any) -> None:
        self.value, self.message = value, message
        described = message.DESCRIPTOR.fields_by_name
        own = [part for part in fields(value) if part.name in described]  # type: ignore[arg-type]
        self._names = [part.name for part in own]
        self._sent = [name for name in described if hasattr(value, name)]  # properties too
        self._values, self._plain = _getter(self._sent), _getter(self._names)
        self.notes: dict[str, list[Any]] = {}  # what bounds each field
        self._within: list[tuple[int, float, float]] = []
        self._lengths: list[tuple[int, int, int]] = []
        self._checks: list[tuple[int, Callable[[str, Any, Any], object]]] = []  # of a field's name, value and message
        self._reads: list[tuple[int, Callable[[Any, str, str], Any]]] = []
        self._writes: list[tuple[str, Callable[[Any], Any]]] = []
        hints = typing.get_type_hints(value, include_extras=True)
        for at, part in enumerate(own):
            hint, optional, notes = _unpack(hints[part.name])
            self.notes[part.name] = notes
            conversion = _conversion(hint, optional, described[part.name])
            for note in notes:
                if isinstance(note, Conversion):
                    conversion = note
                elif isinstance(note, Length):
                    self._lengths.append((at, *note))
                elif isinstance(note, Within) and not described[part.name].is_repeated:
                    self._within.append((at, *note))
                else:
                    self._checks.append((at, _check(note, part.default is not MISSING)))
            if conversion:
                self._reads.append((at, conversion.read))
            if conversion and conversion.write:
                self._writes.append((part.name, conversion.write))

    def fields(self, value: T) -> dict[str, Any]:
        """What the message is made of."""
        sent = dict(zip(self._sent, self._values(value), strict=True))
        for name, write in self._writes:
            if sent[name] is not None:
                sent[name] = write(sent[name])
        return sent

    def to_wire(self, value: T) -> Any:
        """Value to its message."""
        return self.message(**self.fields(value))

    def read(self, message: Any, path: str = "") -> T:
        """Message to value. Raises InvalidField; names begin with `path`, which ends with a dot or is empty."""
        values, names = list(self._plain(message)), self._names
        for at, low, high in self._within:
            if not low <= values[at] <= high:
                limits.check_range(path + names[at], values[at], low, high)
        for at, least, most in self._lengths:
            if not least <= len(values[at]) <= most:
                limits.check_count(path + names[at], len(values[at]), least, most)
        for at, check in self._checks:
            check(path + names[at], values[at], message)
        for at, read in self._reads:
            values[at] = read(message, names[at], path)
        make: Callable[..., T] = self.value
        return make(*values)


class OneOf(Generic[T, M]):
    """Converts values of several classes, each for one member of a message's oneof `kind`."""

    def __init__(self, message: type[M]) -> None:
        self._message = message
        members = message.DESCRIPTOR.oneofs_by_name["kind"].fields
        self._codecs = {field.name: CODECS[field.message_type.full_name] for field in members if field.message_type}
        self._kinds = {codec.value: kind for kind, codec in self._codecs.items()}

    def to_wire(self, value: T) -> M:
        """Value to its message."""
        kind = self._kinds[type(value)]
        return self._message(**{kind: self._codecs[kind].fields(value)})

    def read(self, message: Any) -> T:
        """Message to value. Raises InvalidField."""
        kind = message.WhichOneof("kind")
        if kind is None:
            raise InvalidField("kind", f"neither {' nor '.join(self._codecs)} is set")
        value: T = self._codecs[kind].read(getattr(message, kind), f"{kind}.")
        return value


def array(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """The (n,) values of a repeated field, in the way that is faster for so many."""
    return np.fromiter(values, dtype, len(values)) if len(values) < 64 else np.array(values, dtype)


@lru_cache(1 << 14)
def varint(number: int) -> bytes:
    """A number as protobuf writes lengths."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def _check(note: Any, may_be_empty: bool) -> Callable[[str, Any, Any], object]:
    """What refuses a field, by its name, its value and its message. may_be_empty: as `AsLongAs` says."""

    def check(field: str, value: Any, message: Any) -> None:
        match note:
            case Within(low, high):
                # A comparison may not see NaN, a sum does.
                if value and not (low <= min(value) and max(value) <= high and not math.isnan(sum(value))):
                    limits.check_range(field, next(each for each in value if not low <= each <= high), low, high)
            case AsLongAs(longest):
                count = len(getattr(message, longest))
                if value or not may_be_empty:
                    limits.check_count(field, len(value), count, count)
            case Among(choices):
                if value not in choices:
                    raise InvalidField(field, f"{value[:32]!r} is not one of {', '.join(filter(None, choices))}")
            case _:
                note(field, value)

    return check


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gets some attributes at once, without a call of Python for each."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda owner: tuple(getattr(owner, name) for name in names)


def _unpack(hint: Any) -> tuple[Any, bool, list[Any]]:
    """The type of an annotation, whether it may be None, and the notes on it and on its elements."""
    optional, notes = False, []
    while inner := typing.get_args(hint):
        origin = typing.get_origin(hint)
        if origin is Annotated:
            hint, *more = inner
            notes += more
        elif origin in (Union, UnionType):
            hint, optional = inner[0], True
        elif hasattr(origin, "__value__"):  # an alias, which NDArray is from NumPy 2.5 on
            hint = origin.__value__[inner]
        else:
            break
    if typing.get_origin(hint) in (list, tuple, frozenset):
        element = typing.get_args(hint)[0]
        notes += typing.get_args(element)[1:] if typing.get_origin(element) is Annotated else ()
    return hint, optional, notes


def _conversion(hint: Any, optional: bool, field: Any) -> Conversion | None:
    """How a field without a conversion of its own is converted; None: not at all. Unset is None where that may be."""
    container, inner = typing.get_origin(hint), CODECS.get(field.message_type.full_name) if field.message_type else None
    if inner and field.is_repeated:
        return Conversion(
            lambda values: [inner.fields(value) for value in values],
            lambda owner, name, path: container(inner.read(each, f"{path}{name}.") for each in getattr(owner, name)),
        )
    if container is np.ndarray:
        dtype = typing.get_args(typing.get_args(hint)[1])[0]

        def read_array(owner: Any, name: str, path: str) -> Any:
            values = getattr(owner, name)
            return None if optional and not values else array(values, dtype)

        return Conversion(np.ndarray.tolist, read_array)
    if field.is_repeated:
        write = sorted if container is frozenset else None
        return Conversion(write, lambda owner, name, path: container(getattr(owner, name)))
    if not (inner or optional):
        return None

    def read(owner: Any, name: str, path: str) -> Any:
        if optional and not owner.HasField(name):
            return None
        value = getattr(owner, name)
        return inner.read(value, f"{'' if name in NAMED_ALONE else path}{name}.") if inner else value

    return Conversion(inner.fields if inner else None, read)
