"""What of JSON Schema is taken, what is refused, and that nothing changes its meaning."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.errors import RequestError
from polysilicon.sampling.json_patterns import FORMAT_PATTERNS, pattern_fault
from polysilicon.sampling.json_schema import MOST_DEPTH, normalise
from polysilicon.testing.json_schemas import NAMES, json_schemas

TEXT = {"type": "string"}
REFUSED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": TEXT},
    "minContains": {"type": "array", "minContains": 1},
    "maxContains": {"type": "array", "maxContains": 1},
    "not": {"not": TEXT},
    "if": {"if": TEXT, "then": {"minLength": 2}},
    "then": {"then": TEXT},
    "else": {"else": TEXT},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "disallow": {"disallow": ["string"]},
    "extends": {"extends": TEXT},
    "divisibleBy": {"divisibleBy": 3},
    "oneOf": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "pattern": {"type": "string", "pattern": "^(?=a)[a-z]+$"},
    "patternProperties": {"type": "object", "patternProperties": {"(?<!x)y": True}},
    "format": {"type": "string", "format": "regex"},
    "minProperties": {"type": "object", "minProperties": 2},
    "$ref": {"$ref": "https://example.org/schema.json"},
    "const": {"const": "a\x01b"},
    "enum": {"enum": ["a", {"b": ["\x7f"]}]},
}

PLACES = {
    "#": lambda inner: inner,
    "#/properties/a~1b": lambda inner: {"type": "object", "properties": {"a/b": inner}},
    "#/patternProperties/^x$": lambda inner: {"patternProperties": {"^x$": inner}},
    "#/additionalProperties": lambda inner: {"additionalProperties": inner},
    "#/items": lambda inner: {"type": "array", "items": inner},
    "#/prefixItems/1": lambda inner: {"prefixItems": [True, inner]},
    "#/items/0": lambda inner: {"items": [inner]},
    "#/anyOf/1": lambda inner: {"anyOf": [TEXT, inner]},
    "#/oneOf/0": lambda inner: {"oneOf": [inner, {"type": "null", "const": None}]},
    "#/allOf/0": lambda inner: {"allOf": [inner]},
    "#/$defs/d/items": lambda inner: {
        "$ref": "#/$defs/d", "$defs": {"d": {"type": "array", "items": inner}},
    },
    "#/components/schemas/d": lambda inner: {
        "items": {"$ref": "#/components/schemas/d"}, "components": {"schemas": {"d": inner}},
    },
}  # fmt: skip


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize("place", PLACES)
def test_what_no_grammar_holds_is_refused_by_keyword_and_place(keyword: str, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise(json.dumps(PLACES[place](REFUSED[keyword])))
    assert repr(keyword) in str(caught.value)
    assert f" at {place}:" in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"not": TEXT, "if": TEXT, "uniqueItems": TEXT}},
        {"const": {"not": 1, "contains": 2}},
        {"enum": [{"uniqueItems": True}]},
        {"default": {"not": 1}, "examples": [{"if": 1}], "title": "not", "x-anything": {"not": 1}},
        {"$defs": {"unused": {"not": TEXT}}, "type": "string"},
        {"type": "array", "uniqueItems": False},
        {"type": "object", "unevaluatedProperties": True, "propertyNames": {}},
        {"type": "object", "required": ["a", "b"], "minProperties": 2},
        {"type": "object", "minProperties": 1},
    ],
)  # fmt: skip
def test_what_only_looks_like_it_is_taken(schema: object) -> None:
    normalise(json.dumps(schema))


def tagged(*kinds: object, name: str = "kind", required: bool = True) -> list[dict]:
    return [
        {
            "type": "object",
            "properties": {name: {"const": kind}, "x": TEXT},
            **({"required": [name]} if required else {}),
        }
        for kind in kinds
    ]


DISJOINT = [
    [{"type": "string"}, {"type": "integer"}, {"type": "null"}, {"type": "array"}],
    [{"type": ["string", "null"]}, {"type": ["number", "boolean"]}],
    [{"enum": ["a", 1]}, {"enum": ["b", 1.5, True]}],
    [{"const": 1}, {"const": True}],
    [{"enum": ["a", "b"]}, {"type": "integer"}],
    [{"const": 7}, {"type": "integer", "maximum": 6}],
    [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}],
    [{"type": "number", "exclusiveMaximum": 0}, {"type": "number", "minimum": 0}],
    tagged("cat", "dog", "bird"),
    [{"$ref": f"#/$defs/{name}"} for name in ("cat", "dog")],
    [{"allOf": [{"$ref": "#/$defs/cat"}, {"properties": {"y": TEXT}}]}, {"$ref": "#/$defs/dog"}],
    [{"anyOf": tagged("a", "b")}, {"anyOf": [*tagged("c"), {"type": "null"}]}],
    [
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
        {"type": "object", "properties": {"b": TEXT}, "additionalProperties": False},
    ],
    [
        {"type": "object", "properties": {"p": tagged("x")[0]}, "required": ["p"]},
        {"type": "object", "properties": {"p": tagged("y")[0]}, "required": ["p"]},
    ],
    [{"properties": {"kind": {"const": "a"}}, "required": ["kind"]}, *tagged("b")],
    [False, True],
    [TEXT],
]
OVERLAPPING = [
    [{"type": "number"}, {"type": "integer"}],
    [{"type": "string"}, {"type": "string", "maxLength": 3}],
    [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}],
    [{"const": 1}, {"const": 1.0}],
    [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2.0, "a": 1}}],
    [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}],
    tagged("cat", "dog", required=False),
    tagged("cat", "cat"),
    [{"properties": {"kind": {"const": "a"}}, "required": ["kind"]}, {"type": "array"}],
    [
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
        {"type": "object", "properties": {"b": TEXT}, "required": ["b"]},
    ],
    [
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
        {"type": "object", "patternProperties": {"^a": TEXT}, "additionalProperties": False},
    ],
    [{"$ref": "#/$defs/loop"}, {"type": "object"}],
    [True, TEXT],
]
DEFINITIONS = {
    "cat": tagged("cat")[0],
    "dog": tagged("dog")[0],
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "object"}]},
}


@pytest.mark.parametrize("options", DISJOINT)
def test_one_of_is_taken_where_options_exclude_one_another(options: list) -> None:
    normalise(json.dumps({"oneOf": options, "$defs": DEFINITIONS}))


@pytest.mark.parametrize("options", OVERLAPPING)
def test_one_of_is_refused_where_two_options_may_hold(options: list) -> None:
    with pytest.raises(RequestError, match=r"'oneOf' at #: options 0 and 1 may hold together"):
        normalise(json.dumps({"oneOf": options, "$defs": DEFINITIONS}))


INSTANCES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-4, 4), st.sampled_from(("", "a", "b", "cat")),
        st.integers(-4, 4).map(lambda value: value / 2),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(("a", "b", "kind", "p", "x")), inner, max_size=3),
    ),
    max_leaves=5,
)  # fmt: skip


@given(instance=INSTANCES)
@settings(max_examples=300, deadline=None)
def test_no_instance_meets_two_options_that_were_found_disjoint(instance: object) -> None:
    for options in DISJOINT:
        holds = [
            jsonschema.Draft202012Validator({"allOf": [option], "$defs": DEFINITIONS}).is_valid(
                instance
            )
            for option in options
        ]
        assert sum(holds) <= 1


@given(schema=json_schemas(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_normalising_keeps_the_meaning(schema: dict, data: st.DataObject) -> None:
    names = st.one_of(st.sampled_from((*NAMES, "k1", "kind", "value")), st.text(max_size=2))
    instance = data.draw(
        st.recursive(
            st.one_of(
                st.none(), st.booleans(), st.integers(-1500, 3000), st.text(max_size=4),
                st.sampled_from(_literals(schema) or [None]), st.just("2024-02-29"),
            ),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)
            ),
            max_leaves=5,
        )
    )  # fmt: skip
    before = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.FormatChecker(["date"])
    )
    after = jsonschema.Draft202012Validator(json.loads(normalise(json.dumps(schema))))
    if '"format"' in json.dumps(schema):
        # Formats are enforced, and more strictly than most validators do.
        assert before.is_valid(instance) or not after.is_valid(instance)
    else:
        assert after.is_valid(instance) == before.is_valid(instance)


def _literals(schema: object) -> list[object]:
    found = []
    if isinstance(schema, dict):
        found += schema.get("enum", [])
        found += [schema["const"]] if "const" in schema else []
        for value in schema.values():
            found += _literals(value)
    if isinstance(schema, list):
        for value in schema:
            found += _literals(value)
    return found


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"^a(?=b)", "look-ahead"),
        (r"(?!b)", "look-ahead"),
        (r"(?<=b)", "look-behind"),
        (r"(?<!b)", "look-behind"),
        (r"\bword", "word boundary"),
        (r"(a)\1", "back-reference"),
        (r"(?<n>a)\k<n>", "back-reference"),
        (r"[a[b]", "inside a class"),
        (r"[a&&b]", "inside a class"),
        (r"\\b\\1", None),
        (r"[\b(?=)]", None),
        (r"\(?=", None),
        (r"[]a](?:x)(?<n>y)(?P<m>z)", None),
        (r"\[\[", None),
        ("\\", None),
        ("", None),
    ],
)
def test_faults_of_patterns(pattern: str, fault: str | None) -> None:
    found = pattern_fault(pattern)
    assert found is None if fault is None else fault in (found or "")


@given(day=st.dates(), moment=st.datetimes())
def test_every_day_and_moment_fits_its_format(day, moment) -> None:
    assert jsonschema.Draft202012Validator({"pattern": FORMAT_PATTERNS["date"]}).is_valid(
        day.isoformat()
    )
    text = moment.isoformat() + "Z"
    assert jsonschema.Draft202012Validator({"pattern": FORMAT_PATTERNS["date-time"]}).is_valid(text)


@pytest.mark.parametrize(
    "text", ["2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "0000-01-01", "2024-13-01"]
)
def test_no_other_day_fits(text: str) -> None:
    assert not jsonschema.Draft202012Validator({"pattern": FORMAT_PATTERNS["date"]}).is_valid(text)


def test_older_drafts_are_read() -> None:
    schema = json.loads(
        normalise(
            json.dumps(
                {
                    "$schema": "http://json-schema.org/draft-04/schema#",
                    "items": [{"minimum": 2, "exclusiveMinimum": True}],
                    "additionalItems": {"maximum": 3, "exclusiveMaximum": False},
                }
            )
        )
    )
    assert schema["$defs"]["0"] == {
        "prefixItems": [{"exclusiveMinimum": 2}],
        "items": {"maximum": 3},
    }


def deep(levels: int) -> object:
    schema: object = {"type": "null"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("NaN", "no JSON number"),
        ("[" * 100_000, "not valid JSON"),
        ("7", "# is 7, not a schema"),
        ("[]", "not a schema"),
        ("false", "allows no output"),
        ('{"type": "text"}', "'type' at #: must be"),
        ('{"type": []}', "'type' at #"),
        ('{"properties": []}', "'properties' at #"),
        ('{"properties": {"a": 3}}', "#/properties/a is 3"),
        ('{"anyOf": []}', "'anyOf' at #"),
        ('{"required": "a"}', "'required' at #"),
        ('{"required": true}', "'required' at #"),
        ('{"minLength": -1}', "'minLength' at #"),
        ('{"maximum": "3"}', "'maximum' at #"),
        ('{"maximum": 1e999}', "'maximum' at #"),
        ('{"multipleOf": 0}', "'multipleOf' at #"),
        ('{"enum": []}', "'enum' at #"),
        ('{"pattern": 3}', "'pattern' at #"),
        ('{"format": {}}', "'format' at #"),
        ('{"const": "\\ud800"}', "surrogate"),
        ('{"const": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"$ref": 3}', "'$ref' at #"),
        ('{"$ref": "#/$defs/none"}', "does not exist"),
        ('{"$ref": "#/required/x", "required": []}', "does not exist"),
        ('{"$ref": "#"}', "without end"),
        ('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}', "without end"),
        (json.dumps(deep(MOST_DEPTH + 1)), "levels deep"),
    ],
)
def test_malformed_schemas_have_one_clear_error(text: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise(text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


def test_references_are_followed_by_their_pointers() -> None:
    text = json.dumps({"$ref": "#/a~1b/c%20d/1", "a/b": {"c d": [True, {"type": "null"}]}})
    assert list(json.loads(normalise(text))["$defs"].values()) == [
        {"$ref": "#/$defs/1"},
        {"type": "null"},
    ]
