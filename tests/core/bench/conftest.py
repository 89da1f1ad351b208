"""A server with known delays for the load generator, and a tiny engine for the offline commands."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from polysilicon.commands import bench as bench_commands
from polysilicon.commands.application import run
from polysilicon.config import Config
from polysilicon.engine.client import Client
from polysilicon.engine.loading import build_engine
from polysilicon.models.loading import load_model
from polysilicon.reference.device import ReferenceDevice
from polysilicon.testing.tiny_models import VOCABULARY, tiny_llama
from polysilicon.tokenizer import Tokenizer
from polysilicon.tokenizer_vocabulary import BYTE_OF_STAND_IN
from polysilicon.weights.checkpoint import open_checkpoint

PROBE_TOKENS = 2
"""Output tokens of the load generator's probes; no test asks for so many otherwise."""


@dataclasses.dataclass(kw_only=True)
class Answer:
    """How one request is answered.

    ttft, gap: seconds before the first token and between tokens. per_event: tokens of an event.
    status: another than 200 answers with `body`. body: bytes sent in place of the events, after
    those of `tokens` tokens. cut: close the connection then, without an end.
    """

    ttft: float = 0.0
    gap: float = 0.0
    per_event: int = 1
    tokens: int | None = None
    cached: int = 0
    status: int = 200
    content_type: str = "text/event-stream"
    body: bytes = b""
    cut: bool = False


@dataclasses.dataclass(kw_only=True)
class Seen:
    """A request as the server saw it; at: time.perf_counter() of its arrival."""

    at: float
    body: dict[str, Any]
    headers: dict[str, str]
    path: str


class FakeServer:
    """Speaks enough of OpenAI's HTTP, in a thread of its own.

    answer: called with a request's index (probes not counted) and its body. refuses: called with
    each body; its text becomes an HTTP 400. models: what is listed, None for HTTP 404. usage:
    whether it is sent when asked for. seen, probed: requests and probes that came.
    """

    def __init__(self) -> None:
        self.answer: Callable[[int, dict[str, Any]], Answer] = lambda index, body: Answer()
        self.refuses: Callable[[dict[str, Any]], str | None] = lambda body: None
        self.models: Any = {"data": [{"id": "fake"}]}
        self.usage = True
        self.seen: list[Seen] = []
        self.probed: list[Seen] = []
        self.running = self.most_running = 0
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        self._server = self._loop.run_until_complete(starting)
        self.port = self._server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        method, path, _ = head[0].split()
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            found = path.endswith("/models") and self.models is not None
            body = json.dumps(self.models if found else {"detail": "Not Found"}).encode()
            self._whole(writer, 200 if found else 404, "application/json", body)
            return True
        seen = Seen(at=time.perf_counter(), body=json.loads(content), headers=headers, path=path)
        refusal = self.refuses(seen.body)
        if refusal is not None:
            self.probed.append(seen)
            body = json.dumps({"error": {"message": refusal}}).encode()
            self._whole(writer, 400, "application/json", body)
            return True
        if seen.body["max_tokens"] == PROBE_TOKENS:
            self.probed.append(seen)
            answer = Answer()
        else:
            self.seen.append(seen)
            answer = self.answer(len(self.seen) - 1, seen.body)
        if answer.status != 200 or answer.content_type != "text/event-stream":
            self._whole(writer, answer.status, answer.content_type, answer.body)
            return True
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(writer, seen, answer)
        finally:
            self.running -= 1

    def _whole(
        self, writer: asyncio.StreamWriter, status: int, content_type: str, body: bytes
    ) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _stream(self, writer: asyncio.StreamWriter, seen: Seen, answer: Answer) -> bool:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        await asyncio.sleep(answer.ttft)
        async for data in self._events(seen, answer):
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        if answer.cut:
            return False
        writer.write(b"0\r\n\r\n")
        return True

    async def _events(self, seen: Seen, answer: Answer) -> AsyncIterator[bytes]:
        chat = seen.path.endswith("/chat/completions")
        tokens = seen.body["max_tokens"] if answer.tokens is None else answer.tokens
        due = time.perf_counter()
        if chat:
            yield event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        for sent in range(0, tokens, answer.per_event):
            if sent:
                # Against the clock, so that delays do not add up.
                due += answer.gap
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            piece = "x" * min(answer.per_event, tokens - sent)
            yield event(choices=[{"delta": {"content": piece}} if chat else {"text": piece}])
        if answer.body:
            yield answer.body
        if answer.cut or answer.body:
            return
        last = {"delta": {}} if chat else {"text": ""}
        yield event(choices=[last | {"finish_reason": "length"}])
        if self.usage and seen.body.get("stream_options", {}).get("include_usage"):
            prompt = seen.body.get("prompt") or seen.body["messages"][0]["content"]
            count = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            usage = {"prompt_tokens": count, "completion_tokens": tokens}
            usage["prompt_tokens_details"] = {"cached_tokens": answer.cached}
            yield event(choices=[], usage=usage)
        yield b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`polysilicon bench serve`: exit status, stdout and stderr."""

    def call(*arguments: object, warm_ups: int = 0) -> tuple[int, str, str]:
        fixed = ["--num-warmups", str(warm_ups)]
        status = run(["bench", "serve", *fixed, *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def offline(capsys, tmp_path, monkeypatch):
    """One of the commands on a tiny model: exit status, stdout and stderr."""
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": list(BYTE_OF_STAND_IN)[:VOCABULARY],
            "tokenizer.ggml.token_type": [1] * VOCABULARY,
            "tokenizer.ggml.merges": [],
        }
    )

    @contextlib.contextmanager
    def session(config, model):
        device = ReferenceDevice()
        tiny_llama().write(tmp_path)
        with open_checkpoint(tmp_path) as checkpoint:
            loaded = load_model(checkpoint, device)
        engine, _ = build_engine(
            Config(kv_pages=100), device, loaded, identity="tiny", eos_ids=frozenset()
        )
        client = Client(engine, tokenizer)
        yield SimpleNamespace(client=client, engine=engine)
        client.close()

    monkeypatch.setattr(bench_commands, "session", session)

    def call(command: str, *arguments: str) -> tuple[int, str, str]:
        status = run(["bench", command, "--repeats", "2", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
