"""JSON schemas as grammars: those that a grammar cannot hold are refused by keyword and place.

llguidance enforces most of JSON Schema exactly. What it does not hold, or holds differently, is
found here, before it is asked: every schema that can be reached from the root is read and written
again with the keywords of draft 2020-12 alone, so that nothing but what is understood gets through.
Annotations and unknown keywords are left out, as JSON Schema says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from polysilicon.errors import RequestError
from polysilicon.sampling.json_disjoint import Disjointness
from polysilicon.sampling.json_patterns import (
    FORMAT_PATTERNS,
    FREE_FORMATS,
    LIBRARY_FORMATS,
    pattern_fault,
)

MOST_DEPTH = 56
"""Most subschemas within one another, references not followed."""

_REFUSED = {
    "uniqueItems": "leave it out, or list the choices with enum",
    "contains": "describe all items with items or prefixItems",
    "minContains": "describe all items with items or prefixItems",
    "maxContains": "describe all items with items or prefixItems",
    "not": "say what is allowed instead",
    "if": "use anyOf with one option for each case",
    "then": "use anyOf with one option for each case",
    "else": "use anyOf with one option for each case",
    "propertyNames": "use patternProperties with additionalProperties false",
    "dependentRequired": "use anyOf with one option for each case",
    "dependentSchemas": "use anyOf with one option for each case",
    "dependencies": "use anyOf with one option for each case",
    "unevaluatedItems": "use items false in each array",
    "unevaluatedProperties": "use additionalProperties false in each object",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "disallow": "say what is allowed instead",
    "extends": "use allOf",
    "divisibleBy": "use multipleOf",
}
"""Keywords that no grammar holds, with the mend."""

_TRIVIAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
"""Values with which a refused keyword says nothing."""

_TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")
_PLAIN_CONTROLS = "\b\t\n\f\r"
"""Control characters that JSON writes with one letter: the only ones that come in an output."""


def normalise(text: str) -> str:
    """A schema as llguidance is to read it, JSON again.

    Raises RequestError, naming keyword and place, for a schema that is malformed, has a keyword
    which no grammar can hold, or has `oneOf` options that may hold together.
    """
    try:
        root = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not valid JSON: {error}") from None
    normaliser = _Normaliser(root)
    schema = normaliser.result()
    try:
        result = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        result.encode()
    except UnicodeEncodeError:
        raise RequestError("the JSON schema holds half of a surrogate pair: remove it") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema cannot be used: {error}") from None
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _fault(keyword: str, where: str, problem: str) -> RequestError:
    return RequestError(f"JSON schema: {keyword!r} at {where}: {problem}")


class _Normaliser:
    """Reads a schema and all that it refers to. Definitions are renamed: `$ref`s may point anywhere
    in the document, and what they point at is written under `$defs`, once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Any] = {}
        self._waiting: list[tuple[str, Any, str]] = []
        self._exclusive: list[tuple[str, list[Any]]] = []

    def result(self) -> Mapping[str, Any]:
        top = self._reference("", "#")
        while self._waiting:
            name, value, where = self._waiting.pop()
            self._definitions[name] = self._schema(value, where, 0)
        references = {f"#/$defs/{name}": value for name, value in self._definitions.items()}
        self._check_loops(references)
        prover = Disjointness(references)
        for where, options in self._exclusive:
            pair = prover.overlapping(options)
            if pair is not None:
                raise _fault(
                    "oneOf",
                    where,
                    f"options {pair[0]} and {pair[1]} may hold together, which no grammar can "
                    "forbid: use anyOf, or give each option a required property with its own const",
                )
        if self._definitions["0"] is False:
            raise RequestError("JSON schema: false allows no output at all")
        return {"$ref": top, "$defs": self._definitions}

    def _reference(self, pointer: str, where: str) -> str:
        """The new name of what a JSON pointer (RFC 6901) names."""
        if pointer not in self._names:
            name = str(len(self._names))
            self._names[pointer] = name
            target = self._root
            for step in pointer.split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                try:
                    target = target[int(step) if isinstance(target, list) else step]
                except (KeyError, IndexError, ValueError, TypeError):
                    raise _fault("$ref", where, f"#{pointer} does not exist") from None
            self._waiting.append((name, target, f"#{pointer}"))
        return f"#/$defs/{self._names[pointer]}"

    def _check_loops(self, references: Mapping[str, Any]) -> None:
        """Refuse references that name only one another."""
        for start in references:
            name, seen = start, set[str]()
            while isinstance(schema := references[name], dict) and "$ref" in schema:
                if name in seen:
                    pointer = next(p for p, n in self._names.items() if name.endswith(f"/{n}"))
                    raise _fault("$ref", f"#{pointer}", "refers to itself without end")
                seen.add(name)
                name = schema["$ref"]

    def _schema(self, value: Any, where: str, depth: int) -> Any:
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise RequestError(f"JSON schema: {where} is {_shown(value)}, not a schema")
        if depth > MOST_DEPTH:
            raise RequestError(f"JSON schema: more than {MOST_DEPTH} levels deep at {where}")
        result: dict[str, Any] = {}
        for keyword, item in value.items():
            if keyword in _REFUSED and item not in _TRIVIAL.get(keyword, ()):
                raise _fault(keyword, where, f"cannot be enforced; {_REFUSED[keyword]}")
            read = _READERS.get(keyword)
            if read is not None:
                read(self, result, keyword, item, where, depth)
        _settle(result, value, where)
        if "oneOf" in result:
            self._exclusive.append((where, result["oneOf"]))
        return result

    def _one(self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int) -> None:
        result[keyword] = self._schema(item, f"{where}/{keyword}", depth + 1)

    def _list(
        self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int
    ) -> None:
        if not isinstance(item, list) or not item:
            raise _fault(keyword, where, "must be a list of schemas, not empty")
        result[keyword] = [
            self._schema(part, f"{where}/{keyword}/{index}", depth + 1)
            for index, part in enumerate(item)
        ]

    def _by_name(
        self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int
    ) -> None:
        if not isinstance(item, dict):
            raise _fault(keyword, where, "must be an object of schemas")
        result[keyword] = {
            name: self._schema(part, f"{where}/{keyword}/{_step(name)}", depth + 1)
            for name, part in item.items()
        }
        if keyword == "patternProperties":
            for pattern in item:
                _check_pattern(pattern, keyword, where)

    def _items(
        self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int
    ) -> None:
        if isinstance(item, list):  # up to draft 2019-09
            if item:
                self._list(result, keyword, item, where, depth)
                result["prefixItems"] = result.pop("items")
        else:
            self._one(result, keyword, item, where, depth)

    def _ref(self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int) -> None:
        if not isinstance(item, str) or not (item == "#" or item.startswith("#/")):
            raise _fault(
                keyword, where, f"{_shown(item)}: only places in the same schema, '#/...', are read"
            )
        result[keyword] = self._reference(unquote(item[1:]), where)

    def _plain(
        self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int
    ) -> None:
        check, wanted = _VALUES[keyword]
        if not check(item):
            raise _fault(keyword, where, f"must be {wanted}, not {_shown(item)}")
        result[keyword] = item

    def _literal(
        self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int
    ) -> None:
        if keyword == "enum" and (not isinstance(item, list) or not item):
            raise _fault(keyword, where, "must be a list of values, not empty")
        _check_literal(item, keyword, where)
        result[keyword] = item

    def _pattern(
        self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int
    ) -> None:
        if not isinstance(item, str):
            raise _fault(keyword, where, f"must be a regular expression, not {_shown(item)}")
        _check_pattern(item, keyword, where)
        result[keyword] = item

    def _format(
        self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int
    ) -> None:
        if not isinstance(item, str):
            raise _fault(keyword, where, f"must be a text, not {_shown(item)}")
        if item in FORMAT_PATTERNS:
            result.setdefault("allOf", []).append({"pattern": FORMAT_PATTERNS[item]})
        elif item in LIBRARY_FORMATS:
            result[keyword] = item
        elif item not in FREE_FORMATS:
            known = ", ".join(sorted({*FORMAT_PATTERNS, *LIBRARY_FORMATS, *FREE_FORMATS}))
            raise _fault(keyword, where, f"{_shown(item)} is not one that is enforced: {known}")

    def _all_of(
        self, result: dict[str, Any], keyword: str, item: Any, where: str, depth: int
    ) -> None:
        parts = result.pop(keyword, [])  # what `format` has put there
        self._list(result, keyword, item, where, depth)
        result[keyword].extend(parts)


def _settle(result: dict[str, Any], value: Mapping[str, Any], where: str) -> None:
    """What hangs on several keywords of one schema at once."""
    if isinstance(value.get("items"), list) and "additionalItems" in value:
        result["items"] = result.pop("additionalItems")
    result.pop("additionalItems", None)
    types = result.get("type")
    if types is not None and "format" in result and "string" not in types:
        del result["format"]  # formats of numbers, as OpenAPI has them
    for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        draft4 = isinstance(result.get(exclusive), bool)
        if draft4 and result.pop(exclusive) and limit in result:
            result[exclusive] = result.pop(limit)
    fewest = result.get("minProperties", 0)
    required = len(set(result.get("required", ())))
    if fewest <= required:
        result.pop("minProperties", None)
    elif fewest > required + 1:
        raise _fault(
            "minProperties",
            where,
            f"{fewest} needs properties of different names beyond the {required} required ones, "
            "which no grammar can count: name them in required",
        )


def _check_pattern(pattern: str, keyword: str, where: str) -> None:
    fault = pattern_fault(pattern)
    if fault is not None:
        raise _fault(keyword, where, f"{_shown(pattern)} has {fault}; it cannot be enforced")


def _check_literal(value: Any, keyword: str, where: str) -> None:
    """Refuse texts that no output can hold."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            waiting.extend(part.values())
        elif isinstance(part, str) and any(
            (character < " " and character not in _PLAIN_CONTROLS) or character == "\x7f"
            for character in part
        ):
            raise _fault(keyword, where, f"{_shown(part)} holds a control character: remove it")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_bound(value: Any) -> bool:
    return isinstance(value, bool) or _is_number(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, "one or several of " + ", ".join(_TYPES)),
    "required": (_is_names, "a list of property names"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "a number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_is_bound, "a number")),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
        (_is_count, "a whole number from 0 to 2^31"),
    ),
}
_READERS: dict[str, Callable[[_Normaliser, dict[str, Any], str, Any, str, int], None]] = {
    **dict.fromkeys(_VALUES, _Normaliser._plain),
    **dict.fromkeys(("const", "enum"), _Normaliser._literal),
    **dict.fromkeys(("anyOf", "oneOf", "prefixItems"), _Normaliser._list),
    **dict.fromkeys(("properties", "patternProperties"), _Normaliser._by_name),
    **dict.fromkeys(("additionalProperties", "additionalItems"), _Normaliser._one),
    "allOf": _Normaliser._all_of,
    "items": _Normaliser._items,
    "$ref": _Normaliser._ref,
    "pattern": _Normaliser._pattern,
    "format": _Normaliser._format,
}


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
