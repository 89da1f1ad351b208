"""Random JSON schemas over the keywords that grammars hold, each with an instance of some dozen
characters, for tests with hypothesis."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NAMES = ("a", "b", "id", "na me", 'qu"ote', "é", "x/y~z", "tail\n")
WORDS = ("red", "Grün", "two words", 'say "hi"', "back\\slash", "line\nbreak", "", "é")
PATTERNS = (
    r"^[a-z]{1,4}$",
    r"^\d{3}-\d{4}$",
    r"^(yes|no|maybe)$",
    r"^[A-F0-9]{2}(:[A-F0-9]{2}){1,2}$",
    r"^v\d+\.\d{1,2}$",
    r"^\w{1,3}\/\w{1,3}$",
    r"^[^\s\"]{2,5}$",
    r"^x.?$|^y{1,2}$",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "duration")


@st.composite
def _integers(draw: Any) -> dict[str, Any]:
    low = draw(st.integers(-1200, 1200))
    schema: dict[str, Any] = {"type": "integer"}
    schema[draw(st.sampled_from(("minimum", "exclusiveMinimum")))] = low
    schema[draw(st.sampled_from(("maximum", "exclusiveMaximum")))] = low + draw(
        st.integers(8, 3000)
    )
    if draw(st.booleans()):
        schema["multipleOf"] = draw(st.integers(1, 4))
    return schema


@st.composite
def _numbers(draw: Any) -> dict[str, Any]:
    low = draw(st.integers(-40, 40)) / 4
    schema = {"type": "number", "minimum": low, "maximum": low + draw(st.integers(2, 400)) / 4}
    if draw(st.booleans()):
        schema["multipleOf"] = 0.25
    return schema


@st.composite
def _texts(draw: Any) -> dict[str, Any]:
    kind = draw(st.sampled_from(("length", "pattern", "format")))
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(PATTERNS))}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(FORMATS))}
    fewest = draw(st.integers(0, 3))
    return {"type": "string", "minLength": fewest, "maxLength": fewest + draw(st.integers(0, 5))}


def _literals() -> SearchStrategy[Any]:
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(-10_000, 10_000), st.sampled_from(WORDS),
        st.integers(-80, 80).map(lambda value: value / 8),
    )  # fmt: skip
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
        ),
        max_leaves=4,
    )


@st.composite
def _arrays(draw: Any, inner: SearchStrategy[Any]) -> dict[str, Any]:
    first = draw(st.lists(inner, max_size=2))
    schema: dict[str, Any] = {"type": "array", "maxItems": len(first) + draw(st.integers(0, 2))}
    schema["minItems"] = draw(st.integers(0, schema["maxItems"]))
    if first:
        schema["prefixItems"] = first
    schema["items"] = draw(inner)
    return schema


@st.composite
def _objects(draw: Any, inner: SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if properties:
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    rest = draw(st.sampled_from(("none", "schema", "pattern", "map")))
    if rest == "none":
        schema["additionalProperties"] = False
    elif rest == "schema":
        schema["additionalProperties"] = {"type": "boolean"}
        schema["required"] = sorted(properties)
        schema["maxProperties"] = len(properties) + 1
    elif rest == "pattern":
        schema["patternProperties"] = {"^k[0-9]$": draw(inner)}
        schema["additionalProperties"] = False
        schema["required"] = sorted(properties)
        schema["maxProperties"] = len(properties) + 2
    else:
        del schema["properties"]
        schema.pop("required", None)
        schema |= {"additionalProperties": draw(inner), "minProperties": 1, "maxProperties": 2}
    return schema


@st.composite
def _unions(draw: Any, inner: SearchStrategy[Any]) -> dict[str, Any]:
    kind = draw(st.sampled_from(("anyOf", "types", "tagged", "allOf")))
    if kind == "anyOf":
        return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}
    if kind == "types":
        return {"oneOf": [draw(_texts()), draw(_integers()), {"type": "null"}]}
    if kind == "allOf":
        return {
            "allOf": [
                {"type": "object", "properties": {"a": draw(inner)}, "required": ["a"]},
                {"properties": {"b": draw(inner)}, "required": ["b"]},
            ],
            "maxProperties": 2,
        }
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": word}, "value": draw(inner)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for word in draw(st.lists(st.sampled_from(WORDS), min_size=2, max_size=3, unique=True))
        ]
    }


def _leaves() -> SearchStrategy[Any]:
    return st.one_of(
        _integers(), _numbers(), _texts(),
        st.sampled_from(({"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]})),
        st.lists(_literals(), min_size=1, max_size=3).map(lambda values: {"enum": values}),
        _literals().map(lambda value: {"const": value}),
        st.just({"$ref": "#/$defs/shared"}),
    )  # fmt: skip


@st.composite
def json_schemas(draw: Any) -> dict[str, Any]:
    """A schema as a client would send it."""
    body = draw(
        st.recursive(
            _leaves(),
            lambda inner: st.one_of(_arrays(inner), _objects(inner), _unions(inner)),
            max_leaves=6,
        )
    )
    schema = {"title": "random", "description": "nothing to enforce", **body}
    if '"#/$defs/shared"' in json.dumps(body):
        schema["$defs"] = {"shared": draw(st.one_of(_texts(), _integers(), _objects(_texts())))}
    return schema
