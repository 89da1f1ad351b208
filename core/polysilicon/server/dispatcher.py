"""Between HTTP handlers and the engine process: requests in, each one's own news out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from polysilicon.chat import ChatTemplate
from polysilicon.config import Config
from polysilicon.engine.client import Client
from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.health import Health
from polysilicon.engine.model_text import load_text
from polysilicon.engine.stats import EngineStats
from polysilicon.engine.supervisor import Supervisor
from polysilicon.errors import RequestError, ServiceUnavailable
from polysilicon.progress import Progress, no_progress
from polysilicon.request import Request, RequestOutput
from polysilicon.server.admission import Admission
from polysilicon.tokenizer import Tokenizer

_CANCEL_SECONDS = 5.0


class Watcher(Protocol):
    """Who is told of every request, as it happens."""

    def submitted(self, request: Request) -> None:
        """The engine was given a request."""

    def news(self, output: RequestOutput) -> None:
        """Something came of it."""

    def abandoned(self, request_id: str) -> None:
        """Its consumer has gone before its last news; there will be no more."""


class RequestStream(AsyncIterator[list[RequestOutput]]):
    """The news of one request as they come, for one consumer.

    Each turn gives everything that came since the last one: never empty, in order, choices mixed.
    The iteration ends after the last news of the last choice. An engine that dies ends every choice
    with FinishReason.ERROR and the cause. Leave it through `with` or `close`: what has not ended
    then is cancelled in the engine and its pages are freed within a step. Cancelling a task that
    waits for `__anext__` loses no news; it does not close the stream. num_tokens: that have come.
    """

    def __init__(self, request: Request, cancel: Callable[[str], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._news: list[RequestOutput] = []
        self._choices = request.params.n
        self.num_tokens = 0
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    async def __anext__(self) -> list[RequestOutput]:
        """Raises RequestError when the engine refuses the request as it stands."""
        while not self._news:
            if self._closed or not self._choices:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._news = self._news, []
        if news[0].refused:
            self.close()
            raise RequestError(news[0].error or "the engine refused the request")
        return news

    @property
    def ended(self) -> bool:
        """Whether the last news of the last choice have come, be they fetched or not."""
        return not self._choices

    def close(self) -> None:
        """Cancel what has not ended. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._news.clear()
        self._wake()
        self._cancel(self.request.id)

    def push(self, output: RequestOutput) -> None:
        """Take news in; for the dispatcher."""
        self._news.append(output)
        self.num_tokens += len(output.ids)
        if output.finish_reason is not None:
            self._choices -= 1
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Dispatcher:
    """One model behind one engine process. Everything is called from one event loop.

    tokenizer, chat_template, sampling_defaults: loaded here, from the checkpoint that the engine
    runs; chat_template is None where the model has none, and `no_chat` says why.
    """

    def __init__(self, config: Config, path: Path) -> None:
        """path: of the checkpoint (`catalogue.resolve_model`). Loads the tokenizer and the template
        and starts nothing. Raises PolysiliconError for a model or template that cannot be used."""
        text = load_text(config, path)
        self.tokenizer: Tokenizer = text.tokenizer
        self.chat_template: ChatTemplate | None = text.chat_template
        self.no_chat: str = text.no_chat
        self.sampling_defaults: Mapping[str, float | int] = text.sampling_defaults
        self._supervisor = Supervisor(config, path, self._deliver)
        self._client = Client(self._supervisor.engine, text.tokenizer)
        self._admission = Admission(config)
        self._streams: dict[str, RequestStream] = {}
        self._watchers: list[Watcher] = []
        self._observers: list[Callable[[EngineStats], None]] = []
        self._emptied = asyncio.Event()

    async def start(self, progress: Progress = no_progress) -> None:
        """Start the engine and wait until it has loaded. Raises the PolysiliconError that loading
        ended with, in words for the user. Requests are refused with ServiceUnavailable before."""
        await self._supervisor.start(progress)

    @property
    def facts(self) -> ModelFacts:
        """Of the running engine, or of the last one. Only after `start`."""
        facts = self._supervisor.facts
        assert facts is not None
        return facts

    @property
    def stats(self) -> EngineStats:
        """The engine's latest, less than a tenth of a second old while it runs."""
        return self._supervisor.engine.stats

    @property
    def restarts(self) -> int:
        """Of the engine, since the start."""
        return self._supervisor.restarts

    @property
    def num_requests(self) -> int:
        """Streams that have neither ended nor been closed."""
        return len(self._streams)

    def health(self) -> Health:
        return self._supervisor.health

    def submit(self, request: Request) -> RequestStream:
        """Give a request to the engine; does not wait.

        Raises RequestError when it can never be served as it stands, Overloaded when too much waits
        already, ServiceUnavailable while the engine starts or restarts (retry_after is when it
        should be back) or the server shuts down.
        """
        health, engine = self._supervisor.health, self._supervisor.engine
        if not health.ready:
            raise ServiceUnavailable(
                f"no requests are taken now: {health.reason}",
                retry_after=self._supervisor.retry_after,
            )
        self._admission.check(
            request, sequences=engine.num_sequences, facts=self.facts, stats=engine.stats
        )
        self._client.submit(request)
        self._admission.entered(request, self.facts)
        stream = RequestStream(request, self._leave)
        self._streams[request.id] = stream
        for watcher in self._watchers:
            watcher.submitted(request)
        return stream

    def watch(self, watcher: Watcher) -> None:
        """Have `watcher` told of the requests that are submitted from now on."""
        self._watchers.append(watcher)

    def observe(self, observer: Callable[[EngineStats], None]) -> None:
        """Have `observer` called with every new EngineStats, so that no `step_seconds` is missed:
        about 20 times a second at most, and once when the engine becomes idle."""
        self._observers.append(observer)

    async def check(self) -> str | None:
        """What is inconsistent in the engine's books of KV pages, in words, or None; it walks them
        all between two steps. Raises ServiceUnavailable when the engine does not run."""
        return await self._supervisor.engine.check()

    async def drain(self, timeout: float) -> None:
        """Take no new requests (`health().ready` is False), wait up to `timeout` seconds for those
        that run, then cancel the rest: their streams end with FinishReason.CANCELLED."""
        self._supervisor.drain()
        deadline = time.monotonic() + timeout
        await self._until_empty(deadline)
        for request_id in self._streams:
            self._client.cancel(request_id)
        await self._until_empty(time.monotonic() + _CANCEL_SECONDS)

    async def close(self) -> None:
        """End the engine process, at once; streams that run end with an error."""
        await self._supervisor.close()

    async def _until_empty(self, deadline: float) -> None:
        while self._streams:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), deadline - time.monotonic())
            except TimeoutError:
                return

    def _deliver(self) -> None:
        """Give everything that has arrived to the streams that it is for."""
        told = []
        for output in self._client.poll():
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if not stream.num_tokens:
                self._admission.started(stream.request)
            stream.push(output)
            told.append(output)
            if stream.ended:
                self._admission.ended(stream.request, stream.num_tokens)
                self._remove(output.request_id)
        # Consumers come first: whatever becomes of a watcher, they are not left waiting.
        for output in told:
            for watcher in self._watchers:
                watcher.news(output)
        for stats in self._supervisor.engine.fresh_stats:
            for observer in self._observers:
                observer(stats)

    def _leave(self, request_id: str) -> None:
        """The consumer of a stream has gone."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._client.cancel(request_id)
            self._admission.started(stream.request)
            for watcher in self._watchers:
                watcher.abandoned(request_id)
            self._remove(request_id)

    def _remove(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._emptied.set()
