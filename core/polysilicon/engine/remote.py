"""An engine in another process, as its client sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque

import msgspec

from polysilicon.engine import messages
from polysilicon.engine.checks import check_request
from polysilicon.engine.child import Child
from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.stats import EngineStats
from polysilicon.errors import RequestError, ServiceUnavailable
from polysilicon.request import FinishReason, Request, RequestOutput, RequestTimes


@dataclasses.dataclass(slots=True, eq=False)
class _Sent:
    """A request that is with the engine, and its choices that have not ended."""

    request_id: str
    arrival: float
    choices: set[int]


class RemoteEngine:
    """The `EngineLink` to an engine process. It outlives the process: requests of one that has
    died end with an error, and those that come after go to the next one.

    stats: the latest. fresh_stats: those that came with the last `step`. last_step: when news of a
    step last came, in seconds of time.monotonic(), or work began to wait for one.
    """

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.fresh_stats: list[EngineStats] = []
        self._unseen_stats: list[EngineStats] = []
        self.last_step = time.monotonic()
        self._child: Child | None = None
        self._facts: ModelFacts | None = None
        self._sent: dict[int, _Sent] = {}
        self._numbers: dict[str, int] = {}
        self._ended: list[RequestOutput] = []
        self._checks: deque[asyncio.Future[str | None]] = deque()
        self._serial = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sent or self._ended)

    @property
    def num_sequences(self) -> int:
        """Choices that have not ended."""
        return sum(len(sent.choices) for sent in self._sent.values())

    def attach(self, child: Child, facts: ModelFacts) -> None:
        """Serve from this process, which is ready, from now on."""
        assert self._child is None
        self._child, self._facts = child, facts

    def lose(self, cause: str) -> None:
        """The process is gone: what it had ends with this error."""
        self._child = None
        for number in list(self._sent):
            self._end(number, cause)
        while self._checks:
            self._checks.popleft().set_exception(ServiceUnavailable(cause))
        self._note(
            dataclasses.replace(
                self.stats, requests=0, running=0, waiting={}, kv=(), step_seconds=()
            )
        )

    def add(self, request: Request) -> None:
        """Send a request. Raises RequestError when no engine could serve it, ServiceUnavailable
        while there is none. What only the engine can tell comes as an output that is `refused`."""
        if self._child is None or self._facts is None:
            raise ServiceUnavailable("the engine does not run")
        if request.id in self._numbers:
            raise RequestError(f"a request with id {request.id!r} is being served already")
        check_request(request, vocab_size=self._facts.vocab_size, max_length=self._facts.max_length)
        if request.arrival is None:
            request = dataclasses.replace(request, arrival=time.monotonic())
        assert request.arrival is not None
        try:
            data = msgspec.Raw(messages.encode(request))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise RequestError(f"the request holds a value that cannot be sent: {error}") from None
        if not self._sent:
            self.last_step = time.monotonic()
        self._serial += 1
        choices = set(range(request.params.n))
        self._sent[self._serial] = _Sent(request.id, request.arrival, choices)
        self._numbers[request.id] = self._serial
        self._child.send(messages.Add(self._serial, data))

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        number = self._numbers.get(request_id)
        if number is not None and self._child is not None:
            self._child.send(messages.Cancel(number, choice))

    def step(self) -> list[RequestOutput]:
        """What has arrived since the last call; waits for nothing."""
        outputs, self._ended = self._ended, []
        if self._child is not None:
            for report in self._child.receive():
                if isinstance(report, messages.News):
                    self._take(report, outputs)
                elif isinstance(report, messages.Checked):
                    self._checks.popleft().set_result(report.error)
        ended, self._ended = self._ended, []
        self.fresh_stats, self._unseen_stats = self._unseen_stats, []
        return [*outputs, *ended]

    async def check(self) -> str | None:
        """What is inconsistent in the engine's books, in words, or None. Raises ServiceUnavailable
        when it dies meanwhile."""
        if self._child is None:
            raise ServiceUnavailable("the engine does not run")
        checked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._checks.append(checked)
        self._child.send(messages.Check())
        return await checked

    def close(self) -> None:
        self.lose("the engine was closed")

    def _take(self, news: messages.News, outputs: list[RequestOutput]) -> None:
        self.last_step = time.monotonic()
        if news.stats is not None:
            self._note(news.stats)
        for number, choice, token in messages.unpack_tokens(news.tokens):
            sent = self._sent.get(number)
            if sent is not None and choice in sent.choices:
                outputs.append(
                    RequestOutput(request_id=sent.request_id, choice=choice, ids=(token,))
                )
        for number, output in news.others:
            sent = self._sent.get(number)
            if sent is None:
                continue
            if output.refused and not output.request_id:
                self._end(number, output.error, refused=True)
            elif output.choice in sent.choices:
                outputs.append(output)
                if output.finish_reason is not None:
                    self._forget(number, output.choice)

    def _note(self, stats: EngineStats) -> None:
        self.stats = stats
        self._unseen_stats.append(stats)

    def _end(self, number: int, error: str | None, *, refused: bool = False) -> None:
        """End a request with an error."""
        sent = self._sent[number]
        times = RequestTimes(arrival=sent.arrival, finished=time.monotonic())
        for choice in sorted(sent.choices):
            self._ended.append(
                RequestOutput(
                    request_id=sent.request_id,
                    choice=choice,
                    finish_reason=FinishReason.ERROR,
                    error=error,
                    refused=refused,
                    times=times,
                )
            )
            self._forget(number, choice)

    def _forget(self, number: int, choice: int) -> None:
        sent = self._sent[number]
        sent.choices.discard(choice)
        if not sent.choices:
            del self._sent[number], self._numbers[sent.request_id]
