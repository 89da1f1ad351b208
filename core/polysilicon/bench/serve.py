"""Load on a server: requests sent at their times, and what came of them."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from polysilicon.bench.arrivals import arrivals
from polysilicon.bench.metrics import details, summarise
from polysilicon.bench.records import Failure, Record
from polysilicon.bench.settings import Settings
from polysilicon.bench.stream import CANNOT_CONNECT, stream
from polysilicon.bench.target import ServerError, Target, find_target
from polysilicon.bench.workloads import Item, salted, warm_up_prompts

_GIVE_UP_SECONDS = 10.0
"""A run ends when for so long nobody has listened at the server's address."""

_KEEPALIVE_SECONDS = 2.0
"""Below what servers allow, so that no request goes out on a connection that is being closed."""

Done = Callable[[Record], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run. not_sent: requests that the run ended before; ended: why it ended early, or None;
    interrupted: whether the user ended it. cpu_seconds: of this process."""

    records: Sequence[Record]
    duration: float
    cpu_seconds: float
    not_sent: int
    ended: str | None
    interrupted: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A run with its figures, by the names of `vllm bench serve`."""

    run: Run
    figures: Mapping[str, Any]


async def measure(
    settings: Settings,
    *,
    found: Callable[[Target], None],
    done: Done,
) -> AsyncIterator[Result]:
    """Run the workload at each rate, one after another, with other tokens each time.

    `found` is told how the server is asked, `done` each request as it ends. A cancel (Ctrl-C) ends
    the run under way, whose result still comes, and with it the iterator. Raises ServerError when
    the server cannot be measured at all or fails the warm-up.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
    timeout = aiohttp.ClientTimeout(total=settings.timeout)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=settings.headers
    ) as session:
        target = await find_target(
            session,
            url=settings.url,
            model=settings.model,
            endpoint=settings.endpoint,
            prompt_form=settings.prompt_form,
            vocab_size=settings.vocab_size,
            extra=settings.extra,
        )
        found(target)
        await _warm_up(session, target, settings)
        for index, rate in enumerate(settings.rates):
            items = salted(settings.items, index)
            times = _times(settings, rate)
            run = await _run(session, target, items, times, settings.max_concurrency, done)
            figures = _header(settings, target, rate) | summarise(
                run.records, duration=run.duration, goodput=settings.goodput
            )
            figures["not_sent"] = run.not_sent
            figures["client_cpu_seconds"] = run.cpu_seconds
            yield Result(run=run, figures=figures)
            if run.interrupted:
                return


def detailed(result: Result) -> dict[str, Any]:
    """The figures with one entry a request behind them."""
    return {**result.figures, **details(result.run.records)}


def _times(settings: Settings, rate: float | None) -> list[float]:
    if rate is None:
        return [item.at or 0.0 for item in settings.items]
    return arrivals(
        len(settings.items),
        rate=rate,
        burstiness=settings.burstiness,
        ramp_up=settings.ramp_up,
        seed=settings.seed,
    )


def _arrivals(settings: Settings, rate: float | None) -> str:
    """The name of the way in which requests come."""
    if rate is None:
        return "trace"
    if settings.ramp_up is not None:
        return "ramp-up"
    return "all at once" if math.isinf(rate) else "rate"


async def _warm_up(session: aiohttp.ClientSession, target: Target, settings: Settings) -> None:
    if not settings.warm_ups:
        return
    items = warm_up_prompts(settings.items, settings.warm_ups, settings.seed)
    times = [0.0] * len(items)
    run = await _run(session, target, items, times, settings.max_concurrency, lambda record: None)
    if run.interrupted:
        raise asyncio.CancelledError
    for record in run.records:
        if record.failure is not None:
            failure = record.failure
            raise ServerError(f"the warm-up failed: {failure.cause}: {failure.message}")


async def _run(
    session: aiohttp.ClientSession,
    target: Target,
    items: Sequence[Item],
    times: Sequence[float],
    max_concurrency: int | None,
    done: Done,
) -> Run:
    """Send each item at its time, or as soon after as the bound on concurrency lets it."""
    gc.collect()
    gc.freeze()
    try:
        return await _Sender(session, target, max_concurrency, done).run(items, times)
    finally:
        gc.unfreeze()


class _Sender:
    """The requests of one run."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        max_concurrency: int | None,
        done: Done,
    ) -> None:
        self.session = session
        self.target = target
        self.places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self.done = done
        self.records: list[Record] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.contact = time.perf_counter()
        """When the server was last seen to be there."""
        self.refused = False
        """Whether the last request found nobody listening."""

    async def run(self, items: Sequence[Item], times: Sequence[float]) -> Run:
        interrupted = False
        ended = None
        cpu = time.process_time()
        start = self.contact = time.perf_counter()
        try:
            for item, at in zip(items, times, strict=True):
                body = self.target.body(item)
                # Without a delay, this lets the requests so far be written.
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                if self.places is not None:
                    await self.places.acquire()
                if self.refused and time.perf_counter() - self.contact > _GIVE_UP_SECONDS:
                    ended = f"for {_GIVE_UP_SECONDS:.0f} s nobody has listened at {self.target.url}"
                    break
                record = Record(prompt_tokens=item.prompt_tokens, due=start + at)
                self.records.append(record)
                task = asyncio.create_task(self._send(record, body))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            await asyncio.gather(*self.tasks)
        except asyncio.CancelledError:
            interrupted, ended = True, "interrupted"
            await self._cancel()
            self.records = [record for record in self.records if record.sent]
        return Run(
            records=self.records,
            duration=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu,
            not_sent=len(items) - len(self.records),
            ended=ended,
            interrupted=interrupted,
        )

    async def _send(self, record: Record, body: bytes) -> None:
        try:
            await stream(record, self.session, self.target.address, body)
        except asyncio.CancelledError:
            record.failure = Failure(cause="interrupted", message="the run was ended")
            raise
        else:
            failure = record.failure
            self.refused = failure is not None and failure.cause == CANNOT_CONNECT
            if not self.refused:
                self.contact = time.perf_counter()
            self.done(record)
        finally:
            if self.places is not None:
                self.places.release()

    async def _cancel(self) -> None:
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        own = asyncio.current_task()
        assert own is not None
        own.uncancel()


def _header(settings: Settings, target: Target, rate: float | None) -> dict[str, Any]:
    """What was run, by the names of vLLM's JSON; `inf` where there is no rate."""
    ramp_up = settings.ramp_up
    header: dict[str, Any] = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if target.endpoint == "chat" else "openai",
        "backend": "openai-chat" if target.endpoint == "chat" else "openai",
        "model_id": target.model,
        "tokenizer_id": None,
        "num_prompts": len(settings.items),
        "request_rate": "inf" if rate is None or math.isinf(rate) else rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "url": target.url,
        "workload": settings.workload,
        "arrivals": _arrivals(settings, rate),
        "prompts": target.form_of(settings.items),
        "seed": settings.seed,
    }
    if ramp_up is not None:
        header |= {
            "ramp_up_strategy": ramp_up.strategy,
            "ramp_up_start_rps": ramp_up.start_rps,
            "ramp_up_end_rps": ramp_up.end_rps,
        }
    if settings.goodput is not None:
        header["goodput"] = dataclasses.asdict(settings.goodput)
    return header
