"""Hundreds of streams of every kind against a server, good and bad: right answers and no leaks.

    python ci/serve_soak.py MODEL --minutes 5 --streams 200 --backend cpu --json out.json

The right answers are computed first by an engine in this process, one request at a time. The server
runs with `--deterministic`, so that what it answers must be equal, token by token, whatever runs
beside it: chat and completions, streamed or not, several choices, stop texts, grammars, seeded
draws, log-probabilities. Between them clients leave at random moments or read slowly, and send bad
bodies, which must get a 4xx with an error object. After every third of the time, with nothing
running, both processes are measured; the first two are warm-up, the last must need no more. Exit
status 1 when an answer was wrong, something leaked or failed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import os
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from polysilicon.catalogue import resolve_model
from polysilicon.chat import ChatTemplate
from polysilicon.config import Config
from polysilicon.engine.loading import Loaded, load
from polysilicon.request import FinishReason, Grammar, Request, SamplingParams
from polysilicon.testing.served import (
    Resources,
    ServerProcess,
    is_running,
    resources,
    serving,
)

KEY = "soak-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
QUIET_SECONDS = 60.0
CLIENT_SECONDS = 300.0
MOST_MORE_FDS = 4
MOST_MORE_BYTES = 64 << 20
PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "List three colours:",
    "Water boils at",
    "Ein Satz auf Deutsch: ",
    "1, 2, 3, 4,",
    "The quick brown fox " * 20,
)
_TRACEBACK = re.compile(r"^Traceback .*\n(?: .*\n)*(.*\n)", re.MULTILINE)
"""Of a log; its group is the exception."""

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One choice. logprobs: of its tokens, where they were asked for."""

    ids: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A request whose answer is known. params: in the names of SamplingParams."""

    prompt: str
    chat: bool
    params: Mapping[str, Any]
    grammar: Grammar | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {**self.params, "stream": stream, "return_token_ids": True}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
            if "logprobs" in body:
                body["top_logprobs"], body["logprobs"] = body["logprobs"], True
        else:
            body["prompt"] = self.prompt
        if self.grammar is not None and self.grammar.kind == "json_schema":
            schema = {"name": "answer", "schema": json.loads(self.grammar.text)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.grammar is not None:
            body["structured_outputs"] = {self.grammar.kind: self.grammar.text}
        return body

    def request(self, loaded: Loaded, template: ChatTemplate) -> Request:
        text = self.prompt
        if self.chat:
            text = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
        ids = loaded.tokenizer.encode(text, add_special=not self.chat, parse_special=True)
        params = dict(self.params)
        params["stop"] = tuple(params.get("stop", ()))
        return Request(
            id="offline", prompt=tuple(ids), params=SamplingParams(**params), grammar=self.grammar
        )


def questions() -> list[Question]:
    """The pool: every prompt in several ways."""
    found = []
    ways: list[tuple[dict[str, Any], Grammar | None]] = [
        ({"max_tokens": 24}, None),
        ({"max_tokens": 20, "n": 3}, None),
        ({"max_tokens": 40, "stop": [",", " the", "\n\n"]}, None),
        ({"max_tokens": 16, "logprobs": 3}, None),
        ({"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7, "n": 2}, None),
        ({"max_tokens": 64}, Grammar(kind="json_schema", text=PERSON)),
        ({"max_tokens": 24}, Grammar(kind="regex", text="[a-z]{3,8}( [a-z]{2,9}){1,3}[.]")),
        ({"max_tokens": 80, "ignore_eos": True}, None),
    ]
    for place, prompt in enumerate(PROMPTS):
        for offset in range(3):
            params, grammar = ways[(3 * place + offset) % len(ways)]
            params = {"temperature": 0.0, **params}
            chat = (place + offset) % 2 == 1
            found.append(Question(prompt=prompt, chat=chat, params=params, grammar=grammar))
    return found


def offline(config: Config, path: Path, pool: Sequence[Question]) -> list[list[Answer]]:
    """What the engine answers to each question alone."""
    loaded = load(config, path)
    try:
        template = ChatTemplate.for_tokenizer(loaded.tokenizer)
        answers = []
        for question in pool:
            request = question.request(loaded, template)
            gathered = [_Gathered() for _ in range(request.params.n)]
            for output in loaded.client.generate([request]):
                choice = gathered[output.choice]
                choice.ids += output.ids
                choice.text += output.text
                choice.logprobs += [entry.logprob for entry in output.logprobs]
                if output.finish_reason is FinishReason.ERROR:
                    raise SystemExit(f"offline: {output.error}")
                choice.reason = output.finish_reason or choice.reason
            answers.append([choice.answer() for choice in gathered])
        return answers
    finally:
        loaded.client.close()
        loaded.checkpoint.close()


@dataclasses.dataclass
class _Gathered:
    """One choice as it comes."""

    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[float] = dataclasses.field(default_factory=list)
    reason: str = ""

    def answer(self) -> Answer:
        return Answer(
            ids=tuple(self.ids),
            text=self.text,
            reason=str(self.reason),
            logprobs=tuple(self.logprobs),
        )

    def take(self, choice: Mapping[str, Any], chat: bool) -> None:
        """Add a choice of a response, or of a chunk of one."""
        if chat:
            part = choice.get("message") or choice.get("delta") or {}
            self.text += part.get("content") or ""
        else:
            self.text += choice["text"]
        self.ids += choice.get("token_ids") or ()
        logprobs = choice.get("logprobs")
        if logprobs and chat:
            self.logprobs += [entry["logprob"] for entry in logprobs["content"]]
        elif logprobs:
            self.logprobs += logprobs["token_logprobs"]
        self.reason = choice.get("finish_reason") or self.reason


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
        gathered = [_Gathered() for _ in right]
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
        gathered: list[_Gathered],
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


def gauges(text: str) -> dict[str, float]:
    """What must be zero when nothing runs, from the text of /metrics."""
    names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    found = re.findall(rf"^polysilicon:({names})\S* (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


async def quiet(server: ServerProcess, failures: list[str]) -> dict[str, Resources]:
    """Wait until nothing runs, and measure both processes."""
    deadline = time.monotonic() + QUIET_SECONDS
    async with aiohttp.ClientSession(server.url, headers=HEADERS) as session:
        while True:
            async with session.get("/metrics") as response:
                values = gauges(await response.text())
            if len(values) == 3 and not any(values.values()):
                break
            if time.monotonic() > deadline:
                failures.append(f"{QUIET_SECONDS:g} s after the last client: {values}")
                break
            await asyncio.sleep(0.2)
    await asyncio.sleep(1)
    engine = server.engine_pid
    if engine is None:
        failures.append("there is no engine process")
        return {"server": resources(server.process.pid)}
    return {"server": resources(server.process.pid), "engine": resources(engine)}


def compare(before: Mapping[str, Resources], after: Mapping[str, Resources]) -> list[str]:
    """What grew more than it may."""
    found = []
    for name, first in before.items():
        last = after.get(name)
        if last is None:
            continue
        if last.fds > first.fds + MOST_MORE_FDS:
            found.append(f"{name}: {first.fds} file descriptors became {last.fds}")
        if last.threads > first.threads + MOST_MORE_FDS:
            found.append(f"{name}: {first.threads} threads became {last.threads}")
        if last.rss > first.rss + max(MOST_MORE_BYTES, first.rss // 10):
            found.append(f"{name}: {first.rss >> 20} MiB became {last.rss >> 20} MiB")
    return found


async def soak(soaking: Soak, server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """All of it; the report."""
    failures = soaking.failures
    engine = server.engine_pid
    moments = {"start": await quiet(server, failures)}
    for part, moment in enumerate(("warm", "middle", "end")):
        await soaking.run(
            streams=options.streams, seconds=options.minutes * 20, seed=options.seed + part
        )
        moments[moment] = await quiet(server, failures)
    failures += compare(moments["middle"], moments["end"])
    await soaking.ask_all()
    await quiet(server, failures)
    if server.engine_pid != engine:
        failures.append("the engine was restarted")
    log = "".join(server.lines)
    failures += [f"in the log: {found[1][:300]}" for found in _TRACEBACK.finditer(log)]
    print(f"{'kind':<28} {'good':>7}")
    for name, count in soaking.counts.items():
        print(f"{name:<28} {count:7,}")
    print(f"{'refused for load, tried again':<28} {soaking.refused:6,}")
    print(f"{'process':<8} {'moment':<6} {'fds':>5} {'threads':>8} {'RSS':>9}")
    for name in ("server", "engine"):
        for moment, held in moments.items():
            if name in held:
                now = held[name]
                rss = now.rss >> 20
                print(f"{name:<8} {moment:<6} {now.fds:5} {now.threads:8} {rss:5,} MiB")
    return {
        "counts": dict(soaking.counts),
        "refused": soaking.refused,
        "resources": {
            moment: {name: dataclasses.asdict(value) for name, value in held.items()}
            for moment, held in moments.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument(
        "--kv-pages", type=int, default=256, help="few, so that they are all used, and preempted"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = Config(backend=options.backend, deterministic=True, kv_pages=options.kv_pages)
    pool = questions()
    print(f"{options.model}: {len(pool)} questions, answered offline", flush=True)
    right = offline(config, resolve_model(options.model), pool)
    arguments = ["--backend", options.backend, "--deterministic", "--max-body", "2MB"]
    arguments += ["--kv-pages", str(options.kv_pages)]
    with serving(options.model, arguments, environment={"POLYSILICON_API_KEY": KEY}) as server:
        soaking = Soak(server, pool, right)
        report = asyncio.run(soak(soaking, server, options))
        pids = [server.process.pid, *filter(None, [server.engine_pid])]
    failures = soaking.failures
    if server.process.returncode:
        failures.append(f"the server ended with status {server.process.returncode}")
    failures += [f"process {pid} outlived the server" for pid in pids if is_running(pid)]
    for failure in failures[:20]:
        print(f"FAILED {failure}")
    print(f"{len(failures)} failures")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        settings["model"] = os.path.basename(options.model)
        options.json.write_text(json.dumps({**settings, **report, "failures": failures}, indent=1))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
