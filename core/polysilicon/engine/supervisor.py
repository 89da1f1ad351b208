"""Keeps an engine process running: starts it, watches it, starts it again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from polysilicon import errors
from polysilicon.config import Config
from polysilicon.engine import messages
from polysilicon.engine.child import Child
from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.health import Health
from polysilicon.engine.process import Socket
from polysilicon.engine.remote import RemoteEngine
from polysilicon.errors import PolysiliconError, ServiceUnavailable
from polysilicon.plugins import describe_exception
from polysilicon.progress import Advance, Progress, no_progress

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_END_SECONDS = 5.0
_LAST_NEWS_SECONDS = 0.05
_LONGEST_BACKOFF = 30.0
_RESTARTS_SECONDS = 600.0


class Supervisor:
    """Owns the engine process of one model; everything is called from one event loop.

    engine: what requests go through; it stays the same over restarts. restarts: how many there
    were. A process that dies, or makes no step within `step_timeout` while work waits, is started
    again at once, and after further deaths with growing delays; with more than `max_restarts` in
    ten minutes it is given up.
    """

    def __init__(self, config: Config, path: Path, changed: Callable[[], None]) -> None:
        """changed: called when `engine` has news."""
        self.engine = RemoteEngine()
        self.restarts = 0
        self.facts: ModelFacts | None = None
        self._config = config
        self._path = path
        self._changed = changed
        self._context: zmq.Context[Socket] = zmq.Context()
        self._child: Child | None = None
        self._watching: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque()
        self._draining = False
        self._back = 0.0
        self._cause = ""
        self._health = Health(state="starting", reason="the engine has not been started")

    @property
    def health(self) -> Health:
        if self._draining and self._health.ready:
            return Health(state="draining", reason="the server is shutting down")
        if self._child is not None and self._child.failed is not None:
            return Health(state="restarting", reason=self._child.failed.reason)
        return self._health

    @property
    def retry_after(self) -> float | None:
        """Seconds until a restart should be over; None when there is none."""
        if self._draining or self.health.state not in ("starting", "restarting"):
            return None
        return max(1.0, self._back - time.monotonic())

    async def start(self, progress: Progress = no_progress) -> None:
        """Start the first process and wait until it is ready. Raises the PolysiliconError that it
        ends with; nothing is left running then."""
        try:
            with progress(f"loading {self._path.name}") as advance:
                await self._launch(advance)
        except BaseException as error:
            await self.close(str(error))
            raise
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watched)

    def drain(self) -> None:
        """From now on an engine that dies is not started again."""
        self._draining = True

    async def close(self, reason: str = "the server is shutting down") -> None:
        """End the process; requests that it has end with an error. Closing twice does nothing."""
        self._draining = True
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        child, self._child = self._child, None
        if child is not None:
            if self._health.ready:
                child.send(messages.End())
                await asyncio.wait({child.exited}, timeout=_END_SECONDS)
            child.close()
            await asyncio.wait({child.exited}, timeout=_END_SECONDS)
        self._fail(reason)
        if not self._context.closed:
            self._context.term()

    async def _launch(self, advance: Advance) -> None:
        """Start a process and wait until it is ready. Raises what it ends with before that."""
        ready: asyncio.Future[ModelFacts] = asyncio.get_running_loop().create_future()

        def take_reports() -> None:
            for report in child.receive():
                if isinstance(report, messages.Loading):
                    share = report.done / max(report.total, 1)
                    self._say(f"the model is {share:.0%} loaded")
                    advance(report.done, report.total)
                elif isinstance(report, messages.Ready) and not ready.done():
                    ready.set_result(report.facts)

        self._say("the engine is starting")
        try:
            child = Child(self._config, self._path, self._context, take_reports)
        except OSError as error:
            raise ServiceUnavailable(f"the engine process cannot start: {error}") from error
        self._child = child
        waited: set[asyncio.Future[Any]] = {ready, child.exited}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await asyncio.sleep(_LAST_NEWS_SECONDS)
            take_reports()
            self._child = None
            child.close()
            raise _startup_error(child)
        self.facts = ready.result()
        child.on_readable = self._changed
        self.engine.attach(child, self.facts)
        self._health = Health(state="ready")

    async def _watch(self) -> None:
        while True:
            child = self._child
            assert child is not None
            await self._until_death(child)
            self._health = Health(state="restarting", reason="the engine has died")
            self._back = time.monotonic() + (self.facts.load_seconds if self.facts else 1)
            # What it said last may still be on its way.
            await asyncio.sleep(_LAST_NEWS_SECONDS)
            self._changed()
            self._cause = child.cause()
            self._child = None
            child.close()
            self.engine.lose(self._cause)
            self._changed()
            while True:
                self._health = Health(state="restarting", reason=self._cause)
                delay = self._delay()
                if self._draining:
                    self._fail(self._cause)
                    return
                if delay is None:
                    logger.error("%s; it is given up after so many deaths", self._cause)
                    self._fail(
                        f"{self._cause}; it is not started again after {len(self._deaths)} deaths "
                        "in ten minutes (--max-restarts): mend the cause and start the server again"
                    )
                    return
                logger.error("%s; it is started again", self._cause)
                loading = self.facts.load_seconds if self.facts else 1
                self._back = time.monotonic() + delay + loading
                await asyncio.sleep(delay)
                try:
                    await self._launch(lambda done, total: None)
                    break
                except PolysiliconError as error:
                    self._cause = str(error)
            self.restarts += 1

    def _watched(self, task: asyncio.Task[None]) -> None:
        """Nobody watches any more: an error of our own must not pass for a healthy engine."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"the supervisor failed: {describe_exception(error)}")

    async def _until_death(self, child: Child) -> None:
        timeout = self._config.step_timeout
        while not child.exited.done():
            await asyncio.wait({child.exited}, timeout=min(_WATCH_SECONDS, timeout / 4))
            # What has arrived while this process was held up counts.
            self._changed()
            waited = time.monotonic() - self.engine.last_step
            if self.engine.has_work and waited > timeout:
                child.kill(f"it made no step for {waited:.0f} seconds while work waited")
                self._health = Health(state="restarting", reason="the engine hangs")

    def _delay(self) -> float | None:
        """Seconds to wait after this death; None when there were too many."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - _RESTARTS_SECONDS:
            self._deaths.popleft()
        count = len(self._deaths)
        if count > self._config.max_restarts:
            return None
        return 0.0 if count == 1 else min(2.0 ** (count - 2), _LONGEST_BACKOFF)

    def _say(self, progress: str) -> None:
        """How a start is getting on, behind what the engine before died of."""
        reason = f"{self._cause}; now {progress}" if self._cause else progress
        self._health = Health(state=self._health.state, reason=reason)

    def _fail(self, reason: str) -> None:
        self._health = Health(state="failed", reason=reason)
        self.engine.lose(reason)
        self._changed()


def _startup_error(child: Child) -> PolysiliconError:
    """What a process ended with that never became ready."""
    if child.failed is not None and child.failed.kind:
        kind = getattr(errors, child.failed.kind, None)
        if isinstance(kind, type) and issubclass(kind, PolysiliconError):
            return kind(child.failed.reason)
    return ServiceUnavailable(child.cause())
