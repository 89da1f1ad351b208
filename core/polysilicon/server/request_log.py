"""One line of JSON a request, with its own times."""

from __future__ import annotations

import json
import logging

from polysilicon.server.tracking import Record

LOGGER_NAME = "polysilicon.requests"
logger = logging.getLogger(LOGGER_NAME)


class RequestLog:
    """A sink that writes a line for every choice that ended. Texts are never logged."""

    def tokens(self, record: Record, count: int, gap: float | None) -> None:
        """Nothing is written before the end."""

    def ended(self, record: Record) -> None:
        assert record.finish_reason is not None
        line = {
            "request": record.request.id,
            "choice": record.choice,
            "finish_reason": record.finish_reason.value,
            "error": record.error,
            "prompt_tokens": len(record.request.prompt),
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "queue_ms": _milliseconds(record.queued),
            "ttft_ms": _milliseconds(record.ttft),
            "tpot_ms": _milliseconds(record.tpot),
            "e2e_ms": _milliseconds(record.latency),
            "preemptions": record.times.num_preemptions if record.times else 0,
            "met_slo": record.met_slo,
        }
        logger.info(json.dumps({name: value for name, value in line.items() if value is not None}))


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
