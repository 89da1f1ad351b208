"""From records to figures, with the names that `vllm bench serve` gives them in its JSON."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from polysilicon.bench.records import Record
from polysilicon.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
"""Names of the latencies in JSON and for people."""

_SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """Bounds, in ms, that a request must keep to count as good; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def holds(self, record: Record) -> bool:
        """Whether a completed request kept every bound; a single token has a TPOT of 0."""
        took = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        bounds = dataclasses.asdict(self).items()
        return all(bound is None or took[name] * 1e3 <= bound for name, bound in bounds)


def parse_goodput(texts: Sequence[str]) -> Goodput | None:
    """`ttft:300` and the like, also several in one text. Raises ConfigError for anything else."""
    bounds: dict[str, float] = {}
    for text in " ".join(texts).replace(",", " ").split():
        name, _, value = text.partition(":")
        try:
            bound = float(value)
        except ValueError:
            bound = -1.0
        if name not in _SLO_METRICS or not 0 <= bound < float("inf"):
            raise ConfigError(
                f"--goodput takes METRIC:MILLISECONDS with ttft, tpot or e2el, such as ttft:300, "
                f"not {text!r}"
            )
        bounds[name] = bound
    return Goodput(**bounds) if bounds else None


def latencies(records: Iterable[Record]) -> dict[str, list[float]]:
    """Every latency of the completed requests, in ms, by the names of `METRICS`."""
    completed = [record for record in records if record.failure is None]
    seconds = {
        "ttft": [record.ttft for record in completed],
        "tpot": [tpot for record in completed if (tpot := record.tpot) is not None],
        "itl": [gap for record in completed for gap in record.itls],
        "e2el": [record.latency for record in completed],
    }
    return {name: [value * 1e3 for value in values] for name, values in seconds.items()}


def failures(records: Iterable[Record]) -> dict[str, tuple[int, str]]:
    """How many requests failed of each cause, most frequent first, with the first one's message."""
    counts: collections.Counter[str] = collections.Counter()
    messages: dict[str, str] = {}
    for record in records:
        if record.failure is not None:
            counts[record.failure.cause] += 1
            messages.setdefault(record.failure.cause, record.failure.message)
    return {cause: (count, messages[cause]) for cause, count in counts.most_common()}


def summarise(
    records: Sequence[Record], *, duration: float, goodput: Goodput | None
) -> dict[str, Any]:
    """Figures of a run of `duration` seconds. Latencies are of completed requests alone and 0 where
    there are none, as in vLLM's JSON; `request_goodput` is None without bounds.

    Beyond vLLM's names: `failures` by cause, `total_cached_tokens` (prompt tokens that the server
    took from its prefix cache, where it says so), `tokens_counted_by` and `max_send_delay_ms`, by
    which the generator itself, or its bound on concurrency, sent a request late.
    """
    completed = [record for record in records if record.failure is None]
    output = sum(record.output_tokens for record in completed)
    prompt = sum(record.prompt_tokens for record in completed)
    good = sum(goodput.holds(record) for record in completed) if goodput else None
    delays = [record.sent - record.due for record in records]
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(completed),
        "failed": len(records) - len(completed),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(completed) / duration,
        "request_goodput": None if good is None else good / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_output_tokens_per_s": max(tokens_per_second(completed), default=0.0),
        "max_concurrent_requests": max_concurrency(completed),
    }
    for name, values in latencies(records).items():
        figures |= distribution(name, values)
    figures["failures"] = {cause: count for cause, (count, _) in failures(records).items()}
    figures["total_cached_tokens"] = sum(record.cached_tokens for record in completed)
    counted = all(record.counted for record in completed)
    figures["tokens_counted_by"] = "usage" if counted else "events"
    figures["max_send_delay_ms"] = max(delays, default=0.0) * 1e3
    return figures


def distribution(name: str, values: Sequence[float]) -> Mapping[str, float]:
    """Mean, median, standard deviation and percentiles, as `mean_NAME_ms` and so on."""
    array = np.array(values or [0.0])
    figures = {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
    }
    for percentile, value in zip(PERCENTILES, np.percentile(array, PERCENTILES), strict=True):
        figures[f"p{percentile}_{name}_ms"] = float(value)
    return figures


def tokens_per_second(records: Sequence[Record]) -> list[float]:
    """Tokens that came in each second since the first request was sent. A request's tokens are
    spread evenly over its pieces of output."""
    if not records:
        return []
    start = min(record.sent for record in records)
    times = np.concatenate([np.array(record.times) for record in records]) - start
    each = [record.output_tokens / max(1, len(record.times)) for record in records]
    weights = np.repeat(each, [len(record.times) for record in records])
    if not len(times):
        return []
    seconds: list[float] = np.bincount(times.astype(int), weights=weights).tolist()
    return seconds


def concurrency(records: Sequence[Record]) -> list[tuple[float, int]]:
    """How many requests were under way, as steps (seconds since the first was sent, count)."""
    if not records:
        return []
    start = min(record.sent for record in records)
    changes = [(record.sent - start, 1) for record in records]
    changes += [(record.sent + record.latency - start, -1) for record in records]
    changes.sort()
    running = np.cumsum([change for _, change in changes]).tolist()
    return [(at, count) for (at, _), count in zip(changes, running, strict=True)]


def max_concurrency(records: Sequence[Record]) -> int:
    return max((count for _, count in concurrency(records)), default=0)


def details(records: Sequence[Record]) -> dict[str, list[Any]]:
    """One entry a request, as with vLLM's `--save-detailed`; seconds."""
    first = min((record.sent for record in records), default=0.0)
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.ttft if record.times else 0.0 for record in records],
        "itls": [record.itls for record in records],
        "start_times": [record.sent - first for record in records],
        "errors": [
            f"{record.failure.cause}: {record.failure.message}" if record.failure else ""
            for record in records
        ],
    }
