"""Anthropic's own clients against a running server."""

from __future__ import annotations

import asyncio
import json

import anthropic
import pytest

ASK = [{"role": "user", "content": "Say hello to Zoë in one sentence."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "Look it up.", "input_schema": SCHEMA}]


@pytest.fixture(scope="module")
def client(server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def openai_text(server, messages, **options):
    answer = server.client().chat.completions.create(model="smollm2", messages=messages, **options)
    return answer.choices[0].message.content, answer.usage


def test_messages(client, server) -> None:
    answer = client.messages.create(model="smollm2", max_tokens=100, messages=ASK)
    text, usage = openai_text(server, ASK, max_tokens=100)
    assert [(block.type, block.text) for block in answer.content] == [("text", text)]
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    read = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert (read, answer.usage.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    counted = client.messages.count_tokens(model="smollm2", messages=ASK)
    assert counted.input_tokens == usage.prompt_tokens


def test_stream(client, server) -> None:
    text, usage = openai_text(server, ASK, max_tokens=12)
    with client.messages.stream(model="smollm2", max_tokens=12, messages=ASK) as stream:
        assert "".join(stream.text_stream) == text
        answer = stream.get_final_message()
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == usage.completion_tokens == 12
    kinds = [
        event.type
        for event in client.messages.create(
            model="smollm2", max_tokens=2, messages=ASK, stream=True
        )
    ]
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_async_client(server) -> None:
    async def run():
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="none", max_retries=0
        ) as client:
            whole = await client.messages.create(model="smollm2", max_tokens=8, messages=ASK)
            async with client.messages.stream(
                model="smollm2", max_tokens=8, messages=ASK
            ) as stream:
                pieces = [piece async for piece in stream.text_stream]
            return whole.content[0].text, "".join(pieces)

    whole, streamed = asyncio.run(run())
    assert whole == streamed
    assert whole


def test_system_stops_and_what_was_begun(client, server) -> None:
    blocks = [{"type": "text", "text": "You are"}, {"type": "text", "text": "brief."}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Count to five."}]},
        {"role": "assistant", "content": "1, 2,"},
    ]
    answer = client.messages.create(
        model="smollm2", max_tokens=30, system=blocks, messages=messages, stop_sequences=["4"]
    )
    as_openai = [
        {"role": "system", "content": "You are\nbrief."},
        {"role": "user", "content": "Count to five."},
        messages[1],
    ]
    text, _ = openai_text(
        server, as_openai, max_tokens=30, stop="4", extra_body={"continue_final_message": True}
    )
    assert answer.content[0].text == text
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "4")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools(client, choice) -> None:
    options = {
        "model": "smollm2", "max_tokens": 100, "messages": ASK, "tools": TOOLS,
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }  # fmt: skip
    answer = client.messages.create(**options)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input["city"] in ("Paris", "Rome")
    with client.messages.stream(**options) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}]
    more = client.messages.create(
        model="smollm2",
        max_tokens=5,
        tools=TOOLS,
        messages=[
            *ASK,
            {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
            {"role": "user", "content": result},
        ],
    )
    assert more.usage.output_tokens > 0


def test_structured_output(client) -> None:
    answer = client.messages.create(
        model="smollm2",
        max_tokens=60,
        messages=ASK,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    )
    assert json.loads(answer.content[0].text)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "content"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "input"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["a" * 9000, "b" * 9000]}, "stop_sequences"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=lambda value: repr(value)[:60],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_form(server, change, word, stream) -> None:
    body = {"model": "smollm2", "max_tokens": 1, "messages": ASK, "stream": stream} | change
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 400, answer.text
    value = answer.json()
    assert value["type"] == "error"
    assert value["error"]["type"] == "invalid_request_error"
    assert word in value["error"]["message"]


def test_client_sees_the_right_exceptions(client, server) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=1, messages=ASK)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="smollm2", max_tokens=9000, messages=ASK)
    answer = server.get("/v1/messages")
    assert (answer.status_code, answer.json()["type"]) == (405, "error")
