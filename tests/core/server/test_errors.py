"""Requests that cannot be served: one clear error object, with the right status, every time."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def failed(answer: httpx.Response, status: int) -> dict:
    """The error object, which has OpenAI's form and shows no traceback."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in answer.text
    assert ".py" not in answer.text
    return body["error"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"[]",
        b'"text"',
        b"null",
        b'{"messages": NaN}',
        b'{"messages": Infinity}',
        b'{"temperature": 1e999, "messages": []}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "{}".encode("utf-16"),
    ],
    ids=lambda content: repr(content[:24]),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_objects(server, path, content) -> None:
    failed(server.post(path, content=content, headers=JSON), 400)


def test_other_media_types(server) -> None:
    body = json.dumps({"messages": HELLO})
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.post(CHAT, content=body, headers={"content-type": media_type})
        assert "application/json" in failed(answer, 415)["message"]


WRONG = {
    "messages": (None, "hi", [], {}, [1], ["hi"], [{}], [{"role": 1}], [{"content": "no role"}]),
    "max_tokens": ("5", -1, 2.5, True, 2**40, 10**25, [1]),
    "max_completion_tokens": (-1, "x"),
    "temperature": ("hot", -0.1, 1e6, True, [0]),
    "top_p": (0, 1.1, -1),
    "top_k": (-2, 2.5, "x"),
    "min_p": (-0.1, 1.5),
    "n": (0, -1, 129, "2", 1.5),
    "seed": (2**65, -(2**64), "x", 1.5),
    "stop": (1, [1], [["a"]], ["a"] * 1000, ["a" * 9000, "b" * 9000]),
    "stop_token_ids": (5, ["a"], [-1], [10**9]),
    "logit_bias": ([], {"x": 1}, {"-1": 1}, {"999999999": 1}, {"5": "x"}, {"5": 10**400}),
    "logprobs": (1, "yes"),
    "top_logprobs": (21, -1, "x"),
    "prompt_logprobs": (-1, 21),
    "presence_penalty": (2.5, -3),
    "frequency_penalty": (2.5, "x"),
    "repetition_penalty": (0, -1),
    "allowed_token_ids": ([], [10**9], ["a"]),
    "bad_words": ([""], [1], "word", ["a" * 9000, "b" * 9000]),
    "min_tokens": (-1, 10),
    "stream": ("yes", 1),
    "stream_options": ({"include_usage": True}, "x"),
    "response_format": ("json", {}, {"type": "xml"}, {"type": "json_schema"}),
    "structured_outputs": ({"json_object": True, "regex": "a"}, {"choice": []}, {"jsonn": {}}),
    "tools": ("x", [1], [{}], [{"type": "custom"}], [{"type": "function", "function": {}}]),
    "truncate_prompt_tokens": (0, -2, 10**9),
    "chat_template_kwargs": ([], {"messages": []}),
    "tool_choice": ("maybe", {}, {"type": "function", "function": {"name": "f"}}, "required"),
    "priority": (2**40, "x"),
    "cache_salt": (5, "x" * 5000),
    "slo": ({"ttft": 0}, {"ttft": -5}, {"tft": 5}, 5),
    "request_id": ("a b", "x" * 500, 5),
    # Known to OpenAI or vLLM, and refused rather than left out of account.
    "best_of": (2,),
    "suffix": ("end",),
    "audio": ({"voice": "alloy"},),
    "modalities": (["text", "audio"],),
    "functions": ([{"name": "f"}],),
    "function_call": ("auto",),
    "web_search_options": ({},),
    "store": (True,),
    "service_tier": ("flex",),
    "verbosity": ("low",),
    "chat_template": ("{{ 1 }}",),
    "use_beam_search": (True,),
    "logits_processors": (["x"],),
    # Misspelt.
    "temprature": (0.5,),
    "max_token": (5,),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda value: repr(value)[:40],
)
def test_wrong_fields_are_named(server, name, value) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "logprobs": True, name: value}
    error = failed(server.post(CHAT, body), 400)
    # The parameters of the engine have names of their own.
    other = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}.get(name, name)
    assert name.removesuffix("s") in error["message"] or other in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", ""], [[1], []], [1, "a"], ["a", 1], [-1], [10**9], [1.5], None, 5,
     {"a": 1}, [[["a"]]]],
    ids=repr,
)  # fmt: skip
def test_wrong_prompts(server, prompt) -> None:
    error = failed(server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}), 400)
    assert "prompt" in error["message"]


def test_harmless_and_unknown_fields_are_accepted(server) -> None:
    body = {
        "messages": HELLO, "max_tokens": 1, "user": "me", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "modalities": ["text"], "verbosity": "medium", "audio": None,
        "something_else_entirely": {"deep": [1]}, "spaces_between_special_tokens": True,
        "top_logprobs": None, "tools": None, "n": 1.0, "seed": -1,
    }  # fmt: skip
    assert server.post(CHAT, body).status_code == 200
    body = {"prompt": "a", "max_tokens": 1, "best_of": 1, "suffix": None}
    assert server.post(COMPLETIONS, body).status_code == 200


def test_many_unknown_fields_are_refused(server) -> None:
    many = {f"field{index}": 1 for index in range(100_000)}
    error = failed(server.post(CHAT, {"messages": HELLO, "max_tokens": 1, **many}), 400)
    assert "unknown fields" in error["message"]


def test_long_unknown_fields_are_accepted(server) -> None:
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 1, "max_tokens" * 100_000: 1})
    assert answer.status_code == 200, answer.text


def test_unknown_models(server) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})):
        error = failed(server.post(path, {**body, "model": "gpt-4"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "smollm2" in error["message"]


def test_unknown_places(server) -> None:
    assert "/openapi.json" in failed(server.get("/v2/nothing"), 404)["message"]
    failed(server.get(CHAT), 405)


def test_no_redirects(server) -> None:
    host = {"host": "elsewhere.example"}
    failed(httpx.post(f"{server.url}{CHAT}/", headers=host, follow_redirects=False), 404)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_may_be_asked_without_an_answers_body(server, path) -> None:
    answer = httpx.head(server.url + path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_do_not_fit(server, stream) -> None:
    most = server.get("/v1/models").json()["data"][0]["max_model_len"]
    cases = [
        (COMPLETIONS, {"prompt": [5] * most, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [5] * (most + 1), "max_tokens": 0}),
        (COMPLETIONS, {"prompt": [5], "max_tokens": most}),
        (COMPLETIONS, {"prompt": "word " * most, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "x" * 8_000_000, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * most}]}),
    ]
    for path, body in cases:
        error = failed(server.post(path, {**body, "stream": stream}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "context" in error["message"]


def test_last_messages_that_cannot_be_gone_on_with(server) -> None:
    extra = {"continue_final_message": True}
    both = {"messages": HELLO, "add_generation_prompt": True, **extra}
    assert "continue_final_message" in failed(server.post(CHAT, both), 400)["message"]
    empty = {"messages": [*HELLO, {"role": "assistant", "content": ""}], **extra}
    assert "last message" in failed(server.post(CHAT, empty), 400)["message"]


def test_parts_that_are_no_text(server) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    messages = [{"role": "user", "content": [part]}]
    error = failed(server.post(CHAT, {"messages": messages}), 400)
    assert "image_url" in error["message"]
    parts = [{"type": "text", "text": "hi"}]
    body = {"messages": [{"role": "developer", "content": parts}], "max_tokens": 1}
    assert server.post(CHAT, body).status_code == 200


def test_client_sees_the_right_exceptions(server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="smollm2", messages=HELLO, temperature=-1)
    assert "temperature" in raised.value.message
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="smollm2", messages=HELLO, temperature=-1, stream=True)


def test_bodies_are_bounded(serve, smollm2_path) -> None:
    with serve(str(smollm2_path), "--max-body", "1KiB", "--request-timeout", "3") as server:
        failed(server.post(COMPLETIONS, {"prompt": "a" * 2000}), 413)
        assert server.post(COMPLETIONS, {"prompt": "a" * 500, "max_tokens": 1}).is_success

        def chunks():
            yield b'{"prompt": "'
            for _ in range(100):
                yield b"a" * 100
            yield b'"}'

        failed(server.post(COMPLETIONS, content=chunks(), headers=JSON), 413)
        place = urlsplit(server.url)
        with socket.create_connection((place.hostname, place.port), timeout=20) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            assert b" 408 " in slow.recv(4096).split(b"\r\n")[0]
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
        began = time.monotonic()
        error = failed(server.post(COMPLETIONS, body), 504)
        assert "--request-timeout" in error["message"]
        with server.client() as client, pytest.raises(openai.APIError) as raised:
            list(
                client.completions.create(
                    model=None, prompt="a", max_tokens=2000, stream=True,
                    extra_body={"ignore_eos": True},
                )
            )  # fmt: skip
        assert "--request-timeout" in raised.value.message
        assert time.monotonic() - began < 60


def test_api_keys(serve, smollm2_path, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nkey-one\n\n  key-two  \n")
    environment = {"POLYSILICON_API_KEY": "key-three"}
    with serve(
        str(smollm2_path), "--api-key-file", str(keys), "--api-key", "key-four",
        environment=environment,
    ) as server:  # fmt: skip
        for key in ("key-one", "key-two", "key-three", "key-four"):
            assert server.client(api_key=key).models.list().data
            assert server.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer"},
            {"authorization": "key-one"},
            {"authorization": "Basic key-one"},
            {"x-api-key": "# ours"},
            {"x-api-key": ""},
            {"authorization": "Bearer key-one, key-two"},
        ):
            for path in ("/v1/models", "/tokenize", "/openapi.json", "/nothing", "/metrics"):
                answer = server.get(path, headers=headers)
                error = failed(answer, 401)
                assert error["code"] == "invalid_api_key"
                assert "key-" not in answer.text
        failed(server.post(CHAT, content=b"{", headers=JSON), 401)
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="wrong").models.list()


def test_pages_of_other_origins(server, serve, smollm2_path) -> None:
    origin = {"origin": "https://example.com"}
    preflight = {**origin, "access-control-request-method": "POST"}
    answer = httpx.options(server.url + CHAT, headers=preflight)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=origin).headers
    with serve(
        str(smollm2_path), "--cors-origin", "https://example.com", "--api-key", "key"
    ) as shared:
        answer = httpx.options(shared.url + CHAT, headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://example.com"
        bad = {**preflight, "origin": "https://example.org"}
        assert httpx.options(shared.url + CHAT, headers=bad).status_code == 400
        assert shared.get("/v1/models", headers=origin).status_code == 401


def test_heads_are_bounded(server) -> None:
    place = urlsplit(server.url)
    for head in (b"GET /" + b"a" * 200_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 40_000):
        with socket.create_connection((place.hostname, place.port), timeout=20) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(head)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while more := client.recv(4096):
                    answer += more
            assert not answer or b" 400 " in answer.split(b"\r\n")[0]
    body = {"prompt": "word " * 100_000, "max_tokens": 1}
    failed(server.post(COMPLETIONS, body), 400)
    with httpx.Client() as client:
        for _ in range(3):
            assert client.get(server.url + "/health").status_code == 200
