"""The last minutes, second by second, for the dashboard."""

from __future__ import annotations

import time
from collections import deque
from typing import TypedDict

import numpy as np

from polysilicon.engine.stats import EngineStats
from polysilicon.server.tracking import Record

SECONDS = 300
_WINDOW = 10.0
"""Seconds over which rates and percentiles are taken."""


class Point(TypedDict):
    """See History."""

    at: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    output_tokens: float
    prompt_tokens: float
    requests: float
    goodput: float | None
    running: int
    waiting: int
    kv_use: float
    prefix_hit_rate: float | None
    step_ms: float | None


class History:
    """A sink that keeps one point a second for five minutes. Rates are per second.

    A point: `at` (time.time()), `ttft_p50`, `ttft_p99`, `tpot_p50`, `tpot_p99` (ms, None without
    requests), `output_tokens`, `prompt_tokens`, `requests`, `goodput` (None without SLOs),
    `running`, `waiting`, `kv_use`, `prefix_hit_rate`, `step_ms`.
    """

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=SECONDS)
        self.stats = EngineStats()
        self._tokens: deque[tuple[float, int, int]] = deque()
        self._first: deque[tuple[float, float]] = deque()
        self._ended: deque[tuple[float, float | None, bool | None]] = deque()
        self._steps: deque[tuple[float, float]] = deque()
        self._prefix: deque[tuple[float, int, int]] = deque()

    def engine(self, stats: EngineStats) -> None:
        now = time.monotonic()
        self.stats = stats
        self._steps.extend((now, seconds) for seconds in stats.step_seconds)
        self._prefix.append((now, stats.prefix_queries, stats.prefix_hits))

    def tokens(self, record: Record, count: int, gap: float | None) -> None:
        now = time.monotonic()
        first = gap is None
        prompt = len(record.request.prompt) if first and record.choice == 0 else 0
        self._tokens.append((now, count, prompt))
        if first and record.ttft is not None:
            self._first.append((now, record.ttft))

    def ended(self, record: Record) -> None:
        self._ended.append((time.monotonic(), record.tpot, record.met_slo))

    def tick(self) -> None:
        """Make the point of this second."""
        now = time.monotonic()
        for events in (self._tokens, self._first, self._ended, self._steps, self._prefix):
            while events and events[0][0] < now - _WINDOW:
                events.popleft()
        ttft = [seconds for _, seconds in self._first]
        tpot = [seconds for _, seconds, _ in self._ended if seconds is not None]
        slo = [met for *_, met in self._ended if met is not None]
        steps = [seconds for _, seconds in self._steps]
        self.points.append(
            {
                "at": time.time(),
                "ttft_p50": _milliseconds(ttft, 50),
                "ttft_p99": _milliseconds(ttft, 99),
                "tpot_p50": _milliseconds(tpot, 50),
                "tpot_p99": _milliseconds(tpot, 99),
                "output_tokens": sum(count for _, count, _ in self._tokens) / _WINDOW,
                "prompt_tokens": sum(prompt for *_, prompt in self._tokens) / _WINDOW,
                "requests": len(self._ended) / _WINDOW,
                "goodput": sum(slo) / _WINDOW if slo else None,
                "running": self.stats.running,
                "waiting": self.stats.num_waiting,
                "kv_use": self.stats.kv_use,
                "prefix_hit_rate": self._hit_rate(),
                "step_ms": _milliseconds(steps, 50),
            }
        )

    def _hit_rate(self) -> float | None:
        """Share of prompt tokens of the window that the prefix cache had."""
        if not self._prefix:
            return None
        (_, queries, hits), (_, last_queries, last_hits) = self._prefix[0], self._prefix[-1]
        asked = last_queries - queries
        return (last_hits - hits) / asked if asked > 0 else None


def _milliseconds(seconds: list[float], percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else None
