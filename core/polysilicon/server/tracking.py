"""What happens to each request, told to whoever measures: metrics, the dashboard, logs, traces."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from polysilicon.request import SLO, FinishReason, Request, RequestOutput, RequestTimes


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Record:
    """One choice of a request, from its submission on. Times are seconds of time.monotonic() as
    this process saw them; started is time.time() at the submission.

    times: as the engine saw them, with the last news. slo: the request's or the server's default.
    """

    request: Request
    choice: int
    slo: SLO
    arrival: float
    started: float
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    times: RequestTimes | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds of each token after the first; None with fewer than two."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)

    @property
    def latency(self) -> float | None:
        """Seconds from submission to end."""
        return None if self.finished is None else self.finished - self.arrival

    @property
    def queued(self) -> float | None:
        """Seconds that the engine let it wait before its first step."""
        times = self.times
        if times is None or times.first_scheduled is None:
            return None
        return times.first_scheduled - times.arrival

    @property
    def prefilled(self) -> float | None:
        """Seconds from its first step to its first token."""
        times = self.times
        if times is None or times.first_scheduled is None or times.first_token is None:
            return None
        return times.first_token - times.first_scheduled

    @property
    def decoded(self) -> float | None:
        """Seconds from its first token to its end."""
        times = self.times
        if times is None or times.first_token is None or times.finished is None:
            return None
        return times.finished - times.first_token

    @property
    def met_slo(self) -> bool | None:
        """Whether it ended well and in time; None where it has no SLO or was given up."""
        if self.slo == SLO() or self.finish_reason is FinishReason.CANCELLED:
            return None
        if self.finish_reason is FinishReason.ERROR or self.ttft is None:
            return False
        in_time = self.slo.ttft is None or self.ttft * 1e3 <= self.slo.ttft
        if self.slo.tpot is not None and self.tpot is not None:
            in_time = in_time and self.tpot * 1e3 <= self.slo.tpot
        return in_time


class Sink(Protocol):
    """Takes what the tracker sees, at once and without waiting."""

    def tokens(self, record: Record, count: int, gap: float | None) -> None:
        """`count` tokens came; gap: seconds since the ones before, None with the first."""

    def ended(self, record: Record) -> None:
        """A choice has ended, whatever way."""


class Tracker:
    """Records of the requests that run. default_slo: of requests that bring none."""

    def __init__(self, sinks: Sequence[Sink], default_slo: SLO) -> None:
        self._sinks = tuple(sinks)
        self._default_slo = default_slo
        self._records: dict[str, dict[int, Record]] = {}

    @property
    def running(self) -> Iterator[Record]:
        """Records of what has not ended, in the order of submission."""
        for records in self._records.values():
            yield from records.values()

    def submitted(self, request: Request) -> None:
        now, started = time.monotonic(), time.time()
        self._records[request.id] = {
            choice: Record(
                request=request,
                choice=choice,
                slo=request.slo or self._default_slo,
                arrival=now,
                started=started,
            )
            for choice in range(request.params.n)
        }

    def news(self, output: RequestOutput) -> None:
        record = self._records.get(output.request_id, {}).get(output.choice)
        if record is None:
            return
        now = time.monotonic()
        if output.ids:
            gap = None if record.last_token is None else now - record.last_token
            if record.first_token is None:
                record.first_token = now
                record.cached_tokens = output.num_cached_tokens
            record.last_token = now
            record.output_tokens += len(output.ids)
            for sink in self._sinks:
                sink.tokens(record, len(output.ids), gap)
        if output.finish_reason is not None:
            record.error, record.times = output.error, output.times
            self._end(record, output.finish_reason, now)

    def abandoned(self, request_id: str) -> None:
        """Nobody listens to a request any more: what has not ended counts as cancelled."""
        for record in list(self._records.get(request_id, {}).values()):
            self._end(record, FinishReason.CANCELLED, time.monotonic())

    def _end(self, record: Record, reason: FinishReason, now: float) -> None:
        record.finish_reason, record.finished = reason, now
        records = self._records[record.request.id]
        del records[record.choice]
        if not records:
            del self._records[record.request.id]
        for sink in self._sinks:
            sink.ended(record)
