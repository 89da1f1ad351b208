"""What the load generator writes down of each request."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a request did not complete. cause: one of few, such as `HTTP 503`, for counting;
    message: this request's own words."""

    cause: str
    message: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Record:
    """One request, in seconds of `time.perf_counter()`.

    prompt_tokens, output_tokens, cached_tokens: from the server's usage where `counted` is true,
    else what was asked for, one for each piece of output, and 0. due: when it was to be sent; sent:
    when it was, 0 before. times: when each piece of output came, one for each event of the stream
    that brings tokens; pieces that one read brought share a time. end: when the last event with a
    choice came.
    """

    prompt_tokens: int
    due: float = 0.0
    sent: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)
    end: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    counted: bool = False
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def latency(self) -> float:
        """From sending to the last token."""
        return (self.times[-1] if self.end is None else self.end) - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Times between pieces of output."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
