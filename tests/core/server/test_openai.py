"""OpenAI's own clients against a running server, and its answers against the engine's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from polysilicon.chat import ChatTemplate
from polysilicon.config import Config
from polysilicon.engine.loading import Loaded, load
from polysilicon.request import Request, SamplingParams

HELLO = [{"role": "user", "content": "Say hello to Zoë in one sentence."}]


@pytest.fixture(scope="module")
def offline(smollm2_path: Path) -> Iterator[Loaded]:
    loaded = load(Config(deterministic=True), smollm2_path)
    yield loaded
    loaded.client.close()
    loaded.checkpoint.close()


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return server.client()


def generated(offline: Loaded, ids, **sampling):
    """Text, ids and log-probabilities of each choice, by the engine in this process."""
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    choices = [["", [], [], None] for _ in range(params.n)]
    for output in offline.client.generate([Request(id="r", prompt=tuple(ids), params=params)]):
        choice = choices[output.choice]
        choice[0] += output.text
        choice[1] += output.ids
        choice[2] += output.logprobs
        choice[3] = output.finish_reason
    return choices


def chat_ids(offline: Loaded, messages, **options) -> list[int]:
    text = ChatTemplate.for_tokenizer(offline.tokenizer).render(messages, **options)
    return offline.tokenizer.encode(text, add_special=False, parse_special=True)


def prompt_ids(offline: Loaded, text: str) -> list[int]:
    return offline.tokenizer.encode(text, add_special=True, parse_special=True)


def test_models(client) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("smollm2", "model", "polysilicon")
    assert model.max_model_len > 1000
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-4")
    assert raised.value.code == "model_not_found"


def test_chat_equals_offline(client, offline) -> None:
    ids = chat_ids(offline, HELLO)
    ((text, output, _, reason),) = generated(offline, ids, max_tokens=20)
    answer = client.chat.completions.create(model="smollm2", messages=HELLO, max_tokens=20)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text
    assert choice.finish_reason == reason
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == len(output)
    assert answer.usage.total_tokens == len(ids) + len(output)


def test_chat_stream(client, offline) -> None:
    ids = chat_ids(offline, HELLO)
    ((text, output, _, reason),) = generated(offline, ids, max_tokens=20)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=HELLO,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(delta.delta.content or "" for delta in deltas) == text
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [reason]
    assert deltas[-1].finish_reason == reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(output)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_without_usage_ends_with_done(server) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "stream": True}
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert not any("usage" in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


def test_usage_in_every_chunk(server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "max_tokens": 3, "stream": True, "stream_options": options}
    events = server.post("/v1/chat/completions", body).text.split("\n\n")[:-2]
    counts = [
        json.loads(event.removeprefix("data: "))["usage"]["completion_tokens"] for event in events
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert counts[0] >= 1


def test_async_client(server, offline) -> None:
    async def ask(client, text):
        messages = [{"role": "user", "content": text}]
        whole = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=8)
        stream = await client.chat.completions.create(
            model="smollm2", messages=messages, max_tokens=8, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return "".join(pieces), (await whole).choices[0].message.content

    async def run():
        async with server.async_client() as client:
            return await asyncio.gather(*(ask(client, f"Count to {n}.") for n in range(6)))

    for n, (streamed, whole) in enumerate(asyncio.run(run())):
        ids = chat_ids(offline, [{"role": "user", "content": f"Count to {n}."}])
        assert streamed == whole == generated(offline, ids, max_tokens=8)[0][0]


def test_chat_logprobs_equal_offline(client, offline) -> None:
    ids = chat_ids(offline, HELLO)
    ((_, output, logprobs, _),) = generated(offline, ids, max_tokens=6, logprobs=3)
    options = {"model": "smollm2", "messages": HELLO, "max_tokens": 6, "logprobs": True}
    whole = client.chat.completions.create(**options, top_logprobs=3).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, top_logprobs=3, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    for entries in (whole, streamed):
        assert [entry.logprob for entry in entries] == pytest.approx(
            [entry.logprob for entry in logprobs], abs=1e-4
        )
        assert [bytes(entry.bytes) for entry in entries] == [
            offline.tokenizer.token_bytes(token) for token in output
        ]
        for entry, expected in zip(entries, logprobs, strict=True):
            assert [top.token for top in entry.top_logprobs] == [
                offline.tokenizer.token_text(token) for token, _ in expected.top
            ]
    bare = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in bare] == [[]] * 6


def test_seeds_and_choices_equal_offline(client, offline) -> None:
    sampling = {"temperature": 1.0, "n": 3, "seed": 7, "max_tokens": 8, "top_p": 0.9}
    ids = prompt_ids(offline, "Once upon a time")
    expected = [choice[0] for choice in generated(offline, ids, **sampling)]
    assert len(set(expected)) > 1
    options = {"model": "smollm2", "prompt": "Once upon a time", **sampling}
    whole = client.completions.create(**options)
    assert [choice.text for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == len(ids)
    streamed = ["", "", ""]
    for chunk in client.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_chat_with_choices_streams_each(client) -> None:
    options = {
        "model": "smollm2", "messages": HELLO, "n": 2, "seed": 3, "temperature": 1.2,
        "max_tokens": 6,
    }  # fmt: skip
    whole = [c.message.content for c in client.chat.completions.create(**options).choices]
    streamed = ["", ""]
    roles, reasons = [], []
    for chunk in client.chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles.append(choice.index)
        if choice.finish_reason:
            reasons.append(choice.index)
    assert streamed == whole
    assert sorted(roles) == sorted(reasons) == [0, 1]


def test_prompts_as_texts_and_ids(client, offline) -> None:
    texts = ["The capital of France is", "Two and two make"]
    ids = [prompt_ids(offline, text) for text in texts]
    expected = [generated(offline, prompt, max_tokens=5)[0][0] for prompt in ids]
    for prompt in (texts, ids):
        answer = client.completions.create(model="smollm2", prompt=prompt, max_tokens=5)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    for prompt in (texts[0], ids[0]):
        answer = client.completions.create(model="smollm2", prompt=prompt, max_tokens=5)
        assert [choice.text for choice in answer.choices] == expected[:1]
    streamed = ["", ""]
    for chunk in client.completions.create(
        model="smollm2", prompt=texts, max_tokens=5, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_echo_scores_the_prompt(client, offline) -> None:
    text = "The capital of France is"
    ids = prompt_ids(offline, text)
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, temperature=0)
    outputs = list(offline.client.generate([Request(id="r", prompt=tuple(ids), params=params)]))
    expected = [entry.logprob for output in outputs for entry in output.prompt_logprobs]
    options = {"model": "smollm2", "prompt": text, "echo": True, "logprobs": 2}
    bare = client.completions.create(**options, max_tokens=0)
    assert bare.choices[0].text == text
    assert bare.usage.completion_tokens == 0
    logprobs = bare.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert [text[offset:][: len(token)] for offset, token in zip(
        logprobs.text_offset, logprobs.tokens, strict=True
    )] == logprobs.tokens  # fmt: skip
    more = client.completions.create(**options, max_tokens=2)
    assert more.choices[0].text.startswith(text)
    assert more.choices[0].text.endswith("".join(more.choices[0].logprobs.tokens[-2:]))
    assert len(more.choices[0].logprobs.tokens) == len(ids) + 2
    pieces = list(client.completions.create(**options, max_tokens=2, stream=True))
    assert "".join(chunk.choices[0].text for chunk in pieces) == more.choices[0].text
    tokens = [t for c in pieces if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert tokens == more.choices[0].logprobs.tokens


def test_completion_logprobs_are_at_most_one_more(client) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="One, two,", max_tokens=4, logprobs=0, temperature=1, seed=1
    )
    logprobs = answer.choices[0].logprobs
    assert [list(top) for top in logprobs.top_logprobs] == [[token] for token in logprobs.tokens]
    as_ids = client.completions.create(
        model="smollm2",
        prompt="One, two,",
        max_tokens=2,
        logprobs=1,
        extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True},
    ).choices[0]
    assert as_ids.logprobs.tokens == [f"token_id:{token}" for token in as_ids.token_ids]


def test_prompt_logprobs(client, offline) -> None:
    ids = prompt_ids(offline, "one two three")
    answer = client.completions.create(
        model="smollm2", prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    entries = answer.choices[0].prompt_logprobs
    assert entries[0] is None
    assert len(entries) == len(ids)
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        assert str(token) in entry
        assert any(place["rank"] == 1 for place in entry.values())


def test_stops(client, offline) -> None:
    ids = prompt_ids(offline, "1, 2, 3, 4,")
    text = generated(offline, ids, max_tokens=20)[0][0]
    stop = text[6:9]
    options = {"model": "smollm2", "prompt": "1, 2, 3, 4,", "max_tokens": 20}
    choice = client.completions.create(**options, stop=[stop, "never"]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    kept = client.completions.create(
        **options, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == text[: text.index(stop)] + stop
    token = offline.tokenizer.encode(" 6", add_special=False, parse_special=False)[-1]
    by_id = client.completions.create(**options, extra_body={"stop_token_ids": [token]})
    assert (by_id.choices[0].finish_reason, by_id.choices[0].stop_reason) == ("stop", token)


def test_sampling_fields_reach_the_engine(client, offline) -> None:
    ids = prompt_ids(offline, "Colours are")
    some = generated(offline, ids, max_tokens=8)[0][1]
    word = offline.tokenizer.token_text(some[0])
    allowed = [some[0], some[1], some[2]]
    cases = {
        "allowed_token_ids": (allowed, {"allowed_token_ids": tuple(allowed)}),
        "logit_bias": ({str(some[0]): -100}, {"logit_bias": {some[0]: -100.0}}),
        "repetition_penalty": (1.7, {"repetition_penalty": 1.7}),
        "presence_penalty": (1.5, {"presence_penalty": 1.5}),
        "frequency_penalty": (1.5, {"frequency_penalty": 1.5}),
        "min_tokens": (8, {"min_tokens": 8}),
        "ignore_eos": (True, {"ignore_eos": True}),
    }
    for name, (value, sampling) in cases.items():
        expected = generated(offline, ids, max_tokens=8, **sampling)[0][0]
        answer = client.completions.create(
            model="smollm2", prompt=ids, max_tokens=8, extra_body={name: value}
        )
        assert answer.choices[0].text == expected, name
    sampled = {"temperature": 1.5, "seed": 5, "max_tokens": 8}
    for name, value in {"top_k": 3, "min_p": 0.2, "top_p": 0.3, "typical_p": 0.3}.items():
        expected = generated(offline, ids, **sampled, **{name: value})[0][0]
        answer = client.completions.create(
            model="smollm2", prompt=ids, **sampled, extra_body={name: value}
        )
        assert answer.choices[0].text == expected, name
    without = client.completions.create(
        model="smollm2", prompt=ids, max_tokens=8, extra_body={"bad_words": [word.strip()]}
    )
    assert word.strip() not in without.choices[0].text.split()


def test_top_k_of_minus_one_is_off(client) -> None:
    options = {"model": "smollm2", "prompt": "a", "max_tokens": 4, "temperature": 1.0, "seed": 1}
    texts = {
        client.completions.create(**options, extra_body={"top_k": k}).choices[0].text
        for k in (-1, 0)
    }
    assert len(texts) == 1


def test_special_tokens_shown(client) -> None:
    options = {"model": "smollm2", "messages": HELLO, "max_tokens": 100}
    hidden = client.chat.completions.create(**options).choices[0]
    assert hidden.finish_reason == "stop"
    shown = client.chat.completions.create(
        **options,
        extra_body={"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 100},
    )
    assert "<|im_end|>" in shown.choices[0].message.content


def test_continue_final_message(client, offline) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Dear Zoë, I"}]
    rendered = ChatTemplate.for_tokenizer(offline.tokenizer).render(
        HELLO, add_generation_prompt=True
    )
    ids = offline.tokenizer.encode(rendered + "Dear Zoë, I", add_special=False, parse_special=True)
    expected = generated(offline, ids, max_tokens=5)[0][0]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    options = {"model": "smollm2", "messages": messages, "max_tokens": 5}
    answer = client.chat.completions.create(**options, extra_body=extra)
    assert answer.choices[0].message.content == expected
    echoed = client.chat.completions.create(**options, extra_body={**extra, "echo": True})
    assert echoed.choices[0].message.content == "Dear Zoë, I" + expected


def test_truncated_prompts(client, offline) -> None:
    ids = prompt_ids(offline, "one two three four five six seven")
    answer = client.completions.create(
        model="smollm2",
        prompt=ids,
        max_tokens=3,
        extra_body={"truncate_prompt_tokens": 3, "return_token_ids": True},
    )
    assert answer.choices[0].prompt_token_ids == ids[-3:]
    assert answer.choices[0].text == generated(offline, ids[-3:], max_tokens=3)[0][0]


def test_cached_tokens_are_told(client) -> None:
    options = {"model": "smollm2", "prompt": "A prompt of its own. " * 20, "max_tokens": 1}
    salt = {"cache_salt": "mine"}
    counts = [
        client.completions.create(**options, extra_body=extra).usage.prompt_tokens_details
        for extra in (salt, salt, {"cache_salt": "yours"})
    ]
    assert [count.cached_tokens > 0 for count in counts] == [False, True, False]


def test_tokenize_and_detokenize(server, offline) -> None:
    answer = server.post("/tokenize", {"prompt": "Grüße, 世界", "return_token_strs": True}).json()
    ids = prompt_ids(offline, "Grüße, 世界")
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids) == len(answer["token_strs"])
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "Grüße, 世界"}
    chat = server.post("/tokenize", {"messages": HELLO}).json()
    assert chat["tokens"] == chat_ids(offline, HELLO)
    back = server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert back == ChatTemplate.for_tokenizer(offline.tokenizer).render(HELLO)


def test_operations(server) -> None:
    assert server.get("/health").json() == {"status": "ready", "reason": ""}
    assert server.get("/ready").status_code == 200
    assert server.get("/version").json()["version"]
