"""The responses interface, by OpenAI's client."""

from __future__ import annotations

import asyncio
import json

import openai
import pydantic
import pytest

HELLO = "Say hello to Zoë in one sentence."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return server.client()


def chat_text(client, messages, **options):
    answer = client.chat.completions.create(model="smollm2", messages=messages, **options)
    return answer.choices[0].message.content, answer.usage


def test_an_answer_is_that_of_the_chat(client) -> None:
    answer = client.responses.create(
        model="smollm2", instructions="Be brief.", input=HELLO, max_output_tokens=60
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": HELLO},
    ]
    text, usage = chat_text(client, messages, max_tokens=60)
    assert answer.output_text == text
    assert (answer.status, answer.object, answer.store) == ("completed", "response", False)
    assert answer.usage.input_tokens == usage.prompt_tokens
    assert answer.usage.output_tokens == usage.completion_tokens
    more = client.responses.create(
        model="smollm2",
        max_output_tokens=4,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": HELLO}]},
            *(item.model_dump() for item in answer.output),
            {"role": "user", "content": "Again."},
        ],
    )
    messages = [
        {"role": "user", "content": HELLO},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Again."},
    ]
    assert more.output_text == chat_text(client, messages, max_tokens=4)[0]
    assert (more.status, more.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_stream(client) -> None:
    options = {"model": "smollm2", "input": HELLO, "max_output_tokens": 100}
    whole = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens
    with client.responses.stream(**options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text


def test_async_client(server) -> None:
    async def run():
        async with server.async_client() as client:
            options = {"model": "smollm2", "input": HELLO, "max_output_tokens": 8}
            whole = await client.responses.create(**options)
            stream = await client.responses.create(**options, stream=True)
            last = [event async for event in stream][-1]
            return whole.output_text, last.response.output_text, last.type

    whole, streamed, kind = asyncio.run(run())
    assert whole == streamed
    assert kind == "response.incomplete"


def test_tools(client) -> None:
    options = {
        "model": "smollm2", "input": "Weather in Rome?", "tools": TOOLS,
        "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100,
    }  # fmt: skip
    answer = client.responses.create(**options)
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.arguments == call.arguments
    assert "response.function_call_arguments.done" in kinds
    more = client.responses.create(
        model="smollm2",
        tools=TOOLS,
        max_output_tokens=5,
        input=[
            {"role": "user", "content": "Weather in Rome?"},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."},
        ],
    )
    assert more.usage.output_tokens > 0


def test_structured_output(client) -> None:
    class City(pydantic.BaseModel):
        capital: bool
        letters: int = pydantic.Field(ge=0, le=99)

    answer = client.responses.parse(
        model="smollm2", input="Rome", text_format=City, max_output_tokens=60
    )
    assert isinstance(answer.output_parsed, City)
    answer = client.responses.create(
        model="smollm2",
        input="Rome",
        max_output_tokens=60,
        text={"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS}},
    )
    assert json.loads(answer.output_text)["city"] in ("Paris", "Rome")


def test_logprobs(client) -> None:
    options = {"model": "smollm2", "input": HELLO, "max_output_tokens": 4, "top_logprobs": 2}
    answer = client.responses.create(**options, include=["message.output_text.logprobs"])
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == 4
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "messages"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"n": 2}, "n is"),
        ({"temperature": 1000}, "temperature"),
        ({"max_output_tokens": -1}, "max_tokens"),
    ],
    ids=lambda value: repr(value)[:60],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(server, change, word, stream) -> None:
    body = {"model": "smollm2", "input": "a", "stream": stream} | change
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]
