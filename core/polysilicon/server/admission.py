"""Which requests are let in: 503 before memory is gone, and before waiting has become pointless."""

from __future__ import annotations

import time
from collections import deque

from polysilicon.config import Config
from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.stats import EngineStats
from polysilicon.errors import Overloaded
from polysilicon.request import Request

_FIRST_GUESS = 256.0
_FORGETTING = 0.9
_RATE_ENDS = 64
_LONGEST_RETRY = 60.0


class Admission:
    """Counts what waits, in sequences and in KV pages, and how fast it goes.

    A request is let in while fewer than `max_waiting` sequences wait for room to run, and while the
    KV pages that waiting requests will need, prompts and what answers have had on average, stay
    below `max_waiting_kv` times the whole cache; one that waits alone is always let in.
    """

    def __init__(self, config: Config) -> None:
        self._max_waiting = config.max_waiting
        self._max_waiting_kv = config.max_waiting_kv
        self._waiting_pages: dict[str, int] = {}
        self._output_tokens = _FIRST_GUESS
        self._ends: deque[float] = deque(maxlen=_RATE_ENDS)

    def check(
        self, request: Request, *, sequences: int, facts: ModelFacts, stats: EngineStats
    ) -> None:
        """Raises Overloaded. sequences: those in the engine and on their way to it."""
        # Where something waits for room, what runs is all that there is room for.
        room = stats.running if stats.waiting.get("capacity") else facts.max_sequences
        waiting = sequences + 1 - room
        if waiting > self._max_waiting:
            raise Overloaded(
                f"{waiting - 1} sequences wait already (--max-waiting {self._max_waiting}): try "
                "again later",
                retry_after=self._retry_after(waiting),
            )
        pages = sum(self._waiting_pages.values())
        most = self._max_waiting_kv * facts.kv_pages
        if pages and pages + self._pages(request, facts) > most:
            raise Overloaded(
                f"the requests that wait need {pages} KV pages already (--max-waiting-kv "
                f"{self._max_waiting_kv:g} allows {most:.0f}): try again later",
                retry_after=self._retry_after(waiting),
            )

    def entered(self, request: Request, facts: ModelFacts) -> None:
        """The request was given to the engine."""
        self._waiting_pages[request.id] = self._pages(request, facts)

    def started(self, request: Request) -> None:
        """The request has had its first news: it runs, or has ended."""
        self._waiting_pages.pop(request.id, None)

    def ended(self, request: Request, output_tokens: int) -> None:
        """The request has ended, after so many tokens of all its choices."""
        self.started(request)
        self._ends.append(time.monotonic())
        new = output_tokens / request.params.n
        self._output_tokens = _FORGETTING * self._output_tokens + (1 - _FORGETTING) * new

    def _pages(self, request: Request, facts: ModelFacts) -> int:
        """KV pages that a request will probably need; choices share the prompt's."""
        prompt, params = len(request.prompt), request.params
        most = facts.max_length - prompt
        if params.max_tokens is not None:
            most = min(most, params.max_tokens)
        output = min(most, self._output_tokens) * params.n
        return -int(-(prompt + output) // facts.page_size)

    def _retry_after(self, waiting: int) -> float:
        """Seconds in which half of what waits should have come to run, at the latest rate."""
        if len(self._ends) < 2:
            return 1.0
        rate = len(self._ends) / max(time.monotonic() - self._ends[0], 1e-3)
        return min(max(waiting / 2 / rate, 1.0), _LONGEST_RETRY)
