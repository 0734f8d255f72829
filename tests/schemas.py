"""JSON schemas of everything that structured output does, made from a seed; each has texts of a few dozen tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
KEYS = ("name", "größe", "年齢", "a b", "x-1", 'quo"te', "emoji 🌲", "_id")
PATTERNS = ("^[a-f]{2,4}$", "^(yes|no|maybe)$", "^\\d{3}-[A-Z]{2}$", "^[^aeiou\\s]{1,3}$", "^(ab)*c?$")


def _leaf(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-50, 50)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)},
            {"type": "integer", "exclusiveMinimum": 0, "multipleOf": rng.choice((2, 5, 7)), "maximum": 999},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": rng.sample(["red", "grün", "青", 7, None, True, "two words", 'a"b'], 3)},
            {"const": rng.choice(["fixed", 3.5, ["a", 1], {"k": None}])},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "minLength": 1, "maxLength": rng.randrange(2, 9)},
            {"type": "string", "format": rng.choice(("date", "time", "ipv4", "uuid"))},
        ]
    )


def _object(rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(KEYS, rng.randrange(1, 4))
    required = rng.sample(keys, rng.randrange(1, len(keys) + 1))
    properties = {key: _any(rng, depth + 1) for key in keys}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        items = [_leaf(rng, depth), _leaf(rng, depth)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    least = rng.randrange(3)
    return {"type": "array", "items": _any(rng, depth + 1), "minItems": least, "maxItems": least + rng.randrange(1, 3)}


def _choice(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth + 1), {"type": "null"}]}


def _tree(rng: random.Random, depth: int) -> Schema:
    """A recursive type, whose depth only the target bounds."""
    below = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    properties = {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "next": below}
    return {"type": "object", "properties": properties, "required": ["v"], "additionalProperties": False}


def _any(rng: random.Random, depth: int = 0) -> Schema:
    makers: list[Callable[[random.Random, int], Schema]] = [_leaf, _object, _array, _choice]
    return rng.choices(makers, (1 + depth, 2, 1, 1) if depth < 3 else (1, 0, 0, 0))[0](rng, depth)


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """So many of them; every tenth refers to itself."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        if number % 10 == 9:
            made.append({"$ref": "#/$defs/node", "$defs": {"node": _tree(rng, 0)}})
        else:
            made.append(_object(rng, 0) if number % 3 else _any(rng))
    return made
