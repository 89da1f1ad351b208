"""Tools and structured output, by OpenAI's client."""

from __future__ import annotations

import json
import re

import jsonschema
import openai
import pydantic
import pytest

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Look it up.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return server.client()


def streamed(stream):
    """Content, calls by index as (id, name, arguments), and the finish reason."""
    content, calls, reason = "", {}, None
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, ["", "", ""])
            known[0] += call.id or ""
            known[1] += call.function.name or ""
            known[2] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.parametrize("seed", range(3))
def test_required_calls(client, seed) -> None:
    options = {
        "model": "smollm2", "messages": ASK, "tools": TOOLS[:1], "tool_choice": "required",
        "parallel_tool_calls": False, "temperature": 1.0, "seed": seed, "max_tokens": 200,
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**options).choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    content, calls, reason = streamed(client.chat.completions.create(**options, stream=True))
    assert (content, list(calls), reason) == ("", [0], "tool_calls")
    call_id, name, arguments = calls[0]
    assert call_id
    assert (name, arguments) == ("weather", call.function.arguments)


def test_a_call_by_name(client) -> None:
    options = {
        "model": "smollm2", "messages": ASK, "tools": TOOLS, "tool_choice": NAMED,
        "temperature": 1.0, "seed": 4, "max_tokens": 200,
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**options).choices
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    assert choice.finish_reason == "stop"
    _, calls, reason = streamed(client.chat.completions.create(**options, stream=True))
    assert (calls[0][1:], reason) == (["weather", call.function.arguments], "stop")


def test_calls_that_the_model_chooses(client) -> None:
    """A grammar stands for a model that is better at it."""
    call = '{"name": "weather", "arguments": {"city": "(Paris|Rome)"}}'
    written = "Well\\.\\n<tool_call>\\n" + re.sub("([{}])", r"\\\1", call) + "\\n</tool_call>"
    options = {
        "model": "smollm2", "messages": ASK, "tools": TOOLS, "max_tokens": 60, "temperature": 0,
        "extra_body": {"structured_outputs": {"regex": written}},
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**options).choices
    (call,) = choice.message.tool_calls
    assert choice.message.content == "Well."
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert choice.finish_reason == "tool_calls"
    content, calls, reason = streamed(client.chat.completions.create(**options, stream=True))
    assert (content, reason) == ("Well.", "tool_calls")
    assert calls[0][1:] == ["weather", call.function.arguments]
    none = client.chat.completions.create(**options, tool_choice="none").choices[0]
    assert none.message.tool_calls is None
    assert none.message.content.startswith("Well.\n<tool_call>")


def test_results_go_back(server) -> None:
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    tokens = server.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    for part in ('"name": "weather"', "Look it up.", '{"city": "Paris"}', "Rain."):
        assert part in text
    answer = server.client().chat.completions.create(
        model="smollm2", messages=messages, tools=TOOLS, max_tokens=5
    )
    assert answer.usage.prompt_tokens == len(tokens)


def test_json_objects_and_schemas(client) -> None:
    options = {"model": "smollm2", "messages": ASK, "temperature": 1.0, "max_tokens": 300}
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(**options, seed=seed, response_format=form)
        jsonschema.validate(json.loads(answer.choices[0].message.content), WEATHER)
    pieces = client.chat.completions.create(**options, seed=1, response_format=form, stream=True)
    jsonschema.validate(json.loads(streamed(pieces)[0]), WEATHER)


def test_the_clients_own_models(client) -> None:
    class Step(pydantic.BaseModel):
        ok: bool
        size: int = pydantic.Field(ge=0, le=99)

    answer = client.chat.completions.parse(
        model="smollm2", messages=ASK, response_format=Step, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Step)


def test_other_grammars(client) -> None:
    def ask(extra):
        answer = client.completions.create(
            model="smollm2", prompt="It is", max_tokens=30, temperature=1.0, seed=1,
            extra_body=extra,
        )  # fmt: skip
        return answer.choices[0].text

    for extra in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes"]}}):
        assert ask(extra) in ("yes", "no")
    for extra in ({"guided_regex": "[a-c]{3}x"}, {"structured_outputs": {"regex": "[a-c]{3}x"}}):
        assert re.fullmatch("[a-c]{3}x", ask(extra))
    lark = 'start: "a" | "b" start'
    for extra in ({"guided_grammar": lark}, {"structured_outputs": {"grammar": lark}}):
        assert re.fullmatch("b*a?", ask(extra))
    assert json.loads(ask({"guided_json": {"type": "integer", "maximum": 50, "minimum": 0}})) <= 50


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("guided_regex", "(", "regex"),
        ("guided_regex", "(?=a)b", "look"),
        ("guided_grammar", "start: nothing_here", "nothing_here"),
        ("guided_json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("guided_json", {"type": "nonsense"}, "nonsense"),
        ("guided_json", {"$ref": "#/nowhere"}, "nowhere"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_grammars_that_cannot_be(server, field, value, word, stream) -> None:
    body = {"prompt": "a", "max_tokens": 3, field: value, "stream": stream}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]
