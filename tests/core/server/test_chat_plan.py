"""Which format a chat template calls for, and schemas of required calls."""

from __future__ import annotations

import itertools
import json

import jsonschema
import pytest

from polysilicon.server import json_text
from polysilicon.server.events import TextDelta
from polysilicon.server.parsing.formats import chat_format
from polysilicon.server.parsing.tool_calls import (
    HermesParser,
    LlamaParser,
    MistralParser,
    PythonicParser,
)
from polysilicon.server.tools import calls_schema


class Tokens:
    """A tokenizer's special tokens."""

    def __init__(self, normal=(), special=()) -> None:
        self._ids = {text: index for index, text in enumerate((*normal, *special))}
        self.special_ids = frozenset(self._ids[text] for text in special)

    def token_id(self, text):
        return self._ids.get(text)


@pytest.mark.parametrize(
    ("source", "knows", "kind", "thinks"),
    [
        ("{{ messages }}", False, HermesParser, False),
        ("{% if tools %}<tool_call>\n{{ x }}</tool_call>{% endif %}", True, HermesParser, False),
        ("{% if tools %}<tool_call>{% endif %}<think>\n", True, HermesParser, True),
        ("{{ tools }}[TOOL_CALLS]{{ calls }}", True, MistralParser, False),
        ('{{ tools }}Respond with {"name": n, "parameters": p}', True, LlamaParser, False),
        ("{{ tools }}<|python_tag|>", True, LlamaParser, False),
        ("{{ tools }}[func_name1(params_name1=x), ...]", True, PythonicParser, False),
        ("{{ message.content.split('</think>')[-1] }}", False, HermesParser, True),
    ],
)
def test_formats(source, knows, kind, thinks) -> None:
    form = chat_format(source, Tokens())
    assert (form.knows_tools, form.calls, form.thinks) == (knows, kind, thinks)
    assert not form.hides_calls
    ids = {form.new_id() for _ in range(50)}
    assert len(ids) == 50
    if kind is MistralParser:
        assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_control_tokens_must_be_shown_to_be_parsed() -> None:
    tokens = Tokens(normal=["<think>", "</think>"], special=["[TOOL_CALLS]"])
    form = chat_format("[TOOL_CALLS]<think>{{ tools }}", tokens)
    assert form.hides_calls
    assert not form.hides_thoughts


def test_reasoning_that_the_prompt_begins() -> None:
    form = chat_format("<think>", Tokens())

    def read(prompt):
        parser = form.parser(prompt=prompt, calls=None)()
        return [type(event) for event in itertools.chain(parser.push("a</think>b"))]

    assert len(read("user<think>\n")) == 2
    assert read("user<think>\n\n</think>\n\n") == [TextDelta]
    assert chat_format("", Tokens()).parser(prompt="x<think>", calls=None) is None


def test_required_calls_have_a_schema() -> None:
    tree = {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/node"}, "size": {"type": "integer"}},
                "required": ["size"],
                "additionalProperties": False,
            }
        },
    }
    schema = calls_schema({"tree": tree, "again": tree, "none": {"type": "object"}}, most=2)
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    call = {"name": "again", "arguments": {"root": {"size": 1, "next": {"size": 2}}}}
    assert valid([call])
    assert valid([call, {"name": "none", "arguments": {}}])
    assert not valid([])
    assert not valid([call] * 3)
    assert not valid([{"name": "other", "arguments": {}}])
    assert not valid([{"name": "tree", "arguments": {"root": {"size": 1, "next": {}}}}])


@pytest.mark.parametrize(
    "value", ["a", {"b": [1, None, 2.5, True]}, "half \ud800", {"x\udfff": "y"}, 10**30, "é\n\0"]
)
def test_json_of_whatever_a_model_writes(value) -> None:
    written = json_text.encode(value)
    assert json.loads(written) == value
    assert written.decode()
