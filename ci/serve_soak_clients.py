"""The clients of serve_soak.py: good and bad, patient and not."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
from serve_soak_questions import Answer, Gathered, Question

from polysilicon.testing.served import ServerProcess

KEY = "soak-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CLIENT_SECONDS = 300.0


class Wrong(Exception):
    """What was answered is not what it should have been."""


class Soak:
    """The clients. counts: by kind, how many ended well, and what failed."""

    def __init__(
        self, server: ServerProcess, pool: Sequence[Question], right: Sequence[Sequence[Answer]]
    ) -> None:
        self.url = server.url
        self.pool, self.right = pool, right
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self.refused = 0
        self._host, _, port = server.url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self._session: aiohttp.ClientSession | None = None

    async def run(self, *, streams: int, seconds: float, seed: int) -> None:
        """Keep so many clients busy for a time, and wait for their last answers."""
        end = time.monotonic() + seconds
        async with self._new_session():
            await asyncio.gather(
                *(self._client(random.Random(seed * 10_007 + i), end) for i in range(streams))
            )

    async def ask_all(self) -> None:
        """Every question once, at the same time."""
        async with self._new_session():
            draws = random.Random(0)
            asked = [partial(self._ask, draws, index, "whole") for index in range(len(self.pool))]
            await asyncio.gather(*(self._count("asked at the end", ask) for ask in asked))

    def _new_session(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            self.url,
            headers=HEADERS,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=CLIENT_SECONDS),
            read_bufsize=1 << 12,
        )
        return self._session

    async def _client(self, draws: random.Random, end: float) -> None:
        kinds: list[tuple[str, int, Callable[[], Awaitable[None]]]] = [
            ("streamed", 30, lambda: self._ask(draws, None, "stream")),
            ("whole", 30, lambda: self._ask(draws, None, "whole")),
            ("slow reader", 6, lambda: self._ask(draws, None, "slow")),
            ("left before the first byte", 8, lambda: self._leave_early(draws)),
            ("left in the stream", 12, lambda: self._leave_later(draws)),
            ("bad body", 20, lambda: self._bad_body(draws)),
            ("body cut off", 4, lambda: self._cut_off(draws)),
            ("slow body", 3, lambda: self._slow_body(draws)),
            ("wrong key", 3, lambda: self._wrong_key(draws)),
        ]
        await asyncio.sleep(draws.random())
        while time.monotonic() < end:
            name, _, work = draws.choices(kinds, [weight for _, weight, _ in kinds])[0]
            await self._count(name, work)

    async def _count(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (Wrong, aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}"[:500])
        else:
            self.counts[name] += 1

    async def _ask(self, draws: random.Random, index: int | None, way: str) -> None:
        """Ask a question and compare its answer."""
        assert self._session is not None
        if index is None:
            index = draws.randrange(len(self.pool))
        question, right = self.pool[index], self.right[index]
        body = question.body(stream=way != "whole")
        gathered = [Gathered() for _ in right]
        while True:
            async with self._session.post(question.path, json=body) as response:
                if response.status == 503 and "Retry-After" in response.headers:
                    self.refused += 1
                elif response.status != 200:
                    raise Wrong(f"{response.status}: {(await response.text())[:300]}")
                elif way == "whole":
                    for choice in (await response.json())["choices"]:
                        gathered[choice["index"]].take(choice, question.chat)
                    break
                else:
                    await self._read_stream(draws, response, gathered, question, way == "slow")
                    break
            await asyncio.sleep(draws.uniform(0.5, 2))
        answers = [choice.answer() for choice in gathered]
        if answers != list(right):
            raise Wrong(f"{body}: {answers} is not {list(right)}")

    async def _read_stream(
        self,
        draws: random.Random,
        response: aiohttp.ClientResponse,
        gathered: list[Gathered],
        question: Question,
        slow: bool,
    ) -> None:
        done = False
        async for line in response.content:
            if slow and draws.random() < 0.2:
                await asyncio.sleep(draws.uniform(0, 0.5))
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                done = True
                continue
            chunk = json.loads(line[len(b"data: ") :])
            if done or "error" in chunk:
                raise Wrong(f"in a stream: {chunk}")
            for choice in chunk["choices"]:
                gathered[choice["index"]].take(choice, question.chat)
        if not done:
            raise Wrong("a stream ended without [DONE]")

    async def _leave_early(self, draws: random.Random) -> None:
        assert self._session is not None
        question = draws.choice(self.pool)
        body = question.body(stream=draws.random() < 0.5)
        try:
            async with asyncio.timeout(draws.expovariate(5)):
                async with self._session.post(question.path, json=body) as response:
                    await response.read()
        except TimeoutError:
            pass

    async def _leave_later(self, draws: random.Random) -> None:
        assert self._session is not None
        question = draws.choice(self.pool)
        body = {**question.body(stream=True), "n": draws.choice((1, 1, 4))}
        lines = draws.randrange(1, 40)
        async with self._session.post(question.path, json=body) as response:
            async for line in response.content:
                lines -= 1
                if not lines:
                    break
                if b'"error"' in line and response.status == 200:
                    raise Wrong(f"in a stream: {line!r}")
            response.close()

    async def _bad_body(self, draws: random.Random) -> None:
        path, content, media_type = bad_body(draws)
        assert self._session is not None
        headers = {"Content-Type": media_type}
        async with self._session.post(path, data=content, headers=headers) as response:
            await expect_error(response, f"{path} {content[:200]!r}")

    async def _wrong_key(self, draws: random.Random) -> None:
        assert self._session is not None
        keys = ["Bearer wrong", "Bearer ", "Basic soak-key", "soak-key", "Bearer sk-\xe4"]
        headers = {"Authorization": draws.choice(keys)}
        path = draws.choice(["/v1/completions", "/v1/models", "/metrics"])
        async with self._session.request(
            "POST" if path == "/v1/completions" else "GET", path, headers=headers
        ) as response:
            await expect_error(response, path)
            if response.status != 401:
                raise Wrong(f"{path} with a wrong key: {response.status}")

    async def _cut_off(self, draws: random.Random) -> None:
        """A body shorter than it says, and the end of the connection."""
        content = json.dumps(draws.choice(self.pool).body(stream=True)).encode()
        length = len(content) + draws.randrange(1, 100)
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._head(length) + content[: draws.randrange(len(content))])
        await writer.drain()
        await asyncio.sleep(draws.uniform(0, 0.3))
        writer.close()

    async def _slow_body(self, draws: random.Random) -> None:
        """A good body that trickles in, which is answered."""
        body = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        sent = self._head(len(content)) + content
        while sent:
            cut = draws.randrange(1, 60)
            writer.write(sent[:cut])
            await writer.drain()
            sent = sent[cut:]
            await asyncio.sleep(draws.uniform(0, 0.3))
        async with asyncio.timeout(CLIENT_SECONDS):
            status = await reader.readline()
        writer.close()
        if b" 200 " not in status and b" 503 " not in status:
            raise Wrong(f"a slow body: {status!r}")

    def _head(self, length: int) -> bytes:
        return (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


async def expect_error(response: aiohttp.ClientResponse, what: str) -> None:
    """Raises Wrong unless the response is a 4xx with an error object."""
    text = await response.text()
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    good = isinstance(error, dict) and bool(error.get("message")) and bool(error.get("type"))
    if not 400 <= response.status < 500 or not good:
        raise Wrong(f"{what}: {response.status} {text[:300]}")


def bad_body(draws: random.Random) -> tuple[str, bytes, str]:
    """A path, a body that no server should take, and its type."""
    path = draws.choice(["/v1/completions", "/v1/chat/completions"])
    good: dict[str, Any] = {"max_tokens": 4}
    if path == "/v1/completions":
        good["prompt"] = "Hello"
    else:
        good["messages"] = [{"role": "user", "content": "Hello"}]
    text = json.dumps(good)
    texts = [
        b"", b"{", b"null", b"[]", b"1e999", b"\xff\xfe\x00", b'{"prompt": "\xff"}',
        text[:-2].encode(), text.encode() + b"}", text.encode("utf-16"),
        b'{"a":' * 5000 + b"1" + b"}" * 5000, b"[" * 200_000,
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        text.replace("4", "NaN").encode(), text.replace("4", "1" + "0" * 5000).encode(),
        text.replace("4", "1e400").encode(),
    ]  # fmt: skip
    values: list[dict[str, Any]] = [
        {"max_tokens": "4"}, {"max_tokens": -1}, {"max_tokens": 2**40}, {"max_tokens": 4.5},
        {"max_tokens": 2**31 - 1}, {"temperature": "hot"}, {"temperature": -1},
        {"temperature": 1e300}, {"n": 0}, {"n": 10**9}, {"n": 129}, {"top_p": 0}, {"top_p": 2},
        {"top_k": -5}, {"stop": [["a"]]}, {"stop": ["x"] * 10_000}, {"stop": "x" * 100_000},
        {"logit_bias": {"x": 1}}, {"logit_bias": {str(i): 1.0 for i in range(100_000)}},
        {"logit_bias": {"1": None}}, {"logprobs": 10**6}, {"top_logprobs": 50, "logprobs": True},
        {"seed": 2**70}, {"model": "no-such-model"}, {"model": 7},
        {"stop_token_ids": [10**12]}, {"stop_token_ids": [-1]}, {"allowed_token_ids": []},
        {"messages": []}, {"messages": [{}]}, {"messages": "x"}, {"prompt": 7},
        {"prompt": []}, {"prompt": [[]]}, {"prompt": [1, "a"]}, {"prompt": [10**9]},
        {"prompt": "word " * 100_000, "messages": [{"role": "user", "content": "word " * 100_000}]},
        {"prompt": [5] * 100_000, "messages": [{"role": "user", "content": "w" * 10_000_000}]},
        {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema",
                             "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}},
        {"response_format": {"type": "json_schema",
                             "json_schema": {"schema": {"type": "no such type"}}}},
        {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"regex": "(a{999}){999}"}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}}, {"guided_choice": []},
        {"guided_grammar": "start: missing"}, {"stream": "yes"}, {"stream_options": {}},
        {"priority": 2**40}, {"slo": {"ttft": -1}}, {"temprature": 1}, {"best_of": 5},
    ]  # fmt: skip
    kind = draws.random()
    if kind < 0.35:
        return path, draws.choice(texts), "application/json"
    if kind < 0.4:
        return path, text.encode(), draws.choice(["text/plain", "multipart/form-data", ""])
    if kind < 0.43:
        return path, b'{"prompt": "' + b"a" * (1 << 21) + b'"}', "application/json"
    changed = draws.choice(values)
    if path == "/v1/completions" and "messages" in changed and "prompt" not in changed:
        path, good = "/v1/chat/completions", {}
    if path == "/v1/chat/completions" and "messages" not in changed and "prompt" in changed:
        path, good = "/v1/completions", {}
    if path == "/v1/chat/completions" and changed.keys() == {"logprobs"}:
        path, good = "/v1/completions", {"prompt": "Hello"}
    if path == "/v1/completions" and "top_logprobs" in changed:
        path, good = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    return path, json.dumps({**good, **changed}).encode(), "application/json"
