"""One converter for all messages: a plain value and its message have fields of the same names.

Which kind a field is of follows from the annotations of the plain value, and what is admitted from BOUNDS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from types import UnionType
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from coppice import limits
from coppice.errors import InvalidField
from coppice.wire.bounds import BOUNDS, ELEMENTS

T = TypeVar("T")
M = TypeVar("M", bound=Message)
"""A class of messages"""


class Part(NamedTuple):
    """How a field is converted that is not the same in both."""

    write: Callable[[Any], Any] | None
    """what the message is given, of a value that is not None"""
    read: Callable[[Any, str, str], Any]
    """of the message, the field's name and the path of the message, which ends with a dot or is empty"""


_OF_THEIR_OWN = frozenset({"fence", "sampling", "next"})
"""Fields that refusals name without the message that holds them"""
_SHAPES: dict[type, Shape[Any, Any]] = {}


class Shape(Generic[T, M]):
    """Converts values of one class, `fields` and `read` being one another's inverse."""

    def __init__(self, value: type[T], message: type[M], parallel: tuple[str, ...] = (), **parts: Part) -> None:
        """`parts` are for fields that annotations do not tell enough of.

        `parallel`: repeated fields as long as the first of them; one that has a default may be empty.
        """
        self.value, self._message = value, message
        described = message.DESCRIPTOR.fields_by_name
        own = {field.name: field for field in fields(value) if field.name in described}  # type: ignore[arg-type]
        hints = get_type_hints(value)
        known = {name: part for name in own if (part := parts.get(name) or _part(hints[name]))}
        self._sent = [name for name in described if hasattr(value, name)]  # properties too
        self._values = _getter(self._sent)
        self._writes = [(name, part.write) for name, part in known.items() if part.write]
        self._plain = _getter(list(own))
        self._reads = [(at, name, known[name].read) for at, name in enumerate(own) if name in known]
        self._parallel = [(name, parallel[0], own[name].default is not MISSING) for name in parallel[1:]]
        bounds = BOUNDS.get(message.DESCRIPTOR.name, {})
        self._checks = [(name, bound) for name, bound in bounds.items() if callable(bound)]
        ranges = [(name, *bound) for name, bound in bounds.items() if not callable(bound)]
        self._sizes = [one for one in ranges if _has_length(described[one[0]])]
        self._ranges = [one for one in ranges if one not in self._sizes]
        self._elements = [(name, *bound) for name, bound in ELEMENTS.get(message.DESCRIPTOR.name, {}).items()]
        _SHAPES[value] = self

    def fields(self, value: T) -> dict[str, Any]:
        """What the message is made of."""
        sent = dict(zip(self._sent, self._values(value), strict=True))
        for name, write in self._writes:
            if sent[name] is not None:
                sent[name] = write(sent[name])
        return sent

    def to_wire(self, value: T) -> M:
        """Value to its message."""
        return self._message(**self.fields(value))

    def read(self, message: Any, path: str = "") -> T:
        """Message to value. Raises InvalidField; names begin with `path`, which ends with a dot or is empty."""
        for name, low, high in self._ranges:
            if not low <= getattr(message, name) <= high:
                limits.check_range(path + name, getattr(message, name), low, high)
        for name, low, high in self._sizes:
            if not low <= len(getattr(message, name)) <= high:
                limits.check_count(path + name, len(getattr(message, name)), int(low), int(high))
        for name, low, high in self._elements:
            if values := getattr(message, name):
                _check_elements(path + name, values, low, high)
        for name, check in self._checks:
            check(path + name, getattr(message, name))
        for name, longest, may_be_empty in self._parallel:
            length, count = len(getattr(message, name)), len(getattr(message, longest))
            if length != count and (length or not may_be_empty):
                limits.check_count(path + name, length, count, count)
        make: Callable[..., T] = self.value
        values = [*self._plain(message)]
        for at, name, read in self._reads:
            values[at] = read(message, name, path)
        return make(*values)


class OneOf(Generic[T, M]):
    """Converts values of several classes, each for one member of a message's oneof `kind`."""

    def __init__(self, message: type[M], **kinds: Shape[Any, Any]) -> None:
        self._message, self._kinds = message, kinds
        self._by_class = {shape.value: (kind, shape) for kind, shape in kinds.items()}

    def to_wire(self, value: T) -> M:
        """Value to its message."""
        kind, shape = self._by_class[type(value)]
        return self._message(**{kind: shape.fields(value)})

    def read(self, message: Any) -> T:
        """Message to value. Raises InvalidField."""
        kind = message.WhichOneof("kind")
        if kind is None:
            raise InvalidField("kind", f"neither {' nor '.join(self._kinds)} is set")
        read: T = self._kinds[kind].read(getattr(message, kind), f"{kind}.")
        return read


def array(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """The (n,) values of a repeated field, in the way that is faster for so many."""
    return np.fromiter(values, dtype, len(values)) if len(values) < 64 else np.array(values, dtype)


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gets some attributes at once, without a call of Python for each."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda owner: tuple(getattr(owner, name) for name in names)


def _check_elements(field: str, values: Any, low: float, high: float) -> None:
    """Raise InvalidField unless all numbers of a repeated field are within bounds."""
    # A comparison may not see NaN, a sum does.
    if low <= min(values) and max(values) <= high and not math.isnan(sum(values)):
        return
    limits.check_range(field, next(value for value in values if not low <= value <= high), low, high)


def _has_length(field: Any) -> bool:
    return bool(field.is_repeated or field.cpp_type == field.CPPTYPE_STRING)  # bytes too


def _part(hint: Any) -> Part | None:
    """The conversion that an annotation asks for; None: the field is the same in both.

    What may be None is when it is not set; a repeated field is when it is empty.
    """
    optional = isinstance(hint, UnionType)
    if optional:
        hint = get_args(hint)[0]
    origin, inner = get_origin(hint), get_args(hint)
    if shape := _SHAPES.get(hint):

        def read_inner(message: Any, name: str, path: str) -> Any:
            if optional and not message.HasField(name):
                return None
            return shape.read(getattr(message, name), f"{name}." if name in _OF_THEIR_OWN else f"{path}{name}.")

        return Part(shape.fields, read_inner)
    if origin is np.ndarray:
        dtype = get_args(inner[1])[0]

        def read_array(message: Any, name: str, path: str) -> Any:
            values = getattr(message, name)
            return None if optional and not values else array(values, dtype)

        return Part(np.ndarray.tolist, read_array)
    if origin in (list, tuple) and inner[0] in _SHAPES:
        one = _SHAPES[inner[0]]
        return Part(
            lambda values: [one.fields(value) for value in values],
            lambda message, name, path: origin(one.read(each, f"{path}{name}.") for each in getattr(message, name)),
        )
    if origin in (tuple, list, frozenset):
        write = sorted if origin is frozenset else None
        return Part(write, lambda message, name, path: origin(getattr(message, name)))
    if optional:
        return Part(None, lambda message, name, path: getattr(message, name) if message.HasField(name) else None)
    return None
