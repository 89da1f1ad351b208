"""Whether two JSON schemas provably have no instance in common.

`oneOf` asks that exactly one option holds. Where no two options can hold together it says the same
as `anyOf`, which a grammar can express.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any] | bool

_TYPES = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
_MOST_DEPTH = 24
_MOST_STEPS = 50_000


class Disjointness:
    """Proves that schemas are disjoint. definitions: schemas by the `$ref`s that name them.

    Schemas are as `polysilicon.sampling.json_schema` leaves them: known keywords, well formed.
    """

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._steps = 0

    def overlapping(self, options: Sequence[Schema]) -> tuple[int, int] | None:
        """The first two options that may hold together, or None where no two can."""
        for (i, a), (j, b) in itertools.combinations(enumerate(options), 2):
            self._steps = 0
            if not self._disjoint(a, b, 0):
                return i, j
        return None

    def _disjoint(self, a: Schema, b: Schema, depth: int) -> bool:
        self._steps += 1
        if a is False or b is False:
            return True
        if a is True or b is True or depth > _MOST_DEPTH or self._steps > _MOST_STEPS:
            return False
        ours, theirs = list(self._conjuncts(a)), list(self._conjuncts(b))
        if False in ours or False in theirs:
            return True
        for parts, other in ((ours, b), (theirs, a)):
            for part in parts:
                assert not isinstance(part, bool)
                for name in ("anyOf", "oneOf"):
                    options = part.get(name)
                    if options and all(
                        self._disjoint(option, other, depth + 1) for option in options
                    ):
                        return True
        return any(
            self._keywords_disjoint(mine, yours, depth)
            for mine, yours in itertools.product(ours, theirs)
            if not isinstance(mine, bool) and not isinstance(yours, bool)
        )

    def _conjuncts(self, schema: Schema) -> Iterator[Mapping[str, Any] | bool]:
        """Schemas that all hold where this one does: itself, and through `$ref` and `allOf`."""
        waiting: list[Schema] = [schema]
        seen: set[str] = set()
        while waiting:
            part = waiting.pop()
            if part is True:
                continue
            yield part
            if isinstance(part, bool):
                continue
            waiting.extend(part.get("allOf", ()))
            name = part.get("$ref")
            if name is not None and name not in seen:
                seen.add(name)
                waiting.append(self._definitions[name])

    def _keywords_disjoint(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        """Whether what stands in `a` itself excludes what stands in `b` itself."""
        literals = _literals(a), _literals(b)
        if literals[0] is not None and literals[1] is not None:
            return not {_key(value) for value in literals[0]} & {_key(x) for x in literals[1]}
        for values, other in ((literals[0], b), (literals[1], a)):
            if values is not None and all(_excluded(value, other) for value in values):
                return True
        common = _common(_types(a), _types(b))
        if not common:
            return True
        if common <= {"number", "integer"}:
            return _numbers_disjoint(a, b)
        if common == {"object"}:
            return self._objects_disjoint(a, b, depth)
        return False

    def _objects_disjoint(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        """Whether a property that one of them requires can have no value that both allow."""
        required = dict.fromkeys([*a.get("required", ()), *b.get("required", ())])
        return any(
            self._disjoint(_property(a, name), _property(b, name), depth + 1) for name in required
        )


def _literals(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values: Sequence[Any] | None = schema.get("enum")
    return values


def _key(value: Any) -> Any:
    """Equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, dict):
        return frozenset((name, _key(item)) for name, item in value.items())
    if isinstance(value, list):
        return tuple(_key(item) for item in value)
    return value if isinstance(value, str) else ("number", value)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if value is None:
        return "null"
    return {float: "number", str: "string", list: "array", dict: "object"}[type(value)]


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    types = schema.get("type")
    if types is not None:
        return frozenset([types] if isinstance(types, str) else types)
    values = _literals(schema)
    return _TYPES if values is None else frozenset(map(_type_of, values))


def _common(a: frozenset[str], b: frozenset[str]) -> frozenset[str]:
    """Types of both; every integer is a number."""
    wide = [types | {"integer"} if "number" in types else types for types in (a, b)]
    return wide[0] & wide[1]


def _excluded(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a literal breaks what a schema's own keywords say."""
    if not _common(frozenset({_type_of(value)}), _types(schema)):
        return True
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _numbers_disjoint({"minimum": value, "maximum": value}, schema)
    return False


def _property(schema: Mapping[str, Any], name: str) -> Schema:
    """What a schema's own keywords say of the property's value, or True where that is not sure."""
    properties: Mapping[str, Schema] = schema.get("properties", {})
    if name in properties:
        return properties[name]
    if schema.get("patternProperties"):
        return True
    rest: Schema = schema.get("additionalProperties", True)
    return rest


def _numbers_disjoint(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether the ranges of two schemas do not touch."""
    lowest = max(
        ((schema[name], exclusive) for schema in (a, b) for name, exclusive in _LOWER
         if name in schema),
        default=None,
    )  # fmt: skip
    highest = min(
        ((schema[name], -exclusive) for schema in (a, b) for name, exclusive in _UPPER
         if name in schema),
        default=None,
    )  # fmt: skip
    if lowest is None or highest is None:
        return False
    if lowest[0] == highest[0]:
        return bool(lowest[1] or highest[1])
    return bool(lowest[0] > highest[0])


_LOWER = (("minimum", 0), ("exclusiveMinimum", 1))
_UPPER = (("maximum", 0), ("exclusiveMaximum", 1))
